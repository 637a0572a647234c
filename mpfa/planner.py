# SPDX-License-Identifier: Apache-2.0
"""Host planner: turns index tensors into the work list and memory layout of one launch.

The arithmetic lives in ``include/mpfa/plan`` (C++17, no CUDA) and is compiled on first use; this
module checks tensor types, makes the one call, and names the result. ``docs/planner.md`` explains
tiles, partitions, scheduling and capacities.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from mpfa.jit import host

SECTION_ALIGNMENT = 256
# What a plan says: integers, in a buffer that the wrapper owns.
METADATA_SECTIONS = (
    "header",
    "qo_indptr",
    "kv_indptr",
    "kv_len",
    "v_block_indptr",
    "kv_indices",
    "items",
    "worker_indptr",
    "merge_indptr",
)
# What a run needs while it runs: the user's workspace, followed by the caller's own sections.
SCRATCH_SECTIONS = ("partial_o", "partial_lse")
_OWNED_SECTIONS = METADATA_SECTIONS + SCRATCH_SECTIONS
ITEM_FIELDS = (
    "request",
    "q_begin",
    "q_len",
    "head_group",
    "kv_begin",
    "kv_end",
    "partial_row",
    "partial_stride",
)
_MODES = {"prefill": 0, "decode": 1}
# Number of int64 scalars that csrc/planner.cpp writes; section offsets and sizes follow them.
_SCALARS = 13
_RESULT_LEN = _SCALARS + 2 * len(_OWNED_SECTIONS)


@dataclass(frozen=True)
class PlanRequest:
    """Everything a plan depends on.

    Index tensors are int32, 1-D, contiguous, on the CPU. ``B`` is the number of requests.

    Attributes:
        mode: "prefill" or "decode". The arithmetic is the same; with ``use_cuda_graph`` a decode
            plan takes every request to have at most ``max_total_qo_len // max_batch_size`` query
            tokens, which makes the capacities much smaller.
        qo_indptr: [B+1], query tokens.
        kv_indptr: [B+1], pages when ``kv_indices`` is given, else tokens.
        kv_indices: [>= kv_indptr[-1]] page ids, or None for ragged keys and values.
        last_page_len: [B] tokens in the last page (paged only).
        num_qo_heads, num_kv_heads, head_dim: heads of one layer and channels per head.
        page_size: tokens per page (paged only).
        causal, window_left: bottom-right causal mask; keys further than ``window_left`` tokens
            to the left are hidden, -1 = no window.
        q_tile_tokens, heads_per_group: query tokens and query heads of one work item.
        kv_block: KV tokens per step of the kernel; KV ranges begin at multiples of it.
        partition_tokens: KV tokens per partition, a multiple of ``kv_block``; 0 = never split.
        num_sm: streaming multiprocessors shared by all KV heads.
        workers_per_sm: thread blocks that run on one of them at a time.
        sections: scratch regions of the caller, (name, bytes), placed after the plan's own.
        use_cuda_graph: size everything from the three limits instead of this batch.
        max_batch_size, max_total_qo_len, max_num_pages: limits for ``use_cuda_graph``; the last
            bounds ``kv_indptr[-1]`` (so KV tokens when ragged).
    """

    mode: str
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor | None
    last_page_len: torch.Tensor | None
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int | None
    causal: bool
    window_left: int
    q_tile_tokens: int
    heads_per_group: int
    kv_block: int
    partition_tokens: int
    num_sm: int
    workers_per_sm: int = 1
    sections: tuple[tuple[str, int], ...] = ()
    use_cuda_graph: bool = False
    max_batch_size: int | None = None
    max_total_qo_len: int | None = None
    max_num_pages: int | None = None


class Plan:
    """A work list and the layout of the two memory regions that it runs with.

    The metadata (indices, work items, merge index) is one block of integers that ``upload`` copies to
    a buffer of its own; the scratch region is what one run needs for partial results and the
    caller's sections. They are separate so that several plans can share one scratch workspace.

    Attributes (sizes in bytes, the rest counts):
        request: the PlanRequest.
        metadata_bytes, scratch_bytes: sizes of the two regions.
        num_items, num_workers, num_partial_rows: work items, workers per KV head, rows of the
            split-KV buffers that this batch uses.
        nnz_qo, nnz_kv, batch_size: query tokens, KV tokens, requests.
        max_page_id, max_page_id_request: largest page id and the first request that holds it,
            -1 and -1 without pages.
        min_load, max_load, total_load, largest_item: scheduled cost of the least and most loaded
            worker, of all workers, and of the costliest item, in KV blocks (cost.h).
        offsets, sizes: byte offset of every section in its region, and its size.
        items [num_items, 8], worker_indptr [num_workers+1], merge_indptr [nnz_qo+1],
        qo_indptr [B+1], kv_indptr [B+1], kv_indices [kv_indptr[-1]] or None, kv_len [B],
        v_block_indptr [B+1] (ragged: running sum of ceil(kv_len/32); paged: 0):
            int32 host tensors, views of the block that ``upload`` copies.
    """

    def __init__(self, request: PlanRequest, block: torch.Tensor, result: list[int]) -> None:
        self.request = request
        self._block = block
        (
            _,
            self.metadata_bytes,
            self.num_items,
            self.num_workers,
            self.num_partial_rows,
            self.nnz_qo,
            self.nnz_kv,
            self.max_page_id,
            self.max_page_id_request,
            self.min_load,
            self.max_load,
            self.total_load,
            self.largest_item,
        ) = result[:_SCALARS]
        self.batch_size = request.qo_indptr.shape[0] - 1
        self.scratch_bytes, self.offsets, self.sizes = _layout(request, result)

    def _host(self, name: str, count: int) -> torch.Tensor:
        start = self.offsets[name]
        return self._block[start : start + 4 * count].view(torch.int32)

    @cached_property
    def items(self) -> torch.Tensor:
        return self._host("items", 8 * self.num_items).view(-1, 8)

    @cached_property
    def worker_indptr(self) -> torch.Tensor:
        return self._host("worker_indptr", self.num_workers + 1)

    @cached_property
    def merge_indptr(self) -> torch.Tensor:
        return self._host("merge_indptr", self.nnz_qo + 1)

    @cached_property
    def qo_indptr(self) -> torch.Tensor:
        return self._host("qo_indptr", self.batch_size + 1)

    @cached_property
    def kv_indptr(self) -> torch.Tensor:
        return self._host("kv_indptr", self.batch_size + 1)

    @cached_property
    def kv_indices(self) -> torch.Tensor | None:
        if self.request.kv_indices is None:
            return None
        return self._host("kv_indices", int(self.kv_indptr[-1]))

    @cached_property
    def kv_len(self) -> torch.Tensor:
        return self._host("kv_len", self.batch_size)

    @cached_property
    def v_block_indptr(self) -> torch.Tensor:
        return self._host("v_block_indptr", self.batch_size + 1)

    def upload(self, metadata: torch.Tensor) -> None:
        """Copies the integer block to the front of ``metadata`` (any device), in one copy.

        Raises:
            ValueError: not 1-D contiguous uint8 of at least ``metadata_bytes``.
        """
        _check_region("metadata", metadata, self.metadata_bytes)
        metadata[: self.metadata_bytes].copy_(self._block)

    def metadata_view(self, metadata: torch.Tensor, name: str) -> torch.Tensor:
        """One section of uploaded metadata, int32 [sizes[name] / 4] (its capacity for graphs).

        Raises:
            ValueError: unknown section, or a buffer that is not as ``upload`` needs it.
        """
        _check_region("metadata", metadata, self.metadata_bytes)
        return self._section(metadata, name, METADATA_SECTIONS).view(torch.int32)

    def scratch(self, workspace: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One section of the workspace as a 1-D tensor of ``dtype`` (whole elements only).

        Raises:
            ValueError: unknown section, or a workspace that is not 1-D contiguous uint8 of at least
                ``scratch_bytes``.
        """
        _check_region("workspace", workspace, self.scratch_bytes)
        names = tuple(n for n in self.offsets if n not in METADATA_SECTIONS)
        section = self._section(workspace, name, names)
        return section[: section.numel() // dtype.itemsize * dtype.itemsize].view(dtype)

    def _section(self, region: torch.Tensor, name: str, names: tuple[str, ...]) -> torch.Tensor:
        if name not in names:
            raise ValueError(f"section = {name!r}: this region has {', '.join(names)}")
        start = self.offsets[name]
        return region[start : start + self.sizes[name]]

    def summary(self, first_items: int = 8) -> str:
        """The plan as text for people: sizes, tiles, partitions, load balance, first items."""
        r = self.request
        paged = "ragged" if r.kv_indices is None else f"pages of {r.page_size}"
        split = f"partitions of {r.partition_tokens}" if r.partition_tokens else "never split"
        groups = -(-(r.num_qo_heads // r.num_kv_heads) // r.heads_per_group)
        mean = self.total_load / self.num_workers
        lines = [
            f"{r.mode} plan: {self.batch_size} requests, {self.nnz_qo} query tokens, "
            f"{self.nnz_kv} KV tokens ({paged})",
            f"  heads {r.num_qo_heads} query / {r.num_kv_heads} KV x {r.head_dim}, "
            f"causal {bool(r.causal)}, window_left {r.window_left}",
            f"  tile {r.q_tile_tokens} tokens x {r.heads_per_group} heads, {groups} head group(s), "
            f"KV block {r.kv_block}, {split}",
            f"  {self.num_items} items on {self.num_workers} workers per KV head "
            f"(num_sm {r.num_sm}"
            + (f" x {r.workers_per_sm}" if r.workers_per_sm > 1 else "")
            + f"), {self.num_partial_rows} partial rows",
            f"  load in KV blocks: min {self.min_load}, mean {mean:.1f}, max {self.max_load}, "
            f"largest item {self.largest_item}",
            f"  metadata {self.metadata_bytes} bytes, scratch {self.scratch_bytes} bytes"
            + (", sized for CUDA graph limits" if r.use_cuda_graph else ""),
        ]
        lines += [
            f"    {name:<14} offset {self.offsets[name]:>12}  bytes {self.sizes[name]:>12}"
            for name in self.offsets
        ]
        lines.append("  " + " ".join(f"{name:>14}" for name in ITEM_FIELDS))
        for row in self.items[:first_items].tolist():
            lines.append("  " + " ".join(f"{value:>14}" for value in row))
        if self.num_items > first_items:
            lines.append(f"  ... {self.num_items - first_items} more")
        return "\n".join(lines)


def _layout(request: PlanRequest, result: list[int]) -> tuple[int, dict[str, int], dict[str, int]]:
    """(scratch bytes, offsets, sizes): the plan's own sections, then the caller's."""
    owned = len(_OWNED_SECTIONS)
    offsets = dict(zip(_OWNED_SECTIONS, result[_SCALARS : _SCALARS + owned], strict=True))
    sizes = dict(zip(_OWNED_SECTIONS, result[_SCALARS + owned : _RESULT_LEN], strict=True))
    # The planner lays both regions out in one go; the scratch region starts where the integers end.
    total_bytes, metadata_bytes = result[:2]
    for name in SCRATCH_SECTIONS:
        offsets[name] -= metadata_bytes
    end = total_bytes - metadata_bytes
    for name, size in request.sections:
        if name in offsets:
            raise ValueError(f"sections names {name!r} twice, or as one of the plan's own sections")
        if size < 0:
            raise ValueError(f"sections[{name!r}] = {size} bytes: must be 0 or more")
        offsets[name] = end
        sizes[name] = size
        end = -(-(end + size) // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
    return end, offsets, sizes


def _check_region(name: str, region: torch.Tensor, needed: int) -> None:
    if region.dtype != torch.uint8 or region.dim() != 1 or not region.is_contiguous():
        raise ValueError(
            f"{name} is {region.dtype} {tuple(region.shape)} with strides {region.stride()}: "
            "must be contiguous 1-D torch.uint8"
        )
    if region.numel() < needed:
        raise ValueError(f"{name} has {region.numel()} bytes: this plan needs {needed}")


def _check_index(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is {type(tensor).__name__}: must be a torch.Tensor")
    if tensor.dtype is not torch.int32:
        raise ValueError(f"{name}.dtype = {tensor.dtype}: must be torch.int32")
    if tensor.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: must be 1-D")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}: the planner reads CPU tensors")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has stride {tensor.stride()}: must be contiguous")


def _check_tensors(r: PlanRequest) -> None:
    """Types and lengths; values are checked in C++."""
    _check_index("qo_indptr", r.qo_indptr)
    _check_index("kv_indptr", r.kv_indptr)
    length = r.qo_indptr.shape[0]
    if length == 0:
        raise ValueError("qo_indptr is empty: must have batch size + 1 entries")
    if r.kv_indptr.shape[0] != length:
        raise ValueError(
            f"kv_indptr has {r.kv_indptr.shape[0]} entries: must have {length}, as qo_indptr has"
        )
    if r.kv_indices is None:
        if r.last_page_len is not None or r.page_size is not None:
            raise ValueError(
                "paged_kv_last_page_len and page_size need paged_kv_indices: ragged keys and "
                "values have none of them"
            )
        return
    _check_index("paged_kv_indices", r.kv_indices)
    if r.page_size is None or r.page_size < 1:
        raise ValueError(f"page_size = {r.page_size}: must be at least 1 with paged_kv_indices")
    if r.last_page_len is None:
        raise ValueError("paged_kv_last_page_len is None: must be given with paged_kv_indices")
    _check_index("paged_kv_last_page_len", r.last_page_len)
    if r.last_page_len.shape[0] != length - 1:
        raise ValueError(
            f"paged_kv_last_page_len has {r.last_page_len.shape[0]} entries: must have one per "
            f"request, {length - 1}"
        )


def _run(r: PlanRequest, count_only: bool) -> tuple[torch.Tensor | None, list[int]]:
    mode = _MODES.get(r.mode)
    if mode is None:
        raise ValueError(f"mode = {r.mode!r}: must be 'prefill' or 'decode'")
    _check_tensors(r)
    limits = (r.max_batch_size, r.max_total_qo_len, r.max_num_pages)
    if r.use_cuda_graph and None in limits:
        names = ("max_batch_size", "max_total_qo_len", "max_num_pages")
        missing = [n for n, value in zip(names, limits, strict=True) if value is None]
        raise ValueError(f"{missing[0]} is None: must be given with use_cuda_graph=True")
    if not r.use_cuda_graph:
        limits = (0, 0, 0)
    result = torch.empty(_RESULT_LEN, dtype=torch.int64, device="cpu")
    block = host.planner().plan(
        r.qo_indptr,
        r.kv_indptr,
        r.kv_indices,
        r.last_page_len,
        result,
        mode,
        r.num_qo_heads,
        r.num_kv_heads,
        r.head_dim,
        r.page_size or 0,
        r.causal,
        r.window_left,
        r.q_tile_tokens,
        r.heads_per_group,
        r.kv_block,
        r.partition_tokens,
        r.num_sm * r.workers_per_sm,
        r.use_cuda_graph,
        *limits,
        count_only,
    )
    return block, result.tolist()


def make_plan(req: PlanRequest) -> Plan:
    """Validates ``req`` and plans it.

    Equal requests give byte-equal plans.

    Raises:
        ValueError: names the argument, the request index, the value found and what is allowed;
            with ``use_cuda_graph`` also for a missing limit or a batch that exceeds one.
    """
    block, result = _run(req, count_only=False)
    return Plan(req, block, result)


def scratch_bytes(req: PlanRequest) -> int:
    """``make_plan(req).scratch_bytes`` without scheduling: the same code, counting only.

    Raises:
        ValueError: as ``make_plan``.
    """
    return _layout(req, _run(req, count_only=True)[1])[0]
