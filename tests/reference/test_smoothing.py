# SPDX-License-Identifier: Apache-2.0
"""Compensation: summation order, exact integer identities, channel slots."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfa.config import comp_slots
from mpfa.reference.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from mpfa.reference.smoothing import (
    delta_scores,
    dot_fp32,
    prepare_key,
    prepare_query,
    split_channels,
)

F32 = np.float32


def slow_dot(slow, a, b):
    """One fp32 operation at a time, in the documented order."""
    sums = []
    for begin in range(0, len(a), 16):
        acc = F32(a[begin]) * F32(b[begin])
        for i in range(begin + 1, begin + 16):
            acc = slow.fma(a[i], b[i], acc)
        sums.append(acc)
    while len(sums) > 1:
        sums = [sums[i] + sums[i + 1] for i in range(0, len(sums), 2)]
    return sums[0]


@pytest.mark.parametrize("dim", [16, 64, 128, 256])
def test_dot_order_bit_equal(slow, dim):
    g = torch.Generator().manual_seed(dim)
    a = torch.randn(7, 3, dim, generator=g) * torch.logspace(-2, 2, dim)
    b = torch.randn(3, dim, generator=g)
    got = dot_fp32(a, b)
    assert got.shape == (7, 3) and got.dtype == torch.float32
    want = [[slow_dot(slow, a[t, h].numpy(), b[h].numpy()) for h in range(3)] for t in range(7)]
    assert got.tolist() == np.array(want, dtype=np.float32).tolist()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.sampled_from([32, 64, 128]))
def test_dot_order_any_magnitudes(slow, seed, dim):
    g = np.random.default_rng(seed)
    a, b = (
        (g.standard_normal(dim) * 10.0 ** g.integers(-6, 6, dim)).astype(np.float32)
        for _ in range(2)
    )
    assert float(dot_fp32(torch.from_numpy(a), torch.from_numpy(b))) == float(slow_dot(slow, a, b))


def test_dot_adds_exact_products():
    # (1+2^-12)^2 = 1 + 2^-11 + 2^-24: an FMA keeps the last bit, a rounded product loses it.
    a = torch.zeros(64)
    a[0], a[1] = -1.0 - 2.0**-11, 1 + 2.0**-12
    b = torch.zeros(64)
    b[0], b[1] = 1.0, 1 + 2.0**-12
    assert float(dot_fp32(a, b)) == 2.0**-24


def test_dot_broadcasts_and_rejects():
    a, b = torch.ones(5, 1, 64), torch.arange(3.0)[:, None].expand(3, 64)
    assert dot_fp32(a, b).tolist() == [[0.0, 64.0, 128.0]] * 5
    for left, right in ((64, 32), (48, 48), (24, 24)):
        with pytest.raises(ValueError, match="a, b"):
            dot_fp32(torch.zeros(left), torch.zeros(right))


def test_delta_scores_heads_and_rounding():
    g = torch.Generator().manual_seed(0)
    k, q_mean = torch.randn(6, 2, 64, generator=g), torch.randn(6, 64, generator=g) * 3
    got = delta_scores(k, q_mean)
    assert got.shape == (6, 6) and got.dtype == torch.bfloat16
    for h in range(6):
        want = dot_fp32(q_mean[h], k[:, h // 3]).to(torch.bfloat16)
        assert torch.equal(got[:, h], want)
    per_token = q_mean.expand(6, 6, 64) * torch.arange(1, 7).reshape(6, 1, 1)
    got = delta_scores(k, per_token)
    for t in range(6):
        assert torch.equal(got[t], delta_scores(k[t : t + 1], per_token[t])[0])
    with pytest.raises(ValueError, match="q_mean: 5 heads"):
        delta_scores(k, q_mean[:5])


def test_split_channels():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(4, 6, 32, generator=g)
    x[0, 0, 9] = -0.0
    before = x.clone()
    index = torch.tensor([[9, 0, 31], [5, 4, 17]], dtype=torch.int32)
    rest, values = split_channels(x, index)
    assert values.dtype == torch.bfloat16 and values.shape == (4, 6, 3)
    for h in range(6):
        channels = index[h // 3].long()
        assert torch.equal(values[:, h], x[:, h][:, channels].to(torch.bfloat16))
        assert not rest[:, h][:, channels].any()
        assert not torch.signbit(rest[:, h][:, channels]).any()
        keep = torch.ones(32, dtype=torch.bool)
        keep[channels] = False
        assert torch.equal(rest[:, h][:, keep], x[:, h][:, keep])
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([[0, 32]], r"channel_index: 32 at index \(0, 1\)"),
        ([[-1, 3]], r"channel_index: -1 at index \(0, 0\)"),
        ([[7, 2, 7]], "channel 7 is listed twice for KV head 0"),
        ([[0], [1], [2], [3]], "4 rows"),
    ],
)
def test_split_channels_rejects(index, message):
    with pytest.raises(ValueError, match=message):
        split_channels(torch.zeros(2, 6, 32), torch.tensor(index, dtype=torch.int32))


def test_split_channels_rejects_dtype():
    with pytest.raises(ValueError, match="channel_index"):
        split_channels(torch.zeros(2, 6, 32), torch.zeros(2, 1))


def integer_case(compensation, group, dim, channels, seed):
    """Q, K and statistics whose every intermediate is an exactly representable integer."""
    g = torch.Generator().manual_seed(seed)
    heads_kv, lq, lk = 2, 5, 9
    heads_q = heads_kv * group
    index = torch.stack([torch.randperm(dim, generator=g)[:channels] for _ in range(heads_kv)])
    index = index.sort(dim=-1, descending=True).values.to(torch.int32)

    def operand(tokens, heads):
        # e2m1 values with a 6 in every block that keeps a channel: all scales are 1 (or 0).
        levels = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 6.0])
        x = levels[torch.randint(0, 6, (tokens, heads, dim), generator=g)]
        x *= torch.randint(0, 2, x.shape, generator=g) * 2 - 1
        for h in range(heads):
            outliers = set(index[h * heads_kv // heads].tolist()) if channels else set()
            for block in range(0, dim, 16):
                kept = [i for i in range(block, block + 16) if i not in outliers]
                if kept:
                    x[:, h, kept[-1]] = 6.0
            for i in outliers:
                x[:, h, i] = torch.randint(-100, 101, (tokens,), generator=g).float()
        return x

    q, k = operand(lq, heads_q), operand(lk, heads_kv)
    stats = {}
    if "mean" in compensation:
        # Two nonzero channels keep |Delta_S| <= 200, which bf16 holds exactly.
        q_mean = torch.zeros(heads_q, dim)
        q_mean[:, 3], q_mean[:, dim - 2] = 1.0, -1.0
        k_mean = torch.randint(-50, 51, (heads_kv, dim), generator=g).float()
        q, k = q + q_mean, k + k_mean
        stats = {"q_mean": q_mean, "k_mean": k_mean}
    if "channels" in compensation:
        stats["channel_index"] = index
    return q, k, stats


def scores(query, key, group):
    """Reassemble q.k for every (query, head, key) from the prepared operands, in float64."""
    q = dequantize_nvfp4(query["q"], query["q_scale"]).double()
    k = dequantize_nvfp4(key["k"], key["k_scale"]).double().repeat_interleave(group, dim=1)
    s = torch.einsum("ihd,jhd->ihj", q, k)
    if query["a_comp"] is not None:
        heads = q.shape[1]
        slots = []
        if key["aux_delta"] is not None:
            slots.append(key["aux_delta"][..., None])
        if key["aux_channels"] is not None:
            slots.append(key["aux_channels"].repeat_interleave(group, dim=1))
        b = torch.cat(slots, dim=-1).double()
        rank = query["a_comp"].shape[-1]
        b_comp = torch.zeros(b.shape[0], heads, rank, dtype=torch.float64)
        b_comp[..., : b.shape[-1]] = b
        s = s + torch.einsum("ihr,jhr->ihj", query["a_comp"].double(), b_comp)
    if query["row_term"] is not None:
        s = s + query["row_term"].double()[..., None]
    return s


@pytest.mark.parametrize("group", [1, 3, 4, 5, 8])
@pytest.mark.parametrize(
    ("compensation", "channels"),
    [
        ("none", 0),
        ("mean", 0),
        ("channels", 1),
        ("channels", 16),
        ("mean+channels", 1),
        ("mean+channels", 15),
    ],
)
@pytest.mark.parametrize("dim", [64, 128])
def test_integer_scores_are_exact(compensation, channels, group, dim):
    q, k, stats = integer_case(compensation, group, dim, channels, seed=group)
    query = prepare_query(q, compensation=compensation, **stats)
    key = prepare_key(k, compensation=compensation, **stats)
    want = torch.einsum("ihd,jhd->ihj", q.double(), k.repeat_interleave(group, 1).double())
    assert torch.equal(scores(query, key, group), want)
    if compensation != "none":
        # The compensation carries the result: without it the same bytes are far off.
        bare = dict(query, a_comp=None, row_term=None)
        assert not torch.equal(scores(bare, key, group), want)
        assert query["a_comp"].shape == (5, 2 * group, 16)
        assert query["a_comp"].dtype == torch.bfloat16


@pytest.mark.parametrize("compensation", ["none", "mean", "channels", "mean+channels"])
def test_shapes_dtypes_and_padding(compensation):
    q, k, stats = integer_case("mean+channels", 4, 64, 3, seed=9)
    query = prepare_query(q, compensation=compensation, **stats)
    key = prepare_key(k, compensation=compensation, **stats)
    mean, channels = "mean" in compensation, "channels" in compensation
    assert query["q"].shape == (5, 8, 32) and query["q_scale"].shape == (5, 8, 4)
    assert key["k"].shape == (9, 2, 32) and key["k_scale"].shape == (9, 2, 4)
    assert (query["a_comp"] is None) == (compensation == "none")
    assert (query["row_term"] is None) == (key["aux_delta"] is None) == (not mean)
    assert (key["aux_channels"] is None) == (not channels)
    if mean:
        assert query["row_term"].shape == (5, 8) and query["row_term"].dtype == torch.float32
        assert key["aux_delta"].shape == (9, 8) and key["aux_delta"].dtype == torch.bfloat16
        assert bool((query["a_comp"][..., 0] == 1).all())
    if channels:
        centred = q - stats["q_mean"] if mean else q
        for h in range(8):
            want = centred[:, h][:, stats["channel_index"][h // 4].long()].to(torch.bfloat16)
            assert torch.equal(query["a_comp"][:, h, int(mean) : int(mean) + 3], want)
    if compensation != "none":
        used = int(mean) + 3 * channels
        assert query["a_comp"].shape[-1] == 16 and not query["a_comp"][..., used:].any()


def test_row_term_uses_uncentred_queries_and_all_channels():
    g = torch.Generator().manual_seed(2)
    q = torch.randn(3, 4, 64, generator=g).to(torch.bfloat16)
    q_mean, k_mean = torch.randn(4, 64, generator=g), torch.randn(2, 64, generator=g) * 10
    index = torch.tensor([[1, 5], [2, 60]], dtype=torch.int32)
    stats = {"q_mean": q_mean, "k_mean": k_mean, "channel_index": index}
    query = prepare_query(q, compensation="mean+channels", **stats)
    for h in range(4):
        assert torch.equal(query["row_term"][:, h], dot_fp32(q[:, h], k_mean[h // 2]))
    k = torch.randn(7, 2, 64, generator=g).to(torch.bfloat16)
    key = prepare_key(k, compensation="mean+channels", **stats)
    centred = k.float() - k_mean
    assert torch.equal(key["aux_delta"], delta_scores(centred, q_mean))
    rest = split_channels(centred, index)[0]
    packed, scale = quantize_nvfp4(rest)
    assert torch.equal(key["k"], packed) and torch.equal(key["k_scale"], scale)


@pytest.mark.parametrize("compensation", ["mean", "mean+channels"])
def test_per_token_statistics_equal_per_request_calls(compensation):
    g = torch.Generator().manual_seed(3)
    q, k = torch.randn(6, 6, 64, generator=g), torch.randn(6, 2, 64, generator=g)
    q_mean, k_mean = torch.randn(2, 6, 64, generator=g), torch.randn(2, 2, 64, generator=g)
    index = torch.tensor([[0, 9], [63, 31]], dtype=torch.int32)
    row = torch.tensor([0, 1, 1, 0, 1, 0])
    common = {"compensation": compensation, "channel_index": index, "four_over_six": True}
    query = prepare_query(q, q_mean=q_mean[row], k_mean=k_mean[row], **common)
    key = prepare_key(k, q_mean=q_mean[row], k_mean=k_mean[row], **common)
    for b in range(2):
        mine = row == b
        stats = {"q_mean": q_mean[b], "k_mean": k_mean[b]}
        for whole, part in (
            (query, prepare_query(q[mine], **stats, **common)),
            (key, prepare_key(k[mine], **stats, **common)),
        ):
            for name, value in part.items():
                assert value is whole[name] is None or torch.equal(whole[name][mine], value), name


def test_channel_biased_data_gains_from_each_compensation():
    g = torch.Generator().manual_seed(4)
    bias = torch.zeros(2, 64)
    bias[:, [3, 17, 40]] = torch.tensor([20.0, -30.0, 12.0])
    k = torch.randn(200, 2, 64, generator=g) + bias
    q = torch.randn(50, 2, 64, generator=g) + bias * 0.5
    stats = {
        "q_mean": q.mean(0),
        "k_mean": k.mean(0),
        "channel_index": torch.tensor([[3, 17, 40]] * 2, dtype=torch.int32),
    }
    want = torch.einsum("ihd,jhd->ihj", q.double(), k.double())
    want = want - want.mean(dim=-1, keepdim=True)
    error = {}
    for compensation in ("none", "mean", "channels", "mean+channels"):
        s = scores(
            prepare_query(q, compensation=compensation, **stats),
            prepare_key(k, compensation=compensation, **stats),
            1,
        )
        s = s - s.mean(dim=-1, keepdim=True)
        error[compensation] = float((s - want).norm() / want.norm())
    assert error["mean"] < 0.5 * error["none"]
    assert error["channels"] < 0.5 * error["none"]
    assert error["mean+channels"] < 0.5 * error["none"]


@pytest.mark.parametrize(
    ("compensation", "channels", "rank"),
    [
        ("none", 0, 0),
        ("mean", 0, 16),
        ("channels", 16, 16),
        ("mean+channels", 15, 16),
        ("channels", 17, 32),
    ],
)
def test_comp_slots(compensation, channels, rank):
    assert comp_slots(compensation, channels) == rank


def test_missing_and_wrong_statistics():
    q, k = torch.zeros(2, 4, 64), torch.zeros(2, 2, 64)
    q_mean, k_mean = torch.zeros(4, 64), torch.zeros(2, 64)
    index = torch.arange(16, dtype=torch.int32).expand(2, 16)
    with pytest.raises(ValueError, match="compensation: 'means'"):
        prepare_key(k, compensation="means")
    with pytest.raises(ValueError, match="q_mean: None"):
        prepare_key(k, compensation="mean", k_mean=k_mean)
    with pytest.raises(ValueError, match="k_mean: None"):
        prepare_query(q, compensation="mean", q_mean=q_mean)
    with pytest.raises(ValueError, match="channel_index: None"):
        prepare_query(q, compensation="channels")
    with pytest.raises(ValueError, match="at most 15"):
        prepare_query(
            q, compensation="mean+channels", q_mean=q_mean, k_mean=k_mean, channel_index=index
        )
    with pytest.raises(ValueError, match="q_mean: shape"):
        prepare_query(q, compensation="mean", q_mean=q_mean[:2], k_mean=k_mean)
    with pytest.raises(ValueError, match="k_mean: shape"):
        prepare_key(k, compensation="mean", q_mean=q_mean, k_mean=k_mean[:1])
    with pytest.raises(ValueError, match="k_mean: shape"):
        prepare_key(k, compensation="mean", q_mean=q_mean, k_mean=k_mean.expand(3, 2, 64))
    q[1, 2, 3] = float("nan")
    with pytest.raises(ValueError, match=r"q: value nan at index \(1, 2, 3\)"):
        prepare_query(q, compensation="mean", q_mean=q_mean, k_mean=k_mean)
    k[0, 1, 63] = float("inf")
    with pytest.raises(ValueError, match=r"k: value inf at index \(0, 1, 63\)"):
        prepare_key(k, compensation="channels", channel_index=index)
