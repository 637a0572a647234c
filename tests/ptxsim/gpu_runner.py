# SPDX-License-Identifier: Apache-2.0
"""Runs the instruction cases on a GPU through the driver API and writes the golden file.

    python tests/ptxsim/gpu_runner.py out.json [raw.json]

Standard library only: the machine with the GPU needs no packages. Exact cases keep a digest of their
output, approximate ones the f32 results; raw.json gets all outputs, to look at a difference.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import struct
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import instr_cases

VERSION = 1


class DriverError(RuntimeError):
    """A CUDA driver call failed."""


class Gpu:
    """One context on device 0."""

    def __init__(self) -> None:
        self.cu = ctypes.CDLL("libcuda.so.1")
        self.check(self.cu.cuInit(0))
        device = ctypes.c_int()
        self.check(self.cu.cuDeviceGet(ctypes.byref(device), 0))
        self.context = ctypes.c_void_p()
        self.check(self.cu.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), device))
        self.check(self.cu.cuCtxSetCurrent(self.context))
        name = ctypes.create_string_buffer(128)
        self.check(self.cu.cuDeviceGetName(name, 128, device))
        self.name = name.value.decode()
        version = ctypes.c_int()
        self.check(self.cu.cuDriverGetVersion(ctypes.byref(version)))
        self.driver = version.value

    def check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self.cu.cuGetErrorString(code, ctypes.byref(text))
            raise DriverError(f"CUDA error {code}: {(text.value or b'').decode()}")

    def alloc(self, size: int) -> ctypes.c_uint64:
        pointer = ctypes.c_uint64()
        self.check(self.cu.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)))
        return pointer

    def run(self, ptx: str, data: bytes, out_size: int, grid: int, block: int) -> bytes:
        """Launches kernel k(in, out) of `ptx`."""
        module = ctypes.c_void_p()
        log = ctypes.create_string_buffer(8192)
        keys = (ctypes.c_int * 2)(5, 6)  # JIT_ERROR_LOG_BUFFER, its size
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), ctypes.c_void_p(8192))
        code = self.cu.cuModuleLoadDataEx(ctypes.byref(module), ptx.encode(), 2, keys, values)
        if code:
            raise DriverError(f"CUDA error {code}: {log.value.decode(errors='replace')[:500]}")
        function = ctypes.c_void_p()
        self.check(self.cu.cuModuleGetFunction(ctypes.byref(function), module, b"k"))
        source, target = self.alloc(len(data)), self.alloc(out_size)
        self.check(self.cu.cuMemcpyHtoD_v2(source, data, ctypes.c_size_t(len(data))))
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(source), ctypes.addressof(target))
        launch = (function, grid, 1, 1, block, 1, 1, 0, None, arguments, None)
        self.check(self.cu.cuLaunchKernel(*launch))
        self.check(self.cu.cuCtxSynchronize())
        result = ctypes.create_string_buffer(out_size)
        self.check(self.cu.cuMemcpyDtoH_v2(result, target, ctypes.c_size_t(out_size)))
        for pointer in (source, target):
            self.check(self.cu.cuMemFree_v2(pointer))
        self.check(self.cu.cuModuleUnload(module))
        return result.raw


def summary(case: instr_cases.Case, result: bytes) -> str:
    """What the golden file keeps of a result: a digest, or the f32 words of approximate cases."""
    if not case.ulps:
        return hashlib.sha256(result).hexdigest()[:32]
    words = struct.unpack(f"<{instr_cases.THREADS * 4}I", result)[::4]
    packed = struct.pack(f"<{instr_cases.THREADS}I", *words)
    return base64.b64encode(zlib.compress(packed, 9)).decode()


def main() -> int:
    gpu = Gpu()
    golden: dict[str, str] = {}
    raw: dict[str, str] = {}
    failed = []
    for case in instr_cases.all_cases():
        blocks = instr_cases.THREADS // instr_cases.BLOCK
        size = instr_cases.THREADS * 16
        try:
            result = gpu.run(
                instr_cases.module(case), instr_cases.inputs(case), size, blocks, instr_cases.BLOCK
            )
        except DriverError as error:
            failed.append(f"{case.name}: {error}")
            continue
        golden[case.name] = summary(case, result)
        raw[case.name] = base64.b64encode(zlib.compress(result, 9)).decode()
    out = {"version": VERSION, "gpu": gpu.name, "driver": gpu.driver, "cases": golden}
    Path(sys.argv[1]).write_text(json.dumps(out, indent=0, sort_keys=True) + "\n")
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps(raw))
    print(f"{gpu.name}, driver {gpu.driver}: {len(golden)} cases, {len(failed)} failed")
    for line in failed:
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
