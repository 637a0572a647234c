# SPDX-License-Identifier: Apache-2.0
"""The table of proofs: rows from properties, rows from files, wrong ones visible."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from proof_table import PROOF, PROOFS, collect, lines, mutant_row, row

from mpfa.sim import mutants


@dataclass
class Report:
    nodeid: str
    outcome: str = "passed"
    duration: float = 0.5
    user_properties: list[tuple[str, Any]] = field(default_factory=list)


def test_rows_and_order() -> None:
    found = collect(
        [
            Report("tests/a.py::b", user_properties=[(PROOF, row(5, "p 10", True, "ok", 7, 1.0))]),
            Report("tests/a.py::c", user_properties=[(PROOF, row(5, "p 9", False, "no", None, 1))]),
            Report("tests/a.py::d", user_properties=[("another", 1)]),
            Report("tests/ptxsim/test_instructions.py::x[1]"),
            Report("tests/ptxsim/test_instructions.py::x[2]", outcome="failed"),
        ]
    )
    assert lines(found) == [
        f"proof 2: {PROOFS[2]} (0 of 1 rows right)",
        "     warp-instr  seconds  program",
        "              -     1.00  single instructions: WRONG: 1 of 2 tests",
        f"proof 5: {PROOFS[5]} (1 of 2 rows right)",
        "     warp-instr  seconds  program",
        "              -     1.00  p 9: WRONG: no",
        "              7     1.00  p 10: ok",
    ]


def test_nothing_ran() -> None:
    assert lines(collect([])) == []


def test_mutants() -> None:
    ptx = "bar.sync 0;\nbar.sync 1;\nfence.sc.cta;\n"
    results = mutants.run(ptx, lambda path: ("bar.sync 0" in path.read_text(), ""), coverage=False)
    found = mutant_row("k", results, 2.0)
    assert found["result"] == "1 caught, 2 survived of 3"
    assert not found["ok"]
