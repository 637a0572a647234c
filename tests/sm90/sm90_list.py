# SPDX-License-Identifier: Apache-2.0
"""The committed list of SM90 decode cases: the SM100 decode kernel's, each with one form of the query,
and corners of this kernel's own: column tiles, passes, streams."""

from __future__ import annotations

from functools import lru_cache

import decode_list
from decode_cases import Case
from sm90_cases import QueryCase

QUERIES = ("bfloat16", "codes", "float16")

# Rows of a tile: 8, 9, 16, 17, 32, 33, 40, 64; more heads than a pass has columns; windows that
# start inside a slice; partitions of other lengths than 1024.
CORNERS = (
    Case((500, 33), 8, 128, 16, "mean", 0),
    Case((500, 33), 9, 128, 32, "mean", 0),
    Case((300, 17), 8, 128, 64, "mean+channels", 15, 2),
    Case((300, 17), 17, 64, 64, "mean+channels", 15),
    Case((300, 17), 4, 128, 128, "channels", 3, 8),
    Case((300, 17), 33, 128, 16, "mean", 0),
    Case((300, 17), 5, 64, 128, "mean+channels", 7, 8),
    Case((300, 17), 8, 128, 16, "mean", 0, 8, window_left=100),
    Case((300, 40), 70, 64, 32, "mean", 0),
    Case((1000,), 4, 128, 16, "mean", 0, window_left=137, soft_cap=20.0, k_bias=2.0),
    Case((2500,), 4, 128, 16, "mean", 0, split_tokens=384, sinks=True, k_bias=2.0),
    Case((2000,), 4, 128, 128, "mean", 0, split_tokens=2048, k_bias=2.0),
)


def with_query(cases) -> list[QueryCase]:
    return [QueryCase(case, QUERIES[i % len(QUERIES)]) for i, case in enumerate(cases)]


@lru_cache
def fast_cases() -> list[QueryCase]:
    return with_query(CORNERS) + with_query(decode_list.fast_cases()[::4])


@lru_cache
def slow_cases() -> list[QueryCase]:
    rest = [case for i, case in enumerate(decode_list.fast_cases()) if i % 4]
    return with_query(rest) + with_query(decode_list.slow_cases())


def all_cases() -> list[QueryCase]:
    return fast_cases() + slow_cases()
