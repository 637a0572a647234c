# SPDX-License-Identifier: Apache-2.0
"""Slow, independent definitions of the number formats, for tests to compare with."""

from bisect import bisect_left
from fractions import Fraction

import numpy as np
import pytest


def e4m3_value(code: int) -> Fraction:
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 0:
        return Fraction(mantissa, 8) / 64
    return (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


class SlowFormats:
    """Magnitudes of the codes without the sign bit, and rounding to them by search."""

    e2m1 = [Fraction(x) for x in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
    e4m3 = [e4m3_value(code) for code in range(127)]

    @staticmethod
    def fma(a: float, b: float, c: float) -> np.float32:
        """a * b + c of finite fp32 values, rounded once: the nearest of three candidates."""
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        if abs(exact) >= Fraction(2) ** 128 - Fraction(2) ** 103:
            return np.float32(np.inf if exact > 0 else -np.inf)
        if exact == 0:
            return np.float32(a) * np.float32(b) + np.float32(c)
        near = np.float32(float(exact))
        if np.isinf(near):
            near = np.copysign(np.finfo(np.float32).max, near)
        inf = np.float32(np.inf)
        found = [near, np.nextafter(near, inf), np.nextafter(near, -inf)]
        found = [x for x in found if np.isfinite(x)]
        return min(
            found, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.int32)) & 1)
        )

    @staticmethod
    def nearest(table: list[Fraction], value: float | Fraction) -> int:
        """Code of the magnitude nearest to |value|, ties to the even code, saturating."""
        x = abs(value if isinstance(value, Fraction) else Fraction(float(value)))
        high = bisect_left(table, x)
        if high == len(table):
            return high - 1
        if high == 0 or table[high] == x:
            return high
        below, above = x - table[high - 1], table[high] - x
        if below == above:
            return high if high % 2 == 0 else high - 1
        return high - 1 if below < above else high


@pytest.fixture(scope="session")
def slow() -> type[SlowFormats]:
    return SlowFormats
