# SPDX-License-Identifier: Apache-2.0
"""Number formats of the cache: e2m1 (FP4), e4m3 (FP8) and ue8m0 (block exponents).

Encoders start from fp32 (bf16 and fp16 are widened, which is exact), round to nearest with ties to
the even code and saturate. They accept finite values only; the CUDA kernels give the same codes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

E2M1_MAX = 6.0
E4M3_MAX = 448.0

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# Code = number of bounds strictly below |x|. The bounds are the midpoints; one whose upper
# neighbour has the even code must itself round up, so its bound is the fp32 value just below it.
_E2M1_BOUNDS = (
    0.25,
    0.75 - 2.0**-24,
    1.25,
    1.75 - 2.0**-23,
    2.5,
    3.5 - 2.0**-22,
    5.0,
)

_E2M1_VALUES = E2M1_MAGNITUDES + tuple(-m for m in E2M1_MAGNITUDES)
# Row b holds the two values of packed byte b, even channel first. On the CPU whatever the default
# device is: mpfa may be imported inside `with torch.device("meta")`.
_E2M1_PAIRS = torch.tensor(
    [(_E2M1_VALUES[b & 15], _E2M1_VALUES[b >> 4]) for b in range(256)],
    dtype=torch.float32,
    device="cpu",
)


def as_fp32(name: str, t: Tensor) -> Tensor:
    """``t`` widened to fp32 (exact) and detached; ValueError unless it is fp32, bf16 or fp16."""
    if t.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name}: dtype must be float32, bfloat16 or float16, got {t.dtype}")
    return t.detach().float()


def fma_fp32(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c in fp32 with one rounding, as the FMA instruction gives it. fp32 operands, broadcast.

    The product is exact in fp64. The sum is rounded to odd there (the neighbour with the odd last
    bit stands for everything between two fp64 numbers), so that rounding it to fp32 rounds once.
    """
    p, c = a.double() * b.double(), c.double()
    total = p + c
    part = total - p
    error = (p - (total - part)) + (c - part)
    bits = total.view(torch.int64)
    # One step towards the exact sum: away from zero when the error has the sign of the total.
    step = torch.where((error > 0) == (total > 0), 1, -1)
    # A total of infinity has error NaN and stays.
    bits = torch.where((error.abs() > 0) & (bits & 1 == 0), bits + step, bits)
    return bits.view(torch.float64).float()


def require_finite(name: str, t: Tensor, valid: Tensor | None = None) -> None:
    """Raise ValueError naming ``name`` and the first index of ``t`` that holds NaN or infinity.

    ``valid`` (bool ``[t.shape[0]]``, optional) limits the check to the rows that will be used.
    """
    bad = ~torch.isfinite(t)
    if valid is not None:
        bad &= valid.reshape(-1, *[1] * (t.dim() - 1))
    if not bool(bad.any()):
        return
    flat = int(bad.flatten().to(torch.uint8).argmax())
    index = []
    for size in reversed(t.shape):
        flat, i = divmod(flat, size)
        index.append(i)
    where = tuple(reversed(index))
    raise ValueError(f"{name}: value {float(t[where])} at index {where} is not finite")


def exact_divide(a: Tensor, b: float | Tensor) -> Tensor:
    """fp32 IEEE division ``a / b``.

    torch on CUDA turns division by a Python number into a multiplication by its rounded
    reciprocal, so a number is first made a tensor on the device of ``a``.
    """
    if not isinstance(b, Tensor):
        b = torch.full((1,), b, dtype=torch.float32, device=a.device)
    return a / b


def e2m1_encode(x: Tensor, *, check: bool = True) -> Tensor:
    """e2m1 codes (uint8, 0..15, sign in bit 3) of ``x``: nearest, ties to even, saturating at 6.

    The sign bit of ``x`` is kept for results of zero (code 8). With ``check`` NaN and infinity
    raise ValueError; without it the caller vouches that there is no NaN.
    """
    x = as_fp32("x", x)
    if check:
        require_finite("x", x)
    bounds = torch.tensor(_E2M1_BOUNDS, dtype=torch.float32, device=x.device)
    code = torch.bucketize(x.abs().contiguous(), bounds, out_int32=True).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_decode(codes: Tensor) -> Tensor:
    """fp32 values of e2m1 codes (uint8 0..15)."""
    values = torch.tensor(_E2M1_VALUES, dtype=torch.float32, device=codes.device)
    return values[codes.to(torch.int32)]


def pack_e2m1(codes: Tensor) -> Tensor:
    """Pack uint8 codes ``[..., D]`` into ``[..., D/2]``; the even channel is the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: last dimension is {codes.shape[-1]}, it must be even")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack_e2m1`: uint8 ``[..., D/2]`` to codes ``[..., D]``."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def decode_packed_e2m1(packed: Tensor) -> Tensor:
    """fp32 ``[..., D]`` values of packed uint8 ``[..., D/2]``."""
    return _E2M1_PAIRS.to(packed.device)[packed.to(torch.int32)].flatten(-2)


def e4m3_encode(x: Tensor, *, check: bool = True) -> Tensor:
    """``x`` as float8_e4m3fn: nearest, ties to even, saturating at 448.

    With ``check`` NaN and infinity raise ValueError. The clamp comes before torch's cast because
    what that cast does beyond 448 differs between devices and versions.
    """
    x = as_fp32("x", x)
    if check:
        require_finite("x", x)
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e4m3_decode(t: Tensor) -> Tensor:
    """fp32 values of float8_e4m3fn, or of the same bytes given as uint8."""
    return t.view(torch.float8_e4m3fn).float()


def e8m0_decode(t: Tensor) -> Tensor:
    """fp32 values 2^(byte-127) of float8_e8m0fnu, or of the bytes as uint8; byte 255 is NaN."""
    byte = t.view(torch.uint8).to(torch.int32)
    # 2^-127 is subnormal in fp32: its only mantissa bit is the top one.
    bits = torch.where(byte == 0, 1 << 22, byte << 23)
    return torch.where(byte == 255, math.nan, bits.view(torch.float32))
