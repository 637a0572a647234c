# SPDX-License-Identifier: Apache-2.0
"""supports(): which backend serves which operation, and the exact reason when it does not."""

from __future__ import annotations

import torch

from mpfa.config import (
    COMPENSATIONS,
    FORMATS,
    HEAD_DIMS,
    MAX_CHANNELS,
    PAGE_SIZES,
)
from mpfa.errors import HALF_DTYPES, GPUArchitectureError, check_choice, dtype_name

BACKENDS = ("reference",)
OPERATIONS = ("prefill", "decode", "append")
MIN_CUDA_CAPABILITY = (8, 0)
# What the FP4/FP8 kernels of the design are for; named in messages, not selectable before they exist.
PLANNED = {"sm100": "compute capability 10.x", "sm120": "12.x", "sm90": "9.x", "sim": "any CPU"}


def supports(
    backend_or_device: str | torch.device,
    *,
    operation: str = "prefill",
    format: str = "qk4pv8",
    head_dim: int = 128,
    page_size: int | None = None,
    num_qo_heads: int = 1,
    num_kv_heads: int = 1,
    compensation: str = "none",
    channels: int = 0,
    causal: bool = False,
    window_left: int = -1,
    logits_soft_cap: float | None = 0.0,
    sinks: bool = False,
    return_lse: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    q_len_per_request: int = 1,
) -> tuple[bool, list[str]]:
    """Ask whether mpfa can run something, without running it.

    Args:
        backend_or_device: a backend name ("reference") or a device ("cpu", "cuda:0", torch.device).
        operation: "prefill", "decode" or "append".
        format, head_dim, page_size, num_qo_heads, num_kv_heads, compensation, channels: as in
            KVCacheConfig; page_size None means ragged.
        causal, window_left, logits_soft_cap, sinks, return_lse, q_len_per_request: as in plan()/run().
        dtype: dtype of q, k and v.

    Returns:
        (True, []) or (False, reasons), one sentence per reason, each naming what is allowed.

    Raises:
        ValueError: a backend, device or operation name that does not exist.
        TypeError: backend_or_device is neither a str nor a torch.device.
    """
    check_choice("operation", operation, OPERATIONS)
    reasons: list[str] = []
    _check_device(backend_or_device, operation, format, reasons)

    def need(ok: bool, reason: str) -> None:
        if not ok:
            reasons.append(reason)

    need(format in FORMATS, f"format {format!r}: allowed are {', '.join(FORMATS)}")
    need(head_dim in HEAD_DIMS, f"head_dim {head_dim}: allowed are 64, 128, 256")
    if page_size is not None and format in FORMATS:
        sizes = ", ".join(str(p) for p in PAGE_SIZES[format])
        why = " (a 32-token V block must fit in a page)" if format == "mxfp8" else ""
        need(
            page_size in PAGE_SIZES[format],
            f"page_size {page_size}: format {format!r} allows {sizes}{why}",
        )
    if page_size is None and operation != "prefill":
        reasons.append(f"page_size None: {operation} needs a paged cache")
    need(
        num_kv_heads >= 1 and num_qo_heads >= 1 and num_qo_heads % max(num_kv_heads, 1) == 0,
        f"num_qo_heads {num_qo_heads}: must be a positive multiple of num_kv_heads={num_kv_heads}",
    )
    need(
        compensation in COMPENSATIONS,
        f"compensation {compensation!r}: allowed are {', '.join(COMPENSATIONS)}",
    )
    if compensation in COMPENSATIONS:
        need(
            compensation == "none" or format == "qk4pv8",
            f"compensation {compensation!r}: only format 'qk4pv8' takes one",
        )
        low = 1 if "channels" in compensation else 0
        high = MAX_CHANNELS[compensation]
        need(
            low <= channels <= high,
            f"channels {channels}: compensation {compensation!r} allows {low}..{high}",
        )
    need(dtype in HALF_DTYPES, f"dtype {dtype_name(dtype)}: q, k, v must be bfloat16 or float16")
    need(window_left >= -1, f"window_left {window_left}: must be >= -1")
    need((logits_soft_cap or 0.0) >= 0, f"logits_soft_cap {logits_soft_cap}: must be >= 0")
    need(q_len_per_request >= 1, f"q_len_per_request {q_len_per_request}: must be >= 1")
    # causal, sinks and return_lse are served by every backend of this version.
    del causal, sinks, return_lse
    return not reasons, reasons


def _check_device(
    backend_or_device: str | torch.device, operation: str, format: str, reasons: list[str]
) -> None:
    """Add the reason why nothing serves the operation on this backend or device, if so."""
    if isinstance(backend_or_device, str):
        if backend_or_device in BACKENDS:
            return
        if backend_or_device in PLANNED:
            reasons.append(
                f"backend {backend_or_device!r}: its kernels are not part of this version of mpfa"
            )
            return
        try:
            device = torch.device(backend_or_device)
        except RuntimeError:
            known = ", ".join(repr(b) for b in (*BACKENDS, *PLANNED))
            raise ValueError(
                f"backend_or_device: expected a backend ({known}) or a torch device, "
                f"got {backend_or_device!r}"
            ) from None
    elif isinstance(backend_or_device, torch.device):
        device = backend_or_device
    else:
        raise TypeError(
            "backend_or_device: expected a str or a torch.device, "
            f"got {type(backend_or_device).__name__}"
        )
    if device.type == "cpu":
        return
    if device.type == "cuda" and operation == "append":
        reasons.extend(_append_on_cuda(device, format))
        return
    reasons.append(
        f"device {device}{capability_text(device)}: this version of mpfa has no {operation} kernel for "
        'it; CPU tensors run with backend="reference"'
    )


def _append_on_cuda(device: torch.device, format: str) -> list[str]:
    """append, quantise, statistics and merge are portable kernels (sm_80 and later)."""
    if not torch.cuda.is_available():
        return [f"device {device}: torch sees no CUDA device"]
    reasons = []
    if torch.cuda.get_device_capability(device) < MIN_CUDA_CAPABILITY:
        reasons.append(
            f"device {device}{capability_text(device)}: the kernels need compute capability 8.0 or later"
        )
    if format == "bf16":
        reasons.append("format 'bf16': no CUDA kernel writes it, allowed are qk4pv8, mxfp8")
    return reasons


def resolve_backend(backend: str, device: torch.device, operation: str) -> str:
    """The backend a wrapper uses for tensors on ``device``; decided at construction.

    Raises:
        ValueError: unknown backend name, or one whose kernels this version does not have.
        GPUArchitectureError: no backend serves this device.
    """
    if backend in PLANNED:
        raise ValueError(
            f"backend: {backend!r} ({PLANNED[backend]}) is not part of this version of mpfa; "
            "available: 'auto', 'reference'"
        )
    check_choice("backend", backend, ("auto", *BACKENDS))
    require_reference_device(operation, device)
    return "reference"


def require_reference_device(operation: str, device: torch.device) -> None:
    """Only CPU tensors are served by this version; say so instead of falling back silently."""
    if device.type == "cpu":
        return
    kind = operation if operation in OPERATIONS else "append"
    _, reasons = supports(device, operation=kind, page_size=16)
    raise GPUArchitectureError(
        f"{operation}: no kernel for device {device}{capability_text(device)}; mpfa.supports() says: "
        f'{"; ".join(reasons)}. Move the tensors to the CPU and use backend="reference"'
    )


def capability_text(device: torch.device) -> str:
    if device.type != "cuda" or not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return f" (compute capability {major}.{minor})"
