# SPDX-License-Identifier: Apache-2.0
"""The public functions on CUDA tensors give the bytes that they give on CPU tensors. The attention
wrappers are in wrapper_runs.py."""

from __future__ import annotations

import pytest
import torch

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
