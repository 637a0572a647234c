# SPDX-License-Identifier: Apache-2.0
"""BatchDecodeWrapper: a few query tokens per request over a paged cache, split over KV."""

from __future__ import annotations

import torch

from mpfa.cache import PagedKVCache
from mpfa.config import KVCacheConfig
from mpfa.planning import decode_request
from mpfa.quantized import QuantizedQuery
from mpfa.stats import SmoothingStats
from mpfa.wrapper import AttentionWrapper


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
            **self._plan_options(),
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
                are neighbours, in order. sm90 multiplies a bf16/fp16 q as it is (fp16 after
                centring), which is more accurate than its codes; the other kernels quantise it.
            cache: PagedKVCache of the planned format, aligned as BatchPrefillWrapper.run() says; on
                sm90 and sm100 aux_delta and aux_channels to 16 bytes too.
            stats, sinks, out, lse, return_lse, lse_base: as BatchPrefillWrapper.run(); out may have
                any alignment on sm90 and sm100.

        Returns:
            out, or (out, lse), as BatchPrefillWrapper.run().

        Raises:
            RuntimeError, ValueError, TypeError: as BatchPrefillWrapper.run().
        """
        return self._run(q, cache, stats, sinks, out, lse, return_lse, lse_base)
