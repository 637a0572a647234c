# SPDX-License-Identifier: Apache-2.0
"""The demo's language model: SmolLM2-135M-Instruct, from the GGUF file in a PyPI wheel."""

from __future__ import annotations

from mpfa.accuracy.models import (
    SMOLLM2,
    LanguageModel,
    ModelUnavailableError,
    load_packaged,
    missing_packages,
)

__all__ = ["MODEL_NAME", "LanguageModel", "ModelUnavailableError", "load_model", "missing_packages"]

MODEL_NAME = SMOLLM2.name


def load_model(num_layers: int | None = None, *, verbose: bool = True) -> LanguageModel:
    """SmolLM2; arguments and errors as mpfa.accuracy.models.load_packaged()."""
    return load_packaged(SMOLLM2, num_layers, verbose=verbose)
