# SPDX-License-Identifier: Apache-2.0
"""From the arguments of plan() to a PlanRequest: one builder for both wrappers and workspace_size()."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from mpfa.backends import kernels
from mpfa.config import (
    HEAD_FIELDS,
    MX_BLOCK,
    PAGE_SIZES,
    KVCacheConfig,
    check_heads,
    check_is_config,
    first_difference,
)
from mpfa.errors import (
    FLOAT32_MAX,
    FLOAT32_NORMAL,
    FLOAT32_SUBNORMAL,
    INT32_MAX,
    Layout,
    check_choice,
    check_int,
    check_is_tensor,
    check_real,
    dtype_name,
)
from mpfa.planner import PlanRequest
from mpfa.quantized import query_layout, ragged_layout

# Partitions are whole steps of every kernel: SM120's smaller ones divide it.
PARTITION_UNIT = 128
# What raw (k, v) become when plan() was given no config.
DEFAULT_FORMAT = "qk4pv8"
LOG2E = math.log2(math.e)


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

    @property
    def shared_fields(self) -> tuple[str, ...]:
        """Fields that a KVCacheConfig of this attention has too."""
        return HEAD_FIELDS if self.page_size is None else (*HEAD_FIELDS, "page_size")


@dataclass(frozen=True)
class PlanOptions:
    """Keyword arguments that prefill and decode plans share, the constructor's limits and num_sm.

    ``tile_format`` is the cache format whose kernel the plan is cut for; None = config.format, or
    the default without a config.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    num_sm: int
    causal: bool
    page_size: int | None = None
    sm_scale: float | None = None
    window_left: int = -1
    logits_soft_cap: float | None = 0.0
    config: KVCacheConfig | None = None
    fixed_split_pages: int | None = None
    use_cuda_graph: bool = False
    max_batch_size: int | None = None
    max_total_qo_len: int | None = None
    max_num_pages: int | None = None
    tile_format: str | None = None

    @property
    def limits(self) -> dict[str, int | None]:
        return {
            "max_batch_size": self.max_batch_size,
            "max_total_qo_len": self.max_total_qo_len,
            "max_num_pages": self.max_num_pages,
        }

    @property
    def format(self) -> str:
        if self.tile_format is not None:
            return self.tile_format
        return DEFAULT_FORMAT if self.config is None else self.config.format


@dataclass(frozen=True)
class BatchIndices:
    """The index tensors of plan() on the host; kv_indices and last_page_len None = ragged."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor | None
    last_page_len: torch.Tensor | None

    @property
    def batch_size(self) -> int:
        return max(self.qo_indptr.numel() - 1, 0)


# sm_scale log2(e) multiplies the scores in float32.
SM_SCALE_RANGE = (FLOAT32_NORMAL / LOG2E, FLOAT32_MAX / LOG2E)


def soft_cap_range(sm_scale: float) -> tuple[float, float]:
    """The soft caps that kernels can compute in float32, least and largest.

    They form 2 cap, sm_scale / cap and, as the exponent of tanh, 2 log2(e) sm_scale / cap. One that
    became 0 or infinite would turn the cap off, or every logit into 0 or NaN.
    """
    low = max(FLOAT32_NORMAL, 2.0 * LOG2E * sm_scale / FLOAT32_MAX)
    return low, min(FLOAT32_MAX / 2.0, sm_scale / FLOAT32_SUBNORMAL)


def make_spec(options: PlanOptions, paged: bool) -> AttentionSpec:
    o = options
    check_heads(o)
    check_int("window_left", o.window_left, -1)
    if not isinstance(o.causal, bool):
        raise TypeError(f"causal: expected a bool, got {type(o.causal).__name__}")
    scale = 1.0 / math.sqrt(o.head_dim)
    if o.sm_scale is not None:
        scale = check_real("sm_scale", o.sm_scale)
    low, high = SM_SCALE_RANGE
    if not low <= scale <= high:
        raise ValueError(
            f"sm_scale: must be finite and > 0, and in {low:.3g}..{high:.3g}, so that float32 holds "
            f"sm_scale log2(e) as a normal number; got {o.sm_scale}"
        )
    cap = 0.0
    if o.logits_soft_cap is not None:
        cap = check_real("logits_soft_cap", o.logits_soft_cap)
    low, high = soft_cap_range(scale)
    if cap != 0.0 and not low <= cap <= high:
        raise ValueError(
            f"logits_soft_cap: must be finite and >= 0; 0 is off, other values must be in "
            f"{low:.3g}..{high:.3g} with sm_scale {scale:.6g}, so that float32 holds "
            f"2 log2(e) sm_scale / logits_soft_cap; got {o.logits_soft_cap}"
        )
    if o.config is not None:
        check_is_config(o.config)
    page_size = o.page_size if paged else None
    if paged:
        if page_size is None:
            if o.config is None:
                raise ValueError("page_size: required when paged_kv_indices is given, got None")
            page_size = o.config.page_size
        check_int("page_size", page_size, 1)
        # A format's own list is checked with its config.
        check_choice("page_size", page_size, sorted({n for ns in PAGE_SIZES.values() for n in ns}))
    spec = AttentionSpec(
        o.num_qo_heads,
        o.num_kv_heads,
        o.head_dim,
        page_size,
        o.causal,
        scale,
        o.window_left,
        cap,
        o.config,
    )
    if o.config is not None:
        different = first_difference(spec, o.config, spec.shared_fields)
        if different is not None:
            name, given, wanted = different
            raise ValueError(f"{name}: plan says {given}, config says {wanted}")
    return spec


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
    tokens = fixed_split_pages * (page_size or PARTITION_UNIT)
    if tokens % PARTITION_UNIT != 0:
        raise ValueError(
            f"fixed_split_pages: a partition must be a multiple of {PARTITION_UNIT} tokens, got "
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


def mean_slices(num_tokens: int, num_requests: int) -> int:
    """Slices in which the mean kernel sums a request; each needs a partial sum."""
    average = num_tokens // num_requests if num_requests else 0
    return min(max(-(-average // 256), 1), 256)


def scratch_sections(
    spec: AttentionSpec, rows: int, requests: int, kv_tokens: int | None, graph: bool
) -> tuple[tuple[str, int], ...]:
    """Caller-owned regions of the workspace: operands that run() quantises, and statistics.

    At most ``rows`` query tokens of ``requests`` requests and, when ragged, ``kv_tokens`` KV tokens.
    Without a config the query may be of any format, since run() learns it from its arguments.
    """
    config = spec.config
    hq, hkv, d = spec.num_qo_heads, spec.num_kv_heads, spec.head_dim
    if config is None:
        default = KVCacheConfig(DEFAULT_FORMAT, hkv, d, PARTITION_UNIT, hq)
        formats = (replace(default, format="mxfp8"), replace(default, compensation="mean"))
    else:
        default, formats = config, (config,)
    low_bit = [f for f in formats if f.format != "bf16"]
    query = [_layout_bytes(query_layout(f, rows), 0) for f in low_bit]
    sections = {
        name: max((sizes[name] for sizes in query), default=0)
        for name in ("q", "q_scale", "a_comp", "row_term")
    }
    # Per-request means live here when run() computes them (ragged) or a graph needs a fixed place.
    computed = kv_tokens is not None and default.compensation == "mean"
    fixed = graph and any(f.uses_mean for f in low_bit)
    means = 4 * d * requests if computed or fixed else 0
    sections |= {"stats_q_mean": means * hq, "stats_k_mean": means * hkv}
    if kv_tokens is not None:
        slices = max(mean_slices(rows, requests) * hq, mean_slices(kv_tokens, requests) * hkv)
        sections["mean_partial"] = requests * slices * d * 8 if computed else 0
        blocks = kv_tokens // MX_BLOCK + requests
        layout = ragged_layout(default, kv_tokens)
        sections |= _layout_bytes(layout, blocks if default.format != "bf16" else None)
    return tuple(sections.items())


def _layout_bytes(layout: Layout, blocks: int | None) -> dict[str, int]:
    """Bytes of every tensor of an operand, with ``blocks`` rows of MXFP8 V scales; None = nothing."""
    sizes = {}
    for name, want in layout.items():
        if want is None or blocks is None:
            sizes[name] = 0
            continue
        shape = [blocks if isinstance(n, str) else n for n in want[0]]
        sizes[name] = math.prod(shape) * want[1].itemsize
    return sizes


def _longest(operation: str, indices: BatchIndices, options: PlanOptions) -> int:
    """Query tokens of the longest request; for a graph of any batch within the limits.

    why: the layout of a graph must not change when it is planned again with other lengths.
    """
    if options.use_cuda_graph:
        batch = options.max_batch_size if operation == "decode" else 1
        return options.max_total_qo_len // batch
    if indices.batch_size == 0:
        return 1
    return int(indices.qo_indptr.diff().max())


def plan_request(
    operation: str, indices: BatchIndices, options: PlanOptions
) -> tuple[AttentionSpec, PlanRequest]:
    """Checked options as the planner takes them."""
    o = options
    paged = indices.kv_indices is not None
    spec = make_spec(o, paged)
    check_graph_limits(o.use_cuda_graph, o.limits)
    rows = max(int(indices.qo_indptr[-1]), 0) if indices.qo_indptr.numel() else 0
    requests = indices.batch_size
    kv_tokens = None
    if not paged:
        kv_tokens = max(int(indices.kv_indptr[-1]), 0) if indices.kv_indptr.numel() else 0
    if o.use_cuda_graph:
        rows, requests = o.max_total_qo_len, o.max_batch_size
        kv_tokens = None if paged else o.max_num_pages
    tiling = kernels.tiling_for(operation, o.format, spec.head_dim)
    longest = _longest(operation, indices, o)
    tile_tokens, tile_heads = tiling.cut(longest, spec.group_size, o.config)
    split = kernels.DECODE_PARTITION_TOKENS if operation == "decode" else 0
    request = PlanRequest(
        mode=operation,
        qo_indptr=indices.qo_indptr,
        kv_indptr=indices.kv_indptr,
        kv_indices=indices.kv_indices,
        last_page_len=indices.last_page_len,
        num_qo_heads=spec.num_qo_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=spec.page_size,
        causal=spec.causal,
        window_left=spec.window_left,
        q_tile_tokens=tile_tokens,
        heads_per_group=tile_heads,
        kv_block=tiling.kv_block,
        partition_tokens=partition_tokens(o.fixed_split_pages, spec.page_size, split),
        num_sm=o.num_sm,
        workers_per_sm=tiling.workers_per_sm,
        sections=scratch_sections(spec, rows, requests, kv_tokens, o.use_cuda_graph),
        use_cuda_graph=o.use_cuda_graph,
        **(o.limits if o.use_cuda_graph else {}),
    )
    return spec, request


def prefill_request(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    paged_kv_indices: torch.Tensor | None = None,
    paged_kv_last_page_len: torch.Tensor | None = None,
    *,
    causal: bool = False,
    **options: object,
) -> tuple[AttentionSpec, PlanRequest]:
    """The arguments of BatchPrefillWrapper.plan()."""
    paged = paged_kv_indices is not None
    if paged and paged_kv_last_page_len is None:
        raise ValueError("paged_kv_last_page_len: required with paged_kv_indices, got None")
    if not paged and paged_kv_last_page_len is not None:
        raise ValueError("paged_kv_indices: required with paged_kv_last_page_len, got None")
    indices = BatchIndices(
        host_int32("qo_indptr", qo_indptr),
        host_int32("kv_indptr", kv_indptr),
        host_int32("paged_kv_indices", paged_kv_indices) if paged else None,
        host_int32("paged_kv_last_page_len", paged_kv_last_page_len) if paged else None,
    )
    return plan_request("prefill", indices, PlanOptions(causal=causal, **options))


def decode_request(
    kv_indptr: torch.Tensor,
    paged_kv_indices: torch.Tensor,
    paged_kv_last_page_len: torch.Tensor,
    *,
    q_len_per_request: int = 1,
    causal: bool = True,
    max_batch_size: int | None = None,
    max_total_qo_len: int | None = None,
    **options: object,
) -> tuple[AttentionSpec, PlanRequest]:
    """The arguments of BatchDecodeWrapper.plan()."""
    check_int("q_len_per_request", q_len_per_request, 1)
    kv_host = host_int32("kv_indptr", kv_indptr)
    batch = max(kv_host.numel() - 1, 0)
    if batch * q_len_per_request > INT32_MAX:
        raise ValueError(
            f"q_len_per_request: the batch may have at most {INT32_MAX} query tokens, got "
            f"{batch} requests x {q_len_per_request}"
        )
    indices = BatchIndices(
        torch.arange(batch + 1, dtype=torch.int32, device="cpu") * q_len_per_request,
        kv_host,
        host_int32("paged_kv_indices", paged_kv_indices),
        host_int32("paged_kv_last_page_len", paged_kv_last_page_len),
    )
    limits = {
        "max_batch_size": max_batch_size,
        "max_total_qo_len": max_batch_size if max_total_qo_len is None else max_total_qo_len,
    }
    return plan_request("decode", indices, PlanOptions(causal=causal, **limits, **options))
