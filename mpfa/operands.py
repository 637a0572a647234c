# SPDX-License-Identifier: Apache-2.0
"""The arguments of run(): checked against the plan, by shape, dtype, device and class only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mpfa.append import bound_stats
from mpfa.cache import PagedKVCache
from mpfa.config import FORMAT_FIELDS, HEAD_FIELDS, KVCacheConfig, first_difference
from mpfa.errors import HALF_DTYPES, check_distinct, check_tensor
from mpfa.planner import Plan
from mpfa.planning import DEFAULT_FORMAT, AttentionSpec
from mpfa.quantized import QuantizedKV, QuantizedQuery
from mpfa.stats import SmoothingStats, refuse_unused


@dataclass(frozen=True)
class Inputs:
    """Checked arguments of one run(), as every backend reads them.

    q, out and lse have the plan's query tokens or, in a wrapper for CUDA graphs, more; ``stats`` is
    None where the format needs none, and where run() computes per-request means of raw (k, v).
    """

    q: torch.Tensor | QuantizedQuery
    kv: PagedKVCache | QuantizedKV | tuple[torch.Tensor, torch.Tensor]
    config: KVCacheConfig
    stats: SmoothingStats | None
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class RunChecks:
    """What the arguments of run() have to agree with."""

    plan: Plan
    spec: AttentionSpec
    device: torch.device
    kv_name: str

    @property
    def graph(self) -> bool:
        return self.plan.request.use_cuda_graph

    def inputs(
        self,
        q: torch.Tensor | QuantizedQuery,
        kv: object,
        stats: SmoothingStats | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> Inputs:
        """Raises ValueError or TypeError; allocates out and lse where they are None."""
        config, stats = self._check_kv(kv, stats)
        if config.needs_stats and stats is None and isinstance(q, QuantizedQuery):
            # Raw (k, v) with a query that carries the statistics it was quantised with.
            stats = q.stats
            if stats is not None:
                self._check_stats(config, stats, computable=False)
        tokens, q_dtype = self._check_q(q, config, stats)
        heads = self.spec.num_qo_heads
        if sinks is not None:
            self._check_sinks(sinks)
        shape = (tokens, heads, self.spec.head_dim)
        if out is None:
            out = torch.empty(shape, dtype=q_dtype, device=self.device)
        else:
            dtypes = (*HALF_DTYPES, torch.float32)
            check_tensor("out", out, shape=shape, dtype=dtypes, device=self.device)
            check_distinct("out", out)
        if lse is None:
            lse = torch.empty(shape[:2], dtype=torch.float32, device=self.device)
        else:
            check_tensor("lse", lse, shape=shape[:2], dtype=torch.float32, device=self.device)
            check_distinct("lse", lse)
        return Inputs(q, kv, config, stats, sinks, out, lse)

    def _check_sinks(self, sinks: torch.Tensor) -> None:
        heads = self.spec.num_qo_heads
        check_tensor("sinks", sinks, shape=(heads,), dtype=torch.float32, device=self.device)
        # why the factor: the sink joins a base-2 LSE, where 2.4e38 would already be infinite.
        base2 = sinks * math.log2(math.e)
        if sinks.device.type == "cpu" and bool((base2.isnan() | base2.isposinf()).any()):
            raise ValueError("sinks: must be -inf or below 2.3e38, found NaN, +inf or more")

    def _check_kv(
        self, kv: object, stats: SmoothingStats | None
    ) -> tuple[KVCacheConfig, SmoothingStats | None]:
        plan, spec, name = self.plan, self.spec, self.kv_name
        paged = spec.page_size is not None
        if stats is not None and not isinstance(stats, SmoothingStats):
            raise TypeError(f"stats: expected SmoothingStats, got {type(stats).__name__}")
        if isinstance(kv, PagedKVCache):
            if not paged:
                raise ValueError(
                    f"{name}: the plan is ragged (no paged_kv_indices), got a PagedKVCache"
                )
            if plan.max_page_id >= kv.num_pages:
                raise ValueError(
                    f"paged_kv_indices: page ids must be 0..{kv.num_pages - 1} for this cache, request "
                    f"{plan.max_page_id_request} uses page {plan.max_page_id}"
                )
            stats = bound_stats(kv, stats)
            config = kv.config
        elif isinstance(kv, QuantizedKV):
            if paged:
                raise ValueError(f"{name}: the plan is paged, got ragged QuantizedKV")
            if stats is not None and kv.stats is not None and stats is not kv.stats:
                raise ValueError(
                    "stats: K was quantised with another SmoothingStats object; pass that or None"
                )
            stats = kv.stats if kv.stats is not None else stats
            config = kv.config
            self._check_ragged(kv)
        elif isinstance(kv, tuple) and len(kv) == 2:
            if paged:
                raise ValueError(f"{name}: the plan is paged, got a ragged (k, v) tuple")
            tokens = self._tokens("kv", kv[0], plan.nnz_kv, "max_num_pages")
            shape = (tokens, spec.num_kv_heads, spec.head_dim)
            check_tensor("k", kv[0], shape=shape, dtype=HALF_DTYPES, device=self.device)
            check_tensor("v", kv[1], shape=shape, dtype=HALF_DTYPES, device=self.device)
            config = spec.config or KVCacheConfig(
                DEFAULT_FORMAT, spec.num_kv_heads, spec.head_dim, 128, spec.num_qo_heads
            )
        else:
            raise TypeError(
                f"{name}: expected PagedKVCache, QuantizedKV or a (k, v) tuple, got {type(kv).__name__}"
            )
        if not isinstance(kv, tuple):
            if kv.device != self.device:
                raise ValueError(f"{name}: must be on device {self.device}, got {kv.device}")
            _check_config(name, config, spec)
        refuse_unused(config, stats)
        if not config.needs_stats:
            return config, None
        self._check_stats(config, stats, computable=isinstance(kv, tuple))
        return config, stats

    def _check_ragged(self, kv: QuantizedKV) -> None:
        plan, name = self.plan, self.kv_name
        if kv.num_tokens != plan.nnz_kv:
            raise ValueError(f"{name}: the plan has {plan.nnz_kv} KV tokens, got {kv.num_tokens}")
        if kv.indptr.device.type == "cpu" and not torch.equal(kv.indptr, plan.kv_indptr):
            raise ValueError(
                f"{name}.indptr: K/V were quantised for other requests ({kv.indptr.tolist()}) than "
                f"kv_indptr of the plan ({plan.kv_indptr.tolist()})"
            )
        # The rows that the plan's requests read; a device indptr is not compared.
        rows = int(plan.v_block_indptr[-1])
        if kv.v_scale is not None and kv.v_scale.shape[0] != rows:
            raise ValueError(
                f"{name}.v_scale: the plan's requests have {rows} blocks of 32 tokens, got "
                f"{kv.v_scale.shape[0]}"
            )

    def _check_stats(
        self, config: KVCacheConfig, stats: SmoothingStats | None, *, computable: bool
    ) -> None:
        if stats is None:
            # Raw K/V of a centred format: run() computes the per-request means itself.
            if computable and not config.uses_channels:
                return
            raise ValueError(
                f"stats: compensation {config.compensation!r} needs SmoothingStats, got None"
            )
        batch = self.plan.batch_size
        most = self.plan.request.max_batch_size
        rows = stats.batch_size
        if self.graph and rows is not None and batch <= rows <= most:
            # A captured run serves later plans of more requests; they have rows of their own.
            batch = rows
        stats.check_against(config, device=self.device, batch_size=batch)

    def _tokens(self, name: str, tensor: torch.Tensor, planned: int, limit: str) -> int:
        """Rows that a token tensor must have: the plan's, or up to the limit of a graph."""
        most = getattr(self.plan.request, limit)
        if not (self.graph and isinstance(tensor, torch.Tensor) and tensor.dim() == 3):
            return planned
        return min(max(tensor.shape[0], planned), most)

    def _check_q(
        self,
        q: torch.Tensor | QuantizedQuery,
        config: KVCacheConfig,
        stats: SmoothingStats | None,
    ) -> tuple[int, torch.dtype]:
        plan, spec = self.plan, self.spec
        values = q.q if isinstance(q, QuantizedQuery) else q
        tokens = self._tokens("q", values, plan.nnz_qo, "max_total_qo_len")
        if not isinstance(q, QuantizedQuery):
            shape = (tokens, spec.num_qo_heads, spec.head_dim)
            check_tensor("q", q, shape=shape, dtype=HALF_DTYPES, device=self.device)
            return tokens, q.dtype
        if q.device != self.device:
            raise ValueError(f"q: must be on device {self.device}, got {q.device}")
        if q.num_tokens != tokens:
            raise ValueError(f"q: the plan has {plan.nnz_qo} query tokens, got {q.num_tokens}")
        if first_difference(q.config, config, (*FORMAT_FIELDS, *HEAD_FIELDS)) is not None:
            raise ValueError(f"q: quantised for {q.config}, but K/V are {config}")
        if config.needs_stats and q.stats is not stats:
            raise ValueError("q: quantised with another SmoothingStats object than K/V")
        return tokens, q.dtype


def _check_config(name: str, config: KVCacheConfig, spec: AttentionSpec) -> None:
    """K/V that reach run() must be of the format, heads and page size that plan() was told."""
    different = first_difference(spec, config, spec.shared_fields)
    if different is None and spec.config is not None:
        different = first_difference(spec.config, config, FORMAT_FIELDS)
    if different is not None:
        field, planned, found = different
        raise ValueError(f"{name}.config.{field}: plan() said {planned!r}, run() got {found!r}")
