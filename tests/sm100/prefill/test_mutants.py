# SPDX-License-Identifier: Apache-2.0
"""Every synchronising instruction of the shipped PTX left out or weakened, one at a time: a case
fails, or mutants.known says which other edge makes the change harmless."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import attention_cases as cases
import prefill_cases as pc
import pytest
from prefill_cases import Case

from mpfa import sim
from mpfa.sim import mutants

KNOWN = Path(__file__).with_name("mutants.known")
# Together they pass every branch: tensor copies and row copies, both query stages and one, several
# tiles per worker, more blocks than ring slots, split and empty tiles, compensation.
CASES = (
    Case("paged", (300, 140, 3), (700, 140, 300), causal=True, compensation="mean", num_sm=1),
    Case("rows", (140, 60), (1300, 30), page_size=1, num_sm=1, compensation="channels"),
    Case("ragged", (40, 170), (0, 300), (2, 1), page_size=0, partition=128, num_sm=1),
)
SCHEDULES = ({"mode": "lazy", "seed": 3}, {"mode": "random", "seed": 5})
# Q that takes the place of a unit still queued: by head dimension, orders in which that happens.
QUEUED = pc.ONE_BLOCK_TILES[:2]
QUEUED_SEEDS = {128: (10, 18, 31), 64: (10, 11)}


def ptx_of(library: Path, target: str) -> str:
    texts = [t for _, t in sim.extract_ptx(library) if "sm100_prefill" in t]
    (text,) = [t for t in texts if f".target {target}" in t]
    return text


def launch_all(module, inputs, simulator, ptx: Path | None = None) -> list:
    """(out, lse) of every case under every schedule; raises when a launch fails."""
    results = []
    for o in inputs:
        queued = [{"mode": "random", "seed": s} for s in QUEUED_SEEDS[o.case.head_dim]]
        names = [c.name for c in QUEUED]
        for schedule in queued if o.case.name in names else SCHEDULES:
            extra = {} if ptx is None else {"ptx": ptx}
            with simulator.options(timeout=60, **schedule, **extra):
                simulator.clear()
                results.append(pc.launch(module, o))
                simulator.check()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [128, 64])
def test_every_mutant_is_caught_or_explained(
    head_dim, libraries, modules, simulator, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("PTXSIM_RACE", "strict")
    simulator.set(watch="all")  # reads the variable
    module = modules[head_dim]
    inputs = [pc.operands(replace(case, head_dim=head_dim)) for case in (*CASES, *QUEUED)]
    want = launch_all(module, inputs, simulator)

    def check(path: Path) -> tuple[bool, str]:
        try:
            got = launch_all(module, inputs, simulator, path)
            for pair in zip(got, want, strict=True):
                for a, b in zip(*pair, strict=True):
                    cases.assert_same_bits(a, b)
        except (sim.SimulationError, RuntimeError, AssertionError, ValueError) as error:
            return False, str(error).splitlines()[0]
        return True, ""

    listed = mutants.read_harmless(Path(f"{KNOWN}{head_dim}"))
    results = mutants.run(
        ptx_of(libraries[head_dim], "sm_100a"), check, known={x.key: x.reason for x in listed}
    )
    with capsys.disabled():
        print(f"\nsm100 prefill d{head_dim}\n{mutants.table(results)}")
    assert not mutants.stale(listed, results)
    assert not [r for r in results if r.verdict in ("survived", "not executed")]
