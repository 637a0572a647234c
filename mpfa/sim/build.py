# SPDX-License-Identifier: Apache-2.0
"""Builds the replacement CUDA runtime (csrc/ptxsim) at first use. Needs a C++17 compiler, no CUDA.

The library lives in ``<cache>/sim/<key>/libcudart.so.13``; the key covers the sources, the flags and
the compiler. It is built in a private folder that is renamed into place, under a file lock.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import filelock

from mpfa.jit.host import find_compiler
from mpfa.jit.paths import cache_root, source_root

SONAME = "libcudart.so.13"
# Contraction would fuse PTX's separate mul and add; signed arithmetic wraps in PTX.
_FLAGS = (
    "-std=c++17",
    "-O2",
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "-fPIC",
    "-ffp-contract=off",
    "-fwrapv",
    "-fno-math-errno",
    "-pthread",
)


class SimulatorBuildError(RuntimeError):
    """The compiler or linker failed; the message has the command and the first errors."""


def _host_flags() -> tuple[str, ...]:
    """AVX2 where this machine has it: the lane loops are then twice as fast."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return ()
    return ("-march=x86-64-v3",) if {"avx2", "bmi2", "fma", "f16c"} <= set(words) else ()


def _sources(root: Path) -> list[Path]:
    folder = root / "csrc" / "ptxsim"
    return sorted(
        p for sub in (folder, folder / "sem", folder / "watch") for p in sub.glob("*.cpp")
    )


def _key(root: Path, command: list[str], flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    folder = root / "csrc" / "ptxsim"
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".cpp", ".h", ".def", ".map"):
            digest.update(f"{path.relative_to(folder)}\0".encode())
            digest.update(path.read_bytes())
    version = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, check=False
    ).stdout
    digest.update("\0".join((*command, *flags, version)).encode())
    return digest.hexdigest()[:20]


def _compile(command: list[str], flags: tuple[str, ...], source: Path, target: Path) -> None:
    line = [*command, *flags, "-c", str(source), "-o", str(target)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = "\n".join(done.stderr.splitlines()[:20])
        raise SimulatorBuildError(f"{' '.join(line)}\n{errors}")


def library_path(verbose: bool | None = None) -> Path:
    """The simulator's libcudart.so.13, built if it is not in the cache.

    ``$MPFA_SIM_LIBRARY`` names a ready-made one (a build of csrc/ptxsim/Makefile).

    Raises:
        mpfa.jit.host.CompilerNotFoundError: no C++ compiler.
        SimulatorBuildError: the build failed.
        FileNotFoundError: ``$MPFA_SIM_LIBRARY`` or the sources do not exist.
    """
    own = os.environ.get("MPFA_SIM_LIBRARY")
    if own:
        path = Path(own)
        if not path.is_file():
            raise FileNotFoundError(f"MPFA_SIM_LIBRARY names {own}, which does not exist")
        return path.resolve()
    root = source_root()
    command = find_compiler()
    flags = (*_FLAGS, *_host_flags())
    folder = cache_root() / "sim" / _key(root, command, flags)
    library = folder / SONAME
    if library.is_file():
        return library
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(str(folder) + ".lock"):
        if library.is_file():
            return library
        if verbose or (verbose is None and sys.stderr.isatty()):
            print("mpfa.sim: building the simulator (about a minute, once)", file=sys.stderr)
        private = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
        try:
            _build(root, command, flags, private)
            private.rename(folder)
        except OSError:
            if not library.is_file():
                raise
        finally:
            shutil.rmtree(private, ignore_errors=True)
    return library


def _build(root: Path, command: list[str], flags: tuple[str, ...], folder: Path) -> None:
    sources = _sources(root)
    if not sources:
        raise FileNotFoundError(f"no simulator sources under {root / 'csrc' / 'ptxsim'}")
    objects = [folder / f"{i}.o" for i in range(len(sources))]
    # The largest files first keep both cores busy to the end.
    order = sorted(range(len(sources)), key=lambda i: -sources[i].stat().st_size)
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        jobs = [pool.submit(_compile, command, flags, sources[i], objects[i]) for i in order]
        for job in jobs:
            job.result()
    script = root / "csrc" / "ptxsim" / "cudart.map"
    line = [*command, "-shared", "-o", str(folder / SONAME), *map(str, objects)]
    line += [f"-Wl,-soname,{SONAME}", f"-Wl,--version-script={script}", "-Wl,-z,defs"]
    line += ["-ldl", "-lpthread"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = "\n".join(done.stderr.splitlines()[:20])
        raise SimulatorBuildError(f"linking {SONAME} failed\n{errors}")
    for path in objects:
        path.unlink()
    # Programs linked with -lcudart look for the plain name at link time only; some loaders use it.
    (folder / "libcudart.so").symlink_to(SONAME)
