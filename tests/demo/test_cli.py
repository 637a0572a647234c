# SPDX-License-Identifier: Apache-2.0
"""The demo command on two layers: table, reading, answers, JSON, bad arguments."""

from __future__ import annotations

import json

import pytest

from mpfa import __main__ as command
from mpfa.demo import cli, report
from mpfa.demo.model import ModelUnavailableError
from mpfa.demo.rows import DEFAULT_KEYS

# Bytes per token and KV head at D=64, G=3: notes of docs/formats.md.
BYTES = {
    "bf16": 256,
    "fp8": 128,
    "qk4pv8": 100,
    "qk4pv8-mean": 106,
    "qk4pv8-channels": 132,
    "qk4pv8-mean-channels": 136,
    "mxfp8": 132,
}


@pytest.fixture
def small_model(two_layers, monkeypatch):
    monkeypatch.setattr(cli, "load_model", lambda: two_layers)
    return two_layers


def test_every_default_row_reaches_table_and_json(small_model, tmp_path, capsys):
    path = tmp_path / "demo.json"
    arguments = ["demo", "--tokens", "128", "--decode-tokens", "3", "--answer-tokens", "2"]
    assert command.main([*arguments, "--json", str(path), "--prompt", "Hello?"]) == 0
    printed = capsys.readouterr()
    document = json.loads(path.read_text())

    assert document["scored_tokens"] == 128
    assert document["requests"] == 2
    assert [row["key"] for row in document["rows"]] == list(DEFAULT_KEYS)
    for row in document["rows"]:
        assert row["bytes_per_token_and_kv_head"] == BYTES[row["key"]]
        assert row["ratio_to_bf16"] == pytest.approx(256 / BYTES[row["key"]])
        if row["key"] == "bf16":
            assert row["kl"] == 0 and row["top1"] == 1
        else:
            # Two blocks of 64 tokens.
            assert row["kl_low"] is row["kl_high"] is None
            assert row["kl"] > 0 and 0 < row["top1"] <= 1
            both = row["kl_prefill"] * 61 + row["kl_decode"] * 3
            assert both / 64 == pytest.approx(row["kl"], rel=1e-6)
        assert row["rel_l2"] <= row["rel_l2_max"]
        for name in ("format", "compensation"):
            assert row[name] in printed.out

    best = report.BASELINE_KEY
    assert best in DEFAULT_KEYS
    assert set(document["answers"]) >= {"bf16"}
    assert len(document["answers"]) == 2
    assert "Prompt: Hello?" in printed.out
    assert "Reading: none; 2 blocks of 64 tokens" in printed.out and ".." not in printed.out
    assert "not a cache format of mpfa" in printed.out
    # Not a terminal: one line per stage, calibration, seven rows and two answers.
    assert len(printed.err.splitlines()) == 10


def test_formats_choose_rows_and_answers_can_be_left_out(small_model, capsys):
    arguments = ["demo", "--tokens", "32", "--decode-tokens", "0", "--answer-tokens", "0"]
    assert command.main([*arguments, "--formats", "mxfp8"]) == 0
    out = capsys.readouterr().out
    assert "mxfp8" in out and "bf16" in out
    assert "fp8*" not in out and "Prompt" not in out


def test_same_seed_same_numbers(small_model, tmp_path, capsys):
    rows = []
    for i in range(2):
        path = tmp_path / f"{i}.json"
        arguments = ["demo", "--tokens", "64", "--decode-tokens", "2", "--answer-tokens", "0"]
        command.main([*arguments, "--formats", "qk4pv8", "--json", str(path), "--seed", "5"])
        row = json.loads(path.read_text())["rows"][1]
        del row["seconds"]
        rows.append(row)
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--formats", "int4"], "formats: must be among"),
        (["--tokens", "1"], "tokens: must be >="),
        (["--seed", "-1"], "seed: must be 0..4294967295, got -1"),
        (["--json", "/"], "json: '/' is a folder"),
        (["--tokens", "8", "--decode-tokens", "4"], "decode_tokens: must be 0..3"),
    ],
)
def test_bad_arguments_exit_2_with_one_line(arguments, message, capsys):
    assert command.main(["demo", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mpfa demo: ") and message in err
    assert len(err.splitlines()) == 1


def test_more_tokens_than_the_text_has_exits_2(small_model, capsys):
    assert command.main(["demo", "--tokens", "100000"]) == 2
    assert "persuasion.txt has" in capsys.readouterr().err


def test_missing_package_exits_1_with_the_command(monkeypatch, capsys):
    def unavailable():
        raise ModelUnavailableError("not installed: gguf; run: pip install gguf")

    monkeypatch.setattr(cli, "load_model", unavailable)
    assert command.main(["demo"]) == 1
    assert "run: pip install gguf" in capsys.readouterr().err
