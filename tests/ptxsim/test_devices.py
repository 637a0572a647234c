# SPDX-License-Identifier: Apache-2.0
"""One program on several simulated devices in one process: each runs the image compiled for it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mpfa.sim import Simulator, load

Nvcc = Callable[..., Path]
NO_KERNEL_IMAGE = 209  # cudaErrorNoKernelImageForDevice


@pytest.fixture
def library(nvcc: Nvcc, tmp_path: Path) -> ctypes.CDLL:
    """A copy of its own: nothing of it has been loaded or has counted before."""
    flags = [f"-gencode=arch=compute_{a},code=compute_{a}" for a in ("90a", "100a", "103a")]
    built = nvcc("two_devices.cu", *flags, "-shared", "-Xcompiler", "-fPIC")
    copy = tmp_path / "two_devices.so"
    copy.write_bytes(built.read_bytes())
    return load(copy)


def probe(sim: Simulator, library: ctypes.CDLL, device: str) -> list[int]:
    """[arch of the code, count, managed count, count and managed count as the host sees them]."""
    out = torch.zeros(5, dtype=torch.int32)
    with sim.options(device=device):
        assert library.probe(ctypes.c_void_p(out.data_ptr())) == 0, sim.last_message()
    return out.tolist()


@pytest.mark.parametrize(
    "order",
    [
        ("10.0", "10.3", "10.0", "9.0", "10.3"),
        ("10.3", "10.0", "10.3"),
        ("auto", "10.0", "auto", "9.0", "auto"),
    ],
)
def test_each_device_runs_its_own_image(
    library: ctypes.CDLL, sim: Simulator, order: tuple[str, ...]
) -> None:
    archs = {"9.0": 900, "10.0": 1000, "10.3": 1030, "auto": 1030}
    launches: dict[int, int] = {}
    for total, device in enumerate(order, 1):
        arch = archs[device]
        launches[arch] = launches.get(arch, 0) + 1
        # A __device__ variable belongs to its device, a __managed__ one to the program.
        count, managed = 100 + launches[arch], 1000 + total
        assert probe(sim, library, device) == [arch, count, managed, count, managed], device


def test_a_device_without_an_image_is_refused_and_changes_nothing(
    library: ctypes.CDLL, sim: Simulator
) -> None:
    assert probe(sim, library, "10.0")[:2] == [1000, 101]
    out = torch.zeros(5, dtype=torch.int32)
    with sim.options(device="12.0"):
        assert library.probe(ctypes.c_void_p(out.data_ptr())) == NO_KERNEL_IMAGE
    assert out.eq(0).all()
    assert "no PTX for the simulated device sm_120" in sim.last_message()
    assert all(f"sm_{a}" in sim.last_message() for a in ("90a", "100a", "103a"))
    sim.clear()
    assert probe(sim, library, "10.0")[:2] == [1000, 102]


def test_a_recorded_graph_keeps_the_code_of_its_device(
    library: ctypes.CDLL, sim: Simulator
) -> None:
    out = torch.zeros(5, dtype=torch.int32)
    with sim.options(device="10.0"):
        assert library.record(ctypes.c_void_p(out.data_ptr())) == 0, sim.last_message()
    assert probe(sim, library, "10.3")[:2] == [1030, 101]
    with sim.options(device="10.0"):
        assert library.replay() == 0, sim.last_message()
    assert out.tolist()[:2] == [1000, 101]
