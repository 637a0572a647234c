# SPDX-License-Identifier: Apache-2.0
"""Models and the BF16 cache of serving.py."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.cache_utils import Cache, CacheLayerMixin

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Published shapes; how long something takes does not depend on the weights. Positions beyond those
# that the models were trained for are allowed for the same reason.
SHAPES = {
    "llama-3.1-8b": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=262144,
    ),
    "qwen3-14b": Qwen3Config(
        vocab_size=151936, hidden_size=5120, intermediate_size=17408, num_hidden_layers=40,
        num_attention_heads=40, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=262144,
    ),
    "tiny": LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=262144,
        # Queries and keys of the size that trained models have; else all keys would count the same.
        initializer_range=0.12,
    ),
}  # fmt: skip


def load(name: str | None, shape: str | None) -> tuple[torch.nn.Module, str]:
    """(model in eval mode, what it is): pretrained ``name``, or random weights in ``shape``.

    bf16 on a GPU, fp32 on a CPU. What it is names the model (of a folder only the last part, with the
    number of parameters), where its weights are from, and the dtype: "tiny with random weights, fp32".
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if name is not None:
        config = AutoConfig.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype)
        called = Path(name).resolve().name if Path(name).is_dir() else name
        count = sum(p.numel() for p in model.parameters())
        return model.to(device).eval(), f"{called} ({count / 1e6:.0f}M parameters), {SHORT[dtype]}"
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(SHAPES[shape], dtype=dtype)
    return model.eval(), f"{shape} with random weights, {SHORT[dtype]}"


class SlabLayer(CacheLayerMixin):
    """K and V of one layer in one allocation, [B, Hkv, room, D]; update() returns views of it."""

    is_sliding = False

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.used = room, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads, _, dim = key_states.shape
        self.keys = key_states.new_empty(batch, heads, self.room, dim)
        self.values = value_states.new_empty(batch, heads, self.room, dim)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.used + key_states.shape[2]
        self.keys[:, :, self.used : end] = key_states
        self.values[:, :, self.used : end] = value_states
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        return self.used

    def get_max_length(self) -> int:
        return self.room


class SlabCache(Cache):
    """The baselines' cache. why not transformers' own: DynamicCache copies all of K and V at every
    token, and StaticCache has the attention read its unused part."""

    @property
    def nbytes(self) -> int:
        filled = [layer for layer in self.layers if layer.is_initialized]
        return sum(t.numel() * t.element_size() for s in filled for t in (s.keys, s.values))


def preallocated_cache(model: torch.nn.Module, batch: int, tokens: int) -> SlabCache:
    """Room for ``tokens`` tokens of each request."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    return SlabCache(layers=[SlabLayer(tokens) for _ in range(count)])
