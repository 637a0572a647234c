# SPDX-License-Identifier: Apache-2.0
"""CUTLASS's own example programs, compiled from the sources in the nvidia-cutlass wheel.

    python tests/ptxsim/cutlass_build.py [name ...]

builds the named programs, or all, and prints their paths. A program takes one to four minutes and up to
7 GB, so a lock allows one at a time and the results stay in ``<cache>/sim-cutlass``; a name there covers
the example's sources, the wheel's version, the flags and nvcc's version.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import filelock

from mpfa.jit.paths import cache_root
from mpfa.jit.toolkit import Toolkit, find_toolkit, missing_text

# Device memory is host memory under the simulator, which takes PTX, not machine code.
_FLAGS = ("-std=c++17", "-O2", "-lineinfo", "-cudart", "shared", "--expt-relaxed-constexpr")


@dataclass(frozen=True)
class Example:
    """One program.

    Attributes:
        source: below ``examples`` of the CUTLASS tree.
        arch: what compute_* its kernels are for.
        defines: further flags.
        curand: includes curand_kernel.h.
        what: what it exercises.
    """

    source: str
    arch: str
    what: str
    defines: tuple[str, ...] = ()
    curand: bool = False


_NARROW = "72_blackwell_narrow_precision_gemm"
_GEFORCE = "79_blackwell_geforce_gemm"
_FMHA = "77_blackwell_fmha/77_blackwell_fmha.cu"
EXAMPLES = {
    "48": Example(
        "48_hopper_warp_specialized_gemm/48_hopper_warp_specialized_gemm.cu",
        "90a",
        "sm_90 wgmma tf32, TMA multicast in a 4 x 2 cluster",
    ),
    "70": Example(
        "70_blackwell_gemm/70_blackwell_fp16_gemm.cu",
        "100a",
        "tcgen05 f16, 2-CTA, multicast",
        curand=True,
    ),
    "72a": Example(f"{_NARROW}/72a_blackwell_nvfp4_bf16_gemm.cu", "100a", "tcgen05 NVFP4 to bf16"),
    "72b": Example(
        f"{_NARROW}/72b_blackwell_nvfp4_nvfp4_gemm.cu", "100a", "tcgen05 NVFP4 to NVFP4"
    ),
    "72c": Example(
        f"{_NARROW}/72c_blackwell_mixed_mxfp8_bf16_gemm.cu", "100a", "tcgen05 MXFP8 x MXFP4"
    ),
    "77_fp8": Example(_FMHA, "100a", "tcgen05 attention e4m3, P in TMEM", ("-DFP8",), True),
    "77_fp16": Example(_FMHA, "100a", "tcgen05 attention f16, P in TMEM", (), True),
    "79a": Example(
        f"{_GEFORCE}/79a_blackwell_geforce_nvfp4_bf16_gemm.cu", "120a", "mma.sync NVFP4"
    ),
    "79b": Example(
        f"{_GEFORCE}/79b_blackwell_geforce_nvfp4_nvfp4_gemm.cu", "120a", "mma.sync NVFP4 to NVFP4"
    ),
    "79c": Example(
        f"{_GEFORCE}/79c_blackwell_geforce_mixed_mxfp8_mxfp6_bf16_gemm.cu",
        "120a",
        "mma.sync MXFP8 x MXFP6",
    ),
}


class Unavailable(RuntimeError):
    """Something that the build needs is not installed; the message says what."""


def cutlass_root() -> tuple[Path, str]:
    """CUTLASS's source tree in the nvidia-cutlass wheel, and the wheel's version.

    Raises:
        Unavailable: the wheel is missing or came without its sources.
    """
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or spec.origin is None:
        raise Unavailable("no CUTLASS sources: pip install nvidia-cutlass")
    root = Path(spec.origin).parent / "source"
    if not (root / "examples").is_dir():
        raise Unavailable(f"no CUTLASS examples in {root}: pip install nvidia-cutlass")
    return root, importlib.metadata.version("nvidia-cutlass")


def curand_include(toolkit: Toolkit) -> Path | None:
    """The folder of curand_kernel.h when the toolkit itself has none; None when it does.

    Raises:
        Unavailable: it is nowhere.
    """
    for pattern in ("include/curand_kernel.h", "targets/*/include/curand_kernel.h"):
        if any(toolkit.home.glob(pattern)):
            return None
    for entry in sys.path:
        for header in sorted(Path(entry or ".").glob("nvidia/*/include/curand_kernel.h")):
            return header.parent
    raise Unavailable("no curand_kernel.h: pip install nvidia-curand")


def _plan(name: str) -> tuple[Path, list[str]]:
    """The program's place in the cache, and the command that makes it (its target left out)."""
    example = EXAMPLES[name]
    toolkit = find_toolkit()
    if toolkit is None:
        raise Unavailable(missing_text())
    root, version = cutlass_root()
    source = root / "examples" / example.source
    if not source.is_file():
        raise Unavailable(f"nvidia-cutlass {version} has no examples/{example.source}")
    arch = f"compute_{example.arch}"
    flags = [*_FLAGS, "-gencode", f"arch={arch},code={arch}", *example.defines]
    digest = hashlib.sha256("\0".join((version, toolkit.version, *flags)).encode())
    for folder in (source.parent, root / "examples" / "common"):
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            if path.suffix in (".cu", ".h", ".hpp", ".cuh"):
                digest.update(f"\0{path.relative_to(root)}\0".encode())
                digest.update(path.read_bytes())
    target = cache_root() / "sim-cutlass" / f"{name}-{digest.hexdigest()[:16]}"
    command = [str(toolkit.nvcc), *flags]
    command += [f"-I{root / sub}" for sub in ("include", "tools/util/include", "examples/common")]
    if example.curand and not target.is_file():
        folder = curand_include(toolkit)
        command += [f"-I{folder}"] if folder is not None else []
    return target, [*command, str(source)]


def cached(name: str) -> Path | None:
    """The program if it has been built here, else None.

    Raises:
        Unavailable: no toolkit or no CUTLASS sources.
    """
    target, _ = _plan(name)
    return target if target.is_file() else None


def build(name: str) -> Path:
    """The program, compiled if the cache has none.

    Raises:
        Unavailable: something is not installed.
        RuntimeError: nvcc failed; the message has its first errors.
    """
    target, command = _plan(name)
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(target.parent / "compile.lock"):
        if not target.is_file():
            private = target.with_suffix(f".{os.getpid()}")
            line = [*command, "-o", str(private)]
            done = subprocess.run(line, capture_output=True, text=True, check=False)
            if done.returncode:
                errors = "\n".join(done.stderr.splitlines()[:30])
                raise RuntimeError(f"{' '.join(line)}\n{errors}")
            private.rename(target)
    return target


def main() -> int:
    names = sys.argv[1:] or list(EXAMPLES)
    unknown = [name for name in names if name not in EXAMPLES]
    if unknown:
        print(f"unknown: {' '.join(unknown)}; known: {' '.join(EXAMPLES)}", file=sys.stderr)
        return 2
    for name in names:
        print(f"{name}: {build(name)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
