# SPDX-License-Identifier: Apache-2.0
"""Errors of the formats against float64, and data on which a wrong layout cannot pass."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import (
    FORMAT_IDS,
    FORMATS,
    Batch,
    assert_same_bits,
    config_for,
    dense_batch,
    head_rel_l2,
    make_batch,
    offsets,
    paged,
    rel_l2,
    run_decode,
    run_prefill,
    static_stats,
)

import mpfa

EACH_FORMAT = pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=FORMAT_IDS)


def wrapper_error(batch, format, compensation, channels, run=None, **options):
    """(largest per-head rel L2, largest |LSE error| in nats) through a paged cache."""
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels, 128)
    pages = paged(batch, config, stats=stats)
    run = {"out": torch.empty(batch.query.shape), "lse_base": "ln", **(run or {})}
    out, lse = run_prefill(batch, pages.cache, table=pages.table, config=config, run=run, **options)
    truth = {n: v for n, v in options.items() if n != "fixed_split_pages"}
    want, want_lse = dense_batch(batch, sinks=run.get("sinks"), **truth)
    seen = ~torch.isneginf(want_lse)
    assert torch.equal(torch.isneginf(lse), ~seen)
    return head_rel_l2(out, want), (lse - want_lse)[seen].abs().max().item()


def assert_ordered(errors: dict[tuple[str, str], float], *order: tuple[str, str]) -> None:
    for smaller, larger in zip(order, order[1:], strict=False):
        assert errors[smaller] * 1.15 < errors[larger], (smaller, larger, errors)


def test_order_of_the_formats() -> None:
    """Biased and outlier channels, as in keys of real models; then data with neither."""
    exact, mx, none = ("bf16", "none"), ("mxfp8", "none"), ("qk4pv8", "none")
    mean, channels, both = (("qk4pv8", c) for c in ("mean", "channels", "mean+channels"))
    biased = make_batch(
        [80, 20], [120, 300], 4, 2, 128, seed=61, k_bias=2.0, q_bias=0.7, outliers=5.0, scale=0.5
    )
    errors = {(f, c): wrapper_error(biased, f, c, n, causal=True)[0] for f, c, n in FORMATS}
    assert_ordered(errors, exact, both, mean, channels, none)
    assert_ordered(errors, exact, mx, none)
    outliers = make_batch([80, 20], [120, 300], 4, 2, 128, seed=61, outliers=5.0, scale=0.7)
    errors = {(f, c): wrapper_error(outliers, f, c, n, causal=True)[0] for f, c, n in FORMATS}
    assert_ordered(errors, exact, mx, channels, none)
    assert_ordered(errors, exact, mx, both, mean)
    assert errors[exact] < 5e-6


@EACH_FORMAT
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_random_data_bounds(format, compensation, channels, head_dim) -> None:
    """Bounds about 1.5 x what is measured; a swapped scale or head is an error near 1."""
    batch = make_batch([130, 5], [300, 200], 4, 2, head_dim, seed=62)
    bound = {"bf16": 3e-6, "mxfp8": 0.09, "qk4pv8": 0.19}[format]
    lse_bound = {"bf16": 1e-5, "mxfp8": 0.08, "qk4pv8": 0.25}[format]
    error, lse_error = wrapper_error(batch, format, compensation, channels, causal=True)
    assert error < bound and lse_error < lse_bound


VARIANTS = {
    "plain": {},
    "causal": {"causal": True},
    "soft cap": {"causal": True, "logits_soft_cap": 30.0},
    "window": {"causal": True, "window_left": 70},
    "split": {"causal": True, "fixed_split_pages": 1},
    "split and window": {"causal": True, "window_left": 150, "fixed_split_pages": 1},
    "split and soft cap": {"causal": True, "logits_soft_cap": 30.0, "fixed_split_pages": 1},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("compensation,channels", [("mean", 0), ("mean+channels", 15)])
def test_centring_is_undone_in_every_variant(name, with_sinks, compensation, channels) -> None:
    """k_mean rms 12: a row term that is lost, or added twice, moves the LSE by tens of nats."""
    batch = make_batch([140, 9], [300, 140], 4, 2, 64, seed=63, k_bias=12.0, q_bias=1.5)
    assert torch.cat(batch.k).float().mean(0).square().mean().sqrt() >= 10
    sinks = None
    if with_sinks:
        # Sinks that matter: about the logit of the strongest key.
        _, lse = dense_batch(batch, **{n: v for n, v in VARIANTS[name].items() if "split" not in n})
        sinks = lse.median(dim=0).values.float()
    error, lse_error = wrapper_error(
        batch, "qk4pv8", compensation, channels, run={"sinks": sinks}, **VARIANTS[name]
    )
    assert error < 0.25 and lse_error < 0.6


@pytest.mark.parametrize("compensation,channels", [("mean", 0), ("mean+channels", 15)])
def test_row_term_in_the_lse_of_both_bases(compensation, channels) -> None:
    batch = make_batch([9], [140], 4, 2, 64, seed=64, k_bias=12.0, q_bias=1.5)
    stats = static_stats(batch, compensation, channels)
    _, want = dense_batch(batch)
    kwargs = {
        "compensation": compensation,
        "channels": channels,
        "stats": stats,
        "return_lse": True,
    }
    tensors = (batch.q[0], batch.k[0], batch.v[0])
    _, ln = mpfa.single_prefill(*tensors, lse_base="ln", **kwargs)
    _, two = mpfa.single_prefill(*tensors, **kwargs)
    assert (ln - want).abs().max() < 0.6 and want.abs().max() > 10
    torch.testing.assert_close(two * math.log(2.0), ln, rtol=1e-6, atol=0)


@EACH_FORMAT
def test_sink_keys(format, compensation, channels) -> None:
    """The first four keys hold most of the mass and have small values: P must not lose the rest."""
    batch = make_batch([64], [600], 4, 2, 64, seed=65)
    direction = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    k, v, q = batch.k[0].float(), batch.v[0].float(), batch.q[0].float()
    k[:4] = direction
    v = v * 0.3 + 1.0
    v[:4] *= 0.02
    q = q * 0.5 + direction.repeat_interleave(2, dim=0)
    batch.k[0], batch.v[0], batch.q[0] = k.bfloat16(), v.bfloat16(), q.bfloat16()
    _, lse = dense_batch(batch)
    mass = torch.exp(
        torch.einsum("ihd,jhd->ihj", q, k[:4].repeat_interleave(2, dim=1)) / 8 - lse[..., None]
    ).sum(-1)
    assert mass.mean() > 0.5
    error, lse_error = wrapper_error(batch, format, compensation, channels)
    assert (
        error
        < {"bf16": 5e-6, "mxfp8": 0.08, "qk4pv8": 0.25 if compensation == "none" else 0.1}[format]
    )
    assert (
        lse_error
        < {"bf16": 2e-5, "mxfp8": 0.35, "qk4pv8": 0.75 if compensation == "none" else 0.3}[format]
    )


# ---- needles: each query picks one key, so the output is that key's value, exactly ------------


def needle_batch(q_lens, kv_lens, hq=6, hkv=2, d=64, seed=66) -> tuple[Batch, torch.Tensor]:
    """Sign-vector keys; query (i, h) is 4 x the key to find. Also returns the values to get."""
    batch = make_batch(q_lens, kv_lens, hq, hkv, d, seed=seed)
    gen = torch.Generator().manual_seed(seed)
    expected = []
    for b, (lq, lk) in enumerate(zip(q_lens, kv_lens, strict=True)):
        k = torch.randint(0, 2, (lk, hkv, d), generator=gen).float() * 2 - 1
        v = torch.randint(-8, 9, (lk, hkv, d), generator=gen).float()
        target = torch.randint(0, lk, (lq, hq), generator=gen)
        # The first and the last key, and both sides of a page, are always asked for.
        edges = [e for e in (0, lk - 1, 15, 16, 63, 64, 127, 128) if e < lk]
        flat = target.view(-1)
        flat[: len(edges)] = torch.tensor(edges[: flat.numel()])
        head = torch.arange(hq) // (hq // hkv)
        batch.q[b] = (4 * k[target, head]).bfloat16()
        batch.k[b], batch.v[b] = k.bfloat16(), v.bfloat16()
        expected.append(v[target, head])
    return batch, torch.cat(expected)


def assert_found(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Exactly: every format codes the largest P of a row without error (448, or 2^8 in mxfp8)."""
    assert torch.equal(out.float(), expected)


@EACH_FORMAT
@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_needles_through_pages(format, compensation, channels, page_size, kind) -> None:
    if format == "mxfp8" and page_size < 32:
        return
    batch, expected = needle_batch([3, 3, 3], [190, 40, 1100])
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels, page_size)
    pages = paged(batch, config, stats=stats)
    options = {"config": config, "sm_scale": 1.0, "causal": False}
    if kind == "prefill":
        out, _ = run_prefill(batch, pages.cache, table=pages.table, **options)
    else:
        out, _ = run_decode(batch, pages, q_len_per_request=3, **options)
    assert_found(out, expected)


@EACH_FORMAT
@pytest.mark.parametrize("head_dim,heads", [(128, (10, 2)), (256, (7, 1))])
def test_needles_in_ragged_kv(format, compensation, channels, head_dim, heads) -> None:
    batch, expected = needle_batch([3, 0, 140], [190, 20, 300], *heads, head_dim)
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels)
    for kv in (
        batch.kv,
        mpfa.quantize_kv(*batch.kv, config, offsets(batch.kv_lens), stats)
        if format != "bf16"
        else batch.kv,
    ):
        out, _ = run_prefill(batch, kv, config=config, sm_scale=1.0, run={"stats": stats})
        assert_found(out, expected)


# ---- permutations: results move with the data ------------------------------------------------


@EACH_FORMAT
def test_permuting_requests_permutes_results(format, compensation, channels) -> None:
    batch = make_batch([2] * 4, [150, 40, 300, 1], 6, 2, 64, seed=67, k_bias=2.0)
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels, 32)
    out, lse = run_decode(
        batch, paged(batch, config, stats=stats), q_len_per_request=2, config=config
    )
    order = [2, 0, 3, 1]
    moved = batch.select(order)
    out2, lse2 = run_decode(
        moved, paged(moved, config, stats=stats, seed=9), q_len_per_request=2, config=config
    )
    rows = torch.tensor(order).repeat_interleave(2) * 2 + torch.tensor([0, 1] * 4)
    assert_same_bits(out2, out[rows])
    assert_same_bits(lse2, lse[rows])


@EACH_FORMAT
def test_permuting_heads_permutes_results(format, compensation, channels) -> None:
    batch = make_batch([5], [150], 6, 3, 64, seed=68, k_bias=2.0)
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels, 64)
    pages = paged(batch, config, stats=stats)
    out, lse = run_prefill(batch, pages.cache, table=pages.table, config=config)
    kv_order = torch.tensor([2, 0, 1])
    q_order = torch.tensor([4, 5, 1, 0, 2, 3])  # groups move together; inside a group they may swap
    moved = Batch(
        [batch.q[0][:, q_order]],
        [batch.k[0][:, kv_order]],
        [batch.v[0][:, kv_order]],
        batch.shape,
    )
    moved_stats = None
    if stats is not None:
        moved_stats = mpfa.SmoothingStats(
            None if stats.q_mean is None else stats.q_mean[q_order],
            None if stats.k_mean is None else stats.k_mean[kv_order],
            None if stats.channel_index is None else stats.channel_index[kv_order],
        )
    pages = paged(moved, config, stats=moved_stats)
    out2, lse2 = run_prefill(moved, pages.cache, table=pages.table, config=config)
    assert_same_bits(out2, out[:, q_order])
    assert_same_bits(lse2, lse[:, q_order])


@EACH_FORMAT
def test_swapped_pages_change_only_their_request(format, compensation, channels) -> None:
    """Distinct pages: a wrong page table must be visible, and only where it is wrong."""
    batch = make_batch([2] * 3, [96, 128, 90], 4, 2, 64, seed=69)
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels, 32)
    pages = paged(batch, config, stats=stats)
    good, _ = run_decode(batch, pages, q_len_per_request=2, config=config)
    first, second = int(pages.indptr[1]), int(pages.indptr[1]) + 2
    other = int(pages.indices[0])
    pages.indices[first] = other  # a page of request 0
    bad, _ = run_decode(batch, pages, q_len_per_request=2, config=config)
    assert_same_bits(bad[[0, 1, 4, 5]], good[[0, 1, 4, 5]])
    assert rel_l2(bad[2:4], good[2:4].double()) > 0.1
    assert second < int(pages.indptr[2])


@EACH_FORMAT
def test_bytes_beyond_the_length_and_in_other_pages_are_not_used(
    format, compensation, channels
) -> None:
    """0xFF against 0x00 in everything that is not a token of the batch: same bits."""
    batch = make_batch([2] * 3, [97, 1, 33], 4, 2, 64, seed=70, k_bias=1.0)
    stats = static_stats(batch, compensation, channels)
    for page_size in (32, 64, 128):
        config = config_for(batch, format, compensation, channels, page_size)
        poisoned = paged(batch, config, stats=stats)
        clean = mpfa.PagedKVCache.allocate(config, poisoned.cache.num_pages, "cpu", stats)
        for b in range(3):
            mpfa.append_paged_kv_cache(batch.k[b], batch.v[b], clean, poisoned.slots[b])
        a = run_decode(batch, poisoned, q_len_per_request=2, config=config)
        poisoned.cache = clean
        b = run_decode(batch, poisoned, q_len_per_request=2, config=config)
        assert_same_bits(a[0], b[0])
        assert_same_bits(a[1], b[1])


# ---- chunked prefill -------------------------------------------------------------------------


@EACH_FORMAT
@pytest.mark.parametrize("chunks", [[1] * 5 + [95, 100], [64, 64, 72], [150, 50], [199, 1]])
def test_chunked_prefill_equals_one_shot(format, compensation, channels, chunks) -> None:
    """Append chunk by chunk, attend with q_len < kv_len: with static statistics the same bits."""
    total = sum(chunks)
    batch = make_batch([total], [total], 6, 2, 64, seed=71, k_bias=2.0)
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels, 32)
    whole = paged(batch, config, stats=stats)
    options = {"config": config, "causal": True, "window_left": 120}
    want, want_lse = run_prefill(
        batch, whole.cache, table=whole.table, run={"out": torch.empty(total, 6, 64)}, **options
    )
    blank = paged(make_batch([0], [0], 6, 2, 64), config, stats=stats, spare_pages=10)
    slots = whole.slots[0]
    outs, lses, begin = [], [], 0
    for n in chunks:
        rows = slice(begin, begin + n)
        begin += n
        mpfa.append_paged_kv_cache(batch.k[0][rows], batch.v[0][rows], blank.cache, slots[rows])
        part = Batch([batch.q[0][rows]], [batch.k[0][:begin]], [batch.v[0][:begin]], batch.shape)
        used = -(-begin // 32)
        table = (offsets([used]), whole.indices[:used], torch.tensor([(begin - 1) % 32 + 1]).int())
        out, lse = run_prefill(
            part, blank.cache, table=table, run={"out": torch.empty(n, 6, 64)}, **options
        )
        outs.append(out)
        lses.append(lse)
    if format == "mxfp8":
        # V's open block is requantised as it fills: chunks saw other codes of the last 32 tokens.
        assert rel_l2(torch.cat(outs), want.double()) < 0.03
    elif format == "bf16":
        assert rel_l2(torch.cat(outs), want.double()) < 2e-6
    else:
        assert_same_bits(torch.cat(outs), want)
        assert_same_bits(torch.cat(lses), want_lse)


def test_mixed_batch_of_prefill_chunks_and_decodes() -> None:
    """q_len 1 beside long chunks in one prefill call (vLLM issue 49011)."""
    batch = make_batch([1, 200, 1, 7], [700, 200, 3, 130], 6, 2, 64, seed=72)
    for format, compensation, channels in FORMATS:
        error, lse_error = wrapper_error(batch, format, compensation, channels, causal=True)
        assert error < {"bf16": 3e-6, "mxfp8": 0.1, "qk4pv8": 0.2}[format]
        assert lse_error < {"bf16": 1e-5, "mxfp8": 0.1, "qk4pv8": 0.4}[format]


@pytest.mark.parametrize("format,compensation,channels", FORMATS[1:], ids=FORMAT_IDS[1:])
@pytest.mark.parametrize("seed", [73, 74])
def test_pv_is_linear_in_v_and_rows_sum_to_one(format, compensation, channels, seed) -> None:
    """Constant values come back as themselves: row sum and P belong together (FI issue 3838)."""
    batch = make_batch([40], [300], 4, 2, 64, seed=seed, k_bias=1.0)
    batch.v[0] = torch.full_like(batch.v[0], 3.0)
    stats = static_stats(batch, compensation, channels)
    out = mpfa.single_prefill(
        batch.q[0],
        batch.k[0],
        batch.v[0],
        format=format,
        compensation=compensation,
        channels=channels,
        stats=stats,
        causal=True,
    )
    # l is summed before P is coded; coding errors of 300 weights average out.
    assert (out.float() - 3).abs().max() < 3 * 0.04
    assert (out.float().mean() - 3).abs() < 3 * 0.006
