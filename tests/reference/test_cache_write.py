# SPDX-License-Identifier: Apache-2.0
"""Cache writes: round trips through pages, strided views, skipped slots, bad slots."""

import pytest
import torch

from mpfa.reference.cache_write import (
    dequantize_ragged_mxfp8,
    dequantize_ragged_qk4pv8,
    gather_bf16,
    gather_mxfp8,
    gather_qk4pv8,
    write_bf16,
    write_mxfp8,
    write_qk4pv8,
)
from mpfa.reference.codecs import e4m3_encode
from mpfa.reference.layout import unpack_scale_atoms
from mpfa.reference.mxfp8 import quantize_mxfp8, quantize_mxfp8_tokens
from mpfa.reference.smoothing import prepare_key

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
HEADS, GROUP, CHANNELS = 2, 3, 5


def scale_shape(ps, dim):
    return (dim // 64, 512) if ps == 128 else (ps, dim // 16)


def poisoned(*shape, dtype=torch.uint8, byte=0xFF):
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.full((*shape[:-1], shape[-1] * size), byte, dtype=torch.uint8)
    return raw.view(dtype)


def qk4pv8_pages(pages, ps, dim):
    """Page tensors full of NaN: 0x7F in e4m3 (V and the scales of K), 0xFFFF in bf16."""
    return {
        "k_pages": poisoned(pages, HEADS, ps, dim // 2),
        "k_scale_pages": poisoned(pages, HEADS, *scale_shape(ps, dim), byte=0x7F),
        "v_pages": poisoned(pages, HEADS, ps, dim, dtype=E4M3, byte=0x7F),
        "aux_delta": poisoned(pages, HEADS, GROUP, ps, dtype=torch.bfloat16),
        "aux_channels": poisoned(pages, HEADS, ps, CHANNELS, dtype=torch.bfloat16),
    }


def mxfp8_pages(pages, ps, dim):
    return {
        "k_pages": poisoned(pages, HEADS, ps, dim, dtype=E4M3, byte=0x7F),
        "k_scale_pages": poisoned(pages, HEADS, ps, dim // 32, dtype=E8M0),
        "v_pages": poisoned(pages, HEADS, ps, dim, dtype=E4M3, byte=0x7F),
        "v_scale_pages": poisoned(pages, HEADS, ps // 32, dim, dtype=E8M0),
        "v_tail": poisoned(pages, HEADS, 32, dim, dtype=torch.bfloat16),
    }


def filled(pools, byte):
    return {name: raw(t).fill_(byte).view(t.dtype) for name, t in pools.items()}


def tokens(count, dim, seed=0):
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(count, HEADS, dim, generator=g) * 3
    v = torch.randn(count, HEADS, dim, generator=g).to(torch.bfloat16)
    stats = {
        "q_mean": torch.randn(HEADS * GROUP, dim, generator=g),
        "k_mean": torch.randn(HEADS, dim, generator=g),
        "channel_index": torch.stack(
            [torch.randperm(dim, generator=g)[:CHANNELS] for _ in range(HEADS)]
        ).to(torch.int32),
    }
    return k, v, prepare_key(k, compensation="mean+channels", **stats)


def slots_of(page_ids, count, ps):
    """Slots of a request's first ``count`` tokens."""
    position = torch.arange(count)
    return page_ids[position // ps] * ps + position % ps


def raw(t):
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("ps", [1, 16, 32, 64, 128])
def test_qk4pv8_round_trip(ps, dim):
    lengths = [0, 1, ps, 2 * ps + ps // 2 + 1, 37]
    need = [-(-n // ps) for n in lengths]
    pages = sum(need) + 2
    g = torch.Generator().manual_seed(ps * dim)
    order = torch.randperm(pages - 1, generator=g)
    # The last slot of the last page is in use: the request of length ps owns that page.
    ids = list(order.split([*need, pages - 1 - sum(need)]))[: len(need)]
    ids[2] = torch.tensor([pages - 1])
    total = sum(lengths)
    k, v, key = tokens(total, dim)
    slots = torch.cat([slots_of(i, n, ps) for i, n in zip(ids, lengths, strict=True)])
    assert int(slots.max()) == pages * ps - 1

    # Shuffled, with skipped tokens that hold other data in between, in two calls.
    extra, extra_v, extra_key = tokens(6, dim, seed=1)
    cat = {n: torch.cat([key[n], extra_key[n]]) for n in key}
    all_v = torch.cat([v, extra_v])
    slots = torch.cat([slots, torch.tensor([-1, -5, -(2**31), -1, -128, -2])])
    perm = torch.randperm(total + 6, generator=g)
    pools = qk4pv8_pages(pages, ps, dim)
    before = {n: t.clone() for n, t in pools.items()}
    for part in perm.split(total // 2 + 1):
        write_qk4pv8(
            **pools,
            slot_mapping=slots[part].to(torch.int32),
            key={n: t[part] for n, t in cat.items()},
            v_e4m3=e4m3_encode(all_v[part]),
        )
    begin = 0
    for page_ids, n in zip(ids, lengths, strict=True):
        got = gather_qk4pv8(*pools.values(), page_ids, n)
        want_k, want_v = dequantize_ragged_qk4pv8(
            key["k"], key["k_scale"], e4m3_encode(v), begin, begin + n
        )
        want = (
            want_k,
            want_v,
            key["aux_delta"][begin : begin + n].float(),
            key["aux_channels"][begin : begin + n].float(),
        )
        for a, b in zip(got, want, strict=True):
            assert a.dtype == torch.float32 and a.is_contiguous() and a.shape == b.shape
            assert torch.equal(a, b)
        begin += n
    # Everything that was not written still has its old bytes.
    written = torch.zeros(pages * ps, dtype=torch.bool)
    written[slots[slots >= 0]] = True
    free = ~written.reshape(pages, ps)
    for name in ("k_pages", "v_pages", "aux_channels"):
        a, b = raw(pools[name]).transpose(1, 2)[free], raw(before[name]).transpose(1, 2)[free]
        assert torch.equal(a, b)
    delta = pools["aux_delta"].view(torch.int16).permute(0, 3, 1, 2)
    assert bool((delta[free] == -1).all()) and not bool((delta[~free] == -1).any())
    scale = pools["k_scale_pages"]
    scale = unpack_scale_atoms(scale) if ps == 128 else scale
    assert bool((scale.transpose(1, 2)[free] == 0x7F).all())


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_scale_bytes_of_128_token_pages_follow_the_formula(dim):
    blocks = dim // 16
    code = torch.arange(128 * blocks).reshape(128, 1, blocks).expand(128, HEADS, blocks).clone()
    code[:, 1] += 1000
    perm = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    _, v, key = tokens(128, dim)
    del key["aux_delta"], key["aux_channels"]
    pools = [qk4pv8_pages(2, 128, dim) for _ in range(2)]
    for shift, pool in zip((0, 8), pools, strict=True):
        scale = (code >> shift & 255).to(torch.uint8)
        write_qk4pv8(
            pool["k_pages"],
            pool["k_scale_pages"],
            pool["v_pages"],
            None,
            None,
            128 + perm,
            {"k": key["k"], "k_scale": scale[perm], "aux_delta": None, "aux_channels": None},
            e4m3_encode(v),
        )
    low, high = (pool["k_scale_pages"][1].long() for pool in pools)
    for h in range(HEADS):
        for row in range(128):
            for k16 in range(blocks):
                atom = k16 * 16 // 64
                byte = (row % 32) * 16 + (row // 32) * 4 + (k16 * 16 % 64) // 16
                got = int(low[h, atom, byte]) + 256 * int(high[h, atom, byte])
                assert got == row * blocks + k16 + 1000 * h


@pytest.mark.parametrize("ps", [16, 128])
def test_views_of_a_combined_tensor_are_written_in_place(ps):
    pages, dim, count = 5, 64, 40
    page_ids = torch.tensor([3, 0, 4])[: -(-count // ps)]
    k, v, key = tokens(count, dim)
    slots = slots_of(page_ids, count, ps)
    plain = qk4pv8_pages(pages, ps, dim)
    write_qk4pv8(**plain, slot_mapping=slots, key=key, v_e4m3=e4m3_encode(v))

    # One byte buffer per page: [K | V] in a row, then scales, for all heads, token-major K and V.
    combined = torch.full((pages, 2, ps, HEADS, dim // 2 + dim + 8), 0xEE, dtype=torch.uint8)
    scales = torch.full((HEADS, pages, 3, *scale_shape(ps, dim)), 0xEE, dtype=torch.uint8)
    delta = torch.full((GROUP, HEADS, pages, ps + 5), 7.0, dtype=torch.bfloat16)
    channels = torch.full((pages, HEADS, ps, CHANNELS + 3), 7.0, dtype=torch.bfloat16)
    rows = combined[:, 1].transpose(1, 2)
    views = {
        "k_pages": rows[..., : dim // 2],
        "k_scale_pages": scales[:, :, 1].transpose(0, 1),
        "v_pages": rows[..., dim // 2 : dim // 2 + dim].view(E4M3),
        "aux_delta": delta.permute(2, 1, 0, 3)[..., 3 : 3 + ps],
        "aux_channels": channels[..., 2 : 2 + CHANNELS],
    }
    write_qk4pv8(**views, slot_mapping=slots, key=key, v_e4m3=e4m3_encode(v))
    for a, b in zip(
        gather_qk4pv8(*views.values(), page_ids, count),
        gather_qk4pv8(*plain.values(), page_ids, count),
        strict=True,
    ):
        assert torch.equal(a, b)
    assert bool((combined[:, 0] == 0xEE).all())
    assert bool((combined[..., dim // 2 + dim :] == 0xEE).all())
    assert bool((scales[:, :, ::2] == 0xEE).all())
    assert bool((delta[..., :3] == 7).all() and (delta[..., 3 + ps :] == 7).all())
    assert bool((channels[..., :2] == 7).all() and (channels[..., 2 + CHANNELS :] == 7).all())
    assert bool((combined[:, 1, ..., : dim // 2 + dim] != 0xEE).any())


def test_mxfp8_views_are_written_in_place():
    pages, ps, dim, count = 4, 64, 64, 100
    page_ids = torch.tensor([2, 1])
    k, v, _ = tokens(count, dim)
    slots = slots_of(page_ids, count, ps)
    plain = mxfp8_pages(pages, ps, dim)
    write_mxfp8(**plain, slot_mapping=slots, k=k, v=v)
    kv = torch.full((pages, 2, HEADS, ps, dim + 16), 0xEE, dtype=torch.uint8)
    v_scale = torch.full((pages, ps // 32, HEADS, dim), 0xEE, dtype=torch.uint8)
    tail = torch.zeros(32, pages, HEADS, dim + 4, dtype=torch.bfloat16)
    views = {
        "k_pages": kv[:, 0, ..., :dim].view(E4M3),
        "k_scale_pages": kv[:, 0, ..., dim : dim + dim // 32].view(E8M0),
        "v_pages": kv[:, 1, ..., :dim].view(E4M3),
        "v_scale_pages": v_scale.transpose(1, 2).view(E8M0),
        "v_tail": tail.permute(1, 2, 0, 3)[..., :dim],
    }
    write_mxfp8(**views, slot_mapping=slots, k=k, v=v)
    got, want = (gather_mxfp8(*list(p.values())[:4], page_ids, count) for p in (views, plain))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert torch.equal(views["v_tail"][1, :, :4], v[96:].transpose(0, 1))
    assert bool((kv[:, 1, ..., dim:] == 0xEE).all() and (kv[[0, 3]] == 0xEE).all())


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("ps", [32, 64, 128])
def test_mxfp8_round_trip_equals_ragged_per_page(ps, dim):
    count, pages = 2 * ps + 21, 6
    page_ids = torch.tensor([5, 0, 2])
    k, v, _ = tokens(count, dim)
    pools = mxfp8_pages(pages, ps, dim)
    skipped, skipped_v, _ = tokens(3, dim, seed=2)
    skipped[1, 0, 0] = float("nan")
    slots = torch.cat([torch.tensor([-1, -7]), slots_of(page_ids, count, ps), torch.tensor([-1])])
    write_mxfp8(
        **pools,
        slot_mapping=slots,
        k=torch.cat([skipped[:2], k, skipped[2:]]),
        v=torch.cat([skipped_v[:2], v, skipped_v[2:]]),
    )
    got_k, got_v = gather_mxfp8(*list(pools.values())[:4], page_ids, count)
    assert got_k.is_contiguous() and got_v.is_contiguous()
    k_codes, k_scale = quantize_mxfp8(k)
    for begin in range(0, count, ps):
        end = min(count, begin + ps)
        v_codes, v_scale = quantize_mxfp8_tokens(v[begin:end])
        want_k, want_v = dequantize_ragged_mxfp8(
            k_codes[begin:end], k_scale[begin:end], v_codes, v_scale, 0, end - begin, 0
        )
        assert torch.equal(got_k[begin:end], want_k)
        assert torch.equal(got_v[begin:end], want_v)
    # Rows of the open block that are not written yet have code 0; later blocks are untouched.
    last = raw(pools["v_pages"])[2]
    assert not last[:, 21:32].any()
    assert bool((last[:, 32:] == 0x7F).all())
    assert torch.equal(pools["v_tail"][2, :, :21], v[2 * ps :].transpose(0, 1))


def test_ragged_mxfp8_scale_rows():
    lengths = [33, 0, 5]
    k, v, _ = tokens(sum(lengths), 64)
    k_codes, k_scale = quantize_mxfp8(k)
    parts = [quantize_mxfp8_tokens(x) for x in v.split(lengths)]
    v_codes = torch.cat([raw(c) for c, _ in parts]).view(E4M3)
    v_scale = torch.cat([raw(s) for _, s in parts]).view(E8M0)
    begin, row = 0, 0
    for n, (codes, scale) in zip(lengths, parts, strict=True):
        got_k, got_v = dequantize_ragged_mxfp8(
            k_codes, k_scale, v_codes, v_scale, begin, begin + n, row
        )
        assert got_k.shape == got_v.shape == (n, HEADS, 64)
        block = torch.arange(n) // 32
        assert torch.equal(got_v, codes.float() * scale.float()[block])
        want_k = k_codes[begin : begin + n].float().unflatten(-1, (2, 32))
        want_k = want_k * k_scale[begin : begin + n].float()[..., None]
        assert torch.equal(got_k, want_k.flatten(-2))
        begin, row = begin + n, row + -(-n // 32)


@pytest.mark.parametrize("ps", [1, 16, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bf16_round_trip(ps, dtype):
    count, pages, dim = 35, 40, 64
    page_ids = torch.arange(pages).flip(0)[: -(-count // ps)]
    k, v, _ = tokens(count, dim)
    k, v = k.to(dtype), v.to(dtype)
    pools = [poisoned(pages, HEADS, ps, dim, dtype=torch.bfloat16) for _ in range(2)]
    slots = slots_of(page_ids, count, ps)
    slots[4] = -1
    write_bf16(*pools, slots, k, v)
    got = gather_bf16(*pools, page_ids, count)
    keep = torch.arange(count) != 4
    for a, b in zip(got, (k, v), strict=True):
        assert a.dtype == torch.float32 and a.is_contiguous()
        assert torch.equal(a[keep], b.to(torch.bfloat16).float()[keep])
        assert bool(a[4].isnan().all())


@pytest.mark.parametrize("ps", [1, 16, 32, 64, 128])
def test_bytes_beyond_kv_len_never_matter(ps):
    dim, count, pages = 64, 75, 80
    page_ids = torch.randperm(pages, generator=torch.Generator().manual_seed(ps))
    page_ids = page_ids[: -(-count // ps) + 1]
    k, v, key = tokens(count, dim)
    slots = slots_of(page_ids, count, ps)
    results = []
    for fill in (0x00, 0x7F, 0xFF):
        pools = {
            n: raw(t).fill_(fill).view(t.dtype) for n, t in qk4pv8_pages(pages, ps, dim).items()
        }
        write_qk4pv8(**pools, slot_mapping=slots, key=key, v_e4m3=e4m3_encode(v))
        got = list(gather_qk4pv8(*pools.values(), page_ids, count))
        if ps >= 32:
            mx = {
                n: raw(t).fill_(fill).view(t.dtype) for n, t in mxfp8_pages(pages, ps, dim).items()
            }
            write_mxfp8(**mx, slot_mapping=slots, k=k, v=v)
            got += gather_mxfp8(*list(mx.values())[:4], page_ids, count)
        assert all(bool(torch.isfinite(t).all()) for t in got)
        results.append(got)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_no_tokens_and_only_skipped_tokens():
    pools = qk4pv8_pages(3, 32, 64)
    mx = mxfp8_pages(3, 32, 64)
    before = [raw(t).clone() for t in (*pools.values(), *mx.values())]
    for count in (0, 4):
        k, v, key = tokens(count, 64)
        slots = torch.full((count,), -1)
        write_qk4pv8(**pools, slot_mapping=slots, key=key, v_e4m3=e4m3_encode(v))
        write_mxfp8(**mx, slot_mapping=slots, k=k, v=v)
    after = [raw(t) for t in (*pools.values(), *mx.values())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    none = gather_qk4pv8(*pools.values(), torch.zeros(0, dtype=torch.int64), 0)
    assert none[0].shape == (0, HEADS, 64) and none[2].shape == (0, HEADS * GROUP)


def every_writer(ps):
    """(name, write(slots), page tensors) of the three formats."""
    k, v, key = tokens(4, 64)
    qk, mx = qk4pv8_pages(3, ps, 64), mxfp8_pages(3, ps, 64)
    bf = [torch.zeros(3, HEADS, ps, 64, dtype=torch.bfloat16) for _ in range(2)]
    return [
        (lambda s: write_qk4pv8(**qk, slot_mapping=s, key=key, v_e4m3=e4m3_encode(v)), qk.values()),
        (lambda s: write_mxfp8(**mx, slot_mapping=s, k=k, v=v), mx.values()),
        (lambda s: write_bf16(*bf, s, k, v), bf),
    ]


@pytest.mark.parametrize("writer", [0, 1, 2], ids=["qk4pv8", "mxfp8", "bf16"])
def test_bad_slots_raise_before_anything_is_written(writer):
    write, pools = every_writer(32)[writer]
    before = [raw(t).clone() for t in pools]
    with pytest.raises(ValueError, match=r"slot_mapping: slot 33 is given to tokens 1 and 3"):
        write(torch.tensor([32, 33, -1, 33]))
    with pytest.raises(ValueError, match=r"slot_mapping: 96 at index 2, .* below 96 "):
        write(torch.tensor([0, 1, 96, 3]))
    with pytest.raises(ValueError, match="slot_mapping: shape"):
        write(torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="slot_mapping: dtype"):
        write(torch.tensor([0.0, 1.0, 2.0, 3.0]))
    assert all(torch.equal(raw(t), b) for t, b in zip(pools, before, strict=True))
    write(torch.tensor([92, 93, 94, 95], dtype=torch.int32))
    assert not all(torch.equal(raw(t), b) for t, b in zip(pools, before, strict=True))


@pytest.mark.parametrize("name", ["k", "v"])
def test_non_finite_values_raise_with_their_token(name):
    data = dict(zip("kv", tokens(4, 64)[:2], strict=True))
    data[name] = data[name].clone()
    data[name][2, 1, 5] = float("inf")
    mx = mxfp8_pages(2, 32, 64)
    bf = {n: torch.zeros(2, HEADS, 32, 64, dtype=torch.bfloat16) for n in ("k_pages", "v_pages")}
    for pools, write in ((mx, write_mxfp8), (bf, write_bf16)):
        before = [raw(t).clone() for t in pools.values()]
        with pytest.raises(ValueError, match=rf"{name}: value inf at index \(2, 1, 5\)"):
            write(**pools, slot_mapping=torch.arange(4), **data)
        assert all(torch.equal(raw(t), b) for t, b in zip(pools.values(), before, strict=True))
        write(**pools, slot_mapping=torch.tensor([0, 1, -1, 2]), **data)


def test_mismatched_arguments():
    k, v, key = tokens(4, 64)
    slots = torch.arange(4)
    pools = qk4pv8_pages(2, 16, 64)
    v8 = e4m3_encode(v)
    for change, message in (
        ({"aux_delta": None}, "aux_delta"),
        ({"aux_channels": None}, "aux_channels"),
        ({"key": dict(key, aux_channels=None)}, "aux_channels"),
        ({"k_pages": pools["k_pages"][..., :16]}, "k_pages"),
        ({"k_scale_pages": poisoned(2, HEADS, 1, 512)}, "k_scale_pages"),
        ({"v_pages": pools["v_pages"].view(torch.uint8)}, "v_pages"),
        ({"v_e4m3": v8[:, :1]}, "v_e4m3"),
        ({"key": dict(key, k=key["k"][:3])}, "k"),
    ):
        arguments = {**pools, "slot_mapping": slots, "key": key, "v_e4m3": v8, **change}
        with pytest.raises(ValueError, match=message):
            write_qk4pv8(**arguments)
    mx = mxfp8_pages(2, 32, 64)
    for change, message in (
        ({"k": k.double()}, "k: dtype"),
        ({"v": v[:3]}, "slot_mapping: shape|k: shape"),
        ({"v_tail": mx["v_tail"][:, :, :16]}, "v_tail"),
        ({"v_scale_pages": mx["k_scale_pages"]}, "v_scale_pages"),
        (qk4pv8_pages(2, 16, 64) | {"v_scale_pages": mx["v_scale_pages"]}, "multiple of 32"),
    ):
        change = {n: t for n, t in change.items() if not n.startswith("aux")}
        with pytest.raises(ValueError, match=message):
            write_mxfp8(**{**mx, "slot_mapping": slots, "k": k, "v": v, **change})


def test_gather_rejects_bad_lengths_and_pages():
    pools = qk4pv8_pages(3, 16, 64)
    with pytest.raises(ValueError, match=r"kv_len: 33, allowed are 0..32"):
        gather_qk4pv8(*pools.values(), torch.tensor([0, 1]), 33)
    with pytest.raises(ValueError, match=r"page_ids: 3 at index 1, allowed are 0..2"):
        gather_qk4pv8(*pools.values(), torch.tensor([0, 3]), 17)
    # A bad id behind kv_len is never used.
    gather_qk4pv8(*pools.values(), torch.tensor([0, 3]), 16)
