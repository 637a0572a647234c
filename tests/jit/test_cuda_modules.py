# SPDX-License-Identifier: Apache-2.0
"""CUDA modules through flashinfer.jit: what is built, what it links, concurrent and broken builds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpfa.jit import quant, toolkit
from mpfa.jit.spec import CudaSpec, arch_of

ROOT = Path(__file__).resolve().parents[2]
needs_nvcc = pytest.mark.skipif(toolkit.find_toolkit() is None, reason="no nvcc")

BUILD = """
import sys
from mpfa.jit import cuda, quant
print(cuda.build(quant.STATS, "12.0a"))
"""


def build(folder: Path, *, wait: bool = True, **environment: str):
    """Build the statistics module in a fresh process and a fresh cache."""
    env = {k: v for k, v in os.environ.items() if k != "FLASHINFER_CUDA_ARCH_LIST"}
    env |= {"FLASHINFER_WORKSPACE_BASE": str(folder), "PYTHONPATH": str(ROOT), **environment}
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD], env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    return (process, *process.communicate()) if wait else process


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda")
    process, out, err = build(folder)
    assert process.returncode == 0, err
    return folder, Path(out.strip().splitlines()[-1]), err


def test_names_and_architectures():
    assert arch_of((8, 6)) == "8.6" and arch_of((9, 0)) == "9.0a" and arch_of((12, 1)) == "12.1a"
    names = [spec.name for spec in quant.ALL]
    assert len(set(names)) == len(names) <= 6
    with pytest.raises(ValueError, match="mpfa_"):
        CudaSpec("other", ("x.cu",), (9,), 1)


@needs_nvcc
def test_module_is_named_after_its_target_and_announced(built):
    _, library, err = built
    assert library.name == "mpfa_stats_sm120a.so"
    assert re.search(r"mpfa: compiling stats_sm120a \(about \d+ s\), cached in ", err)


@needs_nvcc
def test_libcuda_is_not_needed(built):
    done = subprocess.run(["readelf", "-d", built[1]], capture_output=True, text=True, check=True)
    needed = re.findall(r"NEEDED.*\[(.+)\]", done.stdout)
    assert any(n.startswith("libcudart") for n in needed)
    assert not any(n.startswith("libcuda.so") for n in needed)


@needs_nvcc
def test_second_build_compiles_nothing(built):
    before = built[1].stat().st_mtime_ns
    process, _, err = build(built[0])
    assert process.returncode == 0 and "compiling" not in err
    assert built[1].stat().st_mtime_ns == before


@needs_nvcc
def test_unsupported_architecture_is_refused(tmp_path):
    process, _, err = build(tmp_path, FLASHINFER_CUDA_ARCH_LIST="7.5")
    assert process.returncode != 0
    assert "No supported CUDA architectures found" in err


@needs_nvcc
@pytest.mark.slow
def test_a_killed_build_leaves_nothing_in_the_way_of_eight_others(tmp_path):
    import signal
    import time

    first = build(tmp_path, wait=False)
    deadline = time.monotonic() + 120
    while not list(tmp_path.rglob("build.ninja")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    processes = [build(tmp_path, wait=False) for _ in range(8)]
    results = [(p, *p.communicate()) for p in processes]
    assert all(p.returncode == 0 for p, _, _ in results), results
    log = next(tmp_path.rglob("mpfa_stats_sm120a/.ninja_log")).read_text()
    objects = [line for line in log.splitlines() if "quant_stats" in line]
    assert len(objects) == 1, log  # compiled once for all eight
