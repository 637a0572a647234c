# SPDX-License-Identifier: Apache-2.0
"""Models that PyPI wheels ship as GGUF files: converted once to transformers' own layout."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from mpfa.jit.paths import cache_root

# A new number makes every user convert again; raise it when what is stored below changes.
STORE_VERSION = 1
_READ_BYTES = 1 << 22


def converted(parts: list[Path], *, verbose: bool = True) -> Path:
    """Folder with the model, dequantised to fp32; concurrent processes convert once.

    Args:
        parts: the GGUF file, or its pieces in order.
        verbose: report a conversion on stderr.
    """
    from filelock import FileLock

    digest = hashlib.sha256()
    for part in parts:
        for piece in _pieces(part):
            digest.update(piece)
    models = cache_root() / "models"
    target = models / f"{digest.hexdigest()[:16]}-v{STORE_VERSION}"
    if target.is_dir():
        return target
    models.mkdir(parents=True, exist_ok=True)
    with FileLock(str(target) + ".lock"):
        if target.is_dir():
            return target
        started = time.monotonic()
        if verbose:
            name = parts[0].name
            print(f"converting {name} once into {target} ...", file=sys.stderr, flush=True)
        private = Path(tempfile.mkdtemp(prefix="convert-", dir=models))
        joined = Path(tempfile.mkdtemp(prefix="join-", dir=models))
        try:
            convert(parts[0] if len(parts) == 1 else _join(parts, joined), private)
            private.rename(target)
        finally:
            shutil.rmtree(private, ignore_errors=True)
            shutil.rmtree(joined, ignore_errors=True)
        if verbose:
            print(f"converted in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Store the weights, dequantised to fp32, and the tokenizer in transformers' own layout."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": gguf.name, "local_files_only": True}
    with quiet_transformers():
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        # why: a model read from GGUF refuses save_pretrained, even after dequantisation; a plain
        # one of the same configuration holding the same weights does not.
        fields = loaded.config.to_dict()
        fields.pop("quantization_config", None)
        plain = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(fields))
        plain.load_state_dict(loaded.state_dict())
        plain.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(folder)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            yield piece


def _join(parts: list[Path], folder: Path) -> Path:
    path = folder / "model.gguf"
    with path.open("wb") as file:
        for part in parts:
            for piece in _pieces(part):
                file.write(piece)
    return path


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and notices inside, then put the caller's settings back."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
