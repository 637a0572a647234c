# SPDX-License-Identifier: Apache-2.0
"""Every instruction case against the results of a GPU (golden/h200.json), bit for bit.

Approximate functions are held to the case's ulp bound; lg2 near one to the absolute bound 2^-22 that the
manual gives.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib
from pathlib import Path

import gpu_runner
import instr_cases
import pytest
import torch

from mpfa.sim import Simulator, run_ptx

GOLDEN = json.loads((Path(__file__).parent / "golden" / "h200.json").read_text())["cases"]
CASES = {case.name: case for case in instr_cases.all_cases()}
LG2_ABS = 2.0**-22


def simulate(case: instr_cases.Case) -> bytes:
    data = torch.frombuffer(bytearray(instr_cases.inputs(case)), dtype=torch.uint8)
    out = torch.zeros(instr_cases.THREADS * 16, dtype=torch.uint8)
    blocks = instr_cases.THREADS // instr_cases.BLOCK
    run_ptx(instr_cases.module(case), "k", data, out, grid=(blocks,), block=(instr_cases.BLOCK,))
    return out.numpy().tobytes()


def as_float(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word))[0]


def ordered(word: int) -> int:
    return word if word < 1 << 31 else (1 << 31) - word


def close(case: instr_cases.Case, gpu: int, sim: int) -> bool:
    if gpu == sim:
        return True
    a, b = as_float(gpu), as_float(sim)
    if math.isnan(a) or math.isnan(b):
        return False
    if case.name.startswith("lg2") and abs(a - b) <= LG2_ABS:
        return True
    return abs(ordered(gpu) - ordered(sim)) <= case.ulps


def test_every_case_has_a_golden_result() -> None:
    assert set(CASES) == set(GOLDEN)


@pytest.mark.parametrize("name", sorted(CASES))
def test_matches_the_gpu(name: str, sim: Simulator) -> None:
    case = CASES[name]
    result = simulate(case)
    if not case.ulps:
        assert gpu_runner.summary(case, result) == GOLDEN[name]
        return
    count = instr_cases.THREADS
    gpu = struct.unpack(f"<{count}I", zlib.decompress(base64.b64decode(GOLDEN[name])))
    words = struct.unpack(f"<{count * 4}I", result)[::4]
    wrong = [
        (k, hex(a), hex(b))
        for k, (a, b) in enumerate(zip(gpu, words, strict=True))
        if not close(case, a, b)
    ]
    assert not wrong, f"(thread, gpu, simulator): {wrong[:5]}"
