# SPDX-License-Identifier: Apache-2.0
"""Every case of every attention kernel on a GPU: make test-gpu (docs/testing.md).

Cases of other architectures are skipped with the reason. Each case runs in the worker process of
tests/gpu/matrix.py: NaN in everything that is not an operand, guard bands, 20 runs with equal bits,
half of them replays of a captured graph.
"""

import pytest
import summary
import torch

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from families import families  # noqa: E402
from kernel_runner import first_lines  # noqa: E402

CASES = [
    pytest.param(family, index, id=f"{family.name}-{case.name}")
    for family in families().values()
    for index, case in enumerate(family.cases())
]


@pytest.mark.parametrize(("family", "index"), CASES)
def test_case(family, index, matrix, record_property) -> None:
    refusal = family.refusal(torch.cuda.get_device_capability())
    reply = {"skipped": refusal} if refusal else matrix.run(family.name, index)
    record_property(summary.MATRIX, summary.entry(family.name, len(family.cases()), reply))
    if "skipped" in reply:
        pytest.skip(reply["skipped"])
    assert "error" not in reply, reply["error"]
    assert reply["faults"] == [], first_lines(reply["faults"], 12)
