# SPDX-License-Identifier: Apache-2.0
"""Request builder and a slow planner written from the definitions, for tests to compare with."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpfa.planner import PlanRequest


def indptr(lengths: list[int]) -> torch.Tensor:
    values = [0]
    for length in lengths:
        values.append(values[-1] + length)
    return torch.tensor(values, dtype=torch.int32)


def build(qo_lens: list[int], kv_lens: list[int], page_size: int | None = None, **options: Any):
    """PlanRequest of a batch given in tokens; page ids count down so that order mistakes show."""
    fields: dict[str, Any] = {
        "mode": "prefill",
        "num_qo_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 64,
        "causal": False,
        "window_left": -1,
        "q_tile_tokens": 16,
        "heads_per_group": 4,
        "kv_block": 128,
        "partition_tokens": 0,
        "num_sm": 4,
    }
    fields.update(options)
    if page_size is None:
        paging = {"kv_indices": None, "last_page_len": None}
        units = kv_lens
    else:
        units = [-(-n // page_size) for n in kv_lens]
        last = [(n - 1) % page_size + 1 if n else 0 for n in kv_lens]
        paging = {
            "kv_indices": torch.arange(sum(units), 0, -1, dtype=torch.int32),
            "last_page_len": torch.tensor(last, dtype=torch.int32),
        }
    fields.update(paging)
    return PlanRequest(
        qo_indptr=indptr(qo_lens), kv_indptr=indptr(units), page_size=page_size, **fields
    )


def visible(r: PlanRequest, qo_len: int, kv_len: int, i: int) -> tuple[int, int]:
    """Keys [low, high) that query token i sees, from the two inequalities of the mask."""
    position = i + kv_len - qo_len
    high = min(kv_len, position + 1) if r.causal else kv_len
    low = position - r.window_left if r.window_left >= 0 else 0
    low, high = max(low, 0), max(high, 0)
    return (low, high) if low < high else (0, 0)


def tiles(r: PlanRequest, qo_lens: list[int], kv_lens: list[int]) -> Iterator[tuple]:
    """(request, q_begin, q_len, [(kv_begin, kv_end), ...]) in token order."""
    for b, (qo_len, kv_len) in enumerate(zip(qo_lens, kv_lens, strict=True)):
        for q_begin in range(0, qo_len, r.q_tile_tokens):
            rows = range(q_begin, min(qo_len, q_begin + r.q_tile_tokens))
            seen = [visible(r, qo_len, kv_len, i) for i in rows]
            seen = [(low, high) for low, high in seen if low < high]
            if not seen:
                yield b, q_begin, len(rows), [(0, 0)]
                continue
            low = min(low for low, _ in seen) // r.kv_block * r.kv_block
            high = max(high for _, high in seen)
            size = r.partition_tokens or high
            cuts = range(low // size * size, high, size)
            yield b, q_begin, len(rows), [(max(low, c), min(high, c + size)) for c in cuts]


def slow_plan(r: PlanRequest, qo_lens: list[int], kv_lens: list[int]) -> SimpleNamespace:
    """items in worker order, worker_indptr, merge_indptr, number of partial rows."""
    group_size = r.num_qo_heads // r.num_kv_heads
    groups = len(range(0, group_size, r.heads_per_group))
    created, merge = [], [0]
    rows = 0
    for b, q_begin, q_len, parts in tiles(r, qo_lens, kv_lens):
        split = len(parts) > 1
        for group in range(groups):
            for k, (low, high) in enumerate(parts):
                place = (rows + k, len(parts)) if split else (-1, 0)
                created.append((b, q_begin, q_len, group, low, high, *place))
        for _ in range(q_len):
            merge.append(merge[-1] + (len(parts) if split else 0))
        rows = merge[-1]
    workers = max(1, r.num_sm // r.num_kv_heads)
    costs = [-(-(item[5] - item[4]) // r.kv_block) + 2 for item in created]
    heap = [(0, w) for w in range(workers)]
    queues: list[list] = [[] for _ in range(workers)]
    for i in sorted(range(len(created)), key=lambda i: (-costs[i], i)):
        load, w = heapq.heappop(heap)
        queues[w].append(created[i])
        heapq.heappush(heap, (load + costs[i], w))
    starts = [0]
    for queue in queues:
        starts.append(starts[-1] + len(queue))
    return SimpleNamespace(
        items=[item for queue in queues for item in queue],
        worker_indptr=starts,
        merge_indptr=merge,
        rows=rows,
        max_load=max(load for load, _ in heap),
    )


@pytest.fixture(scope="session")
def request_of() -> Callable[..., PlanRequest]:
    return build


@pytest.fixture(scope="session")
def slow() -> SimpleNamespace:
    return SimpleNamespace(plan=slow_plan, tiles=tiles, visible=visible)
