# SPDX-License-Identifier: Apache-2.0
"""Unmodified nvcc output: an executable, and a shared library called with torch CPU tensors."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mpfa.sim import Simulator, library_path, load

Nvcc = Callable[..., Path]


def sim_run(*words: str | Path, **options: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "mpfa.sim", "run"]
    for name, value in options.items():
        line += [f"--{name.replace('_', '-')}", value]
    env = dict(os.environ, MPFA_SIM_LIBRARY=str(library_path()))
    return subprocess.run(
        [*line, "--", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=env,
    )


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("arch", ["100a", "120a", "90a"])
def test_executable(nvcc: Nvcc, arch: str, compress: bool) -> None:
    flags = [f"-gencode=arch=compute_{arch},code=compute_{arch}"]
    program = nvcc("vector_add.cu", *flags, *([] if compress else ["--no-compress"]))
    done = sim_run(program)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("sum 1498500.0 of 1000 values, from the device") == 3
    assert f"ptxsim sm_{arch[:-1]} total 1498500.0 launches 3" in lines
    assert "too much shared memory: cudaErrorInvalidValue" in lines
    limit = 101376 if arch == "120a" else 232448
    assert "300000 bytes of dynamic shared memory, the function allows 65536" in done.stderr
    assert limit > 65536


def test_wrong_device_is_refused(nvcc: Nvcc) -> None:
    program = nvcc("vector_add.cu", "-gencode=arch=compute_100a,code=compute_100a")
    done = sim_run(program, device="12.0")
    assert done.returncode != 0
    assert "no PTX for the simulated device sm_120" in done.stderr
    assert "the program has sm_100a" in done.stderr


def test_cubin_only_program_says_what_to_do(nvcc: Nvcc) -> None:
    program = nvcc("vector_add.cu", "-gencode=arch=compute_100a,code=sm_100a")
    done = sim_run(program)
    assert done.returncode != 0 and "code=compute_NNN" in done.stderr


def test_shared_library_on_torch_tensors(nvcc: Nvcc, sim: Simulator) -> None:
    flags = ["-gencode=arch=compute_100a,code=compute_100a", "-shared", "-Xcompiler", "-fPIC"]
    library = load(nvcc("vector_add.cu", *flags))
    a, b, c = torch.rand(777), torch.rand(777), torch.full((800,), -1.0)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, c)]
    sim.clear()
    with sim.tensors(a, b, c):
        assert library.add(*pointers, 777) == 0
    assert torch.equal(c[:777], a * 2 + b * 0.5) or torch.allclose(c[:777], a * 2 + b * 0.5)
    assert c[777:].eq(-1).all()
    (record,) = sim.launches()
    assert "vector_add" in record["kernel"] and record["grid"] == [7, 1, 1]
    sim.check()
    assert library.launch_failure() != 0
    assert "access to unmapped address (nil)" in sim.last_message()
    sim.clear()
    assert library.add(*pointers, 777) == 0  # the process and the library still work
