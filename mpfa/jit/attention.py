# SPDX-License-Identifier: Apache-2.0
"""Modules of the attention kernels: one per kernel family and head dimension.

GQA ratio, page size, masks, soft cap, sinks, compensation and lengths are run-time values.
``load`` is for a GPU; ``load_simulated`` opens the same build under the simulator, which executes
the PTX beside the machine code.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from mpfa.backends import kernels
from mpfa.jit import cuda, quant
from mpfa.jit.spec import CudaSpec

# What backend "sim" plays. why the family targets: one PTX serves 10.0 and 10.3, another 12.0 and 12.1.
SIM_ARCHS = "10.0f 12.0f"
SIM_DEVICES = {10: "10.0", 12: "12.0"}
_SOURCES = {
    "mpfa_sm120_prefill": ("sm120_prefill.cu",),
    "mpfa_sm100_prefill": ("sm100_prefill.cu",),
    "mpfa_sm100_decode": ("sm100_decode.cu",),
    "mpfa_sm90_decode": ("sm90_decode.cu",),
}
# Typical compile time for one architecture, for the progress line.
_SECONDS = 40
_simulated: dict[str, Any] = {}
_lock = threading.Lock()


def attention_spec(kernel: kernels.AttentionKernel, head_dim: int) -> CudaSpec:
    """The module of ``kernel`` for one head dimension.

    Raises:
        ValueError: the kernel has no such head dimension.
    """
    if head_dim not in kernel.tilings:
        allowed = ", ".join(str(d) for d in kernel.tilings)
        raise ValueError(f"head_dim: {kernel.module} is built for {allowed}, got {head_dim}")
    return CudaSpec(
        name=f"{kernel.module}_d{head_dim}",
        sources=_SOURCES[kernel.module],
        majors=(kernel.major,),
        seconds=_SECONDS,
        flags=(f"-DMPFA_HEAD_DIM={head_dim}",),
    )


def all_specs() -> list[CudaSpec]:
    """Every module of the table once, whether or not its kernel is ready."""
    found = {}
    for kernel in kernels.KERNELS:
        for head_dim in kernel.tilings:
            spec = attention_spec(kernel, head_dim)
            found[spec.name] = spec
    return list(found.values())


def load(spec: CudaSpec) -> Any:
    """The loaded tvm-ffi module for the GPUs of this machine; see mpfa.jit.cuda.load."""
    return cuda.load(spec)


def load_simulated(spec: CudaSpec) -> Any:
    """The module with its launches executed by the simulator, and the combine module beside it.

    Raises:
        RuntimeError: a real CUDA runtime is loaded in this process.
        CudaToolkitError: no nvcc, or FLASHINFER_CUDA_ARCH_LIST lacks the simulated architecture.
    """
    module = _simulated.get(spec.name)
    if module is None:
        with _lock:
            module = _simulated.get(spec.name)
            if module is None:
                module = _simulated[spec.name] = _open_simulated(spec)
    return module


def _open_simulated(spec: CudaSpec) -> Any:
    from mpfa import sim

    # why first: the modules bind to the CUDA runtime that is loaded when they are opened.
    sim.simulator()
    core = cuda.flashinfer_core(SIM_ARCHS)
    targets = {int(major) for major, _ in core.current_compilation_context.TARGET_CUDA_ARCHS}
    if not targets & set(spec.majors):
        raise cuda.CudaToolkitError(
            f"{cuda.ARCH_VARIABLE} has no {spec.majors[0]}.x: the simulator runs {spec.name} from "
            f'the PTX of that architecture; set it to "{SIM_ARCHS}" or leave it unset'
        )
    cuda.load(quant.COMBINE, SIM_ARCHS)
    path: Path = cuda.build(spec, SIM_ARCHS)
    return sim.load(path, tvm_ffi=True)
