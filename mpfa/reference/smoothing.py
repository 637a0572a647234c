# SPDX-License-Identifier: Apache-2.0
"""Compensation of the 4-bit QK^T error: what leaves the NVFP4 operands, and through which terms.

With centred operands q' = q - q_mean and k' = k - k_mean,

    q.k = q'.k' + q_mean.k' + q.k_mean = q'.k' + Delta_S + row_term,

where q'.k' is the NVFP4 product. Delta_S (per query head and key, bf16) enters the scores through
a bf16 product of rank R; row_term (fp32) is constant along a row. Outlier channels leave q' and k'
and go through further slots of the same bf16 product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpfa.config import COMPENSATIONS, MAX_CHANNELS, comp_slots
from mpfa.reference.codecs import as_fp32, fma_fp32, require_finite
from mpfa.reference.nvfp4 import quantize_nvfp4


def dot_fp32(a: Tensor, b: Tensor) -> Tensor:
    """fp32 dot product over the last dimension D in the one summation order kernels use.

    Inside each 16-channel block the first product is rounded and the others are added one after
    another by FMAs; the D/16 block sums are then added pairwise, neighbours first. Leading
    dimensions broadcast. D/16 must be a power of two.
    """
    a, b = as_fp32("a", a), as_fp32("b", b)
    dim = a.shape[-1]
    blocks = dim // 16
    if dim != b.shape[-1] or dim % 16 or blocks == 0 or blocks & (blocks - 1):
        raise ValueError(
            f"a, b: last dimensions {dim} and {b.shape[-1]}, they must be equal and 16 * 2^n"
        )
    a, b = (t.unflatten(-1, (blocks, 16)).movedim(-1, 0) for t in torch.broadcast_tensors(a, b))
    acc = a[0] * b[0]
    for i in range(1, 16):
        acc = fma_fp32(a[i], b[i], acc)
    while acc.shape[-1] > 1:
        acc = acc[..., 0::2] + acc[..., 1::2]
    return acc[..., 0]


def _per_kv_head(name: str, t: Tensor, num_kv_heads: int) -> Tensor:
    """``[..., Hq, D]`` viewed as ``[..., Hkv, G, D]``."""
    heads = t.shape[-2]
    if heads % num_kv_heads:
        raise ValueError(f"{name}: {heads} heads, it must be a multiple of {num_kv_heads} KV heads")
    return t.unflatten(-2, (num_kv_heads, heads // num_kv_heads))


def delta_scores(k_centered: Tensor, q_mean: Tensor) -> Tensor:
    """Delta_S bf16 ``[T, Hq]``: :func:`dot_fp32` of q_mean and centred keys, rounded once.

    k_centered fp32 ``[T, Hkv, D]`` unquantised, all channels; q_mean fp32 ``[Hq, D]`` or, with a
    row per token, ``[T, Hq, D]``.
    """
    q_mean = _per_kv_head("q_mean", q_mean, k_centered.shape[1])
    return dot_fp32(q_mean, k_centered[:, :, None]).to(torch.bfloat16).flatten(1)


def _head_channels(channel_index: Tensor, heads: int, dim: int) -> Tensor:
    """``channel_index`` ``[Hkv, c]`` checked and repeated for ``heads`` heads, int64."""
    if channel_index.dim() != 2 or channel_index.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"channel_index: {channel_index.dtype} {tuple(channel_index.shape)}, "
            "it must be int32 [num_kv_heads, channels]"
        )
    index = channel_index.long()
    num_kv_heads = index.shape[0]
    if num_kv_heads == 0 or heads % num_kv_heads:
        raise ValueError(
            f"channel_index: {num_kv_heads} rows, a divisor of the {heads} heads is allowed"
        )
    wrong = (index < 0) | (index >= dim)
    if bool(wrong.any()):
        h, slot = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"channel_index: {int(index[h, slot])} at index ({h}, {slot}), allowed are 0..{dim - 1}"
        )
    ordered = index.sort(dim=-1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        h, slot = (int(i) for i in (ordered[:, 1:] == ordered[:, :-1]).nonzero()[0])
        raise ValueError(
            f"channel_index: channel {int(ordered[h, slot])} is listed twice for KV head {h}"
        )
    return index.repeat_interleave(heads // num_kv_heads, dim=0)


def split_channels(x: Tensor, channel_index: Tensor) -> tuple[Tensor, Tensor]:
    """Take the listed channels out of ``x`` fp32 ``[T, H, D]``.

    channel_index int32 ``[Hkv, c]``, distinct in a row; H is Hkv, or a multiple of it (query
    heads, ``H/Hkv`` of them for each KV head). Returns ``x`` with those channels +0, and their
    values rounded to bf16 ``[T, H, c]`` in the order of ``channel_index``.
    """
    x = as_fp32("x", x)
    index = _head_channels(channel_index, x.shape[1], x.shape[2]).to(x.device)
    index = index.expand(x.shape[0], -1, -1)
    values = x.gather(2, index).to(torch.bfloat16)
    return x.scatter(2, index, 0.0), values


def _parse(compensation: str, **tensors: Tensor | None) -> tuple[bool, bool]:
    """(has mean, has channels); every tensor the compensation needs must be given."""
    if compensation not in COMPENSATIONS:
        raise ValueError(f"compensation: {compensation!r}, allowed are {COMPENSATIONS}")
    mean, channels = "mean" in compensation, "channels" in compensation
    for name, tensor in tensors.items():
        if tensor is None and (channels if name == "channel_index" else mean):
            raise ValueError(f"{name}: None, compensation {compensation!r} needs it")
    index = tensors["channel_index"]
    most = MAX_CHANNELS[compensation]
    if channels and index is not None and index.shape[-1] > most:
        raise ValueError(
            f"channel_index: {index.shape[-1]} channels, at most {most} with {compensation!r}"
        )
    return mean, channels


def _mean_rows(name: str, mean: Tensor, like: Tensor, heads: int | None = None) -> Tensor:
    """A mean ``[H, D]`` or ``[T, H, D]`` in fp32; H is ``heads``, or checked by the caller."""
    tokens, _, dim = like.shape
    h = mean.shape[-2] if heads is None and mean.dim() >= 2 else heads
    if mean.shape not in ((h, dim), (tokens, h, dim)):
        h = "heads" if h is None else h
        raise ValueError(
            f"{name}: shape must be [{h}, {dim}] or [{tokens}, {h}, {dim}], got {list(mean.shape)}"
        )
    return as_fp32(name, mean)


def prepare_query(
    q: Tensor,
    *,
    compensation: str = "none",
    q_mean: Tensor | None = None,
    k_mean: Tensor | None = None,
    channel_index: Tensor | None = None,
    four_over_six: bool = False,
) -> dict[str, Tensor | None]:
    """Quantise queries ``[T, Hq, D]`` (fp32, bf16, fp16) for the qk4pv8 format.

    q_mean ``[Hq, D]`` or ``[T, Hq, D]``, k_mean ``[Hkv, D]`` or ``[T, Hkv, D]`` (fp32; one row per
    token when they differ between requests), channel_index int32 ``[Hkv, c]``; those the
    compensation does not use are ignored. Returns

    - q uint8 ``[T, Hq, D/2]`` and q_scale uint8 ``[T, Hq, D/16]``, see ``quantize_nvfp4``;
    - a_comp bf16 ``[T, Hq, R]``: 1 in slot 0 when there is a mean, then the row's channel values,
      then zeros; None without compensation;
    - row_term fp32 ``[T, Hq]`` = q . k_mean with q neither centred nor quantised; None without a
      mean.
    """
    mean, channels = _parse(compensation, q_mean=q_mean, k_mean=k_mean, channel_index=channel_index)
    operand = as_fp32("q", q)
    require_finite("q", operand)
    a_comp = row_term = None
    if compensation != "none":
        rank = comp_slots(compensation, channel_index.shape[-1] if channels else 0)
        a_comp = q.new_zeros(*q.shape[:2], rank, dtype=torch.bfloat16)
    if mean:
        k_rows = _mean_rows("k_mean", k_mean, operand)
        grouped = _per_kv_head("q", operand, k_rows.shape[-2])
        row_term = dot_fp32(grouped, k_rows[..., None, :]).flatten(-2)
        operand = operand - _mean_rows("q_mean", q_mean, operand, operand.shape[1])
        a_comp[..., 0] = 1.0
    if channels:
        operand, values = split_channels(operand, channel_index)
        a_comp[..., int(mean) : int(mean) + values.shape[-1]] = values
    packed, scale = quantize_nvfp4(operand, four_over_six=four_over_six, name="q")
    return {"q": packed, "q_scale": scale, "a_comp": a_comp, "row_term": row_term}


def prepare_key(
    k: Tensor,
    *,
    compensation: str = "none",
    q_mean: Tensor | None = None,
    k_mean: Tensor | None = None,
    channel_index: Tensor | None = None,
    four_over_six: bool = False,
) -> dict[str, Tensor | None]:
    """Quantise keys ``[T, Hkv, D]`` (fp32, bf16, fp16) for the qk4pv8 format.

    Statistics as in :func:`prepare_query`. Returns

    - k uint8 ``[T, Hkv, D/2]`` and k_scale uint8 ``[T, Hkv, D/16]`` (linear);
    - aux_delta bf16 ``[T, Hq]`` = Delta_S, summed over all channels; None without a mean;
    - aux_channels bf16 ``[T, Hkv, c]``, the removed channels (centred when there is a mean); None
      without channels.
    """
    mean, channels = _parse(compensation, q_mean=q_mean, k_mean=k_mean, channel_index=channel_index)
    operand = as_fp32("k", k)
    require_finite("k", operand)
    delta = values = None
    if mean:
        operand = operand - _mean_rows("k_mean", k_mean, operand, operand.shape[1])
        delta = delta_scores(operand, _mean_rows("q_mean", q_mean, operand))
    if channels:
        operand, values = split_channels(operand, channel_index)
    packed, scale = quantize_nvfp4(operand, four_over_six=four_over_six, name="k")
    return {"k": packed, "k_scale": scale, "aux_delta": delta, "aux_channels": values}
