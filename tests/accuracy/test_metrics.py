# SPDX-License-Identifier: Apache-2.0
"""Perplexity, KL, agreement, intervals and relative L2 on numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from mpfa.accuracy.metrics import (
    AttentionErrors,
    BlockSums,
    TokenScores,
    attention_errors,
    block_counts,
    block_sums,
    bootstrap_interval,
    concatenate,
    mean_interval,
    recovered,
    relative_l2,
    resample,
    score_log_probs,
    whole_blocks,
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


def test_blocks_count_by_their_tokens():
    assert whole_blocks(block_counts([512])) == 8
    assert whole_blocks(block_counts([511])) == 7
    # Ten windows of two tokens are no ten blocks of 64.
    assert whole_blocks(block_counts([2] * 10)) == 0
    # The tail of a window is no block of its own.
    assert whole_blocks(block_counts([96] * 4)) == 6


def test_blocks_do_not_span_windows():
    values = torch.arange(10.0).view(2, 5)
    blocks = block_sums(values, block=3)
    assert blocks.sums.tolist() == [0 + 1 + 2, 3 + 4, 5 + 6 + 7, 8 + 9]
    assert blocks.counts.tolist() == [3, 2, 3, 2]
    assert float(blocks.mean) == 4.5
    assert block_counts([5, 5], block=3).tolist() == [3, 2, 3, 2]


def test_resample_draws_as_many_blocks_as_there_are():
    weights = resample(7, seed=3, samples=500)
    assert weights.shape == (500, 7)
    assert weights.sum(dim=1).tolist() == [7.0] * 500
    # Each block is drawn once on average; a single draw leaves out about 1/e of them.
    assert weights.mean(dim=0).sub(1).abs().max() < 0.2
    assert float((weights == 0).double().mean()) == pytest.approx((6 / 7) ** 7, abs=0.03)


def test_recovered_fraction_by_hand():
    counts = torch.tensor([2.0, 2.0, 2.0], dtype=torch.float64)
    direct = BlockSums(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), counts)
    quarter = BlockSums(direct.sums / 4, counts)
    # Every block loses a quarter of what direct loses: the paired interval is a point.
    assert recovered(quarter, direct, seed=0) == pytest.approx((0.75, 0.75, 0.75))
    # 1 - 1.5/6; the draws that hold only block 2 or only block 0 are the ends.
    uneven = BlockSums(torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64), counts)
    value, low, high = recovered(uneven, direct, seed=0)
    assert value == pytest.approx(0.75)
    assert 0.0 <= low < 0.75 < high <= 1.0
    # Worse than direct is negative, as a dataset on which the compensation hurts.
    assert recovered(BlockSums(2 * direct.sums, counts), direct, seed=0)[0] == pytest.approx(-1.0)


def test_mean_interval_weighs_short_blocks_by_their_tokens():
    blocks = block_sums(torch.cat([torch.zeros(64), torch.ones(1)])[None])
    assert float(blocks.mean) == pytest.approx(1 / 65)
    assert mean_interval(blocks, seed=0) == (0.0, 1.0)


def test_attention_errors_by_hand():
    exact = torch.zeros(5, 2, 2)
    exact[:, 0, 0], exact[:, 1, 1] = 2.0, 1.0
    out = exact.clone()
    out[4, 0, 0] = 5.0  # error 3 along the vector: the cosine stays 1
    out[:, 1] = torch.tensor([1.0, 1.0])  # error 1 across it: cosine 1/sqrt(2)
    error, norm, cosine = attention_errors([out[:3], out[3:]], [exact[:3], exact[3:]], block=2)
    assert error.tolist() == [[0, 0, 9], [2, 1, 2]]
    assert norm.tolist() == [[8, 4, 8], [2, 1, 2]]
    assert cosine[0].tolist() == [2, 1, 2]
    assert cosine[1].tolist() == pytest.approx([2 / 2**0.5, 1 / 2**0.5, 2 / 2**0.5])
    errors = AttentionErrors(error[None], norm[None], cosine[None], block_counts([3, 2], block=2))
    assert errors.rel_l2_by_head().tolist() == [pytest.approx([(9 / 20) ** 0.5, 1.0])]
    assert errors.cosine_by_head().tolist() == [pytest.approx([1.0, 2**-0.5])]
    low, high = errors.rel_l2_interval(seed=0)
    # Head 0 has its error in one block of three, head 1 the same in all.
    assert low == pytest.approx((0.0 + 1.0) / 2)
    assert high == pytest.approx((float((9 / 8) ** 0.5) + 1.0) / 2)
    assert errors.cosine_interval(seed=0) == pytest.approx(((1 + 2**-0.5) / 2,) * 2)


def test_cosine_of_a_zero_row_is_zero():
    zero = torch.zeros(1, 1, 4)
    _, _, cosine = attention_errors([zero], [torch.ones(1, 1, 4)])
    assert cosine.tolist() == [[0.0]]
