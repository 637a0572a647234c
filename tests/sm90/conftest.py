# SPDX-License-Identifier: Apache-2.0
"""The SM90 decode modules and the combine module, compiled for 9.0 and executed by the simulator."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from sim_modules import build_modules, open_modules

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("sm90", "sm100/decode", "sm120")]

_BUILD = """
import json
from mpfa.backends import kernels
from mpfa.jit import attention, cuda, quant
kernel = kernels.find_kernel("decode", backend="sm90")
specs = {str(d): attention.attention_spec(kernel, d) for d in kernel.tilings}
specs["combine"] = quant.COMBINE
print(json.dumps({name: str(cuda.build(spec)) for name, spec in specs.items()}))
"""


@pytest.fixture(scope="session")
def libraries() -> dict[str, Path]:
    """Path of each built module: "64", "128" and "combine"."""
    return build_modules(_BUILD, "9.0a")


@pytest.fixture(scope="session")
def modules(libraries):
    """The tvm-ffi modules; launches are executed by the simulator."""
    return open_modules(libraries)


@pytest.fixture
def simulator(modules):
    """All watchers, asynchronous operations as late as they may be; a failed launch fails the test."""
    from mpfa import sim

    with sim.simulator().options(device="9.0", mode="lazy", watch="all", seed=3, timeout=120) as s:
        s.clear()
        yield s
        s.check()


@pytest.fixture(autouse=True)
def _one_thread():
    """why: the tensors are small, and torch's pool spins for longer than it computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
