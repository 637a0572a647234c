# SPDX-License-Identifier: Apache-2.0
"""The committed list of decode cases: a pairwise covering array for make test, one over all triples of
the larger factors for make test-all."""

from __future__ import annotations

import itertools
from functools import lru_cache

from covering import Row, cover
from decode_cases import COMPENSATIONS, Case

LENGTHS = (0, 1, 127, 128, 129, 1023, 1024, 1025, 4096)
FACTORS = {
    "kv_len": LENGTHS,
    "group": (1, 3, 4, 5, 7, 8, 16),
    "batch": (1, 3, 8),
    "page_size": (128, 64, 32, 16),
    "compensation": COMPENSATIONS,
    "q_len": (1, 2, 4),
    "head_dim": (128, 64),
    "feature": ("plain", "window", "soft_cap", "sinks", "all_keys", "small_split"),
    "data": ("random", "biased", "peaked"),
    "kv_heads": (1, 2),
}
_FEATURES = {
    "plain": {},
    "window": {"window_left": 150},
    "soft_cap": {"soft_cap": 12.0},
    "sinks": {"sinks": True},
    "all_keys": {"causal": False},
    "small_split": {"split_tokens": 256, "sinks": True},
}
_DATA = {
    "random": {},
    "biased": {"k_bias": 10.0, "q_bias": 1.0, "outliers": 6.0},
    "peaked": {"scale": 4.0},
}
# Further requests of a batch: short, so that a case stays small, and of every kind.
_OTHERS = (1, 300, 0, 128, 77, 2, 129)


def case_of(row: Row, seed: int) -> Case:
    compensation, channels = row["compensation"]
    lengths = [row["kv_len"], *_OTHERS[: row["batch"] - 1]]
    turn = seed % len(lengths)
    return Case(
        tuple(lengths[turn:] + lengths[:turn]),
        group=row["group"],
        head_dim=row["head_dim"],
        page_size=row["page_size"],
        compensation=compensation,
        channels=channels,
        q_len=row["q_len"],
        num_kv_heads=row["kv_heads"],
        seed=seed,
        **_FEATURES[row["feature"]],
        **_DATA[row["data"]],
    )


@lru_cache
def fast_cases() -> list[Case]:
    return [case_of(row, seed) for seed, row in enumerate(cover(FACTORS))]


def rows_cases() -> list[Case]:
    """What the replicated-row variant serves."""
    return [case for case in fast_cases() if case.head_dim == 128]


@lru_cache
def slow_cases() -> list[Case]:
    """Every (length, group, page size), the other factors in turn; co-prime strides mix them."""
    names = ("kv_len", "group", "page_size")
    others = [name for name in FACTORS if name not in names]
    cases = []
    for n, picks in enumerate(itertools.product(*(FACTORS[name] for name in names))):
        row = dict(zip(names, picks, strict=True))
        for stride, name in zip((1, 5, 7, 11, 13, 17, 19), others, strict=True):
            values = FACTORS[name]
            row[name] = values[(n * stride + n // len(values)) % len(values)]
        cases.append(case_of(row, 1000 + n))
    return cases
