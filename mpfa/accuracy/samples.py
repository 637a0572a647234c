# SPDX-License-Identifier: Apache-2.0
"""Q, K and V of every layer with their exact attention: each row's error on the same inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mpfa.accuracy.attention import AttentionRunner, LayerOptions
from mpfa.accuracy.metrics import AttentionErrors, attention_errors, block_counts
from mpfa.reference import exact_attention

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class AttentionSamples:
    """Windows of activations and their float64 attention.

    Args:
        windows: per window q bf16 [T, Hq, D], k and v [T, Hkv, D] of every layer; token 0 of a window
            is the first of its request.
        options: what each layer's attention is besides causal.
    """

    def __init__(self, windows: list[dict[int, Tensors]], options: dict[int, LayerOptions]) -> None:
        self.windows, self.options = windows, options
        self.layers = sorted(windows[0])
        self.lens = [len(w[self.layers[0]][0]) for w in windows]
        self._exact = [
            {
                layer: exact_attention(*w[layer], causal=True, **vars(options[layer]))[0]
                for layer in self.layers
            }
            for w in windows
        ]

    def errors(self, make_runner: Callable[[int], AttentionRunner]) -> AttentionErrors:
        """Errors of every layer and head; ``make_runner(n)`` gives a runner for one request of n."""
        outs: dict[int, list[torch.Tensor]] = {layer: [] for layer in self.layers}
        for window, length in zip(self.windows, self.lens, strict=True):
            runner = make_runner(length)
            runner.begin([length])
            for layer in self.layers:
                with torch.inference_mode():
                    out = runner.attend(layer, *window[layer], self.options[layer])
                outs[layer].append(out)
        parts = [
            attention_errors(outs[layer], [exact[layer] for exact in self._exact])
            for layer in self.layers
        ]
        sums = (torch.stack(kept) for kept in zip(*parts, strict=True))
        return AttentionErrors(*sums, block_counts(self.lens))
