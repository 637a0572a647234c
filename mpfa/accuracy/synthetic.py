# SPDX-License-Identifier: Apache-2.0
"""Synthetic Q, K and V at head_dim 128 with outlier channels as in the paper's Figure 4.

Figure 4 shows |Q| and |K| of Llama-3.1-8B and Qwen3-14B: ridges along single channels that stay through
the tokens. The cases differ in what the ridges are made of, because that decides which compensation
helps: a constant offset goes away with the mean, a channel that only spreads wider does not, and an
offset from before RoPE turns with the position, so that its ridge stays but its mean does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mpfa.accuracy.attention import PLAIN, LayerOptions
from mpfa.accuracy.models import Geometry
from mpfa.accuracy.samples import Tensors

NAME = "synthetic-d128"
# Llama-3.1-8B's ratio of query to KV heads, fewer of them.
GEOMETRY = Geometry(num_layers=4, num_qo_heads=8, num_kv_heads=2, head_dim=128)
ROPE_THETA = 5e5
_OUTLIERS = 6


@dataclass(frozen=True)
class Case:
    """One synthetic layer. Offsets and spreads are multiples of a plain channel's deviation."""

    name: str
    q_offset: tuple[float, float] = (0.0, 0.0)
    k_offset: tuple[float, float] = (0.0, 0.0)
    q_spread: float = 1.0
    k_spread: float = 1.0
    rotated: bool = False


CASES = (
    Case("no outliers"),
    Case("offsets", (4.0, 10.0), (6.0, 14.0)),
    Case("offsets and spread", (4.0, 10.0), (6.0, 14.0), 3.0, 4.0),
    Case("offsets before RoPE", (4.0, 10.0), (6.0, 14.0), rotated=True),
)


def case_names() -> list[str]:
    return [case.name for case in CASES]


def options() -> dict[int, LayerOptions]:
    return dict.fromkeys(range(len(CASES)), PLAIN)


def activations(tokens: int, seed: int) -> dict[int, Tensors]:
    """q bf16 [T, 8, 128], k and v [T, 2, 128] per case.

    The outlier channels, their offsets and spreads are those of the "model" and the same for every
    seed; the seed draws the tokens.
    """
    return {
        layer: _case(case, tokens, torch.Generator().manual_seed(1000 * seed + layer), layer)
        for layer, case in enumerate(CASES)
    }


def _case(case: Case, tokens: int, generator: torch.Generator, layer: int) -> Tensors:
    fixed = torch.Generator().manual_seed(10_000_000 + layer)
    heads, kv_heads, dim = GEOMETRY.num_qo_heads, GEOMETRY.num_kv_heads, GEOMETRY.head_dim
    group = heads // kv_heads
    chosen = torch.stack([torch.randperm(dim, generator=fixed) for _ in range(kv_heads)])
    offset_at, spread_at = chosen[:, :_OUTLIERS], chosen[:, _OUTLIERS : 2 * _OUTLIERS]

    def draw(count: int, offset: tuple[float, float], spread: float, repeat: int) -> torch.Tensor:
        x = torch.randn(tokens, count, dim, generator=generator)
        size = torch.rand(count, _OUTLIERS, generator=fixed) * (offset[1] - offset[0]) + offset[0]
        sign = torch.randint(0, 2, (count, _OUTLIERS), generator=fixed) * 2.0 - 1.0
        shift = torch.zeros(count, dim).scatter_(
            1, offset_at.repeat_interleave(repeat, 0), size * sign
        )
        scale = torch.ones(count, dim).scatter_(1, spread_at.repeat_interleave(repeat, 0), spread)
        x = x * scale + shift
        return _rope(x) if case.rotated else x

    q = draw(heads, case.q_offset, case.q_spread, group)
    k = draw(kv_heads, case.k_offset, case.k_spread, 1)
    v = torch.randn(tokens, kv_heads, dim, generator=generator)
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def _rope(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [T, H, D], halves paired as in Llama."""
    tokens, _, dim = x.shape
    frequency = ROPE_THETA ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(tokens, dtype=torch.float64)[:, None] * frequency
    cos, sin = (f(angle)[:, None].float() for f in (torch.cos, torch.sin))
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
