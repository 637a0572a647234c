# SPDX-License-Identifier: Apache-2.0
"""What make bench chooses on which machine, and what it says about the rest."""

import pytest

from benchmarks import run
from benchmarks.rows import Gpu

CPU = run.Machine(None, False, nvcc=True, compiler=True, disassembler=False)
H200 = run.Machine(Gpu("NVIDIA H200", "1", (9, 0)), True, True, True, True)
B200 = run.Machine(Gpu("NVIDIA B200", "1", (10, 0)), True, True, True, True)
RTX = run.Machine(Gpu("NVIDIA GeForce RTX 5090", "1", (12, 0)), True, True, True, True)


def reasons(machine):
    return {b.name: b.refusal(machine) for b in run.BENCHMARKS}


def test_cpu_machine():
    found = reasons(CPU)
    assert found["plan"] is None and found["simulator"] is None
    for name in ("append", "combine", "mma_peak"):
        assert "needs a CUDA GPU" in found[name] and "none found" in found[name]
    for name in ("decode", "prefill"):
        assert "mpfa has" in found[name] and "none found" in found[name]
    bare = run.Machine(None, False, False, False, False)
    assert reasons(bare)["plan"] == "no C++ compiler found"


def test_blackwell_runs_everything():
    assert reasons(B200) == dict.fromkeys(reasons(B200))
    assert reasons(RTX) == dict.fromkeys(reasons(RTX))
    assert B200.stem == "b200" and RTX.stem == "rtx_5090" and CPU.stem == "cpu"


def test_hopper():
    found = reasons(H200)
    assert found["append"] is None and found["combine"] is None and found["mma_peak"] is None
    assert "NVIDIA H200 has 9.x" in found["prefill"]


def test_gpu_that_torch_cannot_use():
    blind = run.Machine(B200.gpu, False, True, True, True)
    assert "torch cannot use the NVIDIA B200" in reasons(blind)["decode"]
    bare = run.Machine(B200.gpu, True, False, True, True)
    assert "no nvcc" in reasons(bare)["append"]
    old = run.Machine(Gpu("NVIDIA V100", "1", (7, 0)), True, True, True, True)
    assert "capability 8.0; NVIDIA V100 has 7.0" in reasons(old)["append"]


@pytest.fixture
def cpu(monkeypatch, tmp_path):
    """run.py on a CPU machine; what it starts is recorded, not run."""
    started = []
    monkeypatch.setattr(run, "look", lambda: CPU)
    monkeypatch.setattr(run, "run", lambda command, seconds=None: started.append(command) or 0)
    return started, tmp_path


def test_main_on_a_cpu(cpu, capsys):
    started, folder = cpu
    assert run.main(["--results", str(folder)]) == 0
    assert [c[1].rsplit("/", 1)[1] for c in started] == ["plan_cpu.py", "sim_speed.py"]
    assert str(folder / "cpu.json") in started[0]
    out = capsys.readouterr().out
    assert "skipped decode: mpfa has decode kernels" in out
    assert "SASS model not computed here: no disassembler" in out
    assert "nothing ran on a GPU" in out
    assert "skipped serving" in out
    assert (folder / "report.md").exists()


def test_list_and_only(cpu, capsys):
    started, folder = cpu
    assert run.main(["--list", "--results", str(folder)]) == 0
    assert "would run plan" in capsys.readouterr().out and started == []
    assert run.main(["--only", "plan", "--results", str(folder), "--no-report"]) == 0
    assert len(started) == 1
    assert "SASS model" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run.main(["--only", "speed", "--results", str(folder)])
    assert "unknown ['speed']" in capsys.readouterr().err


def test_failures_reach_the_exit_status(monkeypatch, cpu, capsys):
    _, folder = cpu
    monkeypatch.setattr(run, "run", lambda command, seconds=None: 3)
    assert run.main(["--only", "plan", "--results", str(folder), "--no-report"]) == 1
    assert "FAILED: plan (exit 3)" in capsys.readouterr().out


def test_model_falls_back_to_the_kept_rows(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run, "run", lambda command, seconds=None: 124)
    run.model(H200, tmp_path, 7)
    out = capsys.readouterr().out
    assert "did not end within 7 s" in out and "sm100_decode" in out


def test_time_limit():
    import sys

    assert run.run([sys.executable, "-c", "import time; time.sleep(30)"], 0.5) == 124
    assert run.run([sys.executable, "-c", "raise SystemExit(2)"]) == 2
