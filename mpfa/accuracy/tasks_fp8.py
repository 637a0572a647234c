# SPDX-License-Identifier: Apache-2.0
"""The FP8 comparison row under a transformers model: per-tensor e4m3 Q, K and V, P at 448.

Emulated with torch operations, for its accuracy only; not a cache format of mpfa. The same steps
as mpfa.accuracy.baselines, but P is quantised against the row's final maximum instead of the
running one, so that a GPU runs it in few large operations.
"""

from __future__ import annotations

import math

import torch

from mpfa.integrations.transformers import MpfaCache
from mpfa.reference.codecs import E4M3_MAX
from mpfa.reference.fp8 import quantize_fp8

# Scores held at once: 2^26 fp32 are 256 MB.
SCORE_ELEMENTS = 1 << 26


class Fp8Cache(MpfaCache):
    """K and V of every layer as e4m3 codes, for attn_implementation="mpfa".

    The scales of K and V are those of a request's first step; later tokens saturate there.
    """

    def __init__(self, model_config: object) -> None:
        super().__init__(model_config, format="bf16")
        self._stored: dict[tuple[int, int], _Stored] = {}

    def reset(self) -> None:
        super().reset()
        self._stored = {}

    def attend(
        self,
        layer: object,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        **options: object,
    ) -> torch.Tensor:
        """As MpfaCache.attend(): padding is neither stored nor seen."""
        out = torch.zeros_like(q)
        q_len = q.shape[1]
        for b in range(q.shape[0]):
            rows = slice(None) if mask is None else mask[b, -q_len:].bool()
            new = q[b][rows]
            if new.shape[0] == 0:
                continue
            stored = self._stored.setdefault((layer.index, b), _Stored())
            stored.append(k[b][rows], v[b][rows])
            out[b, rows] = fp8_attention(new, stored, sinks=sinks, **options).to(q.dtype)
            layer.lens[b] += new.shape[0]
        layer.seen += q_len
        return out


class _Stored:
    """One layer of one request."""

    def __init__(self) -> None:
        self.k: torch.Tensor | None = None
        self.v: torch.Tensor | None = None
        self.k_scale = self.v_scale = None

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        if self.k is None:
            self.k, self.k_scale = quantize_fp8(k)
            self.v, self.v_scale = quantize_fp8(v)
            return
        self.k = _cat(self.k, _encode(k.float() / self.k_scale))
        self.v = _cat(self.v, _encode(v.float() / self.v_scale))


def fp8_attention(
    q: torch.Tensor,
    stored: _Stored,
    *,
    causal: bool,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32 [n, Hq, D]: the last n tokens' attention over all stored ones."""
    (num_new, num_qo_heads, dim), (num_keys, num_kv_heads) = q.shape, stored.k.shape[:2]
    codes, q_scale = quantize_fp8(q)
    scale = (1.0 / math.sqrt(dim) if sm_scale is None else sm_scale) * q_scale * stored.k_scale
    queries = codes.float().view(num_new, num_kv_heads, -1, dim).permute(1, 2, 0, 3)
    keys = stored.k.float().permute(1, 2, 0)[:, None]
    values = stored.v.float().transpose(0, 1)[:, None]
    position = torch.arange(num_keys, device=q.device)
    chunk = max(1, SCORE_ELEMENTS // (num_qo_heads * num_keys))
    outs = []
    for begin in range(0, num_new, chunk):
        part = queries[:, :, begin : begin + chunk]
        scores = part @ keys * scale
        if logits_soft_cap:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        row = (torch.arange(part.shape[2], device=q.device) + begin + num_keys - num_new)[:, None]
        hidden = torch.zeros(part.shape[2], num_keys, dtype=torch.bool, device=q.device)
        if causal:
            hidden |= position > row
        if window_left >= 0:
            hidden |= position < row - window_left
        scores.masked_fill_(hidden, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        p = torch.exp(scores - top)
        total = p.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks.view(num_kv_heads, -1, 1, 1) - top)
        outs.append(_encode(p * E4M3_MAX).float() @ values * (stored.v_scale / E4M3_MAX) / total)
    return torch.cat(outs, 2).permute(2, 0, 1, 3).flatten(1, 2)


def _encode(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _cat(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # why: torch has no concatenation of float8 on every device.
    return torch.cat([a.view(torch.uint8), b.view(torch.uint8)]).view(torch.float8_e4m3fn)
