# SPDX-License-Identifier: Apache-2.0
"""Numbers with their intervals, the printed tables and the JSON form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from mpfa.accuracy.evaluate import AccuracySettings, RowMeasurement
from mpfa.accuracy.metrics import (
    MIN_BLOCKS,
    BlockSums,
    block_sums,
    mean_interval,
    percentile_interval,
    recovered,
    resample,
    too_few_blocks,
    whole_blocks,
)
from mpfa.accuracy.models import Geometry
from mpfa.accuracy.rows import BASELINE, DIRECT, REFERENCE, RowSpec

SCHEMA = "mpfa-accuracy-1"
KIND = "reference emulation on the CPU; no GPU kernel ran"


@dataclass(frozen=True)
class Value:
    """A number and its 95% bootstrap interval over blocks of tokens; None where they are too few."""

    value: float
    low: float | None
    high: float | None

    def text(self, digits: int, scale: float = 1.0) -> str:
        if self.low is None:
            return f"{scale * self.value:.{digits}f}"
        numbers = (f"{scale * x:.{digits}f}" for x in (self.value, self.low, self.high))
        return "{} ({}..{})".format(*numbers)


@dataclass(frozen=True)
class RowReport:
    """One line of the tables; token metrics are None without a language model, Rec. without the
    direct row.

    Attributes:
        bytes_per_token_head, ratio_to_bf16: stored bytes per token and KV head.
        perplexity: exp of the mean negative log-likelihood.
        nll_increase: mean NLL minus that of bf16 on the same tokens, nats (paired interval).
        kl: mean KL(bf16 || row), nats per token.
        top1: how often the most likely token is bf16's.
        rec_kl, rec_nll: 1 - x / x_direct, bf16 being 0 (paper Table 2).
        rel_l2, cosine: attention output against float64, mean over layers and heads.
        rel_l2_worst: largest over layers and heads.
        rel_l2_by_layer, cosine_by_layer: means over heads.
    """

    row: RowSpec
    bytes_per_token_head: float
    ratio_to_bf16: float
    perplexity: Value | None
    nll_increase: Value | None
    kl: Value | None
    top1: Value | None
    rec_kl: Value | None
    rec_nll: Value | None
    rel_l2: Value
    rel_l2_worst: float
    cosine: Value
    rel_l2_by_layer: list[float]
    cosine_by_layer: list[float]
    seconds: float


class Analysis:
    """Reports of measured rows that share their tokens; ``window`` of them make one request."""

    def __init__(
        self, measured: list[RowMeasurement], geometry: Geometry, window: int, seed: int
    ) -> None:
        self.geometry = geometry
        self._seed, self._window = seed, window
        first = measured[0]
        self.error_blocks = whole_blocks(first.errors.counts)
        self.token_blocks = (
            None if first.scores is None else whole_blocks(self._blocks(first.scores.kl).counts)
        )
        self._by_key = {m.row.key: m for m in measured}
        self.reports = [self._report(m) for m in measured]
        self.by_key = {r.row.key: r for r in self.reports}

    def _blocks(self, values: torch.Tensor) -> BlockSums:
        return block_sums(values.view(-1, self._window))

    def _mean(self, values: torch.Tensor) -> Value:
        blocks = self._blocks(values)
        if self.token_blocks < MIN_BLOCKS:
            return Value(float(blocks.mean), None, None)
        return Value(float(blocks.mean), *mean_interval(blocks, self._seed))

    def _error_value(self, value: float, interval: Callable[[int], tuple[float, float]]) -> Value:
        if self.error_blocks < MIN_BLOCKS:
            return Value(value, None, None)
        return Value(value, *interval(self._seed))

    def _losses(self, measured: RowMeasurement) -> dict[str, BlockSums]:
        """KL and increase of the NLL, whose mean is 0 for the reference."""
        reference = self._by_key[REFERENCE].scores
        return {
            "kl": self._blocks(measured.scores.kl),
            "nll": self._blocks(measured.scores.nll - reference.nll),
        }

    def _recovered(self, measured: RowMeasurement) -> dict[str, Value | None]:
        direct = self._by_key.get(DIRECT)
        if measured.scores is None or direct is None:
            return {"kl": None, "nll": None}
        own, worst = self._losses(measured), self._losses(direct)
        values = {}
        for name in own:
            value, low, high = recovered(own[name], worst[name], self._seed)
            few = self.token_blocks < MIN_BLOCKS
            values[name] = Value(value, None, None) if few else Value(value, low, high)
        return values

    def _report(self, measured: RowMeasurement) -> RowReport:
        row, scores, errors = measured.row, measured.scores, measured.errors
        rel_l2, cosine = errors.rel_l2_by_head(), errors.cosine_by_head()
        per_head = row.bytes_per_token_head(self.geometry)
        perplexity = increase = kl = top1 = None
        if scores is not None:
            nll = self._mean(scores.nll)
            perplexity = Value(
                *(None if x is None else math.exp(x) for x in (nll.value, nll.low, nll.high))
            )
            increase = self._mean(scores.nll - self._by_key[REFERENCE].scores.nll)
            kl, top1 = self._mean(scores.kl), self._mean(scores.top1)
        rec = self._recovered(measured)
        return RowReport(
            row=row,
            bytes_per_token_head=per_head,
            ratio_to_bf16=4 * self.geometry.head_dim / per_head,
            perplexity=perplexity,
            nll_increase=increase,
            kl=kl,
            top1=top1,
            rec_kl=rec["kl"],
            rec_nll=rec["nll"],
            rel_l2=self._error_value(float(rel_l2.mean()), errors.rel_l2_interval),
            rel_l2_worst=float(rel_l2.max()),
            cosine=self._error_value(float(cosine.mean()), errors.cosine_interval),
            rel_l2_by_layer=rel_l2.mean(dim=1).tolist(),
            cosine_by_layer=cosine.mean(dim=1).tolist(),
            seconds=measured.seconds,
        )

    def kl_difference(self, key: str, other: str) -> Value:
        """Mean KL of one row minus another's, paired over the same tokens."""
        a, b = (self._by_key[k].scores.kl for k in (key, other))
        blocks = self._blocks(a - b)
        weights = resample(len(blocks.sums), self._seed)
        drawn = (weights @ blocks.sums) / (weights @ blocks.counts)
        return Value(float(blocks.mean), *percentile_interval(drawn))


TOKEN_HEADER = ("row", "bytes", "ratio", "ppl", "dNLL 1e-3", "KL 1e-3 (95%)", "top-1 %")
REC_HEADER = ("Rec. NLL %", "Rec. KL % (95%)")
ERROR_HEADER = ("rel L2 (95%)", "worst", "cosine")


def table(reports: Sequence[RowReport]) -> list[tuple[str, ...]]:
    """Header and one line of cells per row; columns that no row has are left out."""
    has_tokens = any(r.kl is not None for r in reports)
    has_rec = any(r.rec_kl is not None for r in reports)
    header = TOKEN_HEADER if has_tokens else TOKEN_HEADER[:3]
    header += (REC_HEADER if has_rec else ()) + ERROR_HEADER
    return [header, *(_cells(r, has_tokens, has_rec) for r in reports)]


def _notes(reports: Sequence[RowReport]) -> list[str]:
    keys: dict[str, list[str]] = {}
    for r in reports:
        if r.row.note:
            keys.setdefault(r.row.note, []).append(r.row.key)
    return [f"* {', '.join(names)}: {note}" for note, names in keys.items()]


def interval_note(analysis: Analysis) -> str | None:
    """Why numbers of the table have no interval; None where all have one."""
    counts = {"scored": analysis.token_blocks, "attention error": analysis.error_blocks}
    few = {what: n for what, n in counts.items() if n is not None and n < MIN_BLOCKS}
    if not few:
        return None
    return "No interval: " + "; ".join(f"{what}: {too_few_blocks(n)}" for what, n in few.items())


def format_table(reports: Sequence[RowReport]) -> str:
    return "\n".join([*_aligned(table(reports)), *_notes(reports)])


def format_markdown(reports: Sequence[RowReport]) -> str:
    """The table and its notes for a Markdown page."""
    header, *lines = ["| " + " | ".join(cells) + " |" for cells in table(reports)]
    rule = "|" + " --- |" * header.count(" | ") + " --- |"
    return "\n".join([header, rule, *lines, "", *_notes(reports), ""])


def format_layers(reports: Sequence[RowReport], names: Sequence[str]) -> str:
    """Relative L2 error of every row in every layer, for models of few layers."""
    lines = [("row", *names)]
    lines += [(r.row.key, *(f"{x:.4f}" for x in r.rel_l2_by_layer)) for r in reports]
    return "\n".join(_aligned(lines))


def _aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for line in lines:
        cells = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        text.append("  ".join(cells).rstrip())
    text.insert(1, "  ".join("-" * width for width in widths))
    return text


def _cells(r: RowReport, has_tokens: bool, has_rec: bool) -> tuple[str, ...]:
    is_reference = r.row.key == REFERENCE
    cells = [
        r.row.key + ("*" if r.row.note else ""),
        f"{r.bytes_per_token_head:.0f}",
        f"{r.ratio_to_bf16:.2f}x",
    ]
    if has_tokens and is_reference:
        cells += [f"{r.perplexity.value:.3f}", "0", "0", "100"]
    elif has_tokens:
        increase = f"{1e3 * r.nll_increase.value:+.1f}"
        if r.nll_increase.low is not None:
            increase += f" +-{1e3 * (r.nll_increase.high - r.nll_increase.low) / 2:.1f}"
        cells += [
            f"{r.perplexity.value:.3f}",
            increase,
            r.kl.text(1, 1e3),
            f"{100 * r.top1.value:.1f}",
        ]
    if has_rec:
        cells += [f"{100 * r.rec_nll.value:.0f}", r.rec_kl.text(0, 100)]
    cells += [r.rel_l2.text(4), f"{r.rel_l2_worst:.3f}", f"{r.cosine.value:.5f}"]
    return tuple(cells)


def reading(analysis: Analysis) -> str:
    """What the numbers say about the rows next to fp8, one statement per comparison made."""
    if any(r.rel_l2.value != r.rel_l2.value for r in analysis.reports):
        return "Reading: a row produced NaN; the table says nothing."
    rows = [r for r in analysis.reports if r.row.format == "qk4pv8" and not r.row.is_eigen]
    if not rows:
        return "Reading: no qk4pv8 row was run."
    blocks = analysis.error_blocks if rows[0].kl is None else analysis.token_blocks
    if blocks < MIN_BLOCKS:
        return f"Reading: none; {too_few_blocks(blocks)}. More --tokens give one."
    if rows[0].kl is None:
        best = min(rows, key=lambda r: r.rel_l2.value)
        return f"Reading: smallest attention error of qk4pv8 is {best.row.key}'s."
    best = min(rows, key=lambda r: r.kl.value)
    parts = [f"smallest KL of qk4pv8 is {best.row.key}'s"]
    if BASELINE in analysis.by_key:
        fp8 = analysis.by_key[BASELINE]
        for r in rows:
            if r.row.channels < 15:
                continue
            gap = analysis.kl_difference(r.row.key, BASELINE)
            verdict = "below" if gap.high < 0 else "above" if gap.low > 0 else "not separable from"
            parts.append(
                f"{r.row.key} is {verdict} fp8 ({r.kl.value / fp8.kl.value:.2f}x; difference "
                f"{gap.text(1, 1e3)} e-3) at {r.bytes_per_token_head:.0f} against "
                f"{fp8.bytes_per_token_head:.0f} bytes"
            )
    return "Reading: " + "; ".join(parts) + "."


def as_json(
    analysis: Analysis,
    settings: AccuracySettings,
    *,
    model: str,
    layer_names: list[str],
    versions: dict[str, str],
    seconds: float,
) -> dict[str, object]:
    """The document that --json writes; every value with its interval."""
    fields = asdict(settings)
    for name in ("text", "calibration"):
        fields[name] = fields[name].name
    has_tokens = any(r.kl is not None for r in analysis.reports)
    if not has_tokens:
        del fields["text"], fields["calibration"]
    rows = []
    for r in analysis.reports:
        flat = asdict(r)
        spec = flat.pop("row")
        rows.append({**spec, **flat, "seconds": round(r.seconds, 2)})
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "model": model,
        "geometry": {
            name: getattr(analysis.geometry, name)
            for name in ("num_layers", "num_qo_heads", "num_kv_heads", "head_dim")
        },
        "settings": fields,
        "versions": versions,
        "layers": layer_names,
        "rows": rows,
        "seconds": round(seconds, 1),
    }
