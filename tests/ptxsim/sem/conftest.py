# SPDX-License-Identifier: Apache-2.0
"""Builds the native tests of csrc/ptxsim/sem: a library, a program per file, cached by content."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from mpfa.jit.paths import cache_root, source_root
from mpfa.jit.toolkit import find_toolkit, missing_text

HERE = Path(__file__).resolve().parent
FLAGS = ("-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")
Program = Callable[..., subprocess.CompletedProcess[str]]


def _compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler (CXX, g++, c++)")
    return compiler


def _digest(files: Iterable[Path], *words: str) -> str:
    state = hashlib.sha256("\0".join(words).encode())
    for file in sorted(files):
        state.update(file.name.encode())
        state.update(file.read_bytes())
    return state.hexdigest()[:20]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)}\n{done.stdout}{done.stderr}", pytrace=False)


def cute_includes() -> list[str]:
    """Include flags for CuTe and the toolkit's headers; skips the test when either is missing."""
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or spec.origin is None:
        pytest.skip("the nvidia-cutlass package is not installed")
    cute = Path(spec.origin).parent / "source" / "include"
    if not (cute / "cute" / "tensor.hpp").is_file():
        pytest.skip(f"the nvidia-cutlass package has no CuTe headers in {cute}")
    return [f"-isystem{cute}", *cuda_includes()]


def cuda_includes() -> list[str]:
    toolkit = find_toolkit()
    if toolkit is None:
        pytest.skip(missing_text())
    include = toolkit.home / "include"
    for name in ("cuda_fp8.h", "cuda_fp6.h", "cuda_fp4.h", "cuda_runtime.h"):
        if not (include / name).is_file():
            pytest.skip(f"{include} has no {name}")
    return [f"-isystem{include}", f"-isystem{include / 'cccl'}"]


@pytest.fixture(scope="session")
def run_program() -> Program:
    """``run_program(name, includes, optimize)``: build tests/ptxsim/sem/<name>.cpp, run it."""
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    csrc = source_root() / "csrc" / "ptxsim"
    sources = sorted((csrc / "sem").glob("*.cpp"))
    headers = sorted((csrc / "sem").glob("*.h"))
    library = _digest([*sources, *headers], version, *FLAGS)
    root = cache_root() / "ptxsim-tests"
    root.mkdir(parents=True, exist_ok=True)

    def build(path: Path, make: Callable[[Path], None]) -> Path:
        """``make`` into a temporary name, rename: a reader never sees half a file."""
        with open(root / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                temporary = path.with_name(f"{path.name}.{os.getpid()}")
                make(temporary)
                temporary.rename(path)
        return path

    def make_library(archive: Path) -> None:
        objects = []
        for source in sources:
            objects.append(f"{archive}.{source.stem}.o")
            _run([compiler, *FLAGS, "-O2", "-c", str(source), "-o", objects[-1]])
        _run(["ar", "rcs", str(archive), *objects])
        for name in objects:
            os.unlink(name)

    def run(
        name: str, includes: Iterable[str] = (), optimize: str = "-O1"
    ) -> subprocess.CompletedProcess[str]:
        archive = build(root / f"libsem-{library}.a", make_library)
        source = HERE / f"{name}.cpp"
        shared = [HERE / "check.h", *source.parent.glob("*.inc"), *source.parent.glob("*.h")]
        flags = [*FLAGS, optimize, f"-I{csrc}", f"-I{HERE}", *includes]
        if includes:  # third-party headers are not ours to keep free of warnings
            flags = ["-w" if flag.startswith("-W") else flag for flag in flags]
        key = _digest([source, *set(shared)], library, *flags)

        def link(program: Path) -> None:
            _run([compiler, *flags, str(source), str(archive), "-o", str(program)])

        program = build(root / f"{source.stem}-{key}", link)
        return subprocess.run([str(program)], capture_output=True, text=True, timeout=600)

    return run
