# SPDX-License-Identifier: Apache-2.0
"""Quantise, cache-write, statistics and combine kernels on CUDA tensors, as torch custom ops.

The ops are ``torch.ops.mpfa.*`` with fake implementations, so torch.compile traces through them.
They run on the current stream of their tensors' device, never synchronise, allocate nothing
(outputs are arguments) and can be captured into a CUDA graph once their module is loaded. Values
on the device are not inspected. A slot past the last page is skipped like a negative one; a row of
batch_indices that does not exist skips the token's K and V too. NaN or infinity gives unspecified
codes for its token (mxfp8: for its 32-token block of V).

Arguments were checked by the public functions; the bindings check again what memory safety needs.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
from torch import Tensor

from mpfa.cache import PagedKVCache
from mpfa.config import COMPENSATION_SLOTS, MX_BLOCK, NVFP4_BLOCK, KVCacheConfig
from mpfa.errors import GPUArchitectureError
from mpfa.planning import mean_slices as num_slices
from mpfa.quantized import QuantizedKV, QuantizedQuery, ragged_v_scale_rows
from mpfa.sim.build import SONAME
from mpfa.stats import SmoothingStats
from mpfa.support import MIN_CUDA_CAPABILITY

COMBINE_HEAD_DIMS = (64, 128, 256)

_LIBRARY = torch.library.Library("mpfa", "DEF")


def _bytes(t: Tensor | None) -> Tensor | None:
    """8-bit floats as uint8: the bindings take bytes."""
    return t if t is None or t.dtype == torch.uint8 else t.view(torch.uint8)


def _module(name: str) -> Any:
    from mpfa.jit import quant

    return getattr(quant, name)()


def _runtime_is_simulated() -> bool:
    """Is the loaded libcudart, which the modules bind to, the simulator's?"""
    try:
        runtime = ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD)
    except OSError:  # none is loaded
        return False
    return hasattr(runtime, "ptxsim_set")


def _op(schema: str):
    """Define ``mpfa::<name>`` with its implementation and a fake one; all ops return ().

    Host tensors reach the same bindings in a process whose CUDA runtime is the simulator's, and are
    refused in any other: a GPU would take their addresses for its own.
    """

    def register(implementation):
        name = schema.split("(", 1)[0]

        def on_host(*args) -> None:
            if not _runtime_is_simulated():
                raise ValueError(
                    f"{name}: tensors must be on a CUDA device, got cpu; only the simulator "
                    "(mpfa.sim) takes host tensors, and it is not this process's CUDA runtime"
                )
            implementation(*args)

        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, implementation, "CUDA")
        _LIBRARY.impl(name, on_host, "CPU")
        torch.library.register_fake(f"mpfa::{name}", lambda *args: None, lib=_LIBRARY)
        return implementation

    return register


@_op(
    "append_qk4pv8(Tensor k, Tensor v, Tensor? q, Tensor slot_mapping, Tensor? batch_indices, "
    "Tensor? q_mean, Tensor? k_mean, Tensor? channel_index, Tensor(a!) k_pages, Tensor(b!) k_scale, "
    "Tensor(c!) v_pages, Tensor(d!)? aux_delta, Tensor(e!)? aux_channels, Tensor(f!)? q_out, "
    "Tensor(g!)? q_scale, Tensor(h!)? a_comp, Tensor(i!)? row_term, int num_qo_heads, "
    "bool four_over_six, bool pdl) -> ()"
)
def _append_qk4pv8(
    k, v, q, slot_mapping, batch_indices, q_mean, k_mean, channel_index, k_pages, k_scale, v_pages,
    aux_delta, aux_channels, q_out, q_scale, a_comp, row_term, num_qo_heads, four_over_six, pdl,
) -> None:  # fmt: skip
    _module("qk4pv8").append(
        k, v, q, slot_mapping, batch_indices, q_mean, k_mean, channel_index, k_pages, k_scale,
        _bytes(v_pages), aux_delta, aux_channels, q_out, q_scale, a_comp, row_term, num_qo_heads,
        four_over_six, pdl,
    )  # fmt: skip


@_op(
    "quantize_kv_qk4pv8(Tensor k, Tensor v, Tensor? indptr, Tensor? q_mean, Tensor? k_mean, "
    "Tensor? channel_index, Tensor(a!) k_out, Tensor(b!) k_scale, Tensor(c!) v_out, "
    "Tensor(d!)? aux_delta, Tensor(e!)? aux_channels, int num_qo_heads, bool four_over_six, "
    "bool pdl) -> ()"
)
def _quantize_kv_qk4pv8(
    k, v, indptr, q_mean, k_mean, channel_index, k_out, k_scale, v_out, aux_delta, aux_channels,
    num_qo_heads, four_over_six, pdl,
) -> None:  # fmt: skip
    _module("qk4pv8").quantize_kv(
        k, v, indptr, q_mean, k_mean, channel_index, k_out, k_scale, _bytes(v_out), aux_delta,
        aux_channels, num_qo_heads, four_over_six, pdl,
    )  # fmt: skip


@_op(
    "quantize_query_qk4pv8(Tensor q, Tensor? batch_indices, Tensor? indptr, Tensor? q_mean, "
    "Tensor? k_mean, Tensor? channel_index, Tensor(a!) q_out, Tensor(b!) q_scale, "
    "Tensor(c!)? a_comp, Tensor(d!)? row_term, int num_kv_heads, bool four_over_six, bool pdl) -> ()"
)
def _quantize_query_qk4pv8(
    q, batch_indices, indptr, q_mean, k_mean, channel_index, q_out, q_scale, a_comp, row_term,
    num_kv_heads, four_over_six, pdl,
) -> None:  # fmt: skip
    _module("qk4pv8").quantize_query(
        q, batch_indices, indptr, q_mean, k_mean, channel_index, q_out, q_scale, a_comp, row_term,
        num_kv_heads, four_over_six, pdl,
    )  # fmt: skip


@_op(
    "append_mxfp8(Tensor k, Tensor v, Tensor? q, Tensor slot_mapping, Tensor(a!) k_pages, "
    "Tensor(b!) k_scale, Tensor(c!) v_pages, Tensor(d!) v_scale, Tensor(e!) v_tail, "
    "Tensor(f!)? q_out, Tensor(g!)? q_scale, bool pdl) -> ()"
)
def _append_mxfp8(
    k, v, q, slot_mapping, k_pages, k_scale, v_pages, v_scale, v_tail, q_out, q_scale, pdl
) -> None:
    _module("mxfp8").append(
        k, v, q, slot_mapping, _bytes(k_pages), _bytes(k_scale), _bytes(v_pages), _bytes(v_scale),
        v_tail, _bytes(q_out), _bytes(q_scale), pdl,
    )  # fmt: skip


@_op(
    "quantize_kv_mxfp8(Tensor k, Tensor v, Tensor indptr, Tensor v_row_starts, Tensor(a!) k_out, "
    "Tensor(b!) k_scale, Tensor(c!) v_out, Tensor(d!) v_scale, bool pdl) -> ()"
)
def _quantize_kv_mxfp8(k, v, indptr, v_row_starts, k_out, k_scale, v_out, v_scale, pdl) -> None:
    _module("mxfp8").quantize_kv(
        k, v, indptr, v_row_starts, _bytes(k_out), _bytes(k_scale), _bytes(v_out), _bytes(v_scale),
        pdl,
    )  # fmt: skip


@_op("quantize_query_mxfp8(Tensor q, Tensor(a!) q_out, Tensor(b!) q_scale, bool pdl) -> ()")
def _quantize_query_mxfp8(q, q_out, q_scale, pdl) -> None:
    _module("mxfp8").quantize_query(q, _bytes(q_out), _bytes(q_scale), pdl)


@_op("segment_mean(Tensor x, Tensor indptr, Tensor(a!) partial, Tensor(b!) mean) -> ()")
def _segment_mean(x, indptr, partial, mean) -> None:
    _module("stats").segment_mean(x, indptr, partial, mean)


@_op(
    "combine_partials(Tensor o, Tensor lse, Tensor merge_indptr, int states, Tensor(a!) out, "
    "Tensor(b!)? lse_out, Tensor? row_term, float row_scale, Tensor? sinks, bool pdl) -> ()"
)
def _combine_partials(
    o, lse, merge_indptr, states, out, lse_out, row_term, row_scale, sinks, pdl
) -> None:
    _module("combine").combine_partials(
        o, lse, merge_indptr, states, out, lse_out, row_term, row_scale, sinks, pdl
    )


@_op(
    "combine_plan(Tensor partial_o, Tensor partial_lse, Tensor header, Tensor merge_indptr, "
    "Tensor? row_term, Tensor(a!) out, Tensor(b!) lse, Tensor? sinks, float sm_scale, "
    "float logits_soft_cap, bool pdl) -> ()"
)
def _combine_plan(
    partial_o, partial_lse, header, merge_indptr, row_term, out, lse, sinks, sm_scale,
    logits_soft_cap, pdl,
) -> None:  # fmt: skip
    _module("combine").run(
        partial_o, partial_lse, header, merge_indptr, row_term, out, lse, sinks, sm_scale,
        logits_soft_cap, pdl,
    )  # fmt: skip


@_op("merge_base2(Tensor v, Tensor lse, Tensor(a!) out, Tensor(b!) lse_out, bool pdl) -> ()")
def _merge_base2(v, lse, out, lse_out, pdl) -> None:
    _module("combine").merge_states(v, lse, out, lse_out, pdl)


def require_capability(operation: str, device: torch.device) -> None:
    """GPUArchitectureError for a GPU older than Ampere."""
    found = torch.cuda.get_device_capability(device)
    if found < MIN_CUDA_CAPABILITY:
        raise GPUArchitectureError(
            f"{operation}: compute capability {found[0]}.{found[1]} ({device}), the kernels need "
            f"{MIN_CUDA_CAPABILITY[0]}.{MIN_CUDA_CAPABILITY[1]} or later"
        )


def empty_query(
    num_tokens: int,
    config: KVCacheConfig,
    stats: SmoothingStats | None,
    dtype: torch.dtype,
    device: torch.device,
) -> QuantizedQuery:
    """Unwritten buffers of a quantised query; reuse one to keep append free of allocations."""
    shape = (num_tokens, config.num_qo_heads)
    d = config.head_dim
    if config.format == "mxfp8":
        q = torch.empty((*shape, d), dtype=torch.float8_e4m3fn, device=device)
        scale = torch.empty((*shape, d // MX_BLOCK), dtype=torch.float8_e8m0fnu, device=device)
        return QuantizedQuery(q, scale, None, None, config, stats, dtype)
    q = torch.empty((*shape, d // 2), dtype=torch.uint8, device=device)
    scale = torch.empty((*shape, d // NVFP4_BLOCK), dtype=torch.uint8, device=device)
    a_comp = row_term = None
    if config.needs_stats:
        a_comp = torch.empty((*shape, COMPENSATION_SLOTS), dtype=torch.bfloat16, device=device)
    if config.uses_mean:
        row_term = torch.empty(shape, dtype=torch.float32, device=device)
    return QuantizedQuery(q, scale, a_comp, row_term, config, stats, dtype)


def _aligned_mean(mean: Tensor) -> Tensor:
    """``mean`` itself, or a copy where a view's heads are not 16-byte aligned."""
    ok = mean.storage_offset() % 4 == 0 and all(s % 4 == 0 for s in mean.stride()[:-1])
    # why clone: contiguous() of a contiguous view that starts off a boundary is that view.
    return mean if ok else mean.clone(memory_format=torch.contiguous_format)


def statistics(config: KVCacheConfig, stats: SmoothingStats | None):
    """(q_mean, k_mean, channel_index) as far as ``config`` uses them."""
    means = (None, None)
    if config.uses_mean:
        means = (_aligned_mean(stats.q_mean), _aligned_mean(stats.k_mean))
    return *means, stats.channel_index if config.uses_channels else None


def append(
    k: Tensor,
    v: Tensor,
    cache: PagedKVCache,
    slot_mapping: Tensor,
    stats: SmoothingStats | None,
    rows: Tensor | None,
    q: Tensor | None = None,
    *,
    query: QuantizedQuery | None = None,
    pdl: bool = False,
) -> QuantizedQuery | None:
    """One launch: quantise k and v into the pages and, when q is given, q into ``query``.

    ``query``: buffers from :func:`empty_query`, allocated here when None. ``pdl``: the launch may
    overlap the end of the kernel before it on the stream.
    """
    config = cache.config
    if k.dtype != v.dtype or (q is not None and q.dtype != k.dtype):
        raise ValueError(
            f"v: k, v and q must have one dtype on CUDA, got {k.dtype}, {v.dtype}"
            + ("" if q is None else f", {q.dtype}")
        )
    if q is not None and query is None:
        query = empty_query(q.shape[0], config, stats, q.dtype, q.device)
    out = (None,) * 4 if q is None else (query.q, query.q_scale, query.a_comp, query.row_term)
    if config.format == "mxfp8":
        torch.ops.mpfa.append_mxfp8(
            k, v, q, slot_mapping, cache.k, cache.k_scale, cache.v, cache.v_scale, cache.v_tail,
            *out[:2], pdl,
        )  # fmt: skip
    elif config.format == "qk4pv8":
        torch.ops.mpfa.append_qk4pv8(
            k, v, q, slot_mapping, rows, *statistics(config, stats), cache.k, cache.k_scale,
            cache.v, cache.aux_delta, cache.aux_channels, *out, config.num_qo_heads,
            config.four_over_six, pdl,
        )  # fmt: skip
    else:
        raise GPUArchitectureError(
            f"append_paged_kv_cache: no kernel writes format {config.format!r}, allowed on CUDA are "
            "'qk4pv8' and 'mxfp8'"
        )
    return query if q is not None else None


def quantize_query(
    q: Tensor,
    config: KVCacheConfig,
    stats: SmoothingStats | None,
    rows: Tensor | None,
    *,
    indptr: Tensor | None = None,
    query: QuantizedQuery | None = None,
    pdl: bool = False,
) -> QuantizedQuery:
    """Quantise queries [nnz, Hq, D]. Per-request statistics need ``rows`` (int32 [nnz]) or
    ``indptr`` (int32 [B+1])."""
    if query is None:
        query = empty_query(q.shape[0], config, stats, q.dtype, q.device)
    if config.format == "mxfp8":
        torch.ops.mpfa.quantize_query_mxfp8(q, query.q, query.q_scale, pdl)
    else:
        torch.ops.mpfa.quantize_query_qk4pv8(
            q, rows, indptr, *statistics(config, stats), query.q, query.q_scale, query.a_comp,
            query.row_term, config.num_kv_heads, config.four_over_six, pdl,
        )  # fmt: skip
    return query


def quantize_kv(
    k: Tensor,
    v: Tensor,
    config: KVCacheConfig,
    indptr: Tensor,
    bounds: list[int],
    stats: SmoothingStats | None,
    *,
    pdl: bool = False,
) -> QuantizedKV:
    """Quantise ragged K and V; ``bounds`` is indptr on the host. Per-request statistics have the
    rows that indptr describes."""
    if k.dtype != v.dtype:
        raise ValueError(f"v: dtype must be {k.dtype} like k on CUDA, got {v.dtype}")
    tokens, heads, d = k.shape
    indptr_device = indptr.to(k.device)

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=k.device)

    e4m3, e8m0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
    v_out = empty((tokens, heads, d), e4m3)
    if config.format == "mxfp8":
        starts = ragged_v_scale_rows(bounds)
        k_out = empty((tokens, heads, d), e4m3)
        k_scale = empty((tokens, heads, d // MX_BLOCK), e8m0)
        v_scale = empty((starts[-1], heads, d), e8m0)
        row_starts = torch.tensor(starts, dtype=torch.int32, device=k.device)
        torch.ops.mpfa.quantize_kv_mxfp8(
            k, v, indptr_device, row_starts, k_out, k_scale, v_out, v_scale, pdl
        )
        return QuantizedKV(k_out, k_scale, v_out, v_scale, None, None, indptr, config, stats)
    k_out = empty((tokens, heads, d // 2), torch.uint8)
    k_scale = empty((tokens, heads, d // NVFP4_BLOCK), torch.uint8)
    delta = channels = None
    if config.uses_mean:
        delta = empty((config.num_qo_heads, tokens), torch.bfloat16)
    if config.uses_channels:
        channels = empty((tokens, heads, config.channels), torch.bfloat16)
    torch.ops.mpfa.quantize_kv_qk4pv8(
        k, v, indptr_device, *statistics(config, stats), k_out, k_scale, v_out, delta, channels,
        config.num_qo_heads, config.four_over_six, pdl,
    )  # fmt: skip
    return QuantizedKV(k_out, k_scale, v_out, None, delta, channels, indptr, config, stats)


def segment_mean(
    x: Tensor, indptr: Tensor, *, mean: Tensor | None = None, partial: Tensor | None = None
) -> Tensor:
    """fp32 [B, H, D] means of the tokens of each request; x bf16/fp16/fp32 [T, H, D], indptr int32
    [B+1] on x's device.

    Deterministic. A result is the correctly rounded mean, except where the mean of a request of n
    tokens lies within (2^-36 + n * 2^-52) * mean(|x|) of a rounding boundary. ``partial``: fp32 scratch
    [B, num_slices(T, B), H*D, 2].
    """
    tokens, heads, d = x.shape
    requests = indptr.shape[0] - 1
    if mean is None:
        mean = torch.empty((requests, heads, d), dtype=torch.float32, device=x.device)
    if partial is None:
        slices = num_slices(tokens, requests)
        partial = torch.empty(
            (requests, slices, heads * d, 2), dtype=torch.float32, device=x.device
        )
    torch.ops.mpfa.segment_mean(x, indptr, partial, mean)
    return mean


def combine(
    o: Tensor,
    lse: Tensor,
    merge_indptr: Tensor,
    out: Tensor,
    lse_out: Tensor | None,
    *,
    states_per_partition: int = 1,
    row_term: Tensor | None = None,
    row_scale: float = 0.0,
    sinks: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Merge split-KV partials into ``out`` [T, H, D] and ``lse_out`` fp32 [T, H], base 2.

    o fp32 [rows, H, D] and lse fp32 [rows, H] hold ``states_per_partition`` consecutive rows for
    each partition; merge_indptr int32 [T+1] counts partitions. Tokens without one are left alone.
    row_term fp32 [T, H] is added to the LSE times ``row_scale``; sinks fp32 [H] (natural log) join
    last.
    """
    torch.ops.mpfa.combine_partials(
        o, lse, merge_indptr, states_per_partition, out, lse_out, row_term, row_scale, sinks, pdl
    )


def combine_plan(
    partial_o: Tensor,
    partial_lse: Tensor,
    header: Tensor,
    merge_indptr: Tensor,
    row_term: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    sm_scale: float,
    logits_soft_cap: float,
    *,
    pdl: bool = False,
) -> None:
    """Last step of a planned run: finish the tokens that have partial rows, in ``out`` and ``lse``.

    header and merge_indptr are the plan's metadata; tokens beyond its own and those with one
    partition are left alone. Without a soft cap row_term fp32 [T, H] enters the LSE times sm_scale.
    """
    torch.ops.mpfa.combine_plan(
        partial_o, partial_lse, header, merge_indptr, row_term, out, lse, sinks, sm_scale,
        logits_soft_cap, pdl,
    )  # fmt: skip


def merge_base2(v: Tensor, lse: Tensor, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """mpfa.merge.merge_base2 for v [n, S, H, D] of any float dtype and base-2 lse fp32 [n, S, H];
    the result has v's dtype."""
    v, lse = v.contiguous(), lse.contiguous()
    out = torch.empty_like(v[0])
    lse_out = torch.empty_like(lse[0])
    torch.ops.mpfa.merge_base2(v, lse, out, lse_out, pdl)
    return out, lse_out
