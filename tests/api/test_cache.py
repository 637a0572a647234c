# SPDX-License-Identifier: Apache-2.0
"""KVCacheConfig and PagedKVCache: sizes, layouts and every check of the constructors."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import FORMAT_IDS, FORMATS

import mpfa

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def config(format="qk4pv8", compensation="none", channels=0, *, page_size=128, heads=(8, 2, 128)):
    hq, hkv, d = heads
    return mpfa.KVCacheConfig(format, hkv, d, page_size, hq, compensation, channels)


@pytest.mark.parametrize(
    "format,compensation,channels,at_128,at_64",
    [
        ("qk4pv8", "none", 0, 200, 100),
        ("qk4pv8", "mean", 0, 208, 108),
        ("qk4pv8", "channels", 16, 232, 132),
        ("qk4pv8", "mean+channels", 15, 238, 138),
        ("mxfp8", "none", 0, 264, 132),
        ("bf16", "none", 0, 512, 256),
    ],
)
def test_bytes_per_token(format, compensation, channels, at_128, at_64) -> None:
    """Design table at G=4, per KV head; times the KV heads of the layer."""
    for d, want in ((128, at_128), (64, at_64)):
        for hkv in (1, 3):
            c = config(format, compensation, channels, heads=(4 * hkv, hkv, d))
            assert c.bytes_per_token == want * hkv
            cache = mpfa.PagedKVCache.allocate(c, 2, "cpu")
            assert cache.bytes_per_token == want * hkv


@pytest.mark.parametrize("format,compensation,channels", FORMATS, ids=FORMAT_IDS)
@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_nbytes_is_what_bytes_per_token_says(
    format, compensation, channels, page_size, head_dim
) -> None:
    if format == "mxfp8" and page_size < 32:
        return
    c = config(format, compensation, channels, page_size=page_size, heads=(6, 2, head_dim))
    cache = mpfa.PagedKVCache.allocate(c, 5, "cpu")
    tail = 5 * 2 * 32 * head_dim * 2 if format == "mxfp8" else 0
    assert cache.nbytes == 5 * page_size * c.bytes_per_token + tail
    assert cache.num_pages == 5
    by_hand = (
        cache.k,
        cache.k_scale,
        cache.v,
        cache.v_scale,
        cache.aux_delta,
        cache.aux_channels,
        cache.v_tail,
    )
    assert cache.nbytes == sum(t.untyped_storage().nbytes() for t in by_hand if t is not None)


def shapes(cache: mpfa.PagedKVCache) -> dict[str, tuple]:
    names = ("k", "k_scale", "v", "v_scale", "aux_delta", "aux_channels", "v_tail")
    found = {n: getattr(cache, n) for n in names}
    return {n: (tuple(t.shape), t.dtype) for n, t in found.items() if t is not None}


def test_layouts_of_design_section_5() -> None:
    p, hkv, d, c = 3, 2, 128, 15
    full = config("qk4pv8", "mean+channels", c)
    assert shapes(mpfa.PagedKVCache.allocate(full, p, "cpu")) == {
        "k": ((p, hkv, 128, d // 2), torch.uint8),
        "k_scale": ((p, hkv, d // 64, 512), torch.uint8),
        "v": ((p, hkv, 128, d), E4M3),
        "aux_delta": ((p, hkv, 4, 128), torch.bfloat16),
        "aux_channels": ((p, hkv, 128, c), torch.bfloat16),
    }
    small = config("qk4pv8", page_size=16)
    assert shapes(mpfa.PagedKVCache.allocate(small, p, "cpu")) == {
        "k": ((p, hkv, 16, d // 2), torch.uint8),
        "k_scale": ((p, hkv, 16, d // 16), torch.uint8),
        "v": ((p, hkv, 16, d), E4M3),
    }
    mx = config("mxfp8", page_size=64)
    assert shapes(mpfa.PagedKVCache.allocate(mx, p, "cpu")) == {
        "k": ((p, hkv, 64, d), E4M3),
        "k_scale": ((p, hkv, 64, d // 32), E8M0),
        "v": ((p, hkv, 64, d), E4M3),
        "v_scale": ((p, hkv, 2, d), E8M0),
        "v_tail": ((p, hkv, 32, d), torch.bfloat16),
    }
    plain = config("bf16", page_size=1)
    assert shapes(mpfa.PagedKVCache.allocate(plain, p, "cpu")) == {
        "k": ((p, hkv, 1, d), torch.bfloat16),
        "v": ((p, hkv, 1, d), torch.bfloat16),
    }


@pytest.mark.parametrize(
    "change,error,match",
    [
        (
            {"format": "nvfp4"},
            ValueError,
            "format: must be one of 'qk4pv8', 'mxfp8', 'bf16', got 'nvfp4'",
        ),
        ({"head_dim": 96}, ValueError, "head_dim: must be one of 64, 128, 256, got 96"),
        ({"head_dim": 80}, ValueError, "head_dim"),
        ({"page_size": 8}, ValueError, "page_size: .*1, 16, 32, 64, 128, got 8"),
        ({"page_size": 0}, ValueError, "page_size"),
        ({"page_size": 256}, ValueError, "page_size"),
        ({"page_size": 16.0}, TypeError, "page_size: expected an int"),
        (
            {"format": "mxfp8", "page_size": 16},
            ValueError,
            "page_size: .*32, 64, 128.*32-token.*got 16",
        ),
        ({"format": "mxfp8", "page_size": 1}, ValueError, "page_size"),
        (
            {"num_qo_heads": 7},
            ValueError,
            "num_qo_heads: must be a multiple of num_kv_heads=2, got 7",
        ),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads: must be >= 1, got 0"),
        ({"num_qo_heads": -2}, ValueError, "num_qo_heads: must be >= 1, got -2"),
        ({"num_kv_heads": True}, TypeError, "num_kv_heads"),
        ({"compensation": "rank1"}, ValueError, "compensation: must be one of .*got 'rank1'"),
        ({"compensation": "channels"}, ValueError, r"channels: must be 1\.\.16 .*got 0"),
        (
            {"compensation": "channels", "channels": 17},
            ValueError,
            r"channels: must be 1\.\.16 .*got 17",
        ),
        (
            {"compensation": "mean+channels", "channels": 16},
            ValueError,
            r"channels: must be 1\.\.15 .*16",
        ),
        ({"compensation": "mean+channels"}, ValueError, r"channels: must be 1\.\.15 .*got 0"),
        ({"compensation": "mean", "channels": 3}, ValueError, "channels: must be 0 .*got 3"),
        ({"channels": 3}, ValueError, "channels: must be 0 .*got 3"),
        ({"channels": -1}, ValueError, "channels"),
        ({"format": "mxfp8", "compensation": "mean"}, ValueError, "compensation: .*'none'.*'mean'"),
        ({"format": "bf16", "compensation": "mean"}, ValueError, "compensation"),
        ({"format": "mxfp8", "four_over_six": True}, ValueError, "four_over_six"),
    ],
)
def test_bad_config(change, error, match) -> None:
    good = {
        "format": "qk4pv8",
        "num_kv_heads": 2,
        "head_dim": 128,
        "page_size": 128,
        "num_qo_heads": 8,
    }
    with pytest.raises(error, match=match):
        mpfa.KVCacheConfig(**{**good, **change})


def test_config_is_a_frozen_value() -> None:
    a, b = config(), config()
    assert a == b and hash(a) == hash(b) and a != config(page_size=64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.head_dim = 64


@pytest.mark.parametrize("num_pages", [-1, 1.5, True])
def test_allocate_checks_num_pages(num_pages: object) -> None:
    with pytest.raises((ValueError, TypeError), match="num_pages"):
        mpfa.PagedKVCache.allocate(config(), num_pages, "cpu")


def test_allocate_needs_a_config() -> None:
    with pytest.raises(TypeError, match="config: expected KVCacheConfig"):
        mpfa.PagedKVCache.allocate("qk4pv8", 1, "cpu")


def test_allocate_nothing_and_zeros() -> None:
    assert mpfa.PagedKVCache.allocate(config(), 0, "cpu").nbytes == 0
    for format, compensation, channels in FORMATS:
        cache = mpfa.PagedKVCache.allocate(config(format, compensation, channels), 2, "cpu")
        assert all((t.view(torch.uint8) == 0).all() for t in cache.tensors.values())


def parts(c: mpfa.KVCacheConfig, pages: int = 3) -> dict[str, torch.Tensor]:
    return dict(mpfa.PagedKVCache.allocate(c, pages, "cpu").tensors)


CONFIGS = [config(f, c, n) for f, c, n in FORMATS] + [
    config(page_size=16),
    config("mxfp8", page_size=32),
]
TENSOR_CASES = [(c, name) for c in CONFIGS for name in parts(c, 0)]
TENSOR_IDS = [f"{c.format}-{c.compensation}-{c.page_size}-{n}" for c, n in TENSOR_CASES]


@pytest.mark.parametrize("c,name", TENSOR_CASES, ids=TENSOR_IDS)
def test_constructor_refuses_each_wrong_tensor(c: mpfa.KVCacheConfig, name: str) -> None:
    good = parts(c)
    t = good[name]

    def expect(value: object, match: str, error: type = ValueError) -> None:
        with pytest.raises(error, match=match):
            mpfa.PagedKVCache(config=c, **{**good, name: value})

    if name not in ("k", "v"):
        expect(None, f"cache.{name}: required, shape .*got None")
    else:
        expect(None, f"cache.{name}", (TypeError, ValueError))
    expect([1], f"cache.{name}: expected a torch.Tensor, got list", TypeError)
    expect(torch.zeros(t.shape, dtype=torch.float32), f"cache.{name}: dtype must be .*got float32")
    if name != "k":
        expect(t[:-1], rf"cache.{name}: shape must be .*got \[2")
    expect(t[:, :1], f"cache.{name}: shape must be")
    expect(t[..., :-1], f"cache.{name}: shape must be")
    expect(t.flatten(1), f"cache.{name}: (shape must be|must be)")
    wide = torch.zeros((*t.shape, 2), dtype=t.dtype)[..., 0]
    expect(wide, f"cache.{name}: the last dimension must be contiguous.*strides")
    if name != "k":
        expect(t.to("meta"), f"cache.{name}: must be on device cpu, got meta")
    else:
        expect(t.to("meta"), "must be on device meta, got cpu")


@pytest.mark.parametrize("c", CONFIGS, ids=str)
def test_constructor_refuses_tensors_that_the_format_has_not(c: mpfa.KVCacheConfig) -> None:
    good = parts(c)
    for name in ("k_scale", "v_scale", "aux_delta", "aux_channels", "v_tail"):
        if name not in good:
            with pytest.raises(ValueError, match=f"cache.{name}: not used by format"):
                mpfa.PagedKVCache(config=c, **good, **{name: torch.zeros(3)})


def test_constructor_takes_views_with_any_outer_strides() -> None:
    """[page][head][token] out of one pool that interleaves K and V, or is token-major."""
    c = config(page_size=16)
    good = parts(c)
    pool = torch.zeros(3, 16, 2, 2, 64, dtype=torch.uint8)  # token-major, K beside something else
    k = pool[:, :, :, 0].permute(0, 2, 1, 3)
    cache = mpfa.PagedKVCache(config=c, **{**good, "k": k})
    assert cache.k is k and cache.num_pages == 3


@pytest.mark.parametrize("c,name", TENSOR_CASES, ids=TENSOR_IDS)
def test_constructor_refuses_pages_that_share_memory(c: mpfa.KVCacheConfig, name: str) -> None:
    good = parts(c)
    shape = good[name].shape
    one = good[name][:1].expand(shape)
    flat = good[name].flatten()
    page = flat.numel() // shape[0]
    overlap = flat.as_strided(shape, (page - 1, *good[name].stride()[1:]))
    for bad in (one, overlap):
        with pytest.raises(ValueError, match=f"cache.{name}: its elements must not share memory"):
            mpfa.PagedKVCache(config=c, **{**good, name: bad})


def test_bound_stats_must_be_static_and_fit() -> None:
    c = config("qk4pv8", "mean")
    static = mpfa.SmoothingStats(torch.zeros(8, 128), torch.zeros(2, 128))
    assert mpfa.PagedKVCache.allocate(c, 1, "cpu", static).stats is static
    per_request = mpfa.SmoothingStats(torch.zeros(1, 8, 128), torch.zeros(1, 2, 128))
    with pytest.raises(ValueError, match="stats: only static .*1 requests"):
        mpfa.PagedKVCache.allocate(c, 1, "cpu", per_request)
    with pytest.raises(ValueError, match="stats: compensation 'none' uses no statistics"):
        mpfa.PagedKVCache.allocate(config(), 1, "cpu", static)
    with pytest.raises(TypeError, match="stats: expected SmoothingStats"):
        mpfa.PagedKVCache.allocate(c, 1, "cpu", torch.zeros(8, 128))
    wrong = mpfa.SmoothingStats(torch.zeros(8, 64), torch.zeros(2, 64))
    with pytest.raises(ValueError, match="stats"):
        mpfa.PagedKVCache.allocate(c, 1, "cpu", wrong)
    index = torch.arange(4, dtype=torch.int32).expand(2, 4).contiguous()
    channels = config("qk4pv8", "channels", 3)
    with pytest.raises(ValueError, match=r"stats.channel_index: must be \[2, 3\], got \[2, 4\]"):
        mpfa.PagedKVCache.allocate(channels, 1, "cpu", mpfa.SmoothingStats(channel_index=index))
    with pytest.raises(ValueError, match="stats.channel_index: .*needs it"):
        mpfa.PagedKVCache.allocate(channels, 1, "cpu", static)
    with pytest.raises(ValueError, match="stats.q_mean: .*needs q_mean"):
        both = config("qk4pv8", "mean+channels", 4)
        mpfa.PagedKVCache.allocate(both, 1, "cpu", mpfa.SmoothingStats(channel_index=index))


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch is built with CUDA")
def test_allocate_on_a_gpu_that_torch_cannot_use() -> None:
    config = mpfa.KVCacheConfig("qk4pv8", 2, 64, 16, 4)
    with pytest.raises(ValueError, match="device: cannot allocate on cuda: Torch not compiled"):
        mpfa.PagedKVCache.allocate(config, 1, "cuda")
