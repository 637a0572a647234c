# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: attention function "mpfa" and the cache that belongs to it.

Importing this module registers the attention function::

    from mpfa.integrations.transformers import MpfaCache

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="mpfa")
    cache = MpfaCache(model.config, format="qk4pv8", compensation="mean")
    model.generate(**inputs, past_key_values=cache)

MpfaCache holds the tokens of every layer in a PagedKVCache. Padding never reaches it: a batch of
prompts of different lengths gives each request the result that it has alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from mpfa.calibrate import calibrate
from mpfa.errors import HALF_DTYPES
from mpfa.integrations.transformers_cache import MpfaCache, MpfaLayer
from mpfa.integrations.transformers_mask import causal_mask, is_causal_mask, window_of
from mpfa.stats import SmoothingStats

__all__ = ["ATTENTION_NAME", "MpfaCache", "MpfaLayer", "attention_forward", "calibrate_model"]

ATTENTION_NAME = "mpfa"
_CALIBRATION_NAME = "mpfa_calibrate"
# Arguments by which models ask their attention function for something that the kernels don't do.
_REFUSED = ("position_bias", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k", "output_attentions")
_USAGE = (
    'attn_implementation="mpfa" keeps K and V in its own cache: pass '
    "past_key_values=mpfa.integrations.transformers.MpfaCache(model.config, ...) to forward() or "
    "generate(); a model that changes K after storing it, or stores none, is not supported"
)


class _WithoutBackward(torch.autograd.Function):
    """The attention output as it is; a gradient that gets here has nowhere to go."""

    @staticmethod
    def forward(ctx, out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise RuntimeError(
            f"attention function {ATTENTION_NAME!r} is for inference and has no backward pass"
        )


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [B, Hq, q, D], key and value [B, Hkv, q, D].

    fp32 inputs are rounded to bf16 and the result converted back. The window is the mask's, as in
    eager attention; ``sliding_window`` counts where the model makes no mask.

    Raises:
        ValueError: no MpfaCache, dropout, a mask that is not a padding mask, or an argument that
            the kernels do not serve.
    """
    cache, layer = getattr(key, "mpfa_layer", (None, None))
    if cache is None:
        raise ValueError(_USAGE)
    cache.arrived(layer)
    if dropout:
        raise ValueError(f"dropout: mpfa is for inference, got {dropout}; call model.eval()")
    for name in _REFUSED:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(f"{name}: attention function {ATTENTION_NAME!r} does not take it")
    if kwargs.get("use_cache") is False:
        raise ValueError(
            "use_cache: False with a cache passed; generate() would store all tokens at every step"
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            "attention_mask: only padding masks [batch, tokens] are supported, got shape "
            f"{list(attention_mask.shape)}"
        )
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"key: cross-attention is not supported, got {key.shape[2]} tokens for "
            f"{query.shape[2]} query tokens"
        )
    window = window_of(attention_mask, sliding_window)
    if window is not None and window < 1:
        raise ValueError(f"sliding_window: must be >= 1 or None, got {window}")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    dtype = query.dtype if query.dtype in HALF_DTYPES else torch.bfloat16
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (query, key, value))
    out = cache.attend(
        layer,
        q,
        k,
        v,
        attention_mask,
        None if s_aux is None else s_aux.detach().float(),
        causal=is_causal_mask(attention_mask, bool(causal)),
        sm_scale=scaling,
        # transformers counts the query's own position, window_left does not.
        window_left=-1 if window is None else window - 1,
        logits_soft_cap=softcap or 0.0,
    ).to(query.dtype)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        out = _WithoutBackward.apply(out, query, key, value)
    return out, None


@torch.no_grad()
def calibrate_model(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    *,
    channels: int = 0,
    center: bool = True,
) -> list[SmoothingStats]:
    """Static statistics of every layer from one forward pass over sample text.

    Args:
        model: a decoder-only transformers model with any attention implementation; it is restored.
        input_ids: int64 [1, T] or [T], without padding.
        channels, center: as in mpfa.calibrate.

    Returns:
        one SmoothingStats per layer, as MpfaCache takes them.

    Raises:
        ValueError: more than one sequence.
    """
    ids = input_ids[None] if input_ids.dim() == 1 else input_ids
    if ids.dim() != 2 or ids.shape[0] != 1:
        raise ValueError(f"input_ids: expected one sequence, got shape {list(input_ids.shape)}")
    collected: dict[int, SmoothingStats] = {}

    def collect(module, query, key, value, attention_mask, **kwargs):
        q, k = (x[0].transpose(0, 1) for x in (query, key))
        q, k = (x if x.dtype in HALF_DTYPES else x.bfloat16() for x in (q, k))
        collected[module.layer_idx] = calibrate([(q, k)], channels=channels, center=center)
        # why: sdpa, which needs less memory, leaves out soft caps and sinks.
        attend = AttentionInterface()["sdpa"]
        if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
            attend = sys.modules[type(module).__module__].eager_attention_forward
        return attend(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(_CALIBRATION_NAME, collect)
    AttentionMaskInterface.register(_CALIBRATION_NAME, AttentionMaskInterface()["eager"])
    with _attention_implementation(model, _CALIBRATION_NAME):
        model(input_ids=ids.to(model.device), use_cache=False)
    return [collected[i] for i in range(len(collected))]


@contextmanager
def _attention_implementation(model: torch.nn.Module, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


AttentionInterface.register(ATTENTION_NAME, attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, causal_mask)
