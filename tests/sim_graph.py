# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the simulator's runtime, for tests that capture and replay without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import tvm_ffi


class SimulatedGraph:
    """The launches that ``body`` makes, captured; nothing of it runs before replay()."""

    def __init__(self, simulator, body: Callable[[], object]) -> None:
        self._lib = simulator.lib
        self._stream, self._exec, graph = (ctypes.c_void_p() for _ in range(3))
        self._call("cudaStreamCreate", ctypes.byref(self._stream))
        self._call("cudaStreamBeginCapture", self._stream, 0)
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cpu:0"), self._stream.value):
            body()
        self._call("cudaStreamEndCapture", self._stream, ctypes.byref(graph))
        self._call("cudaGraphInstantiate", ctypes.byref(self._exec), graph, ctypes.c_ulonglong(0))
        self._call("cudaGraphDestroy", graph)

    def replay(self) -> None:
        self._call("cudaGraphLaunch", self._exec, self._stream)
        self._call("cudaStreamSynchronize", self._stream)

    def close(self) -> None:
        self._call("cudaGraphExecDestroy", self._exec)
        self._call("cudaStreamDestroy", self._stream)

    def _call(self, name: str, *args: object) -> None:
        error = getattr(self._lib, name)(*args)
        if error != 0:
            raise RuntimeError(f"{name} returned {error}")
