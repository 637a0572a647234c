# SPDX-License-Identifier: Apache-2.0
"""The comparison that make test-gpu runs, fed with results that a GPU could have given."""

from __future__ import annotations

from typing import Any

import gpu_twins
import instr_cases
import pytest
import random_programs

from mpfa.sim import Simulator

SEEDS = [3, 4]


@pytest.fixture
def native(sim: Simulator, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Outputs of two exact cases, one approximate case and two programs."""
    cases = list(instr_cases.all_cases())
    some = [c for c in cases if not c.ulps][:2] + [c for c in cases if c.ulps][:1]
    monkeypatch.setattr(instr_cases, "all_cases", lambda: some)
    programs = {seed: random_programs.program(seed) for seed in SEEDS}
    out = {
        "gpu": "none",
        "driver": "0",
        "cases": {c.name: gpu_twins.simulate_case(c) for c in some},
        "programs": {seed: gpu_twins.simulate_program(made) for seed, made in programs.items()},
    }
    monkeypatch.setattr(gpu_twins, "results_of_the_gpu", lambda fresh: out)
    return out


def flip(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 0x40
    return bytes(changed)


def test_equal_results(native: dict[str, Any]) -> None:
    outcome = gpu_twins.compare(0)
    # An approximate result of the simulator is not the golden one bit for bit.
    assert all("golden/h200.json" in text for text in outcome.differences)
    assert (outcome.instructions, outcome.programs, outcome.golden_compared) == (3, 2, 5)


def test_one_bit_is_found(native: dict[str, Any]) -> None:
    exact, _, approximate = native["cases"]
    native["cases"][exact] = flip(native["cases"][exact], 1000)
    native["cases"][approximate] = flip(native["cases"][approximate], 3)
    made = random_programs.program(SEEDS[0])
    at = 5 * made.row + made.places[40][0]  # lane 5
    native["programs"][SEEDS[0]] = flip(native["programs"][SEEDS[0]], at)
    text = "\n".join(gpu_twins.compare(0).differences)
    assert f"{exact}: simulator and GPU differ" in text
    assert f"{exact}: the GPU contradicts golden/h200.json" in text
    assert f"{approximate}: thread 0: GPU" in text
    assert f"random program {SEEDS[0]}: " in text
    assert f"random program {SEEDS[0]}, GPU and golden file" in text


def test_a_gpu_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="GPU side failed|capability"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        gpu_twins.results_of_the_gpu(0)
