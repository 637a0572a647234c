# SPDX-License-Identifier: Apache-2.0
"""The query of the SM90 decode kernel, which widens K and V to fp16 instead of narrowing Q and P."""

from __future__ import annotations

import torch

from mpfa.reference.smoothing import prepare_query

# A row's largest value ends up in [2^10, 2^11) of fp16.
_TOP_EXPONENT = 10
_LOWEST_EXPONENT = -100


def round_query(x: torch.Tensor) -> torch.Tensor:
    """fp32 rows [..., D] as the score MMA sees them: fp16 times a power of two of each row.

    What is below 2^-35 of its row's largest value is lost; the rest keeps 11 significant bits.
    """
    peak = x.abs().amax(dim=-1, keepdim=True)
    # frexp: peak = mantissa * 2^e with a mantissa in [1/2, 1).
    exponent = torch.frexp(peak).exponent - 1 - _TOP_EXPONENT
    exponent = torch.where(peak == 0, 0, exponent.clamp_min(_LOWEST_EXPONENT))
    return torch.ldexp(torch.ldexp(x, -exponent).half().float(), exponent)


def dequant_query(
    q: torch.Tensor,
    *,
    compensation: str = "none",
    q_mean: torch.Tensor | None = None,
    k_mean: torch.Tensor | None = None,
    channel_index: torch.Tensor | None = None,
) -> dict[str, torch.Tensor | None]:
    """Queries [T, Hq, D] (bf16, fp16) centred and rounded to fp16 with a power of two per row.

    Statistics as in ``prepare_query``. Returns q fp32 [T, Hq, D], and a_comp and row_term as
    ``prepare_query`` does. Outlier channels stay in q: K holds zeros there.
    """
    parts = prepare_query(
        q, compensation=compensation, q_mean=q_mean, k_mean=k_mean, channel_index=channel_index
    )
    centred = q.float()
    if "mean" in compensation:
        centred = centred - q_mean
    return {"q": round_query(centred), "a_comp": parts["a_comp"], "row_term": parts["row_term"]}
