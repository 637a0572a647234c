# SPDX-License-Identifier: Apache-2.0
"""The paper's figures beside rows measured on a B200, and beside nothing else.

paper.json names figure or section of each number and how it follows from decode and prefill rows. A
figure counts as reproduced here only if a B200 measured every row that it needs, with one driver, at one
commit and on one day; of several such sets the newest counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import geometric_mean
from benchmarks.rows import Row, by_origin, slug

FILE = Path(__file__).with_name("paper.json")
GPU = "b200"  # slug: a slice of one ("NVIDIA B200 MIG 1g.23gb") is another GPU
# Names that stand for the fastest of several implementations at each length.
BEST = {
    "fa4 bf16 best split": lambda impl: impl.startswith("fa4 bf16"),
    "flashinfer fp8 best": lambda impl: impl.startswith("flashinfer") and " fp8" in impl
    and "nvfp4" not in impl,
}  # fmt: skip


def figures() -> list[dict]:
    return json.loads(FILE.read_text(encoding="utf-8"))["figures"]


def case_of(bench: str, heads: int, length: int, page: int = 128) -> str:
    """The case name that decode.py (batch 1) or prefill.py gives."""
    if bench == "prefill":
        return f"prefill {length >> 10}K causal, GQA {heads}:8"
    return f"decode 1 x {length >> 10}K, GQA {heads}:8, page {page}"


def _value(rows: Sequence[Row], bench: str, case: str, impl: str, metric: str) -> float | None:
    wanted = BEST.get(impl, lambda name: name == impl)
    found = [
        float(str(r["value"])) for r in rows
        if r["bench"] == bench and r["case"] == case and r["metric"] == metric
        and wanted(str(r["impl"]))
    ]  # fmt: skip
    return min(found) if found else None


def measured(figure: dict, rows: Sequence[Row]) -> float | list[float] | None:
    """The figure from B200 rows; None unless all that it needs are there."""
    rows = [r for r in rows if r["kind"] == "measured" and slug(str(r["gpu"])) == GPU]
    if figure["measure"] is None:
        return None
    groups = sorted(by_origin(rows), key=lambda group: str(group[0]["date"]), reverse=True)
    return next((v for v in (_from_one_run(figure, g) for g in groups) if v is not None), None)


def _from_one_run(figure: dict, rows: Sequence[Row]) -> float | list[float] | None:
    how = figure["measure"]
    bench = how["bench"]
    cases = [case_of(bench, how["heads"], n) for n in how["lengths"]]
    if "over" not in how:
        values = [_value(rows, bench, c, how["impl"], how["metric"]) for c in cases]
        return None if None in values else [min(values), max(values)]
    pairs = [
        (_value(rows, bench, c, how["over"], "time"), _value(rows, bench, c, how["impl"], "time"))
        for c in cases
    ]
    if any(None in pair for pair in pairs):
        return None
    return geometric_mean(theirs / own for theirs, own in pairs)


def shown(value: float | list[float]) -> str:
    values = value if isinstance(value, list) else [value]
    return "-".join(f"{v:.4g}" for v in values)


def beside(rows: Sequence[Row]) -> list[tuple[str, str, str, str, str]]:
    """(what, paper's value, measured, unit, where); empty without B200 rows."""
    lines = []
    for figure in figures():
        got = measured(figure, rows)
        if got is not None:
            cells = (figure["what"], shown(figure["value"]), shown(got))
            lines.append((*cells, figure["unit"], figure["where"]))
    return lines
