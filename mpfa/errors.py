# SPDX-License-Identifier: Apache-2.0
"""Errors and the argument checks that every public entry point shares.

Rules (docs/errors.md): a wrong value, shape, dtype, device or stride raises ValueError; an object
that is not a tensor (or not one of mpfa's classes) raises TypeError; a call in the wrong order raises
RuntimeError; a (GPU, operation) pair without a kernel raises GPUArchitectureError. Every message names
the argument, the value found and what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import torch

HALF_DTYPES = (torch.bfloat16, torch.float16)
# Kernels and the planner count in int32.
INT32_MAX = 2**31 - 1
# Kernels take scalars as float32: its smallest subnormal and normal number and its largest.
FLOAT32_SUBNORMAL = 2.0**-149
FLOAT32_NORMAL = 2.0**-126
FLOAT32_MAX = 2.0**128 - 2.0**104


class GPUArchitectureError(RuntimeError):
    """No kernel of this version serves the operation on the device that was asked for."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_is_tensor(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    return value


def check_tensor(
    name: str,
    tensor: object,
    *,
    shape: Sequence[int | str] | None = None,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Check one tensor argument; every stride is free except the last, which must be 1.

    ``shape`` may hold strings for dimensions of any size; they only appear in the message.
    """
    tensor = check_is_tensor(name, tensor)
    if dtype is not None:
        allowed = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
        if tensor.dtype not in allowed:
            names = " or ".join(dtype_name(d) for d in allowed)
            raise ValueError(f"{name}: dtype must be {names}, got {dtype_name(tensor.dtype)}")
    if shape is not None:
        got = tuple(tensor.shape)
        bad = len(got) != len(shape) or any(
            isinstance(want, int) and want != have for want, have in zip(shape, got, strict=False)
        )
        if bad:
            wanted = "[" + ", ".join(str(s) for s in shape) + "]"
            raise ValueError(f"{name}: shape must be {wanted}, got {list(got)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: must be on device {device}, got {tensor.device}")
    if tensor.dim() > 0 and tensor.numel() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}: the last dimension must be contiguous (stride 1), got strides "
            f"{tuple(tensor.stride())} for shape {list(tensor.shape)}"
        )
    return tensor


def check_distinct(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Check that a tensor to be written has no two elements in one place (expanded, overlapping)."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach and tensor.numel() > 0:
            raise ValueError(
                f"{name}: its elements must not share memory, got strides {tuple(tensor.stride())} "
                f"for shape {list(tensor.shape)}"
            )
        reach += (size - 1) * stride
    return tensor


# Shape and dtype of each tensor of an operand by name, None for one that its config does not use.
Layout = dict[str, tuple[tuple[int | str, ...], torch.dtype] | None]


def check_layout(owner: str, operand: object, layout: Layout, *, device: torch.device) -> None:
    """Check the tensor attributes of ``operand``, which has a ``config``, against ``layout``."""
    config = operand.config
    for name, want in layout.items():
        tensor = getattr(operand, name)
        if want is not None and tensor is not None:
            check_tensor(f"{owner}.{name}", tensor, shape=want[0], dtype=want[1], device=device)
        elif tensor is not None:
            raise ValueError(
                f"{owner}.{name}: not used by format {config.format!r} with compensation "
                f"{config.compensation!r}; pass None"
            )
        elif want is not None:
            wanted = "[" + ", ".join(str(s) for s in want[0]) + "]"
            raise ValueError(f"{owner}.{name}: required, shape {wanted}, got None")


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        choices = ", ".join(repr(a) for a in allowed)
        raise ValueError(f"{name}: must be one of {choices}, got {value!r}")


def check_int(name: str, value: object, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < low or (high is not None and value > high):
        allowed = f">= {low}" if high is None else f"{low}..{high}"
        raise ValueError(f"{name}: must be {allowed}, got {value}")
    if value > INT32_MAX:
        raise ValueError(f"{name}: must be <= {INT32_MAX}, got {value}")
    return value


def check_real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a float, got {type(value).__name__}")
    return float(value)


def check_indptr(name: str, indptr: torch.Tensor, num_tokens: int) -> list[int]:
    """Check a ragged int32 indptr and return it as a list; it must end at num_tokens."""
    check_tensor(name, indptr, shape=("B+1",), dtype=torch.int32)
    bounds = indptr.tolist()
    if not bounds or bounds[0] != 0:
        raise ValueError(f"{name}: must start with 0, got {bounds[:1]}")
    for b, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if end < begin:
            raise ValueError(f"{name}: must not decrease; request {b} goes from {begin} to {end}")
    if bounds[-1] != num_tokens:
        raise ValueError(f"{name}: must end at the number of tokens {num_tokens}, got {bounds[-1]}")
    return bounds
