# SPDX-License-Identifier: Apache-2.0
"""Several passes of a CTA, which only calls with many thousand tokens get: a build of the qk4pv8
module that takes them for few tokens too, in the simulator."""

from dataclasses import replace

import pytest
import quant_cases
import torch

from mpfa.backends import cuda
from mpfa.jit import cuda as jit
from mpfa.jit import quant

CASES = [
    quant_cases.Case("append", "qk4pv8", 300, 128, seed=60),
    quant_cases.Case("append", "qk4pv8", 150, 16, "mean", group_size=3, slots="skip", seed=61),
    quant_cases.Case("append", "qk4pv8", 140, 128, "channels", 16, True, slots="skip", seed=62),
    quant_cases.Case("append", "qk4pv8", 300, 128, "mean+channels", 15, True, with_q=True, seed=63),
    quant_cases.Case("append", "qk4pv8", 270, 16, "mean+channels", 15, per_request=True, seed=64),
    quant_cases.Case("kv", "qk4pv8", 290, compensation="mean", view="odd", seed=65),
    quant_cases.Case("query", "qk4pv8", 260, compensation="mean+channels", channels=4, seed=66),
]


@pytest.fixture(scope="module")
def many_passes(simulated):
    base = quant.QK4PV8[128]
    spec = replace(base, name=f"{base.name}_passes", flags=(*base.flags, "-DMPFA_QUANT_FEW_CTAS=0"))
    before = jit.replace_module(base, jit.load(spec))
    yield
    jit.replace_module(base, before)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_passes_give_the_bytes_of_the_reference(many_passes, target, case):
    assert quant_cases.check(case, torch.device("cpu"), cuda) == []
    heads = case.num_kv_heads if case.kind != "query" else case.num_kv_heads * case.group_size
    heads += case.num_kv_heads * case.group_size if case.with_q else 0
    # 16 tokens a pass at head dimension 128, four passes or eight.
    passes = 8 if "mean" in case.compensation or case.four_over_six else 4
    grid = target.launches()[-1]["grid"]
    assert list(grid)[:2] == [heads, -(-case.tokens // (16 * passes))]
