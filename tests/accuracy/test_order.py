# SPDX-License-Identifier: Apache-2.0
"""What the documentation says about SmolLM2, on the whole model (docs/accuracy.md)."""

from __future__ import annotations

import pytest

from mpfa.accuracy.evaluate import AccuracySettings, Evaluation
from mpfa.accuracy.models import LanguageModel
from mpfa.accuracy.report import Analysis
from mpfa.accuracy.rows import parse_rows

KEYS = "fp8,none,mean,channels16+4/6,channels16:centred,mean+channels15,mean+channels15+4/6"


@pytest.mark.slow
def test_order_of_smollm2(full_model: LanguageModel):
    settings = AccuracySettings(tokens=1024, error_tokens=256)
    evaluation = Evaluation(full_model, settings, parse_rows(KEYS))
    measured = evaluation.run()
    analysis = Analysis(measured, full_model, settings.window, settings.seed)
    kl = {r.row.key: r.kl for r in analysis.reports}
    assert kl["none"].low > 2 * kl["mean"].high
    assert kl["mean"].low > kl["fp8"].high
    # Mean and 15 channels are not behind FP8 per tensor; with 4/6 they are ahead of it.
    assert analysis.kl_difference("mean+channels15", "fp8").low <= 0
    assert analysis.kl_difference("mean+channels15+4/6", "fp8").high < 0
    assert analysis.kl_difference("channels16+4/6", "fp8").high < 0
    # Channels chosen by centred moments leave the offsets in: no better than half of direct NVFP4.
    assert kl["channels16:centred"].low > 4 * kl["channels16+4/6"].high
    assert 0.2 < analysis.by_key["channels16:centred"].rec_kl.value < 0.7
    assert analysis.by_key["mean"].rec_kl.low > 0.5
