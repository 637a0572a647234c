# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch: a dependent grid may overlap its primary until griddepcontrol.wait.

Without the wait the early start reads old data, and the race watcher reports it in any schedule.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mpfa.sim import Simulator, load

WAIT, WAIT_LATE, READ_BACK, ONE_WARP, PLAIN = 1, 2, 4, 8, 16
N = 300


@pytest.fixture(scope="module")
def library(nvcc: Callable[..., Path]) -> ctypes.CDLL:
    flags = ["-gencode=arch=compute_100a,code=compute_100a", "-shared", "-Xcompiler", "-fPIC"]
    return load(nvcc("dependent.cu", *flags))


def run(library: ctypes.CDLL, options: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    data, scratch, out = (torch.full((N,), v, dtype=torch.int32) for v in (-5, 0, -1))
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (data, scratch, out)]
    code = library.dependent(*pointers, N, options)
    return code, data, out


RIGHT = torch.arange(N - 1, -1, -1, dtype=torch.int32) * 3 + 1


@pytest.mark.parametrize("mode", ["eager", "random", "lazy"])
@pytest.mark.parametrize("pdl", ["off", "trigger", "start"])
@pytest.mark.parametrize("options", [WAIT, ONE_WARP, PLAIN])
def test_wait_makes_the_primary_visible(
    library: ctypes.CDLL, sim: Simulator, options: int, pdl: str, mode: str
) -> None:
    for seed in range(3):
        with sim.options(pdl=pdl, mode=mode, seed=seed, watch="all"):
            code, _, out = run(library, options)
        assert code == 0 and torch.equal(out, RIGHT)
    sim.check()


@pytest.mark.parametrize("pdl", ["trigger", "start"])
@pytest.mark.parametrize("options", [0, WAIT_LATE])
def test_early_start_reads_old_data(
    library: ctypes.CDLL, sim: Simulator, options: int, pdl: str
) -> None:
    wrong = 0
    for seed in range(12):
        with sim.options(pdl=pdl, seed=seed):
            code, data, out = run(library, options)
        assert code == 0 and torch.equal(data, torch.arange(N, dtype=torch.int32) * 3)
        wrong += not torch.equal(out, RIGHT)
    assert wrong >= 4  # the moment of the start is drawn
    # Launches that run one after the other hide the fault.
    assert torch.equal(run(library, options)[2], RIGHT)


@pytest.mark.parametrize("pdl", ["off", "trigger", "start"])
@pytest.mark.parametrize("options", [0, WAIT_LATE])
def test_race_watcher_reports_the_missing_wait(
    library: ctypes.CDLL, sim: Simulator, options: int, pdl: str
) -> None:
    with sim.options(pdl=pdl, watch="race"):
        assert run(library, options)[0] == 719
    message = sim.last_message()
    assert "missing griddepcontrol-wait" in message and "of launch 1 of the chain" in message


@pytest.mark.parametrize("pdl", ["off", "trigger", "start"])
def test_overwriting_what_the_primary_reads(library: ctypes.CDLL, sim: Simulator, pdl: str) -> None:
    with sim.options(pdl=pdl, watch="race"):
        assert run(library, READ_BACK)[0] == 719
        assert "missing griddepcontrol-wait" in sim.last_message()
        sim.clear()
        assert run(library, READ_BACK | WAIT)[0] == 0
    wrong = 0
    for seed in range(8):
        with sim.options(pdl="start", seed=seed):
            data = run(library, READ_BACK)[1]
        wrong += not torch.equal(data, torch.arange(N, dtype=torch.int32) * 3)
    assert wrong >= 4


def test_bad_option(sim: Simulator) -> None:
    with pytest.raises(ValueError, match="off, trigger or start"):
        sim.set(pdl="early")
