# SPDX-License-Identifier: Apache-2.0
"""Small random transformers models, prompts for them, and eager attention with mpfa's roundings."""

from __future__ import annotations

import inspect
import sys

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from mpfa.integrations.transformers import MpfaCache

# The argument for the cache was renamed in transformers 5.
CACHE = (
    "cache"
    if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    else "past_key_values"
)
COMMON = {
    "vocab_size": 97,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


def make_model(kind: str) -> torch.nn.Module:
    """A model with random weights, large enough logits that greedy choices are no ties."""
    torch.manual_seed(7)
    if kind == "llama":
        config = transformers.LlamaConfig(**COMMON)
    elif kind == "gemma2":  # sliding layers, soft cap
        config = transformers.Gemma2Config(
            **COMMON, sliding_window=12, query_pre_attn_scalar=64, attn_logit_softcapping=3.0
        )
    elif kind == "gemma3":  # sliding layers of 12 tokens and full ones, q and k normalised
        config = transformers.Gemma3TextConfig(
            **COMMON,
            sliding_window=12,
            query_pre_attn_scalar=64,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    elif kind == "mistral":  # one window for all layers, no layer types
        config = transformers.MistralConfig(**COMMON, sliding_window=12)
    elif kind == "phimoe":  # names a window to its attention function that its mask does not have
        config = transformers.PhimoeConfig(
            **COMMON, sliding_window=12, num_local_experts=2, num_experts_per_tok=2
        )
    elif kind == "gpt_oss":  # sliding layers, sinks
        config = transformers.GptOssConfig(
            **COMMON, sliding_window=12, num_local_experts=2, num_experts_per_tok=1
        )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name and weight.dim() == 2:
                weight.mul_(4.0)
            if name.endswith("sinks"):
                weight.copy_(torch.linspace(-1.0, 2.0, weight.numel()))
    return model.eval()


def prompts(lens: list[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (n,), generator=generator) for n in lens]


def padded(parts: list[torch.Tensor], left: bool = True) -> dict[str, torch.Tensor]:
    width = max(p.numel() for p in parts)
    ids = torch.zeros(len(parts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, part in enumerate(parts):
        where = slice(width - part.numel(), width) if left else slice(0, part.numel())
        ids[row, where], mask[row, where] = part, 1
    return {"input_ids": ids, "attention_mask": mask}


def forward(model, cache: MpfaCache | None, *args, **kwargs) -> torch.Tensor:
    """The model's logits."""
    return model(*args, **kwargs, **{CACHE: cache}).logits


def generate(model, inputs, tokens: int, cache=None, **options) -> torch.Tensor:
    out = model.generate(
        **inputs,
        **{CACHE: cache},
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=options.pop("do_sample", False),
        pad_token_id=0,
        **options,
    )
    return out[:, inputs["input_ids"].shape[1] :]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def rounded_eager(module, query, key, value, attention_mask, **kwargs):
    """The model's eager attention of bf16-rounded q, k and v, its output rounded to bf16: what the
    bf16 format computes, up to the order of fp32 sums."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    q, k, v = (x.bfloat16().to(x.dtype) for x in (query, key, value))
    out, weights = eager(module, q, k, v, attention_mask, **kwargs)
    return out.bfloat16().to(out.dtype), weights


AttentionInterface.register("rounded_eager", rounded_eager)
AttentionMaskInterface.register("rounded_eager", AttentionMaskInterface()["eager"])
