# SPDX-License-Identifier: Apache-2.0
"""torch.ops.mpfa.*: fake implementations, tracing, and the messages of the bindings."""

import subprocess
import sys

import pytest
import quant_cases
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mpfa.backends import cuda
from mpfa.cache import PagedKVCache
from mpfa.config import KVCacheConfig

OPS = (
    "append_qk4pv8", "quantize_kv_qk4pv8", "quantize_query_qk4pv8", "append_mxfp8",
    "quantize_kv_mxfp8", "quantize_query_mxfp8", "segment_mean", "combine_partials", "merge_base2",
)  # fmt: skip


def test_every_op_declares_what_it_writes():
    for name in OPS:
        schema = getattr(torch.ops.mpfa, name).default._schema
        assert any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments), (
            name
        )
        assert not schema.returns


def test_append_on_fake_cuda_tensors():
    config = KVCacheConfig("qk4pv8", 2, 64, 16, 4)
    with FakeTensorMode():
        cache = PagedKVCache.allocate(config, 3, "cuda")
        k = torch.empty(5, 2, 64, dtype=torch.bfloat16, device="cuda")
        q = torch.empty(5, 4, 64, dtype=torch.bfloat16, device="cuda")
        slots = torch.empty(5, dtype=torch.int32, device="cuda")
        query = cuda.append(k, k, cache, slots, None, None, q)
        assert query.q.shape == (5, 4, 32) and query.device.type == "cuda"
        x = torch.empty(9, 2, 64, device="cuda")
        indptr = torch.empty(4, dtype=torch.int32, device="cuda")
        assert cuda.segment_mean(x, indptr).shape == (3, 2, 64)


def test_tracing_keeps_the_op():
    config = KVCacheConfig("mxfp8", 2, 64, 32, 4)

    def step(q):
        out = cuda.empty_query(q.shape[0], config, None, q.dtype, q.device)
        torch.ops.mpfa.quantize_query_mxfp8(q * 2, out.q, out.q_scale, False)
        return out.q

    graph = make_fx(step, tracing_mode="fake")(torch.zeros(3, 4, 64, dtype=torch.bfloat16))
    assert "quantize_query_mxfp8" in graph.code


def test_compiled_call_gives_the_same_bytes(simulated):
    case = quant_cases.Case("query", "qk4pv8", 9, compensation="mean", seed=3)
    inputs = quant_cases.build(case)
    stats = inputs.stats

    def step(q):
        query = cuda.empty_query(q.shape[0], case.config, stats, q.dtype, q.device)
        out = (query.q, query.q_scale, query.a_comp, query.row_term)
        torch.ops.mpfa.quantize_query_qk4pv8(
            q * 1.0, None, None, stats.q_mean, stats.k_mean, None, *out, 2, False, False
        )
        return out

    with simulated.options(device="10.0"):
        got = torch.compile(step, fullgraph=True, backend="aot_eager")(inputs.q)
        for a, b in zip(got, step(inputs.q), strict=True):
            assert torch.equal(a, b)


def make_append(**changes) -> list:
    config = KVCacheConfig("qk4pv8", 2, 64, 16, 4)
    cache = PagedKVCache.allocate(config, 3)
    k = torch.zeros(5, 2, 64, dtype=torch.bfloat16)
    given = {"k": k, "v": k, "q": None, "slot_mapping": torch.arange(5), "batch_indices": None,
             "q_mean": None, "k_mean": None, "channel_index": None, "k_pages": cache.k,
             "k_scale": cache.k_scale, "v_pages": cache.v, "aux_delta": None, "aux_channels": None,
             "q_out": None, "q_scale": None, "a_comp": None, "row_term": None}  # fmt: skip
    return [*(given | changes).values(), 4, False, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": torch.zeros(4, 2, 64, dtype=torch.bfloat16)}, r"v: must be of shape \[5, 2, 64\]"),
        ({"v": torch.zeros(5, 2, 64)}, "v: must be bfloat16 or float16.*float32"),
        ({"slot_mapping": torch.arange(5.0)}, "slot_mapping: must be int32 or int64"),
        ({"k_scale": torch.zeros(3, 2, 16, 3, dtype=torch.uint8)}, "k_scale: must be of shape"),
        ({"k_mean": torch.zeros(2, 64)}, "q_mean: must be given together with k_mean"),
        (
            {"k_mean": torch.zeros(6, 2, 64), "q_mean": torch.zeros(6, 4, 64)},
            "batch_indices: required with per-request statistics",
        ),
        (
            {"channel_index": torch.zeros(2, 17, dtype=torch.int32)},
            "channels: must be at most 16, or 15 with means, got 17",
        ),
        (
            {
                "k_mean": torch.zeros(0, 2, 64),
                "q_mean": torch.zeros(0, 4, 64),
                "batch_indices": torch.zeros(5, dtype=torch.int32),
            },
            "k_mean: must be of at least one row",
        ),
        (
            {"k": torch.zeros(5, 2, 96, dtype=torch.bfloat16)},
            "head_dim: must be one of 64, 128, 256, got 96",
        ),
    ],
)
def test_bindings_name_argument_value_and_what_is_allowed(simulated, changes, message):
    with pytest.raises(ValueError, match=message):
        torch.ops.mpfa.append_qk4pv8(*make_append(**changes))


def test_the_ragged_binding_checks_the_head_dimension(simulated):
    from mpfa.jit import cuda as jit
    from mpfa.jit import quant

    k = torch.zeros(5, 2, 128, dtype=torch.bfloat16)
    out = torch.zeros(5, 2, 128, dtype=torch.uint8)
    with pytest.raises(ValueError, match="head_dim: must be 64, got 128"):
        jit.load(quant.QK4PV8[64]).quantize_kv(
            k, k, None, None, None, None, out[..., :64], out[..., :8], out, None, None, 4, False,
            False,
        )  # fmt: skip


def test_host_tensors_are_refused_without_the_simulator(monkeypatch):
    monkeypatch.setattr(cuda, "_runtime_is_simulated", lambda: False)
    with pytest.raises(
        ValueError, match="append_qk4pv8: tensors must be on a CUDA device, got cpu"
    ):
        torch.ops.mpfa.append_qk4pv8(*make_append())
    x, indptr = torch.zeros(4, 1, 8), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="segment_mean: tensors must be on a CUDA device, got cpu"):
        cuda.segment_mean(x, indptr)


def test_which_runtime_is_loaded():
    """A process that loads none is not the simulator's; one that loads the simulator is."""
    code = (
        "from mpfa.backends import cuda; from mpfa import sim; "
        "before = cuda._runtime_is_simulated(); sim.simulator(); "
        "print(before, cuda._runtime_is_simulated())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
