# SPDX-License-Identifier: Apache-2.0
"""The demo's prose; see mpfa.accuracy.text."""

from mpfa.accuracy.text import CALIBRATION, SCORED, read_prose, scored_windows, tokens_of

__all__ = ["CALIBRATION", "SCORED", "read_prose", "scored_windows", "tokens_of"]
