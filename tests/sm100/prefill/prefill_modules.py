# SPDX-License-Identifier: Apache-2.0
"""Builds the SM100 prefill modules, also with further compiler flags, and opens them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ARCHS = "10.0a 10.3a"
# why a process of its own: flashinfer reads the architecture list once, when it is imported, and
# other tests of this process have other targets.
_BUILD = """
import dataclasses, json, sys
from mpfa.backends import kernels
from mpfa.jit import attention, cuda
kernel = kernels.find_kernel("prefill", backend="sm100")
suffix, *flags = json.loads(sys.argv[1])
paths = {}
for d in map(int, sys.argv[2:]):
    spec = attention.attention_spec(kernel, d)
    spec = dataclasses.replace(spec, name=spec.name + suffix, flags=(*spec.flags, *flags))
    paths[d] = str(cuda.build(spec))
print(json.dumps(paths))
"""


def build(suffix: str = "", *flags: str, head_dims: tuple[int, ...] = (64, 128)) -> dict[int, Path]:
    """Path of the built module of each head dimension; skips where there is no nvcc."""
    from mpfa.jit import toolkit

    if toolkit.find_toolkit() is None:
        pytest.skip(toolkit.missing_text())
    env = os.environ | {"FLASHINFER_CUDA_ARCH_LIST": ARCHS}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, json.dumps([suffix, *flags]), *map(str, head_dims)],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return {int(d): Path(path) for d, path in json.loads(done.stdout.splitlines()[-1]).items()}


def open_modules(libraries: dict[int, Path]) -> dict[int, object]:
    from mpfa import sim

    try:
        sim.simulator()
    except RuntimeError as error:
        pytest.skip(f"the simulator cannot run in this process: {error}")
    return {d: sim.load(path, tvm_ffi=True) for d, path in libraries.items()}
