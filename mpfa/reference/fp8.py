# SPDX-License-Identifier: Apache-2.0
"""FP8 e4m3 with an fp32 scale per tensor or per head, the common baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from mpfa.reference.codecs import (
    E4M3_MAX,
    as_fp32,
    e4m3_decode,
    e4m3_encode,
    exact_divide,
    require_finite,
)


def quantize_fp8(
    x: Tensor, dim: int | tuple[int, ...] | None = None, *, name: str = "x"
) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` to e4m3 with scale = amax/448 (1 where amax is 0 or too small to divide).

    ``dim`` lists the dimensions that share one scale: None is the whole tensor, ``(0, 2)`` gives
    one scale per head of ``[T, H, D]``. Returns float8_e4m3fn like ``x`` and the fp32 scale, a
    0-dim tensor or ``x``'s shape with the ``dim`` entries 1.
    """
    x = as_fp32(name, x)
    require_finite(name, x)
    if dim is None:
        amax = x.abs().amax() if x.numel() else x.new_zeros(())
    else:
        amax = x.abs().amax(dim=dim, keepdim=True)
    scale = exact_divide(amax, E4M3_MAX).reshape(amax.shape)
    scale = torch.where(scale > 0, scale, 1.0)
    return e4m3_encode(x / scale, check=False), scale


def dequantize_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """fp32 values of e4m3 ``x`` times the broadcast fp32 ``scale``."""
    return e4m3_decode(x) * scale
