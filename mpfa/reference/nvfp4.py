# SPDX-License-Identifier: Apache-2.0
"""NVFP4: e2m1 values with one e4m3 scale per 16 channels."""

from __future__ import annotations

import torch
from torch import Tensor

from mpfa.reference.codecs import (
    as_fp32,
    decode_packed_e2m1,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    exact_divide,
    fma_fp32,
    pack_e2m1,
    require_finite,
)

NVFP4_BLOCK = 16


def _outer(outer_scale: Tensor) -> Tensor:
    outer = as_fp32("outer_scale", outer_scale)
    require_finite("outer_scale", outer)
    if not bool((outer > 0).all()):
        raise ValueError(f"outer_scale: minimum is {float(outer.min())}, it must be positive")
    return outer[..., None]


def _encode_blocks(blocks: Tensor, amax: Tensor, divisor: float) -> tuple[Tensor, Tensor]:
    """Codes ``[..., n, 16]`` and e4m3 scales ``[..., n]`` for the scale amax/divisor."""
    scale = e4m3_encode(exact_divide(amax, divisor), check=False)
    s = e4m3_decode(scale)[..., None]
    empty = s == 0
    codes = e2m1_encode(blocks / torch.where(empty, 1.0, s), check=False)
    return torch.where(empty, 0, codes), scale


def _squared_error(blocks: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """fp32 sum over the 16 channels, in channel order: the first square rounded, then FMAs."""
    diff = (blocks - e2m1_decode(codes) * e4m3_decode(scale)[..., None]).movedim(-1, 0)
    err = diff[0] * diff[0]
    for i in range(1, NVFP4_BLOCK):
        err = fma_fp32(diff[i], diff[i], err)
    return err


def quantize_nvfp4(
    x: Tensor,
    *,
    four_over_six: bool = False,
    outer_scale: Tensor | None = None,
    name: str = "x",
) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` ``[..., D]`` (fp32, bf16, fp16; D a multiple of 16) to NVFP4.

    Per 16 channels the scale is s = e4m3(amax/6) and a code is e2m1(x/s), both nearest-even and
    saturating; a block whose s rounds to zero gets codes 0. ``four_over_six`` also tries
    s = e4m3(amax/4), which spaces the codes near the maximum more closely, and keeps it when its
    squared error is smaller. ``outer_scale`` (fp32, broadcastable to ``x.shape[:-1]``) divides
    ``x`` first.

    Returns packed codes uint8 ``[..., D/2]`` (low nibble = even channel) and the e4m3 scales as
    uint8 ``[..., D/16]``. NaN or infinity in ``x`` raises ValueError naming ``name``.
    """
    x = as_fp32(name, x)
    if x.dim() == 0 or x.shape[-1] % NVFP4_BLOCK:
        raise ValueError(
            f"{name}: shape {tuple(x.shape)}, the last dimension must be a multiple of 16"
        )
    require_finite(name, x)
    if outer_scale is not None:
        x = x / _outer(outer_scale)
    blocks = x.unflatten(-1, (-1, NVFP4_BLOCK))
    amax = blocks.abs().amax(dim=-1)
    codes, scale = _encode_blocks(blocks, amax, 6.0)
    scale = scale.view(torch.uint8)
    if four_over_six:
        codes4, scale4 = _encode_blocks(blocks, amax, 4.0)
        scale4 = scale4.view(torch.uint8)
        err6 = _squared_error(blocks, codes, scale)
        err4 = _squared_error(blocks, codes4, scale4)
        take = err4 < err6
        codes = torch.where(take[..., None], codes4, codes)
        scale = torch.where(take, scale4, scale)
    return pack_e2m1(codes.flatten(-2)), scale


def dequantize_nvfp4(packed: Tensor, scale: Tensor, outer_scale: Tensor | None = None) -> Tensor:
    """fp32 ``[..., D]`` from packed codes ``[..., D/2]`` and scales ``[..., D/16]`` (e4m3 or u8).

    Exact without ``outer_scale``; with it, one fp32 rounding.
    """
    values = decode_packed_e2m1(packed).unflatten(-1, (-1, NVFP4_BLOCK))
    x = (values * e4m3_decode(scale)[..., None]).flatten(-2)
    return x if outer_scale is None else x * _outer(outer_scale)
