# SPDX-License-Identifier: Apache-2.0
"""Modules of the quantise, cache-write, statistics and combine kernels.

Head dimension, page size, GQA ratio, compensation channels and strides are run-time values; input
dtype, centring and 4-over-6 are template arguments inside a module. So a GPU compiles four modules.
"""

from __future__ import annotations

from typing import Any

from mpfa.jit import cuda
from mpfa.jit.spec import CudaSpec

# Everything since Ampere: portable CUDA, hardware conversions where the target has them.
PORTABLE = (8, 9, 10, 11, 12)

QK4PV8 = CudaSpec("mpfa_quant_qk4pv8", ("quant_qk4pv8.cu",), PORTABLE, 25)
MXFP8 = CudaSpec("mpfa_quant_mxfp8", ("quant_mxfp8.cu",), PORTABLE, 15)
STATS = CudaSpec("mpfa_stats", ("quant_stats.cu",), PORTABLE, 12)
COMBINE = CudaSpec("mpfa_combine", ("combine.cu",), PORTABLE, 15)
ALL = (QK4PV8, MXFP8, STATS, COMBINE)


def qk4pv8() -> Any:
    return cuda.load(QK4PV8)


def mxfp8() -> Any:
    return cuda.load(MXFP8)


def stats() -> Any:
    return cuda.load(STATS)


def combine() -> Any:
    return cuda.load(COMBINE)
