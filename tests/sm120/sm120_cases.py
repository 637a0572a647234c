# SPDX-License-Identifier: Apache-2.0
"""Cases of the SM120 kernel: operands, plan, launch in the simulator, replay of the same plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from attention_cases import int32, offsets
from kernel_job import Call, Job, as_faults

from mpfa import planner
from mpfa.merge import merge_base2
from mpfa.reference.codecs import e4m3_encode
from mpfa.reference.mxfp8 import (
    dequantize_mxfp8,
    dequantize_mxfp8_tokens,
    quantize_mxfp8,
    quantize_mxfp8_tokens,
)
from mpfa.reference.replay import (
    LOG2E,
    KVOperands,
    QueryOperands,
    TileSpec,
    attend_tile,
    exp2_rounded,
    scheme_for,
)

GARBAGE = 0xFF  # NaN as e4m3 and as ue8m0


@dataclass(frozen=True)
class Case:
    """One launch. page_size None = ragged; partition 0 = never split."""

    head_dim: int
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    kv_heads: int = 1
    group: int = 1
    page_size: int | None = None
    causal: bool = False
    window_left: int = -1
    soft_cap: float = 0.0
    sinks: bool = False
    data: str = "random"
    out: torch.dtype = torch.float32
    mode: str = "prefill"
    partition: int = 0
    num_sm: int = 4
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def name(self) -> str:
        lens = "+".join(f"{q}x{k}" for q, k in zip(self.q_lens, self.kv_lens, strict=True))
        parts = [f"d{self.head_dim}", lens, f"h{self.kv_heads}x{self.group}", self.data]
        parts.append("ragged" if self.page_size is None else f"p{self.page_size}")
        flags = {
            "causal": self.causal,
            f"w{self.window_left}": self.window_left >= 0,
            "cap": self.soft_cap > 0,
            "sinks": self.sinks,
            f"split{self.partition}": self.partition > 0,
            "decode": self.mode == "decode",
            str(self.out).removeprefix("torch."): self.out != torch.float32,
        }
        return "-".join(parts + [word for word, on in flags.items() if on])


@dataclass
class Sequence:
    """Operands of one request as bytes, exactly as long as the request."""

    q: torch.Tensor  # [Lq, Hq, D] e4m3 codes, all uint8
    q_scale: torch.Tensor  # [Lq, Hq, D/32]
    k: torch.Tensor
    k_scale: torch.Tensor
    v: torch.Tensor
    v_scale: torch.Tensor  # [ceil(Lk/32), Hkv, D]


def random_values(case: Case, gen: torch.Generator) -> tuple[torch.Tensor, ...]:
    """bf16-rounded q, k, v of one request after another."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen)

    d, hkv, hq = case.head_dim, case.kv_heads, case.heads
    k_mean, q_mean = torch.zeros(hkv, d), torch.zeros(hq, d)
    if case.data == "biased":  # a few channels of K carry a constant, a few tokens have a large V
        k_mean[:, torch.randperm(d, generator=gen)[:4]] = 12.0
        q_mean = 0.5 * normal(hq, d)
    for lq, lk in zip(case.q_lens, case.kv_lens, strict=True):
        q = normal(lq, hq, d) + q_mean
        k = normal(lk, hkv, d) + k_mean
        v = normal(lk, hkv, d)
        if case.data == "biased":
            v[torch.rand(lk, generator=gen) < 0.02] *= 20
        if case.data == "sink" and lk:  # the first keys take most of the mass, their V is small
            direction = normal(hkv, d)
            direction /= direction.norm(dim=-1, keepdim=True)
            q = q + 4 * direction.repeat_interleave(case.group, 0)
            k[: min(4, lk)] += 16 * direction
            v[: min(4, lk)] *= 0.01
        yield tuple(x.bfloat16().float() for x in (q, k, v))


def integer_sequence(case: Case, lq: int, lk: int, gen: torch.Generator) -> Sequence:
    """Data for which no sum rounds (up to 1024 keys), with different scales in every block.

    Q is one-hot and K is 0 or a power of two, so lambda S is an integer 0..8 and P' a power of two
    2^0..2^8; V are small integers with power-of-two scales. Only the last product, by 1 / l, rounds.
    """
    d, hkv, hq = case.head_dim, case.kv_heads, case.heads

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=gen)

    q = torch.zeros(lq, hq, d)
    q.scatter_(2, integers(0, d, lq, hq, 1), 1.0)
    q_scale = integers(127, 129, lq, hq, d // 32)
    k = integers(0, 2, lk, hkv, d).float()
    k_scale = integers(127, 130, lk, hkv, d // 32)
    v = integers(-8, 9, lk, hkv, d).float()
    v_scale = integers(126, 129, -(-lk // 32), hkv, d)
    return Sequence(
        *(
            e4m3_encode(x).view(torch.uint8) if x.is_floating_point() else x.to(torch.uint8)
            for x in (q, q_scale, k, k_scale, v, v_scale)
        )
    )


def sequences(case: Case) -> list[Sequence]:
    gen = torch.Generator().manual_seed(1000 + case.seed)
    if case.data == "integer":
        return [
            integer_sequence(case, lq, lk, gen)
            for lq, lk in zip(case.q_lens, case.kv_lens, strict=True)
        ]
    found = []
    values = model_values(case) if case.data == "model" else random_values(case, gen)
    for q, k, v in values:
        parts = (*quantize_mxfp8(q), *quantize_mxfp8(k), *quantize_mxfp8_tokens(v))
        found.append(Sequence(*(x.view(torch.uint8) for x in parts)))
    return found


def model_values(case: Case):
    """Q, K and V of SmolLM2 on text, cut to the case's lengths."""
    from real_model import captured_heads

    q, k, v = captured_heads(
        case.kv_heads, case.group, case.head_dim, max(*case.kv_lens, *case.q_lens)
    )
    for lq, lk in zip(case.q_lens, case.kv_lens, strict=True):
        first = max(lk - lq, 0)
        yield q[first : first + lq], k[:lk], v[:lk]


def sm_scale(case: Case) -> float:
    # lambda = 1 makes the integer case's exponents whole numbers.
    return math.log(2.0) if case.data == "integer" else 1.0 / math.sqrt(case.head_dim)


@dataclass
class Inputs:
    """What the launcher takes, and what the replay needs."""

    case: Case
    parts: list[Sequence]
    plan: planner.Plan
    q: torch.Tensor
    q_scale: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor
    v: torch.Tensor
    v_scale: torch.Tensor
    sinks: torch.Tensor | None


def page_lists(case: Case, gen: torch.Generator) -> tuple[list[list[int]], int]:
    """Shuffled page ids of each request, and the number of pages of a cache with two unused ones."""
    counts = [-(-n // case.page_size) for n in case.kv_lens]
    ids = torch.randperm(sum(counts) + 2, generator=gen).tolist()
    lists = []
    for n in counts:
        lists.append([ids.pop() for _ in range(n)])
    return lists, sum(counts) + 2


def make_plan(case: Case, pages: list[list[int]] | None) -> planner.Plan:
    # Prefill tiles hold 128 tokens of one head; decode tiles up to 8 tokens and as many heads as fit.
    tokens, group = 128, 1
    if case.mode == "decode":
        tokens = min(max(case.q_lens), 8)
        group = min(case.group, 128 // tokens)
    paged = pages is not None
    last = [n - (len(p) - 1) * case.page_size for n, p in zip(case.kv_lens, pages or [])]  # noqa: B905
    return planner.make_plan(
        planner.PlanRequest(
            mode=case.mode,
            qo_indptr=offsets(case.q_lens),
            kv_indptr=offsets([len(p) for p in pages] if paged else case.kv_lens),
            kv_indices=int32([i for p in pages for i in p]) if paged else None,
            last_page_len=int32([n if p else 0 for n, p in zip(last, pages, strict=True)])
            if paged
            else None,
            num_qo_heads=case.heads,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            page_size=case.page_size,
            causal=case.causal,
            window_left=case.window_left,
            q_tile_tokens=tokens,
            heads_per_group=group,
            kv_block=scheme_for("mxfp8", case.head_dim).kv_block,
            partition_tokens=case.partition,
            num_sm=case.num_sm,
        )
    )


def build(case: Case) -> Inputs:
    parts = sequences(case)
    gen = torch.Generator().manual_seed(2000 + case.seed)
    d, hkv, hq = case.head_dim, case.kv_heads, case.heads
    q = torch.cat([torch.empty(0, hq, d, dtype=torch.uint8), *(p.q for p in parts)])
    q_scale = torch.cat(
        [torch.empty(0, hq, d // 32, dtype=torch.uint8), *(p.q_scale for p in parts)]
    )
    if case.page_size is None:
        pages = None
        # Rows past the last request are poison too: tensors may be longer than the plan.
        pad = 5
        k, v = (
            torch.full((sum(case.kv_lens) + pad, hkv, d), GARBAGE, dtype=torch.uint8) for _ in "kv"
        )
        k_scale = torch.full((sum(case.kv_lens) + pad, hkv, d // 32), GARBAGE, dtype=torch.uint8)
        v_scale = torch.full(
            (sum(-(-n // 32) for n in case.kv_lens) + 1, hkv, d), GARBAGE, dtype=torch.uint8
        )
        at = block = 0
        for p in parts:
            n, b = p.k.shape[0], p.v_scale.shape[0]
            k[at : at + n], k_scale[at : at + n], v[at : at + n] = p.k, p.k_scale, p.v
            v_scale[block : block + b] = p.v_scale
            at, block = at + n, block + b
    else:
        pages, total = page_lists(case, gen)
        ps = case.page_size

        def pool(rows: int, last: int) -> torch.Tensor:
            return torch.full((total, hkv, rows, last), GARBAGE, dtype=torch.uint8)

        k, v, k_scale, v_scale = pool(ps, d), pool(ps, d), pool(ps, d // 32), pool(ps // 32, d)
        for p, ids in zip(parts, pages, strict=True):
            for i, page in enumerate(ids):
                rows = slice(i * ps, (i + 1) * ps)
                n = p.k[rows].shape[0]
                k[page, :, :n] = p.k[rows].transpose(0, 1)
                k_scale[page, :, :n] = p.k_scale[rows].transpose(0, 1)
                v[page, :, :n] = p.v[rows].transpose(0, 1)
                blocks = p.v_scale[i * ps // 32 : (i + 1) * ps // 32]
                v_scale[page, :, : blocks.shape[0]] = blocks.transpose(0, 1)
    sinks = torch.linspace(-3, 3, hq) if case.sinks else None
    plan = make_plan(case, pages)
    return Inputs(case, parts, plan, q, q_scale, k, k_scale, v, v_scale, sinks)


@dataclass
class Result:
    """out [nnz, Hq, D] and lse [nnz, Hq] base 2, NaN where nothing was written; partial buffers."""

    out: torch.Tensor
    lse: torch.Tensor
    partial_o: torch.Tensor
    partial_lse: torch.Tensor


def arguments(inputs: Inputs, metadata: torch.Tensor, result: Result) -> dict[str, Any]:
    """The launcher's arguments in order; ``metadata`` is the uploaded plan."""
    case, plan = inputs.case, inputs.plan
    views = {name: plan.metadata_view(metadata, name) for name in planner.METADATA_SECTIONS}
    return {
        "q": inputs.q,
        "q_scale": inputs.q_scale,
        "a_comp": None,
        "row_term": None,
        "k": inputs.k,
        "k_scale": inputs.k_scale,
        "v": inputs.v,
        "v_scale": inputs.v_scale,
        "aux_delta": None,
        "aux_channels": None,
        **{n: views[n] for n in ("header", "qo_indptr", "kv_indptr", "kv_len")},
        "kv_indices": None if case.page_size is None else views["kv_indices"],
        **{n: views[n] for n in ("items", "worker_indptr", "v_block_indptr")},
        "partial_o": result.partial_o,
        "partial_lse": result.partial_lse,
        "out": result.out,
        "lse": result.lse,
        "sinks": inputs.sinks,
        "sm_scale": sm_scale(case),
        "logits_soft_cap": case.soft_cap,
        "window_left": case.window_left,
        "causal": case.causal,
        "num_workers": plan.num_workers,
    }


def uploaded(inputs: Inputs) -> torch.Tensor:
    metadata = torch.empty(inputs.plan.metadata_bytes, dtype=torch.uint8)
    inputs.plan.upload(metadata)
    return metadata


def launch(inputs: Inputs, module: Any, simulator: Any, **changed: Any) -> Result:
    """The kernel on ``inputs``; tensors are declared, so no other memory may be touched."""
    metadata, result = uploaded(inputs), empty_result(inputs)
    args = arguments(inputs, metadata, result) | changed
    declared = [x for x in args.values() if isinstance(x, torch.Tensor)]
    simulator.clear()
    with simulator.tensors(metadata, *declared):
        module.run(*args.values())
    simulator.check()
    return result


def job(inputs: Inputs) -> Job:
    """The same launch for any device."""
    result = empty_result(inputs)
    metadata = uploaded(inputs)
    outputs = vars(result)

    def faults(got: dict[str, torch.Tensor]) -> list[str]:
        return as_faults(assert_as_replayed, inputs, Result(**got))

    call = Call(str(inputs.case.head_dim), arguments(inputs, metadata, result))
    return Job(inputs.case.name, (call,), outputs, faults)


def empty_result(inputs: Inputs) -> Result:
    case = inputs.case
    nnz, rows = sum(case.q_lens), inputs.plan.num_partial_rows
    return Result(
        torch.full((nnz, case.heads, case.head_dim), torch.nan, dtype=case.out),
        torch.full((nnz, case.heads), torch.nan),
        torch.full((rows, case.heads, case.head_dim), torch.nan),
        torch.full((rows, case.heads), torch.nan),
    )


def item_heads(case: Case, item: list[int], per_group: int) -> list[int]:
    return list(range(item[3] * per_group, min((item[3] + 1) * per_group, case.group)))


def replay(inputs: Inputs, scheme=None) -> Result:
    """The same plan, item by item, through mpfa.reference.replay (fp32 outputs)."""
    case, plan = inputs.case, inputs.plan
    result = empty_result(replace_out(inputs))
    begins = offsets(case.q_lens).tolist()
    per_group = plan.request.heads_per_group
    scheme = scheme or scheme_for("mxfp8", case.head_dim)
    hkv, group, d = case.kv_heads, case.group, case.head_dim
    for item in plan.items.tolist():
        request, q_begin, q_len, _, kv_begin, kv_end, partial_row, stride = item
        if request < 0:
            continue
        p = inputs.parts[request]
        rows = slice(q_begin, q_begin + q_len)
        query = QueryOperands(dequantize_mxfp8(p.q[rows], p.q_scale[rows]))
        kv = KVOperands(dequantize_mxfp8(p.k, p.k_scale), dequantize_mxfp8_tokens(p.v, p.v_scale))
        tile = TileSpec(
            q_begin, p.q.shape[0], p.k.shape[0], kv_begin, kv_end, case.causal, case.window_left,
            sm_scale(case), case.soft_cap,
        )  # fmt: skip
        heads = item_heads(case, item, per_group)
        o, lse = attend_tile(query, kv, heads, group, tile, scheme)
        if partial_row < 0:
            target = begins[request] + q_begin + torch.arange(q_len)
            out, out_lse = result.out, result.lse
        else:
            target = partial_row + stride * torch.arange(q_len)
            out, out_lse = result.partial_o, result.partial_lse
        for i, head in enumerate(heads):
            out.view(-1, hkv, group, d)[target, :, head] = o[:, :, i]
            out_lse.view(-1, hkv, group)[target, :, head] = lse[:, :, i]
    if inputs.sinks is not None:
        result.out, result.lse = add_sinks(result.out, result.lse, inputs.sinks)
    return result


def replace_out(inputs: Inputs) -> Inputs:
    return replace(inputs, case=replace(inputs.case, out=torch.float32))


def add_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    sink = (sinks * LOG2E).expand_as(lse)
    top = torch.maximum(lse, sink)
    total = top + torch.log2(exp2_rounded(lse - top) + exp2_rounded(sink - top))
    return out * exp2_rounded(lse - total).unsqueeze(-1), total


def merged(inputs: Inputs, result: Result) -> Result:
    """Split tokens combined, then sinks, as combine.cu does; tokens without partitions are left."""
    indptr = inputs.plan.merge_indptr.tolist()
    out, lse = result.out.float().clone(), result.lse.clone()
    for token, (begin, end) in enumerate(zip(indptr, indptr[1:], strict=False)):
        if end > begin:
            o, part = merge_base2(
                result.partial_o[begin:end].unsqueeze(1), result.partial_lse[begin:end].unsqueeze(1)
            )
            if inputs.sinks is not None:
                o, part = add_sinks(o, part, inputs.sinks)
            out[token], lse[token] = o, part
    return Result(out, lse, result.partial_o, result.partial_lse)


def expected_mmas(inputs: Inputs) -> int:
    """QMMA.SF count: 16-row warps times the KV blocks in which one of their rows sees a key."""
    case, plan = inputs.case, inputs.plan
    block = plan.request.kv_block
    per_tile = 2 * (block // 8) * (case.head_dim // 32)
    count = 0
    for item in plan.items.tolist():
        request, q_begin, q_len, _, kv_begin, kv_end, _, _ = item
        if request < 0:
            continue
        heads = len(item_heads(case, item, plan.request.heads_per_group))
        shift = case.kv_lens[request] - case.q_lens[request]
        for first in range(0, q_len * heads, 16):
            tokens = [
                q_begin + r // heads + shift for r in range(first, min(first + 16, q_len * heads))
            ]
            end = min(kv_end, tokens[-1] + 1) if case.causal else kv_end
            begin = (
                max(kv_begin, tokens[0] - case.window_left) if case.window_left >= 0 else kv_begin
            )
            for key in range(kv_begin, kv_end, block):
                count += key < end and key + block > begin
    return count * per_tile * case.kv_heads


# rel L2 per (request, head) against the fp32 replay.
GATE = {torch.float32: 2e-3, torch.bfloat16: 3e-3, torch.float16: 3e-3}


def assert_as_replayed(inputs: Inputs, raw: Result) -> None:
    """What the kernel wrote against the replay of the same plan, after the merge of partitions."""
    case = inputs.case
    want_raw = replay(inputs)
    got, want = merged(inputs, raw), merged(inputs, want_raw)
    assert not got.out.isnan().any() and not got.lse.isnan().any(), "out or lse holds NaN"
    # Where the kernel must not write: rows of split tokens.
    assert torch.equal(raw.out.isnan(), want_raw.out.isnan()), "a split row was finished"
    if case.data == "integer":
        assert torch.equal(got.out, want.out), "out is not exact"
    worst, gate = worst_rel_l2(case, got.out, want.out), GATE[case.out]
    assert worst <= gate, f"rel L2 {worst:.3g}, allowed {gate}"
    infinite = want.lse == -torch.inf
    assert torch.equal(got.lse == -torch.inf, infinite), "lse: other rows without keys"
    torch.testing.assert_close(got.lse[~infinite], want.lse[~infinite], rtol=0, atol=2e-4)
    assert (got.out[want.out.abs().amax(-1) == 0] == 0).all(), "a row without keys is not 0"


@lru_cache(maxsize=32)
def built(case: Case) -> Inputs:
    return build(case)


def worst_rel_l2(case: Case, got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest rel L2 over (request, head)."""
    worst, at = 0.0, 0
    for n in case.q_lens:
        a, b = got[at : at + n].double(), want[at : at + n].double()
        at += n
        if n:
            error = (a - b).norm(dim=(0, 2)) / b.norm(dim=(0, 2)).clamp_min(1e-30)
            worst = max(worst, float(error.max()))
    return worst
