# SPDX-License-Identifier: Apache-2.0
"""Float64 attention against a loop over keys and against torch's own attention."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfa.reference import exact
from mpfa.reference.exact import exact_attention


def slow_attention(q, k, v, causal, scale, window_left, cap, sinks):
    lq, hq, dim = q.shape
    lk, hkv, _ = k.shape
    out, lse = torch.zeros(lq, hq, dim, dtype=torch.float64), torch.zeros(lq, hq).double()
    for i in range(lq):
        for h in range(hq):
            weights, rows = [], []
            for j in range(lk):
                position = i + lk - lq
                if (causal and j > position) or (window_left >= 0 and j < position - window_left):
                    continue
                s = float(q[i, h].double() @ k[j, h * hkv // hq].double()) * scale
                if cap > 0:
                    s = cap * math.tanh(s / cap)
                weights.append(math.exp(s))
                rows.append(v[j, h * hkv // hq].double())
            total = sum(weights) + (math.exp(float(sinks[h])) if sinks is not None else 0.0)
            lse[i, h] = math.log(total) if total > 0 else -math.inf
            for w, row in zip(weights, rows, strict=True):
                out[i, h] += w / total * row
    return out, lse


def inputs(lq, lk, hkv, group, dim=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(lq, hkv * group, dim, generator=g)
    k, v = (torch.randn(lk, hkv, dim, generator=g) for _ in range(2))
    return q, k, v, torch.randn(hkv * group, generator=g)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lq=st.integers(0, 7),
    lk=st.integers(0, 9),
    hkv=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 5]),
    causal=st.booleans(),
    window_left=st.sampled_from([-1, 0, 1, 3, 20]),
    cap=st.sampled_from([0.0, 0.7, 30.0]),
    with_sinks=st.booleans(),
    scale=st.sampled_from([None, 1.0, 0.1]),
)
def test_against_loop(lq, lk, hkv, group, causal, window_left, cap, with_sinks, scale):
    q, k, v, sinks = inputs(lq, lk, hkv, group)
    sinks = sinks if with_sinks else None
    out, lse = exact_attention(
        q,
        k,
        v,
        causal=causal,
        sm_scale=scale,
        window_left=window_left,
        logits_soft_cap=cap,
        sinks=sinks,
    )
    used = 0.25 if scale is None else scale
    want_out, want_lse = slow_attention(q, k, v, causal, used, window_left, cap, sinks)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_against_torch_sdpa(causal):
    q, k, v, _ = inputs(33, 33, 2, 4, dim=64)
    out, lse = exact_attention(q, k, v, causal=causal)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(t.double().transpose(0, 1) for t in (q, k, v)), is_causal=causal, enable_gqa=True
    )
    torch.testing.assert_close(out, want.transpose(0, 1), rtol=1e-12, atol=1e-12)
    s = torch.einsum("ihd,jhd->ihj", q.double(), k.repeat_interleave(4, 1).double()) / 8
    if causal:
        s = s.masked_fill(torch.ones(33, 33).triu(1).bool()[:, None], -math.inf)
    torch.testing.assert_close(lse, s.logsumexp(-1), rtol=1e-12, atol=1e-12)


def test_rows_without_visible_keys():
    q, k, v, sinks = inputs(5, 2, 1, 3)
    out, lse = exact_attention(q, k, v, causal=True)
    assert not out[:3].any() and bool(torch.isneginf(lse[:3]).all())
    assert bool(torch.isfinite(lse[3:]).all()) and torch.allclose(out[3], v[:1].double())
    out, lse = exact_attention(q, k, v, causal=True, sinks=sinks)
    assert not out[:3].any() and torch.equal(lse[:3], sinks.double().expand(3, 3))
    # No key at all.
    out, lse = exact_attention(q, k[:0], v[:0], sinks=sinks)
    assert not out.any() and torch.equal(lse, sinks.double().expand(5, 3))
    assert bool(torch.isneginf(exact_attention(q, k[:0], v[:0])[1]).all())
    # No query.
    out, lse = exact_attention(q[:0], k, v)
    assert out.shape == (0, 3, 16) and lse.shape == (0, 3)


def test_window_is_inclusive():
    # One-hot keys tell which keys are visible: equal weights, value j in channel 0.
    q, k = torch.zeros(6, 1, 16), torch.zeros(6, 1, 16)
    v = torch.zeros(6, 1, 16)
    v[:, 0, 0] = 10.0 ** torch.arange(6)
    out, lse = exact_attention(q, k, v, causal=True, window_left=2)
    want = [1, 11, 111, 1110, 11100, 111000]
    count = [1, 2, 3, 3, 3, 3]
    torch.testing.assert_close(
        out[:, 0, 0] * torch.tensor(count), torch.tensor(want).double(), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(lse[:, 0], torch.tensor(count).double().log())


def test_large_logits_and_infinite_sink():
    q, k, v, _ = inputs(3, 4, 1, 2)
    out, lse = exact_attention(q * 1e4, k * 1e4, v)
    assert bool(torch.isfinite(out).all()) and bool(torch.isfinite(lse).all())
    plain = exact_attention(q, k, v)
    for sink in (-math.inf, -1e30):
        got = exact_attention(q, k, v, sinks=torch.full((2,), sink))
        torch.testing.assert_close(got, plain, rtol=1e-12, atol=1e-12)
    out, lse = exact_attention(q, k, v, sinks=torch.full((2,), 1e6))
    assert not out.any() and bool((lse == 1e6).all())


def test_row_slices_do_not_change_the_result(monkeypatch):
    q, k, v, sinks = inputs(37, 50, 2, 3, dim=32)
    kwargs = {"causal": True, "window_left": 20, "sinks": sinks}
    whole = exact_attention(q, k, v, **kwargs)
    monkeypatch.setattr(exact, "_MAX_SCORES", 600)
    torch.testing.assert_close(exact_attention(q, k, v, **kwargs), whole, rtol=1e-13, atol=1e-14)


def test_bad_arguments():
    q, k, v, sinks = inputs(2, 3, 2, 2)
    with pytest.raises(ValueError, match="q: 3 heads"):
        exact_attention(q[:, :3], k, v)
    with pytest.raises(ValueError, match="v: shape"):
        exact_attention(q, k, v[:2])
    with pytest.raises(ValueError, match="sinks: shape"):
        exact_attention(q, k, v, sinks=sinks[:3])
