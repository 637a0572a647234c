# SPDX-License-Identifier: Apache-2.0
"""Scores, paired differences and the recovered fraction "Rec." of the paper's Table 2."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

BOOTSTRAP_SAMPLES = 1000
MIN_EXAMPLES = 8


@dataclass(frozen=True)
class Score:
    """One row's score of one task.

    Attributes:
        mean, error: of the metric over the examples; standard error of the mean.
        loss, loss_error: baseline minus this row, and the standard error of the paired differences;
            None for the baseline itself.
        recovered: 1 - loss / (loss of the direct row), the paper's Rec.; None for baseline and
            direct, without a direct row, and where direct lost nothing.
        interval: bootstrap 95% interval of ``recovered`` over the examples; None with it, of fewer than
            8 examples, and where resampled direct losses reach 0, because a ratio to nothing has no
            interval.
    """

    mean: float
    error: float
    loss: float | None = None
    loss_error: float | None = None
    recovered: float | None = None
    interval: tuple[float, float] | None = None


def standard_error(values: np.ndarray) -> float:
    """Of the mean; NaN for one example."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def score(
    values: list[float],
    baseline: list[float] | None = None,
    direct: list[float] | None = None,
    seed: int = 0,
) -> Score:
    """Score of one row; all lists hold the same examples in the same order.

    Args:
        values: of the row.
        baseline: of the BF16 row; None when this is it.
        direct: of the uncompensated row; None when there is none or this is it.

    Raises:
        ValueError: no example, or lists of different lengths.
    """
    lengths = {len(x) for x in (values, baseline, direct) if x is not None}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"values: rows must have the same examples, got {sorted(lengths)} of them")
    own = np.asarray(values, dtype=np.float64)
    mean, error = float(own.mean()), standard_error(own)
    if baseline is None:
        return Score(mean, error)
    losses = np.asarray(baseline, dtype=np.float64) - own
    loss, loss_error = float(losses.mean()), standard_error(losses)
    if direct is None:
        return Score(mean, error, loss, loss_error)
    direct_losses = np.asarray(baseline, dtype=np.float64) - np.asarray(direct, dtype=np.float64)
    direct_loss = float(direct_losses.mean())
    if direct_loss <= 0:
        return Score(mean, error, loss, loss_error)
    return Score(
        mean,
        error,
        loss,
        loss_error,
        1 - loss / direct_loss,
        _recovered_interval(losses, direct_losses, seed),
    )


def _recovered_interval(
    losses: np.ndarray, direct_losses: np.ndarray, seed: int
) -> tuple[float, float] | None:
    if len(losses) < MIN_EXAMPLES:
        return None
    generator = np.random.default_rng(seed)
    ratios = []
    for _ in range(BOOTSTRAP_SAMPLES):
        drawn = generator.integers(0, len(losses), len(losses))
        direct = direct_losses[drawn].sum()
        if direct > 0:
            ratios.append(1 - losses[drawn].sum() / direct)
    # A 95% interval exists only where fewer resamples than its tails are left out.
    if len(ratios) < 0.975 * BOOTSTRAP_SAMPLES:
        return None
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def score_all(document: dict, seed: int = 0) -> dict[str, dict[str, Score]]:
    """{task: {row key: Score}} of a results document (tasks.py) as far as it has been run."""
    rows = {row["key"]: row["results"] for row in document["rows"]}
    baseline_key, direct_key = document["baseline"], document["direct"]
    scores: dict[str, dict[str, Score]] = {}
    for task in document["tasks"]:
        found = {
            key: results[task["name"]]["values"]
            for key, results in rows.items()
            if task["name"] in results
        }
        baseline, direct = found.get(baseline_key), found.get(direct_key)
        scores[task["name"]] = {
            key: score(
                values,
                None if key == baseline_key else baseline,
                None if key in (baseline_key, direct_key) else direct,
                seed,
            )
            for key, values in found.items()
        }
    return scores


HEADER = ("task", "row", "score ± SE", "loss ± SE", "Rec. (95%)")


def table(document: dict, seed: int = 0) -> str:
    """Markdown: one line per task and row, then each row's mean Rec. over the tasks that have one."""
    scores = score_all(document, seed)
    lines = [HEADER]
    recovered: dict[str, list[float]] = {}
    for task in document["tasks"]:
        label = f"{task['name']} ({task['shots']}-shot, {task['metric']})"
        for key, s in scores[task["name"]].items():
            examples = len(_values(document, key, task["name"]))
            lines.append(
                (
                    f"{label}, n={examples}" if key == document["baseline"] else "",
                    key,
                    f"{s.mean:.3f} ± {s.error:.3f}",
                    "" if s.loss is None else f"{s.loss:+.3f} ± {s.loss_error:.3f}",
                    _recovered_text(s, key == document["direct"], examples),
                )
            )
            if s.recovered is not None:
                recovered.setdefault(key, []).append(s.recovered)
    for key, values in recovered.items():
        lines.append(
            (f"mean of {len(values)} tasks", key, "", "", f"{100 * sum(values) / len(values):.0f}%")
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    text = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    text.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(text)


def _values(document: dict, key: str, task: str) -> list[float]:
    (row,) = (row for row in document["rows"] if row["key"] == key)
    return row["results"][task]["values"]


def _recovered_text(s: Score, is_direct: bool, examples: int) -> str:
    if is_direct:
        return "0% by definition"
    if s.recovered is None:
        return ""
    text = f"{100 * s.recovered:.0f}%"
    if examples < MIN_EXAMPLES:
        return text + f" (no interval: n < {MIN_EXAMPLES})"
    if s.interval is None:
        return text + " (not separable)"
    return text + f" ({100 * s.interval[0]:.0f}..{100 * s.interval[1]:.0f})"


def notes(document: dict) -> list[str]:
    """What the table must say about itself, and rows that were left out."""
    made = f"{document['model']} on {document['device']}, {document['dtype']}"
    lines = [
        f"{made}; row {document['baseline']}: the model's own attention and cache; all rows saw the "
        "same examples and prompts, greedy decoding.",
        "loss: baseline minus row, standard error of paired differences. Rec.: 1 - loss / loss of "
        f"row {document['direct']!r}, empty where that row lost nothing.",
    ]
    if document["limit"] is not None:
        lines.append(f"Only the first {document['limit']} examples of each (sub)task were used.")
    lines += [f"{s['key']}: not run: {s['reason']}" for s in document["skipped"]]
    return lines
