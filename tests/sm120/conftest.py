# SPDX-License-Identifier: Apache-2.0
"""The SM120 modules under the simulator, built for the family target: one PTX plays 12.0 and 12.1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

HEAD_DIMS = (64, 128)
# why a process of its own: flashinfer reads the architecture list once, when it is imported, and
# other tests of this process have other targets.
_BUILD = """
import json, sys
from mpfa.backends import kernels
from mpfa.jit import attention, cuda
kernel = kernels.find_kernel("prefill", backend="sm120")
paths = {d: str(cuda.build(attention.attention_spec(kernel, d))) for d in map(int, sys.argv[1:])}
print(json.dumps(paths))
"""


@pytest.fixture(scope="session")
def libraries() -> dict[int, Path]:
    """Path of the built module of each head dimension."""
    from mpfa.jit import attention, toolkit

    if toolkit.find_toolkit() is None:
        pytest.skip(toolkit.missing_text())
    env = os.environ | {"FLASHINFER_CUDA_ARCH_LIST": attention.SIM_ARCHS}
    root = str(Path(__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, *map(str, HEAD_DIMS)],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return {int(d): Path(path) for d, path in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.fixture(scope="session")
def modules(libraries):
    """The tvm-ffi module of each head dimension, launches executed by the simulator."""
    from mpfa import sim

    try:
        sim.simulator()
    except RuntimeError as error:
        pytest.skip(f"the simulator cannot run in this process: {error}")
    return {d: sim.load(path, tvm_ffi=True) for d, path in libraries.items()}


@pytest.fixture
def simulator(modules):
    """All watchers, asynchronous operations as late as allowed; a hang ends after a minute."""
    from mpfa import sim

    with sim.simulator().options(device="12.0", mode="lazy", watch="all", seed=3, timeout=120) as s:
        yield s
