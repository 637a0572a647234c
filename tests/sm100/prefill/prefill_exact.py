# SPDX-License-Identifier: Apache-2.0
"""Cases of the SM100 prefill kernel whose results are exact: every row sees one key, or all keys score
the same. No replay is asked, and a wrong lane, byte, scale or slot shows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import attention_cases as cases
import prefill_cases as pc
import torch
from kernel_job import Job, as_faults
from prefill_cases import Case

from mpfa import reference as ref

SHIFTS = (0, 1, 7, 31, 64, 77)
OPERANDS = (
    ("none", 128, 1),
    ("mean", 64, 2),
    ("channels", 16, 2),
    ("mean+channels", 128, 1),
)  # (compensation, page size, heads per group)
COUNTS = (1, 3, 64, 128, 257, 512)


@dataclass(frozen=True)
class ExactCase:
    """kind: "one key" or "equal scores"."""

    kind: str
    case: Case

    @property
    def name(self) -> str:
        return f"{self.kind.replace(' ', '-')}-{self.case.name}"


def one_key_case(
    head_dim: int, compensation: str, page_size: int, heads_per_group: int, shift: int
) -> ExactCase:
    """Window 0 and causal: row i sees only key i + shift."""
    lq = 150
    name = f"{compensation}-d{head_dim}-p{page_size}-packed{heads_per_group}-{shift}"
    return ExactCase("one key", Case(
        name, (lq,), (lq + shift,), (4, 2), head_dim, page_size, compensation, causal=True,
        window_left=0, heads_per_group=heads_per_group, seed=shift,
    ))  # fmt: skip


def equal_scores_case(head_dim: int, count: int) -> ExactCase:
    name = f"d{head_dim}-{count}"
    case = Case(name, (140,), (count,), (2, 1), head_dim, page_size=32, out=torch.float32)
    return ExactCase("equal scores", case)


def exact_cases() -> list[ExactCase]:
    one_key = [
        one_key_case(d, *operands, shift)
        for d in (64, 128)
        for operands in OPERANDS
        for shift in SHIFTS
    ]
    return one_key + [equal_scores_case(d, count) for d in (64, 128) for count in COUNTS]


def integer_operands(case: Case) -> pc.Operands:
    """Bytes whose products and sums are exact in fp32, every scale and slot different."""
    o = pc.operands(case, sm_scale=math.log(2))
    gen = torch.Generator().manual_seed(case.seed + 5)

    def pick(t: torch.Tensor, codes: list[int]) -> torch.Tensor:
        values = torch.tensor(codes, dtype=torch.uint8)
        return values[torch.randint(0, len(codes), t.shape, generator=gen)]

    def integers(t: torch.Tensor) -> torch.Tensor:
        return torch.randint(-4, 5, t.shape, generator=gen).to(t.dtype)

    halves_to_two = [0x30, 0x38, 0x40]  # e4m3 0.5, 1, 2
    q, kv = o.query, o.kv
    q.q.copy_(torch.randint(0, 256, q.q.shape, generator=gen, dtype=torch.uint8))
    q.q_scale.copy_(pick(q.q_scale, halves_to_two))
    if q.a_comp is not None:
        first = 1 if q.row_term is not None else 0
        q.a_comp[..., first : first + case.num_channels].copy_(
            integers(q.a_comp[..., first : first + case.num_channels])
        )
    if q.row_term is not None:
        q.row_term.zero_()
    slots = torch.cat(cases.page_table(case.kv_lens, case.page_size, o.kv.num_pages, case.seed)[3])
    page, row = slots // case.page_size, slots % case.page_size
    tokens = len(slots)
    heads, dim = case.heads[1], case.head_dim
    kv.k[page, :, row] = torch.randint(
        0, 256, (tokens, heads, dim // 2), generator=gen, dtype=torch.uint8
    )
    scales = pick(torch.empty(tokens, heads, dim // 16), halves_to_two)
    if case.page_size == 128:
        for k16 in range(dim // 16):
            atom, byte = ref.scale_atom_offset(row, torch.tensor(k16))
            kv.k_scale[page, :, atom.expand_as(page), byte] = scales[..., k16]
    else:
        kv.k_scale[page, :, row] = scales
    kv.v.view(torch.uint8)[page, :, row] = pick(
        torch.empty(tokens, heads, dim), [0x00, 0x38, 0x40, 0x44, 0xB8, 0xC4, 0x4C]
    )
    if kv.aux_delta is not None:
        group = kv.aux_delta.shape[2]
        kv.aux_delta[page, :, :, row] = integers(
            torch.empty(tokens, heads, group, dtype=torch.bfloat16)
        )
    if kv.aux_channels is not None:
        kv.aux_channels[page, :, row] = integers(
            torch.empty(tokens, heads, case.num_channels, dtype=torch.bfloat16)
        )
    return o


def operands(exact: ExactCase) -> pc.Operands:
    o = integer_operands(exact.case)
    if exact.kind == "equal scores":
        o.query.q.zero_()
    return o


def one_key_truth(o: pc.Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """(V of the one key of every row, its score in base 2)."""
    case = o.case
    keys = pc.request_operands(o, 0)
    q = ref.dequantize_nvfp4(o.query.q, o.query.q_scale)
    (lq,), (lk,) = case.qo_lens, case.kv_lens
    seen = torch.arange(lq) + lk - lq
    k = keys.k[seen].repeat_interleave(2, dim=1)
    score = (q.double() * k.double()).sum(-1)
    if o.query.a_comp is not None:
        a, first = o.query.a_comp.double(), 0
        if keys.delta is not None:
            score += a[..., 0] * keys.delta[seen].double()
            first = 1
        if keys.channels is not None:
            b = keys.channels[seen].double().repeat_interleave(2, dim=1)
            score += (a[..., first : first + case.num_channels] * b).sum(-1)
    return keys.v[seen].repeat_interleave(2, dim=1), score


def assert_exact(exact: ExactCase, o: pc.Operands, out: torch.Tensor, lse: torch.Tensor) -> None:
    if exact.kind == "one key":
        want, score = one_key_truth(o)
        # Scores are multiples of 1/16.
        assert (lse.double() - score).abs().max() < 1 / 64, "lse is not the one score"
        cases.assert_same_bits(out, want.to(out.dtype))
        return
    v = pc.request_operands(o, 0).v.double()
    assert (out - v.mean(0)).abs().max() < 4e-6, "out is not the mean of V"
    assert (lse - math.log2(exact.case.kv_lens[0])).abs().max() < 1e-5, "lse is not log2(keys)"


def job(exact: ExactCase) -> Job:
    """One launch for any device."""
    o = operands(exact)
    plain = pc.job(o)

    def check(got: dict[str, torch.Tensor]) -> None:
        assert_exact(exact, o, *pc.finish(o, got))

    return Job(exact.name, plain.calls, plain.outputs, lambda got: as_faults(check, got))
