# SPDX-License-Identifier: Apache-2.0
"""quantize_query and quantize_kv: low-bit operands from bf16/fp16 tokens, without a cache."""

from __future__ import annotations

import torch

from mpfa.backends import reference
from mpfa.config import KVCacheConfig, check_is_config
from mpfa.errors import HALF_DTYPES, check_indptr, check_tensor
from mpfa.quantized import QuantizedKV, QuantizedQuery
from mpfa.stats import SmoothingStats, check_is_stats, request_rows, resolve_stats
from mpfa.support import require_reference_device


def quantize_query(
    q: torch.Tensor,
    config: KVCacheConfig,
    stats: SmoothingStats | None = None,
    batch_indices: torch.Tensor | None = None,
) -> QuantizedQuery:
    """Quantise query tokens for ``config`` (paper equations 1, 7, 8; RFC: e4m3 + ue8m0 per 32).

    Args:
        q: bf16/fp16 [nnz, Hq, D], post-RoPE; never modified. Must be finite.
        config: "qk4pv8" or "mxfp8"; a bf16 cache takes q as it is.
        stats: needed when config.compensation is not "none".
        batch_indices: int32 [nnz], row of per-request stats for each token; required then.

    Returns:
        QuantizedQuery of nnz tokens, for a run() with the same config and stats.

    Raises:
        ValueError: wrong shape, dtype, device or stride, missing stats or batch_indices, NaN/Inf.
        GPUArchitectureError: neither CPU tensors nor a CUDA GPU of compute capability 8.0 or later.
            On CUDA values are not checked (no synchronisation): a token whose row in batch_indices
            does not exist is quantised with row 0, NaN and Inf counting as 0.
    """
    check_is_config(config)
    check_tensor("q", q, shape=("nnz", config.num_qo_heads, config.head_dim), dtype=HALF_DTYPES)
    if q.device.type != "cuda":
        require_reference_device("quantize_query", q.device)
    if config.format == "bf16":
        raise ValueError("config.format: 'bf16' has no quantised query; pass q to run() unchanged")
    stats, rows = resolve_stats(config, stats, batch_indices, q.shape[0], q.device)
    if q.device.type == "cuda":
        from mpfa.backends import cuda

        cuda.require_capability("quantize_query", q.device)
        return cuda.quantize_query(q, config, stats, rows)
    return reference.quantize_query(q, config, stats, rows)


def quantize_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    config: KVCacheConfig,
    indptr: torch.Tensor,
    stats: SmoothingStats | None = None,
) -> QuantizedKV:
    """Quantise ragged K and V for a prefill without pages.

    Args:
        k, v: bf16/fp16 [nnz, Hkv, D], post-RoPE; never modified. Must be finite.
        config: "qk4pv8" or "mxfp8".
        indptr: int32 [B+1], token offsets of the requests; MXFP8 V blocks restart at each of them.
        stats: needed when config.compensation is not "none"; per-request stats have B rows.

    Returns:
        QuantizedKV of nnz tokens, for a run() after a ragged plan with the same indptr.

    Raises:
        ValueError: wrong shape, dtype, device, stride or indptr, missing stats, NaN/Inf.
        GPUArchitectureError: neither CPU tensors nor a CUDA GPU of compute capability 8.0 or later.
            On CUDA values are not checked; indptr is copied to the host.
    """
    check_is_config(config)
    shape = ("nnz", config.num_kv_heads, config.head_dim)
    check_tensor("k", k, shape=shape, dtype=HALF_DTYPES)
    check_tensor("v", v, shape=(k.shape[0], *shape[1:]), dtype=HALF_DTYPES, device=k.device)
    if k.device.type != "cuda":
        require_reference_device("quantize_kv", k.device)
    if config.format == "bf16":
        raise ValueError("config.format: 'bf16' needs no quantisation; pass (k, v) to run()")
    bounds = check_indptr("indptr", indptr, k.shape[0])
    rows = None
    if stats is not None and not check_is_stats(stats).is_static:
        rows = request_rows(bounds).to(k.device)
        stats.check_against(config, device=k.device, batch_size=len(bounds) - 1)
    stats, rows = resolve_stats(config, stats, rows, k.shape[0], k.device)
    if k.device.type == "cuda":
        from mpfa.backends import cuda

        cuda.require_capability("quantize_kv", k.device)
        return cuda.quantize_kv(k, v, config, indptr.clone(), bounds, stats)
    return reference.quantize_kv(k, v, config, indptr.clone(), bounds, stats, rows)
