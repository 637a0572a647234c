# SPDX-License-Identifier: Apache-2.0
"""Seeds, thread counts and hypothesis settings of the whole suite; shared builders on sys.path."""

import os
import random
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

from proof_table import pytest_terminal_summary  # noqa: E402, F401

settings.register_profile(
    "mpfa",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("mpfa")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores; a thread pool in each of them only makes all of them slower.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(1234)
    torch.manual_seed(1234)
