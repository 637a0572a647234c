# SPDX-License-Identifier: Apache-2.0
"""What ptxas makes of the kernel: no spills, and a main loop of block-scaled MMAs only."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from mpfa.jit import paths, toolkit

ARCHS = ("120f", "120a", "121a")
SOURCE = """
#include "mpfa/sm120/kernel.cuh"
namespace mpfa::sm120 {
template __global__ void sm120_prefill<Config<64>>(const __grid_constant__ Params);
template __global__ void sm120_prefill<Config<128>>(const __grid_constant__ Params);
}  // namespace mpfa::sm120
"""


def compile_kernel(folder: Path, arch: str, *flags: str) -> tuple[Path, str]:
    """(cubin, what ptxas says) of the kernel for both head dimensions."""
    found = toolkit.find_toolkit()
    if found is None:
        pytest.skip(toolkit.missing_text())
    source, cubin = folder / "kernel.cu", folder / "kernel.cubin"
    source.write_text(SOURCE)
    done = subprocess.run(
        [str(found.home / "bin" / "nvcc"), "-std=c++17", "-O3", "-cubin", "-Xptxas", "-v",
         f"-gencode=arch=compute_{arch},code=sm_{arch}", f"-I{paths.source_root() / 'include'}",
         *flags, "-o", str(cubin), str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return cubin, done.stderr


@pytest.mark.parametrize(
    "arch", [ARCHS[0], *(pytest.param(a, marks=pytest.mark.slow) for a in ARCHS[1:])]
)
def test_no_spills(arch, tmp_path) -> None:
    _, log = compile_kernel(tmp_path, arch)
    print(log)
    assert re.findall(r"(\d+) bytes stack frame", log) == ["0", "0"]
    assert re.findall(r"(\d+) bytes spill stores", log) == ["0", "0"]
    # 384 threads at launch; setmaxnreg moves registers later, and ptxas drops it when it must.
    assert re.findall(r"Used (\d+) registers", log) == ["168", "168"]
    assert "setmaxnreg" not in log


@pytest.mark.slow
def test_fixed_scale_option_compiles(tmp_path) -> None:
    _, log = compile_kernel(tmp_path, "120f", "-DMPFA_SM120_FIXED_P_SCALE")
    assert re.findall(r"(\d+) bytes spill stores", log) == ["0", "0"]


def main_loop(listing: str) -> list[str]:
    """Opcodes of the innermost loop with MMAs: S of a block beside softmax and P V of the one before."""
    code, labels, branches = [], {}, []
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(code)
        if found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)([^;]*);", line):
            if target := re.search(r"`\((\.L_\w+)\)", found[2]):
                branches.append((len(code), target[1]))
            code.append(found[1])
    loops = [code[labels[t] : i + 1] for i, t in branches if labels.get(t, len(code)) <= i]
    return min((x for x in loops if any("MMA" in opcode for opcode in x)), key=len)


def test_main_loop(tmp_path) -> None:
    from benchmarks.sass import tools

    try:
        tools.find_tool("nvdisasm")
    except tools.ToolError as error:
        pytest.skip(str(error))
    cubin, _ = compile_kernel(tmp_path, "120f")
    listing = tools.disassemble(cubin)
    functions = re.split(r"(?m)^\.text\.", listing)[1:]
    assert len(functions) == 2
    for text in functions:
        loop = main_loop(text)
        # 32 MMAs for S and 32 for O per warp, at both head dimensions.
        mma = [opcode for opcode in loop if "MMA" in opcode]
        assert len(mma) == 64
        assert set(mma) == {"QMMA.SF.16832.F32.E4M3.E4M3.E8"}
        # Two rows, two steps of the maximum over a quad, all of them before P is made.
        shuffles = [i for i, opcode in enumerate(loop) if opcode.startswith("SHFL")]
        packs = [i for i, opcode in enumerate(loop) if "E4M3" in opcode and "F2FP" in opcode]
        assert len(shuffles) == 4
        assert len(packs) >= 16
        assert max(shuffles) < min(packs)
        assert not [opcode for opcode in loop if opcode.startswith(("STL", "LDL", "PRMT"))]
