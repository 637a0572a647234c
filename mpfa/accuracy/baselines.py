# SPDX-License-Identifier: Apache-2.0
"""The FP8 comparison row: per-tensor e4m3 Q, K and V. Not a cache format of mpfa."""

from __future__ import annotations

import torch

from mpfa.accuracy.attention import PLAIN, LayerOptions
from mpfa.reference import dequantize_fp8, e4m3_decode, e4m3_encode, quantize_fp8
from mpfa.reference.replay import KVOperands, QueryOperands, Scheme, attend_request

# The row differs from qk4pv8 in the formats of Q and K only: same blocks, same P at 448.
SCHEME = Scheme(kv_block=128, p_mode="fixed448")


def fp8_bytes_per_token(num_kv_heads: int, head_dim: int) -> int:
    """K and V, one byte a channel; the scales are one number per layer."""
    return 2 * num_kv_heads * head_dim


class Fp8Runner:
    """Attention as an FP8 engine does it: one scale for all of Q, K or V.

    The scales of K and V are those of the first step (the prompt) and later tokens saturate there,
    because a cache that is already written cannot change its scale; Q's is that of each step.
    """

    def __init__(self, num_requests: int) -> None:
        self.kv_lens = [0] * num_requests
        self._scales: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._stored: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._new_lens: list[int] = []

    def begin(self, new_lens: list[int]) -> None:
        self._new_lens = list(new_lens)
        self.kv_lens = [old + new for old, new in zip(self.kv_lens, new_lens, strict=True)]

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: LayerOptions = PLAIN,
    ) -> torch.Tensor:
        if layer not in self._scales:
            self._scales[layer] = (quantize_fp8(k)[1], quantize_fp8(v)[1])
            empty = (k.new_empty(0, *k.shape[1:], dtype=torch.float32),) * 2
            self._stored[layer] = [empty] * len(self._new_lens)
        q_value = dequantize_fp8(*quantize_fp8(q))
        k_scale, v_scale = self._scales[layer]
        k_value, v_value = (
            e4m3_decode(e4m3_encode(x.float() / scale)) * scale
            for x, scale in ((k, k_scale), (v, v_scale))
        )
        parts = zip(*(x.split(self._new_lens) for x in (q_value, k_value, v_value)), strict=True)
        outs = []
        for request, (q_part, k_part, v_part) in enumerate(parts):
            old_k, old_v = self._stored[layer][request]
            keys, values = torch.cat([old_k, k_part]), torch.cat([old_v, v_part])
            self._stored[layer][request] = (keys, values)
            query, kv = QueryOperands(q_part), KVOperands(keys, values)
            o, _ = attend_request(query, kv, causal=True, scheme=SCHEME, **vars(options))
            outs.append(o)
        return torch.cat(outs).to(q.dtype)
