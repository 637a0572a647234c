# SPDX-License-Identifier: Apache-2.0
"""Cases of the SM100 decode kernel whose results are exact: one visible key, equal scores, compensation
slots alone. A wrong lane, byte, scale or slot shows, whatever the replay says."""

from __future__ import annotations

import math
from dataclasses import dataclass

import decode_cases
import torch
from decode_cases import Case, Inputs
from kernel_job import Job

# Every position within a block of 128 keys that a layout could treat in its own way.
ONE_KEY_LENGTHS = (1, 5, 33, 64, 77, 128, 129, 200, 250, 256, 300, 383)
ONE_KEY = [
    Case(ONE_KEY_LENGTHS, 5, d, page_size, num_kv_heads=2, window_left=0, seed=4)
    for d in (64, 128)
    for page_size in (128, 64, 32, 16)
]
# Whole, split and with a tail block.
EQUAL_SCORES = [
    Case((n,), 8, d, 64, split_tokens=split, seed=n)
    for d in (64, 128)
    for n, split in ((128, None), (64, None), (1024, 256), (2048, None), (512, 128))
]
SLOTS = [
    Case((129,), 3, 128, 128, "mean+channels", 15, window_left=0, seed=slot)
    for slot in range(0, 16, 5)
]


@dataclass(frozen=True)
class ExactCase:
    """kind: "one key", "equal scores" or "slots"."""

    kind: str
    case: Case

    @property
    def name(self) -> str:
        return f"{self.kind.replace(' ', '-')}-{self.case.name}"


def exact_cases() -> list[ExactCase]:
    lists = {"one key": ONE_KEY, "equal scores": EQUAL_SCORES, "slots": SLOTS}
    return [ExactCase(kind, case) for kind, cases in lists.items() for case in cases]


def integer_inputs(case: Case) -> Inputs:
    """Operands of small integers and power-of-two scales, written into the pages directly: every
    score is an integer, V an integer up to 8."""
    inputs = decode_cases.build(case)
    gen = torch.Generator().manual_seed(case.seed)
    cache, q = inputs.pages.cache, inputs.query
    codes = torch.tensor([0x0, 0x2, 0x4, 0xA], dtype=torch.uint8)  # 0, 1, 2, -1

    def packed(shape):
        pick = codes[torch.randint(0, 4, (*shape, 2), generator=gen)]
        return pick[..., 0] | pick[..., 1] << 4

    scales = torch.tensor([0x30, 0x38, 0x40], dtype=torch.uint8)  # 1/2, 1, 2

    def scale_bytes(shape):
        return scales[torch.randint(0, 3, tuple(shape), generator=gen)]

    cache.k.copy_(packed(cache.k.shape))
    cache.k_scale.copy_(scale_bytes(cache.k_scale.shape))
    q.q.copy_(packed(q.q.shape))
    q.q_scale.copy_(scale_bytes(q.q_scale.shape))
    cache.v.copy_(torch.randint(-8, 9, cache.v.shape, generator=gen).to(torch.float8_e4m3fn))
    return inputs


def build(exact: ExactCase) -> Inputs:
    inputs = integer_inputs(exact.case)
    cache, q = inputs.pages.cache, inputs.query
    if exact.kind != "one key":
        q.q.zero_()
    if exact.kind == "slots":  # what is left are Delta and the channels; one slot of A at a time
        slot = exact.case.seed
        gen = torch.Generator().manual_seed(slot)
        for t in (cache.aux_delta, cache.aux_channels, q.a_comp[..., 1:]):
            t.copy_(torch.randint(-4, 5, t.shape, generator=gen).bfloat16())
        if slot < 15:
            q.a_comp[..., 1:] = 0
            q.a_comp[..., 1 + slot] = 2.0
    return inputs


def faults(exact: ExactCase, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> list[str]:
    """What is not exactly as it must be."""
    if exact.kind == "equal scores":
        n = exact.case.kv_lens[0]
        v = inputs.pages.cache.v.float()[inputs.pages.indices.long(), 0].flatten(0, 1)[:n]
        want, want_lse = v.mean(dim=0).expand_as(out), torch.full_like(lse, math.log2(n))
    else:
        want, want_lse = decode_cases.replay(inputs)
    found = []
    if not torch.equal(out, want):
        found.append(f"out: {int((out != want).sum())} of {out.numel()} values are not exact")
    same = lse == want_lse
    if exact.kind == "slots":
        same |= (lse - want_lse).abs() <= 1e-6 * want_lse.abs()
    if not same.all():
        found.append(f"lse: {int((~same).sum())} of {lse.numel()} values are not exact")
    if exact.kind == "one key":
        rows = torch.stack([last_value(inputs, b) for b in range(len(exact.case.kv_lens))])
        if not torch.equal(out, rows.repeat_interleave(exact.case.group, dim=1)):
            found.append("out: not the V of the one visible key")
    return found


def last_value(inputs: Inputs, b: int) -> torch.Tensor:
    """fp32 [Hkv, D]: V of the last key of request b."""
    last, page_size = inputs.case.kv_lens[b] - 1, inputs.case.page_size
    page = int(inputs.pages.indices[inputs.pages.indptr[b] + last // page_size])
    return inputs.pages.cache.v.float()[page, :, last % page_size]


def job(exact: ExactCase) -> Job:
    """One launch for any device."""
    inputs = build(exact)
    plain = decode_cases.job(inputs, str(exact.case.head_dim))
    return Job(
        exact.name, plain.calls, plain.outputs,
        lambda got: faults(exact, inputs, got["out"], got["lse"]),
    )  # fmt: skip
