# SPDX-License-Identifier: Apache-2.0
"""Cases of the SM100 prefill kernel: data, plan, launch, and the replay that they are held to."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import attention_cases as cases
import torch
from kernel_job import Call, Job, as_faults

import mpfa
from mpfa import reference as ref
from mpfa.merge import merge_base2
from mpfa.planner import METADATA_SECTIONS, Plan, PlanRequest, make_plan
from mpfa.quantized import QuantizedKV, QuantizedQuery
from mpfa.reference.replay import KVOperands, QueryOperands, TileSpec, attend_tile, scheme_for

LOG2E = math.log2(math.e)
TILE_ROWS = 256


@dataclass(frozen=True)
class Case:
    """One launch. page_size 0 is ragged; channels follow the compensation when left at -1."""

    name: str
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: tuple[int, int] = (1, 1)
    head_dim: int = 128
    page_size: int = 128
    compensation: str = "none"
    channels: int = -1
    causal: bool = False
    window_left: int = -1
    soft_cap: float = 0.0
    sinks: bool = False
    heads_per_group: int = 1
    partition: int = 0
    num_sm: int = 2
    out: torch.dtype = torch.bfloat16
    k_bias: float = 2.0
    q_bias: float = 0.5
    four_over_six: bool = False
    seed: int = 0

    @property
    def num_channels(self) -> int:
        if self.channels >= 0:
            return self.channels
        return {"channels": 16, "mean+channels": 15}.get(self.compensation, 0)


# Tiles of one block and two query stages that follow each other on one worker.
ONE_BLOCK_TILES = (
    Case("causal", (128, 128), (128, 128), (4, 1), heads_per_group=4, causal=True, num_sm=1),
    Case("window", (40,) * 3, (256,) * 3, (4, 1), heads_per_group=4, causal=True, window_left=70,
         num_sm=1),
    Case("pages-of-16", (64, 64), (256, 256), (4, 1), page_size=16, heads_per_group=4, causal=True,
         window_left=10, num_sm=1),
)  # fmt: skip


@dataclass
class Operands:
    """Quantised operands of a case and what run() needs beside them."""

    case: Case
    batch: cases.Batch
    query: QuantizedQuery
    kv: mpfa.PagedKVCache | QuantizedKV
    plan: Plan
    metadata: torch.Tensor
    sinks: torch.Tensor | None
    table: tuple[torch.Tensor, ...] | None
    sm_scale: float


def plan_case(case: Case, table: tuple[torch.Tensor, ...] | None) -> Plan:
    hq, hkv = case.heads
    kv_indptr = cases.offsets(case.kv_lens) if table is None else table[0]
    return make_plan(
        PlanRequest(
            mode="prefill",
            qo_indptr=cases.offsets(case.qo_lens),
            kv_indptr=kv_indptr,
            kv_indices=None if table is None else table[1],
            last_page_len=None if table is None else table[2],
            num_qo_heads=hq,
            num_kv_heads=hkv,
            head_dim=case.head_dim,
            page_size=None if table is None else case.page_size,
            causal=case.causal,
            window_left=case.window_left,
            q_tile_tokens=TILE_ROWS // case.heads_per_group,
            heads_per_group=case.heads_per_group,
            kv_block=128,
            partition_tokens=case.partition,
            num_sm=case.num_sm,
        )
    )


def operands(
    case: Case, batch: cases.Batch | None = None, sm_scale: float | None = None
) -> Operands:
    """Data whose NVFP4 scales differ in every row, K block and group of 16 channels, with biased
    channels; quantised by mpfa.reference into pages full of NaN (or ragged rows between NaN)."""
    hq, hkv = case.heads
    if batch is None:
        batch = cases.make_batch(
            case.qo_lens, case.kv_lens, hq, hkv, case.head_dim,
            seed=case.seed, k_bias=case.k_bias, q_bias=case.q_bias,
            outliers=8.0 if case.num_channels else 0.0,
        )  # fmt: skip
        vary_rows(batch, case.seed)
    stats = cases.static_stats(batch, case.compensation, case.num_channels)
    config = mpfa.KVCacheConfig(
        format="qk4pv8", page_size=case.page_size or 128, compensation=case.compensation,
        channels=case.num_channels, four_over_six=case.four_over_six, **batch.heads,
    )  # fmt: skip
    query = mpfa.quantize_query(batch.query, config, stats)
    if case.page_size:
        pages = cases.paged(batch, config, stats=stats, seed=case.seed)
        kv, table = pages.cache, pages.table
    else:
        kv = surround(mpfa.quantize_kv(*batch.kv, config, cases.offsets(case.kv_lens), stats))
        table = None
    plan = plan_case(case, table)
    metadata = torch.zeros(plan.metadata_bytes, dtype=torch.uint8)
    plan.upload(metadata)
    sinks = None
    if case.sinks:
        gen = torch.Generator().manual_seed(case.seed + 77)
        sinks = torch.randn(hq, generator=gen) * 3
        sinks[0] = -torch.inf
    scale = sm_scale if sm_scale is not None else case.head_dim**-0.5
    return Operands(case, batch, query, kv, plan, metadata, sinks, table, scale)


def vary_rows(batch: cases.Batch, seed: int) -> None:
    """A power of two per token and per 16 channels, so that no two neighbouring scales agree."""
    gen = torch.Generator().manual_seed(seed + 1)
    for tensors in (batch.q, batch.k):
        for x in tensors:
            rows = torch.randint(-1, 2, (x.shape[0], 1, 1), generator=gen)
            blocks = torch.randint(-1, 2, (1, x.shape[1], x.shape[2] // 16), generator=gen)
            power = torch.exp2((rows + blocks).float())
            x.mul_(power.repeat_interleave(16, dim=2).to(x.dtype))


def surround(kv: QuantizedKV) -> QuantizedKV:
    """The same ragged operands with NaN bytes in front of and behind every tensor's rows."""

    def around(t: torch.Tensor | None, dim: int) -> torch.Tensor | None:
        if t is None:
            return None
        shape = list(t.shape)
        rows = shape[dim]
        shape[dim] += 2 * 8
        big = torch.empty(shape, dtype=t.dtype)
        big.view(torch.uint8).fill_(cases.POISON_BYTE)
        view = big.narrow(dim, 8, rows)
        view.view(torch.uint8).copy_(t.view(torch.uint8))
        return view

    return replace(
        kv,
        k=around(kv.k, 0),
        k_scale=around(kv.k_scale, 0),
        v=around(kv.v, 0),
        aux_delta=around(kv.aux_delta, 1),
        aux_channels=around(kv.aux_channels, 0),
    )


def _bytes(t: torch.Tensor | None) -> torch.Tensor | None:
    return t.view(torch.uint8) if t is not None and t.element_size() == 1 else t


PAD_ROWS = 3


def empty_outputs(o: Operands) -> dict[str, torch.Tensor]:
    """What a launch writes, full of NaN; out and lse are rows of larger tensors."""
    case, rows = o.case, o.plan.num_partial_rows
    hq, dim, nnz = case.heads[0], case.head_dim, o.plan.nnz_qo
    inside = slice(PAD_ROWS, PAD_ROWS + nnz)
    return {
        "partial_o": torch.full((rows, hq, dim), torch.nan),
        "partial_lse": torch.full((rows, hq), torch.nan),
        "out": torch.full((nnz + 2 * PAD_ROWS, hq, dim), torch.nan, dtype=case.out)[inside],
        "lse": torch.full((nnz + 2 * PAD_ROWS, hq), torch.nan)[inside],
    }


def call(o: Operands, outputs: dict[str, torch.Tensor]) -> Call:
    """The launch of the module of the case's head dimension."""
    meta = {n: o.plan.metadata_view(o.metadata, n) for n in METADATA_SECTIONS}
    q, kv = o.query, o.kv
    return Call.attention(
        str(o.case.head_dim), q.q, q.q_scale, q.a_comp, q.row_term,
        kv.k, kv.k_scale, _bytes(kv.v), None, kv.aux_delta, kv.aux_channels,
        meta["header"], meta["qo_indptr"], meta["kv_indptr"], meta["kv_len"],
        meta["kv_indices"] if o.table is not None else None,
        meta["items"], meta["worker_indptr"], meta["v_block_indptr"],
        *outputs.values(), o.sinks, o.sm_scale, o.case.soft_cap, o.case.window_left,
        o.case.causal, o.plan.num_workers,
    )  # fmt: skip


def finish(o: Operands, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a launch, split rows merged by mpfa.reference's combine steps."""
    case, plan = o.case, o.plan
    out, lse = outputs["out"].clone(), outputs["lse"].clone()
    split = plan.merge_indptr[1:] > plan.merge_indptr[:-1]
    if split.any():
        # In fp32, as the combine kernel does, and rounded once at the end.
        full = torch.where(split[:, None, None], torch.nan, out.float())
        assert out[split].isnan().all() and lse[split].isnan().all(), "a split row was finished"
        merge_rows(plan, outputs["partial_o"], outputs["partial_lse"], full, lse)
        rows = split.nonzero().flatten()
        lse[rows] = add_row_term(o, lse)[rows]
        merged, merged_lse = add_sinks(o, full, lse)
        out[rows], lse[rows] = merged[rows].to(case.out), merged_lse[rows]
    return out, lse


def launch(module, o: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of one launch. Outputs are rows of a larger tensor full of NaN; nothing outside
    them may change."""
    outputs = empty_outputs(o)
    module.run(*call(o, outputs).arguments.values())
    for name in ("out", "lse"):
        big, rows = outputs[name]._base, outputs[name].shape[0]
        for outside in (big[:PAD_ROWS], big[PAD_ROWS + rows :]):
            assert outside.isnan().all(), "a row outside the output was written"
    return finish(o, outputs)


# rel L2 per (request, head) against the fp32 replay.
GATE = {torch.float32: 2e-3, torch.bfloat16: 3e-3, torch.float16: 3e-3}


def assert_as_replayed(o: Operands, out: torch.Tensor, lse: torch.Tensor) -> None:
    """The kernel's results against the replay of the same plan."""
    want, want_lse = replay(o)
    assert not out.isnan().any() and not lse.isnan().any(), "out or lse holds NaN"
    worst, gate = worst_head(o, out, want), GATE[o.case.out]
    assert worst <= gate, f"rel L2 {worst:.3g}, allowed {gate}"
    cases.assert_lse_close(lse, want_lse, 2e-4 * max(1.0, o.case.k_bias))
    assert (out[want.abs().amax(-1) == 0] == 0).all(), "a row without keys is not 0"


def job(o: Operands) -> Job:
    """One launch for any device."""
    outputs = empty_outputs(o)

    def check(got: dict[str, torch.Tensor]) -> None:
        assert_as_replayed(o, *finish(o, got))

    return Job(o.case.name, (call(o, outputs),), outputs, lambda got: as_faults(check, got))


def add_row_term(o: Operands, lse: torch.Tensor) -> torch.Tensor:
    """The part of the scores that centring K took out of every row (docs/numerics.md)."""
    if o.query.row_term is None or o.case.soft_cap > 0.0:
        return lse
    return lse + o.sm_scale * LOG2E * o.query.row_term


def add_sinks(
    o: Operands, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if o.sinks is None:
        return out, lse
    sink = (o.sinks * LOG2E).expand_as(lse)
    top = torch.maximum(lse, sink)
    anchor = torch.where(top == -torch.inf, 0.0, top)
    with_sink = anchor + torch.log2(torch.exp2(lse - anchor) + torch.exp2(sink - anchor))
    keep = torch.where(lse == -torch.inf, 0.0, torch.exp2(lse - with_sink))
    return out * keep.unsqueeze(-1), with_sink


def request_operands(o: Operands, b: int) -> KVOperands:
    """Dequantised K and V of request b."""
    kv, kv_len = o.kv, o.case.kv_lens[b]
    if o.table is not None:
        ids = o.table[1][o.table[0][b] : o.table[0][b + 1]].long()
        pages = (kv.k, kv.k_scale, kv.v, kv.aux_delta, kv.aux_channels)
        return KVOperands(*ref.gather_qk4pv8(*pages, ids, kv_len))
    begin = sum(o.case.kv_lens[:b])
    rows = slice(begin, begin + kv_len)
    k, v = ref.dequantize_ragged_qk4pv8(kv.k, kv.k_scale, kv.v, rows.start, rows.stop)
    delta = None if kv.aux_delta is None else kv.aux_delta[:, rows].T.float()
    channels = None if kv.aux_channels is None else kv.aux_channels[rows].float()
    return KVOperands(k, v, delta, channels)


def replay(o: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 (out, lse base 2) of mpfa.reference with the kernel's rounding steps, item by item."""
    case, plan = o.case, o.plan
    hq, hkv = case.heads
    group = hq // hkv
    q = ref.dequantize_nvfp4(o.query.q, o.query.q_scale)
    a_comp, row_term = o.query.a_comp, o.query.row_term
    qo = cases.offsets(case.qo_lens).tolist()
    out = torch.full((plan.nnz_qo, hkv, group, case.head_dim), torch.nan)
    lse = torch.full((plan.nnz_qo, hkv, group), torch.nan)
    partial_o = torch.full((plan.num_partial_rows, hkv, group, case.head_dim), torch.nan)
    partial_lse = torch.full((plan.num_partial_rows, hkv, group), torch.nan)
    operands_of = {}
    for item in plan.items.tolist():
        b, q_begin, q_len, head_group, kv_begin, kv_end, partial_row, stride = item
        if b not in operands_of:
            operands_of = {b: request_operands(o, b)}
        first = head_group * case.heads_per_group
        heads = list(range(first, min(first + case.heads_per_group, group)))
        rows = slice(qo[b] + q_begin, qo[b] + q_begin + q_len)
        part = QueryOperands(
            q[rows],
            None if a_comp is None else a_comp[rows],
            None if row_term is None else row_term[rows],
        )
        tile = TileSpec(
            q_begin, case.qo_lens[b], case.kv_lens[b], kv_begin, kv_end, case.causal,
            case.window_left, o.sm_scale, case.soft_cap,
        )  # fmt: skip
        values = attend_tile(
            part, operands_of[b], heads, group, tile, scheme_for("qk4pv8", case.head_dim)
        )
        if partial_row < 0:
            out[rows, :, heads], lse[rows, :, heads] = values
            continue
        at = torch.arange(q_len) * stride + partial_row
        for i, head in enumerate(heads):
            partial_o[at, :, head], partial_lse[at, :, head] = (v[:, :, i] for v in values)
    out, lse = out.flatten(1, 2), lse.flatten(1, 2)
    merge_rows(plan, partial_o.flatten(1, 2), partial_lse.flatten(1, 2), out, lse)
    return add_sinks(o, out, add_row_term(o, lse))


def merge_rows(plan: Plan, partial_o, partial_lse, out, lse) -> None:
    """Rows of split tiles, merged into out and lse; they must not have been written yet."""
    merge = plan.merge_indptr.long()
    for token in range(plan.nnz_qo):
        begin, end = merge[token], merge[token + 1]
        if end > begin:
            assert out[token].isnan().all() and lse[token].isnan().all(), "split row was finished"
            merged, merged_lse = merge_base2(
                partial_o[begin:end, None], partial_lse[begin:end, None]
            )
            out[token], lse[token] = merged[0].to(out.dtype), merged_lse[0]


def worst_head(o: Operands, got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest rel L2 over (request, head)."""
    bounds = cases.offsets(o.case.qo_lens).tolist()
    return max(
        (
            cases.head_rel_l2(got[b:e], want[b:e])
            for b, e in zip(bounds, bounds[1:], strict=False)
            if e > b
        ),
        default=0.0,
    )
