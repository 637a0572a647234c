# SPDX-License-Identifier: Apache-2.0
"""merge_states: combine attention states of disjoint key sets by their log-sum-exp."""

from __future__ import annotations

import math

import torch

from mpfa.errors import check_choice, check_tensor
from mpfa.reference.replay import exp2_rounded

LSE_BASES = ("log2", "ln")


def merge_states(
    v: torch.Tensor, lse: torch.Tensor, lse_base: str = "log2"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge n attention states per (row, head); also known as the split-KV combine.

    Args:
        v: bf16/fp16/fp32 [n, S, H, D], n >= 1 normalised partial outputs.
        lse: fp32 [n, S, H], their log-sum-exp; -inf marks a state without keys.
        lse_base: base of ``lse`` on the way in and out, "log2" (what run() returns) or "ln".

    Returns:
        (v [S, H, D] in v's dtype, lse fp32 [S, H]). Computed in fp32: with m the largest lse,
        v = sum w_i v_i / sum w_i, w_i = base^(lse_i - m). Where every state is empty: 0 and -inf.

    Raises:
        ValueError: wrong shape, dtype, device or base; on CUDA also a D other than 64, 128 or 256.
        GPUArchitectureError: a CUDA GPU below compute capability 8.0.
    """
    check_choice("lse_base", lse_base, LSE_BASES)
    floats = (torch.bfloat16, torch.float16, torch.float32)
    check_tensor("v", v, shape=("n", "S", "H", "D"), dtype=floats)
    check_tensor("lse", lse, shape=v.shape[:3], dtype=torch.float32, device=v.device)
    if v.shape[0] < 1:
        raise ValueError("v: needs at least one state, got n=0")
    base2 = lse if lse_base == "log2" else lse * math.log2(math.e)
    if v.device.type == "cuda":
        from mpfa.backends import cuda

        cuda.require_capability("merge_states", v.device)
        check_choice("head_dim", v.shape[3], cuda.COMBINE_HEAD_DIMS)
        out, merged = cuda.merge_base2(v, base2)
    else:
        out, merged = merge_base2(v.float(), base2)
    return out.to(v.dtype), merged if lse_base == "log2" else merged * math.log(2.0)


def merge_base2(v: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 merge of v [n, ..., D] and base-2 lse [n, ...], summed in the order of the states."""
    top = lse.amax(dim=0)
    # why: -inf - -inf is NaN; a row without keys keeps weight 0 for every state instead.
    anchor = torch.where(torch.isinf(top) & (top < 0), torch.zeros_like(top), top)
    out = torch.zeros_like(v[0])
    total = torch.zeros_like(top)
    for state in range(v.shape[0]):
        weight = exp2_rounded(lse[state] - anchor)
        total = total + weight
        # why: a state without keys may hold anything in v, and 0 * NaN is NaN.
        out = out + torch.where((weight == 0).unsqueeze(-1), 0.0, weight.unsqueeze(-1) * v[state])
    empty = total == 0
    out = torch.where(empty.unsqueeze(-1), 0.0, out / torch.where(empty, 1.0, total).unsqueeze(-1))
    merged = torch.where(empty, -torch.inf, anchor + torch.log2(total))
    return out, merged
