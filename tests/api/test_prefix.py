# SPDX-License-Identifier: Apache-2.0
"""Prefix caching: with static statistics a shared page is as good as an own one, bit for bit."""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    FORMAT_IDS,
    FORMATS,
    Batch,
    Paged,
    assert_same_bits,
    config_for,
    int32,
    make_batch,
    paged,
    rel_l2,
    run_decode,
    static_stats,
)

import mpfa


@pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=FORMAT_IDS)
def test_a_prefix_hit_equals_a_cold_run(format, compensation, channels) -> None:
    """Three requests share two pages; each has a tail of its own (TensorRT-LLM issue 2699)."""
    ps, prefix = 64, 128
    batch = make_batch([2] * 3, [150, 128, 300], 4, 2, 64, seed=91, k_bias=3.0)
    for b in (1, 2):
        batch.k[b][:prefix] = batch.k[0][:prefix]
        batch.v[b][:prefix] = batch.v[0][:prefix]
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels, ps)
    cold = paged(batch, config, stats=stats)
    want, want_lse = run_decode(batch, cold, q_len_per_request=2, config=config)
    # Request 0 writes the prefix; the tails of the others are appended behind it.
    cache = mpfa.PagedKVCache.allocate(config, 9, "cpu", stats)
    tables = [[7, 2, 4], [7, 2], [7, 2, 5, 0, 1]]
    for b, table in enumerate(tables):
        begin = 0 if b == 0 else prefix
        position = torch.arange(begin, batch.kv_lens[b])
        slots = torch.tensor(table)[position // ps] * ps + position % ps
        mpfa.append_paged_kv_cache(batch.k[b][begin:], batch.v[b][begin:], cache, slots)
    shared = Paged(cache, int32([0, 3, 5, 10]), int32(sum(tables, [])), int32([22, 64, 44]))
    out, lse = run_decode(batch, shared, q_len_per_request=2, config=config)
    assert_same_bits(out, want)
    assert_same_bits(lse, want_lse)


def test_per_request_means_do_not_survive_sharing() -> None:
    """Why static statistics are the default: a page centred by another request's mean is wrong."""
    batch = make_batch([1, 1], [128, 128], 4, 2, 64, seed=92, k_bias=3.0)
    batch.k[1] = batch.k[0] * 0.5
    config = config_for(batch, "qk4pv8", "mean", 0, 64)
    stats = mpfa.SmoothingStats.from_tensors(
        batch.query, batch.kv[0], int32([0, 1, 2]), kv_indptr=int32([0, 128, 256])
    )
    pages = paged(batch, config, stats=stats)
    run = {"stats": stats}
    own, own_lse = run_decode(batch, pages, config=config, run=run)
    pages.indices[2:4] = pages.indices[0:2]
    shared, shared_lse = run_decode(batch, pages, config=config, run=run)
    same = Batch([batch.q[1]], [batch.k[0]], [batch.v[0]], batch.shape)
    single = mpfa.SmoothingStats(stats.q_mean[:1].clone(), stats.k_mean[:1].clone())
    right, right_lse = run_decode(
        same, paged(same, config, stats=single), config=config, run={"stats": single}
    )
    assert_same_bits(shared[0], own[0])
    assert (shared_lse[1] - right_lse[0]).abs().max() > 1
    assert rel_l2(shared[1], right[0].double()) > 0
