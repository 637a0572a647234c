# SPDX-License-Identifier: Apache-2.0
"""The table's order on the whole model: what the low-bit formats and their repair are worth."""

from __future__ import annotations

import pytest

from mpfa.accuracy.models import LanguageModel
from mpfa.demo.rows import select_rows
from mpfa.demo.run import Demo, DemoSettings

KEYS = ["fp8", "qk4pv8", "qk4pv8-mean", "qk4pv8-channels", "qk4pv8-mean-channels"]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(DemoSettings(tokens=512, num_requests=1, decode_tokens=4), id="512 tokens"),
        pytest.param(DemoSettings(), id="as make demo", marks=pytest.mark.slow),
    ],
)
def test_order_of_the_table(full_model: LanguageModel, settings: DemoSettings):
    """Direct NVFP4 is the worst and centring better; fp8 per tensor and both channel rows come
    next, and the better channel row is not behind fp8."""
    results = {r.row.key: r for r in Demo(full_model, settings, select_rows(KEYS)).run()}
    kl = {key: results[key].kl for key in KEYS}
    assert kl["qk4pv8"] > 2 * kl["qk4pv8-mean"]
    for key in ("fp8", "qk4pv8-channels", "qk4pv8-mean-channels"):
        assert kl[key] < kl["qk4pv8-mean"]
    assert min(kl["qk4pv8-channels"], kl["qk4pv8-mean-channels"]) <= kl["fp8"]
    assert results["bf16"].rel_l2 < 0.003
    assert all(results["bf16"].rel_l2 < results[key].rel_l2 for key in KEYS)
