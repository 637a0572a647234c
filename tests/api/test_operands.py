# SPDX-License-Identifier: Apache-2.0
"""Wrapper results against float64 attention over the stored low-bit operands, decoded by this file.

The LSE does not depend on how P is coded (row sums use the fp32 P), so it must match to fp32
rounding; the output must match to the rounding of P.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from attention_cases import (
    FORMAT_IDS,
    FORMATS,
    assert_lse_close,
    config_for,
    head_rel_l2,
    make_batch,
    offsets,
    paged,
    run_decode,
    run_prefill,
    static_stats,
    visible,
)

import mpfa

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
LOW_BIT = pytest.mark.parametrize("format,compensation,channels", FORMATS[1:], ids=FORMAT_IDS[1:])


def decode_nvfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()
    blocks = scale.view(torch.float8_e4m3fn).double().repeat_interleave(16, dim=-1)
    return E2M1[codes] * blocks


def decode_mx(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    exponents = scale.view(torch.uint8).double() - 127
    return values.double() * torch.exp2(exponents).repeat_interleave(32, dim=-1)


def decode_operands(query: mpfa.QuantizedQuery, kv: mpfa.QuantizedKV, batch):
    """Per request (scores [Hq, Lq, Lk], row term [Hq, Lq] or 0, v [Lk, Hkv, D]) in float64."""
    config = query.config
    group = config.group_size
    mx = config.format == "mxfp8"
    q = decode_mx(query.q, query.q_scale) if mx else decode_nvfp4(query.q, query.q_scale)
    k = decode_mx(kv.k, kv.k_scale) if mx else decode_nvfp4(kv.k, kv.k_scale)
    q_begin = k_begin = scale_begin = 0
    for lq, lk in zip(batch.qo_lens, batch.kv_lens, strict=True):
        qs, ks = slice(q_begin, q_begin + lq), slice(k_begin, k_begin + lk)
        s = torch.einsum("ihd,jhd->hij", q[qs], k[ks].repeat_interleave(group, dim=1))
        first = 0
        if kv.aux_delta is not None:
            s = s + kv.aux_delta[:, None, ks].double()
            first = 1
        if kv.aux_channels is not None:
            a = query.a_comp[qs, :, first : first + config.channels].double()
            b = kv.aux_channels[ks].double().repeat_interleave(group, dim=1)
            s = s + torch.einsum("ihc,jhc->hij", a, b)
        term = 0.0 if query.row_term is None else query.row_term[qs].double().T
        v = kv.v[ks].double()
        if mx:
            rows = -(-lk // 32)
            scale = kv.v_scale[scale_begin : scale_begin + rows].view(torch.uint8).double() - 127
            v = v * torch.exp2(scale).repeat_interleave(32, dim=0)[:lk]
            scale_begin += rows
        yield s, term, v.repeat_interleave(group, dim=1)
        q_begin, k_begin = qs.stop, ks.stop


def operand_attention(query, kv, batch, *, causal, window_left, sm_scale, logits_soft_cap, sinks):
    outs, lses = [], []
    for (s, term, v), lq, lk in zip(
        decode_operands(query, kv, batch), batch.qo_lens, batch.kv_lens, strict=True
    ):
        restored = s + (term[..., None] if torch.is_tensor(term) else term)
        logits = restored * sm_scale
        if logits_soft_cap:
            logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
        logits = logits.masked_fill(~visible(lq, lk, causal, window_left), -math.inf)
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, lq, 1)
            logits = torch.cat([logits, column], dim=2)
            v = torch.cat([v, torch.zeros_like(v[:1]) if lk else v.new_zeros(1, *v.shape[1:])])
        lses.append(torch.logsumexp(logits, dim=2).T)
        p = torch.softmax(logits, dim=2).nan_to_num(0.0)
        outs.append(torch.einsum("hij,jhd->ihd", p, v))
    return torch.cat(outs), torch.cat(lses)


VARIANTS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_left": 33},
    "open window": {"window_left": 50},
    "cap": {"causal": True, "logits_soft_cap": 15.0},
    "sinks": {"causal": True, "sinks": True},
    "all": {
        "causal": True,
        "window_left": 200,
        "logits_soft_cap": 25.0,
        "sinks": True,
        "sm_scale": 0.2,
    },
}


@LOW_BIT
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("heads", [(6, 2, 64), (7, 1, 128)])
def test_wrappers_compute_attention_of_the_stored_operands(
    format, compensation, channels, name, heads
) -> None:
    batch = make_batch(
        [4, 4, 4, 4], [150, 3, 0, 1100], *heads, seed=81, k_bias=4.0, q_bias=1.0, outliers=4.0
    )
    stats = static_stats(batch, compensation, channels)
    config = config_for(batch, format, compensation, channels, 64)
    options = {
        "causal": False,
        "window_left": -1,
        "logits_soft_cap": 0.0,
        "sm_scale": heads[2] ** -0.5,
        "sinks": None,
        **VARIANTS[name],
    }
    if options["sinks"]:
        options["sinks"] = torch.linspace(-5, 8, heads[0])
    query = mpfa.quantize_query(batch.query, config, stats)
    kv = mpfa.quantize_kv(*batch.kv, config, offsets(batch.kv_lens), stats)
    want, want_lse = operand_attention(query, kv, batch, **options)
    sinks = options.pop("sinks")
    pages = paged(batch, config, stats=stats)
    shared = {"config": config, **options}
    runs = {
        "ragged": lambda run: run_prefill(batch, kv, run=run, **shared),
        "paged": lambda run: run_prefill(batch, pages.cache, table=pages.table, run=run, **shared),
        "split": lambda run: run_prefill(
            batch, pages.cache, table=pages.table, run=run, fixed_split_pages=4, **shared
        ),
        "decode": lambda run: run_decode(batch, pages, q_len_per_request=4, run=run, **shared),
    }
    for kind, call in runs.items():
        run = {"out": torch.empty(batch.query.shape), "sinks": sinks, "lse_base": "ln"}
        out, lse = call(run)
        assert not out.isnan().any(), kind
        # Scores of several hundred are stored in fp32 before the subtraction of the maximum.
        assert_lse_close(lse, want_lse, 2e-4)
        # Half an e4m3 step of P, except for a row's largest P, which every format codes exactly.
        assert head_rel_l2(out, want) < 0.035, kind


@pytest.mark.parametrize("group", [16, 17, 20, 32, 64])
def test_large_groups_in_decode(group: int) -> None:
    """More query heads than one tile packs take several head groups."""
    batch = make_batch([2, 2], [1100, 40], group, 1, 64, seed=82)
    stats = static_stats(batch, "mean+channels", 15)
    for format, compensation, channels in (("bf16", "none", 0), ("qk4pv8", "mean+channels", 15)):
        config = config_for(batch, format, compensation, channels, 16)
        pages = paged(batch, config, stats=stats if channels else None)
        run = {"out": torch.empty(batch.query.shape)}
        out, lse = run_decode(batch, pages, q_len_per_request=2, config=config, run=run)
        run = {"out": torch.empty(batch.query.shape)}
        want, want_lse = run_prefill(
            batch,
            pages.cache,
            table=pages.table,
            config=config,
            causal=True,
            run=run,
            fixed_split_pages=64,
        )
        assert head_rel_l2(out, want) < 1e-6
        assert_lse_close(lse, want_lse.double(), 1e-5)


@pytest.mark.slow
@LOW_BIT
@pytest.mark.parametrize("index", range(40))
def test_random_low_bit_cases(format, compensation, channels, index) -> None:
    """The bf16 matrix of test_bf16_exact.py for the low-bit formats, LSE to fp32 rounding."""
    rng = random.Random(f"{format}-{compensation}-{index}")
    group, hkv = rng.choice((1, 3, 4, 5, 7, 8, 16)), rng.choice((1, 2))
    d = rng.choice((64, 64, 128, 256))
    requests = rng.choice((1, 2, 3, 4))
    kv_lens = [rng.choice((0, 1, 17, 64, 128, 129, 300, 1100)) for _ in range(requests)]
    q_len = rng.choice((1, 2, 5, 8))
    ragged = index % 3 == 0
    q_lens = [rng.choice((0, 1, 9, 130)) for _ in kv_lens] if ragged else [q_len] * requests
    batch = make_batch(
        q_lens,
        kv_lens,
        group * hkv,
        hkv,
        d,
        seed=index,
        k_bias=rng.choice((0.0, 3.0)),
        outliers=3.0,
    )
    if sum(q_lens) == 0 or sum(kv_lens) == 0:
        return
    stats = static_stats(batch, compensation, channels)
    sizes = (32, 64, 128) if format == "mxfp8" else (1, 16, 32, 64, 128)
    config = config_for(batch, format, compensation, channels, rng.choice(sizes))
    options = {
        "causal": rng.random() < 0.6,
        "window_left": rng.choice((-1, -1, 0, 5, 100)),
        "logits_soft_cap": rng.choice((0.0, 0.0, 10.0)),
        "sm_scale": rng.choice((d**-0.5, 0.05)),
    }
    sinks = torch.linspace(-5, 8, group * hkv) if rng.random() < 0.4 else None
    query = mpfa.quantize_query(batch.query, config, stats)
    kv = mpfa.quantize_kv(*batch.kv, config, offsets(batch.kv_lens), stats)
    want, want_lse = operand_attention(query, kv, batch, sinks=sinks, **options)
    run = {"out": torch.empty(batch.query.shape), "sinks": sinks, "lse_base": "ln"}
    if ragged:
        out, lse = run_prefill(batch, kv, q=query, config=config, run=run, **options)
    else:
        pages = paged(batch, config, stats=stats, seed=index)
        out, lse = run_decode(
            batch, pages, q_len_per_request=q_len, config=config, run=run, **options
        )
    assert not out.isnan().any()
    assert_lse_close(lse, want_lse, 2e-4)
    # One row of few keys has no averaging of P's rounding: half an e4m3 step is the bound.
    assert head_rel_l2(out, want) < 0.0625
