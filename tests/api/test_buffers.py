# SPDX-License-Identifier: Apache-2.0
"""What users of FlashInfer assume of run(): buffers in place, strides read, inputs untouched."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import (
    FORMAT_IDS,
    FORMATS,
    assert_same_bits,
    config_for,
    make_batch,
    offsets,
    paged,
    run_decode,
    run_prefill,
    static_stats,
    workspace_for,
)

import mpfa


@pytest.fixture(params=["prefill", "ragged", "decode"])
def ready(request):
    """(wrapper after plan(), q, kv)."""
    kind = request.param
    batch = make_batch([2, 2], [30, 1100], 6, 2, 64, seed=51)
    config = config_for(batch, "qk4pv8", page_size=64)
    pages = paged(batch, config)
    options = {**batch.heads, "config": config}
    if kind == "decode":
        args, cls, kv = pages.table, mpfa.BatchDecodeWrapper, pages.cache
        options["q_len_per_request"] = 2
    elif kind == "prefill":
        args, cls, kv = (offsets([2, 2]), *pages.table), mpfa.BatchPrefillWrapper, pages.cache
    else:
        args, cls, kv = (offsets([2, 2]), offsets([30, 1100])), mpfa.BatchPrefillWrapper, batch.kv
    wrapper = cls(workspace_for(*args, **options))
    wrapper.plan(*args, **options)
    return wrapper, batch.query, kv


def test_return_values(ready) -> None:
    wrapper, q, kv = ready
    out = wrapper.run(q, kv)
    assert isinstance(out, torch.Tensor) and out.shape == q.shape and out.dtype == q.dtype
    pair = wrapper.run(q, kv, return_lse=True)
    assert isinstance(pair, tuple) and len(pair) == 2
    assert pair[1].shape == (4, 6) and pair[1].dtype == torch.float32
    assert_same_bits(pair[0], out)


def test_out_and_lse_are_written_in_place_and_returned(ready) -> None:
    wrapper, q, kv = ready
    want, want_lse = wrapper.run(q, kv, return_lse=True)
    out, lse = torch.full_like(q, math.nan), torch.full((4, 6), math.nan)
    got, got_lse = wrapper.run(q, kv, out=out, lse=lse, return_lse=True)
    assert got is out and got_lse is lse
    assert_same_bits(out, want)
    assert_same_bits(lse, want_lse)
    # A given lse buffer is filled even where only out is asked for.
    lse.fill_(math.nan)
    assert wrapper.run(q, kv, out=out, lse=lse) is out
    assert_same_bits(lse, want_lse)


@pytest.mark.parametrize("base", ["log2", "ln"])
def test_lse_base(ready, base) -> None:
    wrapper, q, kv = ready
    _, two = wrapper.run(q, kv, return_lse=True)
    _, lse = wrapper.run(q, kv, return_lse=True, lse_base=base)
    factor = 1.0 if base == "log2" else math.log(2.0)
    torch.testing.assert_close(lse, two * factor, rtol=2e-7, atol=0)


def test_strided_buffers(ready) -> None:
    """Views into larger tensors: only the viewed elements change."""
    wrapper, q, kv = ready
    want, want_lse = wrapper.run(q, kv, return_lse=True)
    big = torch.full((4, 3, 6, 80), 7.0, dtype=q.dtype)
    out = big[:, 1, :, 8:72]
    big_lse = torch.full((4, 10), 7.0)
    lse = big_lse[:, 2:8]
    for base in ("ln", "log2"):
        got, _ = wrapper.run(q, kv, out=out, lse=lse, return_lse=True, lse_base=base)
        assert got is out
    assert_same_bits(out, want)
    assert_same_bits(lse, want_lse)
    assert (
        (big[:, [0, 2]] == 7).all()
        and (big[:, 1, :, :8] == 7).all()
        and (big[:, 1, :, 72:] == 7).all()
    )
    assert (big_lse[:, :2] == 7).all() and (big_lse[:, 8:] == 7).all()
    # Head-major storage.
    out = torch.empty(6, 4, 64, dtype=q.dtype).transpose(0, 1)
    assert_same_bits(wrapper.run(q, kv, out=out), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_out_dtype_may_differ_from_q(ready, dtype) -> None:
    wrapper, q, kv = ready
    full = wrapper.run(q, kv, out=torch.empty(q.shape))
    got = wrapper.run(q, kv, out=torch.empty(q.shape, dtype=dtype))
    assert got.dtype == dtype
    assert_same_bits(got, full.to(dtype))


def test_non_contiguous_q_views(ready) -> None:
    wrapper, q, kv = ready
    want = wrapper.run(q, kv)
    fused = torch.cat([torch.full((4, 3, 64), 9.0, dtype=q.dtype), q], dim=1)
    views = {
        "split": fused.split([3, 6], dim=1)[1],
        "head-major": q.transpose(0, 1).contiguous().transpose(0, 1),
        "every second token": torch.stack([q, -q], dim=1).flatten(0, 1)[::2],
        "padded channels": torch.nn.functional.pad(q, (0, 16))[..., :64],
        "flipped twice": q.flip(0).flip(0),
    }
    for name, view in views.items():
        assert torch.equal(view, q), name
        assert_same_bits(wrapper.run(view, kv), want)


def test_q_may_be_the_output_buffer(ready) -> None:
    wrapper, q, kv = ready
    want = wrapper.run(q, kv)
    q = q.clone()
    assert wrapper.run(q, kv, out=q) is q
    assert_same_bits(q, want)


@pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=FORMAT_IDS)
def test_non_contiguous_ragged_kv(format, compensation, channels) -> None:
    batch = make_batch([5, 20], [30, 60], 6, 2, 64, seed=52, k_bias=1.0)
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels)
    k, v = batch.kv
    run = {"stats": stats}
    want = run_prefill(batch, (k, v), config=config, run=run)
    fused = torch.cat([k, k + 1, v], dim=1)
    got = run_prefill(batch, (fused[:, :2], fused[:, 4:]), config=config, run=run)
    assert_same_bits(got[0], want[0])
    assert_same_bits(got[1], want[1])
    k2, v2 = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (k, v))
    assert_same_bits(run_prefill(batch, (k2, v2), config=config, run=run)[0], want[0])


@pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=FORMAT_IDS)
def test_strided_cache_views_are_read(format, compensation, channels) -> None:
    """Every page tensor as a view with other strides; never plausible-wrong (FI issue 4044)."""
    batch = make_batch([2, 2], [150, 40], 6, 2, 64, seed=53, k_bias=1.0)
    stats = static_stats(batch, compensation, channels)
    for page_size in (64, 128):
        config = config_for(batch, format, compensation, channels, page_size)
        pages = paged(batch, config, stats=stats)
        want = run_decode(batch, pages, q_len_per_request=2, config=config)
        strided = {}
        for name, t in pages.cache.tensors.items():
            raw = t.view(torch.uint8)
            pool = torch.full((raw.shape[0], 2, *raw.shape[1:]), 255, dtype=torch.uint8)
            pool[:, 1] = raw
            # Token- or slot-major inside the page.
            order = pool[:, 1].transpose(1, 2).contiguous().transpose(1, 2)
            strided[name] = (order if raw.shape[2] > 1 else pool[:, 1]).view(t.dtype)
        pages.cache = mpfa.PagedKVCache(config=config, stats=pages.cache.stats, **strided)
        got = run_decode(batch, pages, q_len_per_request=2, config=config)
        assert_same_bits(got[0], want[0])
        assert_same_bits(got[1], want[1])


@pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=FORMAT_IDS)
def test_run_writes_only_its_buffers(format, compensation, channels) -> None:
    batch = make_batch([2, 2], [1100, 40], 6, 2, 64, seed=54)
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels, 64)
    pages = paged(batch, config, stats=stats)
    q, sinks = batch.query, torch.randn(6)
    watched = {**pages.cache.tensors, "q": q, "sinks": sinks}
    watched |= {f"index {i}": t for i, t in enumerate(pages.table)}
    if stats is not None:
        named = {"q_mean": stats.q_mean, "k_mean": stats.k_mean, "channels": stats.channel_index}
        watched |= {n: t for n, t in named.items() if t is not None}
    before = {n: t.contiguous().view(torch.uint8).clone() for n, t in watched.items()}
    run_decode(batch, pages, q=q, q_len_per_request=2, config=config, run={"sinks": sinks})
    for name, t in watched.items():
        assert torch.equal(t.contiguous().view(torch.uint8), before[name]), name


def test_one_plan_serves_many_layers() -> None:
    """plan() once, run() per layer with other data, sinks and dtype: no state carries over."""
    layers = [make_batch([3, 2], [40, 9], 6, 2, 64, seed=s) for s in range(3)]
    config = config_for(layers[0], "qk4pv8", page_size=16)
    pages = [paged(b, config, seed=1) for b in layers]
    options = {**layers[0].heads, "config": config, "causal": True}
    args = (offsets([3, 2]), *pages[0].table)
    wrapper = mpfa.BatchPrefillWrapper(workspace_for(*args, **options))
    wrapper.plan(*args, **options)
    sinks = [None, torch.ones(6), None]
    for _ in range(2):
        for batch, p, sink in zip(layers, pages, sinks, strict=True):
            out, lse = wrapper.run(batch.query, p.cache, sinks=sink, return_lse=True)
            want, want_lse = run_prefill(
                batch, p.cache, table=p.table, config=config, causal=True, run={"sinks": sink}
            )
            assert_same_bits(out, want)
            assert_same_bits(lse, want_lse)


def test_a_new_plan_replaces_every_option() -> None:
    """sm_scale, window and cap of the first plan must not survive in the second (FI issue 4014)."""
    batch = make_batch([3, 2], [40, 9], 6, 2, 64, seed=3)
    config = config_for(batch, "bf16", page_size=16)
    pages = paged(batch, config)
    args = (offsets([3, 2]), *pages.table)
    heads = {**batch.heads, "config": config}
    variants = [
        {"sm_scale": 0.5},
        {},
        {"window_left": 3, "causal": True},
        {"logits_soft_cap": 2.0},
        {"causal": True},
        {"fixed_split_pages": 8},
    ]
    wrapper = mpfa.BatchPrefillWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    for options in variants:
        wrapper.plan(*args, **heads, **options)
        got = wrapper.run(batch.query, pages.cache)
        want, _ = run_prefill(batch, pages.cache, table=pages.table, config=config, **options)
        assert_same_bits(got, want)


@pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=FORMAT_IDS)
def test_single_prefill_equals_the_wrapper(format, compensation, channels) -> None:
    batch = make_batch([50], [90], 6, 2, 64, seed=55, k_bias=1.0)
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels)
    options = {"causal": True, "window_left": 40, "logits_soft_cap": 20.0, "sm_scale": 0.2}
    run = {"stats": stats, "sinks": torch.linspace(-1, 1, 6), "lse_base": "ln"}
    want = run_prefill(batch, batch.kv, config=config, run=run, **options)
    tensors = (batch.q[0], batch.k[0], batch.v[0])
    quantise = {"format": format, "compensation": compensation, "channels": channels}
    out, lse = mpfa.single_prefill(*tensors, **quantise, **options, **run, return_lse=True)
    assert_same_bits(out, want[0])
    assert_same_bits(lse, want[1])
    alone = mpfa.single_prefill(*tensors, **quantise, **options, **run, backend="reference")
    assert_same_bits(alone, want[0])


def test_single_prefill_default_is_qk4pv8_without_compensation() -> None:
    batch = make_batch([50], [90], 6, 2, 64, seed=56)
    tensors = (batch.q[0], batch.k[0], batch.v[0])
    plain = mpfa.single_prefill(*tensors)
    assert_same_bits(plain, mpfa.single_prefill(*tensors, format="qk4pv8", compensation="none"))
    four_six = mpfa.single_prefill(*tensors, four_over_six=True)
    assert not torch.equal(plain, four_six)


@pytest.mark.parametrize(
    "change,error,match",
    [
        ({"q": torch.zeros(2, 4, 64)}, ValueError, "q: dtype"),
        ({"q": torch.zeros(2, 64).bfloat16()}, ValueError, "q: shape"),
        ({"k": torch.zeros(3, 2, 128).bfloat16()}, ValueError, "k: shape"),
        ({"v": torch.zeros(4, 2, 64).bfloat16()}, ValueError, "v: shape"),
        ({"q": torch.zeros(2, 3, 64).bfloat16()}, ValueError, "num_qo_heads: must be a multiple"),
        ({"format": "fp8"}, ValueError, "format: must be one of"),
        ({"compensation": "channels"}, ValueError, r"channels: must be 1\.\.16"),
        (
            {"compensation": "channels", "channels": 2},
            ValueError,
            "stats: compensation 'channels' needs",
        ),
        ({"window_left": -3}, ValueError, "window_left"),
        ({"lse_base": "e"}, ValueError, "lse_base"),
        ({"v": None}, TypeError, "v: expected a torch.Tensor"),
    ],
)
def test_single_prefill_bad_arguments(change, error, match) -> None:
    good = {
        "q": torch.zeros(2, 4, 64).bfloat16(),
        "k": torch.zeros(3, 2, 64).bfloat16(),
        "v": torch.zeros(3, 2, 64).bfloat16(),
    }
    with pytest.raises(error, match=match):
        mpfa.single_prefill(**{**good, **change})


@pytest.mark.parametrize("lq,lk", [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=FORMAT_IDS)
def test_empty_inputs(lq, lk, format, compensation, channels) -> None:
    """(0, -inf) identity for rows without keys, shapes kept for no rows."""
    full = make_batch([4], [9], 4, 2, 64)
    stats = static_stats(full, compensation, channels)
    q, (k, v) = full.query[:0].new_zeros(lq, 4, 64), (t.new_zeros(lk, 2, 64) for t in full.kv)
    out, lse = mpfa.single_prefill(
        q,
        k,
        v,
        format=format,
        compensation=compensation,
        channels=channels,
        stats=stats,
        return_lse=True,
    )
    assert out.shape == (lq, 4, 64) and lse.shape == (lq, 4)
    assert (out == 0).all() and (lse == -math.inf).all()
    sinks = torch.tensor([1.0, -2.0, -math.inf, 0.0])
    out, lse = mpfa.single_prefill(
        q,
        k,
        v,
        format=format,
        compensation=compensation,
        channels=channels,
        stats=stats,
        return_lse=True,
        lse_base="ln",
        sinks=sinks,
    )
    assert (out == 0).all()
    if lq:
        torch.testing.assert_close(lse, sinks.expand(lq, 4), rtol=2e-7, atol=0)
