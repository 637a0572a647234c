# SPDX-License-Identifier: Apache-2.0
"""Replay of the replicated-row scheme: keys 32 w .. 32 w + 31 of every block form a state of their own,
with its own running maximum; the four states of a row meet at the end of an item."""

from __future__ import annotations

import dataclasses
from unittest import mock

import decode_cases
import torch
from kernel_job import Job

from mpfa.backends import reference
from mpfa.jit.spec import CudaSpec
from mpfa.merge import merge_base2
from mpfa.reference import replay

BLOCK, WARPS = 128, 4
TILE_ROWS = 32
SPEC = CudaSpec("mpfa_sm100_decode_rows", ("sm100_decode_rows.cu",), (10,), 40)


def attend_tile(query, kv, heads, group_size, tile, scheme):
    """mpfa.reference.replay.attend_tile with four states."""
    rows, num_kv_heads, dim = query.q.shape[0], kv.k.shape[1], kv.v.shape[2]
    if tile.kv_end <= tile.kv_begin:
        o = query.q.new_zeros((rows, num_kv_heads, len(heads), dim))
        return o, o.new_full(o.shape[:3], -torch.inf)
    scores = replay.tile_scores(query, kv, heads, group_size, tile.kv_begin, tile.kv_end)
    factor = tile.sm_scale * replay.LOG2E
    if tile.logits_soft_cap > 0.0:
        if query.row_term is not None:
            picked = torch.arange(num_kv_heads)[:, None] * group_size + torch.tensor(heads)
            scores = scores + query.row_term[:, picked].permute(1, 2, 0).unsqueeze(-1)
        cap = tile.logits_soft_cap
        scores, factor = cap * torch.tanh(scores * (tile.sm_scale / cap)), replay.LOG2E
    mask = replay.visible_mask(tile, rows, scores.device)
    scores = scores.masked_fill(~mask, -torch.inf).flatten(1, 2)
    v = kv.v[tile.kv_begin : tile.kv_end].transpose(0, 1)
    pad = -scores.shape[-1] % BLOCK
    scores = torch.nn.functional.pad(scores, (0, pad), value=-torch.inf)
    v = torch.nn.functional.pad(v, (0, 0, 0, pad))
    factor = float(torch.tensor(factor, dtype=torch.float32))
    four = replay.Scheme(BLOCK // WARPS, "fixed448")
    states = [
        replay.online_softmax(
            scores.unflatten(-1, (-1, WARPS, 32))[..., w, :].flatten(-2),
            v.unflatten(1, (-1, WARPS, 32))[:, :, w].flatten(1, 2),
            factor,
            four,
        )
        for w in range(WARPS)
    ]
    o, lse = merge_base2(*(torch.stack(part) for part in zip(*states, strict=True)))
    shape = (num_kv_heads, len(heads), rows)
    return o.view(*shape, dim).permute(2, 0, 1, 3), lse.view(shape).permute(2, 0, 1)


def replay_rows(inputs: decode_cases.Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    with mock.patch.object(reference, "attend_tile", attend_tile):
        return decode_cases.replay(inputs)


def build(case: decode_cases.Case, tile_rows: int = TILE_ROWS) -> decode_cases.Inputs:
    """The inputs of a case, planned in the variant's tiles."""
    return dataclasses.replace(decode_cases.build(case), tile_rows=tile_rows)


def job(case: decode_cases.Case) -> Job:
    """One launch of the variant for any device."""
    return decode_cases.job(build(case), "rows", replay_rows, rel=2e-3)
