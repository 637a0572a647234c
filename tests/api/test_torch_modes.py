# SPDX-License-Identifier: Apache-2.0
"""Results do not depend on torch's process-wide modes: default dtype and device, autograd, inference."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest
import torch
from attention_cases import (
    FORMAT_IDS,
    FORMATS,
    assert_same_bits,
    config_for,
    make_batch,
    offsets,
    paged,
    static_stats,
    workspace_for,
)

import mpfa

EACH_FORMAT = pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=FORMAT_IDS)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    # As on a machine where the default device is a GPU: nothing may land there by accident.
    "device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


class Case:
    """One batch whose plans split KV, so that partial results are merged."""

    def __init__(self, format: str, compensation: str, channels: int) -> None:
        self.batch = make_batch([2, 2, 2], [300, 1, 140], 4, 2, 64, seed=71, k_bias=2.0)
        self.config = config_for(self.batch, format, compensation, channels, 64)
        self.stats = static_stats(self.batch, compensation, channels)
        self.pages = paged(self.batch, self.config, stats=self.stats)
        self.indptr = offsets(self.batch.qo_lens), offsets(self.batch.kv_lens)
        self.slots = torch.cat(self.pages.slots)
        self.sinks = torch.linspace(-1, 1, 4)
        self.query, self.kv = self.batch.query, self.batch.kv
        options = {**self.batch.heads, "config": self.config, "causal": True}
        options["logits_soft_cap"] = 30.0
        decode = {**options, "fixed_split_pages": 2, "q_len_per_request": 2}
        self.options, self.decode_options = options, decode
        self.space = workspace_for(*self.pages.table, **decode)
        self.ragged_space = workspace_for(*self.indptr, **options)

    def results(self) -> list[torch.Tensor]:
        query, kv = self.query, self.kv
        decode = mpfa.BatchDecodeWrapper(self.space)
        decode.plan(*self.pages.table, **self.decode_options)
        out = [*decode.run(query, self.pages.cache, sinks=self.sinks, return_lse=True)]
        ragged = mpfa.BatchPrefillWrapper(self.ragged_space)
        ragged.plan(*self.indptr, **self.options)
        out += ragged.run(query, kv, stats=self.stats, return_lse=True)
        if self.config.uses_mean and not self.config.uses_channels:
            out += ragged.run(query, kv, return_lse=True)
        mpfa.append_paged_kv_cache(*kv, self.pages.cache, self.slots)
        return [*out, *self.pages.cache.tensors.values()]


@EACH_FORMAT
def test_modes_change_no_bit(format, compensation, channels) -> None:
    case = Case(format, compensation, channels)
    want = [t.clone() for t in case.results()]
    for name, mode in MODES.items():
        with mode():
            got = case.results()
        assert len(got) == len(want)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert a.device.type == "cpu", (name, i)
            assert_same_bits(a, b)


@pytest.mark.parametrize("format", ["bf16", "qk4pv8", "mxfp8"])
def test_single_prefill_under_another_default_device(format) -> None:
    batch = make_batch([5], [40], 4, 2, 64, seed=72)
    want = mpfa.single_prefill(batch.q[0], batch.k[0], batch.v[0], format=format)
    with torch.device("meta"):
        got = mpfa.single_prefill(batch.q[0], batch.k[0], batch.v[0], format=format)
    assert_same_bits(got, want)


@EACH_FORMAT
def test_no_gradient_is_recorded(format, compensation, channels) -> None:
    """A model calls run() with parameters as sinks; no graph may grow in out or the workspace."""
    case = Case(format, compensation, channels)
    want = [t.clone() for t in case.results()]
    for t in (case.query, *case.kv):
        t.requires_grad_()
    case.sinks = torch.nn.Parameter(case.sinks)
    for a, b in zip(case.results(), want, strict=True):
        assert not a.requires_grad
        assert_same_bits(a, b)
    assert not case.space.requires_grad and not case.ragged_space.requires_grad


def test_statistics_of_parameters_have_no_gradient() -> None:
    q = torch.randn(7, 4, 64, requires_grad=True)
    k = torch.randn(7, 2, 64, requires_grad=True)
    stats = mpfa.SmoothingStats.from_tensors(q, k, offsets([3, 4]))
    assert not stats.q_mean.requires_grad and not stats.k_mean.requires_grad


def test_a_wrapper_planned_in_inference_mode_can_be_planned_outside() -> None:
    case = Case("bf16", "none", 0)
    wrapper = mpfa.BatchDecodeWrapper(case.space)
    with torch.inference_mode():
        wrapper.plan(*case.pages.table, **case.decode_options)
        want = wrapper.run(case.batch.query, case.pages.cache).clone()
    wrapper.plan(*case.pages.table, **case.decode_options)
    assert_same_bits(wrapper.run(case.batch.query, case.pages.cache), want)


def test_import_under_another_default_device() -> None:
    """A model file may be imported inside `with torch.device("meta")`."""
    code = (
        "import torch\n"
        "with torch.device('meta'):\n"
        "    import mpfa\n"
        "q = torch.ones(2, 2, 64, dtype=torch.bfloat16)\n"
        "assert (mpfa.single_prefill(q, q, q) == 1).all()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
