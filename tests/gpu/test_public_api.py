# SPDX-License-Identifier: Apache-2.0
"""The public functions on CUDA tensors give the bytes that they give on CPU tensors; the wrappers,
where the GPU has attention kernels, the reference's results."""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    Batch,
    assert_lse_close,
    config_for,
    head_rel_l2,
    make_batch,
    offsets,
    paged,
    static_stats,
)

import mpfa
from mpfa.backends import kernels

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
CONFIGS = [
    mpfa.KVCacheConfig("qk4pv8", 2, 128, 128, 8),
    mpfa.KVCacheConfig("qk4pv8", 2, 64, 16, 6, "mean"),
    mpfa.KVCacheConfig("qk4pv8", 2, 128, 64, 8, "mean+channels", 15, four_over_six=True),
    mpfa.KVCacheConfig("mxfp8", 2, 128, 64, 8),
]
IDS = [f"{c.format}-{c.compensation}-ps{c.page_size}" for c in CONFIGS]
TOKENS = 300


def raw(t: torch.Tensor) -> torch.Tensor:
    return t.cpu().contiguous().view(torch.uint8)


def activations(config: mpfa.KVCacheConfig):
    torch.manual_seed(0)
    shape = (TOKENS, config.num_kv_heads, config.head_dim)
    q = torch.randn(TOKENS, config.num_qo_heads, config.head_dim) * 2
    k, v = torch.randn(shape) + 3 * torch.randn(shape[1:]), torch.randn(shape)
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
@pytest.mark.parametrize("per_request", [False, True], ids=["static", "per request"])
def test_append_and_quantise(config: mpfa.KVCacheConfig, per_request: bool) -> None:
    q, k, v = activations(config)
    indptr = torch.tensor([0, 100, 100, TOKENS], dtype=torch.int32)
    stats = rows = None
    if config.needs_stats:
        stats = mpfa.calibrate([(q, k)], channels=config.channels)
    if config.uses_mean and per_request:
        stats = mpfa.SmoothingStats.from_tensors(q, k, indptr, channel_index=stats.channel_index)
        rows = torch.repeat_interleave(torch.arange(3), indptr.diff()).to(torch.int32)
    slots = torch.arange(TOKENS)
    if config.format == "qk4pv8":
        slots[5::7] = -1
    pages = -(-TOKENS // config.page_size)
    results = []
    for device in (torch.device("cpu"), DEVICE):
        own = None if stats is None else stats.to(device)
        cache = mpfa.PagedKVCache.allocate(config, pages, device)
        query = mpfa.append_paged_kv_cache(
            k.to(device),
            v.to(device),
            cache,
            slots.to(device),
            stats=own,
            batch_indices=None if rows is None else rows.to(device),
            q=q.to(device),
        )
        ragged = mpfa.quantize_kv(k.to(device), v.to(device), config, indptr.to(device), own)
        parts = {f"cache.{n}": t for n, t in cache.tensors.items()}
        for owner, names in (
            (query, ("q", "q_scale", "a_comp", "row_term")),
            (ragged, ("k", "k_scale", "v", "v_scale", "aux_delta", "aux_channels")),
        ):
            parts |= {f"{type(owner).__name__}.{n}": getattr(owner, n) for n in names}
        results.append(parts)
    for name, expected in results[0].items():
        found = results[1][name]
        assert (expected is None) == (found is None), name
        if expected is not None and name != "cache.v_tail":
            assert torch.equal(raw(expected), raw(found)), name


def test_statistics_and_merge() -> None:
    q, k, _ = activations(CONFIGS[0])
    indptr = torch.tensor([0, 17, 17, TOKENS], dtype=torch.int32)
    host = mpfa.SmoothingStats.from_tensors(q, k, indptr)
    device = mpfa.SmoothingStats.from_tensors(q.to(DEVICE), k.to(DEVICE), indptr.to(DEVICE))
    torch.testing.assert_close(device.q_mean.cpu(), host.q_mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(device.k_mean.cpu(), host.k_mean, rtol=1e-6, atol=1e-7)
    v, lse = torch.randn(3, 5, 8, 64), torch.randn(3, 5, 8)
    lse[:, 0] = -torch.inf
    for base in ("log2", "ln"):
        want = mpfa.merge_states(v, lse, base)
        found = mpfa.merge_states(v.to(DEVICE), lse.to(DEVICE), base)
        for a, b in zip(want, found, strict=True):
            torch.testing.assert_close(b.cpu(), a, rtol=1e-6, atol=1e-6)


def test_what_has_no_kernel_says_so() -> None:
    major = torch.cuda.get_device_capability(DEVICE)[0]
    if kernels.backend_of_major(major) is None:
        workspace = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
        with pytest.raises(mpfa.GPUArchitectureError, match="prefill: no kernel for device cuda:0"):
            mpfa.BatchPrefillWrapper(workspace)
        assert not mpfa.supports(DEVICE, operation="decode", page_size=16)[0]
    cache = mpfa.PagedKVCache.allocate(mpfa.KVCacheConfig("bf16", 2, 64, 16, 2), 1, DEVICE)
    k = torch.zeros(1, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(mpfa.GPUArchitectureError, match="'bf16'"):
        mpfa.append_paged_kv_cache(k, k, cache, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    assert mpfa.supports(DEVICE, operation="append", page_size=16)[0]
    assert not mpfa.supports(DEVICE, operation="append", format="bf16", page_size=16)[0]


# ---- attention: what the wrappers dispatch to ---------------------------------------------------

COMPENSATIONS = {
    "mxfp8": [("none", 0)],
    "qk4pv8": [("none", 0), ("mean", 0), ("mean+channels", 15)],
}
ATTENTION = [
    pytest.param(kernel, *c, id=f"{kernel.backend}-{kernel.operation}-{c[0]}")
    for kernel in kernels.KERNELS
    if kernel.ready
    for c in COMPENSATIONS[kernel.format]
]
SINKS = torch.linspace(-3.0, 4.0, 6)


def require_kernel(kernel: kernels.AttentionKernel) -> None:
    major, minor = torch.cuda.get_device_capability(DEVICE)
    if major != kernel.major:
        pytest.skip(
            f"{kernel.backend} {kernel.operation} needs compute capability {kernel.major}.x, this GPU "
            f"has {major}.{minor}"
        )


def on(device: torch.device, value: object) -> object:
    """A cache, statistics, tensor or tuple of them on ``device``."""
    if isinstance(value, mpfa.PagedKVCache):
        tensors = {name: tensor.to(device) for name, tensor in value.tensors.items()}
        return mpfa.PagedKVCache(config=value.config, stats=on(device, value.stats), **tensors)
    if isinstance(value, tuple):
        return tuple(on(device, v) for v in value)
    return None if value is None else value.to(device)


def attend(kind: str, device: torch.device, backend: str, batch: Batch, args, options, kv, **run):
    """(wrapper, out, lse) of one plan() and run() with everything on ``device``."""
    cls = mpfa.BatchDecodeWrapper if kind == "decode" else mpfa.BatchPrefillWrapper
    num_sm = 148
    if device.type == "cuda":
        num_sm = torch.cuda.get_device_properties(device).multi_processor_count
    size = mpfa.workspace_size(*args, num_sm=num_sm, **options)
    wrapper = cls(torch.empty(size, dtype=torch.uint8, device=device), backend=backend)
    wrapper.plan(*on(device, args), **options)
    run = {name: on(device, value) for name, value in run.items()}
    q = batch.query.to(device)
    out = torch.full(q.shape, torch.nan, device=device)
    out, lse = wrapper.run(q, on(device, kv), out=out, return_lse=True, **run)
    return wrapper, out.cpu(), lse.cpu()


def assert_as_the_reference(kernel, kind: str, batch: Batch, args, options, kv, **run) -> None:
    inputs = (batch, args, options, kv)
    _, want, want_lse = attend(kind, torch.device("cpu"), "reference", *inputs, **run)
    for backend in ("auto", kernel.backend):
        wrapper, out, lse = attend(kind, DEVICE, backend, *inputs, **run)
        assert wrapper.backend == kernel.backend
        assert not out.isnan().any()
        # docs/numerics.md, "What the reference rounds": the bound of an fp32 output.
        assert head_rel_l2(out, want) <= 2e-3
        assert_lse_close(lse, want_lse, 2e-4)


@pytest.mark.parametrize("kernel,compensation,channels", ATTENTION)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_of_a_paged_cache(kernel, compensation, channels, head_dim) -> None:
    """Prefill chunks and split decode, causal, with sinks and a soft cap."""
    require_kernel(kernel)
    decode = kernel.operation == "decode"
    q_lens = [2, 2, 2] if decode else [5, 0, 200]
    batch = make_batch(q_lens, [300, 0, 1400], 6, 2, head_dim, seed=1, k_bias=3.0, outliers=4.0)
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, kernel.format, compensation, channels, 64)
    pages = paged(batch, config, stats=stats, seed=9)
    options = {**batch.heads, "config": config, "causal": True}
    args = pages.table
    if decode:
        options["q_len_per_request"] = 2
    else:
        args = (offsets(q_lens), *args)
    for extra in ({}, {"logits_soft_cap": 20.0, "window_left": 500}):
        inputs = (batch, args, {**options, **extra}, pages.cache)
        assert_as_the_reference(kernel, kernel.operation, *inputs, sinks=SINKS)


RAGGED = [p for p in ATTENTION if p.values[0].ragged]


@pytest.mark.parametrize("kernel,compensation,channels", RAGGED)
@pytest.mark.parametrize("split", [None, 1])
def test_attention_of_raw_ragged_operands(kernel, compensation, channels, split) -> None:
    """q, k and v as bf16: quantised into the workspace; "mean" with the means of the call."""
    require_kernel(kernel)
    q_lens, kv_lens = [5, 0, 200], [70, 9, 333]
    batch = make_batch(q_lens, kv_lens, 6, 2, 128, seed=2, k_bias=3.0, outliers=4.0)
    stats = None if compensation == "mean" else static_stats(batch, compensation, channels)
    config = config_for(batch, kernel.format, compensation, channels)
    options = {**batch.heads, "config": config, "causal": True, "fixed_split_pages": split}
    args = (offsets(q_lens), offsets(kv_lens))
    assert_as_the_reference(
        kernel, "prefill", batch, args, options, batch.kv, stats=stats, sinks=SINKS
    )
