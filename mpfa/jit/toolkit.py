# SPDX-License-Identifier: Apache-2.0
"""Finds the CUDA toolkit. Nothing here needs a GPU or a driver."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PIP_COMMAND = (
    "pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-cccl nvidia-cuda-runtime"
)
_TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class Toolkit:
    """A usable nvcc.

    Attributes:
        home: toolkit folder, the one with ``bin/nvcc``; what CUDA_HOME should be.
        nvcc: the compiler itself, not a wrapper script in front of it.
        version: "13.0.88", or "unknown" when nvcc does not say.
        how: where it was found.
    """

    home: Path
    nvcc: Path
    version: str
    how: str

    def __str__(self) -> str:
        return f"{self.version} in {self.home} ({self.how})"


def missing_text() -> str:
    """What to say when find_toolkit() returns None."""
    home = os.environ.get("CUDA_HOME")
    named = f"CUDA_HOME = {home} has no usable bin/nvcc" if home else "CUDA_HOME is not set"
    return (
        f"no CUDA toolkit: {named}, no nvcc on PATH, and no nvidia-cuda-nvcc wheel in "
        f"{sys.prefix}. Set CUDA_HOME, or run: {PIP_COMMAND}"
    )


def find_toolkit() -> Toolkit | None:
    """CUDA_HOME, else nvcc on PATH, else the nvidia-cuda-nvcc wheel; None when there is none."""
    home = os.environ.get("CUDA_HOME")
    note = ""
    if home:
        found = _from_nvcc(Path(home) / "bin" / "nvcc", "CUDA_HOME")
        if found is not None:
            return found
        note = f"; CUDA_HOME = {home} has no usable bin/nvcc"
    on_path = shutil.which("nvcc")
    if on_path is not None:
        found = _from_nvcc(Path(on_path), f"nvcc on PATH: {on_path}{note}")
        if found is not None:
            return found
    for nvcc in _wheel_compilers():
        found = _from_nvcc(nvcc, f"nvidia-cuda-nvcc wheel{note}")
        if found is not None:
            return found
    return None


def _wheel_compilers() -> list[Path]:
    """nvcc of installed wheels, newest CUDA first: nvidia/cu13 from CUDA 13 on."""
    found: list[tuple[int, Path]] = []
    for entry in sys.path:
        for nvcc in Path(entry or ".").glob("nvidia/*/bin/nvcc"):
            number = re.fullmatch(r"cu(\d+)", nvcc.parent.parent.name)
            found.append((int(number.group(1)) if number else 0, nvcc))
    return [nvcc for _, nvcc in sorted(found, key=lambda pair: -pair[0])]


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _home_of(nvcc: Path) -> Path | None:
    """The toolkit behind ``nvcc``, which may be a link or a script that calls the real one.

    nvcc's dry run prints the folder as TOP, seen from the real binary; where the dry run fails
    (no host compiler), the folder above a resolved link is taken if it has nvcc too.
    """
    said = _output([str(nvcc), "--dryrun", "-c", "-x", "cu", os.devnull])
    top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE) if said else None
    home = Path(top.group(1).strip()) if top else nvcc.resolve().parent.parent
    home = home.resolve()
    return home if (home / "bin" / "nvcc").is_file() else None


def _from_nvcc(nvcc: Path, how: str) -> Toolkit | None:
    if not (nvcc.is_file() and os.access(nvcc, os.X_OK)):
        return None
    said = _output([str(nvcc), "--version"])
    home = _home_of(nvcc) if said is not None else None
    if said is None or home is None:
        return None
    version = re.search(r"release [\d.]+, V([\d.]+)", said)
    return Toolkit(home, home / "bin" / "nvcc", version.group(1) if version else "unknown", how)
