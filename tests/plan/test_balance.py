# SPDX-License-Identifier: Apache-2.0
"""Load balance over a fixed set of causal batches that mix prefill chunks and decode steps."""

from __future__ import annotations

import random
import statistics

from mpfa.planner import Plan, make_plan

SEEDS = range(100)
ITEMS_PER_SM = 16


def mixed_batch(seed: int, request_of) -> Plan:
    """A batch of at least 16 items per SM, counting every KV head's copy of the work list."""
    rng = random.Random(seed)
    num_kv_heads = rng.choice([1, 2, 4, 8])
    num_sm = rng.choice([84, 132, 148, 160])
    tile = rng.choice([64, 128])
    workers = max(1, num_sm // num_kv_heads)
    qo_lens: list[int] = []
    kv_lens: list[int] = []
    items = 0
    while items < ITEMS_PER_SM * workers:
        history = rng.choice([0, 0, rng.randint(1, 4096), rng.randint(1, 65536)])
        chunk = rng.choice([1, 1, rng.randint(2, 512), rng.randint(512, 8192)])
        qo_lens.append(chunk)
        kv_lens.append(history + chunk)
        items += -(-chunk // tile)
    return make_plan(
        request_of(
            qo_lens,
            kv_lens,
            page_size=rng.choice([None, 16, 128]),
            num_kv_heads=num_kv_heads,
            num_qo_heads=4 * num_kv_heads,
            q_tile_tokens=tile,
            causal=True,
            num_sm=num_sm,
        )
    )


def test_makespan(request_of):
    ratios = []
    for seed in SEEDS:
        plan = mixed_batch(seed, request_of)
        assert plan.num_items >= ITEMS_PER_SM * plan.num_workers
        mean = plan.total_load / plan.num_workers
        assert plan.max_load <= mean + plan.largest_item
        ratios.append(plan.max_load / max(mean, plan.largest_item))
    print(f"makespan ratio: median {statistics.median(ratios):.4f}, worst {max(ratios):.4f}")
    assert statistics.median(ratios) <= 1.05
