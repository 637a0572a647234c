# SPDX-License-Identifier: Apache-2.0
"""Replay of the attention kernels, block by block, with their rounding steps.

One call computes one work item: the query tile of a request against one KV partition. Products are
summed in fp64 and rounded once to fp32. why: NVFP4 and e4m3 products are multiples of a fixed power
of two and their fp64 sums are exact, so the replay gives the same bits in every summation order, batch
and machine; a kernel's own fp32 order is compared with a tolerance (docs/numerics.md). Everything
else (running max, exponentials, row sums, rescaling) is fp32, as in the kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mpfa.reference.codecs import E4M3_MAX, e4m3_decode, e4m3_encode

LOG2E = math.log2(math.e)
# Blocks handled by one batched product; bounds the temporary memory, not the result.
_BLOCKS_PER_CHUNK = 32
# Elements of one torch.exp2 call; a multiple of every vector width.
_EXP2_PIECE = 1 << 14


@dataclass(frozen=True)
class Scheme:
    """How a kernel family walks KV and quantises P.

    kv_block: keys per step (128 on SM100; Bc on SM120).
    p_mode: "fixed448" e4m3(448 P) (paper section 4.1); "fixed256" the same with 256; "tile" one
        power-of-two scale per row and KV block, carried by SFA (SM120 default); "block32" one
        per row and 32 keys (oracle only); "none" P stays fp32 (bf16 cache); "dequant" fp16 (SM90
        decode).
    streams: "dequant" only: softmax states that take blocks in turn, the warps of a thread block.
    """

    kv_block: int
    p_mode: str
    streams: int = 1


def dequant_scheme(tile_rows: int) -> Scheme:
    """The SM90 decode kernel for a plan whose tiles have up to ``tile_rows`` rows."""
    return Scheme(16, "dequant", streams=8 if tile_rows <= 8 else 4)


def scheme_for(format: str, head_dim: int) -> Scheme:
    """The scheme of the shipped kernels for a cache format."""
    if format == "mxfp8":
        # The 99 KB of shared memory of SM120 hold 128-key stages only at head_dim 64.
        return Scheme(128 if head_dim == 64 else 64, "tile")
    return Scheme(128, "fixed448" if format == "qk4pv8" else "none")


@dataclass(frozen=True)
class KVOperands:
    """Dequantised keys and values of one request, fp32, as the tensor cores see them.

    k, v: [Lk, Hkv, D]. delta: [Lk, Hq] (bf16 values) or None. channels: [Lk, Hkv, c] or None.
    """

    k: torch.Tensor
    v: torch.Tensor
    delta: torch.Tensor | None = None
    channels: torch.Tensor | None = None


@dataclass(frozen=True)
class QueryOperands:
    """Dequantised query rows of one tile: q fp32 [Lt, Hq, D], a_comp bf16 [Lt, Hq, R], row_term."""

    q: torch.Tensor
    a_comp: torch.Tensor | None = None
    row_term: torch.Tensor | None = None


@dataclass(frozen=True)
class TileSpec:
    """Mask and scaling of one work item. Positions are tokens of the request."""

    q_begin: int
    qo_len: int
    kv_len: int
    kv_begin: int
    kv_end: int
    causal: bool
    window_left: int
    sm_scale: float
    logits_soft_cap: float


def tile_scores(
    query: QueryOperands, kv: KVOperands, heads: list[int], group_size: int, begin: int, end: int
) -> torch.Tensor:
    """S_acc fp32 [Hkv, g, Lt, n] of keys begin..end for the query heads h*G + heads[i].

    S = A_comp B_comp^T + Q K^T (paper equation 11): the bf16 product opens the accumulator.
    """
    num_kv_heads = kv.k.shape[1]
    picked = _query_heads(heads, group_size, num_kv_heads, kv.k.device)
    q = query.q[:, picked].permute(1, 2, 0, 3).double()
    k = kv.k[begin:end].permute(1, 2, 0).double().unsqueeze(1)
    scores = q @ k
    if query.a_comp is not None:
        a = query.a_comp[:, picked].permute(1, 2, 0, 3).double()
        b = torch.zeros(
            (num_kv_heads, len(heads), a.shape[-1], end - begin),
            dtype=torch.float64,
            device=a.device,
        )
        first = 0
        if kv.delta is not None:
            b[:, :, 0] = kv.delta[begin:end][:, picked].permute(1, 2, 0).double()
            first = 1
        if kv.channels is not None:
            values = kv.channels[begin:end].permute(1, 2, 0).double()
            b[:, :, first : first + values.shape[1]] = values.unsqueeze(1)
        scores = scores + a @ b
    return scores.float()


def _query_heads(
    heads: list[int], group_size: int, num_kv_heads: int, device: torch.device
) -> torch.Tensor:
    """int64 [Hkv, g]: query heads h*G + heads[i]."""
    first = torch.arange(num_kv_heads, device=device)[:, None] * group_size
    return first + torch.tensor(heads, device=device)


def visible_mask(tile: TileSpec, num_rows: int, device: torch.device) -> torch.Tensor:
    """bool [Lt, n]: bottom-right causal and inclusive left window."""
    shift = tile.kv_len - tile.qo_len
    rows = torch.arange(tile.q_begin, tile.q_begin + num_rows, device=device)[:, None] + shift
    keys = torch.arange(tile.kv_begin, tile.kv_end, device=device)[None, :]
    mask = torch.ones((num_rows, tile.kv_end - tile.kv_begin), dtype=torch.bool, device=device)
    if tile.causal:
        mask &= keys <= rows
    if tile.window_left >= 0:
        mask &= keys >= rows - tile.window_left
    return mask


def attend_tile(
    query: QueryOperands,
    kv: KVOperands,
    heads: list[int],
    group_size: int,
    tile: TileSpec,
    scheme: Scheme,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One work item: (o fp32 [Lt, Hkv, g, D] normalised, lse fp32 [Lt, Hkv, g] base 2).

    ``row_term`` enters only under a soft cap; without one the caller adds it to the LSE. Rows
    without a visible key give o = 0 and lse = -inf.
    """
    num_rows, num_kv_heads, dim = query.q.shape[0], kv.k.shape[1], kv.v.shape[2]
    if tile.kv_end <= tile.kv_begin or num_rows == 0:
        o = query.q.new_zeros((num_rows, num_kv_heads, len(heads), dim))
        return o, o.new_full(o.shape[:3], -torch.inf)
    scores = tile_scores(query, kv, heads, group_size, tile.kv_begin, tile.kv_end)
    exponent_scale = tile.sm_scale * LOG2E
    if tile.logits_soft_cap > 0.0:
        if query.row_term is not None:
            picked = _query_heads(heads, group_size, num_kv_heads, scores.device)
            scores = scores + query.row_term[:, picked].permute(1, 2, 0).unsqueeze(-1)
        cap = tile.logits_soft_cap
        scores = cap * torch.tanh(scores * (tile.sm_scale / cap))
        exponent_scale = LOG2E
    mask = visible_mask(tile, num_rows, scores.device)
    scores = scores.masked_fill(~mask, -torch.inf).flatten(1, 2)
    # Keys that no row of the tile sees, such as those in pages that a window has left, may hold
    # anything, and 0 * NaN is NaN.
    hidden = ~mask.any(dim=0)[:, None, None]
    v = kv.v[tile.kv_begin : tile.kv_end].masked_fill(hidden, 0.0).transpose(0, 1)
    # Kernels take the factor as fp32.
    factor = float(torch.tensor(exponent_scale, dtype=torch.float32, device="cpu"))
    o, lse = online_softmax(scores, v, factor, scheme)
    o = o.view(num_kv_heads, len(heads), num_rows, dim).permute(2, 0, 1, 3)
    return o, lse.view(num_kv_heads, len(heads), num_rows).permute(2, 0, 1)


def online_softmax(
    scores: torch.Tensor, v: torch.Tensor, exponent_scale: float, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax(scores) V with the running max, walking KV blocks last to first ("dequant": first to
    last in each stream).

    Args:
        scores: fp32 [H, M, n] with -inf where masked; column 0 starts a KV block.
        v: fp32 [H, n, D].
        exponent_scale: lambda, so that P = 2^(lambda (S - m)) (Algorithm 1, line 14).

    Returns:
        (o fp32 [H, M, D] = O / l, lse fp32 [H, M] = lambda m + log2 l).
    """
    if scheme.p_mode == "dequant":
        return _walk_streams(scores, v, exponent_scale, scheme)
    heads, rows, num_keys = scores.shape
    block = scheme.kv_block
    num_blocks = -(-num_keys // block)
    pad = num_blocks * block - num_keys
    scores = torch.nn.functional.pad(scores, (0, pad), value=-torch.inf)
    v = torch.nn.functional.pad(v, (0, 0, 0, pad))
    scores = scores.view(heads, rows, num_blocks, block).permute(2, 0, 1, 3).flip(0)
    v = v.reshape(heads, num_blocks, block, -1).transpose(0, 1).flip(0)
    walk = _walk_tile_exponents if scheme.p_mode == "tile" else _walk_running_max
    return walk(scores, v, exponent_scale, scheme)


def exp2_rounded(x: torch.Tensor) -> torch.Tensor:
    """2^x in fp32, rounded once from fp64; for the few values per row, P uses _exp2_rows.

    why: torch's own fp32 exp2 gives other bits in the scalar tail of a vector loop, so a row's
    result would depend on its place in the tensor, that is, on the batch.
    """
    return torch.exp2(x.double()).float()


def _exp2_rows(x: torch.Tensor) -> torch.Tensor:
    """torch.exp2 of rows of whole KV blocks, without a scalar tail (see exp2_rounded).

    why: pieces below torch's parallel grain are not split over threads, whose borders may fall
    inside a vector; fp64 would take 4.5 times as long.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    pieces = zip(x.view(-1).split(_EXP2_PIECE), out.view(-1).split(_EXP2_PIECE), strict=True)
    for source, target in pieces:
        torch.exp2(source, out=target)
    return out


def _products(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (p.double() @ v.double()).float()


def _quantise_p(p: torch.Tensor, p_mode: str) -> tuple[torch.Tensor, float]:
    """P as the PV product sees it, times the factor that is returned and divided out at the end."""
    if p_mode == "none":
        return p, 1.0
    if p_mode == "block32":
        blocks = p.unflatten(-1, (-1, 32))
        peak = blocks.amax(dim=-1, keepdim=True)
        mantissa, exponent = torch.frexp(peak)
        # Smallest e with peak <= 448 * 2^e; 448 = 0.875 * 2^9.
        step = (exponent - 9 + (mantissa > 0.875)).clamp(-127, 127)
        scale = torch.ldexp(torch.ones_like(peak), step)
        coded = e4m3_decode(e4m3_encode(blocks / scale)) * scale
        return coded.flatten(-2), 1.0
    factor = E4M3_MAX if p_mode == "fixed448" else 256.0
    return e4m3_decode(e4m3_encode(factor * p)), factor


def _walk_running_max(
    scores: torch.Tensor, v: torch.Tensor, exponent_scale: float, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    num_blocks, heads, rows, _ = scores.shape
    running = scores.amax(dim=-1).cummax(dim=0).values
    # why: a row whose keys are all masked so far keeps m = -inf; -inf - -inf would be NaN.
    anchor = torch.where(running == -torch.inf, 0.0, running)
    o = scores.new_zeros((heads, rows, v.shape[-1]))
    total = scores.new_zeros((heads, rows))
    previous = torch.full_like(total, -torch.inf)
    factor = 1.0
    for first in range(0, num_blocks, _BLOCKS_PER_CHUNK):
        chunk = slice(first, first + _BLOCKS_PER_CHUNK)
        p = _exp2_rows(exponent_scale * (scores[chunk] - anchor[chunk].unsqueeze(-1)))
        sums = p.sum(dim=-1)
        coded, factor = _quantise_p(p, scheme.p_mode)
        products = _products(coded, v[chunk])
        for j in range(p.shape[0]):
            m = anchor[first + j]
            alpha = exp2_rounded(exponent_scale * (previous - m))
            total = alpha * total + sums[j]
            o = alpha.unsqueeze(-1) * o + products[j]
            previous = running[first + j]
    lse = exponent_scale * anchor[-1] + torch.log2(total)
    return _normalise(o, total, factor), torch.where(total == 0, -torch.inf, lse)


# P = 2^(bias + lambda (S - m)). m moves when an exponent passes the limit; fp16 holds 2^15.
_STREAM_BIAS, _STREAM_LIMIT = 7.0, 15.0


def _walk_streams(
    scores: torch.Tensor, v: torch.Tensor, exponent_scale: float, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """SM90 decode: each stream walks its blocks with a state of its own, then the states merge.

    A stream's m becomes a block's maximum when that passes it by 2^(limit - bias), column by column.
    P is rounded to fp16 for the product with V; l sums it unrounded.
    """
    heads, rows, num_keys = scores.shape
    block, streams = scheme.kv_block, scheme.streams
    steps = -(-num_keys // (block * streams))
    pad = steps * block * streams - num_keys
    scores = torch.nn.functional.pad(scores, (0, pad), value=-torch.inf)
    v = torch.nn.functional.pad(v, (0, 0, 0, pad))
    scores = scores.view(heads, rows, steps, streams, block).permute(2, 0, 3, 1, 4)
    v = v.reshape(heads, steps, streams, block, -1).transpose(0, 1)

    def exponent(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        # One rounding of the difference and one of the fused multiply-add, as in the kernel.
        return ((x - m).double() * exponent_scale + _STREAM_BIAS).float()

    peak = scores.new_full((heads, streams, rows), torch.finfo(torch.float32).min)
    total = torch.zeros_like(peak)
    o = scores.new_zeros((heads, streams, rows, v.shape[-1]))
    for x, values in zip(scores, v, strict=True):
        top = x.amax(dim=-1)
        moved = torch.where(exponent(top, peak) > _STREAM_LIMIT, top, peak)
        alpha = exp2_rounded(exponent_scale * (peak - moved))
        p = exp2_rounded(exponent(x, moved.unsqueeze(-1)))
        total = alpha * total + p.sum(dim=-1)
        o = alpha.unsqueeze(-1) * o + _products(p.half(), values)
        peak = moved
    common = peak.amax(dim=1, keepdim=True)
    weight = exp2_rounded(exponent_scale * (peak - common))
    total = (weight * total).sum(dim=1)
    o = (weight.unsqueeze(-1) * o).sum(dim=1)
    lse = exponent_scale * common.squeeze(1) + torch.log2(total * 2.0**-_STREAM_BIAS)
    return _normalise(o, total, 1.0), torch.where(total == 0, -torch.inf, lse)


# The lower bound of a block's exponent: SFA 2^-127. Such a block adds nothing.
_MIN_TILE_EXPONENT = -119


def _walk_tile_exponents(
    scores: torch.Tensor, v: torch.Tensor, exponent_scale: float, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """SM120: P' = 2^(lambda S - R - e + 8), e = round(lambda * block max - R) <= 0.

    R is the running maximum, this block included, so the row's largest key is 2^8, an e4m3 value (a
    row with one key gives that key's V). Lower blocks are scaled up by 2^-e to at most 256 sqrt 2 < 448
    and 2^(e - 8) travels in SFA.
    """
    num_blocks, heads, rows, _ = scores.shape
    peak = exponent_scale * scores.amax(dim=-1)
    reference = torch.cat([torch.full_like(peak[:1], -1e38), peak]).cummax(dim=0).values
    factor = exp2_rounded(reference[:-1] - reference[1:])
    reference = reference[1:]
    exponent = torch.round((peak - reference).clamp_min(_MIN_TILE_EXPONENT))
    bias = 8.0 - (reference + exponent)
    weight = torch.where(exponent > _MIN_TILE_EXPONENT, exp2_rounded(exponent - 8.0), 0.0)
    o = scores.new_zeros((heads, rows, v.shape[-1]))
    total = scores.new_zeros((heads, rows))
    for first in range(0, num_blocks, _BLOCKS_PER_CHUNK):
        chunk = slice(first, first + _BLOCKS_PER_CHUNK)
        # One rounding, as the kernel's fused multiply-add: the fp64 product is exact.
        argument = scores[chunk].double() * exponent_scale + bias[chunk].double().unsqueeze(-1)
        p = _exp2_rows(argument.float())
        sums = p.sum(dim=-1)
        products = e4m3_decode(e4m3_encode(p)).double() @ v[chunk].double()
        for j in range(p.shape[0]):
            alpha, w = factor[first + j], weight[first + j]
            total = alpha * total + w * sums[j]
            # why fp64: P' is up to 2^8 P, and a product of it with V may pass the end of fp32.
            o = alpha.unsqueeze(-1) * o + (w.double().unsqueeze(-1) * products[j]).float()
    empty = total == 0
    # The kernel multiplies by the rounded reciprocal. A NaN among the inputs is no empty row.
    inverse = torch.where(empty, 0.0, 1.0 / torch.where(empty, 1.0, total))
    o = torch.where(empty.unsqueeze(-1), 0.0, o * inverse.unsqueeze(-1))
    return o, torch.where(empty, -torch.inf, reference[-1] + torch.log2(total))


def _normalise(o: torch.Tensor, total: torch.Tensor, factor: float) -> torch.Tensor:
    # A NaN among the inputs is not an empty row: it must reach the output.
    empty = total == 0
    divisor = torch.where(empty, 1.0, factor * total).unsqueeze(-1)
    return torch.where(empty.unsqueeze(-1), 0.0, o / divisor)


def attend_request(
    query: QueryOperands,
    kv: KVOperands,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    scheme: Scheme,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One whole request in 128-row tiles, unsplit: (o fp32 [Lq, Hq, D], lse fp32 [Lq, Hq] base 2).

    For baselines and studies; the wrappers go through the planner's work list instead.
    """
    qo_len, num_qo_heads, dim = query.q.shape
    kv_len, num_kv_heads = kv.k.shape[:2]
    group = num_qo_heads // num_kv_heads
    scale = 1.0 / math.sqrt(dim) if sm_scale is None else sm_scale
    o = query.q.new_zeros((qo_len, num_kv_heads, group, kv.v.shape[2]))
    lse = o.new_full(o.shape[:3], -torch.inf)
    for begin in range(0, qo_len, 128):
        rows = slice(begin, min(begin + 128, qo_len))
        last = begin + (rows.stop - begin) + kv_len - qo_len if causal else kv_len
        tile = TileSpec(
            begin, qo_len, kv_len, 0, max(0, min(last, kv_len)), causal, window_left, scale,
            logits_soft_cap,
        )  # fmt: skip
        part = QueryOperands(
            query.q[rows],
            None if query.a_comp is None else query.a_comp[rows],
            None if query.row_term is None else query.row_term[rows],
        )
        o[rows], lse[rows] = attend_tile(part, kv, list(range(group)), group, tile, scheme)
    if query.row_term is not None and logits_soft_cap == 0.0:
        lse = lse + (scale * LOG2E) * query.row_term.view(lse.shape)
    return o.flatten(1, 2), lse.flatten(1, 2)
