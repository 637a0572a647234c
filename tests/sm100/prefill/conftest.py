# SPDX-License-Identifier: Apache-2.0
"""The SM100 prefill modules under the simulator, with PTX for 10.0 and 10.3."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# tests/sm120 holds the covering arrays.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "sm120")]

from prefill_modules import build  # noqa: E402
from sim_modules import open_modules  # noqa: E402


@pytest.fixture(scope="session")
def libraries() -> dict[int, Path]:
    return build()


@pytest.fixture(scope="session")
def modules(libraries):
    """The tvm-ffi module of each head dimension, launches executed by the simulator."""
    return open_modules(libraries)


@pytest.fixture(scope="session")
def paranoid_modules():
    """The same kernel with a commit and a wait behind every group of tcgen05 operations."""
    return open_modules(build("_paranoid", "-DMPFA_PARANOID_MMA=1"))


@pytest.fixture
def simulator(modules):
    """All watchers, asynchronous operations as late as allowed."""
    from mpfa import sim

    with sim.simulator().options(device="10.0", mode="lazy", watch="all", seed=3, timeout=120) as s:
        s.clear()
        yield s
        s.clear()
