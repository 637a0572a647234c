# SPDX-License-Identifier: Apache-2.0
"""The committed list of cases: a pairwise covering array over what the kernel takes, and corners."""

from __future__ import annotations

import random
from functools import lru_cache

import torch
from covering import Row, cover
from sm120_cases import Case

LENGTHS = (1, 31, 32, 33, 127, 128, 129, 500, 1024)
FACTORS = {
    "kv_len": LENGTHS,
    "data": ("integer", "random", "biased", "sink", "model"),
    "layout": ("single", "ragged", "p32", "p64", "p128"),
    "q_len": ("one", "few", "all"),
    "group": (1, 3, 4, 8),
    "head_dim": (64, 128),
    "causal": (False, True),
    "window_left": (-1, 0, 70),
    "soft_cap": (0.0, 15.0),
    "sinks": (False, True),
    "out": (torch.float32, torch.bfloat16, torch.float16),
    "partition": (0, 128, 384),
    "kv_heads": (1, 2),
}


# Bit equality needs exact steps; SmolLM2 has 9 query heads on 3 KV heads of 64 channels.
NEEDS = {
    "integer": {"soft_cap": 0.0, "sinks": False, "out": torch.float32},
    "model": {"head_dim": 64, "group": 3},
}


def allowed(row: Row) -> bool:
    needs = NEEDS.get(row.get("data"), {})
    return all(row.get(name, value) == value for name, value in needs.items())


def case_of(row: Row, seed: int) -> Case:
    lk = row["kv_len"]
    lq = {"one": 1, "few": min(lk, 21), "all": lk}[row["q_len"]]
    layout = row["layout"]
    batched = layout != "single"
    # Neighbours in memory and in the plan: another length, an empty request, one with no keys.
    q_lens = (lq, 0, 7, 2) if batched else (lq,)
    kv_lens = (lk, 40, 95, 0) if batched else (lk,)
    return Case(
        head_dim=row["head_dim"],
        q_lens=q_lens,
        kv_lens=kv_lens,
        kv_heads=row["kv_heads"],
        group=row["group"],
        page_size=int(layout[1:]) if layout[0] == "p" else None,
        causal=row["causal"],
        window_left=row["window_left"],
        soft_cap=row["soft_cap"],
        sinks=row["sinks"],
        data=row["data"],
        out=row["out"],
        # Partitions are whole KV blocks.
        partition=row["partition"],
        mode="decode" if row["q_len"] == "one" and layout[0] == "p" else "prefill",
        seed=seed,
    )


CORNERS = (
    # Decode: query heads packed into the rows, one request without keys.
    Case(128, (1, 1, 1), (700, 33, 0), 2, 4, 64, causal=True, mode="decode", partition=256),
    Case(64, (8, 8), (300, 9), 1, 8, 32, causal=True, mode="decode", sinks=True),
    Case(128, (5, 5), (129, 500), 1, 17, 128, causal=True, mode="decode", window_left=100),
    # More queries than keys: the first rows see nothing.
    Case(128, (150,), (20,), causal=True, sinks=True),
    Case(64, (150,), (20,), group=2, causal=True),
    # No query, no request.
    Case(64, (0,), (5,)),
    Case(128, (), ()),
    Case(128, (3,), (0,), page_size=32),
    # Large soft cap, large logits.
    Case(128, (60,), (260,), data="biased", soft_cap=50.0, causal=True),
    # A window of one block that starts inside a block.
    Case(128, (200,), (200,), causal=True, window_left=63),
    Case(64, (200,), (333,), page_size=64, causal=True, window_left=128, kv_heads=2),
)


@lru_cache(maxsize=1)
def all_cases() -> tuple[Case, ...]:
    rows = cover(FACTORS, allowed)
    return tuple(case_of(row, seed) for seed, row in enumerate(rows)) + CORNERS


def cost(case: Case) -> int:
    """Score elements, the measure of how long a case takes in the simulator."""
    return (
        case.heads
        * case.head_dim
        * sum(q * k for q, k in zip(case.q_lens, case.kv_lens, strict=True))
    )


# `make test` runs the cheap cases.
FAST_COST = 3_000_000


def fast_cases() -> list[Case]:
    return [c for c in all_cases() if cost(c) <= FAST_COST and c.data != "model"]


def slow_cases() -> list[Case]:
    fast = set(fast_cases())
    return [c for c in all_cases() if c not in fast]


RANDOM_SEEDS = range(60)


def random_case(seed: int) -> Case:
    """Shapes that nobody chose: several requests, any lengths, few or many workers."""
    rng = random.Random(seed)
    head_dim, group = rng.choice((64, 128)), rng.choice((1, 2, 3, 5, 8, 9))
    page_size = rng.choice((None, 32, 64, 128))
    decode = page_size is not None and rng.random() < 0.4
    requests = rng.randint(1, 4)
    q_len = rng.randint(1, 8)
    q_lens = [q_len if decode else rng.choice((0, 1, 15, 16, 17, 130)) for _ in range(requests)]
    return Case(
        head_dim,
        tuple(q_lens),
        tuple(rng.choice((0, 1, 63, 64, 65, rng.randint(2, 400))) for _ in range(requests)),
        rng.choice((1, 2, 3)),
        group,
        page_size,
        causal=rng.random() < 0.6,
        window_left=rng.choice((-1, -1, 0, 33, 200)),
        soft_cap=rng.choice((0.0, 0.0, 30.0)),
        sinks=rng.random() < 0.3,
        data=rng.choice(("random", "biased", "sink")),
        mode="decode" if decode else "prefill",
        partition=rng.choice((0, 128, 256)),
        num_sm=rng.choice((1, 2, 7)),
        seed=seed,
    )
