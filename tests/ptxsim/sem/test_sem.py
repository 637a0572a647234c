# SPDX-License-Identifier: Apache-2.0
"""The simulator's semantic functions: each native program checks one header and prints failures."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .conftest import Program, cuda_includes, cute_includes

GOLDEN = Path(__file__).parent / "h200" / "golden.txt"
# Largest distance in ulp between the simulator (correctly rounded) and the H200, per approximation.
ULPS = {
    "ex2.approx.f32": 2,
    "ex2.approx.ftz.f32": 2,
    "rcp.approx.f32": 1,
    "rcp.approx.ftz.f32": 1,
    "rsqrt.approx.f32": 1,
    "rsqrt.approx.ftz.f32": 1,
    "sqrt.approx.f32": 1,
    "div.approx.f32": 2,
    "div.approx.ftz.f32": 2,
    "div.full.f32": 2,
    "tanh.approx.f32": 2048,
    "ex2.approx.f16": 1,
    "ex2.approx.ftz.bf16": 1,
    "tanh.approx.f16": 1,
    "tanh.approx.bf16": 1,
}


def _lines(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines() if line and not line.startswith("# "))
    return {name: int(value, 16) for name, value in pairs}


def _passed(done: subprocess.CompletedProcess[str]) -> None:
    report = done.stdout.replace("ERROR: cast_smem_ptr_to_uint not supported but used.\n", "")
    assert done.returncode == 0, f"exit {done.returncode}\n{report[-6000:]}{done.stderr[-2000:]}"
    assert " 0 failures" in report


@pytest.mark.parametrize(
    "name",
    [
        "narrow_tables",
        "fp_arith",
        "tma_tiles",
        "mma_values",
        "umma_values",
    ],
)
def test_against_own_model(run_program: Program, name: str) -> None:
    _passed(run_program(name))


def test_cvt_against_cuda_headers(run_program: Program) -> None:
    _passed(run_program("cuda_headers", cuda_includes()))


def test_fragments_against_cute(run_program: Program) -> None:
    _passed(run_program("cute_fragments", cute_includes(), "-O0"))


@pytest.mark.slow
def test_descriptors_against_cute(run_program: Program) -> None:
    _passed(run_program("cute_smem", cute_includes(), "-O0"))


def test_against_h200_goldens(run_program: Program) -> None:
    """h200/probe.cu ran on the GPU named in the first line of golden.txt."""
    golden = GOLDEN.read_text(encoding="ascii")
    assert golden.startswith("# NVIDIA H200, ")
    want = _lines(golden)
    done = run_program("h200/golden")
    assert done.returncode == 0 and "error" not in done.stdout, done.stdout[-2000:]
    got = _lines(done.stdout)
    assert got.keys() == want.keys()
    wrong = []
    for name, value in want.items():
        operation = name.split("#")[0]
        if operation in ULPS:
            if abs(value - got[name]) > ULPS[operation]:
                wrong.append(f"{name}: {got[name]:#x}, H200 {value:#x}")
        elif operation.split(".")[0] not in ("sin", "cos", "lg2") and value != got[name]:
            wrong.append(f"{name}: {got[name]:#x}, H200 {value:#x}")
    assert not wrong, "\n".join(wrong[:20])
