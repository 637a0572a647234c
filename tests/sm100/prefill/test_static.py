# SPDX-License-Identifier: Apache-2.0
"""What can be said without running: the barrier table of the docs, spills, machine instructions."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from mpfa.jit import host, paths, toolkit

DOC = paths.source_root() / "docs" / "kernels" / "sm100_prefill.md"
KERNEL = """
#include "mpfa/sm100/prefill/kernel.cuh"
namespace mpfa::sm100::prefill {
template __global__ void mpfa_sm100_prefill<HEAD_DIM, Pv::FORMAT>(
    const __grid_constant__ PrefillParams);
}
"""
LEDGER = """
#include <cstdio>
#include "mpfa/sm100/prefill/config.h"
using namespace mpfa::sm100::prefill;
int main() {
#define ROW(name) std::printf("%s %d\\n", #name, Arrivals::name)
  ROW(full); ROW(empty); ROW(q_full); ROW(q_empty); ROW(s_full); ROW(s_loaded); ROW(p_ready);
  ROW(p_last); ROW(rescale); ROW(final_stats); ROW(final_read); ROW(o_full); ROW(out_full);
  ROW(out_empty);
  std::printf("barriers %d\\n", kNumBarriers<Config<128>>);
#define BYTES(name, ...) \\
  std::printf(name " %d\\n", \\
              SharedLayout<Config<__VA_ARGS__>>::bytes + SharedLayout<Config<__VA_ARGS__>>::kAlignment)
  BYTES("bytes", 128);
  BYTES("bytes_bf16", 128, Pv::kBf16);
  BYTES("bytes_nvfp4", 128, Pv::kNvfp4);
}
"""


def ledger(folder: Path) -> dict[str, int]:
    source, program = folder / "ledger.cpp", folder / "ledger"
    source.write_text(LEDGER)
    include = paths.source_root() / "include"
    command = [*host.find_compiler(), "-std=c++17", f"-I{include}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    out = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in (line.split() for line in out.splitlines())}


def test_barrier_table_of_the_docs(tmp_path) -> None:
    values = ledger(tmp_path)
    table = DOC.read_text().split("## Barriers")[1].split("## Hazards")[0]
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \|", table, re.M)
    assert [name for name, _, _ in rows] == [
        k for k in values if not k.startswith(("barriers", "bytes"))
    ]
    for name, _, arrivals in rows:
        assert int(arrivals) == values[name], name
    assert sum(int(number) for _, number, _ in rows) == values["barriers"]
    used = {name: v for name, v in values.items() if name.startswith("bytes")}
    print(used)
    assert len(used) == 3 and max(used.values()) <= 232448


def assemble(
    folder: Path, arch: str, head_dim: int, *flags: str, pv: str = "kE4m3"
) -> tuple[Path, str]:
    """(cubin, what ptxas says)."""
    found = toolkit.find_toolkit()
    if found is None:
        pytest.skip(toolkit.missing_text())
    source, cubin = folder / f"kernel{head_dim}.cu", folder / f"kernel{head_dim}_{arch}.cubin"
    source.write_text(KERNEL.replace("HEAD_DIM", str(head_dim)).replace("FORMAT", pv))
    done = subprocess.run(
        [str(found.home / "bin" / "nvcc"), "-std=c++17", "-O3", "-cubin", "-Xptxas", "-v",
         f"-gencode=arch=compute_{arch},code=sm_{arch}", f"-I{paths.source_root() / 'include'}",
         *flags, "-o", str(cubin), str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return cubin, done.stderr


def expected_instructions(arch: str, head_dim: int, pv: str = "kE4m3") -> dict[str, int]:
    """Tensor instructions in the code: both stages once (docs/kernels/sm100_prefill.md)."""
    steps = head_dim // 64
    nvfp4 = "UTCOMMA.4X" if arch == "100a" else "UTCOMMA.BLOCK16"
    found = Counter({"UTCCP": 4 * steps, "UTCHMMA": 2, nvfp4: 2 * steps})
    found.update(
        {"kE4m3": {"UTCQMMA": 8}, "kBf16": {"UTCHMMA": 16}, "kNvfp4": {nvfp4: 4, "UTCCP": 8}}[pv]
    )
    return dict(found)


def tensor_instructions(opcodes: list[str]) -> Counter:
    return Counter(
        ".".join(x.split(".")[:2]) if x.startswith("UTCOMMA") else x.split(".")[0]
        for x in opcodes
        if x.startswith(("UTCOMMA", "UTCHMMA", "UTCQMMA", "UTCCP"))
    )


def opcodes_of(cubin: Path) -> list[str]:
    from benchmarks.sass import tools

    try:
        listing = tools.disassemble(cubin)
    except tools.ToolError as error:
        pytest.skip(str(error))
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", listing)


def assert_no_spills(log: str) -> None:
    assert re.findall(r"(\d+) bytes stack frame", log) == ["0"]
    assert re.findall(r"(\d+) bytes spill stores", log) == ["0"]
    # 512 threads at launch; setmaxnreg moves registers later, and ptxas drops it when it must.
    assert re.findall(r"Used (\d+) registers", log) == ["128"]
    assert "setmaxnreg" not in log


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("arch", ["100a", "103a"])
def test_no_spills_and_the_instructions_intended(arch, head_dim, tmp_path) -> None:
    cubin, log = assemble(tmp_path, arch, head_dim)
    assert_no_spills(log)
    opcodes = opcodes_of(cubin)
    assert tensor_instructions(opcodes) == expected_instructions(arch, head_dim)
    softmax = Counter(x for x in opcodes if x.startswith(("STTM.x8", "F2FP.SATFINITE.E4M3")))
    # The row maximum comes with the load of S where the instruction exists; else a part of the
    # exponentials comes from the FMA pipe (47 of a row's 128 keys).
    on_103 = arch == "103a"
    assert opcodes.count("LDTM.STAT.x32.MAX.F32") == (4 if on_103 else 0)
    assert opcodes.count("FFMA.SAT") == (0 if on_103 else 47)
    assert softmax["STTM.x8"] == 4
    assert sum(softmax.values()) == 4 + 64


@pytest.mark.slow
@pytest.mark.parametrize("pv", ["kBf16", "kNvfp4"])
@pytest.mark.parametrize("arch", ["100a", "103a"])
def test_other_precisions(arch, pv, tmp_path) -> None:
    cubin, log = assemble(tmp_path, arch, 128, pv=pv)
    assert_no_spills(log)
    found = tensor_instructions(opcodes_of(cubin))
    assert found == expected_instructions(arch, 128, pv)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flag",
    ["-DMPFA_SM100_ELEMENTWISE_DELTA=1", *(f"-DMPFA_SM100_SOFTMAX_CUT={n}" for n in (1, 2, 3))],
)
def test_measurement_builds_compile_without_spills(flag, tmp_path) -> None:
    _, log = assemble(tmp_path, "100a", 128, flag)
    assert re.findall(r"(\d+) bytes spill stores", log) == ["0"]
