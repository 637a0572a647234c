# SPDX-License-Identifier: Apache-2.0
"""Cases of the SM120 kernel in which every row sees one key: results are exact, no replay is asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kernel_job import Job, as_faults
from sm120_cases import Case, Inputs, Result, build, job

SHIFTS = (0, 1, 6, 31, 64, 77)


@dataclass(frozen=True)
class OneKeyCase(Case):
    """Row i sees key i + shift; the shift is the difference of the lengths."""

    @property
    def name(self) -> str:
        return f"one-key-{super().name}"


def one_key_cases() -> list[OneKeyCase]:
    return [
        OneKeyCase(
            d, (140,), (140 + shift,), 2, 2, 64, causal=True, window_left=0, data="integer",
            seed=shift,
        )
        for d in (64, 128)
        for shift in SHIFTS
    ]  # fmt: skip


def one_key_inputs(case: OneKeyCase) -> Inputs:
    """Bytes of integers with all block scales different, instead of the one-hot queries."""
    inputs = build(case)
    gen = torch.Generator().manual_seed(case.seed)
    values = torch.tensor([0x00, 0x38, 0x40, 0xB8], dtype=torch.uint8)  # 0, 1, 2, -1
    inputs.q.copy_(values[torch.randint(0, 4, inputs.q.shape, generator=gen)])
    return inputs


def one_key_truth(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 (out [n, Hq, D], lse [n, Hq])."""
    case, part, e4m3 = inputs.case, inputs.parts[0], torch.float8_e4m3fn
    (lq,), (lk,) = case.q_lens, case.kv_lens

    def scaled(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        blocks = codes.view(e4m3).double().unflatten(-1, (-1, 32))
        return (blocks * 2.0 ** (scale.double() - 127).unsqueeze(-1)).flatten(-2)

    q, k = scaled(inputs.q, inputs.q_scale), scaled(part.k, part.k_scale)
    v_scale = 2.0 ** (part.v_scale.double() - 127)
    v = part.v.view(e4m3).double() * v_scale.repeat_interleave(32, 0)[:lk]
    keys = torch.arange(lq) + lk - lq
    scores = torch.einsum("ihgd,ihd->ihg", q.unflatten(1, (case.kv_heads, -1)), k[keys])
    return v[keys].repeat_interleave(case.group, dim=1), scores.flatten(1)


def assert_one_key(inputs: Inputs, got: Result) -> None:
    want, want_lse = one_key_truth(inputs)
    assert torch.equal(got.lse.double(), want_lse), "lse is not the one score"
    assert torch.equal(got.out.double(), want), "out is not the V of the one visible key"


def one_key_job(case: OneKeyCase) -> Job:
    """One launch for any device."""
    inputs = one_key_inputs(case)
    plain = job(inputs)
    return Job(
        case.name, plain.calls, plain.outputs,
        lambda got: as_faults(assert_one_key, inputs, Result(**got)),
    )  # fmt: skip
