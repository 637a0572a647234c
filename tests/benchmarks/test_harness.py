# SPDX-License-Identifier: Apache-2.0
"""Statistics, rows and their merging, and that a wrong result is never timed."""

import argparse
import json
import os
import re
import subprocess
import types

import pytest
import torch

from benchmarks import harness, rows
from benchmarks.harness import Check, Job, Timing, WrongResultError, geometric_mean

COMMON = {"gpu": "NVIDIA H200", "driver": "1", "commit": "abc", "date": "2026-01-02",
          "kind": "measured"}  # fmt: skip


def row(**changes):
    made = rows.make_row("decode", "a case", "mpfa mean", "time", 12.5, "us", COMMON)
    return {**made, **changes}


def test_timing():
    # Rounds of three: medians 2, 20, 3; the median of all nine is 3.
    timing = Timing.of([[1.0, 2.0, 50.0], [19.0, 20.0, 21.0], [2.5, 3.0, 3.0]])
    assert timing.median == 3.0
    assert timing.mean == pytest.approx(25.0 / 3)
    assert timing.spread == pytest.approx((20.0 - 2.0) / 3.0)
    for bad in ([], [[1.0], []]):
        with pytest.raises(ValueError, match="every round"):
            Timing.of(bad)


def test_geometric_mean():
    assert geometric_mean([1.0, 4.0, 2.0]) == pytest.approx(2.0)
    for bad in ([], [1.0, 0.0], [-1.0]):
        with pytest.raises(ValueError, match="all positive"):
            geometric_mean(bad)


def test_relative_l2():
    truth = torch.tensor([3.0, 4.0])
    assert harness.relative_l2(truth, truth) == 0.0
    assert harness.relative_l2(torch.tensor([3.0, 4.5]), truth) == pytest.approx(0.1)
    broken = harness.relative_l2(torch.tensor([3.0, float("nan")]), truth)
    assert not Check(broken, 1e9, "truth").ok


def job(name, error, moved=0):
    return Job("case", name, lambda x: x, (torch.zeros(1),), moved,
               lambda: Check(error, 0.1, "truth", 0.2))  # fmt: skip


def test_wrong_result_stops_timing():
    timed = []
    jobs = [job("good", 0.05), job("bad", 0.2)]
    with pytest.raises(WrongResultError, match=r"case, bad: relative L2 0\.2 .*at most 0\.1"):
        harness.measure(jobs, lambda j: timed.append(j.impl) or [1.0])
    assert timed == []
    with pytest.raises(WrongResultError):
        harness.measure([job("nan", float("nan"))], lambda j: [1.0])


def test_rounds_take_turns():
    order = []

    def timer(j):
        order.append(j.impl)
        return [float(len(order))]

    jobs = [job("a", 0.0), job("b", 0.0)]
    harness.measure(jobs, timer)
    assert order == ["a", "b"] * harness.ROUNDS
    assert jobs[0].rounds == [[1.0], [3.0], [5.0], [7.0], [9.0]]


def test_copies_copy():
    for copy in harness.copy_jobs("case", torch.device("cpu"), 1024):
        target, source = copy.args
        target.zero_()
        copy.call(target, source)
        assert torch.equal(target.abs(), source) and copy.moved == 2048


def test_rows_of_a_case(capsys):
    copy, kernel = harness.copy_jobs("case", torch.device("cpu"), 1000)
    own, other = job("mpfa", 0.01, moved=500), job("base", 0.02, moved=1000)
    times = {copy.impl: 9.0, kernel.impl: 2.0, "mpfa": 1.0, "base": 4.0}
    jobs = [copy, kernel, own, other]
    harness.measure(jobs, lambda j: [times[j.impl]] * 3)
    made = harness.rows_of("decode", jobs, COMMON, ["base"], "timer x")
    for r in made:
        rows.validate(r)
    found = {(r["impl"], r["metric"]): r for r in made}
    assert found["mpfa", "time"]["value"] == 1.0
    assert found["mpfa", "time"]["ratio_to"] == {"base": 4.0}
    assert found["base", "time"]["ratio_to"] is None
    assert found["mpfa", "time, mean of 5"]["value"] == 1.0
    assert found["mpfa", "time, spread"]["unit"] == "%"
    # 500 bytes in 1 us are 0.5 GB/s, the faster copy's 2000 bytes in 2 us 1 GB/s.
    assert found["mpfa", "bandwidth"]["value"] == 0.5
    assert found["mpfa", "bandwidth"]["ratio_to"] == {"copy": 0.5}
    assert found["mpfa", "relative L2 to truth"]["value"] == 0.01
    assert found["mpfa", "relative L2 to float64 of the original values"]["value"] == 0.2
    harness.print_table("title", jobs, ["base"])
    lines = capsys.readouterr().out.splitlines()
    assert any("mpfa" in line and "50.0%" in line and "4.00" in line for line in lines)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"value": float("nan")}, "value"),
        ({"value": "3"}, "value"),
        ({"value": True}, "value"),
        ({"kind": "guessed"}, "kind"),
        ({"date": "yesterday"}, "date"),
        ({"impl": ""}, "impl"),
        ({"gpu": None}, "gpu"),
        ({"ratio_to": {"copy": "half"}}, "ratio_to"),
        ({"ratio_to": 2.0}, "ratio_to"),
        ({"machine": "x"}, "unknown"),
    ],
)
def test_bad_rows_are_refused(change, word):
    rows.validate(row())
    with pytest.raises(ValueError, match=word):
        rows.validate(row(**change))
    short = row()
    del short["unit"]
    with pytest.raises(ValueError, match="unit"):
        rows.validate(short)


def test_merge_replaces_whole_runs(tmp_path):
    path = tmp_path / "h200.json"
    old = [row(metric="time"), row(metric="bandwidth"), row(impl="mpfa none"), row(case="other")]
    rows.save(path, old)
    rows.save(path, [row(metric="time", value=1.0)])
    kept = json.loads(path.read_text())
    assert [(r["case"], r["impl"], r["metric"], r["value"]) for r in kept] == [
        ("a case", "mpfa none", "time", 12.5),
        ("other", "mpfa mean", "time", 12.5),
        ("a case", "mpfa mean", "time", 1.0),
    ]
    with pytest.raises(ValueError, match="kind"):
        rows.save(path, [row(kind="x")])
    assert json.loads(path.read_text()) == kept
    path.write_text(json.dumps([row(), row(value=None)]))
    with pytest.raises(ValueError, match=r"h200\.json: row 1: value"):
        rows.load(path)


def test_a_results_file_is_one_gpus(tmp_path, capsys):
    path = tmp_path / "h200.json"
    mine = rows.context("measured", rows.Gpu("NVIDIA H200", "1", (9, 0)), "c")
    other = rows.context("measured", rows.Gpu("NVIDIA B200", "1", (10, 0)), "c")
    rows.check_target(path, mine)  # not there yet
    rows.save(path, [row(**mine), row(kind="simulator", gpu="none (x)")])
    kept = path.read_text()
    rows.check_target(path, mine)
    for refused in (rows.check_target, lambda p, c: rows.save(p, [row(**c)])):
        with pytest.raises(
            ValueError, match="h200.json: holds rows .* NVIDIA H200 and NVIDIA B200"
        ):
            refused(path, other)
    assert path.read_text() == kept
    parser = argparse.ArgumentParser()
    with pytest.raises(SystemExit):
        rows.check_json(parser, path, other)
    assert "--json: h200.json: holds rows" in capsys.readouterr().err
    rows.check_json(parser, None, other)
    path.write_text(json.dumps([row(**mine), row(**other)]))
    with pytest.raises(ValueError, match="a results file is one GPU's"):
        rows.load(path)
    for text, message in (("{", "not JSON"), ('{"a": 1}', "must be a JSON list of rows")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            rows.load(path)


LISTED = """GPU-aaaa, NVIDIA B200, 580.1, 10.0
GPU-bbbb, NVIDIA H200, 580.1, 9.0
"""


@pytest.fixture
def two_gpus(monkeypatch, tmp_path):
    """nvidia-smi lists a B200, then an H200; torch's current device is what the test sets."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTED}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def device(name, uuid, capability, listed=LISTED):
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{listed}END\n")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        found = {"uuid": uuid, "name": name}
        properties = types.SimpleNamespace(**found)
        for attribute, value in (
            ("get_device_properties", properties), ("get_device_name", name),
            ("get_device_capability", capability),
        ):  # fmt: skip
            monkeypatch.setattr(torch.cuda, attribute, lambda index, v=value: index == 3 and v)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return device


def test_the_gpu_is_torchs_current_one(two_gpus):
    assert rows.find_gpu() is None  # without CUDA in torch nothing is measured
    assert rows.list_gpu() == rows.Gpu("NVIDIA B200", "580.1", (10, 0))
    two_gpus("NVIDIA H200", "bbbb", (9, 0), LISTED.replace("580.1, 9", "590.2, 9"))
    assert rows.find_gpu() == rows.Gpu("NVIDIA H200", "590.2", (9, 0))
    two_gpus("NVIDIA B200 MIG 1g.23gb", "cccc", (10, 0))
    assert rows.find_gpu() == rows.Gpu("NVIDIA B200 MIG 1g.23gb", "580.1", (10, 0))
    two_gpus("NVIDIA B200", "cccc", (10, 0), "")
    assert rows.find_gpu() == rows.Gpu("NVIDIA B200", "unknown", (10, 0))
    assert rows.list_gpu() is None


def test_a_changed_tree_is_marked(tmp_path):
    def git(*command):
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *command],
            check=True, capture_output=True,
        )  # fmt: skip

    assert rows.git_commit(tmp_path) == "unknown"
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (tmp_path / "kernel.cu").write_text("1")
    (results / "h200.json").write_text("[]")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "x")
    clean = rows.git_commit(tmp_path)
    assert re.fullmatch("[0-9a-f]{7,}", clean)
    (results / "h200.json").write_text("[1]")  # what a run itself writes
    (results / "new.json").write_text("[1]")
    assert rows.git_commit(tmp_path) == clean
    (tmp_path / "kernel.cu").write_text("2")
    changed = rows.git_commit(tmp_path)
    assert re.fullmatch(clean + r"-dirty\.[0-9a-f]{6}", changed)
    (tmp_path / "kernel.cu").write_text("3")
    assert rows.git_commit(tmp_path) not in (clean, changed)
    git("checkout", "kernel.cu")
    (tmp_path / "new.cuh").write_text("1")
    assert rows.git_commit(tmp_path).startswith(clean + "-dirty.")


def test_names():
    assert rows.slug("NVIDIA H200") == "h200"
    assert rows.slug("NVIDIA GeForce RTX 5090") == "rtx_5090"
    assert rows.results_file(None).name == "cpu.json"
    assert rows.results_file(rows.Gpu("NVIDIA B200", "1", (10, 0))).name == "b200.json"
    assert rows.context("measured")["gpu"].startswith("none (")
    assert rows.context("measured", rows.Gpu("G", "5", (9, 0)), "c")["driver"] == "5"


@pytest.mark.parametrize("path", sorted(rows.RESULTS.glob("*.json")), ids=lambda p: p.stem)
def test_kept_results_are_valid(path):
    assert rows.load(path)


def test_unknown_timer():
    with pytest.raises(ValueError, match="rotate, flush, events"):
        harness.choose_timer("stopwatch")


def test_rotation_replays_every_copy(monkeypatch):
    """The default timer: one graph per copy of the operands, kept over the rounds, dropped after."""
    testing = pytest.importorskip("flashinfer.testing")
    replayed, captured = [], []

    class Graph:
        def __init__(self, args):
            self.address = args[0].data_ptr()

        def replay(self):
            replayed.append(self.address)

    def bench(fn, dry_run_iters, repeat_iters, enable_cupti, cold_l2_cache):
        assert enable_cupti and not cold_l2_cache
        for _ in range(repeat_iters):
            fn()
        return [0.002] * repeat_iters

    monkeypatch.setattr(harness, "capture", lambda job, args: captured.append(args) or Graph(args))
    monkeypatch.setattr(testing, "bench_gpu_time", bench)
    monkeypatch.setattr(testing.utils, "calculate_rotation_count", lambda tensors: 3)
    timed = Job("case", "impl", lambda *args: None, (torch.ones(4), None))
    timer = harness.flashinfer_timer("rotate")
    harness.measure([timed], timer, rounds=2)
    assert timed.rounds == [[2.0] * harness.REPEATS] * 2
    assert len(captured) == 3 and len(replayed) == 2 * harness.REPEATS
    assert sorted(set(replayed)) == sorted(args[0].data_ptr() for args in captured)
    assert all(torch.equal(args[0], timed.args[0]) and args[1] is None for args in captured)
