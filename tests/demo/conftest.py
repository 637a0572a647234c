# SPDX-License-Identifier: Apache-2.0
"""The demo's model is that of the accuracy tests."""

from tests.accuracy.conftest import full_model, two_layers

__all__ = ["full_model", "two_layers"]
