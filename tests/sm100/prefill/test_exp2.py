# SPDX-License-Identifier: Apache-2.0
"""2^x from the FMA pipe: the kernel's polynomial in exact fp32 steps against fp64.

The steps are those of Exp2 in include/mpfa/sm100/prefill/softmax.cuh, with its constants.
"""

from __future__ import annotations

import math
import re

import pytest
import torch

from mpfa.jit import paths
from mpfa.reference.codecs import e4m3_encode, fma_fp32

FOLDER = paths.source_root() / "include" / "mpfa" / "sm100" / "prefill"
SOURCE = (FOLDER / "softmax.cuh").read_text()
# An e4m3 step is between 1/16 and 1/8 of the value, for values above 2^-6.
STEP = 1 / 16


def constant(name: str) -> float:
    """The initialiser of a float constant, powers of two included; fp32."""
    (text,) = re.findall(rf"constexpr float {name} =\s+([^;]+);", SOURCE)
    names = {n: constant(n) for n in re.findall(r"k\w+", text)}
    value = eval(re.sub(r"(?<=\d)f\b", "", text), {"__builtins__": {}}, names)
    return torch.tensor(value, dtype=torch.float32).item()


# Of e4m3, bf16 and NVFP4 P.
TOPS = [float(x) for x in re.findall(r"kExp2Top = ([\d.]+)f", (FOLDER / "config.h").read_text())]
RANGE = constant("kExp2Range")
C = [constant(f"kExp2C{i}") for i in range(5)]
TOP = TOPS[0]


def polynomial(u: torch.Tensor, top: float = TOP) -> torch.Tensor:
    def f32(x: float) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.float32)

    magic = f32((12582912.0 + top) / RANGE)
    n = magic - u
    f = (magic - n) - u
    p = f32(C[4]).expand_as(u)
    for c in C[3::-1]:
        p = fma_fp32(p, f, f32(c))
    bits = (n.view(torch.int32).long() << 23) + p.view(torch.int32).long()
    return (bits & 0xFFFFFFFF).to(torch.uint32).view(torch.float32)


def from_bits(first: int, last: int) -> torch.Tensor:
    return torch.arange(first, last, dtype=torch.int32).view(torch.float32)


def bits_of(x: float) -> int:
    return int(torch.tensor(x, dtype=torch.float32).view(torch.int32))


def relative_error(u: torch.Tensor, top: float = TOP) -> float:
    exact = torch.exp2(top - RANGE * u.double())
    return ((polynomial(u, top).double() - exact) / exact).abs().max().item()


def test_the_source_has_three_formats() -> None:
    assert TOPS == [9.0, 9.0, 12.0]
    assert re.search(r"kMagic = \(12582912\.0f \+ kTop\) / kExp2Range;", SOURCE)


def test_every_fraction() -> None:
    """Each fp32 argument of a whole period of the fraction, a grid of 2^-20: relative error 3e-6, where
    1/8 of an e4m3 step, 8e-3, would do."""
    u = from_bits(bits_of((TOP - 0.5) / RANGE), bits_of((TOP + 0.5) / RANGE) + 1)
    assert len(u) > 1 << 20
    worst = relative_error(u)
    print(f"relative error {worst:.2e}")
    assert 1e-6 < worst < 3.2e-6 < STEP / 8


@pytest.mark.parametrize("top", sorted({*TOPS}))
def test_the_whole_range(top) -> None:
    """From u = 0, above the largest P, to 1: no exponent goes wrong."""
    gen = torch.Generator().manual_seed(0)
    edges = torch.arange(0, 257, dtype=torch.float32) / 256
    u = torch.cat([torch.rand(1 << 17, generator=gen), edges, edges[1:].nextafter(edges[:-1])])
    assert relative_error(u, top) < 3.2e-6
    assert 0 < polynomial(torch.ones(1), top).item() < 2.0 ** (top - 127)


def test_few_codes_move() -> None:
    """P as e4m3, beside the exact exponential."""
    gen = torch.Generator().manual_seed(1)
    u = torch.rand(1 << 19, generator=gen) * (16 / RANGE) + (TOP - math.log2(448)) / RANGE
    exact = torch.exp2(TOP - RANGE * u.double()).float()
    moved = (e4m3_encode(polynomial(u)) != e4m3_encode(exact)).float().mean().item()
    print(f"codes moved: {moved:.1e}")
    assert moved < 5e-5
