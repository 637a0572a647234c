# SPDX-License-Identifier: Apache-2.0
"""append_paged_kv_cache: slots, bad values, bytes written, and what must stay untouched."""

from __future__ import annotations

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
    poison,
    static_stats,
)

import mpfa

EACH_FORMAT = pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=FORMAT_IDS)


def setup(
    format, compensation="none", channels=0, *, tokens=70, page_size=64, dtype=torch.bfloat16
):
    batch = make_batch([tokens], [tokens], 4, 2, 64, seed=11, dtype=dtype, k_bias=2.0, outliers=4.0)
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels, page_size)
    cache = poison(mpfa.PagedKVCache.allocate(config, 5, "cpu", stats))
    return batch, stats, cache


def snapshot(cache: mpfa.PagedKVCache) -> dict[str, torch.Tensor]:
    return {n: t.contiguous().view(torch.uint8).clone() for n, t in cache.tensors.items()}


def assert_unchanged(cache: mpfa.PagedKVCache, before: dict[str, torch.Tensor]) -> None:
    for name, t in cache.tensors.items():
        assert torch.equal(t.contiguous().view(torch.uint8), before[name]), name


def same_bytes(a: mpfa.PagedKVCache, b: mpfa.PagedKVCache) -> None:
    for name, t in a.tensors.items():
        other = b.tensors[name]
        assert torch.equal(
            t.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
        ), name


SLOTS_70 = torch.cat([torch.arange(64) + 3 * 64, torch.arange(6) + 1 * 64])


@EACH_FORMAT
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_only_the_named_slots_are_written(format, compensation, channels, dtype) -> None:
    batch, _, cache = setup(format, compensation, channels)
    k, v = batch.kv
    assert mpfa.append_paged_kv_cache(k, v, cache, SLOTS_70.to(dtype)) is None
    for name, t in cache.tensors.items():
        raw = t.view(torch.uint8)
        assert (raw[[0, 2, 4]] == 255).all(), f"{name}: a page that no slot names"
        assert not (raw[3] == 255).all()
    # Page 1 has 6 tokens; the rest of k and of the side data keeps its bytes.
    assert (cache.k.view(torch.uint8)[1, :, 6:] == 255).all()
    if cache.aux_delta is not None:
        assert (cache.aux_delta.view(torch.int16)[1, :, :, 6:] == -1).all()
    if cache.aux_channels is not None:
        assert (cache.aux_channels.view(torch.int16)[1, :, 6:] == -1).all()
    if format != "mxfp8":
        assert (cache.v.view(torch.uint8)[1, :, 6:] == 255).all()


@EACH_FORMAT
@pytest.mark.parametrize("pieces", [[1] * 70, [13, 1, 20, 36], [32, 32, 6], [69, 1]])
def test_any_split_of_appends_gives_the_same_bytes(format, compensation, channels, pieces) -> None:
    batch, _, whole = setup(format, compensation, channels)
    _, stats, split = setup(format, compensation, channels)
    k, v = batch.kv
    mpfa.append_paged_kv_cache(k, v, whole, SLOTS_70)
    object.__setattr__(split, "stats", whole.stats)
    first = 0
    for n in pieces:
        rows = slice(first, first + n)
        first += n
        mpfa.append_paged_kv_cache(k[rows], v[rows], split, SLOTS_70[rows])
    same_bytes(whole, split)


@EACH_FORMAT
def test_negative_slots_are_skipped_and_may_hold_anything(format, compensation, channels) -> None:
    batch, _, want = setup(format, compensation, channels)
    _, _, cache = setup(format, compensation, channels)
    object.__setattr__(cache, "stats", want.stats)
    k, v = batch.kv
    mpfa.append_paged_kv_cache(k, v, want, SLOTS_70)
    # 70 real tokens with a padding token after every third.
    slots, ks, vs = [], [], []
    for t in range(70):
        if t % 3 == 0:
            slots.append(-1 if t % 2 else -(10**6))
            ks.append(torch.full_like(k[0], math.nan))
            vs.append(torch.full_like(v[0], math.inf))
        slots.append(int(SLOTS_70[t]))
        ks.append(k[t])
        vs.append(v[t])
    mpfa.append_paged_kv_cache(torch.stack(ks), torch.stack(vs), cache, torch.tensor(slots))
    same_bytes(want, cache)


@EACH_FORMAT
def test_nothing_to_append(format, compensation, channels) -> None:
    batch, _, cache = setup(format, compensation, channels)
    k, v = batch.kv
    before = snapshot(cache)
    mpfa.append_paged_kv_cache(k[:0], v[:0], cache, SLOTS_70[:0])
    mpfa.append_paged_kv_cache(k[:3], v[:3], cache, torch.full((3,), -1))
    assert_unchanged(cache, before)


@EACH_FORMAT
@pytest.mark.parametrize("which", ["k", "v", "q"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bad_values_raise_and_leave_the_cache(format, compensation, channels, which, value) -> None:
    if which == "q" and format == "bf16":
        return
    batch, _, cache = setup(format, compensation, channels)
    tensors = {"k": batch.kv[0], "v": batch.kv[1], "q": batch.query}
    tensors[which][37, -1, 63] = value
    before = snapshot(cache)
    if format == "bf16":
        del tensors["q"]
    with pytest.raises(ValueError, match=rf"\b{which}: .*37"):
        mpfa.append_paged_kv_cache(cache=cache, slot_mapping=SLOTS_70, **tensors)
    assert_unchanged(cache, before)


@EACH_FORMAT
@pytest.mark.parametrize("which", ["k", "v"])
def test_bad_value_is_named_by_the_callers_index(format, compensation, channels, which) -> None:
    """Skipped tokens before it do not shift the index in the message."""
    batch, _, cache = setup(format, compensation, channels)
    tensors = {"k": batch.kv[0], "v": batch.kv[1]}
    tensors[which][37, 1, 5] = math.nan
    slots = torch.cat([torch.full((30,), -1), SLOTS_70[:40]])
    with pytest.raises(ValueError, match=rf"\b{which}: .*37"):
        mpfa.append_paged_kv_cache(cache=cache, slot_mapping=slots, **tensors)


@EACH_FORMAT
@pytest.mark.parametrize(
    "slots,match",
    [
        (
            lambda s: s.index_fill(0, torch.tensor([5]), 5 * 64),
            r"slot_mapping: 320 at index 5.*320",
        ),
        (lambda s: s.index_fill(0, torch.tensor([5]), 2**40), "slot_mapping"),
        (
            lambda s: s.index_fill(0, torch.tensor([5]), int(s[4])),
            "slot_mapping: slot .*tokens 4 and 5",
        ),
        (lambda s: s[:-1], r"slot_mapping: shape must be \[70\], got \[69\]"),
        (lambda s: s.float(), "slot_mapping: dtype must be int32 or int64"),
        (lambda s: s.view(70, 1), "slot_mapping: shape"),
        (lambda s: s.to("meta"), "slot_mapping: must be on device cpu"),
    ],
)
def test_bad_slots(format, compensation, channels, slots, match) -> None:
    batch, _, cache = setup(format, compensation, channels)
    before = snapshot(cache)
    k, v = batch.kv
    with pytest.raises(ValueError, match=match):
        mpfa.append_paged_kv_cache(k, v, cache, slots(SLOTS_70))
    assert_unchanged(cache, before)


@pytest.mark.parametrize(
    "change,error,match",
    [
        (
            lambda k, v, q: {"k": k.float()},
            ValueError,
            "k: dtype must be bfloat16 or float16, got float32",
        ),
        (lambda k, v, q: {"v": v.float()}, ValueError, "v: dtype"),
        (lambda k, v, q: {"k": k[:, :1]}, ValueError, "k: shape must be"),
        (lambda k, v, q: {"v": v[:-1]}, ValueError, "v: shape must be"),
        (lambda k, v, q: {"k": k[..., :32]}, ValueError, "k: shape must be"),
        (
            lambda k, v, q: {"k": k.mT.contiguous().mT},
            ValueError,
            "k: the last dimension must be contiguous",
        ),
        (
            lambda k, v, q: {"v": v.mT.contiguous().mT},
            ValueError,
            "v: the last dimension must be contiguous",
        ),
        (lambda k, v, q: {"v": v.to("meta")}, ValueError, "v: must be on device cpu"),
        (lambda k, v, q: {"k": k.flatten(1)}, ValueError, "k: shape"),
        (lambda k, v, q: {"q": q[:, :3]}, ValueError, "q: shape must be"),
        (lambda k, v, q: {"q": q[:-1]}, ValueError, "q: shape must be"),
        (lambda k, v, q: {"q": q.float()}, ValueError, "q: dtype"),
        (lambda k, v, q: {"k": None}, TypeError, "k: expected a torch.Tensor"),
        (lambda k, v, q: {"slot_mapping": [0]}, TypeError, "slot_mapping: expected a torch.Tensor"),
        (lambda k, v, q: {"cache": None}, TypeError, "cache: expected PagedKVCache"),
        (lambda k, v, q: {"stats": 3}, (TypeError, ValueError), "stats"),
    ],
)
def test_bad_arguments(change, error, match) -> None:
    batch, _, cache = setup("qk4pv8", "mean")
    before = snapshot(cache)
    k, v = batch.kv
    good = {"k": k, "v": v, "cache": cache, "slot_mapping": SLOTS_70}
    with pytest.raises(error, match=match):
        mpfa.append_paged_kv_cache(**{**good, **change(k, v, batch.query)})
    assert_unchanged(cache, before)


def test_a_bf16_cache_has_no_quantised_query() -> None:
    batch, _, cache = setup("bf16")
    with pytest.raises(ValueError, match="q: a bf16 cache"):
        mpfa.append_paged_kv_cache(*batch.kv, cache, SLOTS_70, q=batch.query)


@EACH_FORMAT
def test_inputs_are_never_modified(format, compensation, channels) -> None:
    batch, stats, cache = setup(format, compensation, channels)
    k, v, q = *batch.kv, batch.query
    inputs = {"k": k, "v": v, "slot_mapping": SLOTS_70.clone()}
    if format != "bf16":
        inputs["q"] = q
    if stats is not None:
        for field in ("q_mean", "k_mean", "channel_index"):
            if getattr(stats, field) is not None:
                inputs[field] = getattr(stats, field)
    before = {n: t.clone() for n, t in inputs.items()}
    call = {n: inputs[n] for n in ("k", "v", "slot_mapping", "q") if n in inputs}
    mpfa.append_paged_kv_cache(cache=cache, **call)
    for name, t in inputs.items():
        assert torch.equal(t, before[name]), name


@EACH_FORMAT
def test_strided_views_of_a_fused_projection(format, compensation, channels) -> None:
    batch, _, want = setup(format, compensation, channels)
    _, _, cache = setup(format, compensation, channels)
    object.__setattr__(cache, "stats", want.stats)
    (k, v), q = batch.kv, batch.query
    fused = torch.cat([q, k, v], dim=1)
    fq, fk, fv = fused.split([4, 2, 2], dim=1)
    assert not fk.is_contiguous()
    extra = {} if format == "bf16" else {"q": fq}
    got = mpfa.append_paged_kv_cache(fk, fv, cache, SLOTS_70, **extra)
    plain = mpfa.append_paged_kv_cache(k, v, want, SLOTS_70, **({"q": q} if extra else {}))
    same_bytes(want, cache)
    if extra:
        assert_same_bits(got.q, plain.q)
        assert_same_bits(got.q_scale, plain.q_scale)
    # Head-major storage [H, T, D] seen as [T, H, D].
    _, _, cache = setup(format, compensation, channels)
    object.__setattr__(cache, "stats", want.stats)
    k2, v2 = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (k, v))
    mpfa.append_paged_kv_cache(k2, v2, cache, SLOTS_70)
    same_bytes(want, cache)


@EACH_FORMAT
def test_float16_inputs(format, compensation, channels) -> None:
    """fp16 is converted exactly to fp32 (bf16 cache and MXFP8's V: rounded to bf16)."""
    batch, _, cache = setup(format, compensation, channels, dtype=torch.float16)
    k, v = batch.kv
    mpfa.append_paged_kv_cache(k, v, cache, SLOTS_70)
    if format == "bf16":
        assert torch.equal(cache.k[3].transpose(0, 1), k[:64].bfloat16())
        assert torch.equal(cache.v[1, :, :6].transpose(0, 1), v[64:].bfloat16())
    if format == "mxfp8":
        assert torch.equal(cache.v_tail[1, :, :6].transpose(0, 1), v[64:].bfloat16())
    if format == "qk4pv8":
        want = v[:64].float().to(torch.float8_e4m3fn)
        assert torch.equal(cache.v[3].transpose(0, 1).float(), want.float())


@pytest.mark.parametrize("format,compensation,channels", FORMATS[1:], ids=FORMAT_IDS[1:])
def test_query_of_append_equals_quantize_query(format, compensation, channels) -> None:
    batch, stats, cache = setup(format, compensation, channels)
    got = mpfa.append_paged_kv_cache(*batch.kv, cache, SLOTS_70, q=batch.query)
    want = mpfa.quantize_query(batch.query, cache.config, stats)
    assert isinstance(got, mpfa.QuantizedQuery) and got.num_tokens == 70
    for field in ("q", "q_scale", "a_comp", "row_term"):
        a, b = getattr(got, field), getattr(want, field)
        if b is None:
            assert a is None
        else:
            assert_same_bits(a, b)
    assert got.config == cache.config and got.stats is stats and got.dtype == torch.bfloat16
    uses_mean, slots = "mean" in compensation, channels + ("mean" in compensation)
    assert (got.row_term is not None) == uses_mean
    if slots:
        assert got.a_comp.shape == (70, 4, 16) and got.a_comp.dtype == torch.bfloat16


def test_a_compensated_cache_needs_stats() -> None:
    batch, stats, _ = setup("qk4pv8", "mean")
    cache = mpfa.PagedKVCache.allocate(config_for(batch, "qk4pv8", "mean", 0, 64), 5, "cpu")
    with pytest.raises(
        ValueError, match="stats: compensation 'mean' needs SmoothingStats, got None"
    ):
        mpfa.append_paged_kv_cache(*batch.kv, cache, SLOTS_70)
    mpfa.append_paged_kv_cache(*batch.kv, cache, SLOTS_70, stats=stats)


def test_bound_stats_admit_no_other_object() -> None:
    batch, stats, cache = setup("qk4pv8", "mean")
    mpfa.append_paged_kv_cache(*batch.kv, cache, SLOTS_70, stats=stats)
    copy = mpfa.SmoothingStats(stats.q_mean, stats.k_mean)
    with pytest.raises(ValueError, match="stats: this cache has static statistics bound"):
        mpfa.append_paged_kv_cache(*batch.kv, cache, SLOTS_70, stats=copy)


def per_request_setup():
    batch = make_batch([30, 40], [30, 40], 4, 2, 64, seed=12, k_bias=3.0)
    batch.k[1] = batch.k[1] + 5
    config = config_for(batch, "qk4pv8", "mean", 0, 64)
    stats = mpfa.SmoothingStats.from_tensors(batch.query, batch.kv[0], int32([0, 30, 70]))
    return batch, stats, poison(mpfa.PagedKVCache.allocate(config, 5, "cpu"))


def test_per_request_stats_use_the_row_of_each_token() -> None:
    batch, stats, cache = per_request_setup()
    rows = int32([0] * 30 + [1] * 40)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    k, v = batch.kv
    slots = torch.arange(70)
    mpfa.append_paged_kv_cache(
        k[order], v[order], cache, slots[order], stats=stats, batch_indices=rows[order]
    )
    for b, part in ((0, slice(0, 30)), (1, slice(30, 70))):
        _, _, alone = per_request_setup()
        static = mpfa.SmoothingStats(stats.q_mean[b].clone(), stats.k_mean[b].clone())
        mpfa.append_paged_kv_cache(k[part], v[part], alone, slots[part], stats=static)
        page, offset = slots[part] // 64, slots[part] % 64
        assert torch.equal(cache.k[page, :, offset], alone.k[page, :, offset])
        assert torch.equal(cache.aux_delta[page, :, :, offset], alone.aux_delta[page, :, :, offset])


@pytest.mark.parametrize(
    "rows,match",
    [
        (None, r"batch_indices: required with per-request stats \(2 rows\)"),
        (int32([0] * 69), r"batch_indices: shape must be \[70\], got \[69\]"),
        (torch.zeros(70, dtype=torch.int64), "batch_indices: dtype must be int32"),
        (int32([0] * 69 + [2]), r"batch_indices: must be 0\.\.1 .*got 2"),
        (int32([0] * 69 + [-1]), r"batch_indices: must be 0\.\.1 .*got -1"),
        (torch.zeros(70, dtype=torch.int32, device="meta"), "batch_indices: must be on device cpu"),
    ],
)
def test_bad_batch_indices(rows, match) -> None:
    batch, stats, cache = per_request_setup()
    before = snapshot(cache)
    with pytest.raises(ValueError, match=match):
        mpfa.append_paged_kv_cache(
            *batch.kv, cache, torch.arange(70), stats=stats, batch_indices=rows
        )
    assert_unchanged(cache, before)


def test_mxfp8_tokens_of_a_page_must_come_in_order() -> None:
    batch, _, cache = setup("mxfp8")
    before = snapshot(cache)
    slots = SLOTS_70.clone()
    slots[[3, 4]] = slots[[4, 3]]
    with pytest.raises(ValueError, match="slot_mapping: token 3 at offset 4 of page 3 follows"):
        mpfa.append_paged_kv_cache(*batch.kv, cache, slots)
    assert_unchanged(cache, before)


def test_strided_cache_views_are_written_and_read() -> None:
    """K and V interleaved in one pool, token-major pages: bytes land where the views say."""
    batch, _, want = setup("qk4pv8", page_size=16, tokens=40)
    config = want.config
    slots = torch.arange(40) + 16
    mpfa.append_paged_kv_cache(*batch.kv, want, slots)
    kpool = torch.full((5, 16, 3, 2, 32), 255, dtype=torch.uint8)
    vpool = torch.full((5, 16, 2, 64), 255, dtype=torch.uint8)
    spool = torch.full((5, 2, 16, 8), 255, dtype=torch.uint8)
    views = {
        "k": kpool[:, :, 1].permute(0, 2, 1, 3),
        "v": vpool.view(torch.float8_e4m3fn).permute(0, 2, 1, 3),
        "k_scale": spool[..., 2:6],
    }
    cache = mpfa.PagedKVCache(config=config, **views)
    mpfa.append_paged_kv_cache(*batch.kv, cache, slots)
    same_bytes(want, cache)
    assert (kpool[:, :, 0] == 255).all() and (kpool[:, :, 2] == 255).all()
    assert (spool[..., :2] == 255).all() and (spool[..., 6:] == 255).all()


def test_mxfp8_page_can_be_used_again() -> None:
    """A freed page starts over at offset 0; nothing of the former owner is left in its blocks."""
    batch, _, want = setup("mxfp8")
    _, _, cache = setup("mxfp8")
    k, v = batch.kv
    mpfa.append_paged_kv_cache(k[:64] * 9, v[:64] * 9, cache, torch.arange(64) + 64)
    for c in (want, cache):
        mpfa.append_paged_kv_cache(k[:40], v[:40], c, torch.arange(40) + 64)
    for name, rows in (("k", 40), ("k_scale", 40), ("v", 64), ("v_scale", 2)):
        a, b = (getattr(c, name).view(torch.uint8)[1, :, :rows] for c in (want, cache))
        assert torch.equal(a, b), name


@EACH_FORMAT
@pytest.mark.parametrize("kept", [33, 40, 47])
def test_rejected_drafts_can_be_written_again(format, compensation, channels, kept) -> None:
    """Speculative decode inside one 32-token block: 48 tokens, all but kept - 1 are rejected."""
    batch, _, want = setup(format, compensation, channels)
    _, _, cache = setup(format, compensation, channels)
    object.__setattr__(cache, "stats", want.stats)
    k, v = batch.kv
    slots = torch.arange(64) + 64
    mpfa.append_paged_kv_cache(k[:kept], v[:kept], want, slots[:kept])
    draft_k, draft_v = k[:48].clone(), v[:48].clone()
    draft_k[kept - 1 :] *= 3
    draft_v[kept - 1 :] *= 3
    mpfa.append_paged_kv_cache(draft_k, draft_v, cache, slots[:48])
    mpfa.append_paged_kv_cache(
        k[kept - 1 : kept], v[kept - 1 : kept], cache, slots[kept - 1 : kept]
    )
    for name in ("k", "v", "v_scale", "aux_channels"):
        a, b = getattr(want, name), getattr(cache, name)
        if a is not None:
            rows = 2 if name == "v_scale" else kept
            assert torch.equal(a.view(torch.uint8)[1, :, :rows], b.view(torch.uint8)[1, :, :rows])


def test_skipped_tokens_do_not_shift_per_request_rows() -> None:
    batch, stats, want = per_request_setup()
    _, _, cache = per_request_setup()
    k, v = batch.kv
    rows, slots = int32([0] * 30 + [1] * 40), torch.arange(70)
    mpfa.append_paged_kv_cache(k, v, want, slots, stats=stats, batch_indices=rows)
    # Ten padding tokens of request 1 in front, whose row must not reach the tokens behind them.
    k, v = (torch.cat([t[:10], t]) for t in (k, v))
    rows = torch.cat([int32([1] * 10), rows])
    slots = torch.cat([torch.full((10,), -1), slots])
    mpfa.append_paged_kv_cache(k, v, cache, slots, stats=stats, batch_indices=rows)
    same_bytes(want, cache)


def test_per_request_stats_without_a_row() -> None:
    batch, _, cache = per_request_setup()
    none = mpfa.SmoothingStats(torch.zeros(0, 4, 64), torch.zeros(0, 2, 64))
    before = snapshot(cache)
    rows = int32([0] * 70)
    match = "stats: per-request statistics must have at least one row for 70 tokens, got 0"
    with pytest.raises(ValueError, match=match):
        mpfa.append_paged_kv_cache(
            *batch.kv, cache, torch.arange(70), stats=none, batch_indices=rows
        )
    with pytest.raises(ValueError, match=match):
        mpfa.quantize_query(batch.query, cache.config, none, rows)
    assert_unchanged(cache, before)
    k, v = (t[:0] for t in batch.kv)
    mpfa.append_paged_kv_cache(k, v, cache, torch.arange(0), stats=none, batch_indices=rows[:0])


@pytest.mark.parametrize("which", ["k", "q"])
def test_centring_that_overflows_is_refused(which) -> None:
    """fp32 cannot hold the difference: that is Inf, as if it had been given."""
    batch, stats, cache = setup("qk4pv8", "mean")
    object.__setattr__(cache, "stats", None)
    stats = mpfa.SmoothingStats(
        torch.full_like(stats.q_mean, -3e38), torch.full_like(stats.k_mean, -3e38)
    )
    tensors = {"k": batch.kv[0], "v": batch.kv[1], "q": batch.query}
    tensors[which][37, 1, 5] = 3e38
    before = snapshot(cache)
    with pytest.raises(ValueError, match=rf"\b{which}: .*37"):
        mpfa.append_paged_kv_cache(cache=cache, slot_mapping=SLOTS_70, stats=stats, **tensors)
    assert_unchanged(cache, before)
