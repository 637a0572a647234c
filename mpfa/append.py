# SPDX-License-Identifier: Apache-2.0
"""append_paged_kv_cache: quantise new tokens and scatter them into pages."""

from __future__ import annotations

import torch

from mpfa.backends import reference
from mpfa.cache import PagedKVCache
from mpfa.errors import HALF_DTYPES, check_tensor
from mpfa.quantized import QuantizedQuery
from mpfa.stats import SmoothingStats, resolve_stats
from mpfa.support import require_reference_device


def append_paged_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: PagedKVCache,
    slot_mapping: torch.Tensor,
    *,
    stats: SmoothingStats | None = None,
    batch_indices: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
) -> QuantizedQuery | None:
    """Write T tokens of one layer into their cache slots, in place.

    Args:
        k, v: bf16/fp16 [T, Hkv, D], post-RoPE; never modified. Values must be finite. A bf16 cache
            rounds fp16 input to bf16; MXFP8's V is rounded to bf16 first (v_tail holds bf16).
        cache: written in place.
        slot_mapping: int32 or int64 [T], slot = page * page_size + offset; negative = skip the token.
            Slots must be distinct. With mxfp8 the tokens of one page must come in order, in this call
            and over calls: the open 32-token V block is requantised from v_tail, so any split of the
            appends gives the bytes of one whole append. Writing into a block that is no longer the
            page's last one is not possible.
        stats: SmoothingStats when cache.config.compensation is not "none" and none is bound.
        batch_indices: int32 [T], row of per-request stats of each token, at least 0 and below their
            number of rows except for skipped tokens; required then.
        q: bf16/fp16 [T, Hq, D]; when given, the same call also quantises the queries
            (paper section 6), those of skipped tokens too (with row 0 of per-request stats; NaN and
            Inf count as 0 there).

    Returns:
        QuantizedQuery if q was given, else None.

    Raises:
        ValueError: wrong shape, dtype, device or stride; slot out of range or used twice; NaN/Inf;
            missing stats; stats other than the ones bound to the cache.
        GPUArchitectureError: neither CPU tensors nor a CUDA GPU of compute capability 8.0 or later,
            or a bf16 cache on CUDA (no kernel writes it).

    On CUDA this is one launch on the current stream without synchronisation, so values are not
    checked: an out-of-range slot, or a row in batch_indices that does not exist, skips the token as a
    negative slot does, and NaN or Inf give undefined codes. k, v and q must
    then share one dtype.
    """
    if not isinstance(cache, PagedKVCache):
        raise TypeError(f"cache: expected PagedKVCache, got {type(cache).__name__}")
    config = cache.config
    shape = ("T", config.num_kv_heads, config.head_dim)
    check_tensor("k", k, shape=shape, dtype=HALF_DTYPES, device=cache.device)
    check_tensor("v", v, shape=(k.shape[0], *shape[1:]), dtype=HALF_DTYPES, device=cache.device)
    check_tensor(
        "slot_mapping",
        slot_mapping,
        shape=(k.shape[0],),
        dtype=(torch.int32, torch.int64),
        device=cache.device,
    )
    if q is not None:
        q_shape = (k.shape[0], config.num_qo_heads, config.head_dim)
        check_tensor("q", q, shape=q_shape, dtype=HALF_DTYPES, device=cache.device)
        if config.format == "bf16":
            raise ValueError("q: a bf16 cache has no quantised query; pass q to run() unchanged")
    stats = bound_stats(cache, stats)
    if cache.device.type == "cuda":
        from mpfa.backends import cuda

        cuda.require_capability("append_paged_kv_cache", cache.device)
        stats, rows = resolve_stats(config, stats, batch_indices, k.shape[0], cache.device)
        return cuda.append(k, v, cache, slot_mapping, stats, rows, q)
    require_reference_device("append_paged_kv_cache", cache.device)
    if batch_indices is not None:
        check_tensor("batch_indices", batch_indices, shape=(k.shape[0],), device=cache.device)
        # Padding tokens have no request; their row is looked at nowhere but in the range check.
        batch_indices = batch_indices.masked_fill(slot_mapping < 0, 0)
    stats, rows = resolve_stats(config, stats, batch_indices, k.shape[0], cache.device)
    if q is not None:
        padding = (slot_mapping < 0)[:, None, None] & ~torch.isfinite(q)
        q = q.masked_fill(padding, 0.0)
    # why: the query is prepared first, so that bad values in q leave the cache untouched.
    query = None if q is None else reference.quantize_query(q, config, stats, rows)
    reference.append(k, v, cache, slot_mapping, stats, rows)
    return query


def bound_stats(cache: PagedKVCache, stats: SmoothingStats | None) -> SmoothingStats | None:
    """The stats to use with ``cache``: the bound ones, and no other object beside them."""
    if cache.stats is None:
        return stats
    if stats is not None and stats is not cache.stats:
        raise ValueError(
            "stats: this cache has static statistics bound to it; pass stats=None or the same object"
        )
    return cache.stats
