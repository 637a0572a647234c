# SPDX-License-Identifier: Apache-2.0
"""Modules of the quantise, cache-write, statistics and combine kernels.

Page size, GQA ratio, compensation channels and strides are run-time values; input dtype, centring,
outlier channels, 4-over-6 and alignment are template arguments inside a module. The qk4pv8 writer is
a module per head dimension, the others serve all of them.
"""

from __future__ import annotations

from typing import Any

from mpfa.jit import cuda
from mpfa.jit.spec import CudaSpec

# Everything since Ampere: portable CUDA, hardware conversions where the target has them.
PORTABLE = (8, 9, 10, 11, 12)

QK4PV8 = {
    d: CudaSpec(
        f"mpfa_quant_qk4pv8_d{d}", ("quant_qk4pv8.cu",), PORTABLE, 30, (f"-DMPFA_HEAD_DIM={d}",)
    )
    for d in (64, 128, 256)
}
MXFP8 = CudaSpec("mpfa_quant_mxfp8", ("quant_mxfp8.cu",), PORTABLE, 15)
STATS = CudaSpec("mpfa_stats", ("quant_stats.cu",), PORTABLE, 12)
COMBINE = CudaSpec("mpfa_combine", ("combine.cu",), PORTABLE, 15)
ALL = (*QK4PV8.values(), MXFP8, STATS, COMBINE)


class _Qk4pv8:
    """The functions of the qk4pv8 modules; the head dimension of the first tensor picks one."""

    @staticmethod
    def _module(x: Any) -> Any:
        dim = x.shape[-1]
        if dim not in QK4PV8:
            allowed = ", ".join(str(d) for d in QK4PV8)
            raise ValueError(f"head_dim: must be one of {allowed}, got {dim}")
        return cuda.load(QK4PV8[dim])

    def append(self, k: Any, *args: Any) -> None:
        self._module(k).append(k, *args)

    def quantize_kv(self, k: Any, *args: Any) -> None:
        self._module(k).quantize_kv(k, *args)

    def quantize_query(self, q: Any, *args: Any) -> None:
        self._module(q).quantize_query(q, *args)


def qk4pv8() -> Any:
    return _Qk4pv8()


def mxfp8() -> Any:
    return cuda.load(MXFP8)


def stats() -> Any:
    return cuda.load(STATS)


def combine() -> Any:
    return cuda.load(COMBINE)
