# SPDX-License-Identifier: Apache-2.0
"""What both wrappers share: the workspace, plan() and the checks of run()."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mpfa.append import bound_stats
from mpfa.cache import PagedKVCache
from mpfa.config import (
    COMPENSATION_SLOTS,
    HEAD_DIMS,
    MX_BLOCK,
    KVCacheConfig,
    check_heads,
    check_is_config,
)
from mpfa.errors import (
    HALF_DTYPES,
    INT32_MAX,
    check_choice,
    check_distinct,
    check_int,
    check_is_tensor,
    check_real,
    check_tensor,
    dtype_name,
)
from mpfa.merge import LSE_BASES
from mpfa.planner import Plan, PlanRequest, make_plan
from mpfa.quantized import QuantizedKV, QuantizedQuery
from mpfa.stats import SmoothingStats
from mpfa.support import resolve_backend

# The M=128 tile of the SM100 kernels; the reference backend walks the same tiles.
Q_TILE_ROWS = 128
# KV blocks start at multiples of 128 from the request's token 0; SM120's smaller blocks divide it.
KV_BLOCK = 128
# Paper section 5.3: fixed chunks of 8 x 128 tokens.
DECODE_PARTITION_TOKENS = 8 * KV_BLOCK
# Query heads that one decode tile packs; larger groups take several head groups.
MAX_PACKED_HEADS = 16
# why: plans for CPU tensors need some machine size; results do not depend on it. 148 = B200.
REFERENCE_NUM_SM = 148


@dataclass(frozen=True)
class AttentionSpec:
    """The scalar options of plan(), as every backend reads them."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int | None
    causal: bool
    sm_scale: float
    window_left: int
    logits_soft_cap: float
    config: KVCacheConfig | None

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads


@dataclass(frozen=True)
class Inputs:
    """Checked arguments of one run(), as every backend reads them."""

    q: torch.Tensor | QuantizedQuery
    kv: PagedKVCache | QuantizedKV | tuple[torch.Tensor, torch.Tensor]
    config: KVCacheConfig
    stats: SmoothingStats | None
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor


def make_spec(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int | None,
    causal: bool,
    sm_scale: float | None,
    window_left: int,
    logits_soft_cap: float | None,
    config: KVCacheConfig | None,
    paged: bool,
) -> AttentionSpec:
    check_int("num_qo_heads", num_qo_heads, 1)
    check_int("num_kv_heads", num_kv_heads, 1)
    check_heads(num_qo_heads, num_kv_heads)
    check_int("head_dim", head_dim, 1)
    check_choice("head_dim", head_dim, HEAD_DIMS)
    check_int("window_left", window_left, -1)
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected a bool, got {type(causal).__name__}")
    cap = 0.0 if logits_soft_cap is None else check_real("logits_soft_cap", logits_soft_cap)
    if not (math.isfinite(cap) and cap >= 0.0):
        raise ValueError(
            f"logits_soft_cap: must be finite and >= 0 (0 = off), got {logits_soft_cap}"
        )
    scale = 1.0 / math.sqrt(head_dim) if sm_scale is None else check_real("sm_scale", sm_scale)
    if not (math.isfinite(scale) and scale > 0.0):
        raise ValueError(f"sm_scale: must be finite and > 0, got {sm_scale}")
    if config is not None:
        check_is_config(config)
    if paged:
        if page_size is None:
            if config is None:
                raise ValueError("page_size: required when paged_kv_indices is given, got None")
            page_size = config.page_size
        # The union of the page sizes of all formats; a format's own list is checked with its config.
        check_int("page_size", page_size, 1)
        check_choice("page_size", page_size, (1, 16, 32, 64, 128))
    if config is not None:
        pairs = [
            ("num_qo_heads", num_qo_heads, config.num_qo_heads),
            ("num_kv_heads", num_kv_heads, config.num_kv_heads),
            ("head_dim", head_dim, config.head_dim),
        ]
        if paged:
            pairs.append(("page_size", page_size, config.page_size))
        for name, given, wanted in pairs:
            if given != wanted:
                raise ValueError(f"{name}: plan says {given}, config says {wanted}")
    return AttentionSpec(
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size if paged else None,
        causal,
        scale,
        window_left,
        cap,
        config,
    )


def host_int32(name: str, tensor: object) -> torch.Tensor:
    """An index tensor of plan() on the host; a device tensor is copied (plan() may synchronise)."""
    tensor = check_is_tensor(name, tensor)
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name}: dtype must be int32, got {dtype_name(tensor.dtype)}")
    if tensor.dim() != 1:
        raise ValueError(f"{name}: must be 1-D, got shape {list(tensor.shape)}")
    return tensor.detach().to("cpu").contiguous()


def partition_tokens(fixed_split_pages: int | None, page_size: int | None, default: int) -> int:
    """Tokens of one KV partition; 0 = never split. Ragged plans count pages of 128 tokens."""
    if fixed_split_pages is None:
        return default
    check_int("fixed_split_pages", fixed_split_pages, 1)
    tokens = fixed_split_pages * (page_size or KV_BLOCK)
    if tokens % KV_BLOCK != 0:
        raise ValueError(
            f"fixed_split_pages: a partition must be a multiple of {KV_BLOCK} tokens, got "
            f"{fixed_split_pages} pages x {page_size} = {tokens} tokens"
        )
    if tokens > INT32_MAX:
        raise ValueError(
            f"fixed_split_pages: a partition must have at most {INT32_MAX} tokens, got "
            f"{fixed_split_pages} pages = {tokens} tokens"
        )
    return tokens


def check_graph_limits(use_cuda_graph: bool, limits: dict[str, int | None]) -> None:
    for name, value in limits.items():
        if value is not None:
            check_int(name, value, 1)
        elif use_cuda_graph:
            raise ValueError(f"{name}: required when use_cuda_graph=True, got None")


def scratch_sections(
    spec: AttentionSpec, rows: int, stats_rows: int
) -> tuple[tuple[str, int], ...]:
    """Caller-owned regions of the workspace: the quantised query and, for graphs, the statistics.

    Without a config the largest format counts, since run() learns the format from its arguments.
    """
    heads, d = spec.num_qo_heads, spec.head_dim
    config = spec.config
    elements = rows * heads
    mean_bytes = 4 * d * stats_rows
    if config is None:
        q, scale, slots, centred = d, d // 16, COMPENSATION_SLOTS, True
    elif config.format == "bf16":
        q, scale, slots, centred = 0, 0, 0, False
    elif config.format == "mxfp8":
        q, scale, slots, centred = d, d // MX_BLOCK, 0, False
    else:
        q, scale, slots, centred = d // 2, d // 16, config.comp_slots, config.uses_mean
    return (
        ("q", elements * q),
        ("q_scale", elements * scale),
        ("a_comp", elements * slots * 2),
        ("row_term", elements * 4 if centred else 0),
        ("stats_q_mean", mean_bytes * heads if centred else 0),
        ("stats_k_mean", mean_bytes * spec.num_kv_heads if centred else 0),
    )


class AttentionWrapper:
    """Base of BatchPrefillWrapper and BatchDecodeWrapper; not part of the public API.

    plan() metadata lives in a buffer of the wrapper's own and the workspace holds only what one run()
    needs, so wrappers may share a workspace as long as their runs do not overlap in time.
    """

    _operation = ""

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
        workspace = check_is_tensor("workspace", workspace)
        if not workspace.is_contiguous():
            raise ValueError(
                f"workspace: must be contiguous, got strides {tuple(workspace.stride())}"
            )
        if workspace.numel() and workspace.data_ptr() % 16 != 0:
            raise ValueError("workspace: its address must be a multiple of 16 bytes")
        limits = {
            "max_batch_size": max_batch_size,
            "max_total_qo_len": max_total_qo_len,
            "max_num_pages": max_num_pages,
        }
        check_graph_limits(use_cuda_graph, limits)
        self._workspace = workspace.reshape(-1).view(torch.uint8)
        self._backend = resolve_backend(backend, workspace.device, self._operation)
        self._use_cuda_graph = bool(use_cuda_graph)
        self._limits = limits
        self._plan: Plan | None = None
        self._spec: AttentionSpec | None = None
        self._metadata: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self._workspace.device

    @property
    def backend(self) -> str:
        """The backend that run() uses."""
        return self._backend

    @property
    def work_list(self) -> torch.Tensor:
        """The plan's work items, int32 [n, 8] on the host, in worker order (docs/planner.md).

        Columns: request, q_begin, q_len, head_group, kv_begin, kv_end, partial_row, partial_stride.
        """
        return self._require_plan().items

    def plan_summary(self) -> str:
        """The current plan as text.

        Raises:
            RuntimeError: plan() has not been called.
        """
        return self._require_plan().summary()

    def _require_plan(self) -> Plan:
        if self._plan is None:
            raise RuntimeError(
                f"{type(self).__name__}: call plan() before run(), work_list or plan_summary()"
            )
        return self._plan

    def _set_plan(self, spec: AttentionSpec, request: PlanRequest) -> None:
        plan = make_plan(request)
        if plan.scratch_bytes > self._workspace.numel():
            raise ValueError(
                f"workspace: needs {plan.scratch_bytes} bytes for this plan, got "
                f"{self._workspace.numel()} (mpfa.workspace_size() tells before planning)"
            )
        # why: a graph holds the address of the metadata; its capacity does not change over replans.
        if self._metadata is None or self._metadata.numel() < plan.metadata_bytes:
            # why: a buffer made in inference mode could not be written by a plan() outside of it.
            with torch.inference_mode(False):
                self._metadata = torch.empty(
                    plan.metadata_bytes, dtype=torch.uint8, device=self._workspace.device
                )
        plan.upload(self._metadata)
        self._plan, self._spec = plan, spec

    @torch.no_grad()
    def _run(
        self,
        q: torch.Tensor | QuantizedQuery,
        kv: object,
        stats: SmoothingStats | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        lse_base: str,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        plan = self._require_plan()
        spec = self._spec
        check_choice("lse_base", lse_base, LSE_BASES)
        if self.device.type == "cuda" and not self._use_cuda_graph:
            _refuse_capture(type(self).__name__)
        config, stats = self._check_kv(plan, spec, kv, stats)
        stats = self._request_means(plan, config, q, kv, stats)
        q_dtype = self._check_q(plan, spec, q, config, stats)
        heads = spec.num_qo_heads
        if sinks is not None:
            check_tensor("sinks", sinks, shape=(heads,), dtype=torch.float32, device=self.device)
            # why the factor: the sink joins a base-2 LSE, where 2.4e38 would already be infinite.
            base2 = sinks * math.log2(math.e)
            if sinks.device.type == "cpu" and bool((base2.isnan() | base2.isposinf()).any()):
                raise ValueError("sinks: must be -inf or below 2.3e38, found NaN, +inf or more")
        shape = (plan.nnz_qo, heads, spec.head_dim)
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
        inputs = Inputs(q, kv, config, stats, sinks, out, lse)
        from mpfa.backends import reference

        reference.run(spec, plan, self._metadata, self._workspace, inputs)
        if lse_base == "ln":
            lse.mul_(math.log(2.0))
        return (out, lse) if return_lse else out

    def _check_kv(
        self,
        plan: Plan,
        spec: AttentionSpec,
        kv: object,
        stats: SmoothingStats | None,
    ) -> tuple[KVCacheConfig, SmoothingStats | None]:
        paged = spec.page_size is not None
        name = "cache" if self._operation == "decode" else "kv"
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
            if kv.num_tokens != plan.nnz_kv:
                raise ValueError(
                    f"{name}: the plan has {plan.nnz_kv} KV tokens, got {kv.num_tokens}"
                )
            if kv.indptr.device.type == "cpu" and not torch.equal(kv.indptr, plan.kv_indptr):
                raise ValueError(
                    f"{name}.indptr: K/V were quantised for other requests ({kv.indptr.tolist()}) than "
                    f"kv_indptr of the plan ({plan.kv_indptr.tolist()})"
                )
        elif isinstance(kv, tuple) and len(kv) == 2:
            if paged:
                raise ValueError(f"{name}: the plan is paged, got a ragged (k, v) tuple")
            shape = (plan.nnz_kv, spec.num_kv_heads, spec.head_dim)
            check_tensor("k", kv[0], shape=shape, dtype=HALF_DTYPES, device=self.device)
            check_tensor("v", kv[1], shape=shape, dtype=HALF_DTYPES, device=self.device)
            config = spec.config or KVCacheConfig(
                "qk4pv8", spec.num_kv_heads, spec.head_dim, 128, spec.num_qo_heads
            )
        else:
            raise TypeError(
                f"{name}: expected PagedKVCache, QuantizedKV or a (k, v) tuple, got {type(kv).__name__}"
            )
        if not isinstance(kv, tuple):
            if kv.device != self.device:
                raise ValueError(f"{name}: must be on device {self.device}, got {kv.device}")
            _check_config(name, config, spec)
        self._check_stats(plan, config, stats, ragged_input=isinstance(kv, tuple))
        return config, stats if config.needs_stats else None

    def _check_stats(
        self, plan: Plan, config: KVCacheConfig, stats: SmoothingStats | None, *, ragged_input: bool
    ) -> None:
        if not config.needs_stats:
            return
        if stats is None:
            # Raw K/V of a centred format: run() computes the per-request means itself.
            if ragged_input and not config.uses_channels:
                return
            raise ValueError(
                f"stats: compensation {config.compensation!r} needs SmoothingStats, got None"
            )
        stats.check_against(config, device=self.device, batch_size=plan.batch_size)

    def _request_means(
        self,
        plan: Plan,
        config: KVCacheConfig,
        q: torch.Tensor | QuantizedQuery,
        kv: object,
        stats: SmoothingStats | None,
    ) -> SmoothingStats | None:
        """Per-request means of raw (k, v) where none were given."""
        if not config.needs_stats or stats is not None:
            return stats
        if isinstance(q, QuantizedQuery):
            if q.stats is not None:
                q.stats.check_against(config, device=self.device, batch_size=plan.batch_size)
            return q.stats
        shape = (plan.nnz_qo, config.num_qo_heads, config.head_dim)
        check_tensor("q", q, shape=shape, dtype=HALF_DTYPES, device=self.device)
        return SmoothingStats.from_tensors(
            q,
            kv[0],
            plan.qo_indptr.to(self.device),
            kv_indptr=plan.kv_indptr.to(self.device),
        )

    def _check_q(
        self,
        plan: Plan,
        spec: AttentionSpec,
        q: torch.Tensor | QuantizedQuery,
        config: KVCacheConfig,
        stats: SmoothingStats | None,
    ) -> torch.dtype:
        if not isinstance(q, QuantizedQuery):
            shape = (plan.nnz_qo, spec.num_qo_heads, spec.head_dim)
            check_tensor("q", q, shape=shape, dtype=HALF_DTYPES, device=self.device)
            return q.dtype
        if q.device != self.device:
            raise ValueError(f"q: must be on device {self.device}, got {q.device}")
        if q.num_tokens != plan.nnz_qo:
            raise ValueError(f"q: the plan has {plan.nnz_qo} query tokens, got {q.num_tokens}")
        same = (
            q.config.format == config.format
            and q.config.compensation == config.compensation
            and q.config.channels == config.channels
            and q.config.num_qo_heads == config.num_qo_heads
            and q.config.num_kv_heads == config.num_kv_heads
            and q.config.head_dim == config.head_dim
        )
        if not same:
            raise ValueError(f"q: quantised for {q.config}, but K/V are {config}")
        if config.needs_stats and q.stats is not stats:
            raise ValueError("q: quantised with another SmoothingStats object than K/V")
        return q.dtype


def _check_config(name: str, config: KVCacheConfig, spec: AttentionSpec) -> None:
    """K/V that reach run() must be of the format, heads and page size that plan() was told."""
    pairs = [
        ("num_qo_heads", spec.num_qo_heads, config.num_qo_heads),
        ("num_kv_heads", spec.num_kv_heads, config.num_kv_heads),
        ("head_dim", spec.head_dim, config.head_dim),
    ]
    if spec.page_size is not None:
        pairs.append(("page_size", spec.page_size, config.page_size))
    for field, planned, found in pairs:
        if planned != found:
            raise ValueError(f"{name}.config.{field}: plan() said {planned}, run() got {found}")
    if spec.config is not None:
        for field in ("format", "compensation", "channels"):
            planned, found = getattr(spec.config, field), getattr(config, field)
            if planned != found:
                raise ValueError(
                    f"{name}.config.{field}: plan() said {planned!r}, run() got {found!r}"
                )


def _refuse_capture(wrapper: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{wrapper}: run() is being captured into a CUDA graph; construct the wrapper with "
            "use_cuda_graph=True and its max_* limits"
        )
