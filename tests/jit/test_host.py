# SPDX-License-Identifier: Apache-2.0
"""Host modules: cache keys, concurrent and interrupted builds, and messages. A tiny source stands
in for the planner, so that a build takes a second."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpfa.jit import host, paths

SPEC = host.HostSpec("mpfa_tiny", ("tiny.cpp",), ("base",), 1)
GOOD = '#include "mpfa/base/tiny.h"\nextern "C" int mpfa_tiny() { return kTiny; }\n'


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def write_script(path: Path, text: str) -> Path:
    write(path, "#!/bin/sh\n" + text).chmod(0o755)
    return path


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A source tree with one module, an empty cache, and no CUDA anywhere in sight."""
    try:
        host.find_compiler()
    except host.CompilerNotFoundError as error:
        pytest.skip(str(error))
    root = tmp_path / "source"
    write(root / "csrc" / "tiny.cpp", GOOD)
    write(root / "include" / "mpfa" / "base" / "tiny.h", "constexpr int kTiny = 5;\n")
    monkeypatch.setattr(paths, "source_root", lambda: root)
    monkeypatch.setenv("MPFA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    return root


def test_builds_once_and_says_so_once(root, capfd):
    first = host.build(SPEC)
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("mpfa: compiling tiny (about 1 s), cached in ")
    assert str(first.parent) in said
    made = first.stat().st_mtime_ns
    assert host.build(SPEC) == first and first.stat().st_mtime_ns == made
    assert capfd.readouterr().err == ""


def test_key_follows_content_and_compiler(root, tmp_path, monkeypatch):
    keys = {host.module_dir(SPEC)}
    write(root / "include" / "mpfa" / "base" / "tiny.h", "constexpr int kTiny = 6;\n")
    keys.add(host.module_dir(SPEC))
    write(root / "csrc" / "tiny.cpp", GOOD + "\n")
    keys.add(host.module_dir(SPEC))
    monkeypatch.setattr(host, "_FLAGS", (*host._FLAGS, "-g"))
    keys.add(host.module_dir(SPEC))
    monkeypatch.setenv("CXX", " ".join([*host.find_compiler(), "-DX"]))
    keys.add(host.module_dir(SPEC))
    monkeypatch.setenv("CXX", str(write_script(tmp_path / "cxx", "echo other compiler 1.2\n")))
    keys.add(host.module_dir(SPEC))
    monkeypatch.setattr(sys.modules["mpfa"], "__version__", "99", raising=False)
    keys.add(host.module_dir(SPEC))
    assert len(keys) == 7


def test_moved_sources_keep_the_key(root, tmp_path, monkeypatch):
    before = host.module_dir(SPEC)
    moved = tmp_path / "elsewhere"
    shutil.copytree(root, moved)
    monkeypatch.setattr(paths, "source_root", lambda: moved)
    assert host.module_dir(SPEC) == before


def _build_in_child(start, log: str) -> None:
    with open(log, "w") as sys.stderr:
        start.wait()
        host.build(SPEC)


def test_eight_processes_compile_once(root, tmp_path):
    context = multiprocessing.get_context("fork")
    start = context.Barrier(8)
    logs = [tmp_path / f"stderr{i}" for i in range(8)]
    children = [context.Process(target=_build_in_child, args=(start, str(log))) for log in logs]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0] * 8
    assert sum(log.read_text().count("compiling") for log in logs) == 1
    left = sorted(p.name for p in host.module_dir(SPEC).parent.iterdir())
    assert left == [host.module_dir(SPEC).name, host.module_dir(SPEC).name + ".lock"]


def test_killed_build_does_not_block(root, tmp_path, monkeypatch):
    real = shutil.which(host.find_compiler()[0])
    hang = tmp_path / "hang"
    hang.touch()
    cxx = write_script(
        tmp_path / "cxx", f'[ "$1" != --version ] && [ -e {hang} ] && sleep 60\nexec {real} "$@"\n'
    )
    monkeypatch.setenv("CXX", str(cxx))
    context = multiprocessing.get_context("fork")
    start = context.Barrier(1)
    child = context.Process(target=_build_in_child, args=(start, str(tmp_path / "stderr")))
    child.start()
    family = host.module_dir(SPEC).parent
    deadline = time.monotonic() + 30
    while not list(family.glob(".*/build.ninja")):
        assert time.monotonic() < deadline and child.is_alive()
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.join(10)
    hang.unlink()
    assert host.build(SPEC).is_file()


def test_stray_folder_without_module_is_replaced(root):
    host.module_dir(SPEC).mkdir(parents=True)
    assert host.build(SPEC).is_file()


def test_compile_error_shows_first_error_and_command(root):
    write(root / "csrc" / "tiny.cpp", GOOD + "int broken() { return missing_name; }\nint x = y;\n")
    with pytest.raises(host.HostBuildError) as caught:
        host.build(SPEC)
    first, command = str(caught.value).split("\n")[:2]
    assert first.startswith("compiling mpfa_tiny failed: ")
    assert "tiny.cpp:3" in first and "missing_name" in first
    assert command.startswith("command: ") and " -c " in command and "tiny.cpp" in command
    left = [p.name for p in host.module_dir(SPEC).parent.iterdir()]
    assert left == [host.module_dir(SPEC).name + ".lock"]
    write(root / "csrc" / "tiny.cpp", GOOD)
    assert host.build(SPEC).is_file()


def test_missing_compiler(root, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(host.CompilerNotFoundError, match=r"CXX = 'no-such-compiler -m64'.*apt in"):
        host.build(SPEC)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(host.CompilerNotFoundError, match=r"CXX is not set.*c\+\+.*apt install g\+"):
        host.build(SPEC)


def test_unusable_cache_folder(root, tmp_path, monkeypatch):
    write(tmp_path / "file", "")
    monkeypatch.setenv("MPFA_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(host.HostBuildError, match="cannot write to the cache folder .*MPFA_CACHE"):
        host.build(SPEC)


def test_earlier_build_serves_without_a_compiler(root, tmp_path, monkeypatch):
    made = host.build(SPEC)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host.build(SPEC) == made


def test_needs_neither_nvcc_nor_ninja_on_path(root, tmp_path, monkeypatch):
    pytest.importorskip("ninja")
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("c++", "g++", "cc", "gcc", "as", "ld", "sh", "env"):
        if shutil.which(tool):
            (tools / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", str(tools))
    assert shutil.which("nvcc") is None and shutil.which("ninja") is None
    assert host.build(SPEC).is_file()
    assert os.environ["PATH"] == str(tools) and "CXX" not in os.environ


@pytest.mark.slow
def test_planner_builds_in_a_bare_environment(tmp_path):
    """The real planner, from nothing, in a process without CUDA_HOME and without nvcc."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("c++", "as", "ld", "sh"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not on PATH")
        (tools / tool).symlink_to(shutil.which(tool))
    code = (
        "import torch; from mpfa.planner import PlanRequest, make_plan\n"
        "one = torch.tensor([0, 1], dtype=torch.int32)\n"
        "r = PlanRequest('prefill', one, one, None, None, 4, 1, 64, None, True, -1, 16, 4, 128,\n"
        "                0, 4)\n"
        "print(make_plan(r).num_items)\n"
    )
    repository = str(Path(host.__file__).resolve().parents[2])
    environment = {
        "PATH": str(tools),
        "HOME": str(tmp_path),
        "PYTHONPATH": repository,
        "XDG_CACHE_HOME": str(tmp_path / "xdg"),
    }
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert "mpfa: compiling planner" in done.stderr
    assert list((tmp_path / "xdg" / "mpfa" / "host").glob("mpfa_planner-*/*/mpfa_planner.so"))
    again = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert again.stdout == "1\n" and "compiling" not in again.stderr
