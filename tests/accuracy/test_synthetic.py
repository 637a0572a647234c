# SPDX-License-Identifier: Apache-2.0
"""The synthetic cases: ridges where they should be, and what each compensation does about them."""

from __future__ import annotations

import pytest
import torch

from mpfa.accuracy import synthetic
from mpfa.accuracy.evaluate import AccuracySettings, SyntheticEvaluation
from mpfa.accuracy.rows import parse_rows

SETTINGS = AccuracySettings(tokens=192, window=192, calibration_tokens=192)


def mean_energy(x: torch.Tensor) -> float:
    """Share of the energy that the channel means hold."""
    x = x.float()
    return float(x.mean(dim=0).square().sum() / x.square().mean(dim=0).sum())


def test_seeds_draw_tokens_and_not_the_model():
    first, second = synthetic.activations(512, seed=1), synthetic.activations(512, seed=2)
    assert not torch.equal(first[1][1], second[1][1])
    a, b = (x[1][1].float().mean(dim=0) for x in (first, second))
    assert float((a - b).norm() / a.norm()) < 0.05
    assert torch.equal(first[1][0], synthetic.activations(512, seed=1)[1][0])


def test_ridges_are_offsets_spreads_or_turn_with_the_position():
    cases = {
        name: synthetic.activations(1024, seed=1)[i]
        for i, name in enumerate(synthetic.case_names())
    }
    assert mean_energy(cases["no outliers"][1]) < 0.01
    assert mean_energy(cases["offsets"][1]) > 0.7
    # A part of a rotated offset is no mean any more, but its channels still stand out.
    k = cases["offsets before RoPE"][1]
    assert mean_energy(k) < 0.8 * mean_energy(cases["offsets"][1])
    energy = k.float().square().mean(dim=0)
    assert float((energy.max(dim=1).values / energy.median(dim=1).values).min()) > 10
    spread = cases["offsets and spread"][1].float().std(dim=0)
    assert (spread > 3).sum(dim=1).tolist() == [6, 6]


@pytest.fixture(scope="module")
def errors() -> dict[str, list[float]]:
    keys = "none,kmean,mean,channels16,channels16:centred,mean+channels15"
    results = SyntheticEvaluation(SETTINGS, parse_rows(keys)).run()
    return {m.row.key: m.errors.rel_l2_by_head().mean(dim=1).tolist() for m in results}


def test_centring_removes_offsets_and_nothing_else(errors):
    plain, offsets, spread, rotated = range(4)
    assert errors["mean"][offsets] < 0.25 * errors["none"][offsets]
    assert errors["mean"][plain] == pytest.approx(errors["none"][plain], rel=0.05)
    assert errors["mean"][rotated] > 1.5 * errors["mean"][offsets]
    assert errors["mean"][spread] > 1.2 * errors["mean"][offsets]
    assert errors["kmean"][offsets] > 1.5 * errors["mean"][offsets]


def test_channels_need_no_centring_when_they_are_chosen_uncentred(errors):
    """Moments of centred values do not see an offset: such a choice leaves the ridges in."""
    for case in (1, 2, 3):
        assert errors["channels16"][case] < 1.05 * errors["mean+channels15"][case]
        assert errors["channels16:centred"][case] > 2 * errors["channels16"][case]
