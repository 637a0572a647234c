# SPDX-License-Identifier: Apache-2.0
"""The GPU matrix without a GPU: its checks find what they are for, and survive what they must.

Part of make test. Fake kernels that write outside, repeat differently, read poison or leave rows
unwritten go through the code that runs the real ones; so do fake worker processes that die or hang
and fake sanitizers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import summary
import torch
from families import families
from kernel_job import Call, Job, as_faults
from kernel_runner import Placement, Settings, run_job
from matrix import Lost, Matrix, Worker
from sim_modules import require_simulator

ROWS, PAD = 4, 2
SETTINGS = Settings(repeats=6, replays=3, guard_bytes=512)


class FakeExecutor:
    """Python functions as kernels, on the CPU; "graphs" call them again."""

    name = "fake"
    device = torch.device("cpu")

    def __init__(self, kernel) -> None:
        self.kernel, self.count, self.replaying, self.closed = kernel, 0, False, 0

    def module(self, key: str):
        assert key == "double"
        return SimpleNamespace(run=lambda *args: self.kernel(self, *args))

    def execute(self, body, run: int) -> None:
        self.count += 1
        body()

    def capture(self, body):
        def replay() -> None:
            self.replaying = True
            body()

        return SimpleNamespace(replay=replay, close=lambda: setattr(self, "closed", 1))


def double(executor: FakeExecutor, x: torch.Tensor, offset: torch.Tensor, out: torch.Tensor):
    out.copy_(2 * x + offset)


def job() -> Job:
    """out = 2 x + offset; x lies inside a larger tensor, out between rows of poison."""
    big = torch.full((ROWS + 2 * PAD, 3), torch.nan)
    x = big[PAD : PAD + ROWS]
    x.copy_(torch.arange(12.0).view(ROWS, 3))
    offset = torch.tensor([0.5])
    out = torch.full((ROWS + 2 * PAD, 3), torch.nan)[PAD : PAD + ROWS]
    want = 2 * x + offset

    def check(got: dict[str, torch.Tensor]) -> None:
        assert torch.equal(got["out"], want), "wrong values"

    call = Call("double", {"x": x, "offset": offset, "out": out})
    return Job("double", (call,), {"out": out}, lambda got: as_faults(check, got))


def faults(kernel, settings: Settings = SETTINGS) -> list[str]:
    return run_job(job(), FakeExecutor(kernel), settings).faults


def raw(t: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage that a kernel could reach from ``t``."""
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())


def test_a_right_kernel_passes() -> None:
    executor = FakeExecutor(double)
    outcome = run_job(job(), executor, SETTINGS)
    assert outcome.faults == []
    assert (outcome.repeats, outcome.replays) == (6, 3)
    assert executor.count == 6 and executor.replaying and executor.closed


def after(change):
    """The right kernel, then ``change(executor, x, offset, out)``."""

    def kernel(executor, *args) -> None:
        double(executor, *args)
        change(executor, *args)

    return kernel


def write_before(executor, x, offset, out) -> None:
    raw(out)[512 - 8] = 1


def write_behind(executor, x, offset, out) -> None:
    raw(out)[-1] = 1


def write_beside(executor, x, offset, out) -> None:
    raw(out)[512 + 4] = 1


def write_input(executor, x, offset, out) -> None:
    x[1, 1] = 7.0


def write_beside_input(executor, x, offset, out) -> None:
    raw(x)[512] = 1


def other_bits(executor, x, offset, out) -> None:
    out[2, 1] += 2.0**-20 * (executor.count == 5)


def other_bits_in_graphs(executor, x, offset, out) -> None:
    if executor.replaying:
        out[0, 0] = -0.0


def read_guard(executor, x, offset, out) -> None:
    out[3] *= 1.0 - 2.0**-23 * (raw(x)[3] == 0)


def read_poison(executor, x, offset, out) -> None:
    out[0] += 0.0 * torch.empty(0).set_(x.untyped_storage(), 512 // 4, (3,))


def leave_row(executor, x, offset, out) -> None:
    out[1] = torch.nan


def wrong_value(executor, x, offset, out) -> None:
    out[0, 2] = 3.0


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (write_before, "run 0: out: 1 bytes before the storage written, the nearest 8 bytes away"),
        (write_behind, "run 0: out: 1 bytes behind the storage written, the nearest 511 bytes"),
        (write_beside, "run 0: out: bytes beside the output written, 1 bytes, first at byte 4"),
        (write_input, "run 0: x: an input written"),
        (write_beside_input, "run 0: x: an input written, 1 bytes, first at byte 0"),
        (other_bits, "graph replay 4: out: 1 of 12 values have other bits than in the first run"),
        (other_bits_in_graphs, "graph replay 3: out: 1 of 12 values have other bits"),
        (read_guard, "run 1: out: 3 of 12 values have other bits"),
        (read_poison, "wrong values"),
        (leave_row, "wrong values"),
        (wrong_value, "wrong values"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_wrong_kernel_is_found(change, found) -> None:
    assert any(found in line for line in faults(after(change))), faults(after(change))


def test_without_guard_bands_the_values_are_still_checked() -> None:
    settings = Settings(repeats=1, replays=0, guard_bytes=0)
    assert faults(double, settings) == []
    assert faults(after(wrong_value), settings) != []


def test_nothing_written_is_found() -> None:
    assert "wrong values" in faults(lambda *args: None)[0]


def test_views_of_one_storage_stay_together() -> None:
    base = torch.arange(64, dtype=torch.uint8)
    placement = Placement(torch.device("cpu"), 512)
    whole = placement.put("whole", base)
    words = placement.put("words", base[16:32].view(torch.int32))
    turned = placement.put("turned", base[32:].view(4, 8).t())
    placement.reset(0)
    assert len(placement.arenas) == 1
    assert torch.equal(words, base[16:32].view(torch.int32))
    assert torch.equal(turned, base[32:].view(4, 8).t()) and turned.stride() == (1, 8)
    whole[17] = 99
    assert words[0] != base[16:32].view(torch.int32)[0]
    assert placement.faults() == ["whole/words/turned: an input written, 1 bytes, first at byte 17"]


def test_an_output_view_may_be_strided_and_narrow() -> None:
    out = torch.full((3, 8), torch.nan, dtype=torch.bfloat16).t()[2:6]
    placement = Placement(torch.device("cpu"), 512)
    copy = placement.put_output("out", out)
    placement.reset(1)
    copy.fill_(1.0)
    assert placement.faults() == []
    assert torch.equal(placement.host()["out"], torch.ones(4, 3, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repeats": 0}, "repeats, replays: must be >= 1"),
        ({"replays": 20}, "repeats, replays: .*below repeats, got 20 and 20"),
        ({"guard_bytes": 100}, "guard_bytes: must be a multiple of 512, got 100"),
    ],
)
def test_bad_settings(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**change)


# ---- worker processes ---------------------------------------------------------------------------

WORKER = """
import json, os, sys, time
for line in sys.stdin:
    request = json.loads(line)
    print("chatter", flush=True)
    index = request.get("index")
    if request["family"] == "unbuildable":
        reply = {"error": "nvcc: no"}
    elif index == 1:
        print("illegal address", file=sys.stderr, flush=True)
        os._exit(6)
    elif index == 2:
        time.sleep(60)
    elif index == 3:
        reply = {"error": "refused", "lost": False}
    else:
        reply = {"faults": [], "pid": os.getpid(), **request}
    print("@matrix " + json.dumps(reply), flush=True)
"""


@pytest.fixture
def command(tmp_path) -> list[str]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    return [sys.executable, "-S", str(script)]


def test_a_lost_case_costs_only_itself(command) -> None:
    matrix = Matrix(command, repeats=4, replays=2, case_timeout=2.0)
    try:
        first = matrix.run("a", 0)
        assert (first["faults"], first["repeats"], first["replays"]) == ([], 4, 2)
        assert matrix.run("a", 0)["pid"] == first["pid"]
        died = matrix.run("a", 1)
        assert died["lost"] and "status 6" in died["error"] and "illegal address" in died["error"]
        second = matrix.run("a", 0)
        assert second["faults"] == [] and second["pid"] != first["pid"]
        hung = matrix.run("a", 2)
        assert hung["lost"] and "no answer within 2 s" in hung["error"]
        assert matrix.run("a", 3)["error"] == "refused"
        assert matrix.run("a", 0)["faults"] == []
        assert matrix.run("a", 1)["lost"]
        assert matrix.run("a", 0) == {"skipped": "not run: 3 cases before ended their process"}
        assert matrix.run("b", 0)["faults"] == []
    finally:
        matrix.close()


def test_modules_that_do_not_build_fail_once(command) -> None:
    matrix = Matrix(command)
    try:
        assert matrix.run("unbuildable", 0) == {"error": "nvcc: no"}
        assert "nvcc: no" in matrix.run("unbuildable", 1)["skipped"]
    finally:
        matrix.close()


def test_a_worker_that_cannot_start() -> None:
    worker = Worker([sys.executable, "-c", "raise SystemExit('no torch')"])
    with pytest.raises(Lost, match="status 1.*\n?no torch"):
        worker.ask({"family": "a"}, 20.0)
    worker.close()


# ---- the summary --------------------------------------------------------------------------------


def reply_lines(replies: list[dict], kernel: str = "sm100 decode", total: int = 9) -> list[str]:
    entries = [summary.entry(kernel, total, reply) for reply in replies]
    return summary.lines(entries, "NVIDIA B200 (10.0)")


def test_summary_counts_what_ran() -> None:
    right = {"faults": [], "repeats": 20, "replays": 10, "seconds": 1.5}
    wrong = {"faults": ["out: NaN"], "repeats": 20, "replays": 10, "seconds": 1.0}
    assert reply_lines([right, wrong, right]) == [
        "sm100 decode: 3 of 9 cases ran on NVIDIA B200 (10.0), 2 right; 20 runs of each, 10 of them "
        "graph replays; 4 s"
    ]
    (line,) = reply_lines([right, {"error": "killed\nlong", "lost": True}, {"skipped": "no model"}])
    assert "1 of 9 cases ran on NVIDIA B200 (10.0), 1 right" in line
    assert "1 ended their process; not run (2): killed; no model" in line
    (line,) = reply_lines([{"skipped": "needs 12.x"}] * 2, "sm120 prefill", 2)
    assert line == (
        "sm120 prefill: 0 of 2 cases ran on NVIDIA B200 (10.0); not run (2): needs 12.x"
    )


def test_summary_reads_reports_and_writes_json(tmp_path) -> None:
    entry = summary.entry("sm90 decode", 2, {"faults": []})
    tool = {"tool": "memcheck", "kernel": "sm90 decode", "text": "0 errors"}
    reports = [
        SimpleNamespace(user_properties=[(summary.MATRIX, entry), ("other", 1)]),
        SimpleNamespace(user_properties=[(summary.SANITIZER, tool)]),
    ]
    assert summary.entries(reports) == [entry]
    assert summary.sanitizer_lines(summary.entries(reports, summary.SANITIZER)) == [
        "compute-sanitizer memcheck, sm90 decode: 0 errors"
    ]
    path = tmp_path / "new" / "report.json"
    summary.write(path, "NVIDIA H200 (9.0)", [entry], [tool])
    assert '"gpu": "NVIDIA H200 (9.0)"' in path.read_text()


def test_every_family_says_what_it_needs() -> None:
    for family in families().values():
        assert f"{family.major}.x" in family.refusal(None)
        assert "this one has 8.9" in family.refusal((8, 9))
        assert family.refusal((family.major, 1)) is None
        names = [case.name for case in family.cases()]
        assert len(set(names)) == len(names)
        assert 1 <= len(family.sampled()) <= 20


PLUGIN = """
import sys
from types import ModuleType
import torch

torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *args: (10, 0)
torch.cuda.get_device_name = lambda *args: "Fake B200"


class Matrix:
    def __init__(self, command, **settings):
        assert settings == {"repeats": 6, "replays": 3} and "cuda:0" in command

    def run(self, family, index):
        right = {"faults": [], "repeats": 6, "replays": 3, "seconds": 0.5}
        wrong = {"faults": ["out: not finite"], "repeats": 6, "replays": 3, "seconds": 0.5}
        return {1: wrong, 2: {"error": "no answer", "lost": True}}.get(index, right)

    def close(self):
        pass


sys.modules["matrix"] = ModuleType("matrix")
sys.modules["matrix"].Matrix = Matrix
"""


def test_the_whole_command(tmp_path) -> None:
    """Collection, skips of another architecture, failures, summary and report, on a fake GPU."""
    (tmp_path / "fake_gpu.py").write_text(PLUGIN)
    report = tmp_path / "report.json"
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "fake_gpu", "-p", "no:cacheprovider", "-n0", "-q",
         "-m", "gpu", "tests/gpu/test_attention.py", "--require-gpu", "--repeats", "6", "--report",
         str(report), "-k", "rows or (sm120 and decode and wrappers)"],
        cwd=root, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    text = done.stdout
    assert done.returncode == 1, text + done.stderr
    count = len(families()["sm100 decode rows"].cases())
    other = len(families()["sm120 decode through the wrappers"].cases())
    assert (
        f"sm100 decode rows: {count - 1} of {count} cases ran on Fake B200 (10.0), {count - 2} right; "
        "6 runs of each, 3 of them graph replays" in text
    )
    assert "1 ended their process; not run (1): no answer" in text
    assert (
        f"sm120 decode through the wrappers: 0 of {other} cases ran on Fake B200 (10.0); not run "
        f"({other}): sm120 decode through the wrappers needs a GPU of compute capability 12.x"
        in text
    )
    assert "AssertionError: out: not finite" in text
    assert f"2 failed, {count - 2} passed, {other} skipped" in text
    kept = json.loads(report.read_text())
    assert kept["gpu"] == "Fake B200 (10.0)" and len(kept["cases"]) == count + other


def test_without_a_gpu_the_command_stops(monkeypatch) -> None:
    path = Path(__file__).with_name("conftest.py")
    spec = importlib.util.spec_from_file_location("gpu_conftest", path)
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def config(required: bool) -> SimpleNamespace:
        return SimpleNamespace(getoption=lambda name, default: required)

    hooks.pytest_configure(config(False))
    with pytest.raises(pytest.UsageError, match=f"--require-gpu: torch {torch.__version__[:4]}"):
        hooks.pytest_configure(config(True))


# ---- compute-sanitizer --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "output", "count", "text"),
    [
        (
            "memcheck",
            "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n",
            0,
            "0 err",
        ),
        (
            "memcheck",
            "========= COMPUTE-SANITIZER\n========= Invalid __global__ read of size 16 bytes\n"
            "========= ERROR SUMMARY: 3 errors\n",
            3,
            "3 errors, first: Invalid __global__ read of size 16 bytes",
        ),
        (
            "racecheck",
            "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
            0,
            "0 hazards",
        ),
        (
            "racecheck",
            "========= Error: Race reported\n"
            "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n",
            2,
            "2 hazards, first: Error: Race reported",
        ),
        (
            "memcheck",
            "========= COMPUTE-SANITIZER\n========= Error: device not supported\n",
            None,
            "not run: Error: device not supported",
        ),
        ("memcheck", "", None, "not run: no output"),
        # A racecheck summary is not memcheck's.
        ("memcheck", "========= RACECHECK SUMMARY: 0 hazards displayed\n", None, "not run"),
    ],
)
def test_what_a_sanitizer_says(tool, output, count, text) -> None:
    import sanitizer

    verdict = sanitizer.parse(tool, output)
    assert verdict.count == count
    assert verdict.clean == (count == 0)
    assert text in verdict.text


def test_a_sanitizer_runs_the_command(tmp_path) -> None:
    import sanitizer

    program = tmp_path / "compute-sanitizer"
    program.write_text(
        '#!/bin/sh\n[ "$1 $3" = "--tool --target-processes" ] || exit 2\nshift 4\n"$@" || exit $?\n'
        'echo "========= ERROR SUMMARY: 0 errors ($PYTORCH_NO_CUDA_MEMORY_CACHING)"\n'
    )
    program.chmod(0o755)
    verdict, output, status = sanitizer.check(str(program), "memcheck", ["echo", "ran"], 20)
    assert verdict.clean and status == 0 and "ran" in output and "(1)" in output
    verdict, _, status = sanitizer.check(str(program), "memcheck", ["false"], 20)
    assert not verdict.clean and status == 1
    verdict, _, status = sanitizer.check(str(program), "memcheck", ["sleep", "20"], 0.5)
    assert verdict.count is None and status is None
    verdict, _, _ = sanitizer.check(str(tmp_path / "none"), "memcheck", ["true"], 5)
    assert verdict.count is None and "not run" in verdict.text


# ---- real kernels, the simulator in the GPU's place ---------------------------------------------


@pytest.fixture(scope="session")
def simulated():
    """Workers on the simulator: {True: for SM90, whose modules have other targets, False: else}."""
    from mpfa.jit import toolkit

    if toolkit.find_toolkit() is None:
        pytest.skip(toolkit.missing_text())
    require_simulator()
    script = Path(__file__).with_name("matrix_worker.py")
    command = [sys.executable, str(script), "--device", "sim"]
    # A case builds its module when it is the first to need it.
    found = {
        hopper: Matrix(command, repeats=4, replays=2, case_timeout=900.0)
        for hopper in (True, False)
    }
    yield found
    for matrix in found.values():
        matrix.close()


def position(family: str, wanted) -> int:
    return next(i for i, case in enumerate(families()[family].cases()) if wanted(case))


STAND_IN = [
    ("sm120 prefill", lambda c: c.mode == "decode" and c.partition == 256),
    ("sm100 prefill", lambda c: getattr(c, "head_dim", 0) == 64 and c.partition and c.num_channels),
    ("sm100 decode", lambda c: getattr(c, "kind", "") == "one key" and c.case.head_dim == 64),
    ("sm100 decode rows", lambda c: c.channels == 15),
    ("sm90 decode", lambda c: c.case.split_tokens and c.case.channels and c.query == "bfloat16"),
    ("sm120 decode through the wrappers", lambda c: c.head_dim == 64 and c.extras),
    ("sm100 prefill through the wrappers", lambda c: c.head_dim == 64 and c.kind == "raw"),
    ("sm100 decode through the wrappers",
     lambda c: c.head_dim == 64 and c.graph and not c.raw_query and c.channels == 15),
]  # fmt: skip


@pytest.mark.parametrize(("family", "wanted"), STAND_IN, ids=[name for name, _ in STAND_IN])
def test_the_simulator_stands_in(family, wanted, simulated) -> None:
    """The worker process, the families' jobs and the runner, on the shipped PTX."""
    worker = simulated[families()[family].major == 9]
    reply = worker.run(family, position(family, wanted))
    assert reply.get("faults") == [], reply
    assert reply["repeats"] >= 4
    assert reply["replays"] >= 2 or "wrappers" in family


def decode_job(change=lambda job: job) -> list[str]:
    """Faults of an SM100 decode case, run on the simulator, after ``change`` of its job."""
    import decode_cases
    from kernel_runner import Simulated

    from mpfa import sim
    from mpfa.jit import attention

    specs = families()["sm100 decode"].specs()
    executor = Simulated(
        lambda key: attention.load_simulated(specs[key]),
        lambda: sim.simulator().options(device="10.0", mode="lazy", seed=3, timeout=60),
    )
    case = decode_cases.Case((129, 300), 4, 64, 16, "mean", q_len=2, split_tokens=128, seed=2)
    job = decode_cases.job(decode_cases.build(case), "64")
    return run_job(change(job), executor, Settings(repeats=2, replays=1, guard_bytes=4096)).faults


def without_keys(family: str) -> Job:
    """A job of a family whose first request has no keys."""
    import decode_cases
    import rows_replay
    import sm90_cases

    case = decode_cases.Case((0, 5), 4, 128, 16, "mean")
    if family == "sm90 decode":
        return sm90_cases.job(sm90_cases.QueryCase(case))
    if family == "sm100 decode rows":
        return rows_replay.job(case)
    return decode_cases.job(decode_cases.build(case), "128")


@pytest.mark.parametrize("family", ["sm100 decode", "sm100 decode rows", "sm90 decode"])
def test_the_lse_of_rows_without_keys_is_minus_infinity(family) -> None:
    """Whatever else stands there is found, finite or not."""
    import decode_cases
    import rows_replay
    import sm90_cases

    inputs = decode_cases.build(decode_cases.Case((0, 5), 4, 128, 16, "mean"))
    if family == "sm90 decode":
        out, lse = sm90_cases.replay(inputs)
    elif family == "sm100 decode rows":
        out, lse = rows_replay.replay_rows(rows_replay.build(inputs.case))
    else:
        out, lse = decode_cases.replay(inputs)
    job = without_keys(family)
    assert (lse[0] == -torch.inf).all() and torch.isfinite(lse[1]).all()
    assert job.faults({"out": out, "lse": lse}) == []
    for value in (0.0, 12345.0, -1e30, torch.inf, torch.nan):
        wrong = lse.clone()
        wrong[0, 1] = value
        (line,) = job.faults({"out": out, "lse": wrong})
        assert line.startswith("lse: first (token 0, head 1)"), line
    for value in (-torch.inf, torch.inf, torch.nan):  # and where there are keys
        wrong = lse.clone()
        wrong[1, 1] = value
        assert "lse: first (token 1, head 1)" in job.faults({"out": out, "lse": wrong})[0]


def one_key_more(job: Job) -> Job:
    """A request that is told to have a token more than was written: poison, in its last page."""
    arguments = job.calls[0].arguments
    arguments["kv_len"][0] += 1
    ends = arguments["items"].view(-1, 8)[:, 5]
    ends[ends == 129] = 130
    return job


def no_combine(job: Job) -> Job:
    return replace(job, calls=job.calls[:1])


def another_scale(job: Job) -> Job:
    changed = job.calls[0].arguments["q_scale"].clone()  # the replay has the old one
    changed[1, 2, 0] += 8  # twice
    job.calls[0].arguments["q_scale"] = changed
    return job


def last_token_not_declared(job: Job) -> Job:
    narrow = {"lse": job.outputs["lse"][:-1]}
    return replace(job, outputs=dict(job.outputs) | narrow, faults=lambda got: [])


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (one_key_more, "out: not finite"),
        (no_combine, "out: not finite"),
        (another_scale, "lse: first (token 1, head 2)"),
        (last_token_not_declared, "lse: bytes beside the output written"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_damaged_launch_of_a_real_kernel_is_found(change, found, simulated) -> None:
    lines = decode_job(change)
    assert any(found in line for line in lines), lines


def test_the_undamaged_launch_is_right(simulated) -> None:
    assert decode_job() == []
