# SPDX-License-Identifier: Apache-2.0
"""Random straight-line programs against the results of a GPU (golden/random_h200.json), bit for bit."""

from __future__ import annotations

import ctypes
import json
from collections import Counter
from pathlib import Path

import gpu_runner
import pytest
import random_programs
import torch
from random_programs import EXCLUDED, PROGRAMS, STEPS, Program

from mpfa.sim import Simulator, run_ptx

GOLDEN = json.loads((Path(__file__).parent / "golden" / "random_h200.json").read_text())
GROUP = 20
SEEDS = [seed for seed in range(PROGRAMS) if seed not in EXCLUDED]
FRESH = range(10_000, 10_040)


def simulate(made: Program) -> bytes:
    data = torch.frombuffer(
        bytearray(random_programs.inputs(made.seed, made.lanes)), dtype=torch.uint8
    )
    out = torch.zeros(made.row * made.lanes, dtype=torch.uint8)
    run_ptx(made.text, "k", data, out, block=(made.lanes,))
    return out.numpy().tobytes()


def test_the_golden_file_is_of_these_programs() -> None:
    assert GOLDEN["version"] == random_programs.VERSION
    assert "H200" in GOLDEN["gpu"] and GOLDEN["driver"][0].isdigit()
    assert set(GOLDEN["programs"]) == {str(seed) for seed in range(PROGRAMS)}
    assert len(SEEDS) >= 200


def test_programs_are_long_and_varied() -> None:
    opcodes: Counter[str] = Counter()
    for seed in SEEDS:
        made = random_programs.program(seed)
        assert len(made.opcodes) == STEPS
        opcodes.update(made.opcodes)
    assert len(opcodes) >= 1000
    bases = {opcode.split(".")[0] for opcode in opcodes}
    assert {"add", "mad", "bfe", "lop3", "prmt", "fma", "div", "cvt", "setp", "redux"} <= bases


@pytest.mark.parametrize("group", range((len(SEEDS) + GROUP - 1) // GROUP))
def test_matches_the_gpu(group: int, sim: Simulator) -> None:
    wrong = []
    for seed in SEEDS[group * GROUP : (group + 1) * GROUP]:
        made = random_programs.program(seed)
        text = random_programs.difference(made, simulate(made), GOLDEN["programs"][str(seed)])
        if text:
            wrong.append(text)
    assert not wrong, "\n".join(wrong)


def test_one_wrong_bit_is_found_and_placed(sim: Simulator) -> None:
    made = random_programs.program(3)
    output = bytearray(simulate(made))
    offset, _, step = made.places[40]
    output[17 * made.row + offset] ^= 1
    text = random_programs.difference(made, bytes(output), GOLDEN["programs"]["3"])
    assert f"instruction {step}: {made.opcodes[step]}" in text


@pytest.fixture(scope="module")
def gpu() -> gpu_runner.Gpu:
    """GPU 0 with a compiler that does not merge instructions. Skips where there is no GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
        device = gpu_runner.Gpu()
    except (OSError, gpu_runner.DriverError) as error:
        pytest.skip(f"no GPU: {error}")
    random_programs.unoptimised(device)
    return device


def native(device: gpu_runner.Gpu, made: Program) -> bytes:
    data = random_programs.inputs(made.seed, made.lanes)
    return device.run(made.text, data, made.row * made.lanes, 1, made.lanes)


@pytest.mark.gpu
def test_the_gpu_here_gives_the_golden_results(gpu: gpu_runner.Gpu) -> None:
    wrong = []
    for seed in SEEDS:
        made = random_programs.program(seed)
        text = random_programs.difference(made, native(gpu, made), GOLDEN["programs"][str(seed)])
        if text:
            wrong.append(text.replace("gpu", "golden").replace("simulator", "gpu"))
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", FRESH)
def test_programs_without_golden_results(seed: int, gpu: gpu_runner.Gpu, sim: Simulator) -> None:
    made = random_programs.program(seed)
    if any(opcode[:4] == "set." and ".f32.f32" in opcode for opcode in made.opcodes):
        pytest.skip("has a set with an f32 result: random_programs.EXCLUDED says why")
    golden = random_programs.golden_entry(made, native(gpu, made))
    assert random_programs.difference(made, simulate(made), golden) == ""
