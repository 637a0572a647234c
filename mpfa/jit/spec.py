# SPDX-License-Identifier: Apache-2.0
"""What a CUDA module is: its sources, the GPU generations it serves, how long it compiles."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CudaSpec:
    """A CUDA module, one kernel family in one translation unit.

    Attributes:
        name: module name without the architecture, starts with ``mpfa_``.
        sources: files under ``csrc/``.
        majors: compute capability majors that the kernels support.
        seconds: typical compile time for one architecture, for the progress line.
        flags: further nvcc flags.
    """

    name: str
    sources: tuple[str, ...]
    majors: tuple[int, ...]
    seconds: int
    flags: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.name.startswith("mpfa_"):
            raise ValueError(f"name: must start with 'mpfa_', got {self.name!r}")
        if not self.sources or not self.majors:
            raise ValueError(f"{self.name}: sources and majors must not be empty")


def arch_of(capability: tuple[int, int]) -> str:
    """Architecture of FLASHINFER_CUDA_ARCH_LIST for a compute capability: "8.6", "9.0a", "10.0a".

    From 9.0 on kernels are built for the architecture-specific target, which has the narrow
    conversions and the tensor instructions.
    """
    major, minor = capability
    return f"{major}.{minor}{'a' if major >= 9 else ''}"
