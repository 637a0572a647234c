# SPDX-License-Identifier: Apache-2.0
"""The SM120 kernel's whole case list on a GPU: make test-gpu."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "sm120"))

from case_list import all_cases  # noqa: E402
from sm120_cases import assert_as_replayed, built, launch_on  # noqa: E402

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 12:
    pytest.skip("no GPU of compute capability 12.x", allow_module_level=True)

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def modules():
    from mpfa.backends import kernels
    from mpfa.jit import attention

    kernel = kernels.find_kernel("prefill", backend="sm120")
    return {d: attention.load(attention.attention_spec(kernel, d)) for d in kernel.tilings}


@pytest.mark.parametrize("case", all_cases(), ids=lambda c: c.name)
def test_matrix(case, modules) -> None:
    inputs = built(case)
    assert_as_replayed(inputs, launch_on(inputs, modules[case.head_dim], DEVICE))
