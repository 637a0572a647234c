# SPDX-License-Identifier: Apache-2.0
"""Runs a plan on an attention kernel: quantise what is raw, launch, combine split partials.

On a GPU everything is a launch on the current stream: no synchronisation, no host decision from
device values, no allocation; with a plan for CUDA graphs the sequence can be captured. Operands
that run() quantises go to the workspace sections that the plan reserved.

On the simulator the attention kernel and the combine are the shipped PTX, executed on CPU tensors.
Quantisation comes from mpfa.reference there, whose bytes the quantise kernels reproduce.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpfa.backends import cuda, kernels, reference
from mpfa.cache import PagedKVCache
from mpfa.config import KVCacheConfig
from mpfa.jit import attention
from mpfa.operands import Inputs
from mpfa.planner import METADATA_SECTIONS, Plan
from mpfa.planning import AttentionSpec
from mpfa.quantized import QuantizedKV, QuantizedQuery, query_layout, ragged_layout
from mpfa.stats import SmoothingStats, request_rows


@dataclass(frozen=True)
class Query:
    """A quantised query, every tensor [tokens, Hq, ...]."""

    q: Tensor
    q_scale: Tensor
    a_comp: Tensor | None
    row_term: Tensor | None


@dataclass(frozen=True)
class RawQuery:
    """A bf16 or fp16 query [tokens, Hq, D] and what centres it: fp32 [(requests,) heads, D] means and
    int32 [Hkv, c] channels, as far as the compensation has them."""

    q: Tensor
    q_mean: Tensor | None
    k_mean: Tensor | None
    channel_index: Tensor | None


@dataclass(frozen=True)
class KeysValues:
    """K and V as the kernel reads them: pages, or ragged."""

    k: Tensor
    k_scale: Tensor
    v: Tensor
    v_scale: Tensor | None
    aux_delta: Tensor | None
    aux_channels: Tensor | None


def _bytes(t: Tensor | None) -> Tensor | None:
    """8-bit floats as uint8: the bindings take bytes."""
    return t.view(torch.uint8) if t is not None and t.element_size() == 1 else t


class Launcher:
    """One plan on one kernel. ``run`` may be called for every layer."""

    def __init__(
        self,
        kernel: kernels.AttentionKernel,
        spec: AttentionSpec,
        plan: Plan,
        metadata: Tensor,
        workspace: Tensor,
    ) -> None:
        self.kernel, self.spec, self.plan, self.workspace = kernel, spec, plan, workspace
        self.graph = plan.request.use_cuda_graph
        self.meta = {name: plan.metadata_view(metadata, name) for name in METADATA_SECTIONS}
        # The rows that this batch has, or the capacity of a graph.
        self.requests = plan.request.max_batch_size if self.graph else plan.batch_size
        heads, dim = spec.num_qo_heads, spec.head_dim
        rows = plan.sizes["partial_lse"] // (4 * heads)
        self.partial_o = self.section("partial_o", (rows, heads, dim), torch.float32)
        self.partial_lse = self.section("partial_lse", (rows, heads), torch.float32)
        self.module = self.load_module()

    def load_module(self) -> Any:
        return attention.load(attention.attention_spec(self.kernel, self.spec.head_dim))

    def section(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A section of the workspace as a dense tensor."""
        flat = self.plan.scratch(self.workspace, name, dtype)
        return flat[: math.prod(shape)].view(shape)

    def run(self, inputs: Inputs) -> None:
        stats = self.statistics(inputs)
        query = self.query(inputs, stats)
        kv = self.keys_values(inputs, stats)
        self.launch(query, kv, inputs)

    # ---- operands -------------------------------------------------------------------------------

    def statistics(self, inputs: Inputs) -> SmoothingStats | None:
        """The statistics of raw operands, per-request ones in a fixed place under a graph."""
        stats, config = inputs.stats, inputs.config
        raw = isinstance(inputs.kv, tuple) or not isinstance(inputs.q, QuantizedQuery)
        if not config.needs_stats or not raw:
            return stats
        if stats is None:
            return self.request_means(inputs)
        if stats.is_static or not self.graph:
            return stats
        heads, dim = self.spec.num_qo_heads, self.spec.head_dim
        q_mean = self.section("stats_q_mean", (self.requests, heads, dim), torch.float32)
        k_shape = (self.requests, self.spec.num_kv_heads, dim)
        k_mean = self.section("stats_k_mean", k_shape, torch.float32)
        rows = stats.batch_size
        q_mean[:rows].copy_(stats.q_mean)
        k_mean[:rows].copy_(stats.k_mean)
        return _Means(q_mean, k_mean, stats.channel_index)

    def request_means(self, inputs: Inputs) -> Any:
        """Per-request means of raw q and k (paper equation 7)."""
        k = inputs.kv[0]
        means = []
        for x, name, indptr in (
            (inputs.q, "stats_q_mean", self.meta["qo_indptr"]),
            (k, "stats_k_mean", self.meta["kv_indptr"]),
        ):
            shape = (self.requests, x.shape[1], self.spec.head_dim)
            slices = cuda.num_slices(x.shape[0], self.requests)
            partial = (self.requests, slices, x.shape[1] * self.spec.head_dim, 2)
            mean = self.section(name, shape, torch.float32)
            scratch = self.section("mean_partial", partial, torch.float32)
            means.append(cuda.segment_mean(x, indptr, mean=mean, partial=scratch))
        return _Means(means[0], means[1], None)

    def query(self, inputs: Inputs, stats: SmoothingStats | None) -> Query:
        q = inputs.q
        if isinstance(q, QuantizedQuery):
            return Query(q.q, q.q_scale, q.a_comp, q.row_term)
        layout = query_layout(inputs.config, q.shape[0])
        parts = {
            name: None if want is None else self.section(name, *want)
            for name, want in layout.items()
        }
        query = Query(**parts)
        self.quantize_query(q, inputs.config, stats, query)
        return query

    def keys_values(self, inputs: Inputs, stats: SmoothingStats | None) -> KeysValues:
        kv = inputs.kv
        if isinstance(kv, (PagedKVCache, QuantizedKV)):
            return KeysValues(kv.k, kv.k_scale, kv.v, kv.v_scale, kv.aux_delta, kv.aux_channels)
        tokens = kv[0].shape[0]
        layout = ragged_layout(inputs.config, tokens)
        if layout["v_scale"] is not None:
            (_, *rest), dtype = layout["v_scale"]
            capacity = self.plan.sizes["v_scale"] // math.prod(rest)
            rows = capacity if self.graph else int(self.plan.v_block_indptr[-1])
            layout["v_scale"] = ((rows, *rest), dtype)
        parts = {
            name: None if want is None else self.section(name, *want)
            for name, want in layout.items()
        }
        target = KeysValues(**parts)
        self.quantize_kv(*kv, inputs.config, stats, target)
        return target

    def quantize_query(self, q: Tensor, config: KVCacheConfig, stats: Any, target: Query) -> None:
        if config.format == "mxfp8":
            torch.ops.mpfa.quantize_query_mxfp8(q, target.q, target.q_scale, False)
            return
        torch.ops.mpfa.quantize_query_qk4pv8(
            q, None, self._rows_of(stats, "qo_indptr"), *cuda.statistics(config, stats), target.q,
            target.q_scale, target.a_comp, target.row_term, config.num_kv_heads,
            config.four_over_six, False,
        )  # fmt: skip

    def quantize_kv(
        self, k: Tensor, v: Tensor, config: KVCacheConfig, stats: Any, target: KeysValues
    ) -> None:
        if config.format == "mxfp8":
            torch.ops.mpfa.quantize_kv_mxfp8(
                k, v, self.meta["kv_indptr"], self.meta["v_block_indptr"], target.k,
                target.k_scale, target.v, target.v_scale, False,
            )  # fmt: skip
            return
        torch.ops.mpfa.quantize_kv_qk4pv8(
            k, v, self._rows_of(stats, "kv_indptr"), *cuda.statistics(config, stats), target.k,
            target.k_scale, target.v, target.aux_delta, target.aux_channels, config.num_qo_heads,
            config.four_over_six, False,
        )  # fmt: skip

    def _rows_of(self, stats: Any, indptr: str) -> Tensor | None:
        """Where per-request statistics find the request of a token."""
        return None if stats is None or stats.is_static else self.meta[indptr]

    # ---- launches -------------------------------------------------------------------------------

    def launch(self, query: Query, kv: KeysValues, inputs: Inputs) -> None:
        spec, meta = self.spec, self.meta
        if inputs.out.shape[0] == 0:
            return
        self.module.run(
            _bytes(query.q), _bytes(query.q_scale), query.a_comp, query.row_term,
            _bytes(kv.k), _bytes(kv.k_scale), _bytes(kv.v), _bytes(kv.v_scale), kv.aux_delta,
            kv.aux_channels, meta["header"], meta["qo_indptr"], meta["kv_indptr"], meta["kv_len"],
            None if spec.page_size is None else meta["kv_indices"], meta["items"],
            meta["worker_indptr"], meta["v_block_indptr"], self.partial_o, self.partial_lse,
            inputs.out, inputs.lse, inputs.sinks, spec.sm_scale, spec.logits_soft_cap,
            spec.window_left, spec.causal, self.plan.num_workers,
        )  # fmt: skip
        self.combine(query.row_term, inputs)

    def combine(self, row_term: Tensor | None, inputs: Inputs) -> None:
        """Merges the partial rows; ``row_term``: what the kernel has left for their LSE."""
        # A graph may be planned again with more partitions: its combine is always launched.
        if self.partial_lse.shape[0] > 0:
            cuda.combine_plan(
                self.partial_o, self.partial_lse, self.meta["header"], self.meta["merge_indptr"],
                row_term, inputs.out, inputs.lse, inputs.sinks, self.spec.sm_scale,
                self.spec.logits_soft_cap, pdl=True,
            )  # fmt: skip


class RawQueryLauncher(Launcher):
    """A kernel that takes the query as it is, with the statistics that centre it."""

    def query(self, inputs: Inputs, stats: SmoothingStats | None) -> Query | RawQuery:
        q = inputs.q
        if isinstance(q, QuantizedQuery):
            return Query(q.q, q.q_scale, q.a_comp, q.row_term)
        return RawQuery(q, *cuda.statistics(inputs.config, stats))

    def launch(self, query: Query | RawQuery, kv: KeysValues, inputs: Inputs) -> None:
        spec, meta, request = self.spec, self.meta, self.plan.request
        if inputs.out.shape[0] == 0:
            return
        if isinstance(query, RawQuery):
            operands = (query.q, None, None, None, query.q_mean, query.k_mean, query.channel_index)
        else:
            operands = (query.q, query.q_scale, query.a_comp, query.row_term, None, None, None)
        self.module.run(
            *operands, kv.k, kv.k_scale, _bytes(kv.v), kv.aux_delta, kv.aux_channels,
            meta["header"], meta["qo_indptr"], meta["kv_indptr"], meta["kv_len"],
            meta["kv_indices"], meta["items"], meta["worker_indptr"], meta["v_block_indptr"],
            self.partial_o, self.partial_lse, inputs.out, inputs.lse, inputs.sinks, spec.sm_scale,
            spec.logits_soft_cap, spec.window_left, spec.causal, self.plan.num_workers,
            request.q_tile_tokens * request.heads_per_group,
        )  # fmt: skip
        self.combine(None, inputs)


@dataclass(frozen=True)
class _Means:
    """Statistics in workspace memory. Not a SmoothingStats, whose checks look at values."""

    q_mean: Tensor
    k_mean: Tensor
    channel_index: Tensor | None
    is_static: bool = False


class SimulatedLauncher(Launcher):
    """The same on CPU tensors: PTX through the simulator, quantisation through mpfa.reference."""

    def load_module(self) -> Any:
        return attention.load_simulated(attention.attention_spec(self.kernel, self.spec.head_dim))

    def request_means(self, inputs: Inputs) -> SmoothingStats:
        return reference.request_means(self.plan, inputs)

    def statistics(self, inputs: Inputs) -> SmoothingStats | None:
        if inputs.config.needs_stats and inputs.stats is None:
            return self.request_means(inputs)
        return inputs.stats

    def quantize_query(
        self, q: Tensor, config: KVCacheConfig, stats: SmoothingStats | None, target: Query
    ) -> None:
        tokens = self.plan.nnz_qo
        rows = None
        if stats is not None and not stats.is_static:
            rows = request_rows(self.plan.qo_indptr.tolist())
        made = reference.quantize_query(q[:tokens], config, stats, rows)
        _store(made, target, tokens)

    def quantize_kv(
        self,
        k: Tensor,
        v: Tensor,
        config: KVCacheConfig,
        stats: SmoothingStats | None,
        target: KeysValues,
    ) -> None:
        tokens, bounds = self.plan.nnz_kv, self.plan.kv_indptr.tolist()
        rows = None
        if stats is not None and not stats.is_static:
            rows = request_rows(bounds)
        made = reference.quantize_kv(
            k[:tokens], v[:tokens], config, self.plan.kv_indptr, bounds, stats, rows
        )
        _store(made, target, tokens)

    def launch(self, query: Query, kv: KeysValues, inputs: Inputs) -> None:
        from mpfa import sim

        simulator = sim.simulator()
        operands = [*vars(query).values(), *vars(kv).values(), *self.meta.values()]
        operands += [self.workspace, inputs.out, inputs.lse, inputs.sinks]
        launched, told = len(simulator.launches()), simulator.last_message()
        error = None
        with (
            simulator.tensors(*(t for t in operands if t is not None)),
            _playing(simulator, self.kernel.major),
        ):
            try:
                super().launch(query, kv, inputs)
            except RuntimeError as caught:
                error = caught
            # why without an error too: the simulator may run a launch only when asked about it.
            reports = [x["error"] for x in simulator.launches()[launched:] if x["error"]]
            # A launch that was refused leaves no record. A message from before is another launch's.
            message = simulator.last_message()
        if not reports and error is not None and message != told:
            reports = [message]
        if reports:
            raise sim.SimulationError(f"{self.kernel.module}: {reports[-1]}") from error
        if error is not None:
            raise error


def _playing(simulator: Any, major: int):
    """Makes the simulator play a GPU of ``major``, unless it already does (12.1 for 12.0)."""
    digits = "".join(c for c in simulator.option("device") if c.isdigit())
    if digits and int(digits) // 10 == major:
        return contextlib.nullcontext()
    return simulator.options(device=attention.SIM_DEVICES[major])


def _store(made: QuantizedQuery | QuantizedKV, target: Query | KeysValues, tokens: int) -> None:
    """Copy the reference's result to where the plan keeps it, bit for bit."""
    for name in vars(target):
        source, place = getattr(made, name), getattr(target, name)
        # why numel: an empty slice of aux_delta keeps its strides and has no byte view.
        if source is None or source.numel() == 0:
            continue
        if name == "aux_delta":
            place = place[:, :tokens]
        elif name == "v_scale":
            place = place[: source.shape[0]]
        else:
            place = place[:tokens]
        place.view(torch.uint8).copy_(source.contiguous().view(torch.uint8))


def launcher(
    backend: str,
    format: str,
    spec: AttentionSpec,
    plan: Plan,
    metadata: Tensor,
    workspace: Tensor,
) -> Launcher:
    """The launcher of a wrapper's backend; loads (at first use compiles) its module."""
    kernel = kernels.find_kernel(plan.request.mode, backend=backend, format=format)
    kind = SimulatedLauncher if backend == "sim" else Launcher
    if kernel.raw_query:
        kind = RawQueryLauncher
    return kind(kernel, spec, plan, metadata, workspace)
