# SPDX-License-Identifier: Apache-2.0
"""SmoothingStats, from_tensors, calibrate, save_stats and load_stats."""

from __future__ import annotations

import pytest
import torch
from attention_cases import int32, make_batch, offsets, static_stats
from safetensors.torch import save_file

import mpfa


def means(batch: int | None = None, hq: int = 4, hkv: int = 2, d: int = 64) -> dict:
    lead = () if batch is None else (batch,)
    return {"q_mean": torch.randn(*lead, hq, d), "k_mean": torch.randn(*lead, hkv, d)}


def test_static_has_no_batch_dimension_even_for_one_request() -> None:
    static = mpfa.SmoothingStats(**means())
    assert static.is_static and static.batch_size is None
    one = mpfa.SmoothingStats(**means(1))
    assert not one.is_static and one.batch_size == 1
    index = torch.zeros(2, 1, dtype=torch.int32)
    assert mpfa.SmoothingStats(channel_index=index).is_static
    assert not mpfa.SmoothingStats(**means(3), channel_index=index).is_static


@pytest.mark.parametrize(
    "fields,error,match",
    [
        ({}, ValueError, "all are None"),
        ({"q_mean": torch.zeros(4, 64)}, ValueError, "k_mean: .*together"),
        ({"k_mean": torch.zeros(4, 64)}, ValueError, "q_mean: .*together"),
        (
            {**means(), "q_mean": torch.zeros(4, 64).bfloat16()},
            ValueError,
            "q_mean: dtype must be float32",
        ),
        (
            {**means(), "k_mean": torch.zeros(2, 64).double()},
            ValueError,
            "k_mean: dtype must be float32",
        ),
        ({**means(), "k_mean": torch.zeros(1, 2, 64)}, ValueError, "q_mean: must be"),
        ({"q_mean": torch.zeros(64), "k_mean": torch.zeros(64)}, ValueError, "q_mean: must be"),
        ({**means(2), "k_mean": torch.zeros(3, 2, 64)}, ValueError, "k_mean: .*batch"),
        ({**means(), "k_mean": torch.zeros(2, 128)}, ValueError, "k_mean: head_dim"),
        (
            {**means(), "q_mean": torch.full((4, 64), torch.nan)},
            ValueError,
            "q_mean: must be finite",
        ),
        (
            {**means(), "k_mean": torch.full((2, 64), torch.inf)},
            ValueError,
            "k_mean: must be finite",
        ),
        (
            {**means(), "k_mean": torch.zeros(2, 64, device="meta")},
            ValueError,
            "k_mean: must be on device cpu",
        ),
        ({"channel_index": torch.zeros(2, 1)}, ValueError, "channel_index: dtype must be int32"),
        (
            {"channel_index": torch.zeros(2, 1, dtype=torch.int64)},
            ValueError,
            "channel_index: dtype",
        ),
        (
            {"channel_index": torch.zeros(2, dtype=torch.int32)},
            ValueError,
            r"channel_index: must be \[Hkv, c\]",
        ),
        (
            {"channel_index": int32([3, 3]).view(1, 2)},
            ValueError,
            "channel_index: KV head 0 repeats",
        ),
        (
            {"channel_index": int32([3, -1]).view(1, 2)},
            ValueError,
            "channel_index: must be >= 0, got -1",
        ),
        (
            {"q_mean": [1.0], "k_mean": torch.zeros(2, 64)},
            TypeError,
            "q_mean: expected a torch.Tensor",
        ),
    ],
)
def test_bad_stats(fields, error, match) -> None:
    with pytest.raises(error, match=match):
        mpfa.SmoothingStats(**fields)


def test_channel_out_of_head_dim_is_refused_with_the_config() -> None:
    config = mpfa.KVCacheConfig("qk4pv8", 2, 64, 16, 4, "channels", 2)
    stats = mpfa.SmoothingStats(channel_index=int32([1, 2, 3, 64]).view(2, 2))
    with pytest.raises(ValueError, match=r"channel_index: channels must be 0\.\.63, got 64"):
        mpfa.PagedKVCache.allocate(config, 1, "cpu", stats)


def test_from_tensors_takes_means_per_request() -> None:
    batch = make_batch([3, 0, 2], [3, 0, 2], 4, 2, 64, seed=1)
    q, (k, _) = batch.query, batch.kv
    stats = mpfa.SmoothingStats.from_tensors(q, k, int32([0, 3, 3, 5]))
    assert stats.q_mean.shape == (3, 4, 64) and stats.k_mean.shape == (3, 2, 64)
    assert stats.q_mean.dtype == torch.float32 and stats.batch_size == 3
    for b in (0, 2):
        torch.testing.assert_close(
            stats.q_mean[b], batch.q[b].double().mean(0).float(), rtol=0, atol=0
        )
        torch.testing.assert_close(
            stats.k_mean[b], batch.k[b].double().mean(0).float(), rtol=0, atol=0
        )
    assert (stats.q_mean[1] == 0).all() and (stats.k_mean[1] == 0).all()


def test_from_tensors_with_other_kv_lengths() -> None:
    batch = make_batch([3, 2], [7, 1], 4, 2, 64, seed=2)
    index = int32([0, 1]).view(2, 1)
    stats = mpfa.SmoothingStats.from_tensors(
        batch.query, batch.kv[0], int32([0, 3, 5]), kv_indptr=int32([0, 7, 8]), channel_index=index
    )
    torch.testing.assert_close(stats.k_mean[1], batch.k[1][0].float(), rtol=0, atol=0)
    assert stats.channel_index is index


@pytest.mark.parametrize(
    "indptr,match",
    [
        (int32([0, 3]), "indptr: must end at the number of tokens 5, got 3"),
        (int32([1, 5]), "indptr: must start with 0"),
        (int32([0, 4, 3, 5]), "indptr: must not decrease; request 1 goes from 4 to 3"),
        (torch.tensor([0, 5]), "indptr: dtype must be int32"),
        (int32([]), "indptr"),
    ],
)
def test_from_tensors_bad_indptr(indptr, match) -> None:
    batch = make_batch([5], [5], 4, 2, 64)
    with pytest.raises(ValueError, match=match):
        mpfa.SmoothingStats.from_tensors(batch.query, batch.kv[0], indptr)


def test_from_tensors_does_not_mutate() -> None:
    batch = make_batch([5], [5], 4, 2, 64)
    q, k = batch.query, batch.kv[0]
    before = q.clone(), k.clone()
    mpfa.SmoothingStats.from_tensors(q, k, int32([0, 5]))
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])


def integer_samples(seed: int, tokens: int = 8):
    gen = torch.Generator().manual_seed(seed)
    q = torch.randint(-4, 5, (tokens, 4, 64), generator=gen).bfloat16()
    k = torch.randint(-4, 5, (tokens, 2, 64), generator=gen).bfloat16()
    return q, k


def test_calibrate_means_are_exact_on_integers() -> None:
    samples = [integer_samples(s) for s in range(4)]
    stats = mpfa.calibrate(samples, channels=0)
    q, k = (torch.cat([s[i] for s in samples]).double() for i in (0, 1))
    assert stats.is_static and stats.channel_index is None
    assert stats.q_mean.dtype == torch.float32 and stats.q_mean.shape == (4, 64)
    assert torch.equal(stats.q_mean.double(), q.sum(0) / 32)  # 32 tokens: exact in binary
    assert torch.equal(stats.k_mean.double(), k.sum(0) / 32)


def test_calibrate_streams() -> None:
    """Many pairs, one pair, a generator and odd splits give the same statistics."""
    q, k = integer_samples(9, 50)
    whole = mpfa.calibrate([(q, k)], channels=5)
    pieces = ((q[a:b], k[a:b]) for a, b in ((0, 1), (1, 1), (1, 20), (20, 50)))
    split = mpfa.calibrate(pieces, channels=5)
    assert torch.equal(whole.q_mean, split.q_mean) and torch.equal(whole.k_mean, split.k_mean)
    assert torch.equal(whole.channel_index, split.channel_index)
    # q and k may have different token counts (chunked samples).
    other = mpfa.calibrate([(q[:10], k), (q[10:], k[:0])], channels=5)
    assert torch.equal(whole.k_mean, other.k_mean) and torch.equal(whole.q_mean, other.q_mean)


def test_calibrate_picks_channels_by_the_product_of_second_moments() -> None:
    q = torch.ones(4, 4, 64)
    k = torch.ones(4, 2, 64)
    k[:, 0, 7] = 100.0
    k[:, 0, 9] = 50.0
    q[:, 0:2, 20] = 30.0
    k[:, 1, 3] = 10.0
    q[:, 3, 3] = 0.0  # one of the two heads of the group does not use it: half the energy
    q[:, 2:4, 5] = 9.0
    stats = mpfa.calibrate([(q, k)], channels=3, center=False)
    assert stats.q_mean is None and stats.k_mean is None
    assert stats.channel_index.dtype == torch.int32
    assert stats.channel_index[0].tolist() == [7, 9, 20]
    assert stats.channel_index[1].tolist() == [0, 3, 5]  # ties go to the lower channel


def test_calibrate_with_centring_ranks_what_is_left_after_it() -> None:
    """A constant channel needs no slot once the mean is taken out; a varying one does."""
    gen = torch.Generator().manual_seed(0)
    q, k = torch.randn(64, 2, 64, generator=gen), torch.randn(64, 1, 64, generator=gen)
    k[:, 0, 10] = 1000.0
    k[:, 0, 30] *= 20.0
    assert mpfa.calibrate([(q, k)], channels=1, center=True).channel_index.tolist() == [[30]]
    assert mpfa.calibrate([(q, k)], channels=1, center=False).channel_index.tolist() == [[10]]


@pytest.mark.parametrize("as_list", [False, True])
def test_calibrate_takes_pairs_and_says_so(as_list: bool) -> None:
    q, k = torch.zeros(3, 4, 64), torch.zeros(3, 2, 64)
    with pytest.raises(TypeError, match=r"samples: expected pairs \(q, k\), got Tensor at index 0"):
        mpfa.calibrate([q, k] if as_list else (q, k))


@pytest.mark.parametrize(
    "samples,kwargs,error,match",
    [
        ([], {}, ValueError, "samples: need at least one token"),
        (
            [(torch.zeros(0, 4, 64), torch.zeros(0, 2, 64))],
            {},
            ValueError,
            "samples: need at least one",
        ),
        ([integer_samples(0)], {"channels": 17}, ValueError, r"channels: must be 0\.\.16, got 17"),
        ([integer_samples(0)], {"channels": -1}, ValueError, "channels"),
        ([integer_samples(0)], {"center": False}, ValueError, "channels: must be >= 1"),
        ([(torch.zeros(2, 3, 64), torch.zeros(2, 2, 64))], {}, ValueError, "samples: .*multiple"),
        ([(torch.zeros(2, 4, 64), torch.zeros(2, 2, 128))], {}, ValueError, "samples"),
        (
            [integer_samples(0), (torch.zeros(2, 2, 64), torch.zeros(2, 2, 64))],
            {},
            ValueError,
            "samples q",
        ),
        (
            [(torch.full((2, 4, 64), torch.nan), torch.zeros(2, 2, 64))],
            {},
            ValueError,
            "samples q: .*finite",
        ),
        (
            [(torch.zeros(2, 4, 64), torch.full((2, 2, 64), torch.inf))],
            {},
            ValueError,
            "samples k: .*finite",
        ),
        (
            [(torch.zeros(2, 4, 64, dtype=torch.int32), torch.zeros(2, 2, 64))],
            {},
            ValueError,
            "samples q: dtype",
        ),
        ([(1, 2)], {}, TypeError, "samples q: expected a torch.Tensor"),
    ],
)
def test_calibrate_bad_input(samples, kwargs, error, match) -> None:
    with pytest.raises(error, match=match):
        mpfa.calibrate(samples, **kwargs)


def test_save_and_load_round_trip(tmp_path) -> None:
    path = tmp_path / "stats.safetensors"
    index = int32([5, 1, 2, 3]).view(2, 2)
    layers = {
        "model.layers.0": mpfa.SmoothingStats(**means(), channel_index=index),
        "1": mpfa.SmoothingStats(**means()),
        2: mpfa.SmoothingStats(channel_index=index),
    }
    mpfa.save_stats(path, layers)
    loaded = mpfa.load_stats(path)
    assert set(loaded) == {"model.layers.0", "1", "2"}
    for key, want in layers.items():
        got = loaded[str(key)]
        for field in ("q_mean", "k_mean", "channel_index"):
            a, b = getattr(got, field), getattr(want, field)
            assert (a is None and b is None) or (torch.equal(a, b) and a.dtype == b.dtype)
        assert got.is_static


def test_save_refuses_per_request_and_odd_keys(tmp_path) -> None:
    with pytest.raises(ValueError, match="only static statistics can be saved"):
        mpfa.save_stats(tmp_path / "a", {"0": mpfa.SmoothingStats(**means(1))})
    with pytest.raises(ValueError, match="must not contain '/'"):
        mpfa.save_stats(tmp_path / "a", {"a/b": mpfa.SmoothingStats(**means())})
    assert not (tmp_path / "a").exists()


def test_save_refuses_two_keys_of_one_name(tmp_path) -> None:
    """Layer 0 and layer "0" would overwrite each other in the file."""
    with pytest.raises(ValueError, match="stats"):
        mpfa.save_stats(
            tmp_path / "a", {0: mpfa.SmoothingStats(**means()), "0": mpfa.SmoothingStats(**means())}
        )


def test_load_refuses_other_files(tmp_path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="path: .*not an mpfa statistics file"):
        mpfa.load_stats(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="path: .*not an mpfa statistics file"):
        mpfa.load_stats(path)


def test_stats_move_and_are_compared_by_identity() -> None:
    stats = mpfa.SmoothingStats(**means())
    assert stats != mpfa.SmoothingStats(stats.q_mean, stats.k_mean)
    moved = stats.to("meta")
    assert moved.device.type == "meta" and stats.device.type == "cpu"


def test_calibrate_sums_the_energy_of_the_query_heads_of_a_group() -> None:
    q, k = torch.ones(4, 2, 64), torch.ones(4, 1, 64)
    q[:, 0, 40] = 10.0  # 100 + 1
    q[:, :, 50] = 8.0  # 64 + 64
    assert mpfa.calibrate([(q, k)], channels=1, center=False).channel_index.tolist() == [[50]]


def test_statistics_without_use_are_refused_everywhere() -> None:
    """A caller who passes them expects a compensation that the config does not ask for."""
    batch = make_batch([4], [40], 4, 2, 64)
    config = mpfa.KVCacheConfig("qk4pv8", 2, 64, 64, 4)
    stats = static_stats(batch, "mean", 0)
    q, (k, v) = batch.query, batch.kv
    cache = mpfa.PagedKVCache.allocate(config, 1)
    indptr = offsets([40])
    wrapper = mpfa.BatchPrefillWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    wrapper.plan(offsets([4]), indptr, **batch.heads, config=config)
    calls = {
        "allocate": lambda s: mpfa.PagedKVCache.allocate(config, 1, "cpu", s),
        "append": lambda s: mpfa.append_paged_kv_cache(k, v, cache, torch.arange(40), stats=s),
        "quantize_query": lambda s: mpfa.quantize_query(q, config, s),
        "quantize_kv": lambda s: mpfa.quantize_kv(k, v, config, indptr, s),
        "run": lambda s: wrapper.run(q, (k, v), stats=s),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match="stats: compensation 'none' uses no statistics"):
            call(stats)
        call(None)
