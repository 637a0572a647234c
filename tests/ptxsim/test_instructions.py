# SPDX-License-Identifier: Apache-2.0
"""Every instruction case against the results of a GPU (golden/h200.json), bit for bit.

Approximate functions are held to the case's ulp bound; lg2 near one to the absolute bound 2^-22 that the
manual gives.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path

import gpu_runner
import instr_cases
import pytest
from gpu_twins import close, simulate_case

from mpfa.sim import Simulator

GOLDEN = json.loads((Path(__file__).parent / "golden" / "h200.json").read_text())["cases"]
CASES = {case.name: case for case in instr_cases.all_cases()}


def test_every_case_has_a_golden_result() -> None:
    assert set(CASES) == set(GOLDEN)


@pytest.mark.parametrize("name", sorted(CASES))
def test_matches_the_gpu(name: str, sim: Simulator) -> None:
    case = CASES[name]
    result = simulate_case(case)
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
