# SPDX-License-Identifier: Apache-2.0
"""The comparison builds (paper, Figure 3): NVFP4 QK with P and V in bf16, or in NVFP4, against replays
of their own numerics. All watchers, late asynchrony, poison around everything."""

from __future__ import annotations

from dataclasses import replace

import attention_cases as cases
import prefill_cases as pc
import pv_cases
import pytest
import torch
from prefill_cases import Case
from prefill_exact import integer_operands
from prefill_modules import build_pv
from sim_modules import open_modules
from test_prefill import expected_mmas

from mpfa import reference as ref

PV_PRODUCTS = {16: 8, 4: 2}
CASES = (
    Case("long", (40,), (1500,), (2, 1), compensation="mean", num_sm=1),
    Case("many-tiles", (200, 5, 130), (200, 260, 130), (4, 2), causal=True, num_sm=1,
         compensation="mean+channels", out=torch.float32),
    Case("more-queries-than-keys", (300,), (20,), causal=True, sinks=True),
    Case("packed", (70, 0, 3), (300, 40, 0), (8, 2), causal=True, heads_per_group=4,
         compensation="mean", out=torch.float16),
    Case("split", (140,), (513,), (2, 1), partition=128, compensation="channels"),
    Case("window", (60,), (700,), (2, 1), causal=True, window_left=70, soft_cap=15.0,
         compensation="mean"),
)  # fmt: skip
BF16_CASES = (
    Case("ragged", (140, 40), (300, 257), (2, 1), page_size=0, causal=True, compensation="mean"),
    Case("pages-of-64", (140,), (450,), page_size=64, window_left=200, causal=True),
    Case("pages-of-16", (40,), (450,), page_size=16, compensation="mean+channels"),
    Case("pages-of-1", (40,), (300,), page_size=1, compensation="channels"),
)
ALL = [(bits, case) for bits in (16, 4) for case in CASES] + [(16, case) for case in BF16_CASES]


@pytest.fixture(scope="session")
def pv_modules():
    return open_modules(build_pv())


def run(x: pv_cases.PvOperands, pv_modules, simulator):
    simulator.clear()
    out, lse = pv_cases.launch(pv_modules[x.bits], x)
    simulator.check()
    (launched,) = simulator.launches()
    assert "mpfa_sm100_prefill" in launched["kernel"]
    per_block = (x.base.query.a_comp is not None) + 2
    blocks = expected_mmas(x.base) // (per_block + 4)
    assert launched["tcgen05_mma"] == blocks * (per_block + PV_PRODUCTS[x.bits])
    return out, lse


@pytest.mark.slow
@pytest.mark.parametrize("device", ["10.0", "10.3"])
@pytest.mark.parametrize(("bits", "case"), ALL, ids=lambda x: str(getattr(x, "name", x)))
def test_matrix(bits, case, device, pv_modules, simulator) -> None:
    x = pv_cases.operands(bits, pc.operands(case))
    with simulator.options(device=device, mode="lazy" if device == "10.0" else "random"):
        out, lse = run(x, pv_modules, simulator)
    with pv_cases.numerics_of(x):
        pc.assert_as_replayed(x.base, out, lse)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("case", pc.ONE_BLOCK_TILES, ids=lambda c: c.name)
def test_no_queued_unit_is_lost(case, bits, pv_modules, simulator) -> None:
    """As in test_prefill.py; bf16 V takes two units a block."""
    if bits == 4:
        case = replace(case, page_size=128)
    x = pv_cases.operands(bits, pc.operands(case))
    want = run(x, pv_modules, simulator)
    for seed in range(32):
        with simulator.options(mode="random", seed=seed):
            got = run(x, pv_modules, simulator)
        cases.assert_same_bits(got[0], want[0])
        cases.assert_same_bits(got[1], want[1])


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0, 7, 64, 77])
@pytest.mark.parametrize("compensation", ["none", "mean+channels"])
@pytest.mark.parametrize("bits", [16, 4])
def test_each_row_sees_one_key(bits, compensation, shift, pv_modules, simulator) -> None:
    """Integer operands, window 0: out is V of the one key."""
    case = Case("one-key", (150,), (150 + shift,), (4, 2), compensation=compensation, causal=True,
                window_left=0, seed=shift, out=torch.float32)  # fmt: skip
    x = pv_cases.operands(bits, integer_operands(case), integers=True)
    out, _ = run(x, pv_modules, simulator)
    with pv_cases.numerics_of(x):
        v = pc.request_operands(x.base, 0).v
    seen = v[torch.arange(150) + shift].repeat_interleave(2, dim=1)
    # NVFP4: the largest P is coded exactly, the row sum holds it as the exponent gave it. bf16: hidden
    # keys weigh 2^-119, which that format does not round to 0.
    assert (out - seen).abs().max() <= {16: 2e-6, 4: 1e-4}[bits] * seen.abs().max()
    out = torch.where(out.abs() < 1e-30, 0.0, out)
    cases.assert_same_bits(out.bfloat16(), seen.bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("bits", [16, 4])
def test_every_byte_of_v_is_read_once(bits, pv_modules, simulator) -> None:
    """Q = 0: the mean of V, exact to fp32 rounding: a wrong panel, atom or K step shows."""
    for count in (1, 16, 64, 128, 257, 512):
        case = Case("mean", (140,), (count,), (2, 1), out=torch.float32)
        x = pv_cases.operands(bits, integer_operands(case), integers=True)
        x.base.query.q.zero_()
        out, _ = run(x, pv_modules, simulator)
        with pv_cases.numerics_of(x):
            v = pc.request_operands(x.base, 0).v.double()
        assert (out - v.mean(0)).abs().max() < 8e-6


@pytest.mark.slow
def test_errors_of_the_assignments(pv_modules, modules, simulator) -> None:
    """Against float64 attention over each build's own V, so that P's format alone differs."""
    case = Case(
        "error", (130,), (512,), (2, 1), causal=True, out=torch.float32, k_bias=0.0, q_bias=0.0
    )
    o = pc.operands(case)
    errors = {}
    for bits in (16, 4):
        x = pv_cases.operands(bits, o)
        out, _ = run(x, pv_modules, simulator)
        with pv_cases.numerics_of(x):
            kv = pc.request_operands(o, 0)
        errors[bits] = cases.rel_l2(out, exact(o, kv))
    simulator.clear()
    out, _ = pc.launch(modules[128], o)
    errors[8] = cases.rel_l2(out, exact(o, pc.request_operands(o, 0)))
    print(", ".join(f"{bits} bits {errors[bits]:.5f}" for bits in (16, 8, 4)))
    assert errors[16] < errors[8] < errors[4] < 0.2


def exact(o: pc.Operands, kv) -> torch.Tensor:
    q = ref.dequantize_nvfp4(o.query.q, o.query.q_scale).double()
    k = kv.k.double().repeat_interleave(2, dim=1)
    v = kv.v.double().repeat_interleave(2, dim=1)
    s = torch.einsum("ihd,jhd->hij", q, k) * o.sm_scale
    rows, keys = s.shape[-2:]
    late = torch.arange(keys) > torch.arange(rows)[:, None] + keys - rows
    return torch.einsum("hij,jhd->ihd", s.masked_fill(late, -torch.inf).softmax(-1), v)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "change", "message"),
    [
        (16, {"page_size": 128, "v_scale": True}, r"^v_scale: must be given with NVFP4 V only"),
        (4, {"page_size": 128, "v_scale": False}, r"^v_scale: must be given with NVFP4 V only"),
        (4, {"page_size": 64}, r"^v: must be of rows of 64 bytes"),
    ],
)
def test_bad_input(bits, change, message, pv_modules, simulator) -> None:
    o = pc.operands(Case("bad", (5,), (140,), page_size=change["page_size"]))
    x = pv_cases.operands(bits, o)
    some = torch.zeros(o.kv.num_pages, 1, 2, 512, dtype=torch.uint8)
    x.v_scale = some if change.get("v_scale", True) else None
    with pytest.raises(ValueError, match=message):
        pv_cases.launch(pv_modules[bits], x)
