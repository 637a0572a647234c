# SPDX-License-Identifier: Apache-2.0
"""The packaged model, shared through the user cache; without its packages tests skip. And a tiny one."""

from __future__ import annotations

import pytest
import torch

from mpfa.accuracy.models import LanguageModel, load_packaged, missing_packages, wrap


def load_layers(num_layers: int | None) -> LanguageModel:
    """SmolLM2-135M with its first layers, or all of them."""
    missing = missing_packages()
    if missing:
        pytest.skip("; ".join(missing))
    return load_packaged(num_layers=num_layers)


@pytest.fixture(scope="session")
def two_layers() -> LanguageModel:
    """Embedding, the first two layers and the output projection of SmolLM2-135M."""
    return load_layers(2)


@pytest.fixture(scope="session")
def full_model() -> LanguageModel:
    return load_layers(None)


class LetterTokenizer:
    """One token per character; a start token first when asked for."""

    def __init__(self, start: int | None = None) -> None:
        self.bos_token_id = start

    def __call__(self, content: str):
        ids = [2 + ord(c) % 60 for c in content]
        start = [] if self.bos_token_id is None else [self.bos_token_id]
        return type("Encoding", (), {"input_ids": start + ids})()


@pytest.fixture(scope="session")
def tiny() -> LanguageModel:
    """Two random Llama layers, 4 query heads on 2 KV heads of 64; the second K is offset strongly."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        attention_bias=True,
    )
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            torch.nn.init.normal_(projection.weight, std=0.2)
            torch.nn.init.normal_(projection.bias, std=1.0)
    return wrap(model, LetterTokenizer(), name="tiny")


@pytest.fixture(scope="session")
def tiny_sliding() -> LanguageModel:
    """Two random Gemma 3 layers at head_dim 256, the first with a window of 16 tokens; a start token."""
    pytest.importorskip("transformers")
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=64,
    )
    return wrap(Gemma3ForCausalLM(config).eval(), LetterTokenizer(start=1), name="tiny sliding")


@pytest.fixture
def letters(tmp_path):
    """A text and another one to calibrate on."""
    scored, calibration = tmp_path / "scored.txt", tmp_path / "calibration.txt"
    scored.write_text("the quick brown fox jumps over the lazy dog; " * 12)
    calibration.write_text("pack my box with five dozen liquor jugs, please. " * 6)
    return scored, calibration
