# SPDX-License-Identifier: Apache-2.0
"""In-process use of the simulator: options, launches, errors, loading of nvcc-built libraries."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mpfa.sim.build import SONAME, library_path

DEFAULTS = {
    "device": "auto",
    "sms": "16",
    "seed": "1",
    "mode": "random",
    "threads": "0",
    "resident": "1",
    "timeout": "600",
    "stats": "0",
    "trace": "",
    "watch": "none",
    "tmem_st": "deferred",
    "accumulate": "exact",
    "pdl": "off",
    "ptx": "",
    "fault": "none",
}
OPTIONS = tuple(DEFAULTS)


class SimulationError(RuntimeError):
    """A simulated launch failed; the message names the kernel, the PTX line and the CUDA line."""


_lock = threading.Lock()
_instance: Simulator | None = None


def _foreign_runtime() -> str | None:
    """A real libcudart that this process has loaded, if any."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[5] if line.count("/") else ""
            if "libcudart.so" in path and "ptxsim_set" not in _exports(path):
                return path
    return None


def _exports(path: str) -> str:
    """ "ptxsim_set" when the library exports it; reading the bytes needs no second load."""
    try:
        return "ptxsim_set" if b"ptxsim_set\0" in Path(path).read_bytes() else ""
    except OSError:
        return ""


class Simulator:
    """The simulator of this process. Use :func:`simulator`; there is one."""

    def __init__(self, library: Path, foreign: str | None = None) -> None:
        self.library = library
        # Next to a real runtime only PTX texts are run: programs would bind to that one.
        self.foreign = foreign
        mode = ctypes.RTLD_LOCAL if foreign else ctypes.RTLD_GLOBAL
        self._lib = ctypes.CDLL(str(library), mode=mode)
        text = ctypes.c_void_p
        for name, result, args in (
            ("ptxsim_set", text, (ctypes.c_char_p, ctypes.c_char_p)),
            ("ptxsim_last_message", text, ()),
            ("ptxsim_clear", None, ()),
            ("ptxsim_launches", text, ()),
            ("ptxsim_register_range", None, (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)),
            ("ptxsim_unregister_range", None, (ctypes.c_void_p,)),
            ("ptxsim_check_ptx", text, (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int)),
            ("ptxsim_extract", text, (ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))),
            ("ptxsim_isa", text, ()),
            ("ptxsim_free", None, (ctypes.c_void_p,)),
            (
                "ptxsim_run_ptx",
                text,
                (
                    ctypes.c_char_p,
                    ctypes.c_char_p,
                    ctypes.c_char_p,
                    ctypes.c_void_p,
                    ctypes.c_void_p,
                    ctypes.c_uint32,
                    ctypes.c_void_p,
                ),
            ),
        ):
            function = getattr(self._lib, name)
            function.restype = result
            function.argtypes = args
        self._options: dict[str, str] = {}

    def text(self, pointer: int | None) -> str | None:
        if not pointer:
            return None
        value = ctypes.cast(pointer, ctypes.c_char_p).value or b""
        self._lib.ptxsim_free(pointer)
        return value.decode(errors="replace")

    @property
    def lib(self) -> ctypes.CDLL:
        return self._lib

    def set(self, **options: object) -> None:
        """Sets options (the PTXSIM_* variables in lower case) for all later launches.

        Raises:
            ValueError: unknown option or value.
        """
        for name, value in options.items():
            text = isinstance(value, (str, os.PathLike))
            word = os.fspath(value) if text else str(int(value))  # type: ignore[call-overload]
            error = self.text(self._lib.ptxsim_set(name.upper().encode(), word.encode()))
            if error:
                raise ValueError(error)
            self._options[name] = word

    def option(self, name: str) -> str:
        """The value in force: of :meth:`set`, else of PTXSIM_<NAME>, else the default.

        Raises:
            ValueError: unknown option.
        """
        if name not in DEFAULTS:
            raise ValueError(f"name: {name!r} is no option; known are {', '.join(DEFAULTS)}")
        if name in self._options:
            return self._options[name]
        return os.environ.get(f"PTXSIM_{name.upper()}") or DEFAULTS[name]

    @contextlib.contextmanager
    def options(self, **options: object) -> Iterator[Simulator]:
        """Options for the launches of a ``with`` block."""
        before = {n: self.option(n) for n in options}
        self.set(**options)
        try:
            yield self
        finally:
            self.set(**before)

    def clear(self) -> None:
        """Forgets launches and errors."""
        self._lib.ptxsim_clear()

    def launches(self) -> list[dict[str, Any]]:
        """Launches since :meth:`clear`: kernel, grid, block, cluster, warp_instructions,
        tcgen05_mma, mma_sync, wgmma, seconds, error."""
        return json.loads(self.text(self._lib.ptxsim_launches()) or "[]")

    def last_message(self) -> str:
        return self.text(self._lib.ptxsim_last_message()) or ""

    def check(self) -> None:
        """Raises SimulationError when a launch since :meth:`clear` failed."""
        failed = [x for x in self.launches() if x["error"]]
        if failed:
            raise SimulationError(f"{failed[0]['kernel'][:100]}: {failed[0]['error']}")
        message = self.last_message()
        if message:
            raise SimulationError(message)

    @contextlib.contextmanager
    def tensors(self, *tensors: torch.Tensor) -> Iterator[None]:
        """Declares the storages that kernels may access in a ``with`` block: every other global
        access ends the launch before it happens."""
        pointers = []
        for t in tensors:
            storage = t.untyped_storage()
            if storage.nbytes():
                pointers.append(storage.data_ptr())
                self._lib.ptxsim_register_range(storage.data_ptr(), storage.nbytes(), b"tensor")
        try:
            yield
        finally:
            for p in pointers:
                self._lib.ptxsim_unregister_range(p)

    def isa(self) -> list[tuple[str, int, str]]:
        """Rows of the instruction table: (pattern, first sm, section of the PTX manual)."""
        rows = (self.text(self._lib.ptxsim_isa()) or "").splitlines()
        return [(p, int(sm), s) for p, sm, s in (row.split("\t") for row in rows)]


def simulator() -> Simulator:
    """The simulator of this process, built and loaded at first use.

    In a process that has a real CUDA runtime it runs PTX texts, but :func:`load` refuses.
    """
    global _instance
    with _lock:
        if _instance is None:
            _instance = Simulator(library_path(), _foreign_runtime())
        return _instance


def load(path: str | os.PathLike[str], *, tvm_ffi: bool = False) -> Any:
    """Opens a shared library built by nvcc (``-cudart shared``, PTX included) under the simulator.

    Args:
        path: the library. Its kernels take CPU tensors: device memory is host memory.
        tvm_ffi: load it with tvm_ffi.load_module and return the module, else a ctypes.CDLL.

    Raises:
        FileNotFoundError: no such file.
        RuntimeError: a real CUDA runtime is loaded in this process.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"path: {file} does not exist")
    foreign = simulator().foreign or _foreign_runtime()
    if foreign:
        raise RuntimeError(
            f"{foreign} is loaded in this process, so {SONAME} of the simulator cannot "
            "take its place; start a process that does not import a CUDA build of torch"
        )
    if tvm_ffi:
        import tvm_ffi as ffi

        return ffi.load_module(str(file.resolve()))
    return ctypes.CDLL(str(file.resolve()))


def extract_ptx(path: str | os.PathLike[str]) -> list[tuple[int, str]]:
    """(arch, text) of every PTX image in an executable, library or fatbin.

    Raises:
        SimulationError: unreadable file or malformed fatbin.
    """
    sim = simulator()
    error = ctypes.c_void_p()
    out = sim.text(sim.lib.ptxsim_extract(os.fsencode(path), ctypes.byref(error)))
    if error.value:
        raise SimulationError(sim.text(error.value))
    return [(x["arch"], x["text"]) for x in json.loads(out or "[]")]


def check_ptx(text: str, name: str = "<ptx>", device: int = 0) -> dict[str, Any]:
    """Parses a PTX module and lowers every function.

    Returns:
        target, kernels (names) and unsupported: one "name:line: reason  [instruction]" each.
    """
    sim = simulator()
    raw = sim.text(sim.lib.ptxsim_check_ptx(text.encode(), name.encode(), device))
    return json.loads(raw or "{}")


def run_ptx(
    text: str,
    kernel: str,
    *args: torch.Tensor | int | float | bytes,
    grid: Sequence[int] = (1, 1, 1),
    block: Sequence[int] = (32, 1, 1),
    smem: int = 0,
    name: str = "<ptx>",
) -> None:
    """Runs one kernel of a PTX text on CPU tensors. It may access these tensors only.

    Args:
        args: a tensor passes its address, an int a 32-bit word (64-bit when it does not fit), a
            float an f32, bytes themselves.
        grid, block: three sizes; missing ones are 1.
        smem: dynamic shared memory in bytes.

    Raises:
        SimulationError: the module does not parse or the launch failed.
    """
    sim = simulator()
    buffers = []
    for a in args:
        if isinstance(a, torch.Tensor):
            if a.device.type != "cpu":
                raise ValueError(f"args: tensors must be on the CPU, found {a.device}")
            raw = a.data_ptr().to_bytes(8, "little")
        elif isinstance(a, bytes):
            raw = a
        elif isinstance(a, float):
            raw = bytes(ctypes.c_float(a))
        else:
            raw = a.to_bytes(8, "little", signed=a < 0)
        buffers.append(ctypes.create_string_buffer(raw, max(len(raw), 8)))
    pointers = (ctypes.c_void_p * max(1, len(buffers)))(*[ctypes.addressof(b) for b in buffers])
    dims = [(ctypes.c_uint32 * 3)(*(list(d) + [1, 1, 1])[:3]) for d in (grid, block)]
    with sim.tensors(*(a for a in args if isinstance(a, torch.Tensor))):
        error = sim.text(
            sim.lib.ptxsim_run_ptx(
                text.encode(),
                name.encode(),
                kernel.encode(),
                ctypes.addressof(dims[0]),
                ctypes.addressof(dims[1]),
                smem,
                ctypes.addressof(pointers),
            )
        )
    if error:
        raise SimulationError(error)
