# SPDX-License-Identifier: Apache-2.0
"""BatchDecodeWrapper: a few query tokens per request over a paged cache, split over KV."""

from __future__ import annotations

import torch

from mpfa.cache import PagedKVCache
from mpfa.config import KVCacheConfig
from mpfa.errors import INT32_MAX, check_int
from mpfa.planner import PlanRequest
from mpfa.quantized import QuantizedQuery
from mpfa.stats import SmoothingStats
from mpfa.wrapper import (
    DECODE_PARTITION_TOKENS,
    KV_BLOCK,
    MAX_PACKED_HEADS,
    REFERENCE_NUM_SM,
    AttentionSpec,
    AttentionWrapper,
    check_graph_limits,
    host_int32,
    make_spec,
    partition_tokens,
    scratch_sections,
)


class BatchDecodeWrapper(AttentionWrapper):
    """Decode attention: every request has q_len_per_request query tokens at its end.

    KV is split into fixed partitions from token 0 (8 x 128 tokens by default, paper section 5.3), so
    a request's result does not depend on the batch. Constructor arguments as BatchPrefillWrapper;
    max_total_qo_len defaults to max_batch_size, enough for one query token per request.
    """

    _operation = "decode"

    def __init__(
        self,
        workspace: torch.Tensor,
        *,
        backend: str = "auto",
        use_cuda_graph: bool = False,
        max_batch_size: int | None = None,
        max_total_qo_len: int | None = None,
        max_num_pages: int | None = None,
    ) -> None:
        super().__init__(
            workspace,
            backend=backend,
            use_cuda_graph=use_cuda_graph,
            max_batch_size=max_batch_size,
            max_total_qo_len=max_batch_size if max_total_qo_len is None else max_total_qo_len,
            max_num_pages=max_num_pages,
        )

    def plan(
        self,
        kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int | None = None,
        q_len_per_request: int = 1,
        causal: bool = True,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = 0.0,
        config: KVCacheConfig | None = None,
        fixed_split_pages: int | None = None,
    ) -> None:
        """Plan a batch. Index tensors may be on any device; this may synchronise.

        Args:
            kv_indptr: int32 [B+1], page offsets.
            paged_kv_indices: int32 [>= kv_indptr[-1]], page ids.
            paged_kv_last_page_len: int32 [B], 1..page_size.
            q_len_per_request: query tokens of every request (speculative decode); they are the last
                tokens of the request and K/V of all of them are in the cache.
            causal: among the q_len_per_request tokens; True by default, unlike prefill.
            fixed_split_pages: pages per partition (a multiple of 128 tokens); default 1024 tokens.
            num_qo_heads, num_kv_heads, head_dim, page_size, sm_scale, window_left,
            logits_soft_cap, config: as BatchPrefillWrapper.plan().

        Raises:
            ValueError: as BatchPrefillWrapper.plan().
        """
        spec, request = decode_request(
            kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            q_len_per_request=q_len_per_request,
            causal=causal,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            config=config,
            fixed_split_pages=fixed_split_pages,
            num_sm=REFERENCE_NUM_SM,
            use_cuda_graph=self._use_cuda_graph,
            **self._limits,
        )
        self._set_plan(spec, request)

    def run(
        self,
        q: torch.Tensor | QuantizedQuery,
        cache: PagedKVCache,
        *,
        stats: SmoothingStats | None = None,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned batch.

        Args:
            q: bf16/fp16 [B * q_len_per_request, Hq, D] or QuantizedQuery; the tokens of a request
                are neighbours, in order.
            cache: PagedKVCache of the planned format.
            stats, sinks, out, lse, return_lse, lse_base: as BatchPrefillWrapper.run().

        Returns:
            out, or (out, lse), as BatchPrefillWrapper.run().

        Raises:
            RuntimeError, ValueError, TypeError: as BatchPrefillWrapper.run().
        """
        return self._run(q, cache, stats, sinks, out, lse, return_lse, lse_base)


def decode_request(
    kv_indptr: torch.Tensor,
    paged_kv_indices: torch.Tensor,
    paged_kv_last_page_len: torch.Tensor,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_sm: int,
    page_size: int | None = None,
    q_len_per_request: int = 1,
    causal: bool = True,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = 0.0,
    config: KVCacheConfig | None = None,
    fixed_split_pages: int | None = None,
    use_cuda_graph: bool = False,
    max_batch_size: int | None = None,
    max_total_qo_len: int | None = None,
    max_num_pages: int | None = None,
) -> tuple[AttentionSpec, PlanRequest]:
    """plan()'s arguments, checked, as the planner takes them; workspace_size() shares this."""
    check_int("q_len_per_request", q_len_per_request, 1)
    spec = make_spec(
        num_qo_heads, num_kv_heads, head_dim, page_size, causal, sm_scale, window_left,
        logits_soft_cap, config, True,
    )  # fmt: skip
    limits = {
        "max_batch_size": max_batch_size,
        "max_total_qo_len": max_batch_size if max_total_qo_len is None else max_total_qo_len,
        "max_num_pages": max_num_pages,
    }
    check_graph_limits(use_cuda_graph, limits)
    kv_host = host_int32("kv_indptr", kv_indptr)
    batch = max(kv_host.numel() - 1, 0)
    if batch * q_len_per_request > INT32_MAX:
        raise ValueError(
            f"q_len_per_request: the batch may have at most {INT32_MAX} query tokens, got "
            f"{batch} requests x {q_len_per_request}"
        )
    rows, stats_rows = batch * q_len_per_request, 0
    if use_cuda_graph:
        rows, stats_rows = limits["max_total_qo_len"], max_batch_size
    request = PlanRequest(
        mode="decode",
        qo_indptr=torch.arange(batch + 1, dtype=torch.int32, device="cpu") * q_len_per_request,
        kv_indptr=kv_host,
        kv_indices=host_int32("paged_kv_indices", paged_kv_indices),
        last_page_len=host_int32("paged_kv_last_page_len", paged_kv_last_page_len),
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=spec.page_size,
        causal=causal,
        window_left=window_left,
        q_tile_tokens=q_len_per_request,
        heads_per_group=min(spec.group_size, MAX_PACKED_HEADS),
        kv_block=KV_BLOCK,
        partition_tokens=partition_tokens(
            fixed_split_pages, spec.page_size, DECODE_PARTITION_TOKENS
        ),
        num_sm=num_sm,
        sections=scratch_sections(spec, rows, stats_rows),
        use_cuda_graph=use_cuda_graph,
        **(limits if use_cuda_graph else {}),
    )
    return spec, request
