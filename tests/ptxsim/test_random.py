# SPDX-License-Identifier: Apache-2.0
"""Random straight-line programs against the results of a GPU (golden/random_h200.json), bit for bit."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import random_programs
from gpu_twins import simulate_program
from proof_table import PROOF, row
from random_programs import EXCLUDED, PROGRAMS, STEPS

from mpfa.sim import Simulator

GOLDEN = json.loads((Path(__file__).parent / "golden" / "random_h200.json").read_text())
GROUP = 20
SEEDS = [seed for seed in range(PROGRAMS) if seed not in EXCLUDED]


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
def test_matches_the_gpu(
    group: int, sim: Simulator, record_property: Callable[[str, object], None]
) -> None:
    begin = time.perf_counter()
    wrong = []
    seeds = SEEDS[group * GROUP : (group + 1) * GROUP]
    for seed in seeds:
        made = random_programs.program(seed)
        text = random_programs.difference(
            made, simulate_program(made), GOLDEN["programs"][str(seed)]
        )
        if text:
            wrong.append(text)
    seconds = time.perf_counter() - begin
    count = sum(launch["warp_instructions"] for launch in sim.launches())
    result = f"{len(seeds) - len(wrong)} of {len(seeds)} equal"
    name = f"programs {seeds[0]} to {seeds[-1]}, {STEPS} instructions each"
    record_property(PROOF, row(5, name, not wrong, result, count, seconds))
    assert not wrong, "\n".join(wrong)


def test_one_wrong_bit_is_found_and_placed(sim: Simulator) -> None:
    made = random_programs.program(3)
    output = bytearray(simulate_program(made))
    offset, _, step = made.places[40]
    output[17 * made.row + offset] ^= 1
    text = random_programs.difference(made, bytes(output), GOLDEN["programs"]["3"])
    assert f"instruction {step}: {made.opcodes[step]}" in text
