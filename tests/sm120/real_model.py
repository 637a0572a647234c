# SPDX-License-Identifier: Apache-2.0
"""Q, K and V of SmolLM2-135M on prose: head_dim 64, 9 query heads on 3 KV heads, keys with outlier
channels and an attention sink."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

LAYER = 5


@lru_cache(maxsize=2)
def _captured(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from mpfa.accuracy.attention import CollectingRunner, forward
    from mpfa.accuracy.models import load_packaged
    from mpfa.accuracy.text import SCORED, tokens_of

    language = load_packaged(num_layers=LAYER + 1, verbose=False)
    runner = CollectingRunner([LAYER])
    forward(language, runner, [tokens_of(language.tokenizer, SCORED, tokens)])
    return tuple(x.float() for x in runner.collected[LAYER])


def captured_heads(kv_heads: int, group: int, head_dim: int, tokens: int):
    """q [n, kv_heads * 3, 64], k and v [n, kv_heads, 64] of the first KV heads."""
    from mpfa.accuracy.models import missing_packages

    missing = missing_packages()
    if missing:
        pytest.skip("; ".join(missing))
    assert (group, head_dim) == (3, 64) and kv_heads <= 3
    q, k, v = _captured(tokens)
    return q[:, : 3 * kv_heads], k[:, :kv_heads], v[:, :kv_heads]
