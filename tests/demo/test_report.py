# SPDX-License-Identifier: Apache-2.0
"""The reading follows the numbers, whatever they are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mpfa.accuracy.metrics import TokenScores
from mpfa.demo.report import best_low_bit, format_table, reading
from mpfa.demo.rows import ROWS
from mpfa.demo.run import RowResult

NOISE = torch.rand(512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def result(key: str, kl: float, size: float = 100.0) -> RowResult:
    row = next(r for r in ROWS if r.key == key)
    scores = TokenScores(
        nll=torch.full((512,), math.log(20.0), dtype=torch.float64),
        kl=kl * (0.5 + NOISE) if kl else torch.zeros(512, dtype=torch.float64),
        top1=torch.ones(512, dtype=torch.bool),
    )
    return RowResult(row, size, 256 / size, scores, (kl / 2, 2 * kl), 0.1, 0.2, 1.0)


def test_reading_when_the_best_row_beats_fp8():
    rows = [result("bf16", 0.0), result("fp8", 0.02, 128), result("qk4pv8", 0.1)]
    rows.append(result("qk4pv8-channels", 0.01, 132))
    said = reading(rows, seed=0)
    order = ("qk4pv8 0.0", "fp8 0.0", "qk4pv8-channels 0.0")
    assert "worst first: qk4pv8 0.0" in said
    assert sorted(order, key=said.index) == list(order)
    assert "qk4pv8-channels removes 90% of direct NVFP4's KL" in said
    assert "its KL is lower (0.50x" in said
    assert "at 132 against 128 bytes" in said


def test_reading_when_it_does_not():
    rows = [result("bf16", 0.0), result("fp8", 0.01, 128), result("qk4pv8-channels", 0.03, 132)]
    assert "its KL is higher (3.00x" in reading(rows, seed=0)


def test_reading_when_the_interval_holds_zero():
    same = result("qk4pv8-channels", 0.02, 132)
    other = result("fp8", 0.02, 128)
    moved = TokenScores(other.scores.nll, 0.02 * (0.5 + NOISE.flip(0)), other.scores.top1)
    other = RowResult(other.row, 128, 2.0, moved, (0.0, 1.0), 0.1, 0.2, 1.0)
    assert "its KL is not separable" in reading([result("bf16", 0.0), other, same], seed=0)


def test_reading_says_nothing_about_nan():
    said = reading([result("bf16", 0.0), result("qk4pv8", float("nan"))], seed=0)
    assert "NaN" in said and "worst first" not in said


@pytest.mark.parametrize("keys", [["bf16"], ["bf16", "mxfp8"], ["bf16", "qk4pv8"]])
def test_reading_of_few_rows(keys):
    rows = [result(key, 0.0 if key == "bf16" else 0.02) for key in keys]
    assert reading(rows, seed=0).endswith(".")


def test_best_low_bit_is_the_smallest_kl_of_qk4pv8():
    rows = [result("mxfp8", 0.001), result("qk4pv8", 0.1), result("qk4pv8-mean", 0.05)]
    assert best_low_bit(rows).row.key == "qk4pv8-mean"
    assert best_low_bit(rows[:1]) is None


def test_few_blocks_have_no_reading():
    rows = [result("bf16", 0.0), result("fp8", 0.01), result("qk4pv8", 0.1)]
    assert "worst first" in reading(rows, seed=0)
    few = [
        replace(r, scores=TokenScores(*(x[:448] for x in vars(r.scores).values()))) for r in rows
    ]
    assert reading(few, seed=0).startswith("Reading: none; 7 blocks of 64 tokens")


def test_table_columns_line_up():
    rows = [result("bf16", 0.0, 256), result("fp8", 0.02, 128), result("qk4pv8-channels", 0.01)]
    lines = format_table(rows).splitlines()
    assert lines[1].replace("-", "").strip() == ""
    assert all(len(line) <= len(lines[1]) for line in lines[:5])
    assert lines[5].startswith("* fp8 none: per-tensor")
