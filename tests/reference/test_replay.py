# SPDX-License-Identifier: Apache-2.0
"""attend_tile against the paper's Algorithm 1 written out for one row at a time in numpy.

The slow version shares no code with mpfa: it has its own e4m3 rounding by search, and carries
m, l and O as numpy float32. A probability within a few fp32 ulps of an e4m3 rounding boundary may
be coded either way, so each such element adds what that can change to the row's allowance.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from attention_cases import dense_attention, head_rel_l2, make_batch, rel_l2, static_stats

from mpfa.reference import prepare_key, prepare_query
from mpfa.reference.codecs import e4m3_decode, e4m3_encode
from mpfa.reference.nvfp4 import dequantize_nvfp4
from mpfa.reference.replay import (
    KVOperands,
    QueryOperands,
    Scheme,
    TileSpec,
    attend_request,
    attend_tile,
    online_softmax,
    scheme_for,
)

F32 = np.float32
LOG2E = math.log2(math.e)
E4M3 = np.array(
    [m * 2.0**-9 for m in range(8)]
    + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1],
    dtype=np.float64,
)
SCHEMES = [
    Scheme(128, "fixed448"),
    Scheme(64, "fixed448"),
    Scheme(128, "fixed256"),
    Scheme(64, "fixed256"),
    Scheme(64, "tile"),
    Scheme(128, "tile"),
    Scheme(64, "block32"),
    Scheme(128, "block32"),
    Scheme(128, "none"),
]
SCHEME_IDS = [f"{s.p_mode}-{s.kv_block}" for s in SCHEMES]


def to_e4m3(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(nearest e4m3 values of x >= 0, ties to even; the step where x lies close to a boundary)."""
    x = x.astype(np.float64)
    high = np.clip(np.searchsorted(E4M3, x), 1, len(E4M3) - 1)
    low = high - 1
    middle = (E4M3[low] + E4M3[high]) / 2
    up = (x > middle) | ((x == middle) & (high % 2 == 0))
    near = np.abs(x - middle) <= 2e-6 * middle
    return E4M3[np.where(up, high, low)], np.where(near, E4M3[high] - E4M3[low], 0.0)


def slow_row(
    scores: np.ndarray, v: np.ndarray, lam: np.float32, scheme: Scheme
) -> tuple[np.ndarray, float, np.ndarray]:
    """(o, lse base 2, allowance) of one row; scores float32 [n], -inf where masked, v [n, D]."""
    block, n = scheme.kv_block, scores.shape[0]
    m, total = F32(-np.inf), F32(0)
    o = np.zeros(v.shape[1], dtype=F32)
    slack = np.zeros(v.shape[1])
    for b in reversed(range(-(-n // block))):
        s = scores[b * block : (b + 1) * block]
        values = v[b * block : (b + 1) * block].astype(np.float64)
        top = s.max()
        if top == -np.inf:
            continue
        if scheme.p_mode == "tile":
            peak = F32(lam * top)
            if peak > m:
                alpha = F32(0) if m == -np.inf else np.exp2(F32(m - peak))
                o, total, slack = o * alpha, total * alpha, slack * float(alpha)
                m = peak
            exponent = int(np.rint(F32(peak - m)))
            exact = float(lam) * s.astype(np.float64) + float(F32(8 - F32(m + F32(exponent))))
            p = np.exp2(exact.astype(F32)).astype(F32)
            assert p.max() < 448
            weight = F32(2.0) ** F32(exponent - 8)
            coded, near = to_e4m3(p)
            total = F32(total + weight * p.sum(dtype=F32))
            o = (o + weight * (coded @ values).astype(F32)).astype(F32)
            slack += float(weight) * (near @ np.abs(values))
            continue
        new_m = max(m, top)
        alpha = F32(0) if m == -np.inf else np.exp2(F32(lam * F32(m - new_m)))
        p = np.exp2((lam * (s - new_m)).astype(F32)).astype(F32)
        if scheme.p_mode == "none":
            coded, near = p.astype(np.float64), np.zeros_like(p)
        elif scheme.p_mode == "block32":
            coded, near = np.zeros(len(p)), np.zeros(len(p))
            for c in range(0, len(p), 32):
                part = p[c : c + 32].astype(np.float64)
                peak = part.max()
                if peak == 0:
                    continue
                e = -127
                while peak > 448 * 2.0**e:
                    e += 1
                coded[c : c + 32], near[c : c + 32] = to_e4m3(part / 2.0**e)
                coded[c : c + 32] *= 2.0**e
                near[c : c + 32] *= 2.0**e
        else:
            factor = F32(448 if scheme.p_mode == "fixed448" else 256)
            coded, near = to_e4m3(factor * p)
        total = F32(alpha * total + p.sum(dtype=F32))
        o = (alpha * o + (coded @ values).astype(F32)).astype(F32)
        slack = float(alpha) * slack + near @ np.abs(values)
        m = new_m
    if total == 0:
        return np.zeros_like(o), -math.inf, slack
    if scheme.p_mode == "tile":
        return o * F32(F32(1) / total), float(m) + math.log2(total), slack / float(total)
    factor = {"fixed448": 448.0, "fixed256": 256.0}.get(scheme.p_mode, 1.0)
    lse = float(lam) * float(m) + math.log2(total)
    return o / F32(factor * total), lse, slack / (factor * float(total))


def slow_tile(query, kv, heads, group, tile, scheme):
    """attend_tile, one (row, head) at a time: (o [Lt, Hkv, g, D], lse, allowance)."""
    lt, hkv, d = query.q.shape[0], kv.k.shape[1], kv.v.shape[2]
    o = np.zeros((lt, hkv, len(heads), d), dtype=F32)
    lse = np.full((lt, hkv, len(heads)), -np.inf)
    slack = np.zeros_like(o, dtype=np.float64)
    q, k, v = (t.double().numpy() for t in (query.q, kv.k, kv.v))
    for i in range(lt):
        position = tile.q_begin + i + tile.kv_len - tile.qo_len
        for h in range(hkv):
            for g, head in enumerate(heads):
                hq = h * group + head
                keys = range(tile.kv_begin, tile.kv_end)
                s = np.full(len(keys), -np.inf, dtype=F32)
                lam = F32(tile.sm_scale * LOG2E)
                for n, j in enumerate(keys):
                    if tile.causal and j > position:
                        continue
                    if tile.window_left >= 0 and j < position - tile.window_left:
                        continue
                    acc = q[i, hq] @ k[j, h]
                    if query.a_comp is not None:
                        a = query.a_comp[i, hq].double().numpy()
                        slots = []
                        if kv.delta is not None:
                            slots.append(float(kv.delta[j, hq]))
                        if kv.channels is not None:
                            slots += kv.channels[j, h].double().tolist()
                        acc += a[: len(slots)] @ np.array(slots)
                    s[n] = F32(acc)
                if tile.logits_soft_cap > 0:
                    if query.row_term is not None:
                        s = s + F32(query.row_term[i, hq])
                    cap = F32(tile.logits_soft_cap)
                    seen = s > -np.inf
                    s[seen] = cap * np.tanh(s[seen] * F32(tile.sm_scale / float(cap)))
                    lam = F32(LOG2E)
                row_v = v[tile.kv_begin : tile.kv_end, h]
                o[i, h, g], lse[i, h, g], slack[i, h, g] = slow_row(s, row_v, lam, scheme)
    return o, lse, slack


def low_bit_operands(batch, compensation="none", channels=0):
    """Dequantised operands of request 0, with compensation."""
    stats = static_stats(batch, compensation, channels)
    kwargs = {"compensation": compensation}
    if stats is not None:
        kwargs |= {
            "q_mean": stats.q_mean,
            "k_mean": stats.k_mean,
            "channel_index": stats.channel_index,
        }
    query, key = prepare_query(batch.q[0], **kwargs), prepare_key(batch.k[0], **kwargs)
    q = QueryOperands(
        dequantize_nvfp4(query["q"], query["q_scale"]), query["a_comp"], query["row_term"]
    )
    delta, aux = key["aux_delta"], key["aux_channels"]
    kv = KVOperands(
        dequantize_nvfp4(key["k"], key["k_scale"]),
        e4m3_decode(e4m3_encode(batch.v[0].float())),
        None if delta is None else delta.float(),
        None if aux is None else aux.float(),
    )
    return q, kv


def tile_of(batch, *, kv_begin=0, kv_end=None, **options):
    lq, lk = batch.qo_lens[0], batch.kv_lens[0]
    values = {
        "q_begin": 0,
        "qo_len": lq,
        "kv_len": lk,
        "kv_begin": kv_begin,
        "kv_end": lk if kv_end is None else kv_end,
        "causal": False,
        "window_left": -1,
        "sm_scale": batch.shape[2] ** -0.5,
        "logits_soft_cap": 0.0,
    }
    return TileSpec(**{**values, **options})


def compare(query, kv, heads, group, tile, scheme, rtol=3e-6):
    o, lse = attend_tile(query, kv, heads, group, tile, scheme)
    want, want_lse, slack = slow_tile(query, kv, heads, group, tile, scheme)
    # Weights sum to one, so an output is at most max |v|; rounding is relative to that.
    bound = rtol * float(kv.v.abs().max()) + slack
    assert (np.abs(o.numpy().astype(np.float64) - want) <= bound).all()
    assert (slack > 0).mean() < 0.2, "boundary cases must stay the exception"
    hole = np.isneginf(want_lse)
    assert (np.isneginf(lse.numpy()) == hole).all()
    np.testing.assert_allclose(lse.numpy()[~hole], want_lse[~hole], rtol=3e-6, atol=3e-6)
    return o, lse


def test_e4m3_table_of_this_file() -> None:
    table = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    assert (table == E4M3).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=SCHEME_IDS)
@pytest.mark.parametrize("causal", [False, True])
def test_random_operands(scheme: Scheme, causal: bool) -> None:
    batch = make_batch([9], [330], 4, 2, 64, seed=1, scale=2.0)
    compare(*low_bit_operands(batch), [0, 1], 2, tile_of(batch, causal=causal), scheme)


@pytest.mark.parametrize("scheme", SCHEMES, ids=SCHEME_IDS)
def test_growing_logits_rescale_in_every_block(scheme: Scheme) -> None:
    """The maximum moves up in each step of the reverse walk, and down in the other half."""
    batch = make_batch([6], [520], 2, 1, 64, seed=2)
    query, kv = low_bit_operands(batch)
    ramp = torch.linspace(40, -40, 520)
    k = kv.k.clone()
    k[:, :, 0] = ramp[:, None]
    q = query.q.clone()
    q[:, :, 0] = torch.tensor([1.0, -1.0, 4.0, -4.0, 0.25, 0.0])[:, None]
    tile = tile_of(batch, causal=False)
    compare(QueryOperands(q), KVOperands(k, kv.v), [0, 1], 2, tile, scheme, rtol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES, ids=SCHEME_IDS)
def test_attention_sink_rows(scheme: Scheme) -> None:
    """Four leading keys take most of the mass and carry small values (the pattern of LLM heads)."""
    batch = make_batch([5], [390], 2, 1, 64, seed=3)
    query, kv = low_bit_operands(batch)
    k, v = kv.k.clone(), kv.v.clone()
    direction = torch.sign(query.q.sum(dim=(0, 1)))
    k[:4] = direction * 2.0
    v[:4] *= 2.0**-6
    q = query.q + direction
    compare(QueryOperands(q), KVOperands(k, v), [0, 1], 2, tile_of(batch, causal=True), scheme)


@pytest.mark.parametrize("scheme", SCHEMES, ids=SCHEME_IDS)
def test_masked_blocks_and_rows(scheme: Scheme) -> None:
    """Windows hide whole leading blocks, causal hides trailing ones, some rows see nothing."""
    batch = make_batch([300], [200], 1, 1, 64, seed=4)
    query, kv = low_bit_operands(batch)
    rows = [0, 50, 99, 100, 101, 150, 298, 299]
    for row in rows:
        part = QueryOperands(query.q[row : row + 1])
        tile = tile_of(batch, q_begin=row, causal=True, window_left=20)
        _, lse = compare(part, kv, [0], 1, tile, scheme)
        assert bool((lse == -torch.inf).all()) == (row < 100)


@pytest.mark.parametrize("scheme", SCHEMES, ids=SCHEME_IDS)
def test_partition_in_the_middle_and_a_head_subset(scheme: Scheme) -> None:
    batch = make_batch([7], [700], 6, 2, 64, seed=5)
    query, kv = low_bit_operands(batch)
    part = QueryOperands(query.q[3:6])
    tile = tile_of(batch, q_begin=3, kv_begin=256, kv_end=601, causal=True)
    compare(part, kv, [1, 2], 3, tile, scheme)


@pytest.mark.parametrize(
    "compensation,channels",
    [("mean", 0), ("channels", 16), ("channels", 5), ("mean+channels", 15), ("mean+channels", 3)],
)
@pytest.mark.parametrize("soft_cap", [0.0, 20.0])
@pytest.mark.parametrize("p_mode", ["fixed448", "none"])
def test_compensation_slots(compensation: str, channels: int, soft_cap: float, p_mode: str) -> None:
    batch = make_batch([5], [140], 6, 2, 64, seed=6, k_bias=3.0, q_bias=1.0, outliers=6.0)
    query, kv = low_bit_operands(batch, compensation, channels)
    tile = tile_of(batch, causal=True, window_left=90, logits_soft_cap=soft_cap)
    # tanh and exp2 of large scores: an ulp of the score is the unit of error.
    compare(query, kv, [0, 1, 2], 3, tile, Scheme(128, p_mode), rtol=2e-5)


@pytest.mark.parametrize("scheme", SCHEMES, ids=SCHEME_IDS)
def test_integer_cases_are_bit_equal(scheme: Scheme) -> None:
    """Powers of two everywhere: no step rounds, so the bits are known."""
    gen = torch.Generator().manual_seed(7)
    lk = 256
    pick = torch.randint(0, 2, (lk,), generator=gen)
    k = torch.zeros(lk, 1, 64)
    k[:, 0, 0] = pick.float()
    v = torch.randint(-8, 9, (lk, 1, 64), generator=gen).float()
    v[0] = 0
    pick[0] = 1
    k[0, 0, 0] = 1.0
    # lambda * score must be an integer: exp(S * ln 2 * n) = 2^n.
    sm_scale = math.log(2.0) * 3
    q = torch.zeros(1, 1, 64)
    q[0, 0, 0] = 1.0
    assert F32(sm_scale * LOG2E) == 3.0
    tile = TileSpec(0, 1, lk, 0, lk, False, -1, sm_scale, 0.0)
    o, lse = attend_tile(QueryOperands(q), KVOperands(k, v), [0], 1, tile, scheme)
    weights = np.where(pick.numpy() == 1, 8.0, 1.0)
    total = weights.sum()
    # 448/8 = 56, 256/8 = 32 and the powers of two of the other schemes are e4m3 values.
    numerator = weights @ v[:, 0].double().numpy()
    factor = {"fixed448": 448.0, "fixed256": 256.0}.get(scheme.p_mode, 1.0)
    if scheme.p_mode == "tile":  # multiplies by the reciprocal of l, which is in units of 2^8
        want = F32(numerator / 8) * (F32(1) / F32(total / 8))
    else:
        want = F32(numerator / 8 * factor) / F32(total / 8 * factor)
    assert (o[0, 0, 0].numpy() == want).all()
    assert lse.item() == F32(3.0 + F32(np.log2(F32(total / 8))))


def test_row_sum_uses_fp32_p_and_not_the_coded_one() -> None:
    """One key at P=1, many at a P that e4m3 rounds: l must hold the unrounded value."""
    lk, p = 101, 1 / 3
    k = torch.zeros(lk, 1, 64)
    k[1:, 0, 0] = math.log2(p)
    v = torch.ones(lk, 1, 64)
    q = torch.zeros(1, 1, 64)
    q[0, 0, 0] = 1.0
    tile = TileSpec(0, 1, lk, 0, lk, False, -1, math.log(2.0), 0.0)
    for mode, factor in (("fixed448", 448.0), ("fixed256", 256.0)):
        o, lse = attend_tile(QueryOperands(q), KVOperands(k, v), [0], 1, tile, Scheme(128, mode))
        coded, _ = to_e4m3(np.array([factor * p]))
        assert coded[0] / factor != p
        want = (factor + 100 * coded[0]) / (factor * (1 + 100 * p))
        np.testing.assert_allclose(o[0, 0, 0].numpy(), want, rtol=1e-6)
        np.testing.assert_allclose(lse.item(), math.log2(1 + 100 * p), rtol=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES, ids=SCHEME_IDS)
def test_one_visible_key_gives_its_value(scheme: Scheme) -> None:
    """P of the row's largest key is a code of its own, so nothing of it is lost."""
    gen = torch.Generator().manual_seed(3)
    lk = 200
    k, v = torch.randn(lk, 1, 64, generator=gen), torch.randn(lk, 1, 64, generator=gen)
    q = torch.randn(lk, 1, 64, generator=gen)
    tile = TileSpec(0, lk, lk, 0, lk, True, 0, 0.125, 0.0)  # row i sees key i
    o, lse = attend_tile(QueryOperands(q), KVOperands(k, v), [0], 1, tile, scheme)
    torch.testing.assert_close(o[:, :, 0], v, rtol=2e-6, atol=0)
    want = (q.double() * k.double()).sum(-1) * 0.125 * LOG2E
    torch.testing.assert_close(lse[:, :, 0].double(), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("scheme", SCHEMES, ids=SCHEME_IDS)
def test_values_that_no_row_sees_may_be_nan(scheme: Scheme) -> None:
    gen = torch.Generator().manual_seed(4)
    k, v = torch.randn(200, 1, 64, generator=gen), torch.randn(200, 1, 64, generator=gen)
    q = QueryOperands(torch.randn(5, 1, 64, generator=gen))
    tile = TileSpec(0, 5, 200, 0, 200, True, 40, 0.125, 0.0)
    want = attend_tile(q, KVOperands(k, v), [0], 1, tile, scheme)
    k[: 200 - 5 - 40], v[: 200 - 5 - 40] = torch.nan, torch.nan
    got = attend_tile(q, KVOperands(k, v), [0], 1, tile, scheme)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("block", [64, 128])
def test_values_near_the_end_of_float32(block: int) -> None:
    """Block scales reach P V before it is rounded to fp32, as in the MMA."""
    gen = torch.Generator().manual_seed(5)
    k, v = torch.zeros(130, 1, 64), torch.rand(130, 1, 64, generator=gen) + 0.5
    tile = TileSpec(0, 1, 130, 0, 130, False, -1, 0.125, 0.0)
    q, scheme = QueryOperands(torch.zeros(1, 1, 64)), Scheme(block, "tile")
    o, _ = attend_tile(q, KVOperands(k, v * 2.0**115), [0], 1, tile, scheme)
    want, _ = attend_tile(q, KVOperands(k, v), [0], 1, tile, scheme)
    assert torch.equal(o, want * 2.0**115)


def test_walk_is_last_to_first() -> None:
    """With the sink in block 0, the reverse walk codes early blocks at their own maximum."""
    lk = 256
    k = torch.zeros(lk, 1, 64)
    k[0, 0, 0] = 20.0
    # 2^-20 of the total: codes of the last block vanish only if block 0 was seen before it.
    v = torch.zeros(lk, 1, 64)
    v[128:, 0, 0] = 1.0
    q = torch.zeros(1, 1, 64)
    q[0, 0, 0] = 1.0
    tile = TileSpec(0, 1, lk, 0, lk, False, -1, math.log(2.0), 0.0)
    o, _ = attend_tile(QueryOperands(q), KVOperands(k, v), [0], 1, tile, Scheme(128, "fixed448"))
    want = 128 / (2.0**20 + 255)
    assert o[0, 0, 0, 0].item() == pytest.approx(want, rel=1e-6)


def test_running_max_includes_the_current_block() -> None:
    """Every block's largest P is at most 1: nothing saturates at 448, whatever the order."""
    lk = 512
    k = torch.zeros(lk, 1, 64)
    k[:, 0, 0] = torch.linspace(60, 0, lk)
    v = torch.ones(lk, 1, 64)
    q = torch.zeros(2, 1, 64)
    q[0, 0, 0], q[1, 0, 0] = 1.0, -1.0
    tile = TileSpec(0, 2, lk, 0, lk, False, -1, math.log(2.0), 0.0)
    for scheme in SCHEMES:
        o, _ = attend_tile(QueryOperands(q), KVOperands(k, v), [0], 1, tile, scheme)
        # v = 1: the output is coded mass over true mass, off by less than half an e4m3 step.
        assert (o - 1).abs().max().item() < 2.0**-4


@pytest.mark.parametrize(
    "format,head_dim,block,p_mode",
    [
        ("qk4pv8", 64, 128, "fixed448"),
        ("qk4pv8", 128, 128, "fixed448"),
        ("qk4pv8", 256, 128, "fixed448"),
        ("mxfp8", 64, 128, "tile"),
        ("mxfp8", 128, 64, "tile"),
        ("mxfp8", 256, 64, "tile"),
        ("bf16", 128, 128, "none"),
    ],
)
def test_scheme_of_each_format(format: str, head_dim: int, block: int, p_mode: str) -> None:
    assert scheme_for(format, head_dim) == Scheme(block, p_mode)


BIASED = {"seed": 8, "k_bias": 12.0, "q_bias": 1.5}
VARIANTS = {
    "plain": {},
    "causal": {"causal": True},
    "soft_cap": {"causal": True, "logits_soft_cap": 30.0},
    "window": {"causal": True, "window_left": 60},
}


def request_error(batch, compensation, channels, **options) -> tuple[float, float]:
    """(largest per-head rel L2, largest |LSE error| in nats) of attend_request to float64."""
    query, kv = low_bit_operands(batch, compensation, channels)
    o, lse = attend_request(query, kv, scheme=Scheme(128, "fixed448"), **options)
    want, want_lse = dense_attention(batch.q[0], batch.k[0], batch.v[0], **options)
    seen = ~torch.isneginf(want_lse)
    lse_error = (lse / LOG2E - want_lse)[seen].abs().max().item()
    return head_rel_l2(o, want), lse_error


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("compensation,channels", [("mean", 0), ("mean+channels", 15)])
def test_centring_restores_output_and_lse(name: str, compensation: str, channels: int) -> None:
    """k_mean rms is 12: direct NVFP4 is far off, and a lost row term would be visible at once."""
    batch = make_batch([140], [140], 4, 2, 64, **BIASED)
    assert torch.cat(batch.k).float().mean(0).square().mean().sqrt() >= 10
    options = VARIANTS[name]
    out_error, lse_error = request_error(batch, compensation, channels, **options)
    direct, direct_lse = request_error(batch, "none", 0, **options)
    assert out_error < 0.2 and lse_error < 0.5
    assert direct > 1.5 * out_error and direct_lse > 3 * lse_error


def test_centred_values_that_fit_the_format_are_exact() -> None:
    """Means and centred values on the FP4 grid: "mean" with an uncoded P is exact attention."""
    gen = torch.Generator().manual_seed(9)
    lq, lk, hq, hkv, d = 8, 128, 4, 2, 64
    levels = torch.tensor([-6.0, -3.0, -1.0, 0.0, 1.0, 3.0, 6.0])

    def grid(n: int, heads: int) -> torch.Tensor:
        x = levels[torch.randint(0, 7, (n // 2, heads, d), generator=gen)]
        x[:, :, ::16] = 6.0  # amax 6 in every 16-block: the block scale is exactly 1
        return torch.cat([x, -x])  # mean 0

    q_mean = torch.randint(-3, 4, (hq, d), generator=gen).float()
    k_mean = torch.randint(-20, 21, (hkv, d), generator=gen).float() * 2
    q, k = grid(lq, hq) + q_mean, grid(lk, hkv) + k_mean
    v = torch.randn(lk, hkv, d, generator=gen)
    v = e4m3_decode(e4m3_encode(v))
    assert k_mean.square().mean().sqrt() > 10
    args = {"compensation": "mean", "q_mean": q_mean, "k_mean": k_mean}
    query, key = prepare_query(q, **args), prepare_key(k, **args)
    # q_mean . k' is an integer that may need more bits than bf16 has; keep those that fit.
    delta = key["aux_delta"].float()
    exact_delta = torch.einsum(
        "hgd,jhd->jhg", q_mean.view(hkv, -1, d).double(), (k - k_mean).double()
    ).flatten(1)
    fits = (delta.double() == exact_delta).all(dim=1)
    assert fits.sum() > 10
    keep = fits.nonzero().flatten()
    tile = TileSpec(0, lq, len(keep), 0, len(keep), False, -1, 0.002, 0.0)
    kv = KVOperands(dequantize_nvfp4(key["k"], key["k_scale"])[keep], v[keep], delta[keep])
    operands = QueryOperands(
        dequantize_nvfp4(query["q"], query["q_scale"]), query["a_comp"], query["row_term"]
    )
    assert torch.equal(operands.q, q - q_mean) and torch.equal(kv.k, (k - k_mean)[keep])
    o, lse = attend_tile(operands, kv, [0, 1], 2, tile, Scheme(128, "none"))
    want, want_lse = dense_attention(q, k[keep], v[keep], sm_scale=0.002)
    assert rel_l2(o.flatten(1, 2), want) < 1e-5
    lse = lse.flatten(1, 2) + 0.002 * LOG2E * query["row_term"]
    torch.testing.assert_close(lse.double() / LOG2E, want_lse, rtol=0, atol=2e-5)


def test_no_keys_and_no_rows() -> None:
    q = QueryOperands(torch.ones(2, 2, 64))
    kv = KVOperands(torch.ones(4, 1, 64), torch.ones(4, 1, 64))
    tile = TileSpec(0, 2, 4, 0, 0, False, -1, 1.0, 0.0)
    o, lse = attend_tile(q, kv, [0, 1], 2, tile, Scheme(128, "none"))
    assert o.shape == (2, 1, 2, 64) and (o == 0).all() and (lse == -torch.inf).all()
    o, lse = attend_tile(QueryOperands(q.q[:0]), kv, [0, 1], 2, tile, Scheme(128, "none"))
    assert o.shape == (0, 1, 2, 64) and lse.shape == (0, 1, 2)


def test_nan_is_not_an_empty_row() -> None:
    scores = torch.zeros(1, 3, 256)
    scores[0, 0, 200] = math.nan
    scores[0, 1] = -math.inf
    o, lse = online_softmax(scores, torch.ones(1, 256, 64), 1.0, Scheme(128, "none"))
    assert o[0, 0].isnan().all() and lse[0, 0].isnan()
    assert (o[0, 1] == 0).all() and lse[0, 1] == -math.inf
    assert (o[0, 2] == 1).all() and lse[0, 2] == 8
