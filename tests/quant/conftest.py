# SPDX-License-Identifier: Apache-2.0
"""The CUDA modules of the quantise kernels, compiled for Blackwell and executed by the simulator."""

import os

import pytest

TARGETS = ("10.0", "12.0")


@pytest.fixture(scope="session")
def simulated():
    """The simulator with mpfa.backends.cuda running on it: host tensors are its device memory.

    One module serves all targets: the simulator picks the PTX of the device that it plays.
    """
    from mpfa import sim
    from mpfa.jit import cuda as jit
    from mpfa.jit import quant, toolkit
    from mpfa.jit.attention import SIM_ARCHS

    if toolkit.find_toolkit() is None:
        pytest.skip(toolkit.missing_text())
    try:
        simulator = sim.simulator()
    except RuntimeError as error:
        pytest.skip(f"the simulator cannot run in this process: {error}")
    os.environ.setdefault(jit.ARCH_VARIABLE, SIM_ARCHS)
    for spec in quant.ALL:
        jit.load(spec)
    return simulator


@pytest.fixture(params=TARGETS)
def target(request, simulated):
    """The simulator playing one GPU generation; a failed launch fails the test."""
    with simulated.options(device=request.param, mode="random", seed=7):
        simulated.clear()
        yield simulated
        simulated.check()
