# SPDX-License-Identifier: Apache-2.0
"""Attention in float64: the truth that every approximation is measured against."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Upper bound on the elements of one score matrix; longer inputs go in slices of query rows.
_MAX_SCORES = 1 << 23


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(cap(q k^T * sm_scale)) v of one request, all in float64.

    q ``[Lq, Hq, D]``, k and v ``[Lk, Hkv, D]`` with Hq a multiple of Hkv; any float dtype. Query i
    stands at position i + Lk - Lq: ``causal`` hides keys after it, ``window_left >= 0`` hides keys
    more than that many tokens before it. ``sm_scale`` defaults to 1/sqrt(D). With
    ``logits_soft_cap`` > 0 a scaled logit s becomes cap * tanh(s / cap). ``sinks`` ``[Hq]`` are
    natural-log logits, added after scale and cap to the denominator and the LSE only.

    Returns out float64 ``[Lq, Hq, D]`` and lse float64 ``[Lq, Hq]`` (natural log). A query without
    a visible key gets out 0 and lse = its sink, or -inf.
    """
    lq, hq, dim = q.shape
    lk, hkv, _ = k.shape
    if hq % hkv:
        raise ValueError(f"q: {hq} heads, it must be a multiple of the {hkv} heads of k")
    if k.shape[-1] != dim or v.shape != k.shape:
        raise ValueError(
            f"v: shape {tuple(v.shape)}, k: shape {tuple(k.shape)}, q: shape {tuple(q.shape)}; "
            "k and v must have one shape and q's head dimension"
        )
    if sinks is not None and sinks.shape != (hq,):
        raise ValueError(f"sinks: shape {tuple(sinks.shape)}, it must be ({hq},)")
    group = hq // hkv
    scale = 1.0 / math.sqrt(dim) if sm_scale is None else sm_scale
    out = torch.zeros(lq, hq, dim, dtype=torch.float64, device=q.device)
    lse = torch.full((lq, hq), -math.inf, dtype=torch.float64, device=q.device)
    if sinks is not None:
        lse[:] = sinks.double()
    if lk == 0:
        return out, lse

    key_pos = torch.arange(lk, device=q.device)
    rows = max(1, _MAX_SCORES // (group * lk))
    for h in range(hkv):
        heads = slice(h * group, (h + 1) * group)
        kh, vh = k[:, h].double(), v[:, h].double()
        for begin in range(0, lq, rows):
            end = min(lq, begin + rows)
            query_pos = torch.arange(begin, end, device=q.device)[:, None] + lk - lq
            hidden = torch.zeros(end - begin, lk, dtype=torch.bool, device=q.device)
            if causal:
                hidden |= key_pos > query_pos
            if window_left >= 0:
                hidden |= key_pos < query_pos - window_left
            s = (q[begin:end, heads].double() @ kh.T) * scale
            if logits_soft_cap > 0:
                s = logits_soft_cap * torch.tanh(s / logits_soft_cap)
            s = s.masked_fill(hidden[:, None], -math.inf)
            top = s.amax(dim=-1)
            if sinks is not None:
                top = torch.maximum(top, sinks[heads].double())
            safe_top = torch.where(torch.isneginf(top), 0.0, top)
            p = torch.exp(s - safe_top[..., None])
            total = p.sum(dim=-1)
            if sinks is not None:
                total = total + torch.exp(sinks[heads].double() - safe_top)
            lse[begin:end, heads] = safe_top + torch.log(total)
            out[begin:end, heads] = (p @ vh) / torch.where(total == 0, 1.0, total)[..., None]
    return out, lse
