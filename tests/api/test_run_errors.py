# SPDX-License-Identifier: Apache-2.0
"""run(): order of calls, and every argument that disagrees with the plan."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import (
    config_for,
    int32,
    make_batch,
    offsets,
    paged,
    static_stats,
    workspace_for,
)

import mpfa


def prefill(paged_plan: bool = True, config=None, page_size: int = 64, **change):
    """(wrapper, batch, pages, config) with a plan that fits."""
    batch = make_batch([5, 7], [30, 100], 4, 2, 64, seed=31)
    config = config or config_for(batch, "qk4pv8", page_size=page_size)
    stats = static_stats(batch, config.compensation, config.channels)
    pages = paged(batch, config, stats=stats)
    args = (offsets(batch.qo_lens), *(pages.table if paged_plan else (offsets(batch.kv_lens),)))
    options = {**batch.heads, "config": config, **change}
    wrapper = mpfa.BatchPrefillWrapper(workspace_for(*args, **options))
    wrapper.plan(*args, **options)
    return wrapper, batch, pages, config


def decode(config=None, **change):
    batch = make_batch([2, 2], [30, 100], 4, 2, 64, seed=32)
    config = config or config_for(batch, "qk4pv8", page_size=64)
    pages = paged(batch, config)
    options = {**batch.heads, "page_size": 64, "config": config, "q_len_per_request": 2, **change}
    wrapper = mpfa.BatchDecodeWrapper(workspace_for(*pages.table, **options))
    wrapper.plan(*pages.table, **options)
    return wrapper, batch, pages, config


@pytest.mark.parametrize("cls", [mpfa.BatchPrefillWrapper, mpfa.BatchDecodeWrapper])
def test_run_before_plan(cls) -> None:
    wrapper = cls(torch.empty(1 << 20, dtype=torch.uint8))
    q = torch.zeros(1, 4, 64, dtype=torch.bfloat16)
    for call in (lambda: wrapper.run(q, None), lambda: wrapper.work_list, wrapper.plan_summary):
        with pytest.raises(RuntimeError, match=rf"{cls.__name__}: call plan\(\) before"):
            call()


def test_a_failed_first_plan_is_no_plan() -> None:
    wrapper = mpfa.BatchPrefillWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    heads = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    with pytest.raises(ValueError):
        wrapper.plan(int32([0, 2]), int32([0, -1]), **heads)
    with pytest.raises(RuntimeError, match="call plan"):
        wrapper.run(torch.zeros(2, 4, 64).bfloat16(), None)


Q_CASES = [
    (lambda q: q[:-1], ValueError, r"q: shape must be \[12, 4, 64\], got \[11, 4, 64\]"),
    (lambda q: torch.cat([q, q]), ValueError, r"q: shape must be \[12, 4, 64\], got \[24, 4, 64\]"),
    (lambda q: q[:, :2], ValueError, r"q: shape must be"),
    (lambda q: q[..., :32], ValueError, r"q: shape must be"),
    (lambda q: q.flatten(1), ValueError, r"q: shape must be"),
    (lambda q: q.float(), ValueError, r"q: dtype must be bfloat16 or float16, got float32"),
    (lambda q: q.to("meta"), ValueError, r"q: must be on device cpu, got meta"),
    (lambda q: q.mT.contiguous().mT, ValueError, r"q: the last dimension must be contiguous"),
    (lambda q: None, TypeError, r"q: expected a torch.Tensor, got NoneType"),
    (lambda q: q.tolist(), TypeError, r"q: expected a torch.Tensor, got list"),
]


@pytest.mark.parametrize("change,error,match", Q_CASES)
def test_q_must_match_the_plan(change, error, match) -> None:
    wrapper, batch, pages, _ = prefill()
    with pytest.raises(error, match=match):
        wrapper.run(change(batch.query), pages.cache)


@pytest.mark.parametrize("compensation", ["none", "mean"])
@pytest.mark.parametrize("change,error,match", Q_CASES)
def test_q_must_match_a_ragged_plan(change, error, match, compensation) -> None:
    """Also where run() computes the means of q itself."""
    config = mpfa.KVCacheConfig("qk4pv8", 2, 64, 64, 4, compensation)
    wrapper, batch, _, _ = prefill(False, config)
    with pytest.raises(error, match=match):
        wrapper.run(change(batch.query), batch.kv)


def test_results_must_not_share_memory() -> None:
    """Expanded or overlapping buffers cannot hold a result."""
    wrapper, batch, pages, _ = prefill()
    q = batch.query
    row = torch.empty(1, 4, 64, dtype=torch.bfloat16)
    flat = torch.empty(12 * 4 * 64, dtype=torch.bfloat16)
    for out in (row.expand(12, 4, 64), flat.as_strided((12, 4, 64), (128, 64, 1))):
        with pytest.raises(ValueError, match=r"out: its elements must not share memory"):
            wrapper.run(q, pages.cache, out=out)
    with pytest.raises(ValueError, match=r"lse: its elements must not share memory"):
        wrapper.run(q, pages.cache, lse=torch.empty(1, 4).expand(12, 4))
    with pytest.raises(ValueError, match=r"lse: its elements must not share memory"):
        wrapper.run(q, pages.cache, lse=torch.empty(48).as_strided((12, 4), (3, 1)))


def test_kv_of_another_kind_is_refused() -> None:
    wrapper, batch, pages, config = prefill()
    ragged, _, _, _ = prefill(False)
    quantised = mpfa.quantize_kv(*batch.kv, config, offsets(batch.kv_lens))
    q = batch.query
    for kv, error, match in (
        (batch.kv, ValueError, r"kv: the plan is paged, got a ragged \(k, v\) tuple"),
        (quantised, ValueError, "kv: the plan is paged, got ragged QuantizedKV"),
        (None, TypeError, "kv: expected PagedKVCache, QuantizedKV or a .* tuple, got NoneType"),
        (pages.cache.k, TypeError, "kv: expected PagedKVCache"),
        ((*batch.kv, 1), TypeError, "kv: expected PagedKVCache"),
        (list(batch.kv), TypeError, "kv: expected PagedKVCache"),
    ):
        with pytest.raises(error, match=match):
            wrapper.run(q, kv)
    with pytest.raises(ValueError, match="kv: the plan is ragged .* got a PagedKVCache"):
        ragged.run(q, pages.cache)
    decoder, batch, _, _ = decode()
    with pytest.raises((TypeError, ValueError), match="cache: "):
        decoder.run(batch.query, batch.kv)


@pytest.mark.parametrize(
    "change,match",
    [
        (lambda k, v: (k[:-1], v[:-1]), r"k: shape must be \[130, 2, 64\], got \[129, 2, 64\]"),
        (lambda k, v: (k, v[:-1]), r"v: shape must be \[130, 2, 64\]"),
        (lambda k, v: (k[:, :1], v[:, :1]), r"k: shape must be"),
        (lambda k, v: (k.float(), v), r"k: dtype"),
        (lambda k, v: (k, v.float()), r"v: dtype"),
        (lambda k, v: (k.to("meta"), v), r"k: must be on device cpu"),
        (lambda k, v: (k, v.mT.contiguous().mT), r"v: the last dimension must be contiguous"),
        (lambda k, v: (k, v[..., :32]), r"v: shape must be"),
    ],
)
def test_ragged_kv_must_match_the_plan(change, match) -> None:
    wrapper, batch, _, _ = prefill(False)
    with pytest.raises(ValueError, match=match):
        wrapper.run(batch.query, change(*batch.kv))


@pytest.mark.parametrize(
    "field,value",
    [
        ("format", "mxfp8"),
        ("format", "bf16"),
        ("compensation", "mean"),
        ("page_size", 128),
        ("num_qo_heads", 8),
        ("num_kv_heads", 1),
        ("head_dim", 128),
    ],
)
@pytest.mark.parametrize("kind", [prefill, decode])
def test_a_cache_of_another_config_is_refused(kind, field, value) -> None:
    wrapper, batch, _, config = kind()
    other = dataclasses.replace(config, **{field: value})
    cache = mpfa.PagedKVCache.allocate(other, 20, "cpu")
    with pytest.raises(
        ValueError, match=rf"\.config\.{field}: plan\(\) said .*, run\(\) got .*{value}"
    ):
        wrapper.run(batch.query, cache)


def test_channels_must_match_the_plan() -> None:
    config = mpfa.KVCacheConfig("qk4pv8", 2, 64, 64, 4, "channels", 3)
    wrapper, batch, _, _ = prefill(config=config)
    other = mpfa.KVCacheConfig("qk4pv8", 2, 64, 64, 4, "channels", 4)
    cache = mpfa.PagedKVCache.allocate(other, 20, "cpu")
    with pytest.raises(ValueError, match="kv.config.channels: plan.* said 3, run.* got 4"):
        wrapper.run(batch.query, cache)


@pytest.mark.parametrize("kind", [prefill, decode])
def test_without_a_config_in_plan_run_checks_what_it_can(kind) -> None:
    wrapper, batch, pages, _ = kind(config=None, **({"page_size": 64}))
    wrapper.run(batch.query, pages.cache)
    other = mpfa.KVCacheConfig("qk4pv8", 2, 64, 32, 4)
    with pytest.raises(ValueError, match="config.page_size"):
        wrapper.run(batch.query, mpfa.PagedKVCache.allocate(other, 20, "cpu"))


@pytest.mark.parametrize("kind", [prefill, decode])
def test_a_page_id_beyond_the_cache_is_refused(kind) -> None:
    """plan() does not know the cache; run() compares with its largest id, request named."""
    wrapper, batch, pages, config = kind()
    small = mpfa.PagedKVCache.allocate(config, int(pages.indices.max()), "cpu")
    top = int(pages.indices.max())
    where = pages.indices.tolist().index(top)
    request = 0 if where < int(pages.indptr[1]) else 1
    match = (
        rf"paged_kv_indices: page ids must be 0\.\.{top - 1} .*request {request} uses page {top}"
    )
    with pytest.raises(ValueError, match=match):
        wrapper.run(batch.query, small)


def test_a_cache_on_another_device_is_refused() -> None:
    wrapper, batch, pages, config = prefill()
    with pytest.raises(ValueError, match="kv: must be on device cpu, got meta"):
        wrapper.run(batch.query, mpfa.PagedKVCache.allocate(config, 20, "meta"))


@pytest.mark.parametrize(
    "name,value,error,match",
    [
        (
            "out",
            torch.zeros(11, 4, 64),
            ValueError,
            r"out: shape must be \[12, 4, 64\], got \[11, 4, 64\]",
        ),
        ("out", torch.zeros(12, 4, 64).double(), ValueError, "out: dtype must be"),
        ("out", torch.zeros(12, 4, 64, device="meta"), ValueError, "out: must be on device cpu"),
        (
            "out",
            torch.zeros(12, 64, 4).mT,
            ValueError,
            "out: the last dimension must be contiguous",
        ),
        ("out", 3, TypeError, "out: expected a torch.Tensor"),
        ("lse", torch.zeros(12, 3), ValueError, r"lse: shape must be \[12, 4\], got \[12, 3\]"),
        ("lse", torch.zeros(12, 4).bfloat16(), ValueError, "lse: dtype must be float32"),
        ("lse", torch.zeros(4, 12).mT, ValueError, "lse: the last dimension must be contiguous"),
        ("lse", torch.zeros(12, 4, device="meta"), ValueError, "lse: must be on device cpu"),
        ("lse", True, TypeError, "lse: expected a torch.Tensor"),
        ("sinks", torch.zeros(2), ValueError, r"sinks: shape must be \[4\], got \[2\]"),
        ("sinks", torch.zeros(4).bfloat16(), ValueError, "sinks: dtype must be float32"),
        ("sinks", torch.full((4,), torch.nan), ValueError, "sinks: must be -inf or below 2.3e38"),
        ("sinks", torch.full((4,), torch.inf), ValueError, "sinks: must be -inf or below 2.3e38"),
        ("sinks", torch.full((4,), 3e38), ValueError, "sinks: must be -inf or below 2.3e38"),
        ("sinks", torch.zeros(4, device="meta"), ValueError, "sinks: must be on device cpu"),
        ("sinks", [0.0] * 4, TypeError, "sinks: expected a torch.Tensor"),
        ("lse_base", "e", ValueError, "lse_base: must be one of 'log2', 'ln', got 'e'"),
        ("stats", 1.0, TypeError, "stats: expected SmoothingStats, got float"),
    ],
)
def test_bad_run_arguments(name, value, error, match) -> None:
    wrapper, batch, pages, _ = prefill()
    with pytest.raises(error, match=match):
        wrapper.run(batch.query, pages.cache, **{name: value})


def test_run_does_not_take_plan_options() -> None:
    """window_left at run() but not at plan() attended stale keys elsewhere (SGLang issue 31501)."""
    wrapper, batch, pages, _ = prefill()
    for name, value in (
        ("window_left", 3),
        ("causal", True),
        ("sm_scale", 1.0),
        ("logits_soft_cap", 1.0),
    ):
        with pytest.raises(TypeError, match=name):
            wrapper.run(batch.query, pages.cache, **{name: value})


def test_statistics_rules_of_run() -> None:
    config = mpfa.KVCacheConfig("qk4pv8", 2, 64, 64, 4, "mean")
    batch = make_batch([5, 7], [30, 100], 4, 2, 64, seed=31)
    stats = mpfa.SmoothingStats.from_tensors(
        batch.query, batch.kv[0], offsets([5, 7]), kv_indptr=offsets([30, 100])
    )
    pages = paged(batch, config, stats=stats)
    args = (offsets(batch.qo_lens), *pages.table)
    options = {**batch.heads, "config": config}
    wrapper = mpfa.BatchPrefillWrapper(workspace_for(*args, **options))
    wrapper.plan(*args, **options)
    q = batch.query
    with pytest.raises(
        ValueError, match="stats: compensation 'mean' needs SmoothingStats, got None"
    ):
        wrapper.run(q, pages.cache)
    three = mpfa.SmoothingStats(torch.zeros(3, 4, 64), torch.zeros(3, 2, 64))
    with pytest.raises(ValueError, match=r"stats: .*one row per request of the plan \(2\), got 3"):
        wrapper.run(q, pages.cache, stats=three)
    one = mpfa.SmoothingStats(torch.zeros(1, 4, 64), torch.zeros(1, 2, 64))
    with pytest.raises(ValueError, match=r"\(2\), got 1"):
        wrapper.run(q, pages.cache, stats=one)
    wrong = mpfa.SmoothingStats(torch.zeros(8, 64), torch.zeros(2, 64))
    with pytest.raises(ValueError, match=r"stats: q_mean/k_mean must end in \[4, 64\]/\[2, 64\]"):
        wrapper.run(q, pages.cache, stats=wrong)
    with pytest.raises(ValueError, match="stats: must be on device cpu, got meta"):
        wrapper.run(q, pages.cache, stats=stats.to("meta"))
    wrapper.run(q, pages.cache, stats=stats)


def test_raw_kv_with_channels_needs_stats() -> None:
    """Channels are static: run() cannot choose them per request."""
    config = mpfa.KVCacheConfig("qk4pv8", 2, 64, 64, 4, "mean+channels", 4)
    wrapper, batch, _, _ = prefill(False, config)
    with pytest.raises(
        ValueError, match="stats: compensation 'mean.channels' needs SmoothingStats"
    ):
        wrapper.run(batch.query, batch.kv)


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("format", ["qk4pv8", "mxfp8"])
def test_bad_values_in_raw_inputs_are_named(which, format) -> None:
    wrapper, batch, _, _ = prefill(False, mpfa.KVCacheConfig(format, 2, 64, 64, 4))
    tensors = {"q": batch.query, "k": batch.kv[0], "v": batch.kv[1]}
    tensors[which][10, 1, 7] = torch.nan
    with pytest.raises(ValueError, match=rf"\b{which}: .*\(10, 1, 7\)"):
        wrapper.run(tensors["q"], (tensors["k"], tensors["v"]))


def test_arguments_are_keyword_only() -> None:
    wrapper, batch, pages, _ = prefill()
    with pytest.raises(TypeError):
        wrapper.run(batch.query, pages.cache, None)
    with pytest.raises(TypeError):
        mpfa.BatchPrefillWrapper(torch.empty(16, dtype=torch.uint8), "reference")
    with pytest.raises(TypeError):
        wrapper.plan(int32([0, 1]), int32([0, 1]), None, None, 4, 2, 64)
