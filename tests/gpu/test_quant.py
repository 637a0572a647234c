# SPDX-License-Identifier: Apache-2.0
"""The quantise, statistics and combine cases on a GPU: make test-gpu."""

import pytest
import quant_cases
import state_cases
import torch

from mpfa.backends import cuda

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
CASES = quant_cases.cases()
CHECKS = state_cases.checks()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_bytes_of_the_reference(case):
    assert quant_cases.check(case, DEVICE, cuda) == []


@pytest.mark.parametrize("check", [c for _, c in CHECKS], ids=[name for name, _ in CHECKS])
def test_states(check):
    assert check(DEVICE, cuda) == []
