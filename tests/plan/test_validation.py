# SPDX-License-Identifier: Apache-2.0
"""Every rejected input, and that the message says where, what was found and what is allowed."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from mpfa.planner import PlanRequest, make_plan, scratch_bytes


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def good(request_of) -> PlanRequest:
    """Three requests of 2, 0 and 3 pages of 16."""
    return request_of([4, 1, 2], [20, 0, 48], page_size=16, num_qo_heads=8, num_kv_heads=2)


REJECTED = [
    ({"mode": "append"}, "mode = 'append': must be 'prefill' or 'decode'"),
    ({"qo_indptr": ints(1, 4, 5, 7)}, "qo_indptr[0] = 1 (request 0): must be 0"),
    (
        {"qo_indptr": ints(0, 4, 3, 7)},
        "qo_indptr[2] = 3 (end of request 1): must be at least qo_indptr[1] = 4",
    ),
    (
        {"qo_indptr": ints(0, -4, 3, 7)},
        "qo_indptr[1] = -4 (end of request 0): must be at least qo_indptr[0] = 0",
    ),
    ({"kv_indptr": ints(-2, 2, 2, 5)}, "kv_indptr[0] = -2 (request 0): must be 0"),
    (
        {"kv_indptr": ints(0, 2, 6, 5)},
        "kv_indptr[3] = 5 (end of request 2): must be at least kv_indptr[2] = 6",
    ),
    ({"kv_indptr": ints(0, 2, 5)}, "kv_indptr has 3 entries: must have 4, as qo_indptr has"),
    ({"qo_indptr": ints()}, "qo_indptr is empty: must have batch size + 1 entries"),
    (
        {"last_page_len": ints(4, 0)},
        "paged_kv_last_page_len has 2 entries: must have one per request, 3",
    ),
    (
        {"last_page_len": ints(0, 0, 16)},
        "paged_kv_last_page_len[0] = 0 (request 0, which has pages): must be in 1..16 (page_size)",
    ),
    (
        {"last_page_len": ints(4, 0, 17)},
        "paged_kv_last_page_len[2] = 17 (request 2, which has pages): must be in 1..16 (page_size)",
    ),
    (
        {"last_page_len": ints(4, -1, 16)},
        "paged_kv_last_page_len[1] = -1 (request 1, which has no pages): must be in 0..16",
    ),
    (
        {"last_page_len": ints(4, 17, 16)},
        "paged_kv_last_page_len[1] = 17 (request 1, which has no pages): must be in 0..16",
    ),
    (
        {"kv_indices": ints(0, 1, 2, 3)},
        "paged_kv_indices has 4 entries, too few for request 2: kv_indptr asks for at least 5",
    ),
    (
        {"kv_indices": ints(0, 1, 2, -7, 4)},
        "paged_kv_indices[3] = -7 (request 2): page ids must be 0 or more",
    ),
    ({"last_page_len": None}, "paged_kv_last_page_len is None: must be given"),
    ({"kv_indices": None}, "paged_kv_last_page_len and page_size need paged_kv_indices"),
    ({"page_size": None}, "page_size = None: must be at least 1"),
    ({"page_size": 0}, "page_size = 0: must be at least 1"),
    ({"num_qo_heads": 7}, "num_qo_heads = 7: must be a multiple of num_kv_heads = 2"),
    ({"num_qo_heads": 0}, "num_qo_heads = 0: must be in 1.."),
    ({"num_kv_heads": -1}, "num_kv_heads = -1: must be in 1.."),
    ({"head_dim": 0}, "head_dim = 0: must be in 1.."),
    ({"q_tile_tokens": 0}, "q_tile_tokens = 0: must be in 1.."),
    ({"heads_per_group": 0}, "heads_per_group = 0: must be in 1.."),
    ({"kv_block": 0}, "kv_block = 0: must be in 1.."),
    ({"num_sm": 0}, "num_sm = 0: must be in 1..65535"),
    ({"window_left": -2}, "window_left = -2: must be in -1.."),
    ({"partition_tokens": -128}, "partition_tokens = -128: must be in 0.."),
    (
        {"partition_tokens": 200},
        "partition_tokens = 200: must be 0 (never split) or a multiple of kv_block = 128",
    ),
    ({"qo_indptr": ints(0, 4, 5, 7).long()}, "qo_indptr.dtype = torch.int64: must be torch.int32"),
    ({"last_page_len": ints(4, 0, 16).float()}, "paged_kv_last_page_len.dtype = torch.float32"),
    ({"kv_indptr": ints(0, 2, 2, 5).view(2, 2)}, "kv_indptr has shape (2, 2): must be 1-D"),
    ({"kv_indices": torch.zeros(10, dtype=torch.int32)[::2]}, "stride (2,): must be contiguous"),
    ({"kv_indptr": [0, 2, 2, 5]}, "kv_indptr is list: must be a torch.Tensor"),
    ({"kv_indptr": torch.zeros(4, dtype=torch.int32, device="meta")}, "kv_indptr is on meta"),
    ({"sections": (("items", 4),)}, "sections names 'items' twice"),
    ({"sections": (("a", 4), ("a", 5))}, "sections names 'a' twice"),
    ({"sections": (("a", -4),)}, "sections['a'] = -4 bytes: must be 0 or more"),
]


@pytest.mark.parametrize("change,text", REJECTED, ids=[text[:40] for _, text in REJECTED])
@pytest.mark.parametrize("plan", [make_plan, scratch_bytes])
def test_rejected(good, plan, change, text):
    plan(good)
    with pytest.raises(ValueError, match=re.escape(text)):
        plan(dataclasses.replace(good, **change))


def test_request_longer_than_int32(request_of):
    request = request_of([1], [1], page_size=128)
    request = dataclasses.replace(
        request,
        kv_indptr=ints(0, 1 << 24),
        kv_indices=torch.zeros(1 << 24, dtype=torch.int32),
        last_page_len=ints(128),
    )
    with pytest.raises(ValueError, match="kv_indptr gives request 0 2147483648 KV tokens: at most"):
        make_plan(request)


@pytest.mark.parametrize("last,allowed", [(0, True), (1, False), (127, False)])
def test_a_block_past_the_end_stays_inside_int32(request_of, last, allowed):
    """Kernels compute begin + 128 of the last block in int32."""
    pages = (1 << 24) - 1
    request = dataclasses.replace(
        request_of([1], [1], page_size=128),
        kv_indptr=ints(0, pages + (last > 0)),
        kv_indices=torch.zeros(pages + 1, dtype=torch.int32),
        last_page_len=ints(last or 128),
    )
    if allowed:
        assert int(make_plan(request).items[:, 5].max()) == pages * 128 + last
        return
    with pytest.raises(ValueError, match="KV tokens: at most 2147483520 are allowed"):
        make_plan(request)


def test_too_many_partial_rows(request_of):
    request = request_of(
        [1 << 12] * 8, [1 << 23] * 8, q_tile_tokens=4096, kv_block=1, partition_tokens=16
    )
    with pytest.raises(ValueError, match=r"17179869184 partial rows: at most 2147483647"):
        scratch_bytes(request)


def test_legal_corners(request_of):
    """What must not be rejected: surplus indices, no pages with any valid last length, no batch."""
    request = request_of([4, 1, 2], [20, 0, 48], page_size=16)
    make_plan(dataclasses.replace(request, kv_indices=torch.arange(50, dtype=torch.int32)))
    make_plan(dataclasses.replace(request, last_page_len=ints(4, 16, 16)))
    # A surplus id is not looked at.
    surplus = torch.tensor([0, 1, 2, 3, 4, -9], dtype=torch.int32)
    assert make_plan(dataclasses.replace(request, kv_indices=surplus)).max_page_id == 4
    make_plan(request_of([], [], page_size=16))
    make_plan(request_of([9, 9], [2, 0], causal=True))
    make_plan(request_of([1], [1], num_kv_heads=4, num_qo_heads=4, num_sm=1))
    make_plan(request_of([1], [1], heads_per_group=64))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 1000])
def test_largest_page_id(request_of, count):
    """Found at every position, with the first request that holds it."""
    for at in {0, count // 2, count - 1}:
        ids = torch.arange(3 * count, dtype=torch.int32)
        ids[count + at] = 99999
        ids[2 * count] = 99999
        request = request_of([1, 1, 1], [count] * 3, page_size=1)
        plan = make_plan(dataclasses.replace(request, kv_indices=ids))
        assert (plan.max_page_id, plan.max_page_id_request) == (99999, 1)
        ids[count + at] = -1
        with pytest.raises(ValueError, match=rf"paged_kv_indices\[{count + at}\] = -1 \(request 1"):
            make_plan(dataclasses.replace(request, kv_indices=ids))
