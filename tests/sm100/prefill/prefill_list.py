# SPDX-License-Identifier: Apache-2.0
"""The committed list of cases: a pairwise covering array over what the kernel takes, and corners."""

from __future__ import annotations

from functools import lru_cache

import torch
from covering import Row, cover
from prefill_cases import TILE_ROWS, Case

FACTORS = {
    "kv_len": (1, 15, 127, 128, 129, 300, 513),
    "layout": (0, 1, 16, 32, 64, 128),  # page size; 0 = ragged
    "compensation": ("none", "mean", "channels", "mean+channels", "channels5", "mean+channels7"),
    "group": (1, 3, 4, 5, 8),
    "q_len": ("one", "few", "all", "two tiles"),
    "packed": (False, True),
    "head_dim": (128, 64),
    "causal": (False, True),
    "window_left": (-1, 0, 70),
    "soft_cap": (0.0, 15.0),
    "sinks": (False, True),
    "out": (torch.float32, torch.bfloat16, torch.float16),
    "partition": (0, 128, 256),
    "kv_heads": (1, 2),
    "four_over_six": (False, True),
}


def split_name(name: str) -> tuple[str, int]:
    """("mean+channels", 7) of "mean+channels7"; -1 = as many as there are slots."""
    word = name.rstrip("0123456789")
    return word, int(name[len(word) :] or -1)


def heads_per_group(compensation: str, channels: int, group: int) -> int:
    """As many packed heads as the 16 slots hold: one Delta slot each beside the channels."""
    if "mean" not in compensation:
        return group
    return min(
        group, 16 - Case("", (), (), compensation=compensation, channels=channels).num_channels
    )


def case_of(row: Row, seed: int) -> Case:
    lk = row["kv_len"]
    lq = {"one": 1, "few": min(lk, 17), "all": lk, "two tiles": TILE_ROWS + 44}[row["q_len"]]
    compensation, channels = split_name(row["compensation"])
    group = row["group"]
    packed = heads_per_group(compensation, channels, group) if row["packed"] else 1
    # Neighbours in memory and in the plan: another length, an empty request, one without keys.
    return Case(
        name="-".join(f"{v}".removeprefix("torch.") for v in row.values()).replace(" ", ""),
        qo_lens=(lq, 0, 7, 2),
        kv_lens=(lk, 40, 95, 0),
        heads=(group * row["kv_heads"], row["kv_heads"]),
        head_dim=row["head_dim"],
        page_size=row["layout"],
        compensation=compensation,
        channels=channels,
        causal=row["causal"],
        window_left=row["window_left"],
        soft_cap=row["soft_cap"],
        sinks=row["sinks"],
        heads_per_group=packed,
        partition=row["partition"],
        out=row["out"],
        four_over_six=row["four_over_six"],
        num_sm=4,
        seed=seed,
    )


CORNERS = (
    Case("no-request", (), ()),
    Case("no-query", (0,), (5,)),
    Case("no-key", (3, 140), (0, 0), sinks=True, heads=(2, 1)),
    Case("more-queries-than-keys", (300,), (20,), causal=True, sinks=True, compensation="mean"),
    Case("window-inside-a-block", (300,), (300,), causal=True, window_left=63, page_size=64),
    Case("window-without-causal", (260,), (300,), window_left=40, compensation="mean"),
    Case("large-row-term", (130,), (300,), causal=True, compensation="mean", k_bias=12.0),
    Case("large-row-term-cap", (130,), (300,), compensation="mean", k_bias=12.0, soft_cap=30.0),
    Case("one-worker-many-tiles", (200, 5, 130), (200, 260, 130), (4, 2), causal=True, num_sm=1,
         compensation="mean+channels"),
    Case("one-worker-many-tiles-64", (200, 5, 130), (200, 260, 130), (4, 2), 64, causal=True,
         num_sm=1, compensation="mean+channels"),
    # More blocks than ring slots, a maximum that keeps rising.
    Case("long", (40,), (1500,), (2, 1), page_size=32, compensation="mean", num_sm=1),
    Case("packed-seventeen", (15,), (200,), (17, 1), heads_per_group=15, causal=True,
         compensation="mean", page_size=16),
)  # fmt: skip

LARGE = (
    Case("2k-causal", (2048,), (2048,), (2, 1), causal=True, compensation="mean", page_size=64),
    Case("2k-ragged", (700, 1300), (2048, 1300), (3, 1), page_size=0, causal=True,
         compensation="mean+channels"),
    Case("2k-split", (257,), (2048,), (4, 2), partition=512, compensation="channels"),
    Case("8k", (64,), (8192,), (2, 1), causal=True, compensation="mean", partition=2048),
    Case("8k-64", (300,), (8192,), (1, 1), 64, causal=True, compensation="mean", page_size=16),
)  # fmt: skip


@lru_cache(maxsize=1)
def all_cases() -> tuple[Case, ...]:
    rows = cover(FACTORS)
    return tuple(case_of(row, seed) for seed, row in enumerate(rows)) + CORNERS + LARGE


def cost(case: Case) -> int:
    """Score elements, the measure of how long a case takes in the simulator."""
    pairs = zip(case.qo_lens, case.kv_lens, strict=True)
    return case.heads[0] * case.head_dim * sum(max(q, 16) * k for q, k in pairs)


# `make test` runs the cheap cases.
FAST_COST = 16_000_000


def fast_cases() -> list[Case]:
    return [c for c in all_cases() if cost(c) <= FAST_COST]


def slow_cases() -> list[Case]:
    fast = set(fast_cases())
    return [c for c in all_cases() if c not in fast]
