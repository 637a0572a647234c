# SPDX-License-Identifier: Apache-2.0
"""Builds the SM100 prefill modules, also with further compiler flags."""

from __future__ import annotations

import json
from pathlib import Path

import sim_modules

ARCHS = "10.0a 10.3a"
_BUILD = """
import dataclasses, json, sys
from mpfa.backends import kernels
from mpfa.jit import attention, cuda
kernel = kernels.find_kernel("prefill", backend="sm100")
suffix, *flags = json.loads(sys.argv[1])
paths = {}
for d in map(int, sys.argv[2:]):
    spec = attention.attention_spec(kernel, d)
    spec = dataclasses.replace(spec, name=spec.name + suffix, flags=(*spec.flags, *flags))
    paths[d] = str(cuda.build(spec))
print(json.dumps(paths))
"""
_BUILD_PV = """
import json, sys
from mpfa.jit import cuda
from mpfa.jit.spec import CudaSpec
paths = {}
for bits in sys.argv[1:]:
    flags = (f"-DMPFA_SM100_PV={bits}",)
    spec = CudaSpec(f"mpfa_sm100_prefill_pv{bits}_d128", ("sm100_prefill_pv.cu",), (10,), 40, flags)
    paths[bits] = str(cuda.build(spec))
print(json.dumps(paths))
"""


def build_pv() -> dict[int, Path]:
    """The builds with other formats of P and V, by their bits: 16 = bf16, 4 = NVFP4."""
    built = sim_modules.build_modules(_BUILD_PV, ARCHS, "16", "4")
    return {int(bits): path for bits, path in built.items()}


def build(suffix: str = "", *flags: str, head_dims: tuple[int, ...] = (64, 128)) -> dict[int, Path]:
    """Path of the built module of each head dimension; skips where there is no nvcc."""
    arguments = (json.dumps([suffix, *flags]), *map(str, head_dims))
    built = sim_modules.build_modules(_BUILD, ARCHS, *arguments)
    return {int(d): path for d, path in built.items()}
