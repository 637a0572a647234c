# SPDX-License-Identifier: Apache-2.0
"""Format bf16 against torch SDPA: every semantic of plan()/run() without any quantisation."""

from __future__ import annotations

import math
import random

import pytest
import torch
from attention_cases import (
    Batch,
    assert_lse_close,
    config_for,
    dense_attention,
    dense_batch,
    make_batch,
    paged,
    rel_l2,
    run_decode,
    run_prefill,
)

import mpfa
from mpfa.reference import exact_attention

GROUPS = (1, 3, 4, 5, 7, 8, 16)
PAGE_SIZES = (1, 16, 32, 64, 128)
KINDS = ("ragged", "paged", "decode", "single")


def random_case(index: int) -> dict[str, object]:
    """Case ``index``; the first options cycle, so that every value occurs often."""
    rng = random.Random(1000 + index)
    kind = KINDS[index % 4]
    group = GROUPS[index // 4 % 7]
    num_kv_heads = rng.choice((1, 2, 3)) if group < 8 else rng.choice((1, 2))
    head_dim = (64, 128, 256)[rng.choice((0, 0, 1, 1, 2))]
    batch = 1 if kind == "single" else rng.choice((0, 1, 2, 3, 4))
    kv_lens = [rng.choice((0, 1, 2, 15, 17, 63, 128, 129, 200, 300)) for _ in range(batch)]
    if kind == "decode":
        q_len = rng.choice((1, 1, 2, 3, 5, 8))
        qo_lens = [q_len] * batch
    else:
        q_len = None
        qo_lens = [rng.choice((0, 1, 2, 7, 33, 130, 150)) for _ in range(batch)]
        if rng.random() < 0.4:
            qo_lens = [min(q, k) for q, k in zip(qo_lens, kv_lens, strict=True)]
    return {
        "kind": kind,
        "heads": (group * num_kv_heads, num_kv_heads, head_dim),
        "qo_lens": qo_lens,
        "kv_lens": kv_lens,
        "q_len": q_len,
        "page_size": PAGE_SIZES[rng.randrange(5)],
        "dtype": rng.choice((torch.bfloat16, torch.bfloat16, torch.float16)),
        "sinks": rng.random() < 0.3,
        "lse_base": rng.choice(("log2", "ln")),
        "split": rng.random() < 0.4,
        "seed": index,
        "options": {
            "causal": rng.random() < 0.6,
            "window_left": rng.choice((-1, -1, -1, 0, 1, 5, 100, 1000)),
            "logits_soft_cap": rng.choice((0.0, 0.0, 0.0, 1.0, 30.0)),
            "sm_scale": rng.choice((None, None, 0.05, 1.0)),
        },
    }


def run_case(case: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor, Batch, dict]:
    """(out fp32, lse, the batch as the kernel saw it, options of the exact attention)."""
    kind, dtype, options = case["kind"], case["dtype"], dict(case["options"])
    batch = make_batch(
        case["qo_lens"], case["kv_lens"], *case["heads"], dtype=dtype, seed=case["seed"]
    )
    sinks = None
    if case["sinks"]:
        gen = torch.Generator().manual_seed(case["seed"])
        sinks = torch.randn(batch.shape[0], generator=gen) * 2
    run: dict[str, object] = {"sinks": sinks, "lse_base": case["lse_base"]}
    truth = {**options, "sinks": sinks}
    if kind == "single":
        out, lse = mpfa.single_prefill(
            batch.q[0], batch.k[0], batch.v[0], format="bf16", return_lse=True, **run, **options
        )
        return out, lse, batch, truth
    run["out"] = torch.full(batch.query.shape, math.nan)
    page_size = case["page_size"]
    config = config_for(batch, "bf16", page_size=page_size)
    options["config"] = config
    if case["split"]:
        options["fixed_split_pages"] = 1 if kind == "ragged" else 128 // page_size
    if kind == "ragged":
        out, lse = run_prefill(batch, batch.kv, run=run, **options)
        return out, lse, batch, truth
    pages = paged(batch, config, seed=case["seed"])
    # The cache holds bf16, so that is what attention sees of fp16 keys and values.
    batch = batch.kv_as(torch.bfloat16)
    if kind == "paged":
        out, lse = run_prefill(batch, pages.cache, table=pages.table, run=run, **options)
    else:
        out, lse = run_decode(batch, pages, q_len_per_request=case["q_len"], run=run, **options)
    return out, lse, batch, truth


@pytest.mark.parametrize("index", range(200))
def test_bf16_equals_sdpa(index: int) -> None:
    case = random_case(index)
    out, lse, batch, truth = run_case(case)
    if batch.size == 0:
        assert out.shape[0] == 0 and lse.shape[0] == 0
        return
    want, want_lse = dense_batch(batch, **truth)
    if case["lse_base"] == "log2":
        want_lse = want_lse * math.log2(math.e)
    assert lse.dtype == torch.float32 and lse.shape == want_lse.shape
    assert not out.isnan().any()
    assert_lse_close(lse, want_lse, 2e-5)
    if case["kind"] == "single":
        eps = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[out.dtype]
        # float16 has a coarser grid below its normal range.
        assert ((out.double() - want).abs() <= eps * want.abs() + 1e-5).all()
        return
    assert out.dtype == torch.float32
    assert (out.double() - want).abs().amax().item() <= 1e-5 if want.numel() else True
    assert rel_l2(out, want) <= 3e-6


def test_cases_cover_what_they_should() -> None:
    """The generator reaches every kind, ratio, page size, head_dim and edge."""
    cases = [random_case(i) for i in range(200)]
    groups = {c["heads"][0] // c["heads"][1] for c in cases}
    assert groups == set(GROUPS)
    assert {c["heads"][2] for c in cases} == {64, 128, 256}
    for kind in ("paged", "decode"):
        assert {c["page_size"] for c in cases if c["kind"] == kind} == set(PAGE_SIZES)
    pairs = [(q, k) for c in cases for q, k in zip(c["qo_lens"], c["kv_lens"], strict=True)]
    assert any(q < k for q, k in pairs) and any(q > k > 0 for q, k in pairs)
    assert any(q > 0 and k == 0 for q, k in pairs) and any(q == 0 and k > 0 for q, k in pairs)
    assert any(not c["qo_lens"] for c in cases)


@pytest.mark.parametrize("index", range(0, 200, 10))
def test_dense_truth_agrees_with_exact_attention(index: int) -> None:
    """Two independent float64 attentions: the test's SDPA and mpfa.reference.exact_attention."""
    case = random_case(index)
    truth = dict(case["options"])
    if case["sinks"]:
        truth["sinks"] = torch.linspace(-2, 3, case["heads"][0])
    batch = make_batch(case["qo_lens"], case["kv_lens"], *case["heads"], seed=index)
    for q, k, v in zip(batch.q, batch.k, batch.v, strict=True):
        out, lse = exact_attention(q, k, v, **truth)
        want, want_lse = dense_attention(q, k, v, **truth)
        torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bf16_equals_fp32_sdpa(dtype: torch.dtype) -> None:
    batch = make_batch([70, 5], [70, 200], 6, 2, 64, dtype=dtype, seed=3)
    config = config_for(batch, "bf16")
    out = torch.empty(75, 6, 64)
    out, _ = run_prefill(batch, batch.kv, config=config, causal=True, run={"out": out})
    want, _ = dense_batch(batch, causal=True, dtype=torch.float32)
    torch.testing.assert_close(out, want, rtol=0, atol=5e-6)


def test_bottom_right_causal_on_the_two_by_three_picture() -> None:
    """2 queries, 3 keys: row 0 sees 2 keys, row 1 sees 3 (FlashInfer issue 348)."""
    q = torch.zeros(2, 1, 64, dtype=torch.bfloat16)
    k = torch.zeros(3, 1, 64, dtype=torch.bfloat16)
    v = torch.zeros(3, 1, 64, dtype=torch.bfloat16)
    v[:, 0, 0] = torch.tensor([6.0, 12.0, 24.0]).bfloat16()
    out, lse = mpfa.single_prefill(
        q, k, v, format="bf16", causal=True, return_lse=True, lse_base="ln"
    )
    assert out[:, 0, 0].tolist() == [9.0, 14.0]
    torch.testing.assert_close(lse[:, 0], torch.tensor([math.log(2.0), math.log(3.0)]))


def test_causal_with_more_queries_than_keys() -> None:
    """3 queries, 1 key: rows 0 and 1 stand before the first key and see nothing."""
    q = torch.ones(3, 2, 64, dtype=torch.bfloat16)
    k, v = q[:1, :1].clone(), q[:1, :1].clone() * 5
    out, lse = mpfa.single_prefill(q, k, v, format="bf16", causal=True, return_lse=True)
    assert (out[:2] == 0).all() and (lse[:2] == -math.inf).all()
    assert (out[2] == 5).all()
    torch.testing.assert_close(lse[2], torch.full((2,), 8.0 * math.log2(math.e)))


@pytest.mark.parametrize("window_left", [0, 1, 2, 7, 8, 9])
def test_window_counts_keys_left_of_the_query(window_left: int) -> None:
    """One-hot values show exactly which keys a row sees; window S-1 equals causal."""
    n = 9
    q = torch.zeros(n, 1, 64, dtype=torch.bfloat16)
    v = torch.zeros(n, 1, 64, dtype=torch.bfloat16)
    v[torch.arange(n), 0, torch.arange(n)] = 1.0
    out = mpfa.single_prefill(
        q, torch.zeros_like(v), v, format="bf16", causal=True, window_left=window_left
    )
    for i in range(n):
        seen = set(out[i, 0].nonzero().flatten().tolist())
        assert seen == set(range(max(0, i - window_left), i + 1))


def test_window_without_causal_is_open_to_the_right() -> None:
    n = 6
    q = torch.zeros(2, 1, 64, dtype=torch.bfloat16)
    v = torch.zeros(n, 1, 64, dtype=torch.bfloat16)
    v[torch.arange(n), 0, torch.arange(n)] = 1.0
    out = mpfa.single_prefill(q, torch.zeros_like(v), v, format="bf16", window_left=1)
    # Queries stand at positions 4 and 5.
    assert set(out[0, 0].nonzero().flatten().tolist()) == {3, 4, 5}
    assert set(out[1, 0].nonzero().flatten().tolist()) == {4, 5}


@pytest.mark.parametrize("q_len", [2, 5, 8])
def test_decode_has_one_window_per_draft_row(q_len: int) -> None:
    batch = make_batch([q_len] * 3, [40, 300, 9], 4, 2, 64, seed=5)
    config = config_for(batch, "bf16", page_size=16)
    pages = paged(batch, config)
    out = torch.empty(3 * q_len, 4, 64)
    out, lse = run_decode(
        batch, pages, q_len_per_request=q_len, window_left=6, causal=True, run={"out": out}
    )
    want, want_lse = dense_batch(batch, causal=True, window_left=6)
    assert rel_l2(out, want) < 3e-6
    assert_lse_close(lse, want_lse * math.log2(math.e), 2e-5)


@pytest.mark.parametrize("magnitude", [1e3, 6e4, 1e6])
def test_large_logits_are_not_taken_for_masked_ones(magnitude: float) -> None:
    """A row whose logits are all far below -5e4 still attends (FlashInfer issues 4267, 4450)."""
    gen = torch.Generator().manual_seed(0)
    q = torch.zeros(2, 1, 64, dtype=torch.bfloat16)
    k = torch.zeros(130, 1, 64, dtype=torch.bfloat16)
    v = torch.randn(130, 1, 64, generator=gen).bfloat16()
    q[:, 0, 0] = -1.0
    q[:, 0, 1] = 1.0
    k[:, 0, 0] = magnitude
    k[:, 0, 1] = torch.randn(130, generator=gen).bfloat16()
    out, lse = mpfa.single_prefill(
        q, k, v, format="bf16", sm_scale=1.0, return_lse=True, lse_base="ln"
    )
    want, want_lse = dense_attention(q, k, v, sm_scale=1.0)
    # The score itself is one fp32 number, so its rounding bounds what can be had.
    assert rel_l2(out.float(), want) < 4e-3 + 2 * magnitude * 2.0**-24
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=0)


def test_one_key_gives_its_value_and_its_logit() -> None:
    batch = make_batch([1, 4], [1, 1], 4, 2, 64, seed=8)
    out, lse = run_prefill(
        batch, batch.kv, config=config_for(batch, "bf16"), run={"lse_base": "ln"}
    )
    want, want_lse = dense_batch(batch)
    assert torch.equal(out[0], batch.v[0][0].repeat_interleave(2, dim=0))
    assert torch.equal(out.double(), want)
    assert_lse_close(lse, want_lse, 1e-5)


@pytest.mark.parametrize("format", ["bf16", "qk4pv8", "mxfp8"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_values_that_are_not_finite_are_refused(name: str, value: float, format: str) -> None:
    """A NaN score would look like a row without keys; no format lets it through."""
    batch = make_batch([3], [140], 2, 1, 64, seed=4)
    tensors = {"q": batch.q[0], "k": batch.k[0], "v": batch.v[0]}
    tensors[name][2, 0, 5] = value
    with pytest.raises(ValueError, match=rf"{name}: value {value} at index \(2, 0, 5\)"):
        mpfa.single_prefill(**tensors, format=format)
    if name == "q":
        pages = paged(batch, config_for(batch, format))
        with pytest.raises(ValueError, match="q: value"):
            run_prefill(batch, pages.cache, table=pages.table, page_size=128)
