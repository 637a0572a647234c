# SPDX-License-Identifier: Apache-2.0
"""MXFP8 appends: any split of in-order appends gives the bytes of one whole append."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfa.reference.cache_write import write_mxfp8
from mpfa.reference.mxfp8 import quantize_mxfp8_tokens

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
HEADS, DIM = 2, 32


def new_pages(pages, ps, fill=0x7F):
    shapes = {
        "k_pages": ((pages, HEADS, ps, DIM), E4M3),
        "k_scale_pages": ((pages, HEADS, ps, DIM // 32), E8M0),
        "v_pages": ((pages, HEADS, ps, DIM), E4M3),
        "v_scale_pages": ((pages, HEADS, ps // 32, DIM), E8M0),
        "v_tail": ((pages, HEADS, 32, DIM), torch.bfloat16),
    }
    out = {}
    for name, (shape, dtype) in shapes.items():
        size = 2 if dtype == torch.bfloat16 else 1
        raw = torch.full((*shape[:-1], shape[-1] * size), fill, dtype=torch.uint8)
        out[name] = raw.view(dtype)
    return out


def batch(lengths, ps, rng):
    """Slots, K and V of whole sequences on random pages, and the sequence of each token."""
    need = [-(-n // ps) for n in lengths]
    ids = rng.permutation(sum(need) + 1)
    slots, owner, used = [], [], 0
    for b, n in enumerate(lengths):
        position = np.arange(n)
        slots.append(ids[used + position // ps] * ps + position % ps)
        owner.append(np.full(n, b))
        used += need[b]
    slots, owner = np.concatenate(slots), np.concatenate(owner)
    # Magnitudes jump from token to token, so that block scales change as a block fills.
    size = 10.0 ** rng.integers(-4, 5, (len(slots), 1, DIM))
    k, v = (
        torch.from_numpy((rng.standard_normal((len(slots), HEADS, DIM)) * size).astype(np.float32))
        for _ in range(2)
    )
    return torch.from_numpy(slots), owner, k, v, sum(need) + 1


def interleave(owner, rng):
    """A random order of all tokens that keeps the order inside each sequence."""
    order = np.empty(len(owner), dtype=np.int64)
    shuffled = rng.permutation(owner)
    for b in np.unique(owner):
        order[shuffled == b] = np.flatnonzero(owner == b)
    return order


def assert_same(got, want, lengths, ps, slots, owner):
    for name in ("k_pages", "k_scale_pages", "v_pages", "v_scale_pages"):
        assert torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8)), name
    for b, n in enumerate(lengths):
        if n % 32:
            page = int(slots[owner == b][-1]) // ps
            rows = slice(0, n % 32)
            assert torch.equal(got["v_tail"][page, :, rows], want["v_tail"][page, :, rows])


@pytest.mark.parametrize("ps", [32, 64, 128])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_any_split_equals_one_append(ps, lengths, seed, dtype):
    rng = np.random.default_rng(seed)
    slots, owner, k, v, pages = batch(lengths, ps, rng)
    v = v.clamp(-60000, 60000).to(dtype)
    whole = new_pages(pages, ps)
    write_mxfp8(**whole, slot_mapping=slots, k=k, v=v)

    split = new_pages(pages, ps)
    order = interleave(owner, rng)
    cuts = np.sort(rng.integers(0, len(order) + 1, rng.integers(0, 12)))
    for part in np.split(order, cuts):
        part = torch.from_numpy(part)
        write_mxfp8(**split, slot_mapping=slots[part].to(torch.int32), k=k[part], v=v[part])
    assert_same(split, whole, lengths, ps, slots, owner)


@pytest.mark.parametrize("ps", [32, 64, 128])
def test_token_by_token_equals_one_append(ps):
    rng = np.random.default_rng(ps)
    lengths = [ps + 33, 32, 7]
    slots, owner, k, v, pages = batch(lengths, ps, rng)
    whole, single = new_pages(pages, ps), new_pages(pages, ps, fill=0xFF)
    single_start = {n: t.clone() for n, t in single.items()}
    write_mxfp8(**whole, slot_mapping=slots, k=k, v=v)
    for i in interleave(owner, rng):
        write_mxfp8(**single, slot_mapping=slots[i : i + 1], k=k[i : i + 1], v=v[i : i + 1])
    # No code or scale that is written equals either poison byte.
    for name in ("k_pages", "k_scale_pages", "v_pages", "v_scale_pages"):
        a, b = (pool[name].view(torch.uint8) for pool in (single, whole))
        untouched = a == single_start[name].view(torch.uint8)
        assert torch.equal(a[~untouched], b[~untouched])
        assert bool((b[untouched] == 0x7F).all())
    for b, n in enumerate(lengths):
        if n % 32:
            page = int(slots[owner == b][-1]) // ps
            assert torch.equal(
                single["v_tail"][page, :, : n % 32], whole["v_tail"][page, :, : n % 32]
            )


def test_first_tokens_are_requantised_as_the_block_fills():
    pools = new_pages(1, 32)
    k = torch.zeros(3, HEADS, DIM)
    v = torch.zeros(3, HEADS, DIM, dtype=torch.bfloat16)
    v[0], v[1], v[2] = 1.0078125, 1e6, 3.0
    scales = []
    for i in range(3):
        write_mxfp8(**pools, slot_mapping=torch.tensor([i]), k=k[i : i + 1], v=v[i : i + 1])
        scales.append(int(pools["v_scale_pages"].view(torch.uint8)[0, 0, 0, 0]))
        want, scale = quantize_mxfp8_tokens(v[: i + 1])
        got = pools["v_pages"].view(torch.uint8)[0, :, : i + 1].transpose(0, 1)
        assert torch.equal(got, want.view(torch.uint8))
        assert torch.equal(
            pools["v_scale_pages"].view(torch.uint8)[0, :, 0], scale.view(torch.uint8)[0]
        )
        assert not pools["v_pages"].view(torch.uint8)[0, :, i + 1 :].any()
    assert scales[1] > scales[0] and scales[2] == scales[1]


def test_offset_zero_starts_a_fresh_block():
    """A recycled page: what its former owner left in tail, codes and scales is dead."""
    rng = np.random.default_rng(1)
    slots, _, k, v, pages = batch([61], 64, rng)
    used, fresh = new_pages(pages, 64), new_pages(pages, 64)
    write_mxfp8(**used, slot_mapping=slots, k=k, v=v * 1e4)
    for pool in (used, fresh):
        write_mxfp8(**pool, slot_mapping=slots[:5], k=k[:5], v=v[:5])
        write_mxfp8(**pool, slot_mapping=slots[5:40], k=k[5:40], v=v[5:40])
    page = int(slots[0]) // 64
    for name in ("k_pages", "k_scale_pages"):
        rows = slice(0, 40)
        a, b = (p[name].view(torch.uint8)[page, :, rows] for p in (used, fresh))
        assert torch.equal(a, b)
    for name in ("v_pages", "v_scale_pages"):
        a, b = (p[name].view(torch.uint8)[page] for p in (used, fresh))
        assert torch.equal(a, b)
    assert torch.equal(used["v_tail"][page, :, :8], fresh["v_tail"][page, :, :8])


def test_fp16_values_are_rounded_to_bf16_first():
    v = (torch.arange(32 * HEADS * DIM).reshape(32, HEADS, DIM) / 7).to(torch.float16)
    k = torch.zeros(32, HEADS, DIM)
    pools = new_pages(1, 32)
    write_mxfp8(**pools, slot_mapping=torch.arange(32), k=k, v=v)
    want, _ = quantize_mxfp8_tokens(v.to(torch.bfloat16))
    other, _ = quantize_mxfp8_tokens(v)
    got = pools["v_pages"].view(torch.uint8)[0].transpose(0, 1)
    assert torch.equal(got, want.view(torch.uint8))
    assert not torch.equal(got, other.view(torch.uint8))
    assert torch.equal(pools["v_tail"][0].transpose(0, 1), v.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([64, 66, 3], "token 1 at offset 2 of page 1 follows token 0 at offset 0"),
        ([64, 3, 65, 2], "token 3 at offset 2 of page 0 follows token 1 at offset 3"),
        ([70, -1, 69], "token 2 at offset 5 of page 1 follows token 0 at offset 6"),
    ],
)
def test_out_of_order_tokens_raise(slots, message):
    pools = new_pages(2, 64)
    before = {n: t.view(torch.uint8).clone() for n, t in pools.items()}
    data = torch.ones(len(slots), HEADS, DIM)
    with pytest.raises(ValueError, match="slot_mapping: " + message):
        write_mxfp8(**pools, slot_mapping=torch.tensor(slots), k=data, v=data)
    assert all(torch.equal(t.view(torch.uint8), before[n]) for n, t in pools.items())


def one_sequence(tokens, ps, seed=0):
    rng = np.random.default_rng(seed)
    k, v = (
        torch.from_numpy(rng.standard_normal((tokens, HEADS, DIM)).astype(np.float32))
        for _ in range(2)
    )
    return k, v.bfloat16(), new_pages(2, ps)


def append(pages, k, v, begin, end):
    write_mxfp8(**pages, slot_mapping=torch.arange(begin, end), k=k[begin:end], v=v[begin:end])


def test_roll_back_inside_the_open_block_gives_the_bytes_of_one_append():
    k, v, pages = one_sequence(20, 64)
    append(pages, k, v * 8, 0, 20)
    append(pages, k, v, 0, 12)
    append(pages, k, v, 12, 20)
    _, _, whole = one_sequence(20, 64)
    append(whole, k, v, 0, 20)
    assert_same(pages, whole, [20], 64, torch.arange(20), np.zeros(20))


def test_roll_back_over_a_block_boundary_is_refused_and_changes_nothing():
    k, v, pages = one_sequence(40, 64)
    append(pages, k, v, 0, 34)  # drafts at 31..33; the tail now holds rows of block 1
    before = {name: t.clone() for name, t in pages.items()}
    with pytest.raises(ValueError, match=r"token 0 continues the V block at offset 0 of page 0 at"):
        append(pages, k, v, 31, 33)
    for name, t in before.items():
        assert torch.equal(t.view(torch.uint8), pages[name].view(torch.uint8)), name
    append(pages, k, v, 0, 40)  # from the start of the block
    _, _, whole = one_sequence(40, 64)
    append(whole, k, v, 0, 40)
    assert_same(pages, whole, [40], 64, torch.arange(40), np.zeros(40))
