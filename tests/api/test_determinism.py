# SPDX-License-Identifier: Apache-2.0
"""Fixed partitions: a request has the same bits alone, in a batch, and over any pages."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import (
    FORMAT_IDS,
    FORMATS,
    assert_lse_close,
    assert_same_bits,
    config_for,
    make_batch,
    paged,
    rel_l2,
    run_decode,
    run_prefill,
    static_stats,
)

import mpfa

KV_LENS = [1300, 40, 0, 2200, 129]
PAGE_SIZE = {"mxfp8": 64}


def decode_batch(q_len: int, seed: int = 0, heads=(6, 2, 64), kv_lens=None):
    kv_lens = KV_LENS if kv_lens is None else kv_lens
    return make_batch(
        [q_len] * len(kv_lens), kv_lens, *heads, seed=seed, k_bias=2.0, q_bias=0.5, outliers=4.0
    )


def run_options(batch, config, **more):
    """fp32 output, so that no difference is rounded away."""
    return {"config": config, "run": {"out": torch.empty(batch.query.shape)}, **more}


@pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=FORMAT_IDS)
@pytest.mark.parametrize("q_len,window", [(1, -1), (3, -1), (8, 700)])
def test_decode_alone_equals_batched(format, compensation, channels, q_len, window) -> None:
    batch = decode_batch(q_len)
    stats = static_stats(batch, compensation, channels)
    ps = PAGE_SIZE.get(format, 16)
    config = config_for(batch, format, compensation, channels, ps)
    pages = paged(batch, config, stats=stats)
    sinks = torch.linspace(-2, 4, 6)
    more = {"q_len_per_request": q_len, "window_left": window}
    options = run_options(batch, config, **more)
    options["run"]["sinks"] = sinks
    out, lse = run_decode(batch, pages, **options)
    for b in range(batch.size):
        one = batch.select([b])
        mine = paged(one, config, stats=stats, seed=b + 1)
        options = run_options(one, config, **more)
        options["run"]["sinks"] = sinks
        out_b, lse_b = run_decode(one, mine, **options)
        rows = slice(b * q_len, (b + 1) * q_len)
        assert_same_bits(out[rows], out_b)
        assert_same_bits(lse[rows], lse_b)


@pytest.mark.parametrize("heads", [(1, 1, 64), (5, 1, 128), (14, 2, 64), (20, 1, 64)])
@pytest.mark.parametrize("batch_size", [2, 5, 17])
def test_decode_bits_do_not_depend_on_batch_size(heads, batch_size) -> None:
    """Odd head counts and batch sizes move every row to another place in merge and sink steps."""
    q_len = 1
    kv_lens = [1100 + 130 * (b % 3) for b in range(batch_size)]
    batch = decode_batch(q_len, heads=heads, kv_lens=kv_lens)
    config = config_for(batch, "qk4pv8")
    pages = paged(batch, config)
    sinks = torch.linspace(-2, 4, heads[0])
    options = run_options(batch, config)
    options["run"]["sinks"] = sinks
    out, lse = run_decode(batch, pages, **options)
    for b in {0, 1, batch_size - 1}:
        one = batch.select([b])
        options = run_options(one, config)
        options["run"]["sinks"] = sinks
        out_b, lse_b = run_decode(one, paged(one, config), **options)
        assert_same_bits(out[b : b + 1], out_b)
        assert_same_bits(lse[b : b + 1], lse_b)


@pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=FORMAT_IDS)
@pytest.mark.parametrize("split", [None, 8])
def test_prefill_alone_equals_batched(format, compensation, channels, split) -> None:
    batch = make_batch([200, 3, 0, 40], [500, 700, 20, 40], 4, 2, 64, seed=2, k_bias=2.0)
    stats = static_stats(batch, compensation, channels)
    ps = PAGE_SIZE.get(format, 32)
    config = config_for(batch, format, compensation, channels, ps)
    pages = paged(batch, config, stats=stats)
    more = {"causal": True, "window_left": 300, "fixed_split_pages": split}
    out, lse = run_prefill(
        batch, pages.cache, table=pages.table, **run_options(batch, config, **more)
    )
    first = 0
    for b in range(batch.size):
        one = batch.select([b])
        mine = paged(one, config, stats=stats, seed=b + 1)
        out_b, lse_b = run_prefill(
            one, mine.cache, table=mine.table, **run_options(one, config, **more)
        )
        rows = slice(first, first + batch.qo_lens[b])
        first = rows.stop
        assert_same_bits(out[rows], out_b)
        assert_same_bits(lse[rows], lse_b)


@pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=FORMAT_IDS)
def test_page_size_and_order_do_not_change_bits(format, compensation, channels) -> None:
    batch = decode_batch(2, seed=4, kv_lens=[1300, 77, 128])
    stats = static_stats(batch, compensation, channels)
    results = []
    for ps, seed in ((128, 0), (128, 1), (64, 2), (32, 3), (16, 4), (1, 5)):
        if format == "mxfp8" and ps < 32:
            continue
        config = config_for(batch, format, compensation, channels, ps)
        pages = paged(batch, config, stats=stats, seed=seed)
        results.append(run_decode(batch, pages, **run_options(batch, config, q_len_per_request=2)))
    for out, lse in results[1:]:
        assert_same_bits(out, results[0][0])
        assert_same_bits(lse, results[0][1])


@pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=FORMAT_IDS)
def test_partitions_change_rounding_only(format, compensation, channels) -> None:
    """Split and unsplit prefill of one cache: equal to fp32 rounding where P has no codes."""
    batch = make_batch([6, 130], [900, 700], 4, 2, 64, seed=6, k_bias=2.0)
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels, 128)
    pages = paged(batch, config, stats=stats)
    whole, lse = run_prefill(
        batch, pages.cache, table=pages.table, **run_options(batch, config, causal=True)
    )
    for split in (1, 2, 5):
        out, lse_split = run_prefill(
            batch,
            pages.cache,
            table=pages.table,
            **run_options(batch, config, causal=True, fixed_split_pages=split),
        )
        # P is coded against another running max in each partition: half an e4m3 step per weight.
        assert rel_l2(out, whole) <= (2e-6 if format == "bf16" else 3e-2)
        assert_lse_close(lse_split, lse, 2e-5)


def test_decode_row_equals_prefill_row() -> None:
    """One query over the same cache, same partitions: the two wrappers give the same bits."""
    for format, compensation, channels in FORMATS:
        batch = decode_batch(1, seed=7, kv_lens=[1300, 40, 128])
        stats = static_stats(batch, compensation, channels)
        config = config_for(batch, format, compensation, channels, 128)
        pages = paged(batch, config, stats=stats)
        out, lse = run_decode(batch, pages, **run_options(batch, config))
        other, other_lse = run_prefill(
            batch,
            pages.cache,
            table=pages.table,
            **run_options(batch, config, causal=True, fixed_split_pages=8),
        )
        assert rel_l2(out, other) < 1e-6, (format, compensation)
        assert_lse_close(lse, other_lse, 1e-5)


def test_same_call_twice_has_the_same_bits() -> None:
    batch = decode_batch(3)
    config = config_for(batch, "qk4pv8", page_size=16)
    pages = paged(batch, config)
    options = {**batch.heads, "page_size": 16, "q_len_per_request": 3, "config": config}
    size = mpfa.workspace_size(*pages.table, num_sm=148, **options)
    wrapper = mpfa.BatchDecodeWrapper(torch.full((size,), 255, dtype=torch.uint8))
    wrapper.plan(*pages.table, **options)
    first = wrapper.run(batch.query, pages.cache, return_lse=True)
    second = wrapper.run(batch.query, pages.cache, return_lse=True)
    wrapper.plan(*pages.table, **options)
    third = wrapper.run(batch.query, pages.cache, return_lse=True)
    for other in (second, third):
        assert_same_bits(other[0], first[0])
        assert_same_bits(other[1], first[1])


@pytest.mark.parametrize("q_len", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("causal", [True, False])
def test_draft_tokens_of_several_requests(q_len: int, causal: bool) -> None:
    """q_len >= 5 with batch > 1 corrupted later requests elsewhere (FlashInfer issue 4382)."""
    batch = decode_batch(q_len, seed=9, kv_lens=[1040, 17, 130, q_len])
    config = config_for(batch, "bf16", page_size=16)
    pages = paged(batch, config)
    from attention_cases import dense_batch

    options = run_options(batch, config, q_len_per_request=q_len, causal=causal)
    out, lse = run_decode(batch, pages, **options)
    want, want_lse = dense_batch(batch, causal=causal)
    assert rel_l2(out, want) < 5e-6
    assert_lse_close(lse, want_lse * math.log2(math.e), 5e-5)


@pytest.mark.parametrize("format,compensation,channels", FORMATS[1:], ids=FORMAT_IDS[1:])
def test_bits_do_not_depend_on_the_number_of_threads(format, compensation, channels) -> None:
    batch = make_batch([97, 50], [97, 900], 7, 1, 64, seed=10)
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            options = run_options(batch, config, causal=True, logits_soft_cap=30.0)
            options["run"] |= {"stats": stats, "sinks": torch.linspace(-1, 2, 7)}
            results.append(run_prefill(batch, batch.kv, **options))
    finally:
        torch.set_num_threads(threads)
    for out, lse in results[1:]:
        assert_same_bits(out, results[0][0])
        assert_same_bits(lse, results[0][1])
