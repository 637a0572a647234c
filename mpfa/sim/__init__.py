# SPDX-License-Identifier: Apache-2.0
"""ptxsim: CUDA programs for Blackwell and Hopper executed on the CPU (docs/simulator.md).

``load()`` opens a shared library that nvcc built, with its kernel launches executed by the
simulator in this process; CPU torch tensors are its device memory. ``python -m mpfa.sim run --
./program`` does the same for an executable.
"""

from mpfa.sim.build import SimulatorBuildError, library_path
from mpfa.sim.runtime import (
    SimulationError,
    Simulator,
    check_ptx,
    extract_ptx,
    load,
    run_ptx,
    simulator,
)

__all__ = [
    "SimulationError",
    "Simulator",
    "SimulatorBuildError",
    "check_ptx",
    "extract_ptx",
    "library_path",
    "load",
    "run_ptx",
    "simulator",
]
