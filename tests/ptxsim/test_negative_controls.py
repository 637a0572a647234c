# SPDX-License-Identifier: Apache-2.0
"""The simulator made wrong on purpose (PTXSIM_FAULT): some proof program must notice, for each fault.

A fault that no program notices would mean that the programs prove nothing about that part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cutlass_build
import pytest
from proof_table import PROOF, row
from race_programs import MODULES, gemm, ring, sm100_gemm, sm120_gemm
from test_cutlass import Run, execute
from test_cutlass import gemm as cutlass_gemm

from mpfa.sim import SimulationError, Simulator

Program = Callable[[str], bool]
Record = Callable[[str, object], None]
# Exactly these programs of MODULES go wrong with the fault.
NOTICED: dict[str, set[Program]] = {
    "umma-scale-rows": {sm100_gemm},
    "mma-scale-rows": {sm120_gemm},
    "byte-id": {sm120_gemm},
    "thread-id": {sm120_gemm},
    "tma-swizzle": {sm100_gemm, sm120_gemm},
    "operand-swizzle": {sm100_gemm},
    "accumulate": {gemm, sm100_gemm},
    "tmem-quadrant": {gemm, sm100_gemm},
    "tx-count": {ring, gemm, sm100_gemm, sm120_gemm},
    "parity": {ring, gemm, sm100_gemm, sm120_gemm},
    "ldmatrix-trans": {sm120_gemm},
    "oob-fill": {sm100_gemm, sm120_gemm},
}
# Faults that only some schedules show.
LATE = ("tx-count", "parity")
# The same for programs that nobody here wrote. 79a, 79b and 79c use no selector but 0 and no transposing
# ldmatrix, so they say nothing about these.
CUTLASS: dict[str, list[str]] = {
    "umma-scale-rows": ["72b", "72c"],
    "mma-scale-rows": ["79b", "79c"],
    "tma-swizzle": ["48", "70", "72b", "79c"],
    "operand-swizzle": ["48", "70", "72b"],
    "accumulate": ["70", "72b"],
    "tmem-quadrant": ["70", "72b"],
    "tx-count": ["48", "72b", "79c"],
    "parity": ["48", "72b", "79c"],
    "oob-fill": ["72b", "79b"],
}
SMALL = {
    "48": cutlass_gemm(256, 256, 128),
    "70": cutlass_gemm(256, 128, 128),
    "72b": cutlass_gemm(128, 128, 384),  # one and a half tiles of K
    "72c": cutlass_gemm(128, 128, 512),
    "79b": cutlass_gemm(200, 192, 288),
    "79c": cutlass_gemm(128, 128, 512),
}


@pytest.fixture
def injected(sim: Simulator) -> Iterator[Simulator]:
    """The simulator, asynchronous operations as late as allowed; without a fault afterwards."""
    sim.set(timeout=20, mode="lazy")
    yield sim
    sim.set(fault="none")


def wrong(sim: Simulator, seeds: int) -> set[Program]:
    """The programs that give a wrong result, or do not end properly, with one of the first seeds."""

    def right(program: Program, text: str, seed: int) -> bool:
        sim.set(seed=seed)
        sim.clear()  # the number of the launch is part of the seed
        try:
            return program(text)
        except SimulationError:
            return False

    return {
        program
        for module in MODULES
        for program in module.programs
        if not all(right(program, module.ptx, seed) for seed in range(1, seeds + 1))
    }


def test_without_a_fault_every_program_is_right(injected: Simulator) -> None:
    assert wrong(injected, 2) == set()


@pytest.mark.parametrize("fault", NOTICED)
def test_a_fault_is_noticed(injected: Simulator, fault: str, record_property: Record) -> None:
    begin = time.perf_counter()
    injected.set(fault=fault)
    found = wrong(injected, 8 if fault in LATE else 1)
    seconds = time.perf_counter() - begin
    text = "noticed by " + (", ".join(sorted(f.__name__ for f in found)) or "nothing")
    record_property(PROOF, row(4, f"fault {fault}", bool(found), text, None, seconds))
    assert found == NOTICED[fault]


def test_every_fault_of_the_simulator_has_a_control(injected: Simulator) -> None:
    with pytest.raises(ValueError, match="PTXSIM_FAULT='nonsense': allowed is none ") as error:
        injected.set(fault="nonsense")
    names = str(error.value).split("allowed is ")[1].split()
    assert set(names) == {"none", *NOTICED}


def test_an_injected_fault_is_announced(injected: Simulator, capfd) -> None:
    injected.set(fault="thread-id")
    assert "ptxsim: fault thread-id is injected, results are wrong" in capfd.readouterr().err


def small(program: Path, name: str, *options: str) -> bool:
    run = SMALL[name]
    return execute(program, Run(run.arguments, ("timeout=60", "mode=lazy", *options))).passed


@pytest.mark.slow
@pytest.mark.parametrize("fault", CUTLASS)
def test_cutlass_notices(fault: str, record_property: Record) -> None:
    begin = time.perf_counter()
    deaf = []
    for name in CUTLASS[fault]:
        try:
            program = cutlass_build.build(name)
        except cutlass_build.Unavailable as reason:
            pytest.skip(str(reason))
        assert small(program, name), f"{name} fails without a fault"
        if small(program, name, f"fault={fault}"):
            deaf.append(name)
    seconds = time.perf_counter() - begin
    text = f"noticed by CUTLASS {', '.join(x for x in CUTLASS[fault] if x not in deaf)}"
    record_property(PROOF, row(4, f"fault {fault}", not deaf, text, None, seconds))
    assert not deaf, f"not noticed by {deaf}"
