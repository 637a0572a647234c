# SPDX-License-Identifier: Apache-2.0
"""Perplexity, KL, agreement, intervals and relative L2 on numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from mpfa.demo.metrics import (
    TokenScores,
    bootstrap_interval,
    concatenate,
    relative_l2,
    score_log_probs,
)


def test_scores_of_two_tokens_by_hand():
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).log()
    changed = torch.tensor([[0.125, 0.75, 0.125], [0.25, 0.5, 0.25]]).log()
    scores = score_log_probs(changed, torch.tensor([0, 1]), reference)
    # KL(reference || changed) = 0.5 ln 4 + 0.25 ln(1/3) + 0.25 ln 2, then 0 for the second token.
    # The other way round it is 0.564, not 0.592.
    expected = 0.5 * math.log(4) - 0.25 * math.log(3) + 0.25 * math.log(2)
    assert scores.kl.tolist() == pytest.approx([expected, 0.0], abs=1e-7)
    assert scores.nll.tolist() == pytest.approx([math.log(8), math.log(2)])
    assert scores.top1.tolist() == [False, True]
    assert scores.perplexity == pytest.approx(4.0)


def test_reference_scores_have_no_divergence():
    scores = score_log_probs(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([1]), None)
    assert scores.kl.tolist() == [0.0]
    assert scores.top1.tolist() == [True]


def test_concatenate_keeps_the_order():
    chunks = [
        TokenScores(torch.tensor([float(i)]), torch.tensor([2.0 * i]), torch.tensor([i == 1]))
        for i in range(3)
    ]
    joined = concatenate(chunks)
    assert joined.nll.tolist() == [0.0, 1.0, 2.0]
    assert joined.kl.tolist() == [0.0, 2.0, 4.0]
    assert joined.top1.tolist() == [False, True, False]


def test_interval_of_a_constant_is_a_point():
    assert bootstrap_interval(torch.full((300,), 0.5), seed=0) == pytest.approx((0.5, 0.5))


def test_interval_is_that_of_the_mean_and_repeats():
    values = torch.randn(64 * 64, generator=torch.Generator().manual_seed(1)) + 3.0
    low, high = bootstrap_interval(values, seed=0)
    # Independent values: the standard error is 1/64, so +-1.96 of it; the draw adds little.
    assert low == pytest.approx(3.0 - 1.96 / 64, abs=0.02)
    assert high == pytest.approx(3.0 + 1.96 / 64, abs=0.02)
    assert (low, high) == bootstrap_interval(values, seed=0)
    assert (low, high) != bootstrap_interval(values, seed=1)


def test_blocks_widen_the_interval_of_values_that_move_together():
    blocks = torch.randn(32, generator=torch.Generator().manual_seed(2))
    values = blocks.repeat_interleave(64)
    low, high = bootstrap_interval(values, seed=0)
    narrow_low, narrow_high = bootstrap_interval(values, seed=0, block=1)
    assert high - low > 4 * (narrow_high - narrow_low)


def test_short_last_block_counts_by_its_tokens():
    values = torch.cat([torch.zeros(64), torch.ones(1)])
    low, high = bootstrap_interval(values, seed=0)
    assert low == 0.0
    assert high == 1.0
    draws_mean = (0.0 + 2 * (1 / 65) + 1.0) / 4
    assert draws_mean < 0.5  # the two blocks are not taken as equals


def test_relative_l2_per_head():
    exact = torch.zeros(2, 2, 2)
    exact[:, 0] = 3.0
    exact[:, 1] = 4.0
    out = exact.clone()
    out[0, 1, 0] += 4.0
    # Head 1: error 4, norm sqrt(4 * 16) = 8.
    assert relative_l2(out, exact).tolist() == pytest.approx([0.0, 0.5])
