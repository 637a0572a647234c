# SPDX-License-Identifier: Apache-2.0
"""The simulator against the GPU of this machine: make test-gpu. The cases are in tests/ptxsim."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ptxsim"))

import gpu_twins  # noqa: E402

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() != gpu_twins.CAPABILITY:
    pytest.skip("the programs are PTX for sm_90a", allow_module_level=True)


def test_every_instruction_and_random_program_is_equal_on_both():
    outcome = gpu_twins.compare(fresh=40)
    assert outcome.differences == []
    assert outcome.instructions >= 900 and outcome.programs >= 340
