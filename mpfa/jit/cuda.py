# SPDX-License-Identifier: Apache-2.0
"""Builds CUDA modules on first use through flashinfer.jit. No GPU is needed to build.

Which file is loaded, in this order:

1. the module of an installed flashinfer-jit-cache style package, if it has one of the same name;
2. ``<FLASHINFER_WORKSPACE_BASE>/.cache/flashinfer/<version>/<archs>/cached_ops/<name>/<name>.so``,
   brought up to date by ninja (a no-op when sources, headers and flags have not changed).

Building holds an advisory lock that the kernel drops when its holder dies, and ninja rebuilds what
a killed build left unfinished. Every module carries its PTX beside the machine code, for the
simulator.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from mpfa.jit import host, paths, toolkit
from mpfa.jit.spec import CudaSpec, arch_of

ARCH_VARIABLE = "FLASHINFER_CUDA_ARCH_LIST"
_loaded: dict[str, Any] = {}
_load_lock = threading.Lock()


class CudaToolkitError(RuntimeError):
    """No nvcc, or no architecture to compile for; the message says what to set."""


def _visible_archs() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return [arch_of(capability) for capability in sorted(found)]


def flashinfer_core(archs: str | None = None) -> ModuleType:
    """``flashinfer.jit.core`` with CUDA_HOME and the architecture list in place.

    flashinfer reads both when it is imported. Where the environment has no list, it becomes that
    of the visible GPUs, else ``archs`` (e.g. "10.0a 12.0a").

    Raises:
        CudaToolkitError: no toolkit, or neither a list, a GPU nor ``archs``.
    """
    found = toolkit.find_toolkit()
    if found is None:
        raise CudaToolkitError(toolkit.missing_text())
    # why: flashinfer would take the folder of an nvcc on PATH, which may be a wrapper script's.
    os.environ["CUDA_HOME"] = str(found.home)
    if not os.environ.get(ARCH_VARIABLE):
        chosen = " ".join(_visible_archs()) or archs
        if not chosen:
            raise CudaToolkitError(
                f"no GPU is visible and {ARCH_VARIABLE} is not set: set it to the architectures to "
                'compile for, e.g. "9.0a 10.0a 12.0a"'
            )
        os.environ[ARCH_VARIABLE] = chosen
    import flashinfer.jit.core as core

    if not core.current_compilation_context.TARGET_CUDA_ARCHS:
        core.refresh_current_compilation_context()
    return core


def gencode_flags(core: ModuleType, spec: CudaSpec) -> list[str]:
    """nvcc flags of the targets that ``spec`` serves, PTX beside each machine code.

    Raises:
        RuntimeError: none of the configured architectures is one of ``spec.majors``.
    """
    flags = []
    for flag in core.current_compilation_context.get_nvcc_flags_list(
        supported_major_versions=list(spec.majors)
    ):
        flags.append(flag)
        match = re.fullmatch(r"-gencode=arch=(compute_\w+),code=sm_\w+", flag)
        if match:
            flags.append(f"-gencode=arch={match[1]},code={match[1]}")
    return flags


def module_name(spec: CudaSpec, flags: list[str]) -> str:
    archs = [m[1] for f in flags if (m := re.search(r"code=sm_(\w+)$", f))]
    return "_".join([spec.name, *(f"sm{arch}" for arch in archs)])


def _stub_folder(core: ModuleType) -> Path:
    """Folder with an empty libcuda.so to link against where the toolkit has none.

    No module calls the driver, so with --as-needed libcuda does not end up in NEEDED and modules
    load on machines without a driver.
    """
    folder = Path(core.jit_env.FLASHINFER_JIT_DIR) / "mpfa_stubs"
    stub = folder / "libcuda.so"
    if not stub.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        private = folder / f".libcuda-{os.getpid()}-{threading.get_ident()}.so"
        subprocess.run(
            [*host.find_compiler(), "-shared", "-fPIC", "-x", "c++", os.devnull,
             "-Wl,-soname,libcuda.so.1", "-o", str(private)],
            check=True,
        )  # fmt: skip
        os.replace(private, stub)
    return folder


class _LinkEnvironment:
    """The compiler command with --as-needed in front, and the ninja wheel on PATH if need be.

    Threads may build at once: the first to enter changes the environment, the last to leave
    restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._saved: dict[str, str | None] = {}

    def __enter__(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth > 1:
                return
            self._saved = {name: os.environ.get(name) for name in ("CXX", "PATH")}
            compiler = " ".join(host.find_compiler())
            # why: the flag only acts on libraries after it, and flashinfer puts -lcuda first.
            os.environ["CXX"] = f"{compiler} -Wl,--as-needed"
            if shutil.which("ninja") is None:
                with contextlib.suppress(ImportError):
                    import ninja

                    os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ["PATH"]])

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth > 0:
                return
            for name, value in self._saved.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


_link_environment = _LinkEnvironment()


def _is_stale(library: Path, root: Path, spec: CudaSpec) -> bool:
    if not library.is_file():
        return True
    built = library.stat().st_mtime
    files = [root / "csrc" / source for source in spec.sources]
    files += (root / "include" / "mpfa").rglob("*.*h")
    return any(file.stat().st_mtime > built for file in files)


def jit_spec(spec: CudaSpec, archs: str | None = None) -> Any:
    """flashinfer JitSpec of ``spec``; nothing is compiled yet."""
    core = flashinfer_core(archs)
    root = paths.source_root()
    flags = gencode_flags(core, spec)
    return core.gen_jit_spec(
        module_name(spec, flags),
        [root / "csrc" / source for source in spec.sources],
        extra_cuda_cflags=[*flags, *spec.flags],
        extra_ldflags=[f"-L{_stub_folder(core)}"],
        extra_include_paths=[root / "include", root / "csrc"],
        # why: results must be the reference's bits; divisions are IEEE and subnormals are kept.
        use_fast_math=False,
    )


def build(spec: CudaSpec, archs: str | None = None) -> Path:
    """Compiles the module if needed and returns its path; does not load it."""
    from filelock import FileLock

    built = jit_spec(spec, archs)
    _announce(spec, built)
    with _link_environment, FileLock(built.lock_path, thread_local=False):
        built.build()
    return Path(built.jit_library_path)


def _announce(spec: CudaSpec, built: Any) -> None:
    library = Path(built.jit_library_path)
    if _is_stale(library, paths.source_root(), spec):
        print(
            f"mpfa: compiling {built.name.removeprefix('mpfa_')} (about {spec.seconds} s), "
            f"cached in {library.parent}",
            file=sys.stderr,
            flush=True,
        )


def replace_module(spec: CudaSpec, module: Any) -> Any:
    """Make ``module`` the loaded module of ``spec`` and return the one before it (or None): for
    benchmarks that compare builds."""
    with _load_lock:
        before = _loaded.get(spec.name)
        _loaded[spec.name] = module
    return before


def load(spec: CudaSpec, archs: str | None = None) -> Any:
    """The loaded tvm-ffi module, built on first use. Loaded once per process.

    Raises:
        CudaToolkitError: nvcc or an architecture is missing.
        RuntimeError: the compiler failed, or no configured architecture is supported.
    """
    module = _loaded.get(spec.name)
    if module is None:
        with _load_lock:
            module = _loaded.get(spec.name)
            if module is None:
                built = jit_spec(spec, archs)
                if not built.is_aot:
                    _announce(spec, built)
                with _link_environment:
                    module = _loaded[spec.name] = built.build_and_load()
    return module
