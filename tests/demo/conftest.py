# SPDX-License-Identifier: Apache-2.0
"""The demo's model, shared through the user cache; without its packages tests skip."""

from __future__ import annotations

import pytest

from mpfa.demo.model import DemoModel, load_model, missing_packages


def _load(num_layers: int | None) -> DemoModel:
    missing = missing_packages()
    if missing:
        pytest.skip("; ".join(missing))
    return load_model(num_layers)


@pytest.fixture(scope="session")
def two_layers() -> DemoModel:
    """Embedding, the first two layers and the output projection of SmolLM2-135M."""
    return _load(2)


@pytest.fixture(scope="session")
def full_model() -> DemoModel:
    return _load(None)
