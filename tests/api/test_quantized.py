# SPDX-License-Identifier: Apache-2.0
"""quantize_query, quantize_kv and the paths that take their results."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from attention_cases import (
    FORMAT_IDS,
    FORMATS,
    assert_same_bits,
    config_for,
    int32,
    make_batch,
    offsets,
    paged,
    run_decode,
    run_prefill,
    static_stats,
)

import mpfa

LOW_BIT = pytest.mark.parametrize("format,compensation,channels", FORMATS[1:], ids=FORMAT_IDS[1:])


def mixed_batch(**options):
    return make_batch(
        [40, 0, 3, 130], [70, 20, 0, 200], 6, 2, 64, seed=21, k_bias=2.0, outliers=4.0, **options
    )


@LOW_BIT
def test_shapes_and_dtypes(format, compensation, channels) -> None:
    batch = mixed_batch()
    config = config_for(batch, format, compensation, channels)
    stats = static_stats(batch, compensation, channels)
    q = mpfa.quantize_query(batch.query, config, stats)
    kv = mpfa.quantize_kv(*batch.kv, config, offsets(batch.kv_lens), stats)
    u8, e4m3, e8m0 = torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu
    n, m = 173, 290
    want_q = (u8, 32, u8, 4) if format == "qk4pv8" else (e4m3, 64, e8m0, 2)
    assert (q.q.dtype, q.q_scale.dtype) == want_q[::2]
    assert q.q.shape == (n, 6, want_q[1]) and q.q_scale.shape == (n, 6, want_q[3])
    assert (kv.k.dtype, kv.k_scale.dtype) == want_q[::2]
    assert kv.k.shape == (m, 2, want_q[1]) and kv.k_scale.shape == (m, 2, want_q[3])
    assert kv.v.dtype == e4m3 and kv.v.shape == (m, 2, 64)
    if format == "mxfp8":
        # sum of ceil(len/32): 3 + 1 + 0 + 7
        assert kv.v_scale.dtype == e8m0 and kv.v_scale.shape == (11, 2, 64)
    else:
        assert kv.v_scale is None
    mean = "mean" in compensation
    assert (q.row_term is not None) == mean and (kv.aux_delta is not None) == mean
    if mean:
        assert q.row_term.dtype == torch.float32 and q.row_term.shape == (n, 6)
        assert kv.aux_delta.dtype == torch.bfloat16 and kv.aux_delta.shape == (6, m)
    assert (kv.aux_channels is not None) == bool(channels)
    if channels:
        assert kv.aux_channels.shape == (m, 2, channels)
    if compensation == "none":
        assert q.a_comp is None
    else:
        assert q.a_comp.shape == (n, 6, 16) and q.a_comp.dtype == torch.bfloat16
        assert not mean or (q.a_comp[..., 0] == 1).all()
        assert (q.a_comp[..., int(mean) + channels :] == 0).all()
    assert q.num_tokens == n and kv.num_tokens == m and q.device.type == kv.device.type == "cpu"


@LOW_BIT
def test_query_path_equals_raw_path(format, compensation, channels) -> None:
    batch = mixed_batch()
    config = config_for(batch, format, compensation, channels, 64)
    stats = static_stats(batch, compensation, channels)
    pages = paged(batch, config, stats=stats)
    options = {"table": pages.table, "config": config, "causal": True}
    raw = run_prefill(batch, pages.cache, **options)
    query = mpfa.quantize_query(batch.query, config, stats)
    ready = run_prefill(batch, pages.cache, q=query, **options)
    assert_same_bits(raw[0], ready[0])
    assert_same_bits(raw[1], ready[1])
    assert ready[0].dtype == torch.bfloat16


@LOW_BIT
def test_float16_query_gives_float16_output(format, compensation, channels) -> None:
    batch = mixed_batch(dtype=torch.float16)
    config = config_for(batch, format, compensation, channels, 64)
    stats = static_stats(batch, compensation, channels)
    pages = paged(batch, config, stats=stats)
    options = {"table": pages.table, "config": config}
    raw, _ = run_prefill(batch, pages.cache, **options)
    query = mpfa.quantize_query(batch.query, config, stats)
    ready, _ = run_prefill(batch, pages.cache, q=query, **options)
    assert raw.dtype == ready.dtype == torch.float16
    assert_same_bits(raw, ready)


@LOW_BIT
def test_ragged_and_paged_give_the_same_bits(format, compensation, channels) -> None:
    batch = mixed_batch()
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels)
    indptr = offsets(batch.kv_lens)
    run = {"out": torch.empty(batch.query.shape), "stats": stats}
    options = {"config": config, "causal": True, "window_left": 90}
    raw = run_prefill(batch, batch.kv, run=run, **options)
    kv = mpfa.quantize_kv(*batch.kv, config, indptr, stats)
    run = {"out": torch.empty(batch.query.shape)}
    quantised = run_prefill(batch, kv, run=run, **options)
    assert_same_bits(raw[0], quantised[0])
    assert_same_bits(raw[1], quantised[1])
    for page_size in (32, 128):
        config = config_for(batch, format, compensation, channels, page_size)
        pages = paged(batch, config, stats=stats)
        run = {"out": torch.empty(batch.query.shape)}
        got = run_prefill(
            batch, pages.cache, table=pages.table, run=run, **{**options, "config": config}
        )
        assert_same_bits(raw[0], got[0])
        assert_same_bits(raw[1], got[1])


@pytest.mark.parametrize("compensation,channels", [("mean", 0), ("mean+channels", 15)])
def test_per_request_stats_ragged_and_paged(compensation, channels) -> None:
    """run() on raw K/V computes the means itself; from_tensors gives the same, also over pages."""
    batch = mixed_batch()
    batch.k[3] = batch.k[3] + 4  # requests with means of their own
    config = config_for(batch, "qk4pv8", compensation, channels, 64)
    index = None
    if channels:
        index = static_stats(batch, "channels", channels).channel_index
    qo, kv_indptr = offsets(batch.qo_lens), offsets(batch.kv_lens)
    q, (k, v) = batch.query, batch.kv
    stats = mpfa.SmoothingStats.from_tensors(q, k, qo, kv_indptr=kv_indptr, channel_index=index)
    run = {"out": torch.empty(q.shape), "stats": stats}
    given = run_prefill(batch, (k, v), run=run, config=config, causal=True)
    if not channels:
        run = {"out": torch.empty(q.shape)}
        own = run_prefill(batch, (k, v), run=run, config=config, causal=True)
        assert_same_bits(given[0], own[0])
        assert_same_bits(given[1], own[1])
    quantised = mpfa.quantize_kv(k, v, config, kv_indptr, stats)
    pages = paged(batch, config, stats=stats)
    rows = torch.repeat_interleave(torch.arange(4), torch.tensor(batch.qo_lens)).to(torch.int32)
    query = mpfa.quantize_query(q, config, stats, rows)
    for kv, table, given_q in (
        (quantised, None, None),
        (quantised, None, query),
        (pages.cache, pages.table, None),
        (pages.cache, pages.table, query),
    ):
        run = {"out": torch.empty(q.shape), "stats": stats}
        got = run_prefill(batch, kv, table=table, q=given_q, run=run, config=config, causal=True)
        assert_same_bits(given[0], got[0])
        assert_same_bits(given[1], got[1])


def test_decode_with_a_quantised_query_and_per_request_stats() -> None:
    batch = make_batch([2, 2], [50, 300], 4, 2, 64, seed=5, k_bias=3.0)
    config = config_for(batch, "qk4pv8", "mean", 0, 16)
    stats = mpfa.SmoothingStats.from_tensors(
        batch.query, batch.kv[0], offsets([2, 2]), kv_indptr=offsets([50, 300])
    )
    pages = paged(batch, config, stats=stats)
    query = mpfa.quantize_query(batch.query, config, stats, int32([0, 0, 1, 1]))
    more = {"config": config, "q_len_per_request": 2, "run": {"stats": stats}}
    raw = run_decode(batch, pages, **more)
    ready = run_decode(batch, pages, q=query, **more)
    assert_same_bits(raw[0], ready[0])
    assert_same_bits(raw[1], ready[1])


def quantised_pair(compensation="mean"):
    batch = mixed_batch()
    config = config_for(batch, "qk4pv8", compensation, 0, 64)
    stats = static_stats(batch, compensation, 0)
    kv = mpfa.quantize_kv(*batch.kv, config, offsets(batch.kv_lens), stats)
    return batch, config, stats, kv


def test_kv_of_other_requests_is_refused() -> None:
    batch, config, stats, _ = quantised_pair()
    for indptr, match in (
        (offsets([20, 70, 0, 200]), r"kv.indptr: .*\[0, 20, 90"),
        (offsets([90, 0, 0, 100, 100]), "kv.indptr"),
    ):
        other = mpfa.quantize_kv(*batch.kv, config, indptr, stats)
        with pytest.raises(ValueError, match=match):
            run_prefill(batch, other, config=config)
    k, v = batch.kv
    short = mpfa.quantize_kv(k[:-1], v[:-1], config, offsets([70, 20, 0, 199]), stats)
    with pytest.raises(ValueError, match="kv: the plan has 290 KV tokens, got 289"):
        run_prefill(batch, short, config=config)


def test_the_indptr_of_quantised_kv_is_its_own() -> None:
    """Changing the caller's indptr afterwards must not change what was quantised."""
    batch, config, stats, _ = quantised_pair()
    indptr = offsets(batch.kv_lens)
    kv = mpfa.quantize_kv(*batch.kv, config, indptr, stats)
    indptr.zero_()
    run_prefill(batch, kv, config=config)


def test_other_stats_objects_are_refused() -> None:
    batch, config, stats, kv = quantised_pair()
    twin = mpfa.SmoothingStats(stats.q_mean, stats.k_mean)
    with pytest.raises(ValueError, match="stats: K was quantised with another SmoothingStats"):
        run_prefill(batch, kv, config=config, run={"stats": twin})
    query = mpfa.quantize_query(batch.query, config, twin)
    with pytest.raises(ValueError, match="q: quantised with another SmoothingStats"):
        run_prefill(batch, kv, q=query, config=config)
    pages = paged(batch, config, stats=stats)
    with pytest.raises(ValueError, match="q: quantised with another SmoothingStats"):
        run_prefill(batch, pages.cache, table=pages.table, q=query, config=config)
    with pytest.raises(ValueError, match="stats: this cache has static statistics bound"):
        run_prefill(batch, pages.cache, table=pages.table, config=config, run={"stats": twin})


@pytest.mark.parametrize(
    "other",
    [
        {"format": "mxfp8"},
        {"compensation": "mean"},
        {"compensation": "channels", "channels": 4},
    ],
)
def test_a_query_for_another_config_is_refused(other) -> None:
    batch, config, _, kv = quantised_pair("none")
    fields = {"format": "qk4pv8", "page_size": 64, **batch.heads, **other}
    stats = static_stats(batch, other.get("compensation", "none"), other.get("channels", 0))
    query = mpfa.quantize_query(batch.query, mpfa.KVCacheConfig(**fields), stats)
    with pytest.raises(ValueError, match="q: quantised for .*KVCacheConfig"):
        run_prefill(batch, kv, q=query, config=config)


def test_a_query_of_another_length_is_refused() -> None:
    batch, config, stats, kv = quantised_pair()
    query = mpfa.quantize_query(batch.query[:-1], config, stats)
    with pytest.raises(ValueError, match="q: the plan has 173 query tokens, got 172"):
        run_prefill(batch, kv, q=query, config=config)


def test_a_query_with_stats_of_another_batch_is_refused() -> None:
    """Raw K/V take their statistics from a quantised query, so those must fit the plan."""
    batch = make_batch([4, 4], [30, 30], 4, 2, 64, seed=2)
    config = config_for(batch, "qk4pv8", "mean")
    stats = mpfa.SmoothingStats.from_tensors(batch.query, batch.kv[0][:8], offsets([1, 3, 4]))
    query = mpfa.quantize_query(batch.query, config, stats, int32([0, 0, 0, 0, 1, 1, 2, 2]))
    with pytest.raises(ValueError, match=r"stats: .*one row per request of the plan \(2\), got 3"):
        run_prefill(batch, batch.kv, q=query, config=config)


def test_a_bf16_cache_takes_no_quantised_query() -> None:
    batch, config, stats, _ = quantised_pair("none")
    plain = config_for(batch, "bf16", page_size=64)
    query = mpfa.quantize_query(batch.query, config)
    pages = paged(batch, plain)
    with pytest.raises(ValueError, match="q: quantised for"):
        run_prefill(batch, pages.cache, table=pages.table, q=query, config=plain)
    with pytest.raises(ValueError, match="config.format: 'bf16'"):
        mpfa.quantize_query(batch.query, plain)
    with pytest.raises(ValueError, match="config.format: 'bf16'"):
        mpfa.quantize_kv(*batch.kv, plain, offsets(batch.kv_lens))


@pytest.mark.parametrize(
    "indptr,match",
    [
        (int32([0, 289]), "indptr: must end at the number of tokens 290, got 289"),
        (int32([1, 290]), "indptr: must start with 0"),
        (int32([0, 100, 90, 290]), "indptr: must not decrease; request 1 goes from 100 to 90"),
        (torch.tensor([0, 290]), "indptr: dtype must be int32"),
        (int32([]), "indptr"),
    ],
)
def test_quantize_kv_bad_indptr(indptr, match) -> None:
    batch, config, _, _ = quantised_pair("none")
    with pytest.raises(ValueError, match=match):
        mpfa.quantize_kv(*batch.kv, config, indptr)


@pytest.mark.parametrize(
    "change,error,match",
    [
        ({"k": torch.zeros(290, 2, 64)}, ValueError, "k: dtype must be bfloat16 or float16"),
        ({"v": torch.zeros(289, 2, 64).bfloat16()}, ValueError, r"v: shape must be \[290, 2, 64\]"),
        ({"k": torch.zeros(290, 3, 64).bfloat16()}, ValueError, "k: shape"),
        ({"v": None}, TypeError, "v: expected a torch.Tensor"),
        ({"stats": "mean"}, TypeError, "stats: expected SmoothingStats, got str"),
        ({"config": None}, TypeError, "config: expected KVCacheConfig"),
    ],
)
def test_quantize_kv_bad_arguments(change, error, match) -> None:
    batch, config, stats, _ = quantised_pair()
    k, v = batch.kv
    good = {"k": k, "v": v, "config": config, "indptr": offsets(batch.kv_lens), "stats": stats}
    with pytest.raises(error, match=match):
        mpfa.quantize_kv(**{**good, **change})


@pytest.mark.parametrize(
    "change,error,match",
    [
        ({"q": torch.zeros(4, 6, 64)}, ValueError, "q: dtype"),
        ({"q": torch.zeros(4, 5, 64).bfloat16()}, ValueError, "q: shape"),
        ({"q": torch.full((4, 6, 64), math.nan).bfloat16()}, ValueError, r"q: .*\(0, 0, 0\)"),
        ({"stats": None}, ValueError, "stats: compensation 'mean' needs SmoothingStats, got None"),
        ({"stats": 1}, TypeError, "stats: expected SmoothingStats"),
        ({"config": "qk4pv8"}, TypeError, "config: expected KVCacheConfig"),
        (
            {"stats": mpfa.SmoothingStats(torch.zeros(1, 6, 64), torch.zeros(1, 2, 64))},
            ValueError,
            "batch_indices: required with per-request stats",
        ),
    ],
)
def test_quantize_query_bad_arguments(change, error, match) -> None:
    batch, config, stats, _ = quantised_pair()
    good = {"q": batch.query[:4], "config": config, "stats": stats}
    with pytest.raises(error, match=match):
        mpfa.quantize_query(**{**good, **change})


@pytest.mark.parametrize("which", ["k", "v"])
@LOW_BIT
def test_quantize_kv_names_the_first_bad_value(format, compensation, channels, which) -> None:
    """In the second request: the index counts the caller's tokens, not the request's."""
    batch = mixed_batch()
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels)
    tensors = dict(zip("kv", batch.kv, strict=True))
    tensors[which][75, 1, 3] = -math.inf
    with pytest.raises(ValueError, match=rf"\b{which}: .*\(75, 1, 3\)"):
        mpfa.quantize_kv(**tensors, config=config, indptr=offsets(batch.kv_lens), stats=stats)


@LOW_BIT
def test_quantising_does_not_mutate(format, compensation, channels) -> None:
    batch = mixed_batch()
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels)
    q, (k, v) = batch.query, batch.kv
    before = [t.clone() for t in (q, k, v)]
    mpfa.quantize_query(q, config, stats)
    mpfa.quantize_kv(k, v, config, offsets(batch.kv_lens), stats)
    run_prefill(batch, (k, v), q=q, config=config, run={"stats": stats})
    for t, want in zip((q, k, v), before, strict=True):
        assert torch.equal(t, want)


@LOW_BIT
def test_strided_query_views(format, compensation, channels) -> None:
    batch = mixed_batch()
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels)
    q = batch.query
    wide = torch.cat([q, q, q], dim=1)[:, 6:12]
    assert not wide.is_contiguous()
    a, b = (mpfa.quantize_query(t, config, stats) for t in (q, wide))
    assert_same_bits(a.q, b.q)
    assert_same_bits(a.q_scale, b.q_scale)
    with pytest.raises(ValueError, match="q: the last dimension must be contiguous"):
        mpfa.quantize_query(q.mT.contiguous().mT, config, stats)


def tensor_faults(t: torch.Tensor):
    """(changed tensor, what the message says): one fault of each kind."""
    other = torch.float32 if t.element_size() == 1 else torch.float64
    yield torch.zeros(t.shape, dtype=other), "dtype must be"
    yield t[..., :1], "shape must be"
    yield t[:, :1], "shape must be"
    yield t.flatten(), "shape must be"
    yield torch.zeros((*t.shape, 2), dtype=t.dtype)[..., 0], "the last dimension must be contiguous"


@LOW_BIT
def test_constructors_refuse_each_wrong_tensor(format, compensation, channels) -> None:
    """A scale with one column or one head would otherwise be broadcast without a word."""
    batch = mixed_batch()
    config = config_for(batch, format, compensation, channels)
    stats = static_stats(batch, compensation, channels)
    q = mpfa.quantize_query(batch.query, config, stats)
    kv = mpfa.quantize_kv(*batch.kv, config, offsets(batch.kv_lens), stats)
    names = {
        q: ("q", "q_scale", "a_comp", "row_term"),
        kv: ("k", "k_scale", "v", "v_scale", "aux_delta", "aux_channels"),
    }
    for operand, fields in names.items():
        owner = "q" if operand is q else "kv"
        for name in fields:
            t = getattr(operand, name)
            if t is None:
                with pytest.raises(ValueError, match=rf"{owner}\.{name}: not used by format"):
                    dataclasses.replace(operand, **{name: torch.zeros(3)})
                continue
            for bad, match in tensor_faults(t):
                if bad.shape == t.shape and match.startswith("shape"):
                    continue
                with pytest.raises(ValueError, match=rf"{owner}\.\w+: {match}"):
                    dataclasses.replace(operand, **{name: bad})
            with pytest.raises((ValueError, TypeError), match=rf"{owner}\.{name}: "):
                dataclasses.replace(operand, **{name: None})
    with pytest.raises(ValueError, match=r"q\.config\.format: must be one of 'qk4pv8', 'mxfp8'"):
        dataclasses.replace(q, config=config_for(batch, "bf16"))
    with pytest.raises(ValueError, match=r"q\.dtype: must be one of"):
        dataclasses.replace(q, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"kv\.indptr: dtype must be int32"):
        dataclasses.replace(kv, indptr=kv.indptr.long())


def test_v_scale_rows_follow_indptr() -> None:
    batch = mixed_batch()
    kv = mpfa.quantize_kv(*batch.kv, config_for(batch, "mxfp8"), offsets(batch.kv_lens))
    with pytest.raises(ValueError, match=r"kv.v_scale: shape must be \[11, 2, 64\], got \[10,"):
        dataclasses.replace(kv, v_scale=kv.v_scale[:-1])
    with pytest.raises(ValueError, match=r"kv.v_scale: shape must be \[10, 2, 64\], got \[11,"):
        dataclasses.replace(kv, indptr=int32([0, 290]))
