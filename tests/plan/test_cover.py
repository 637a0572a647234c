# SPDX-License-Identifier: Apache-2.0
"""Properties of the work list for random batches."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfa.planner import Plan, make_plan, scratch_bytes

MILLION = 1 << 20
KV_LENS = st.one_of(
    st.sampled_from([0, 1, 127, 128, 129, 1024, 1025, 131072, MILLION]), st.integers(0, 5000)
)
QO_LENS = st.one_of(st.sampled_from([0, 1, 16, 17]), st.integers(0, 200))


@st.composite
def batches(draw: st.DrawFn, small: bool = False) -> dict[str, Any]:
    size = draw(st.integers(0, 4 if small else 9))
    kv = st.integers(0, 40) if small else KV_LENS
    qo = st.integers(0, 12) if small else QO_LENS
    kv_block = draw(st.sampled_from([1, 4] if small else [64, 128]))
    num_kv_heads = draw(st.sampled_from([1, 2, 8]))
    return {
        "qo_lens": draw(st.lists(qo, min_size=size, max_size=size)),
        "kv_lens": draw(st.lists(kv, min_size=size, max_size=size)),
        "page_size": draw(st.sampled_from([None, 1, 4] if small else [None, 16, 128])),
        "mode": draw(st.sampled_from(["prefill", "decode"])),
        "num_kv_heads": num_kv_heads,
        "num_qo_heads": num_kv_heads * draw(st.sampled_from([1, 3, 4, 7])),
        "heads_per_group": draw(st.sampled_from([1, 2, 4])),
        "q_tile_tokens": draw(st.sampled_from([1, 3, 5] if small else [1, 16, 128])),
        "kv_block": kv_block,
        "partition_tokens": kv_block * draw(st.sampled_from([0, 1, 2, 8])),
        "causal": draw(st.booleans()),
        "window_left": draw(st.sampled_from([-1, 0, 1, 7] if small else [-1, 0, 100, 4096])),
        "num_sm": draw(st.sampled_from([1, 2, 7, 148])),
    }


def bound_size(batch: dict[str, Any]) -> None:
    """Keeps the number of items testable where 1M tokens meet small partitions."""
    if batch["partition_tokens"] and sum(batch["kv_lens"]) > 8 * 131072:
        batch["partition_tokens"] = max(batch["partition_tokens"], 8192)
        batch["qo_lens"] = [min(q, 3) for q in batch["qo_lens"]]


def check_cover(plan: Plan, slow, batch: dict[str, Any]) -> None:
    r = plan.request
    groups = -(-(r.num_qo_heads // r.num_kv_heads) // r.heads_per_group)
    found = defaultdict(list)
    for b, q_begin, q_len, group, low, high, row, stride in plan.items.tolist():
        found[b, q_begin, q_len, group].append((low, high, row, stride))
    merge = plan.merge_indptr.tolist()
    rows_used: set[int] = set()
    for b, q_begin, q_len, parts in slow.tiles(r, batch["qo_lens"], batch["kv_lens"]):
        token = int(plan.qo_indptr[b]) + q_begin
        for group in range(groups):
            got = sorted(found.pop((b, q_begin, q_len, group)))
            assert [(low, high) for low, high, _, _ in got] == parts
            for k, (_, _, row, stride) in enumerate(got):
                if len(parts) == 1:
                    assert (row, stride) == (-1, 0)
                    assert merge[token : token + q_len + 1] == [merge[token]] * (q_len + 1)
                    continue
                assert stride == len(parts)
                for i in range(q_len):
                    assert row + i * stride == merge[token + i] + k
                    if group == 0:
                        assert row + i * stride not in rows_used
                        rows_used.add(row + i * stride)
                    assert merge[token + i + 1] - merge[token + i] == len(parts)
    assert not found, "items outside every tile"
    assert rows_used == set(range(plan.num_partial_rows))
    assert merge[-1] == plan.num_partial_rows


def check_balance(plan: Plan) -> None:
    r = plan.request
    ends = plan.worker_indptr.tolist()
    assert ends[0] == 0 and ends[-1] == plan.num_items and len(ends) == plan.num_workers + 1
    assert plan.num_workers == max(1, r.num_sm // r.num_kv_heads)
    items = plan.items.long()
    costs = -(-(items[:, 5] - items[:, 4]) // r.kv_block) + 2
    loads = []
    for begin, end in zip(ends[:-1], ends[1:], strict=True):
        mine = costs[begin:end]
        assert bool((mine[:-1] >= mine[1:]).all()), "items of a worker are not in falling cost"
        loads.append(int(mine.sum()))
    largest = int(costs.max()) if len(costs) else 0
    assert (plan.min_load, plan.max_load) == (min(loads), max(loads))
    assert (plan.total_load, plan.largest_item) == (sum(loads), largest)
    assert max(loads) <= sum(loads) / plan.num_workers + largest


@settings(max_examples=150, deadline=None, derandomize=True)
@given(batch=batches())
def test_every_tile_and_key_once(batch, request_of, slow):
    bound_size(batch)
    request = request_of(**batch)
    plan = make_plan(request)
    check_cover(plan, slow, batch)
    check_balance(plan)
    assert scratch_bytes(request) == plan.scratch_bytes
    assert plan.kv_len.tolist() == batch["kv_lens"]
    assert (plan.nnz_qo, plan.nnz_kv) == (sum(batch["qo_lens"]), sum(batch["kv_lens"]))
    assert plan.batch_size == len(batch["kv_lens"])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(batch=batches(small=True))
def test_equals_slow_planner(batch, request_of, slow):
    plan = make_plan(request_of(**batch))
    want = slow.plan(plan.request, batch["qo_lens"], batch["kv_lens"])
    assert [tuple(item) for item in plan.items.tolist()] == want.items
    assert plan.worker_indptr.tolist() == want.worker_indptr
    assert plan.merge_indptr.tolist() == want.merge_indptr
    assert plan.num_partial_rows == want.rows
    # Key by key: each query token's visible blocks are covered exactly once.
    r = plan.request
    for b, (qo_len, kv_len) in enumerate(zip(batch["qo_lens"], batch["kv_lens"], strict=True)):
        mine = plan.items[plan.items[:, 0] == b].tolist()
        for i in range(qo_len):
            low, high = slow.visible(r, qo_len, kv_len, i)
            for group in range(-(-(r.num_qo_heads // r.num_kv_heads) // r.heads_per_group)):
                covered = [
                    key
                    for _, q_begin, q_len, g, begin, end, _, _ in mine
                    if g == group and q_begin <= i < q_begin + q_len
                    for key in range(begin, end)
                ]
                assert len(covered) == len(set(covered))
                assert set(covered) >= set(range(low, high))


@pytest.mark.parametrize(
    "num_sm,partition", [(1, 0), (18, 1024), (132, 0), (148, 2048), (2000, 128), (65535, 0)]
)
def test_scheduler_equals_heap(request_of, slow, num_sm, partition):
    """Thousands of items of many different and many equal costs, few and very many workers."""
    random = torch.Generator().manual_seed(num_sm)
    kv = torch.randint(0, 9000, (24,), generator=random).tolist() + [4096] * 8 + [200000, 100000]
    qo = [min(max(n // 3, 1), 3000) for n in kv]
    batch = {"qo_lens": qo, "kv_lens": kv, "q_tile_tokens": 64, "causal": True}
    plan = make_plan(request_of(**batch, num_sm=num_sm, partition_tokens=partition))
    want = slow.plan(plan.request, qo, kv)
    assert [tuple(item) for item in plan.items.tolist()] == want.items
    assert plan.worker_indptr.tolist() == want.worker_indptr
    assert plan.max_load == want.max_load


def test_few_items_of_very_different_cost(request_of, slow):
    """Costs far apart are sorted by comparison, not by counting."""
    kv = [1, MILLION, 70000, 0, 300000, 70000, MILLION - 1, 5]
    plan = make_plan(request_of([1] * 8, kv, num_sm=3, kv_block=64))
    assert plan.items.tolist() == [list(i) for i in slow.plan(plan.request, [1] * 8, kv).items]


@pytest.mark.parametrize("size", [0, 1, 5])
@pytest.mark.parametrize("page_size", [None, 16])
def test_all_lengths_zero(request_of, size, page_size):
    plan = make_plan(request_of([0] * size, [0] * size, page_size, partition_tokens=128))
    assert plan.num_items == 0 and plan.items.shape == (0, 8)
    assert plan.worker_indptr.tolist() == [0] * 5
    assert plan.merge_indptr.tolist() == [0]
    assert (plan.max_page_id, plan.max_page_id_request) == (-1, -1)


def test_queries_without_keys_get_one_empty_item(request_of):
    plan = make_plan(request_of([3, 40], [0, 2], causal=True, partition_tokens=128))
    items = sorted(plan.items.tolist())
    # 40 query tokens over 2 keys: only the last 2 rows see anything.
    assert items == [
        [0, 0, 3, 0, 0, 0, -1, 0],
        [1, 0, 16, 0, 0, 0, -1, 0],
        [1, 16, 16, 0, 0, 0, -1, 0],
        [1, 32, 8, 0, 0, 2, -1, 0],
    ]


def test_same_request_is_cut_the_same_way_alone_and_in_a_batch(request_of):
    def cuts(plan: Plan, request: int) -> list[list[int]]:
        return sorted(i[1:6] for i in plan.items.tolist() if i[0] == request)

    options = {"causal": True, "partition_tokens": 1024, "page_size": 128, "num_sm": 148}
    alone = make_plan(request_of([5], [70000], **options))
    batch = make_plan(request_of([1, 5, 300], [9, 70000, 4000], **options))
    assert cuts(alone, 0) == cuts(batch, 1)


def test_same_input_same_bytes(request_of):
    batch = {"qo_lens": [700, 1, 33], "kv_lens": [9000, 1 << 20, 33], "page_size": 16}
    options = {"causal": True, "partition_tokens": 1024, "num_sm": 148, "num_kv_heads": 2}
    first = make_plan(request_of(**batch, **options))
    for _ in range(3):
        make_plan(request_of([9] * 50, [1000] * 50))  # leaves other values in the scratch memory
        again = make_plan(request_of(**batch, **options))
        assert torch.equal(first._block, again._block)
        assert (first.offsets, first.sizes) == (again.offsets, again.sizes)


def test_total_kv_beyond_int32(request_of):
    """3000 requests of 1M tokens share their pages' ids; the token sum needs 64 bits."""
    plan = make_plan(request_of([1] * 3000, [MILLION] * 3000, page_size=128))
    assert plan.nnz_kv == 3000 * MILLION
    assert plan.num_items == 3000


def test_example_of_the_documentation(request_of):
    """docs/planner.md prints this plan."""
    options = {"num_qo_heads": 1, "heads_per_group": 1, "causal": True, "num_sm": 2}
    sizes = {"q_tile_tokens": 2, "kv_block": 4, "partition_tokens": 8}
    plan = make_plan(request_of([4, 1], [19, 5], **options, **sizes))
    assert plan.items.tolist() == [
        [0, 0, 2, 0, 0, 8, 0, 3],
        [0, 2, 2, 0, 0, 8, 6, 3],
        [1, 0, 1, 0, 0, 5, -1, 0],
        [0, 0, 2, 0, 8, 16, 1, 3],
        [0, 2, 2, 0, 8, 16, 7, 3],
        [0, 0, 2, 0, 16, 17, 2, 3],
        [0, 2, 2, 0, 16, 19, 8, 3],
    ]
    assert plan.worker_indptr.tolist() == [0, 3, 7]
    assert plan.merge_indptr.tolist() == [0, 3, 6, 9, 12, 12]
