# SPDX-License-Identifier: Apache-2.0
"""supports(): which backend serves which operation, and the exact reason when it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpfa.backends import kernels
from mpfa.backends.kernels import AttentionKernel
from mpfa.config import (
    COMPENSATIONS,
    FORMATS,
    HEAD_DIMS,
    MAX_CHANNELS,
    PAGE_SIZES,
    KVCacheConfig,
)
from mpfa.errors import (
    FLOAT32_MAX,
    FLOAT32_NORMAL,
    HALF_DTYPES,
    GPUArchitectureError,
    check_choice,
    dtype_name,
)

if TYPE_CHECKING:
    from mpfa.planning import AttentionSpec

OPERATIONS = (*kernels.OPERATIONS, "append")
MIN_CUDA_CAPABILITY = (8, 0)
# Every backend, and what it runs on.
HARDWARE = {
    "reference": "CPU tensors",
    **{
        name: f"compute capability {next(k.major for k in kernels.KERNELS if k.backend == name)}.x"
        for name in kernels.BACKENDS
    },
    "sim": "CPU tensors",
}


def available_backends() -> tuple[str, ...]:
    """What a wrapper accepts beside "auto"; the others wait for their kernels."""
    return ("reference", *kernels.ready_backends())


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
        backend_or_device: a backend name ("reference", "sm90", "sm100", "sm120", "sim") or a device
            ("cpu", "cuda:0", torch.device), which stands for the backend that "auto" picks there.
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
    backend = _backend_asked(backend_or_device, operation, format, reasons)

    def need(ok: bool, reason: str) -> None:
        if not ok:
            reasons.append(reason)

    if format in FORMATS and not reasons and operation != "append":
        shape = (head_dim, page_size, num_kv_heads)
        reasons.extend(_kernel_reasons(backend, operation, format, *shape))
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
    cap = logits_soft_cap or 0.0
    need(
        cap == 0.0 or FLOAT32_NORMAL <= cap <= FLOAT32_MAX / 2.0,
        f"logits_soft_cap {logits_soft_cap}: must be >= 0; 0 is off, other values must be in "
        f"{FLOAT32_NORMAL:.3g}..{FLOAT32_MAX / 2.0:.3g} (float32; plan() also looks at sm_scale)",
    )
    need(q_len_per_request >= 1, f"q_len_per_request {q_len_per_request}: must be >= 1")
    # causal, sinks and return_lse are served by every backend of this version.
    del causal, sinks, return_lse
    return not reasons, reasons


def _backend_asked(
    backend_or_device: str | torch.device, operation: str, format: str, reasons: list[str]
) -> str:
    """The backend meant; adds the reason why it or the device has no kernel, if so."""
    if isinstance(backend_or_device, str):
        if backend_or_device in HARDWARE:
            if not _is_ready(backend_or_device, operation):
                reasons.append(_not_ready_text(backend_or_device, operation))
            return backend_or_device
        try:
            device = torch.device(backend_or_device)
        except RuntimeError:
            known = ", ".join(repr(b) for b in HARDWARE)
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
        return "reference"
    if device.type == "cuda" and operation == "append":
        reasons.extend(_append_on_cuda(device, format))
        return "cuda"
    if device.type == "cuda" and not torch.cuda.is_available():
        reasons.append(f'{_no_cuda_text(device)}; CPU tensors run with backend="reference"')
        return "reference"
    found = backend_of_device(device)
    if found is not None and _is_ready(found, operation):
        return found
    others = [o for o in kernels.OPERATIONS if found is not None and _is_ready(found, o)]
    has = f" (it has {', '.join(others)}: backend {found!r})" if others else ""
    reasons.append(
        f"device {device}{capability_text(device)}: this version of mpfa has no {operation} kernel for "
        f'it{has}; CPU tensors run with backend="reference"'
    )
    return "reference"


def _is_ready(backend: str, operation: str) -> bool:
    """Whether ``backend`` has a kernel of ``operation`` in this version; the portable kernels write
    the caches of every backend."""
    if backend == "reference":
        return True
    if operation == "append":
        return backend in kernels.ready_backends()
    return any(
        kernel.ready and kernel.operation == operation and backend in (kernel.backend, "sim")
        for kernel in kernels.KERNELS
    )


def _not_ready_text(backend: str, operation: str) -> str:
    kind = "kernels are" if operation == "append" else f"{operation} kernel is"
    return f"backend {backend!r}: its {kind} not part of this version of mpfa"


def _kernel_reasons(
    backend: str,
    operation: str,
    format: str,
    head_dim: int,
    page_size: int | None,
    num_kv_heads: int,
) -> list[str]:
    """Why the kernel of ``backend`` does not read this cache, beyond what the format itself says."""
    if backend == "reference":
        return []
    kernel = _kernel_of(backend, operation, format)
    if kernel is None:
        read = [
            k.format
            for k in kernels.KERNELS
            if k.ready and k.operation == operation and backend in (k.backend, "sim")
        ]
        return [f"format {format!r}: {operation} on {backend!r} reads {', '.join(read)}"]
    reasons = kernels.feature_refusals(kernel, head_dim, page_size, num_kv_heads)
    common = {"head_dim": head_dim in HEAD_DIMS, "page_size": page_size in PAGE_SIZES[format]}
    return [r for r in reasons if common.get(r.split(" ", 1)[0], True)]


def _kernel_of(backend: str, operation: str, format: str) -> AttentionKernel | None:
    kernel = kernels.find_kernel(operation, backend=backend, format=format)
    return kernel if kernel is not None and kernel.ready else None


def _no_cuda_text(device: torch.device) -> str:
    return f"device {device}: torch sees no CUDA device"


def _append_on_cuda(device: torch.device, format: str) -> list[str]:
    """append, quantise, statistics and merge are portable kernels (sm_80 and later)."""
    if not torch.cuda.is_available():
        return [_no_cuda_text(device)]
    reasons = []
    if torch.cuda.get_device_capability(device) < MIN_CUDA_CAPABILITY:
        reasons.append(
            f"device {device}{capability_text(device)}: the kernels need compute capability 8.0 or later"
        )
    if format == "bf16":
        reasons.append("format 'bf16': no CUDA kernel writes it, allowed are qk4pv8, mxfp8")
    return reasons


def backend_of_device(device: torch.device) -> str | None:
    """The backend for the GPU's generation, whether or not its kernels are ready."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return kernels.backend_of_major(torch.cuda.get_device_capability(device)[0])


def resolve_backend(backend: str, device: torch.device, operation: str) -> str:
    """The backend a wrapper uses for tensors on ``device``; decided at construction.

    Raises:
        ValueError: unknown backend name, one whose kernels this version does not have, or "sim"
            with tensors that are not on the CPU.
        GPUArchitectureError: no backend, or not the one that was named, serves this device.
    """
    choices = ("auto", *available_backends())
    if isinstance(backend, str) and backend in HARDWARE and not _is_ready(backend, operation):
        listed = ", ".join(repr(c) for c in choices)
        raise ValueError(
            f"backend: {backend!r} ({HARDWARE[backend]}) is not part of this version of mpfa for "
            f"{operation}; available: {listed}"
        )
    check_choice("backend", backend, choices)
    if backend == "sim":
        if device.type != "cpu":
            raise ValueError(
                f"backend: 'sim' runs kernels on CPU tensors, workspace is on {device}"
            )
        return backend
    if backend in ("auto", "reference"):
        found = backend_of_device(device) if backend == "auto" else None
        if found is not None and _is_ready(found, operation):
            return found
        require_reference_device(operation, device)
        return "reference"
    if backend_of_device(device) != backend:
        raise GPUArchitectureError(
            f"{operation}: backend {backend!r} needs {HARDWARE[backend]}, got device "
            f'{device}{capability_text(device)}; CPU tensors run with backend="reference", and '
            'this backend\'s kernels with "sim"'
        )
    return backend


def require_plan(backend: str, operation: str, spec: AttentionSpec) -> None:
    """ValueError when the backend has no kernel for what plan() was told."""
    if backend == "reference":
        return
    format = None if spec.config is None else spec.config.format
    if format is None:
        kernel = kernels.find_kernel(operation, backend=backend)
        if kernel is None:  # "sim" learns the format from run()
            return
        format = kernel.format
    _raise_reasons(backend, operation, format, spec)


def require_run(
    backend: str, operation: str, spec: AttentionSpec, config: KVCacheConfig, planned: str
) -> None:
    """The same for a format that only run() has told; ``planned`` is what plan() assumed."""
    if spec.config is not None:
        return
    _raise_reasons(backend, operation, config.format, spec)
    if config.format != planned:
        raise ValueError(
            f"config: plan() without a config was cut for {planned!r}, run() got {config.format!r}; "
            "pass config to plan()"
        )


def _raise_reasons(backend: str, operation: str, format: str, spec: AttentionSpec) -> None:
    shape = (spec.head_dim, spec.page_size, spec.num_kv_heads)
    reasons = _kernel_reasons(backend, operation, format, *shape)
    if reasons:
        raise ValueError(
            f"{'; '.join(reasons)} (mpfa.supports() lists what each backend serves; CPU tensors of "
            'every format run with backend="reference")'
        )


def require_reference_device(operation: str, device: torch.device) -> None:
    """Tensors that no kernel of this version serves; say so instead of falling back silently."""
    if device.type == "cpu":
        return
    kind = operation if operation in OPERATIONS else "append"
    _, reasons = supports(device, operation=kind, page_size=16)
    told = "; ".join(reasons) if reasons else 'backend "reference" takes CPU tensors only'
    raise GPUArchitectureError(
        f"{operation}: no kernel for device {device}{capability_text(device)}; mpfa.supports() says: "
        f'{told}. Move the tensors to the CPU and use backend="reference"'
    )


def capability_text(device: torch.device) -> str:
    if device.type != "cuda" or not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return f" (compute capability {major}.{minor})"
