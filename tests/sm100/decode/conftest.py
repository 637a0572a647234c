# SPDX-License-Identifier: Apache-2.0
"""The SM100 decode modules and the combine module, compiled for the 10.x family and executed by the
simulator: one PTX plays 10.0 and 10.3."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from sim_modules import build_modules, open_modules

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "sm120")]

_BUILD = """
import json, sys
sys.path[:0] = sys.argv[1:]
from rows_replay import SPEC
from mpfa.backends import kernels
from mpfa.jit import attention, cuda, quant
kernel = kernels.find_kernel("decode", backend="sm100")
specs = {str(d): attention.attention_spec(kernel, d) for d in kernel.tilings}
specs["combine"] = quant.COMBINE
specs["rows"] = SPEC
print(json.dumps({name: str(cuda.build(spec)) for name, spec in specs.items()}))
"""


@pytest.fixture(scope="session")
def libraries() -> dict[str, Path]:
    """Path of each built module: "64", "128", "combine" and "rows" (the variant)."""
    from mpfa.jit.attention import SIM_ARCHS

    folders = (Path(__file__).parent, Path(__file__).parents[2])
    return build_modules(_BUILD, SIM_ARCHS, *map(str, folders))


@pytest.fixture(scope="session")
def modules(libraries):
    """The tvm-ffi modules; launches are executed by the simulator."""
    return open_modules(libraries)


@pytest.fixture
def simulator(modules):
    """All watchers, asynchronous operations as late as they may be; a failed launch fails the test."""
    from mpfa import sim

    with sim.simulator().options(device="10.0", mode="lazy", watch="all", seed=3, timeout=120) as s:
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
