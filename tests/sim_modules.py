# SPDX-License-Identifier: Apache-2.0
"""Attention modules for kernel tests: built in a process of their own, opened on the simulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def build_modules(script: str, archs: str, *arguments: str) -> dict[str, Path]:
    """Runs ``script``, which prints {name: path of a built module} as JSON; skips without nvcc.

    why a process of its own: flashinfer reads the architecture list once, when it is imported, and
    other tests of this process have other targets.
    """
    from mpfa.jit import toolkit

    if toolkit.find_toolkit() is None:
        pytest.skip(toolkit.missing_text())
    env = os.environ | {"FLASHINFER_CUDA_ARCH_LIST": archs}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    paths = json.loads(done.stdout.splitlines()[-1])
    return {name: Path(path) for name, path in paths.items()}


def require_simulator() -> None:
    """Skips where modules cannot bind to the simulator: it does not build, or a real CUDA runtime is
    loaded in this process."""
    from mpfa import sim

    try:
        foreign = sim.simulator().foreign
    except RuntimeError as error:
        pytest.skip(f"the simulator cannot run in this process: {error}")
    if foreign:
        pytest.skip(f"the simulator cannot run in this process: {foreign} is loaded")


def open_modules(libraries: dict) -> dict:
    """The tvm-ffi module of each library, its launches executed by the simulator."""
    from mpfa import sim

    require_simulator()
    return {name: sim.load(path, tvm_ffi=True) for name, path in libraries.items()}
