# SPDX-License-Identifier: Apache-2.0
"""The SM100 decode kernel's PTX in the simulator against the replay of the same plan.

Unwritten bytes of pages and unused pages hold NaN; all watchers are on and asynchronous operations
land as late as they may.
"""

from __future__ import annotations

import math
from dataclasses import replace

import attention_cases
import decode_cases
import decode_exact
import pytest
import torch
from decode_cases import COMPENSATIONS, Case
from decode_list import fast_cases, slow_cases

import mpfa

SLOW = slow_cases()


def expected_mmas(inputs: decode_cases.Inputs) -> int:
    """tcgen05.mma of a plan: per block, the K steps of both products and one for channels."""
    case = inputs.case
    _, plan = inputs.plan()
    items = plan.items[plan.items[:, 0] >= 0]
    blocks = int(((items[:, 5] - items[:, 4] + 127) // 128).sum()) * case.num_kv_heads
    return blocks * (case.head_dim // 64 + 4 + (1 if case.channels else 0))


def run(case: Case, modules, dtype=torch.float32, inputs=None):
    inputs = inputs or decode_cases.build(case)
    return inputs, decode_cases.run(modules[str(case.head_dim)], modules["combine"], inputs, dtype)


def check(case: Case, modules, simulator) -> None:
    inputs, got = run(case, modules)
    simulator.check()
    launches = simulator.launches()
    assert "sm100_decode" in launches[0]["kernel"]
    assert launches[0]["tcgen05_mma"] == expected_mmas(inputs)
    assert all("combine_states" in x["kernel"] for x in launches[1:])
    assert decode_cases.faults(got, decode_cases.replay(inputs), rel=decode_cases.gate(case)) == []


@pytest.mark.parametrize("case", fast_cases(), ids=lambda case: case.name)
def test_matrix(case, modules, simulator):
    check(case, modules, simulator)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda case: case.name)
def test_large_matrix(case, modules, simulator):
    check(case, modules, simulator)


def test_list_of_cases():
    print(
        f"sm100 decode: {len(fast_cases())} of {len(fast_cases()) + len(SLOW)} cases in make test"
    )
    assert len({case.name for case in fast_cases()}) == len(fast_cases())


ORDERS = [
    ("10.0", "random", "exact"),
    ("10.3", "lazy", "sequential"),
    ("10.3", "eager", "truncating"),
]


@pytest.mark.parametrize(("device", "mode", "accumulate"), ORDERS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_other_devices_and_orders(head_dim, device, mode, accumulate, modules, simulator):
    """Other completion orders, and other ways in which an MMA may sum."""
    case = Case((1, 300, 1100), 3, head_dim, 32, "mean+channels", 15, 2, k_bias=3.0, q_bias=1.0)
    with simulator.options(device=device, mode=mode, accumulate=accumulate, seed=11):
        check(case, modules, simulator)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("device", "mode", "accumulate"), ORDERS)
@pytest.mark.parametrize("case", fast_cases()[::4], ids=lambda case: case.name)
def test_matrix_in_other_orders(case, device, mode, accumulate, seed, modules, simulator):
    with simulator.options(device=device, mode=mode, accumulate=accumulate, seed=seed):
        check(case, modules, simulator)


# ---- exact cases -----------------------------------------------------------------------------------


def check_exact(kind: str, case: Case, modules) -> torch.Tensor:
    """The LSE of an exact case."""
    exact = decode_exact.ExactCase(kind, case)
    inputs, (out, lse) = run(case, modules, inputs=decode_exact.build(exact))
    assert decode_exact.faults(exact, inputs, out, lse) == []
    return lse


@pytest.mark.parametrize("case", decode_exact.ONE_KEY, ids=lambda case: case.name)
def test_each_row_sees_one_key(case, modules, simulator):
    """Window 0: the LSE is the score of one key and the output its V, bit for bit. Every scale differs,
    so a wrong row, byte or channel block shows."""
    assert check_exact("one key", case, modules).unique().numel() > 60


@pytest.mark.parametrize("case", decode_exact.EQUAL_SCORES, ids=lambda case: case.name)
def test_equal_scores_average_v(case, modules, simulator):
    """2^n keys of score 0: LSE n and the exact mean of V, whole, split and with a tail block."""
    check_exact("equal scores", case, modules)


@pytest.mark.parametrize("case", decode_exact.SLOTS, ids=lambda case: case.name)
def test_compensation_slots(case, modules, simulator):
    """Zero FP4 operands: what is left are Delta and the channels, exactly."""
    check_exact("slots", case, modules)


# ---- truth, features -------------------------------------------------------------------------------


@pytest.mark.parametrize(("compensation", "channels"), COMPENSATIONS)
def test_against_float64_attention(compensation, channels, modules, simulator):
    """Cosine and relative L2 to exact attention of the unquantised inputs, on the data that each
    compensation is made for: biased with a mean, outliers with channels."""
    bias = 3.0 if "mean" in compensation else 0.0
    case = Case(
        (700, 90), 4, 128, 64, compensation, channels, q_len=2, k_bias=bias, q_bias=bias / 3,
        outliers=4.0 if "channels" in compensation else 0.0, seed=5,
    )  # fmt: skip
    inputs, (out, lse) = run(case, modules)
    truth, truth_lse = attention_cases.dense_batch(inputs.batch, causal=True)
    cosine = torch.nn.functional.cosine_similarity(out.double(), truth, dim=-1).min()
    rel = attention_cases.rel_l2(out, truth)
    assert cosine > 0.95
    assert rel < 0.2
    assert (lse.double() * math.log(2) - truth_lse).abs().max() < 0.1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [2**31 - 2, 2**31 - 1])
def test_a_window_larger_than_everything(window_left, causal, modules, simulator):
    """Also for query tokens in front of the first key, whose positions are negative."""
    case = Case((2, 0, 140), 2, 64, 16, q_len=8, causal=causal, window_left=window_left, seed=6)
    inputs, got = run(case, modules)
    assert decode_cases.faults(got, decode_cases.replay(inputs)) == []
    _, plain = run(replace(case, window_left=-1), modules)
    assert torch.equal(got[0], plain[0])
    assert torch.equal(got[1], plain[1])


@pytest.mark.parametrize("soft_cap", [30.0, 300.0, 1e4, 1e6])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_large_soft_caps(head_dim, soft_cap, modules, simulator):
    """A cap far above the scores changes them little: tanh needs its relative precision."""
    case = Case(
        (257, 90), 4, head_dim, 64, "mean", q_len=2, soft_cap=soft_cap, scale=2.0, k_bias=2.0, seed=21
    )  # fmt: skip
    inputs, got = run(case, modules)
    assert decode_cases.faults(got, decode_cases.replay(inputs), lse_tolerance=1e-6) == []


@pytest.mark.parametrize("split_tokens", [None, 128])
def test_a_nan_sink_reaches_the_output(split_tokens, modules, simulator):
    """Its own head only, and also where a row sees no key."""
    case = Case((300, 0), 4, 64, 64, sinks=True, split_tokens=split_tokens, seed=7)
    inputs = decode_cases.build(case)
    _, (want, want_lse) = run(case, modules, inputs=replace(inputs))
    inputs.sinks[2] = math.nan
    _, (out, lse) = run(case, modules, inputs=inputs)
    assert out[:, 2].isnan().all()
    assert lse[:, 2].isnan().all()
    others = [0, 1, 3]
    assert torch.equal(out[:, others], want[:, others])
    assert torch.equal(lse[:, others], want_lse[:, others])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_outputs(dtype, modules, simulator):
    case = Case((1, 257, 1500, 0), 4, q_len=2, compensation="mean", k_bias=2.0, sinks=True)
    inputs, got = run(case, modules, dtype)
    assert got[0].dtype == dtype
    assert decode_cases.faults(got, decode_cases.replay(inputs), rel=3e-3) == []


def test_rows_without_keys(modules, simulator):
    """Non-causal decode of an empty request, and causal rows before its first key."""
    for sinks in (False, True):
        case = Case((0, 3), 4, q_len=8, sinks=sinks)
        inputs, (out, lse) = run(case, modules)
        empty = torch.cat([torch.arange(8), 8 + torch.arange(5)])
        assert (out[empty] == 0).all()
        if sinks:
            want = (inputs.sinks * decode_cases.attention_cases.LOG2E).expand(13, -1)
            torch.testing.assert_close(lse[empty], want, rtol=1e-6, atol=0)
        else:
            assert (lse[empty] == -torch.inf).all()
        assert torch.isfinite(out[13:]).all()
    inputs, (out, lse) = run(replace(case, kv_lens=(0, 0)), modules)
    assert (out == 0).all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_alone_and_in_a_batch_the_same_bits(head_dim, modules, simulator):
    """A request's result depends neither on its neighbours nor on its pages."""
    case = Case((1300, 129, 2100, 5), 5, head_dim, 32, "mean+channels", 15, 2, sinks=True, seed=8)
    inputs, (out, lse) = run(case, modules)
    for b, n in enumerate(case.kv_lens):
        alone = inputs.batch.select([b])
        pages = attention_cases.paged(alone, inputs.config, stats=inputs.stats, seed=50 + b)
        single = replace(inputs, case=replace(case, kv_lens=(n,)), batch=alone, pages=pages)
        rows = slice(2 * b, 2 * b + 2)
        single.query = mpfa.QuantizedQuery(
            inputs.query.q[rows], inputs.query.q_scale[rows], inputs.query.a_comp[rows],
            inputs.query.row_term[rows], inputs.config, inputs.stats, inputs.query.dtype,
        )  # fmt: skip
        _, (one, one_lse) = run(single.case, modules, inputs=single)
        assert torch.equal(one, out[rows])
        assert torch.equal(one_lse, lse[rows])


@pytest.mark.parametrize("length", [127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 2048, 2049])
def test_partition_boundaries(length, modules, simulator):
    """Split and whole agree up to the order of summation, on both sides of every boundary."""
    case = Case((length, length + 1), 4, 128, 16, q_len=2, sinks=True, seed=length)
    whole = decode_cases.build(case)
    outs = []
    for split in (None, 128, 384):
        pages = None if split is None else split // case.page_size
        inputs = replace(whole, options={**whole.options, "fixed_split_pages": pages})
        _, got = run(case, modules, inputs=inputs)
        assert decode_cases.faults(got, decode_cases.replay(inputs)) == []
        outs.append(got)
    for out, lse in outs[1:]:
        torch.testing.assert_close(lse, outs[0][1], rtol=0, atol=1e-4)
        # P is rounded to e4m3 against another running maximum: 2^-4 relative steps, uncorrelated.
        assert attention_cases.rel_l2(out, outs[0][0]) < 4e-2


def test_garbage_outside_the_window(modules, simulator):
    """Pages that the window has left may hold anything, also keys and values of NaN."""
    case = Case((900, 1500), 4, 128, 32, "mean+channels", 15, window_left=200, q_len=2, seed=12)
    inputs = decode_cases.build(case)
    want = decode_cases.replay(inputs)
    decode_cases.poison_left_pages(inputs)
    _, got = run(case, modules, inputs=inputs)
    assert decode_cases.faults(got, want) == []


def test_strided_pages_and_outputs(modules, simulator):
    """Token-major pages and outputs inside larger tensors give the same bits."""
    case = Case((300, 60), 4, 128, 64, "mean", num_kv_heads=2, k_bias=2.0, seed=3)
    inputs, want = run(case, modules)
    cache = inputs.pages.cache

    def token_major(t):
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    moved = replace(
        cache, k=token_major(cache.k), v=token_major(cache.v), k_scale=token_major(cache.k_scale)
    )
    inputs.pages.cache = moved
    spec, plan = inputs.plan()
    launcher = decode_cases.Launcher(modules["128"], modules["combine"], inputs, spec, plan)
    wide = torch.full((8, 2, 200), math.nan).transpose(0, 1)
    launcher.out, launcher.lse = wide[..., 4:132], torch.full((8, 2), math.nan).t()
    launcher.launch()
    assert torch.equal(launcher.out, want[0])
    assert torch.equal(launcher.lse, want[1])


# ---- refusals --------------------------------------------------------------------------------------


def test_refusals(modules):
    case = Case((40,), 4, page_size=16)
    inputs = decode_cases.build(case)
    spec, plan = inputs.plan()
    launcher = decode_cases.Launcher(modules["128"], modules["combine"], inputs, spec, plan)
    cache = inputs.pages.cache
    bad = torch.empty(cache.k.numel() + 8, dtype=torch.uint8)[8:].view(cache.k.shape)
    object.__setattr__(cache, "k", bad)
    with pytest.raises(ValueError, match="k: must be aligned to 16 bytes"):
        launcher.launch()
    launcher.modules = (modules["64"], modules["combine"])
    with pytest.raises(ValueError, match="head_dim 64"):
        launcher.launch()
