# SPDX-License-Identifier: Apache-2.0
"""The SM120 kernel's PTX in the simulator against the replay of the same plan.

Everything outside the operands' own rows holds NaN bytes (tails of blocks and pages, unused pages,
rows past the batch); all watchers are on and asynchronous copies land as late as they may.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest
import torch
from case_list import RANDOM_SEEDS, all_cases, fast_cases, random_case, slow_cases
from covering import cover
from sm120_cases import (
    Case,
    Inputs,
    assert_as_replayed,
    build,
    built,
    expected_mmas,
    launch,
    merged,
    replay,
    worst_rel_l2,
)
from sm120_exact import assert_one_key, one_key_cases, one_key_inputs, one_key_truth

from mpfa.jit import paths, toolkit
from mpfa.reference.replay import Scheme, scheme_for


def check(case: Case, modules, simulator) -> None:
    inputs = built(case)
    raw = launch(inputs, modules[case.head_dim], simulator)
    launches = simulator.launches()
    assert ["sm120_prefill" in x["kernel"] for x in launches] == [True]
    assert launches[0]["mma_sync"] == expected_mmas(inputs)
    assert_as_replayed(inputs, raw)


@pytest.mark.parametrize("case", fast_cases(), ids=lambda c: c.name)
def test_matrix(case, modules, simulator) -> None:
    check(case, modules, simulator)


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_cases(), ids=lambda c: c.name)
def test_large_matrix(case, modules, simulator) -> None:
    check(case, modules, simulator)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", ["sequential", "truncating"])
@pytest.mark.parametrize("mode", ["eager", "random"])
@pytest.mark.parametrize("case", fast_cases(), ids=lambda c: c.name)
def test_other_orders(case, mode, accumulate, modules, simulator) -> None:
    """On 12.1, with other completion orders, and with other ways in which an MMA may sum."""
    with simulator.options(device="12.1", mode=mode, accumulate=accumulate, seed=11):
        check(case, modules, simulator)


@pytest.mark.slow
@pytest.mark.parametrize("seed", RANDOM_SEEDS)
def test_random_shapes(seed, modules, simulator) -> None:
    with simulator.options(mode=("lazy", "random", "eager")[seed % 3], seed=seed + 1):
        check(random_case(seed), modules, simulator)


@pytest.mark.parametrize("case", one_key_cases(), ids=lambda c: c.name)
def test_each_row_sees_one_key(case, modules, simulator) -> None:
    """Window 0: row i sees only key i + shift, so LSE = S[i, i + shift] and out = V[i + shift],
    exactly and without any replay. Every scale differs; a wrong lane, byte or row shows."""
    inputs = one_key_inputs(case)
    assert one_key_truth(inputs)[1].unique().numel() > 50
    assert_one_key(inputs, launch(inputs, modules[case.head_dim], simulator))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_ragged_paged_and_batched_give_the_same_bits(head_dim, modules, simulator) -> None:
    alone = Case(head_dim, (70,), (211,), 1, 3, causal=True, seed=5)
    (part,) = built(alone).parts
    first = merged(built(alone), launch(built(alone), modules[head_dim], simulator))
    for page_size in (32, 64, 128, None):
        case = Case(
            head_dim, (3, 70, 1), (60, 211, 9), 1, 3, page_size, causal=True, seed=page_size or 7
        )
        inputs = built(case)
        place(inputs, 1, part)
        got = launch(inputs, modules[head_dim], simulator)
        assert torch.equal(got.out[3:73], first.out)
        assert torch.equal(got.lse[3:73], first.lse)


def place(inputs: Inputs, request: int, part) -> None:
    """Overwrites one request's operands in the tensors of ``inputs``."""
    case = inputs.case
    q_begin, kv_begin = sum(case.q_lens[:request]), sum(case.kv_lens[:request])
    inputs.q[q_begin : q_begin + part.q.shape[0]] = part.q
    inputs.q_scale[q_begin : q_begin + part.q.shape[0]] = part.q_scale
    n, ps = part.k.shape[0], case.page_size
    if ps is None:
        rows = slice(kv_begin, kv_begin + n)
        inputs.k[rows], inputs.k_scale[rows], inputs.v[rows] = part.k, part.k_scale, part.v
        block = sum(-(-x // 32) for x in case.kv_lens[:request])
        inputs.v_scale[block : block + part.v_scale.shape[0]] = part.v_scale
        return
    begin = int(inputs.plan.kv_indptr[request])
    for i, page in enumerate(inputs.plan.kv_indices[begin:].tolist()[: -(-n // ps)]):
        rows = slice(i * ps, (i + 1) * ps)
        count = part.k[rows].shape[0]
        inputs.k[page, :, :count] = part.k[rows].transpose(0, 1)
        inputs.k_scale[page, :, :count] = part.k_scale[rows].transpose(0, 1)
        inputs.v[page, :, :count] = part.v[rows].transpose(0, 1)
        blocks = part.v_scale[i * ps // 32 : (i + 1) * ps // 32]
        inputs.v_scale[page, :, : blocks.shape[0]] = blocks.transpose(0, 1)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_strides_are_free(head_dim, modules, simulator) -> None:
    """Operands and outputs as slices of larger tensors; pages token-major as well as head-major."""
    case = Case(head_dim, (30, 9), (130, 70), 2, 2, 64, causal=True, sinks=True, seed=9)
    inputs = built(case)
    plain = launch(inputs, modules[head_dim], simulator)

    def spread(t: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        """The same values, dimensions in another memory order, 16 bytes apart and NaN between."""
        moved = t.permute(order)
        wide = torch.full((*moved.shape[:-1], moved.shape[-1] + 16), 255, dtype=torch.uint8)
        wide[..., : moved.shape[-1]] = moved
        back = [order.index(i) for i in range(t.dim())]
        return wide[..., : moved.shape[-1]].permute(back)

    pages = (2, 0, 1, 3)
    changed = {
        name: spread(getattr(inputs, name), pages) for name in ("k", "k_scale", "v", "v_scale")
    }
    changed |= {name: spread(getattr(inputs, name), (1, 0, 2)) for name in ("q", "q_scale")}
    out = torch.full((case.heads, 39, 2 * head_dim), torch.nan).transpose(0, 1)[..., :head_dim]
    lse = torch.full((case.heads, 39), torch.nan).t()
    launch(inputs, modules[head_dim], simulator, **changed, out=out, lse=lse)
    assert torch.equal(out, plain.out)
    assert torch.equal(lse, plain.lse)


@pytest.mark.parametrize("bad", [-1, -(2**31), 10**6, 2**31 - 1])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_page_id_reads_outside(head_dim, bad, modules, simulator) -> None:
    """plan() refuses such ids; a kernel that meets one reads zeros and scales of 1 instead."""
    case = Case(head_dim, (9,), (300,), 2, 1, 32, seed=10)
    inputs = built(case)
    kv_indices = inputs.plan.kv_indices
    saved = kv_indices.clone()
    kv_indices[3] = bad
    try:
        got = launch(inputs, modules[head_dim], simulator)
    finally:
        kv_indices.copy_(saved)
    assert not got.out.isnan().any()


def give_away(inputs: Inputs) -> int:
    """NaN in all bytes of tokens that no query of their request sees any more; how many."""
    case, e = inputs.case, 0
    for b, (lq, lk) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        left = max(lk - lq - case.window_left, 0)
        e += left
        start = int(inputs.plan.kv_indptr[b])
        row = sum(case.kv_lens[:b])
        block = sum(-(-x // 32) for x in case.kv_lens[:b])
        if case.page_size is None:
            for t in (inputs.k, inputs.k_scale, inputs.v):
                t[row : row + left] = 0xFF
            inputs.v_scale[block : block + left // 32] = 0xFF
            continue
        for i, page in enumerate(inputs.plan.kv_indices[start:].tolist()):
            n = min(max(left - i * case.page_size, 0), case.page_size)
            for t in (inputs.k, inputs.k_scale, inputs.v):
                t[page, :, :n] = 0xFF
            inputs.v_scale[page, :, : n // 32] = 0xFF
            if n < case.page_size:
                break
    return e


@pytest.mark.parametrize("partition", [0, 128])
@pytest.mark.parametrize("page_size", [32, 64, 128, None])
@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_garbage_that_the_window_left(
    head_dim, mode, page_size, partition, modules, simulator
) -> None:
    """Tokens that a sliding window has left may hold anything, also in a block that it still sees."""
    q_lens = (1, 1, 1) if mode == "decode" else (5, 140, 3)
    case = Case(
        head_dim, q_lens, (400, 311, 60), 1, 2, page_size, causal=True, window_left=77, mode=mode,
        partition=partition, seed=13,
    )  # fmt: skip
    inputs = build(case)
    assert give_away(inputs) > 300
    assert_as_replayed(inputs, launch(inputs, modules[head_dim], simulator))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [2**31 - 2, 2**31 - 1])
def test_a_window_larger_than_everything(window_left, causal, modules, simulator) -> None:
    """Also for query tokens in front of the first key, whose positions are negative."""
    case = Case(64, (70, 3, 9), (9, 0, 140), 1, 2, causal=causal, window_left=window_left, seed=6)
    inputs = built(case)
    got = launch(inputs, modules[64], simulator)
    assert_as_replayed(inputs, got)
    plain = launch(built(replace(case, window_left=-1)), modules[64], simulator)
    assert torch.equal(got.out, plain.out)
    assert torch.equal(got.lse, plain.lse)


@pytest.mark.parametrize("soft_cap", [30.0, 300.0, 1e4, 1e6])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_large_soft_caps(head_dim, soft_cap, modules, simulator) -> None:
    """A cap far above the scores changes them little, whatever tanh's last bits are."""
    case = Case(head_dim, (33,), (300,), 1, 2, soft_cap=soft_cap, data="biased", seed=14)
    inputs = built(case)
    got = launch(inputs, modules[head_dim], simulator)
    assert_as_replayed(inputs, got)
    torch.testing.assert_close(got.lse, replay(inputs).lse, rtol=2e-6, atol=2e-6)


def test_a_nan_sink_reaches_the_output(modules, simulator) -> None:
    """Its own head only, and also where a row sees no key."""
    case = Case(64, (30,), (12,), 1, 3, causal=True, sinks=True, seed=15)
    inputs = built(case)
    want = launch(inputs, modules[64], simulator)
    sinks = inputs.sinks.clone()
    sinks[1] = torch.nan
    got = launch(inputs, modules[64], simulator, sinks=sinks)
    assert got.out[:, 1].isnan().all()
    assert got.lse[:, 1].isnan().all()
    assert torch.equal(got.out[:, ::2], want.out[:, ::2])
    assert torch.equal(got.lse[:, ::2], want.lse[:, ::2])


def test_no_sink_is_minus_infinity(modules, simulator) -> None:
    """Sinks of -inf change nothing, also for rows that see no key."""
    case = Case(128, (30,), (12,), 1, 2, causal=True, sinks=True, seed=12)
    inputs = built(case)
    inputs.sinks.fill_(-torch.inf)
    got = launch(inputs, modules[128], simulator)
    plain = launch(inputs, modules[128], simulator, sinks=None)
    assert torch.equal(got.lse == -torch.inf, plain.lse == -torch.inf)
    torch.testing.assert_close(got.out, plain.out, rtol=1e-6, atol=0)
    assert (got.out[:18] == 0).all()


FIXED = """
#include "mpfa/sm120/kernel.cuh"
template __global__ void mpfa::sm120::sm120_prefill<mpfa::sm120::Config<HEAD_DIM>>(
    const __grid_constant__ mpfa::sm120::Params);
"""


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_fixed_scale_option(head_dim, modules, simulator, tmp_path) -> None:
    """-DMPFA_SM120_FIXED_P_SCALE against the replay's fixed256."""
    found = toolkit.find_toolkit()
    source, ptx = tmp_path / "fixed.cu", tmp_path / "fixed.ptx"
    source.write_text(FIXED.replace("HEAD_DIM", str(head_dim)))
    subprocess.run(
        [str(found.home / "bin" / "nvcc"), "-std=c++17", "-ptx", "-arch=compute_120f",
         "-DMPFA_SM120_FIXED_P_SCALE", f"-I{paths.source_root() / 'include'}", "-o", str(ptx),
         str(source)],
        check=True,
    )  # fmt: skip
    case = Case(head_dim, (50,), (1000,), 1, 2, causal=True, data="sink", seed=4)
    inputs = built(case)
    shipped = launch(inputs, modules[head_dim], simulator)
    with simulator.options(ptx=ptx):
        got = launch(inputs, modules[head_dim], simulator)
    want = replay(inputs, Scheme(scheme_for("mxfp8", head_dim).kv_block, "fixed256"))
    assert worst_rel_l2(case, got.out, want.out) <= 2e-3
    assert not torch.equal(got.out, shipped.out)


def test_covering_array_covers() -> None:
    factors = {"a": (1, 2, 3), "b": ("x", "y"), "c": (None, 0, 1, 2)}

    def allowed(row):
        return (row.get("a"), row.get("c")) != (1, 0)

    rows = cover(factors, allowed)
    assert all(allowed(row) for row in rows)
    for f, g in (("a", "b"), ("a", "c"), ("b", "c")):
        found = {(row[f], row[g]) for row in rows}
        wanted = {(x, y) for x in factors[f] for y in factors[g]} - (
            {(1, 0)} if (f, g) == ("a", "c") else set()
        )
        assert found == wanted
    assert len(rows) < 24


def test_list_of_cases(record_property) -> None:
    cases = all_cases()
    assert len({c.name for c in cases}) == len(cases)
    print(f"sm120: {len(fast_cases())} of {len(cases)} cases in make test")
    assert len(fast_cases()) >= 30
