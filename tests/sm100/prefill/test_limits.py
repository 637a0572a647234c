# SPDX-License-Identifier: Apache-2.0
"""What lies at the edge of the kernel's contract: memory that nobody needs to have written, and scores
near the end of fp32's exponents."""

from __future__ import annotations

from dataclasses import replace

import attention_cases as cases
import prefill_cases as pc
import pytest
import torch
from prefill_cases import Case
from prefill_exact import integer_operands
from test_prefill import run

from mpfa import reference as ref


@pytest.mark.parametrize(
    ("page_size", "window_left", "head_dim"),
    [(1, 100, 64), (16, 100, 128), (64, 60, 128), (64, 60, 64)],
)
def test_pages_that_a_window_has_left(page_size, window_left, head_dim, modules, simulator) -> None:
    """They may hold NaN, also inside the 128-key block in which the window begins."""
    case = Case("left", (20,), (300,), (2, 1), head_dim, page_size, "mean+channels", causal=True,
                window_left=window_left)  # fmt: skip
    o = pc.operands(case)
    want = run(o, modules, simulator)
    first_key = 300 - 20 - window_left
    assert first_key // page_size * page_size > 128, "a whole page of the first block is left"
    left = o.table[1][: first_key // page_size].long()
    for t in (o.kv.k, o.kv.k_scale, o.kv.v, o.kv.aux_delta, o.kv.aux_channels):
        rows = t.view(torch.uint8)
        rows[left] = torch.full_like(rows[left], cases.POISON_BYTE)
    got = run(o, modules, simulator)
    assert not got[0].isnan().any()
    cases.assert_same_bits(got[0], want[0])
    cases.assert_same_bits(got[1], want[1])


@pytest.mark.parametrize("sm_scale", [16.0, 1024.0, 1e4])
def test_large_exponents(sm_scale, modules, simulator) -> None:
    """lambda * max up to 2^26: no P saturates, so the error is that of e4m3, 1/16 of the largest P.
    Scores are exact, and two keys that differ do so by far more than the softmax sees."""
    case = Case("exponents", (70,), (300,), (2, 1), out=torch.float32)
    o = replace(integer_operands(case), sm_scale=sm_scale)
    out, lse = run(o, modules, simulator)
    keys = pc.request_operands(o, 0)
    q = ref.dequantize_nvfp4(o.query.q, o.query.q_scale).double()
    scores = torch.einsum("ihd,jd->hij", q, keys.k[:, 0].double()) * sm_scale
    want = torch.einsum("hij,jd->ihd", scores.softmax(-1), keys.v[:, 0].double())
    largest = scores.abs().max().item() * pc.LOG2E
    print(f"lambda max {largest:.3g}, error {(out - want).abs().max() / keys.v.abs().max():.3g}")
    assert largest < 2**27
    assert (out - want).abs().max() <= keys.v.abs().max() / 16
    exact = scores.logsumexp(-1).T * pc.LOG2E
    assert ((lse - exact) / exact).abs().max() < 1e-6


def test_exponents_without_an_answer(modules, simulator) -> None:
    """Where fp32 cannot tell P from 0: an error that names sm_scale, or NaN for the row, no number."""
    o = integer_operands(Case("exponents", (3,), (140,), head_dim=64))
    with pytest.raises(ValueError, match=r"^sm_scale: must be at most 10000 "):
        pc.launch(modules[64], replace(o, sm_scale=1e30))
    o.query.q[1:].fill_(0x77)
    o.query.q_scale[1:].fill_(0x58)
    o.kv.k.fill_(0x77)
    out, lse = run(replace(o, sm_scale=1e4), modules, simulator)
    assert not out[0].isnan().any() and not lse[0].isnan().any()
    assert out[1:].isnan().all() and lse[1:].isnan().all()
    # The cap, not sm_scale, bounds these.
    capped = replace(o, sm_scale=1e30, case=replace(o.case, soft_cap=30.0))
    assert not run(capped, modules, simulator)[0].isnan().any()
