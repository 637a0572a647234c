# SPDX-License-Identifier: Apache-2.0
"""What make test-gpu says at the end: how many cases of each kernel ran on this GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MATRIX = "gpu matrix"
SANITIZER = "gpu sanitizer"


def entry(kernel: str, total: int, reply: dict[str, Any], seconds: float = 0.0) -> dict[str, Any]:
    """A property of one test: ``reply`` is the worker's answer, or {"skipped": reason}."""
    ran = "faults" in reply
    return {
        "kernel": kernel,
        "total": total,
        "ran": ran,
        "right": ran and not reply["faults"],
        "lost": bool(reply.get("lost")),
        "repeats": reply.get("repeats", 0),
        "replays": reply.get("replays", 0),
        "why": reply.get("skipped") or reply.get("error") or "",
        "seconds": reply.get("seconds", seconds),
    }


def entries(reports: Sequence[Any], key: str = MATRIX) -> list[dict[str, Any]]:
    return [value for r in reports for k, value in r.user_properties if k == key]


def span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def lines(found: Sequence[dict[str, Any]], gpu: str) -> list[str]:
    """One line per kernel, in the order of the tests."""
    out = []
    for kernel in dict.fromkeys(x["kernel"] for x in found):
        mine = [x for x in found if x["kernel"] == kernel]
        ran = [x for x in mine if x["ran"]]
        text = f"{kernel}: {len(ran)} of {mine[0]['total']} cases ran on {gpu}"
        if ran:
            text += f", {sum(x['right'] for x in ran)} right"
            if repeats := [x["repeats"] for x in ran if x["repeats"]]:
                replays = [x["replays"] for x in ran]
                text += f"; {span(repeats)} runs of each, {span(replays)} of them graph replays"
            text += f"; {sum(x['seconds'] for x in ran):.0f} s"
        if lost := sum(x["lost"] for x in mine):
            text += f"; {lost} ended their process"
        reasons = dict.fromkeys(x["why"].split("\n", 1)[0] for x in mine if not x["ran"])
        if reasons:
            shown = "; ".join(list(reasons)[:3])
            text += f"; not run ({len(mine) - len(ran)}): {shown}"[:400]
        out.append(text)
    return out


def sanitizer_lines(found: Sequence[dict[str, Any]]) -> list[str]:
    return [f"compute-sanitizer {x['tool']}, {x['kernel']}: {x['text']}" for x in found]


def write(path: Path, gpu: str, found: Sequence[Any], sanitized: Sequence[Any]) -> None:
    """The whole result as JSON, to be kept or sent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"gpu": gpu, "cases": list(found), "sanitizer": list(sanitized)}
    path.write_text(json.dumps(data, indent=1) + "\n")
