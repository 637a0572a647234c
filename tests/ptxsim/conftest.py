# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the simulator tests: the simulator itself, and programs compiled by nvcc."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import pytest

from mpfa.jit.paths import cache_root
from mpfa.jit.toolkit import find_toolkit, missing_text
from mpfa.sim import Simulator, simulator

PROGRAMS = Path(__file__).parent / "programs"
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def sim() -> Iterator[Simulator]:
    """The simulator with default options and no memory of earlier launches."""
    s = simulator()
    s.set(mode="random", seed=1, watch="none", threads=0, sms=16, tmem_st="deferred", timeout=120)
    s.clear()
    yield s
    s.set(mode="random", seed=1, watch="none", threads=0, sms=16, tmem_st="deferred", timeout=600)
    s.clear()


@pytest.fixture(scope="session")
def nvcc() -> Callable[..., Path]:
    """nvcc(source, *flags) compiles a file of tests/ptxsim/programs once; a key of the content names
    the result. Skips, with the reason, where there is no toolkit."""
    toolkit = find_toolkit()
    if toolkit is None:
        pytest.skip(missing_text())

    def build(source: str, *flags: str) -> Path:
        path = PROGRAMS / source
        digest = hashlib.sha256(path.read_bytes())
        digest.update("\0".join((*flags, toolkit.version)).encode())
        target = cache_root() / "sim-tests" / f"{path.stem}-{digest.hexdigest()[:16]}.bin"
        target.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(str(target) + ".lock"):
            if not target.exists():
                private = target.with_suffix(f".{os.getpid()}")
                line = [str(toolkit.nvcc), "-std=c++17", "-O2", "-lineinfo", "-cudart", "shared"]
                line += [*flags, "-o", str(private), str(path)]
                done = subprocess.run(line, capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr
                private.rename(target)
        return target

    return build
