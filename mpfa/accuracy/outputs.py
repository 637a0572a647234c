# SPDX-License-Identifier: Apache-2.0
"""Outputs that cannot be written are found before the work, not after it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

SEED_MAX = 2**32 - 1  # what every generator here takes: torch, numpy and lm_eval's


def check_seed(seed: int) -> None:
    if not 0 <= seed <= SEED_MAX:
        raise ValueError(f"seed: must be 0..{SEED_MAX}, got {seed}")


def check_file(name: str, path: str | os.PathLike | None, *, replaced: bool = False) -> None:
    """Refuses a file that cannot be written; leaves the file system as it was.

    Args:
        name: of the argument.
        path: None = not asked for.
        replaced: the file is written beside its place and then moved there.
    """
    if path is None:
        return
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"{name}: {str(path)!r} is a folder, expected a file")
    if not target.resolve().parent.is_dir():
        raise ValueError(f"{name}: {path} is in no existing folder")
    if replaced:
        _probe_folder(name, path, target.resolve().parent)
    elif not target.exists() or target.is_file():
        existed = target.exists()
        try:
            with target.open("ab"):
                pass
            if not existed:
                target.unlink()
        except OSError as error:
            raise ValueError(f"{name}: {path} cannot be written: {error.strerror}") from error
    elif not os.access(target, os.W_OK):
        # why not opened: a pipe would wait for its reader.
        raise ValueError(f"{name}: {path} cannot be written")


def check_folder(name: str, path: str | os.PathLike | None) -> None:
    """Refuses a folder that cannot be made or written into; makes nothing."""
    if path is None:
        return
    if not str(path):
        raise ValueError(f"{name}: expected a folder, got ''")
    target = Path(path).resolve()
    present = next(p for p in (target, *target.parents) if p.exists())
    if not present.is_dir():
        raise ValueError(f"{name}: {present} is a file, expected a folder")
    _probe_folder(name, path, present)


def _probe_folder(name: str, path: object, folder: Path) -> None:
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{name}: {path} cannot be written: {error.strerror}") from error
