# SPDX-License-Identifier: Apache-2.0
"""The reference backend: mpfa.reference numerics behind the public API, on CPU tensors.

Attention is driven by the planner's work list exactly as a kernel would be: every item of the uploaded
metadata is computed on its own, split items go through the partial buffers in the workspace, and the
merge index combines them.
"""

from __future__ import annotations

import torch

from mpfa import reference as ref
from mpfa.cache import PagedKVCache
from mpfa.config import KVCacheConfig
from mpfa.merge import merge_base2
from mpfa.planner import Plan
from mpfa.quantized import QuantizedKV, QuantizedQuery, ragged_v_scale_rows
from mpfa.reference.cache_write import resolve_slots
from mpfa.reference.replay import (
    LOG2E,
    KVOperands,
    QueryOperands,
    Scheme,
    TileSpec,
    attend_tile,
    exp2_rounded,
    scheme_for,
)
from mpfa.stats import SmoothingStats, request_rows, resolve_stats


def quantize_query(
    q: torch.Tensor,
    config: KVCacheConfig,
    stats: SmoothingStats | None,
    rows: torch.Tensor | None,
) -> QuantizedQuery:
    if config.format == "mxfp8":
        values, scale = ref.quantize_mxfp8(q.float(), name="q")
        return QuantizedQuery(values, scale, None, None, config, stats, q.dtype)
    parts = ref.prepare_query(q, **_smoothing(config, stats, rows))
    return QuantizedQuery(**parts, config=config, stats=stats, dtype=q.dtype)


def quantize_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    config: KVCacheConfig,
    indptr: torch.Tensor,
    bounds: list[int],
    stats: SmoothingStats | None,
    rows: torch.Tensor | None,
) -> QuantizedKV:
    if config.format == "mxfp8":
        k_values, k_scale = ref.quantize_mxfp8(k.float(), name="k")
        starts = ragged_v_scale_rows(bounds)
        v_values = torch.empty_like(v, dtype=torch.float8_e4m3fn)
        v_scale = torch.empty(
            (starts[-1], *v.shape[1:]), dtype=torch.float8_e8m0fnu, device=v.device
        )
        ref.require_finite("v", v)
        for b, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            part, scale = ref.quantize_mxfp8_tokens(
                v[begin:end].to(torch.bfloat16).float(), name="v"
            )
            v_values[begin:end] = part
            v_scale[starts[b] : starts[b + 1]] = scale
        return QuantizedKV(k_values, k_scale, v_values, v_scale, None, None, indptr, config, stats)
    parts = ref.prepare_key(k, **_smoothing(config, stats, rows))
    ref.require_finite("v", v)
    delta = parts["aux_delta"]
    return QuantizedKV(
        k=parts["k"],
        k_scale=parts["k_scale"],
        v=ref.e4m3_encode(v.float()),
        v_scale=None,
        aux_delta=None if delta is None else delta.transpose(0, 1).contiguous(),
        aux_channels=parts["aux_channels"],
        indptr=indptr,
        config=config,
        stats=stats,
    )


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: PagedKVCache,
    slot_mapping: torch.Tensor,
    stats: SmoothingStats | None,
    rows: torch.Tensor | None,
) -> None:
    # invariant: everything is checked, on the caller's own token positions, before a byte is written.
    # Padding tokens (negative slots) may hold anything; they are neither checked nor quantised.
    resolve_slots(slot_mapping, k.shape[0], cache.num_pages, cache.config.page_size)
    valid = slot_mapping >= 0
    ref.require_finite("k", k, valid)
    ref.require_finite("v", v, valid)
    if cache.config.format == "bf16":
        ref.write_bf16(cache.k, cache.v, slot_mapping, k, v)
        return
    if cache.config.format == "mxfp8":
        pages = (cache.k, cache.k_scale, cache.v, cache.v_scale, cache.v_tail)
        ref.write_mxfp8(*pages, slot_mapping, k.float(), v)
        return
    kept = valid.nonzero().flatten()
    rows = None if rows is None else rows[kept]
    key = ref.prepare_key(k[kept], **_smoothing(cache.config, stats, rows))
    pages = (cache.k, cache.k_scale, cache.v, cache.aux_delta, cache.aux_channels)
    ref.write_qk4pv8(*pages, slot_mapping[kept], key, ref.e4m3_encode(v[kept].float()))


def _smoothing(
    config: KVCacheConfig, stats: SmoothingStats | None, rows: torch.Tensor | None
) -> dict[str, object]:
    """Keyword arguments that prepare_query and prepare_key share."""
    return _means(config, stats, rows) | {"four_over_six": config.four_over_six}


def _means(
    config: KVCacheConfig, stats: SmoothingStats | None, rows: torch.Tensor | None
) -> dict[str, object]:
    q_mean, k_mean = (None, None) if stats is None else stats.means_for(config, rows)
    return {
        "compensation": config.compensation,
        "q_mean": q_mean,
        "k_mean": k_mean,
        "channel_index": stats.channel_index if config.uses_channels else None,
    }


def request_means(plan: Plan, inputs) -> SmoothingStats:
    """Per-request means of raw q and k (paper equation 7)."""
    return SmoothingStats.from_tensors(
        inputs.q[: plan.nnz_qo],
        inputs.kv[0][: plan.nnz_kv],
        plan.qo_indptr,
        kv_indptr=plan.kv_indptr,
    )


class ReferenceRun:
    """One run(): operands on one side, the uploaded plan on the other.

    The plan says how the work is cut, whatever backend it was made for, so the same plan, spec and
    inputs replay what a kernel does (tests/api/test_sim_backend.py compares them).
    """

    def __init__(
        self,
        spec,
        plan: Plan,
        metadata: torch.Tensor,
        workspace: torch.Tensor,
        inputs,
        scheme: Scheme | None = None,
    ):
        self.spec, self.plan, self.workspace, self.inputs = spec, plan, workspace, inputs
        self.config: KVCacheConfig = inputs.config
        self.stats = inputs.stats
        if self.config.needs_stats and self.stats is None:
            self.stats = request_means(plan, inputs)
        batch, heads = plan.batch_size, spec.num_qo_heads
        # Everything below is read back from the uploaded metadata, as a kernel would read it.
        self.items = plan.metadata_view(metadata, "items").view(-1, 8)
        self.qo_indptr = plan.metadata_view(metadata, "qo_indptr")[: batch + 1].tolist()
        self.kv_indptr = plan.metadata_view(metadata, "kv_indptr")[: batch + 1].tolist()
        self.kv_len = plan.metadata_view(metadata, "kv_len")[:batch].tolist()
        self.merge_indptr = plan.metadata_view(metadata, "merge_indptr")[: plan.nnz_qo + 1]
        self.pages = None if spec.page_size is None else plan.metadata_view(metadata, "kv_indices")
        rows = plan.num_partial_rows
        self.partial_o = plan.scratch(workspace, "partial_o", torch.float32)[
            : rows * heads * spec.head_dim
        ].view(rows, heads, spec.head_dim)
        self.partial_lse = plan.scratch(workspace, "partial_lse", torch.float32)[
            : rows * heads
        ].view(rows, heads)
        self.scheme = scheme or scheme_for(self.config.format, spec.head_dim)
        self.query = self._prepare_query()
        self._kv_request, self._kv = -1, None

    def _prepare_query(self) -> QueryOperands:
        """The query of the whole batch, quantised into the workspace, then dequantised."""
        q, tokens = self.inputs.q, self.plan.nnz_qo
        if self.config.format == "bf16":
            ref.require_finite("q", q[:tokens])
            return QueryOperands(q[:tokens].float())
        if not isinstance(q, QuantizedQuery):
            q = q[:tokens]
            rows = None
            if self.stats is not None and not self.stats.is_static:
                rows = request_rows(self.qo_indptr)
            stats, rows = resolve_stats(self.config, self.stats, rows, q.shape[0], q.device)
            if self.scheme.p_mode == "dequant":
                return QueryOperands(**ref.dequant_query(q, **_means(self.config, stats, rows)))
            q = quantize_query(q, self.config, stats, rows)
        parts = {"q": q.q, "q_scale": q.q_scale, "a_comp": q.a_comp, "row_term": q.row_term}
        stored = {}
        for name, tensor in parts.items():
            if tensor is None:
                stored[name] = None
                continue
            tensor = tensor[:tokens]
            view = self.plan.scratch(self.workspace, name, tensor.dtype)[: tensor.numel()]
            stored[name] = view.view(tensor.shape)
            stored[name].view(torch.uint8).copy_(tensor.contiguous().view(torch.uint8))
        if self.config.format == "mxfp8":
            values = ref.dequantize_mxfp8(stored["q"], stored["q_scale"])
        else:
            values = ref.dequantize_nvfp4(stored["q"], stored["q_scale"])
        return QueryOperands(values, stored["a_comp"], stored["row_term"])

    def _prepare_kv(self) -> None:
        """Ragged bf16/fp16 K and V of a low-bit format are quantised once per run."""
        kv = self.inputs.kv
        if not isinstance(kv, tuple):
            return
        # A graph's tensors may hold more tokens than this plan.
        kv = self.inputs_kv = tuple(t[: self.plan.nnz_kv] for t in kv)
        if self.config.format == "bf16":
            ref.require_finite("k", kv[0])
            ref.require_finite("v", kv[1])
            return
        bounds = self.kv_indptr
        rows = None
        if self.stats is not None and not self.stats.is_static:
            rows = request_rows(bounds)
        self.inputs_kv = quantize_kv(
            kv[0], kv[1], self.config, self.plan.kv_indptr, bounds, self.stats, rows
        )

    def kv_operands(self, request: int) -> KVOperands:
        """Dequantised K and V of a request; the last one is kept, since its items come together."""
        if self._kv_request != request:
            self._kv = self._load_kv(request)
            self._kv_request = request
        return self._kv

    def _load_kv(self, request: int) -> KVOperands:
        kv = self.inputs_kv
        begin, end = self.kv_indptr[request], self.kv_indptr[request + 1]
        if isinstance(kv, tuple):
            return KVOperands(kv[0][begin:end].float(), kv[1][begin:end].float())
        if isinstance(kv, QuantizedKV):
            return self._load_ragged(kv, request, begin, end)
        page_ids, length = self.pages[begin:end].long(), self.kv_len[request]
        if self.config.format == "bf16":
            return KVOperands(*ref.gather_bf16(kv.k, kv.v, page_ids, length))
        if self.config.format == "mxfp8":
            return KVOperands(
                *ref.gather_mxfp8(kv.k, kv.k_scale, kv.v, kv.v_scale, page_ids, length)
            )
        return KVOperands(
            *ref.gather_qk4pv8(
                kv.k, kv.k_scale, kv.v, kv.aux_delta, kv.aux_channels, page_ids, length
            )
        )

    def _load_ragged(self, kv: QuantizedKV, request: int, begin: int, end: int) -> KVOperands:
        if self.config.format == "mxfp8":
            first = ragged_v_scale_rows(self.kv_indptr)[request]
            return KVOperands(
                *ref.dequantize_ragged_mxfp8(kv.k, kv.k_scale, kv.v, kv.v_scale, begin, end, first)
            )
        k, v = ref.dequantize_ragged_qk4pv8(kv.k, kv.k_scale, kv.v, begin, end)
        delta = channels = None
        if kv.aux_delta is not None:
            delta = kv.aux_delta[:, begin:end].transpose(0, 1).float()
        if kv.aux_channels is not None:
            channels = kv.aux_channels[begin:end].float()
        return KVOperands(k, v, delta, channels)

    def run(self) -> None:
        spec, plan = self.spec, self.plan
        self.inputs_kv = self.inputs.kv
        self._prepare_kv()
        shape = (plan.nnz_qo, spec.num_kv_heads, spec.group_size)
        out = self.query.q.new_full((*shape, spec.head_dim), torch.nan)
        lse = self.query.q.new_full(shape, torch.nan)
        # Items of one request one after another: their order changes no result.
        valid = self.items[self.items[:, 0] >= 0]
        for item in valid[torch.argsort(valid[:, 0], stable=True)].tolist():
            self._run_item(item, out, lse)
        self._merge(out.flatten(1, 2), lse.flatten(1, 2))
        self._finish(out.flatten(1, 2), lse.flatten(1, 2))

    def _run_item(self, item: list[int], out: torch.Tensor, lse: torch.Tensor) -> None:
        request, q_begin, q_len, head_group, kv_begin, kv_end, partial_row, stride = item
        spec = self.spec
        per_group = self.plan.request.heads_per_group
        heads = list(
            range(head_group * per_group, min((head_group + 1) * per_group, spec.group_size))
        )
        first = self.qo_indptr[request] + q_begin
        rows = slice(first, first + q_len)
        query = QueryOperands(
            self.query.q[rows],
            None if self.query.a_comp is None else self.query.a_comp[rows],
            None if self.query.row_term is None else self.query.row_term[rows],
        )
        tile = TileSpec(
            q_begin=q_begin,
            qo_len=self.qo_indptr[request + 1] - self.qo_indptr[request],
            kv_len=self.kv_len[request],
            kv_begin=kv_begin,
            kv_end=kv_end,
            causal=spec.causal,
            window_left=spec.window_left,
            sm_scale=spec.sm_scale,
            logits_soft_cap=spec.logits_soft_cap,
        )
        kv = self.kv_operands(request)
        o, item_lse = attend_tile(query, kv, heads, spec.group_size, tile, self.scheme)
        if partial_row < 0:
            out[rows, :, heads] = o
            lse[rows, :, heads] = item_lse
            return
        target = torch.arange(q_len, device=out.device) * stride + partial_row
        shape = (-1, spec.num_kv_heads, spec.group_size)
        for i, head in enumerate(heads):
            self.partial_o.view(*shape, spec.head_dim)[target, :, head] = o[:, :, i]
            self.partial_lse.view(shape)[target, :, head] = item_lse[:, :, i]

    def _merge(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Combine the partials of each query token; tokens with equal counts go together."""
        begins = self.merge_indptr[:-1].long()
        counts = self.merge_indptr[1:].long() - begins
        for count in counts.unique().tolist():
            if count == 0:
                continue
            tokens = (counts == count).nonzero().flatten()
            rows = begins[tokens] + torch.arange(count, device=out.device)[:, None]
            out[tokens], lse[tokens] = merge_base2(self.partial_o[rows], self.partial_lse[rows])

    def _finish(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Restore the dropped row term in the LSE, add the sinks, convert and store."""
        spec, sinks = self.spec, self.inputs.sinks
        if self.query.row_term is not None and spec.logits_soft_cap == 0.0:
            lse = lse + (spec.sm_scale * LOG2E) * self.query.row_term
        if sinks is not None:
            sink = (sinks * LOG2E).expand_as(lse)
            top = torch.maximum(lse, sink)
            anchor = torch.where(top == -torch.inf, 0.0, top)
            total = exp2_rounded(lse - anchor) + exp2_rounded(sink - anchor)
            with_sink = anchor + torch.log2(total)
            keep = torch.where(lse == -torch.inf, 0.0, exp2_rounded(lse - with_sink))
            out = out * keep.unsqueeze(-1)
            lse = with_sink
        self.inputs.out[: self.plan.nnz_qo].copy_(out)
        self.inputs.lse[: self.plan.nnz_qo].copy_(lse)


def run(
    spec,
    plan: Plan,
    metadata: torch.Tensor,
    workspace: torch.Tensor,
    inputs,
    scheme: Scheme | None = None,
) -> None:
    """Attention of one planned batch; ``inputs`` are checked by the wrapper. ``scheme``: another
    kernel's numerics than those that the cache format implies."""
    ReferenceRun(spec, plan, metadata, workspace, inputs, scheme).run()
