# SPDX-License-Identifier: Apache-2.0
"""CUDA graph plans: stable layout, capacities that every batch fits and some batch fills."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from mpfa.planner import METADATA_SECTIONS, SCRATCH_SECTIONS, make_plan, scratch_bytes

LIMITS = {"use_cuda_graph": True, "max_batch_size": 4, "max_total_qo_len": 40, "max_num_pages": 30}
OPTIONS = {"page_size": 16, "partition_tokens": 128, "num_sm": 12, "causal": True}


def test_layout_is_the_same_for_every_batch(request_of):
    sections = (("quantized_q", 1000), ("stats", 3))
    rng = random.Random(0)
    first = make_plan(request_of([], [], **OPTIONS, **LIMITS, sections=sections))
    assert first.num_items == 0
    for _ in range(50):
        size = rng.randint(0, 4)
        qo_lens = [rng.randint(0, 10) for _ in range(size)]
        kv_lens = [rng.randint(0, 7 * 16) for _ in range(size)]
        request = request_of(qo_lens, kv_lens, **OPTIONS, **LIMITS, sections=sections)
        plan = make_plan(request)
        for name in ("offsets", "sizes", "num_workers", "scratch_bytes", "metadata_bytes"):
            assert getattr(plan, name) == getattr(first, name)
        assert scratch_bytes(request) == plan.scratch_bytes
        metadata = torch.full((plan.metadata_bytes + 100,), 0xAB, dtype=torch.uint8)
        plan.upload(metadata)
        items = plan.metadata_view(metadata, "items").view(-1, 8)
        assert torch.equal(items[: plan.num_items], plan.items)
        assert bool((items[plan.num_items :, 0] == -1).all())
        merge = plan.metadata_view(metadata, "merge_indptr")
        assert merge.shape == (41,)
        assert bool((merge[plan.nnz_qo :] == plan.num_partial_rows).all())
        assert bool((plan.metadata_view(metadata, "kv_len")[size:] == 0).all())
        rest = metadata[plan.metadata_bytes :]
        assert bool((rest == 0xAB).all()), "upload wrote outside the integer block"


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("mask", ["full", "causal", "window", "causal window"])
@pytest.mark.parametrize(
    "page_size,partition,tile,max_qo",
    [
        (2, 0, 2, 6),
        (2, 0, 3, 7),
        (1, 1, 2, 6),
        (1, 3, 2, 6),
        (2, 4, 2, 6),
        (4, 2, 4, 6),
        (None, 2, 1, 4),
        (3, 3, 2, 5),
    ],
)
def test_capacity_is_the_maximum(request_of, mode, mask, page_size, partition, tile, max_qo):
    """Every batch within small limits: none exceeds the capacities; without a mask one fills
    them."""
    limits = {"max_batch_size": 3, "max_total_qo_len": max_qo, "max_num_pages": 5}
    options = {
        "mode": mode,
        "page_size": page_size,
        "kv_block": 1,
        "partition_tokens": partition,
        "q_tile_tokens": tile,
        "heads_per_group": 2,
        "causal": "causal" in mask,
        "window_left": 1 if "window" in mask else -1,
    }
    size = limits["max_batch_size"]
    if mode == "decode":
        max_qo //= size
    capacity = make_plan(request_of([], [], use_cuda_graph=True, **limits, **options)).sizes
    items = rows = 0
    for qo_lens in itertools.product(range(max_qo + 1), repeat=size):
        if sum(qo_lens) > limits["max_total_qo_len"] or list(qo_lens) != sorted(qo_lens):
            continue
        for units in itertools.product(range(limits["max_num_pages"] + 1), repeat=size):
            if sum(units) > limits["max_num_pages"]:
                continue
            kv_lens = [n * (page_size or 1) for n in units]
            plan = make_plan(request_of(list(qo_lens), kv_lens, **options))
            items = max(items, plan.num_items)
            rows = max(rows, plan.num_partial_rows)
    most_items = capacity["items"] // 32
    most_rows = capacity["partial_lse"] // (4 * 4)
    assert items <= most_items and rows <= most_rows
    if mask == "full":
        assert (items, rows) == (most_items, most_rows)


def test_decode_capacity_of_a_serving_setup(request_of):
    """256 requests sharing 128K tokens each on average: rows grow with pages, not pages x batch."""
    plan = make_plan(
        request_of(
            [], [], 128, mode="decode", partition_tokens=1024, use_cuda_graph=True,
            max_batch_size=256, max_total_qo_len=256, max_num_pages=256 * 1024,
        )
    )  # fmt: skip
    rows = plan.sizes["partial_lse"] // 16
    # Every request can waste part of one partition: (pages + 256 * 7) / 8.
    assert rows == (256 * 1024 + 256 * 7) // 8
    assert plan.sizes["items"] // 32 == 256 + 256 * 1024 // 8 - 1


@pytest.mark.parametrize(
    "qo_lens,kv_lens,text",
    [
        ([1] * 5, [1] * 5, "max_batch_size >= 5, but this graph was made for max_batch_size = 4"),
        ([41], [50], "max_total_qo_len >= 41, but this graph was made for max_total_qo_len = 40"),
        ([1], [31 * 16], "max_num_pages >= 31, but this graph was made for max_num_pages = 30"),
    ],
)
def test_batch_beyond_limits(request_of, qo_lens, kv_lens, text):
    with pytest.raises(ValueError, match=text):
        make_plan(request_of(qo_lens, kv_lens, **OPTIONS, **LIMITS))


def test_decode_query_length_is_bounded(request_of):
    options = {**OPTIONS, "mode": "decode", "use_cuda_graph": True}
    limits = {"max_batch_size": 4, "max_total_qo_len": 8, "max_num_pages": 30}
    make_plan(request_of([2, 2, 2, 2], [20] * 4, **options, **limits))
    with pytest.raises(ValueError, match=r"qo_indptr gives request 1 3 query tokens.*= 2"):
        make_plan(request_of([2, 3], [20] * 2, **options, **limits))


@pytest.mark.parametrize("name", ["max_batch_size", "max_total_qo_len", "max_num_pages"])
def test_limits_are_required(request_of, name):
    with pytest.raises(ValueError, match=f"{name} is None: must be given"):
        make_plan(request_of([1], [1], **OPTIONS, **{**LIMITS, name: None}))
    with pytest.raises(ValueError, match=f"{name} = 0: must be in 1"):
        make_plan(request_of([1], [1], **OPTIONS, **{**LIMITS, name: 0}))


def test_limits_too_large_for_kernels(request_of):
    huge = {"max_batch_size": 1 << 20, "max_total_qo_len": 1 << 30, "max_num_pages": 1 << 24}
    with pytest.raises(ValueError, match=r"work items: at most 2147483647 are allowed"):
        make_plan(request_of([1], [1], **OPTIONS, use_cuda_graph=True, **huge))


def test_limits_do_nothing_without_graph(request_of):
    limits = {**LIMITS, "use_cuda_graph": False, "max_batch_size": 1}
    plan = make_plan(request_of([1] * 9, [1] * 9, **OPTIONS, **limits))
    assert plan.sizes["items"] == 9 * 32
    assert {*METADATA_SECTIONS, *SCRATCH_SECTIONS} == set(plan.offsets)
