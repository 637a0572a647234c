# SPDX-License-Identifier: Apache-2.0
"""Pairwise covering arrays: few rows, every pair of values of two factors in at least one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

Row = dict[str, object]
# (factor, value, factor, value), all as positions, the first factor before the second.
Pair = tuple[int, int, int, int]


class _Array:
    def __init__(self, factors: Mapping[str, Sequence[object]], allowed: Callable[[Row], bool]):
        self.names, self.values = list(factors), [list(v) for v in factors.values()]
        self.allowed = allowed
        self.open: dict[Pair, None] = {
            (a, x, b, y): None
            for a, b in itertools.combinations(range(len(self.names)), 2)
            for x in range(len(self.values[a]))
            for y in range(len(self.values[b]))
        }

    def row(self, picks: dict[int, int]) -> Row:
        return {self.names[f]: self.values[f][v] for f, v in sorted(picks.items())}

    def gain(self, picks: dict[int, int], factor: int, value: int) -> int:
        return sum(
            ((f, v, factor, value) if f < factor else (factor, value, f, v)) in self.open
            for f, v in picks.items()
        )

    def complete(self, picks: dict[int, int]) -> dict[int, int] | None:
        if not self.allowed(self.row(picks)):
            return None
        factor = next((f for f in range(len(self.names)) if f not in picks), None)
        if factor is None:
            return picks
        values = range(len(self.values[factor]))
        for value in sorted(values, key=lambda v: -self.gain(picks, factor, v)):
            found = self.complete({**picks, factor: value})
            if found is not None:
                return found
        return None

    def rows(self) -> list[Row]:
        result = []
        while self.open:
            a, x, b, y = pair = next(iter(self.open))
            picks = self.complete({a: x, b: y})
            if picks is None:  # no allowed row holds this pair
                del self.open[pair]
                continue
            result.append(self.row(picks))
            for (f, v), (g, w) in itertools.combinations(sorted(picks.items()), 2):
                self.open.pop((f, v, g, w), None)
        return result


def cover(
    factors: Mapping[str, Sequence[object]], allowed: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Greedy array over ``factors``, always the same for the same arguments.

    ``allowed`` also gets rows that lack factors and answers for what they hold. Each row starts from
    an uncovered pair and takes, factor by factor, the value that covers most new pairs.
    """
    return _Array(factors, allowed).rows()
