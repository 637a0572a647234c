# SPDX-License-Identifier: Apache-2.0
"""What ptxas makes of both decode kernels on every target: no spills, two CTAs per SM, and the tensor
instructions that the design counts."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from mpfa.jit import toolkit

ROOT = Path(__file__).parents[3]
SOURCE = """
#include "mpfa/sm100/decode/kernel.cuh"
#include "mpfa/sm100/decode_rows/kernel.cuh"
namespace mpfa::sm100::decode {
template __global__ void sm100_decode<64>(const __grid_constant__ Params);
template __global__ void sm100_decode<128>(const __grid_constant__ Params);
}
"""
REGISTERS_PER_SM = 64 * 1024
THREADS = 256


@pytest.mark.parametrize("arch", ["100a", pytest.param("103a", marks=pytest.mark.slow)])
def test_resources(arch, tmp_path):
    found = toolkit.find_toolkit()
    if found is None:
        pytest.skip(toolkit.missing_text())
    source = tmp_path / "decode.cu"
    source.write_text(SOURCE)
    done = subprocess.run(
        [str(found.nvcc), "-std=c++17", "-O3", "-cubin", "-Xptxas", "-v", f"-I{ROOT / 'include'}",
         f"-gencode=arch=compute_{arch},code=sm_{arch}", "-o", str(tmp_path / "decode.cubin"),
         str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    text = done.stderr
    assert (
        len(re.findall(r"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", text))
        == 3
    )
    assert "spill stores" not in re.sub(r"0 bytes spill stores", "", text)
    used = dict(
        re.findall(r"Compiling entry function '(\S+)'.*?Used (\d+) registers", text, flags=re.S)
    )
    assert len(used) == 3
    for name, registers in used.items():
        ctas = 1 if "sm100_decode_rows" in name else 2
        assert int(registers) * THREADS * ctas <= REGISTERS_PER_SM, (name, registers)
