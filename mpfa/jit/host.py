# SPDX-License-Identifier: Apache-2.0
"""Builds host C++ modules on first use. Needs a C++17 compiler; no nvcc, no GPU.

A module lives in ``<cache>/host/<name>-<content key>/<compiler key>/``. The content key covers the
mpfa and tvm-ffi versions, the sources and the flags; the compiler key covers what the compiler
says about itself. A build happens in a private folder that is renamed into place when it is
complete, under an advisory lock that the kernel drops when its holder dies: a killed build leaves
at most a stray folder, never a broken module or a stuck lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpfa.jit import paths

_FLAGS = ("-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unknown-pragmas")
_COMPILERS = ("c++", "g++", "clang++")
_loaded: dict[str, Any] = {}
_load_lock = threading.Lock()


class CompilerNotFoundError(RuntimeError):
    """No C++ compiler, and no module compiled earlier that could be used instead."""


class HostBuildError(RuntimeError):
    """The compiler or the linker failed; the message has the first error and the command."""


@dataclass(frozen=True)
class HostSpec:
    """A host module.

    Attributes:
        name: module name, also of the shared object.
        sources: files under ``csrc/``.
        headers: folders under ``include/mpfa`` whose content belongs to the key.
        seconds: typical compile time, for the progress line.
    """

    name: str
    sources: tuple[str, ...]
    headers: tuple[str, ...]
    seconds: int


PLANNER = HostSpec("mpfa_planner", ("planner.cpp",), ("base", "plan"), 10)


def find_compiler() -> list[str]:
    """Command of the C++ compiler: ``$CXX``, else the first of c++, g++ and clang++ on PATH.

    Raises:
        CompilerNotFoundError: says what was tried and which package to install.
    """
    named = os.environ.get("CXX")
    if named:
        command = shlex.split(named)
        if command and shutil.which(command[0]):
            return command
        raise CompilerNotFoundError(
            f"CXX = {named!r} is not an executable. Set CXX to a C++17 compiler or unset it; "
            "to install one: apt install g++, dnf install gcc-c++, or conda install gxx."
        )
    for name in _COMPILERS:
        if shutil.which(name):
            return [name]
    raise CompilerNotFoundError(
        f"no C++ compiler: CXX is not set and none of {', '.join(_COMPILERS)} is on PATH. "
        "Install one (apt install g++, dnf install gcc-c++, or conda install gxx) or set CXX."
    )


def _files(spec: HostSpec, root: Path) -> list[Path]:
    files = [root / "csrc" / source for source in spec.sources]
    for folder in spec.headers:
        files += sorted((root / "include" / "mpfa" / folder).rglob("*.h"))
    return files


def _digest(parts: list[bytes]) -> str:
    h = hashlib.sha256()
    for part in parts:
        h.update(len(part).to_bytes(8, "little"))
        h.update(part)
    return h.hexdigest()[:16]


def content_key(spec: HostSpec) -> str:
    """Hash of everything but the compiler that decides what the module is."""
    import tvm_ffi

    root = paths.source_root()
    version = getattr(sys.modules.get("mpfa"), "__version__", "0")
    parts = [version, tvm_ffi.__version__, platform.system(), platform.machine(), *_FLAGS]
    blobs = [part.encode() for part in parts]
    for file in _files(spec, root):
        blobs += [file.relative_to(root).as_posix().encode(), file.read_bytes()]
    return _digest(blobs)


def _compiler_key(compiler: list[str]) -> str:
    try:
        said = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompilerNotFoundError(
            f"`{shlex.join(compiler)} --version` failed: {error}"
        ) from error
    return _digest([shlex.join(compiler[1:]).encode(), said])


def _module_file(spec: HostSpec) -> str:
    return f"{spec.name}.so"


def module_dir(spec: HostSpec) -> Path:
    """Folder of the module; may be absent. Raises CompilerNotFoundError as find_compiler does,
    unless a module with the same content was compiled earlier."""
    family = paths.cache_root() / "host" / f"{spec.name}-{content_key(spec)}"
    try:
        return family / _compiler_key(find_compiler())
    except CompilerNotFoundError:
        for made in sorted(family.glob(f"*/{_module_file(spec)}")):
            return made.parent
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    from filelock import FileLock

    # flock(2): released by the kernel when the holder exits in any way, so the file may stay.
    with FileLock(str(path)):
        yield


@contextlib.contextmanager
def _build_environment(compiler: list[str]) -> Iterator[None]:
    """CXX and PATH as tvm_ffi.cpp reads them, and messages in English. The ninja wheel serves where
    PATH has no ninja."""
    names = ("CXX", "LC_ALL", "PATH")
    saved = {name: os.environ.get(name) for name in names}
    os.environ["CXX"] = shlex.join(compiler)
    os.environ["LC_ALL"] = "C"
    if shutil.which("ninja") is None:
        with contextlib.suppress(ImportError):
            import ninja

            os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")])
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _failure_text(spec: HostSpec, log: str) -> str:
    lines = log.splitlines()
    # ninja prints "FAILED: <output>" and then the command that failed.
    failed = next((i for i, line in enumerate(lines) if line.startswith("FAILED:")), len(lines))
    command = "".join(lines[failed + 1 : failed + 2])
    first = next((line for line in lines if re.search(r"\b(fatal )?error\b|cannot find", line)), "")
    return (
        f"compiling {spec.name} failed: {first.strip() or 'see the log below'}\n"
        f"command: {command.strip() or 'not recorded'}\n{log.strip()}"
    )


def _compile(spec: HostSpec, compiler: list[str], folder: Path) -> None:
    import tvm_ffi.cpp

    root = paths.source_root()
    with _build_environment(compiler):
        if shutil.which("ninja") is None:
            raise HostBuildError("ninja is missing: pip install ninja")
        try:
            tvm_ffi.cpp.build(
                spec.name,
                cpp_files=[str(root / "csrc" / source) for source in spec.sources],
                extra_cflags=list(_FLAGS),
                extra_include_paths=[str(root / "include")],
                build_directory=str(folder),
            )
        except RuntimeError as error:
            raise HostBuildError(_failure_text(spec, str(error))) from error


def build(spec: HostSpec) -> Path:
    """Path of the compiled module, compiling it when the cache has none.

    Safe for any number of processes at once: one compiles, the others wait for it.

    Raises:
        CompilerNotFoundError, HostBuildError
    """
    target = module_dir(spec)
    artefact = target / _module_file(spec)
    if artefact.is_file():
        return artefact
    compiler = find_compiler()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise HostBuildError(
            f"cannot write to the cache folder {target.parent}: {error}. "
            "Set MPFA_CACHE_DIR to a folder that can be written."
        ) from error
    with _locked(target.parent / f"{target.name}.lock"):
        if artefact.is_file():
            return artefact
        print(
            f"mpfa: compiling {spec.name.removeprefix('mpfa_')} (about {spec.seconds} s), "
            f"cached in {target}",
            file=sys.stderr,
            flush=True,
        )
        private = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _compile(spec, compiler, private)
            private.chmod(0o755)  # mkdtemp makes it 0700; a shared cache must be readable
            if target.exists():  # a folder without the module: left by hand or a broken disk
                shutil.rmtree(target)
            os.rename(private, target)
        finally:
            shutil.rmtree(private, ignore_errors=True)
    return artefact


def load(spec: HostSpec) -> Any:
    """The loaded tvm-ffi module, built on first use. Loaded once per process."""
    module = _loaded.get(spec.name)
    if module is None:
        with _load_lock:
            module = _loaded.get(spec.name)
            if module is None:
                import tvm_ffi

                module = _loaded[spec.name] = tvm_ffi.load_module(str(build(spec)))
    return module


def planner() -> Any:
    """Module of csrc/planner.cpp."""
    return load(PLANNER)
