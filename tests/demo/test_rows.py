# SPDX-License-Identifier: Apache-2.0
"""Rows, settings and progress: the parts that need neither a model nor a cache."""

from __future__ import annotations

import io

import pytest

from mpfa.accuracy.progress import ProgressBar
from mpfa.demo.rows import DEFAULT_KEYS, ROW_KEYS, ROWS, select_rows
from mpfa.demo.run import DemoSettings
from mpfa.demo.text import CALIBRATION, SCORED, read_prose


def test_row_keys_are_unique_and_the_reference_comes_first():
    assert len(set(ROW_KEYS)) == len(ROW_KEYS)
    assert ROWS[0].key == "bf16"
    assert set(DEFAULT_KEYS) < set(ROW_KEYS)


def test_select_rows_adds_the_reference_and_keeps_table_order():
    assert [r.key for r in select_rows(["mxfp8", "fp8"])] == ["bf16", "fp8", "mxfp8"]
    assert [r.key for r in select_rows(None)] == list(DEFAULT_KEYS)


def test_select_rows_names_the_unknown_key():
    with pytest.raises(ValueError, match=r"formats: must be among bf16, .*got 'int4'"):
        select_rows(["bf16", "int4"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": 3}, "tokens: must be >= 4, got 3"),
        ({"tokens": 64, "decode_tokens": 32}, r"decode_tokens: must be 0\.\.31, got 32"),
        ({"num_requests": 0}, "num_requests: must be >= 1, got 0"),
    ],
)
def test_settings_refuse_what_cannot_run(fields: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        DemoSettings(**fields)


def test_label_says_compensation_channels_scales_and_statistics():
    labels = {r.key: r.label for r in ROWS}
    assert labels["qk4pv8"] == "none"
    assert labels["qk4pv8-channels"] == "channels(16) + 4/6, static"
    assert labels["qk4pv8-mean-channels"] == "mean+channels(15) + 4/6, static"


def test_prose_has_no_headings_and_the_two_texts_share_no_sentence():
    scored, calibration = read_prose(SCORED), read_prose(CALIBRATION)
    for text in (scored, calibration):
        assert "chapter" not in text.lower()
        assert "\n" not in text.replace("\n\n", "")
    sentences = {s.strip() for s in scored.split(".")} - {""}
    shared = sentences & {s.strip() for s in calibration.split(".")}
    assert all(len(s) < 20 for s in shared)  # "Mr" and the like


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_prints_one_line_per_stage_without_a_terminal():
    stream = io.StringIO()
    bar = ProgressBar(4, stream)
    bar.stage("first")
    bar.advance(1)
    bar.stage("second")
    bar.advance(9)
    bar.clear()
    lines = stream.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == ["[ 25%] first", "[100%] second"]


def test_progress_redraws_and_clears_a_terminal():
    stream = _Terminal()
    bar = ProgressBar(2, stream)
    bar.stage("work")
    bar.clear()
    assert "  0%" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
    assert "\n" not in stream.getvalue()
