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


LIMIT = 2.0**24 - 16  # kLargestExponent


@pytest.mark.parametrize("sm_scale", [16.0, 128.0, 1e3])
def test_large_exponents(sm_scale, modules, simulator) -> None:
    """lambda * max up to 2^23: no P saturates, so the error is that of e4m3, 1/16 of the largest P.
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
    assert largest < LIMIT
    assert (out - want).abs().max() <= keys.v.abs().max() / 16
    exact = scores.logsumexp(-1).T * pc.LOG2E
    assert ((lse - exact) / exact).abs().max() < 1e-6


def test_exponents_without_an_answer(modules, simulator) -> None:
    """Where fp32 cannot tell P from 0: an error that names sm_scale, or NaN for the row, no number."""
    o = integer_operands(Case("exponents", (3,), (140,), head_dim=64))
    for scale, shown in ((1e30, "1e"), (1000.0001, "1000.0001")):
        with pytest.raises(ValueError, match=rf"^sm_scale: must be at most 1000 .* got {shown}"):
            pc.launch(modules[64], replace(o, sm_scale=scale))
    o.query.q[1:].fill_(0x77)
    o.query.q_scale[1:].fill_(0x58)
    o.kv.k.fill_(0x77)
    out, lse = run(replace(o, sm_scale=1e3), modules, simulator)
    assert not out[0].isnan().any() and not lse[0].isnan().any()
    assert out[1:].isnan().all() and lse[1:].isnan().all()
    # The cap, not sm_scale, bounds these.
    capped = replace(o, sm_scale=1e30, case=replace(o.case, soft_cap=30.0))
    assert not run(capped, modules, simulator)[0].isnan().any()


@pytest.mark.parametrize("device", ["10.0", "10.3"])
@pytest.mark.parametrize("sign", [1, -1])
def test_equal_maxima_of_all_kinds_of_keys(sign, device, modules, simulator) -> None:
    """Equal scores weigh the same whether MUFU or the polynomial computes them, up to the limit; V is
    the unit matrix, so the output holds the weights. Within 9 below a power of two the two offsets
    may be one step of the larger one apart."""
    o = pc.operands(Case("equal", (1,), (64,), head_dim=64, page_size=64, out=torch.float32))
    o.query.q.fill_(0x77)
    o.query.q_scale.view(torch.uint8).fill_(0x7E)
    o.kv.k_scale.view(torch.uint8).fill_(0x7E)
    o.kv.k.fill_(0x77 if sign > 0 else 0xFF)
    o.kv.v[o.table[1].long()[0], 0] = torch.eye(64).to(torch.float8_e4m3fn)
    score = 64 * (6.0 * 448.0) ** 2

    def weights(exponent: float) -> tuple[torch.Tensor, torch.Tensor]:
        changed = replace(o, sm_scale=exponent / score / pc.LOG2E)
        out, lse = run(changed, modules, simulator)
        return out[0, 0], lse

    with simulator.options(device=device):
        for exponent in (2.0**14 * 0.9, 2.0**22 * 0.87, 2.0**24 * 0.51, 2.0**24 - 32):
            found, _ = weights(exponent)
            assert found.max() <= found.min() * 1.001, exponent
        for power in (2.0**20, 2.0**22, 2.0**23):
            found, _ = weights(power - 4)
            assert found.max() <= found.min() * 9 / 8 * 2 ** (power * 2**-24), power
        for exponent in (2.0**24 + 8, 2.0**24 * 1.2, 2.0**27 * 0.9, 2.0**28):
            found, lse = weights(exponent)
            assert found.isnan().all() and lse.isnan().all(), exponent


@pytest.mark.parametrize("nan_scale", [False, True])
@pytest.mark.parametrize("high", [True, False])
def test_a_partition_below_the_limit(high, nan_scale, modules, simulator) -> None:
    """It weighs 0 beside one with higher scores; alone, or with a NaN of its own, the row is NaN."""
    case = Case("below", (3,), (256,), head_dim=64, page_size=64, partition=128, out=torch.float32)
    o = replace(integer_operands(case), sm_scale=1e3)
    o.query.q.fill_(0x77)
    o.query.q_scale.view(torch.uint8).fill_(0x58)  # 16
    o.kv.k.fill_(0xFF)
    pages = o.table[1].long()
    if high:
        o.kv.k[pages[2:]] = 0
    if nan_scale:
        o.kv.k_scale.view(torch.uint8)[pages[0], :, 5] = 0x7F
    simulator.clear()
    out, lse = pc.launch(modules[64], o)
    if high and not nan_scale:
        v = pc.request_operands(o, 0).v[128:, 0].double()
        assert (out[:, 0] - v.mean(0)).abs().max() < 4e-6
        assert (lse - 7.0).abs().max() < 1e-5
    else:
        assert out.isnan().all()
