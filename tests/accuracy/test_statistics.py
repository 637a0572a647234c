# SPDX-License-Identifier: Apache-2.0
"""Which statistics a row gets, and over which tokens its own means run."""

from __future__ import annotations

import pytest
import torch

import mpfa
from mpfa.accuracy import synthetic
from mpfa.accuracy.attention import PagedRunner, own_means
from mpfa.accuracy.rows import parse_row
from mpfa.accuracy.statistics import Statistics
from mpfa.page_table import RequestPages

SAMPLES = synthetic.activations(64, seed=0)


@pytest.fixture(scope="module")
def statistics() -> Statistics:
    return Statistics(SAMPLES)


def test_static_rows_get_what_calibrate_gives(statistics):
    q, k, _ = SAMPLES[1]
    for key, channels, center in (
        ("mean", 0, True),
        ("channels7", 7, False),
        ("mean+channels7", 7, True),
    ):
        made = statistics.smoothing(parse_row(key))
        assert list(made) == [0, 1, 2, 3]
        want = mpfa.calibrate([(q, k)], channels=channels, center=center)
        for field in ("q_mean", "k_mean", "channel_index"):
            got, expected = getattr(made[1], field), getattr(want, field)
            assert (got is None) == (expected is None)
            assert got is None or torch.equal(got, expected)
    for key in ("none", "mean:request", "mxfp8", "eigen4"):
        assert statistics.smoothing(parse_row(key)) is None


def test_studies_change_one_thing_only(statistics):
    both, k_only = (statistics.smoothing(parse_row(k))[1] for k in ("mean", "kmean"))
    assert not k_only.q_mean.any() and torch.equal(k_only.k_mean, both.k_mean)
    centred = statistics.smoothing(parse_row("mean+channels15"))[1]
    study = statistics.smoothing(parse_row("channels15:centred"))[1]
    assert study.q_mean is None and torch.equal(study.channel_index, centred.channel_index)
    own = statistics.smoothing(parse_row("channels15"))[1]
    assert not torch.equal(own.channel_index, study.channel_index)


def test_rows_share_statistics_where_they_may(statistics):
    plain, scaled = (statistics.smoothing(parse_row(k)) for k in ("mean", "mean+4/6"))
    assert plain is scaled
    assert statistics.bases(parse_row("eigen4")) is statistics.bases(parse_row("eigen4+4/6"))
    assert statistics.bases(parse_row("mean+eigen4:request")) is None


def test_own_means_run_over_the_first_tokens_of_each_request():
    q = torch.arange(7.0)[:, None, None].expand(7, 2, 64).contiguous()
    k = 10 * q[:, :1]
    step = RequestPages(2, 16).step([0, 0], [4, 3])
    index = torch.tensor([[3]], dtype=torch.int32)
    static = mpfa.SmoothingStats(channel_index=index)
    first = own_means(parse_row("mean:first2"), q, k, step, static)
    # Tokens 0, 1 of the first request and 4, 5 of the second.
    assert first.q_mean[:, 0, 0].tolist() == [0.5, 4.5]
    assert first.k_mean[:, 0, 0].tolist() == [5.0, 45.0]
    assert first.channel_index is index
    whole = own_means(parse_row("mean:request"), q, k, step, None)
    assert whole.q_mean[:, 1, 5].tolist() == [1.5, 5.0]
    # More than a request has: all of it.
    longer = own_means(parse_row("mean:first99"), q, k, step, None)
    assert torch.equal(longer.k_mean, whole.k_mean)


def test_frozen_means_stay_those_of_the_first_step():
    """A second step is centred by the means of the first, as a cache that is already written needs."""
    q, k, v = SAMPLES[1]
    runner = PagedRunner(synthetic.GEOMETRY, parse_row("mean:request"), [64], layers=[1])
    runner.begin([40])
    runner.attend(1, q[:40], k[:40], v[:40])
    kept = runner._stats[1]
    runner.begin([24])
    out = runner.attend(1, q[40:], k[40:], v[40:])
    assert runner._stats[1] is kept
    assert torch.equal(kept.k_mean[0], k[:40].double().mean(dim=0).float())
    whole = PagedRunner(synthetic.GEOMETRY, parse_row("mean:first40"), [64], layers=[1])
    whole.begin([64])
    expected = whole.attend(1, q, k, v)[40:]
    assert float((out - expected).double().norm() / expected.double().norm()) < 0.01
