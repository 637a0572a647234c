# SPDX-License-Identifier: Apache-2.0
"""MXFP8: e4m3 values with one power-of-two (ue8m0) scale per 32 values of the reduction axis.

The scale is rounded up so that nothing saturates. Q and K are reduced over channels, V over tokens;
V's blocks restart at token 0 of each sequence (ragged) and of each page (paged).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpfa.reference.codecs import as_fp32, e4m3_decode, e4m3_encode, e8m0_decode, require_finite

MXFP8_BLOCK = 32


def scale_byte(amax: Tensor) -> Tensor:
    """ue8m0 byte (uint8) of 2^e, e the smallest integer >= -127 with amax <= 448 * 2^e.

    An all-zero block gets byte 127 (scale 1).
    """
    # 448 = 0.875 * 2^9, so the comparison is one on the mantissa in [0.5, 1) and is exact.
    mantissa, exponent = torch.frexp(amax)
    e = exponent - torch.where(mantissa <= 0.875, 9, 8)
    byte = (e + 127).clamp(0, 254)
    return torch.where(amax == 0, 127, byte).to(torch.uint8)


def encode_scaled(x: Tensor, byte: Tensor) -> Tensor:
    """e4m3 codes of ``x * 2^-e`` for the (broadcast) ue8m0 bytes of 2^e."""
    return e4m3_encode(x * e8m0_decode(254 - byte), check=False)


def quantize_mxfp8(x: Tensor, *, name: str = "x") -> tuple[Tensor, Tensor]:
    """Quantise ``x`` ``[..., D]`` (D a multiple of 32) in blocks of 32 channels.

    Returns float8_e4m3fn ``[..., D]`` and float8_e8m0fnu ``[..., D/32]``. NaN or infinity in ``x``
    raises ValueError naming ``name``.
    """
    x = as_fp32(name, x)
    if x.dim() == 0 or x.shape[-1] % MXFP8_BLOCK:
        raise ValueError(
            f"{name}: shape {tuple(x.shape)}, the last dimension must be a multiple of 32"
        )
    require_finite(name, x)
    blocks = x.unflatten(-1, (-1, MXFP8_BLOCK))
    byte = scale_byte(blocks.abs().amax(dim=-1))
    return encode_scaled(blocks, byte[..., None]).flatten(-2), byte.view(torch.float8_e8m0fnu)


def dequantize_mxfp8(x: Tensor, scale: Tensor) -> Tensor:
    """fp32 ``[..., D]`` from e4m3 ``[..., D]`` and ue8m0 ``[..., D/32]`` (exact)."""
    blocks = e4m3_decode(x).unflatten(-1, (-1, MXFP8_BLOCK))
    return (blocks * e8m0_decode(scale)[..., None]).flatten(-2)


def quantize_mxfp8_tokens(v: Tensor, *, name: str = "v") -> tuple[Tensor, Tensor]:
    """Quantise one sequence ``v`` ``[T, ..., D]`` in blocks of 32 tokens, separately per channel.

    Returns float8_e4m3fn ``[T, ..., D]`` and float8_e8m0fnu ``[ceil(T/32), ..., D]``. The rows
    missing from a last, partial block do not count.
    """
    v = as_fp32(name, v)
    require_finite(name, v)
    tokens = v.shape[0]
    blocks = -(-tokens // MXFP8_BLOCK)
    padded = v.new_zeros(blocks * MXFP8_BLOCK, *v.shape[1:])
    padded[:tokens] = v
    padded = padded.unflatten(0, (blocks, MXFP8_BLOCK))
    byte = scale_byte(padded.abs().amax(dim=1))
    codes = encode_scaled(padded, byte[:, None]).flatten(0, 1)[:tokens]
    return codes, byte.view(torch.float8_e8m0fnu)


def dequantize_mxfp8_tokens(v: Tensor, scale: Tensor) -> Tensor:
    """fp32 ``[T, ..., D]`` from e4m3 ``[T, ..., D]`` and ue8m0 ``[ceil(T/32), ..., D]`` (exact)."""
    block = torch.arange(v.shape[0], device=v.device) // MXFP8_BLOCK
    return e4m3_decode(v) * e8m0_decode(scale)[block]
