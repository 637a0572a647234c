# SPDX-License-Identifier: Apache-2.0
"""Which tasks of lm-evaluation-harness stand for the paper's Table 2, with which shots and metric."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TaskSpec:
    """One line of the table.

    Attributes:
        name: on the command line and in the results.
        members: task or group names of lm-evaluation-harness whose examples are pooled.
        shots: few-shot examples; None leaves what the task file says.
        metric, filter: which number of an example counts; None takes the task's first.
        source: where shots and metric come from.
    """

    name: str
    members: tuple[str, ...]
    shots: int | None = None
    metric: str | None = None
    filter: str | None = None
    source: str = "task file"


# Shots: paper section 7.1. It does not name the metrics, nor RULER-QA's shots.
PAPER_TASKS = (
    TaskSpec("mmlu", ("mmlu",), 5, "acc", "none", "shots: paper; metric: customary"),
    TaskSpec(
        "hellaswag", ("hellaswag",), 20, "acc_norm", "none", "shots: paper; metric: customary"
    ),
    TaskSpec("winogrande", ("winogrande",), 0, "acc", "none", "shots: paper; metric: customary"),
    TaskSpec(
        "gsm8k", ("gsm8k",), 5, "exact_match", "strict-match", "shots: paper; metric: customary"
    ),
    TaskSpec(
        "ruler_qa",
        ("ruler_qa_squad", "ruler_qa_hotpot"),
        0,
        filter="none",
        source="length: paper; shots and metric: customary",
    ),
)
# Lengths that RULER's task files have a metric for.
RULER_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)


def select_tasks(names: str, shots: str | None, ruler_length: int) -> list[TaskSpec]:
    """The tasks of a comma-separated list, in its order.

    Raises:
        ValueError: an empty list, a name given twice, shots that are not TASK=N, or a RULER length
            that has no metric.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted or len(set(wanted)) != len(wanted):
        raise ValueError(f"tasks: expected different names separated by commas, got {names!r}")
    if "ruler_qa" in wanted and ruler_length not in RULER_LENGTHS:
        allowed = ", ".join(str(n) for n in RULER_LENGTHS)
        raise ValueError(f"ruler_length: must be one of {allowed}, got {ruler_length}")
    other_shots = _parse_shots(shots, wanted)
    known = {spec.name: spec for spec in PAPER_TASKS}
    specs = []
    for name in wanted:
        spec = known.get(name, TaskSpec(name, (name,)))
        if name == "ruler_qa":
            spec = replace(spec, metric=str(ruler_length))
        if name in other_shots:
            spec = replace(spec, shots=other_shots[name], source="shots: command line")
        specs.append(spec)
    return specs


def _parse_shots(text: str | None, wanted: list[str]) -> dict[str, int]:
    found = {}
    for part in text.split(",") if text else ():
        name, _, count = part.strip().partition("=")
        if name not in wanted or not count.isdecimal():
            raise ValueError(f"shots: expected TASK=N with a task of --tasks, got {part.strip()!r}")
        found[name] = int(count)
    return found
