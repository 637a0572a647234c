# SPDX-License-Identifier: Apache-2.0
"""Masks for attention function "mpfa": which tokens are padding, and the window of the layers.

transformers builds one mask per forward pass and kind of layer, from a function of (batch, head,
query, key). causal_mask() accepts the two functions that the kernels compute, causal and causal
with a sliding window, and refuses every other one; the padding goes on as [batch, tokens so far].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.masking_utils import causal_mask_function

# Value of a token that is no padding; a window of w tokens adds w. why not 1: a model that builds no
# mask hands on the caller's own, of ones.
_VISIBLE = 2


@dataclass(frozen=True)
class MaskNote:
    """What is known of a mask without reading it."""

    window: int | None  # tokens that a query sees, itself included
    padded: bool


def causal_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str | None = None,
    **_: object,
) -> torch.Tensor:
    """transformers' mask interface. int32 [batch, tokens so far]: 0 = padding, else 2 + window.

    Raises:
        ValueError: ``mask_function`` is neither causal nor, with ``local_size``, a sliding window.
    """
    if mask_function is not causal_mask_function:
        q = q_offset + torch.arange(q_length, device=device)
        _require_causal(mask_function, batch_size, q, kv_offset + kv_length, local_size, use_vmap)
    value = _VISIBLE + (local_size or 0)
    if attention_mask is None:
        mask = torch.full((batch_size, kv_length), value, dtype=torch.int32, device=device)
        padded = False
    else:
        mask = attention_mask.bool().int() * value
        padded = not bool(attention_mask.all())
    mask.mpfa_note = MaskNote(local_size, padded)
    return mask


def window_of(mask: torch.Tensor | None, default: int | None) -> int | None:
    """The window that ``mask`` was made for; ``default`` where it does not say."""
    if mask is None:
        return default
    note = getattr(mask, "mpfa_note", None)
    if note is not None:
        return note.window
    # A copy on another device has lost the note, not the values.
    top = int(mask.max()) if mask.numel() else 0
    if top < _VISIBLE:
        return default
    return None if top == _VISIBLE else top - _VISIBLE


def padding_of(mask: torch.Tensor) -> torch.Tensor | None:
    """bool on the host, True = token; None = no padding."""
    note = getattr(mask, "mpfa_note", None)
    if note is not None and not note.padded:
        return None
    host = mask.cpu().bool()
    return None if bool(host.all()) else host


def is_causal_mask(mask: torch.Tensor | None, default: bool) -> bool:
    """Whether the mask is causal; ``default`` where transformers' mask interface did not make it."""
    made_here = mask is not None and (hasattr(mask, "mpfa_note") or window_of(mask, 0) != 0)
    return made_here or default


def _require_causal(
    function: Callable,
    batch_size: int,
    q: torch.Tensor,
    kv_end: int,
    window: int | None,
    use_vmap: bool,
) -> None:
    """Probes the edges of every row: first and last visible key, and the keys beside them."""
    batch = torch.arange(batch_size, device=q.device)[:, None]
    first = torch.zeros_like(q) if window is None else (q - window + 1).clamp(min=0)
    probes = [
        (q, True),
        (first, True),
        (q // 2 + first // 2, None),
        (q + 1, False),
        (first - 1, False),
    ]
    for kv, visible in probes:
        kept = (kv >= 0) & (kv < kv_end)
        rows, keys = q[kept], kv[kept]
        if not rows.numel():
            continue
        want = torch.full((), visible is not False, device=q.device)
        if visible is None:
            want = (keys >= first[kept]) & (keys <= rows)
        if use_vmap:
            pairs = torch.vmap(function, in_dims=(None, None, 0, 0))
            found = torch.vmap(pairs, in_dims=(0, None, None, None))(
                batch[:, 0], batch.new_zeros(()), rows, keys
            )
        else:
            found = function(batch, batch.new_zeros(()), rows[None], keys[None])
        if not bool((found == want).all()):
            wanted = "causal" if window is None else f"a causal window of {window} tokens"
            raise ValueError(
                f'attention_mask: attn_implementation="mpfa" serves causal attention and sliding '
                f"windows; this model or call asks for another mask than {wanted} (bidirectional, "
                "chunked, packed or prefix tokens)"
            )
