# SPDX-License-Identifier: Apache-2.0
"""The SM90 decode kernel's PTX in the simulator against the replay 'dequant' of the same plan.

Unwritten bytes of pages and unused pages hold NaN; all watchers are on and asynchronous operations
land as late as they may.
"""

from __future__ import annotations

import decode_cases
import pytest
import sm90_cases
from sm90_cases import QueryCase
from sm90_list import fast_cases, slow_cases


def check(case: QueryCase, modules, simulator) -> None:
    inputs = decode_cases.build(case.case)
    module = modules[str(case.case.head_dim)]
    got = sm90_cases.run(module, modules["combine"], inputs, case.query)
    simulator.check()
    launches = simulator.launches()
    assert "sm90_decode" in launches[0]["kernel"]
    assert all("combine_states" in x["kernel"] for x in launches[1:])
    assert decode_cases.faults(got, sm90_cases.replay(inputs, case.query)) == []


@pytest.mark.parametrize("case", fast_cases(), ids=lambda case: case.name)
def test_matrix(case, modules, simulator):
    check(case, modules, simulator)


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_cases(), ids=lambda case: case.name)
def test_large_matrix(case, modules, simulator):
    check(case, modules, simulator)
