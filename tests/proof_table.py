# SPDX-License-Identifier: Apache-2.0
"""The table at the end of a test run: what the simulator's proofs gave, program by program.

A test adds rows by record_property(PROOF, row(...)), which works across processes; whole files that
prove one thing get a row with the number of their tests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpfa.sim.mutants import Result

PROOF = "ptxsim proof"
PROOFS = {
    1: "kernels that others wrote",
    2: "one-instruction programs against an H200, bit for bit",
    3: "descriptor, swizzle, scale and fragment maps against CuTe",
    4: "mutants, and faults of the simulator itself",
    5: "random programs against an H200, bit for bit",
}
# Test files whose tests are the rows' programs.
FILES = {
    "tests/ptxsim/test_instructions.py": (2, "single instructions"),
    "tests/ptxsim/sem/test_sem.py::test_against_h200_goldens": (2, "semantic functions"),
    "tests/ptxsim/sem/test_sem.py::test_against_own_model": (3, "the manual, by value"),
    "tests/ptxsim/sem/test_sem.py::test_fragments_against_cute": (3, "registers, TMEM"),
    "tests/ptxsim/sem/test_sem.py::test_descriptors_against_cute": (3, "shared memory, scales"),
}


def row(
    proof: int, program: str, ok: bool, result: str, instructions: int | None, seconds: float
) -> dict[str, Any]:
    """One line of the table; instructions are warp instructions, None where nothing counts them."""
    return {
        "proof": proof,
        "program": program,
        "ok": ok,
        "result": result,
        "instructions": instructions,
        "seconds": seconds,
    }


def mutant_row(program: str, results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """The line of one mutation test."""
    from mpfa.sim.mutants import VERDICTS

    count = {verdict: sum(r.verdict == verdict for r in results) for verdict in VERDICTS}
    parts = [f"{n} {verdict}" for verdict, n in count.items() if n or verdict == "caught"]
    text = f"{', '.join(parts)} of {len(results)}"
    return row(4, f"mutants of {program}", count["survived"] == 0, text, None, seconds)


def collect(reports: Sequence[Any]) -> list[dict[str, Any]]:
    """The rows of a finished run from its test reports."""
    rows = [value for r in reports for key, value in r.user_properties if key == PROOF]
    for prefix, (proof, program) in FILES.items():
        mine = [r for r in reports if r.nodeid.startswith(prefix)]
        if not mine:
            continue
        passed = sum(r.outcome == "passed" for r in mine)
        seconds = sum(r.duration for r in mine)
        text = f"{passed} of {len(mine)} tests"
        rows.append(row(proof, program, passed == len(mine), text, None, seconds))
    return sorted(rows, key=lambda x: (x["proof"], natural(x["program"])))


def natural(text: str) -> list[tuple[int, str]]:
    """A sort key that takes digits as numbers."""
    return [(int(x), "") if x.isdigit() else (-1, x) for x in re.split(r"(\d+)", text) if x]


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table as text."""
    out: list[str] = []
    for proof, title in PROOFS.items():
        mine = [x for x in rows if x["proof"] == proof]
        if not mine:
            continue
        right = sum(x["ok"] for x in mine)
        out += [f"proof {proof}: {title} ({right} of {len(mine)} rows right)"]
        out += [f"  {'warp-instr':>13} {'seconds':>8}  program"]
        for x in mine:
            number = "-" if x["instructions"] is None else f"{x['instructions']:,}"
            verdict = "" if x["ok"] else "WRONG: "
            out.append(
                f"  {number:>13} {x['seconds']:>8.2f}  {x['program']}: {verdict}{x['result']}"
            )
    return out


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Hook of tests/conftest.py."""
    found = [
        r
        for kind in ("passed", "failed")
        for r in terminalreporter.stats.get(kind, [])
        if getattr(r, "when", "") == "call"
    ]
    text = lines(collect(found))
    if text:
        terminalreporter.section(f"simulator proofs ({Path(__file__).name})")
        for line in text:
            terminalreporter.write_line(line)
