# SPDX-License-Identifier: Apache-2.0
"""Mutants of CUTLASS 72b, a kernel that nobody here wrote: each one is caught or known as harmless.

The program runs with the PTX of each mutant in place of its own (PTXSIM_PTX), all watchers on. The
mutants that are accepted are in race/cutlass_72b.known, each with the edge that makes it harmless.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cutlass_build
import pytest
from proof_table import PROOF, mutant_row
from race_programs import RACE
from test_cutlass import Run, execute, gemm

from mpfa.jit.toolkit import find_toolkit
from mpfa.sim import extract_ptx, mutants

OPTIONS = ("watch=all", "race=strict-init,war-fence", "seed=1", "threads=1", "timeout=60")
# The list of harmless mutants counts the instructions of one PTX: (nvcc, nvidia-cutlass).
LISTED_FOR = ("13.0.88", "4.2.0.0")
# Several tiles of the output and of C; then more tiles of K than the main loop has stages; then the
# schedule in which a wait with the wrong parity comes too late and hangs.
RUNS = (
    gemm(384, 384, 1024, *OPTIONS, "mode=random", scale="--alpha=0.5 --beta=2"),
    gemm(128, 128, 2304, *OPTIONS, "mode=lazy"),
    gemm(384, 384, 1024, *OPTIONS, "mode=eager", scale="--alpha=0.5 --beta=2"),
)
# These look whether C has arrived; if not, a blocking wait follows. In the simulator they always
# succeed, so the mutants of the blocking waits run in a module whose peeks always fail.
PEEKS = (86, 95)


def run_with(program: Path, ptx: Path) -> tuple[bool, str]:
    """The program's own verdict, and the simulator's, on runs with another PTX."""
    for run in RUNS:
        outcome = execute(program, Run(run.arguments, (*run.options, f"ptx={ptx}")))
        if not outcome.passed:
            lines = outcome.tail.splitlines()
            named = [x for x in lines if "ptxsim: error" in x or "Failed" in x]
            return False, (named or ["no verdict"])[0]
    return True, ""


def without_peeks(key: str) -> str:
    """The key of a mutant in a module without PEEKS, which are counted no longer."""
    kind, number = key.split()
    return f"{kind} {int(number) - sum(peek < int(number) for peek in PEEKS)}"


@pytest.mark.slow
def test_every_effective_mutant_of_72b_is_caught(
    record_property: Callable[[str, object], None],
) -> None:
    try:
        program = cutlass_build.build("72b")
    except cutlass_build.Unavailable as reason:
        pytest.skip(str(reason))
    built_with = (find_toolkit().version, cutlass_build.cutlass_root()[1])
    if built_with != LISTED_FOR:
        pytest.skip(f"race/cutlass_72b.known is for {LISTED_FOR}, this is {built_with}")
    begin = time.perf_counter()
    ((_, ptx),) = extract_ptx(program)
    listed = mutants.read_harmless(RACE / "cutlass_72b.known")
    known = {x.key: x.reason for x in listed}

    def check(path: Path) -> tuple[bool, str]:
        return run_with(program, path)

    results = mutants.run(ptx, check, known=known, jobs=2)
    missed = {without_peeks(r.mutant.key): r for r in results if r.verdict == "not executed"}
    blind = mutants.failing_peeks(ptx, PEEKS)
    for r in mutants.run(blind, check, keys=missed, jobs=2):
        old = missed[r.mutant.key]
        results[results.index(old)] = replace(r, mutant=old.mutant)
    record_property(PROOF, mutant_row("CUTLASS 72b", results, time.perf_counter() - begin))
    survived = [r for r in results if r.verdict in ("survived", "not executed")]
    assert not survived, mutants.table(results)
    assert mutants.stale(listed, results) == []
