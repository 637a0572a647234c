# SPDX-License-Identifier: Apache-2.0
"""Machine code out of compiled files: cuobjdump and nvdisasm of the toolkit or of their wheels."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mpfa.jit.toolkit import find_toolkit

PIP_COMMAND = "pip install nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump"


class ToolError(RuntimeError):
    """A disassembler is missing or failed."""


def find_tool(name: str) -> Path:
    """``name`` in the toolkit, on PATH or in a wheel (newest CUDA first).

    Raises:
        ToolError: it is nowhere; the message has the pip command.
    """
    toolkit = find_toolkit()
    candidates = [toolkit.home / "bin" / name] if toolkit else []
    on_path = shutil.which(name)
    candidates += [Path(on_path)] if on_path else []
    for entry in sys.path:
        candidates += sorted(Path(entry or ".").glob(f"nvidia/*/bin/{name}"), reverse=True)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ToolError(f"no {name} in the CUDA toolkit, on PATH or in a wheel: {PIP_COMMAND}")


def _run(command: list[str], folder: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise ToolError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def disassemble(cubin: Path) -> str:
    """nvdisasm's listing of one cubin with the encodings, which hold the scheduling fields."""
    return _run([str(find_tool("nvdisasm")), "-hex", str(cubin.resolve())])


def listings(file: Path, arch: str | None = None) -> list[tuple[str, str]]:
    """(name, listing) of every cubin in ``file``: a cubin, or a library, object or program with
    embedded ones.

    Args:
        arch: "sm_120a", ...: only images of this target.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no image in it, or none of ``arch``.
        ToolError: a disassembler is missing or failed.
    """
    if not file.is_file():
        raise FileNotFoundError(f"file: {file} does not exist")
    if file.suffix == ".cubin":
        return [(file.name, disassemble(file))]
    if file.suffix == ".sass":
        return [(file.name, file.read_text())]
    with tempfile.TemporaryDirectory(prefix="mpfa-sass-") as folder:
        _run([str(find_tool("cuobjdump")), "-xelf", "all", str(file.resolve())], Path(folder))
        images = sorted(Path(folder).glob("*.cubin"))
        # cuobjdump names them <stem>.<index>.<target>.cubin
        wanted = [i for i in images if arch is None or f".{arch}." in f".{i.name}"]
        if not wanted:
            found = ", ".join(i.name for i in images) or "none"
            raise ValueError(f"file: {file} has no {arch or 'machine'} code; images: {found}")
        return [(image.name, disassemble(image)) for image in wanted]
