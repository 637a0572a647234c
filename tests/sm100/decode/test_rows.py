# SPDX-License-Identifier: Apache-2.0
"""The paper's replicated-row decode kernel against its own replay: the same cases and plans, but for
tiles of 32 rows."""

from __future__ import annotations

import decode_cases
import pytest
import torch
from decode_cases import Case
from decode_list import rows_cases
from rows_replay import TILE_ROWS, build, replay_rows

CASES = rows_cases()


def run(case: Case, modules, tile_rows: int = TILE_ROWS):
    inputs = build(case, tile_rows)
    return inputs, decode_cases.run(modules["rows"], modules["combine"], inputs)


def check(case: Case, modules, simulator) -> None:
    inputs, got = run(case, modules)
    simulator.check()
    _, plan = inputs.plan()
    items = plan.items[plan.items[:, 0] >= 0]
    blocks = int(((items[:, 5] - items[:, 4] + 127) // 128).sum()) * case.num_kv_heads
    launch = simulator.launches()[0]
    assert "sm100_decode_rows" in launch["kernel"]
    assert launch["tcgen05_mma"] == blocks * (2 + 4 + (1 if case.channels else 0))
    assert decode_cases.faults(got, replay_rows(inputs)) == []


@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case.name)
def test_matrix(case, modules, simulator):
    check(case, modules, simulator)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[1::2], ids=lambda case: case.name)
def test_large_matrix(case, modules, simulator):
    check(case, modules, simulator)


@pytest.mark.parametrize("tile_rows", [4, 32])
def test_paper_tiles(tile_rows, modules, simulator):
    """Four rows, each replicated 32 times, and 32 rows without replicas in a warp."""
    case = Case((1, 300, 1030), 8, 128, 64, "mean+channels", 15, k_bias=3.0, sinks=True)
    inputs, got = run(case, modules, tile_rows)
    assert decode_cases.faults(got, replay_rows(inputs)) == []


@pytest.mark.parametrize("soft_cap", [30.0, 300.0, 1e4, 1e6])
def test_large_soft_caps(soft_cap, modules, simulator):
    case = Case(
        (257, 90), 4, 128, 64, "mean", q_len=2, soft_cap=soft_cap, scale=2.0, k_bias=2.0, seed=21
    )  # fmt: skip
    inputs, got = run(case, modules)
    assert decode_cases.faults(got, replay_rows(inputs), lse_tolerance=1e-6) == []


def test_against_the_swapped_kernel(modules, simulator):
    """Equal up to the rounding of P against other running maxima."""
    case = Case((1, 300, 1030), 4, 128, 128, "mean", 0, 2, k_bias=3.0)
    inputs, (out, lse) = run(case, modules)
    other, other_lse = decode_cases.run(modules["128"], modules["combine"], inputs)
    torch.testing.assert_close(lse, other_lse, rtol=0, atol=1e-4)
    assert decode_cases.attention_cases.rel_l2(out, other) < 4e-2
