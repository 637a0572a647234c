# SPDX-License-Identifier: Apache-2.0
"""The SM120 modules under the simulator, built for the family target: one PTX plays 12.0 and 12.1."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sim_modules import build_modules, open_modules

sys.path.insert(0, str(Path(__file__).parent))

HEAD_DIMS = (64, 128)
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
    from mpfa.jit.attention import SIM_ARCHS

    built = build_modules(_BUILD, SIM_ARCHS, *map(str, HEAD_DIMS))
    return {int(d): path for d, path in built.items()}


@pytest.fixture(scope="session")
def modules(libraries):
    """The tvm-ffi module of each head dimension, launches executed by the simulator."""
    return open_modules(libraries)


@pytest.fixture
def simulator(modules):
    """All watchers, asynchronous operations as late as allowed; a hang ends after a minute."""
    from mpfa import sim

    with sim.simulator().options(device="12.0", mode="lazy", watch="all", seed=3, timeout=120) as s:
        yield s
