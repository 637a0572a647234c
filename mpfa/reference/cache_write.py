# SPDX-License-Identifier: Apache-2.0
"""Scatter tokens into cache pages and read a request back as dequantised operands.

P pages of ps tokens, T tokens, Hkv KV heads, G query heads for each of them. Page tensors are
head-major and may be views with any strides except in the last dimension; they are written in
place. ``slot = page * ps + offset``; tokens whose slot is negative are skipped. Arguments are
checked before the first byte is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpfa.errors import check_tensor
from mpfa.reference.codecs import e4m3_decode, e8m0_decode, require_finite
from mpfa.reference.layout import ATOM_ROWS, scale_atom_offset
from mpfa.reference.mxfp8 import (
    MXFP8_BLOCK,
    dequantize_mxfp8,
    dequantize_mxfp8_tokens,
    encode_scaled,
    quantize_mxfp8,
    scale_byte,
)
from mpfa.reference.nvfp4 import dequantize_nvfp4

_VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _bytes(t: Tensor) -> Tensor:
    """The same memory as uint8: indexed stores of 8-bit floats are not available everywhere."""
    return t.view(torch.uint8)


def resolve_slots(
    slot_mapping: Tensor, num_tokens: int, num_pages: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Check slots and return (token, page, offset), int64, of those that are not negative.

    ValueError for a slot past the last page and for one that occurs twice.
    """
    check_tensor(
        "slot_mapping", slot_mapping, shape=(num_tokens,), dtype=(torch.int32, torch.int64)
    )
    slots = slot_mapping.long()
    high = (slots >= num_pages * page_size).nonzero()
    if len(high):
        i = int(high[0])
        raise ValueError(
            f"slot_mapping: {int(slots[i])} at index {i}, allowed are slots below "
            f"{num_pages * page_size} ({num_pages} pages of {page_size}) and negative ones"
        )
    token = (slots >= 0).nonzero().flatten()
    kept = slots[token]
    ordered, order = kept.sort(stable=True)
    twice = (ordered[1:] == ordered[:-1]).nonzero()
    if len(twice):
        i = int(twice[0])
        first, second = int(token[order[i]]), int(token[order[i + 1]])
        raise ValueError(
            f"slot_mapping: slot {int(ordered[i])} is given to tokens {first} and {second}, "
            "each slot is allowed once"
        )
    return token, kept // page_size, kept % page_size


def _require_in_order(token: Tensor, page: Tensor, offset: Tensor) -> None:
    """Tokens of one page must have consecutive offsets in the order in which they come."""
    order = page.sort(stable=True).indices
    same = page[order[1:]] == page[order[:-1]]
    gap = (same & (offset[order[1:]] != offset[order[:-1]] + 1)).nonzero()
    if len(gap):
        a, b = order[int(gap[0])], order[int(gap[0]) + 1]
        raise ValueError(
            f"slot_mapping: token {int(token[b])} at offset {int(offset[b])} of page "
            f"{int(page[b])} follows token {int(token[a])} at offset {int(offset[a])}, allowed is "
            "the next offset (mxfp8 blocks of V span tokens and are appended in order)"
        )


def _require_open_blocks(
    token: Tensor,
    page: Tensor,
    offset: Tensor,
    v_pages: Tensor,
    v_scale_pages: Tensor,
    v_tail: Tensor,
) -> None:
    """A block that is continued must still be the one that v_tail holds.

    why: after a roll-back over a 32-token boundary the tail holds rows of the later block, and the
    requantised earlier block would silently be wrong. The rows before the first new one must
    therefore give the stored codes when encoded with the stored scale.
    """
    # Of several tokens of one block only the first continues what was there before the call.
    blocks_per_page = v_scale_pages.shape[2]
    owner, where = (page * blocks_per_page + offset // MXFP8_BLOCK).unique(return_inverse=True)
    row = torch.full_like(owner, MXFP8_BLOCK).scatter_reduce_(
        0, where, offset % MXFP8_BLOCK, "amin"
    )
    first = ((offset % MXFP8_BLOCK == row[where]) & (offset % MXFP8_BLOCK > 0)).nonzero().flatten()
    if len(first) == 0:
        return
    pages, row = page[first], offset[first] % MXFP8_BLOCK
    block = offset[first] // MXFP8_BLOCK
    rows = block[:, None] * MXFP8_BLOCK + torch.arange(MXFP8_BLOCK, device=page.device)
    stored = _bytes(v_pages)[pages[:, None], :, rows].transpose(1, 2)
    byte = _bytes(v_scale_pages)[pages, :, block]
    again = _bytes(encode_scaled(v_tail[pages].float(), byte[:, :, None]))
    before = (torch.arange(MXFP8_BLOCK, device=page.device) < row[:, None])[:, None, :, None]
    wrong = ((stored != again) & before).flatten(1).any(dim=1).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(
            f"slot_mapping: token {int(token[first[i]])} continues the V block at offset "
            f"{int(block[i]) * MXFP8_BLOCK} of page {int(pages[i])} at offset "
            f"{int(offset[first[i]])}, but v_tail no longer holds its first {int(row[i])} rows; "
            "allowed is to append again from the start of the block"
        )


def write_qk4pv8(
    k_pages: Tensor,
    k_scale_pages: Tensor,
    v_pages: Tensor,
    aux_delta: Tensor | None,
    aux_channels: Tensor | None,
    slot_mapping: Tensor,
    key: dict[str, Tensor | None],
    v_e4m3: Tensor,
) -> None:
    """Scatter quantised tokens into qk4pv8 pages.

    k_pages uint8 ``[P, Hkv, ps, D/2]``; k_scale_pages uint8, scale atoms ``[P, Hkv, D/64, 512]``
    for ps = 128 and ``[P, Hkv, ps, D/16]`` else; v_pages e4m3 ``[P, Hkv, ps, D]``; aux_delta bf16
    ``[P, Hkv, G, ps]``; aux_channels bf16 ``[P, Hkv, ps, c]``; slot_mapping int32 or int64
    ``[T]``. ``key`` comes from ``prepare_key`` (its linear scales are placed in atoms here),
    v_e4m3 is ``[T, Hkv, D]``.
    """
    pages, heads, ps, dim = v_pages.shape
    tokens = v_e4m3.shape[0]
    atoms = ps == ATOM_ROWS
    scale_shape = (dim // 64, 512) if atoms else (ps, dim // 16)
    check_tensor("v_pages", v_pages, shape=(pages, heads, ps, dim), dtype=torch.float8_e4m3fn)
    check_tensor("k_pages", k_pages, shape=(pages, heads, ps, dim // 2), dtype=torch.uint8)
    check_tensor(
        "k_scale_pages", k_scale_pages, shape=(pages, heads, *scale_shape), dtype=torch.uint8
    )
    check_tensor("v_e4m3", v_e4m3, shape=(tokens, heads, dim), dtype=torch.float8_e4m3fn)
    check_tensor("key['k']", key["k"], shape=(tokens, heads, dim // 2), dtype=torch.uint8)
    check_tensor(
        "key['k_scale']", key["k_scale"], shape=(tokens, heads, dim // 16), dtype=torch.uint8
    )
    for name, stored in (("aux_delta", aux_delta), ("aux_channels", aux_channels)):
        if (stored is None) != (key[name] is None):
            raise ValueError(f"{name}: the pages and the key must both have it or both be None")
    if aux_delta is not None:
        group = aux_delta.shape[2]
        check_tensor("aux_delta", aux_delta, shape=(pages, heads, group, ps), dtype=torch.bfloat16)
        check_tensor(
            "key['aux_delta']",
            key["aux_delta"],
            shape=(tokens, heads * group),
            dtype=torch.bfloat16,
        )
    if aux_channels is not None:
        count = aux_channels.shape[3]
        check_tensor(
            "aux_channels", aux_channels, shape=(pages, heads, ps, count), dtype=torch.bfloat16
        )
        check_tensor(
            "key['aux_channels']",
            key["aux_channels"],
            shape=(tokens, heads, count),
            dtype=torch.bfloat16,
        )
    token, page, offset = resolve_slots(slot_mapping, tokens, pages, ps)

    k_pages[page, :, offset] = key["k"][token]
    scale = key["k_scale"][token]
    if atoms:
        blocks = torch.arange(dim // 16, device=scale.device)
        atom, byte = scale_atom_offset(offset[:, None], blocks)
        k_scale_pages[page[:, None], :, atom, byte] = scale.transpose(1, 2)
    else:
        k_scale_pages[page, :, offset] = scale
    _bytes(v_pages)[page, :, offset] = _bytes(v_e4m3)[token]
    if aux_delta is not None:
        aux_delta[page, :, :, offset] = key["aux_delta"][token].unflatten(1, (heads, group))
    if aux_channels is not None:
        aux_channels[page, :, offset] = key["aux_channels"][token]


def write_mxfp8(
    k_pages: Tensor,
    k_scale_pages: Tensor,
    v_pages: Tensor,
    v_scale_pages: Tensor,
    v_tail: Tensor,
    slot_mapping: Tensor,
    k: Tensor,
    v: Tensor,
) -> None:
    """Quantise and append tokens to mxfp8 pages.

    k_pages, v_pages e4m3 ``[P, Hkv, ps, D]``, ps a multiple of 32; k_scale_pages ue8m0
    ``[P, Hkv, ps, D/32]``; v_scale_pages ue8m0 ``[P, Hkv, ps/32, D]``; v_tail bf16
    ``[P, Hkv, 32, D]``; k fp32 and v bf16, fp16 or fp32 (rounded to bf16 first) ``[T, Hkv, D]``.

    A V block holds 32 tokens, so an append changes the scale of the tokens before it. v_tail keeps
    the open block of each page unquantised, and every append requantises the blocks it touches
    from there: any split of in-order appends gives the bytes of one whole append. A token at block
    offset 0 opens a new block; rows of a block that are not written yet have code 0. Tokens of one
    page must come in order and without gaps; within one call that is checked.
    """
    pages, heads, ps, dim = v_pages.shape
    tokens = v.shape[0]
    e4m3, e8m0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
    if ps % MXFP8_BLOCK:
        raise ValueError(f"v_pages: page size {ps}, it must be a multiple of 32")
    check_tensor("v_pages", v_pages, shape=(pages, heads, ps, dim), dtype=e4m3)
    check_tensor("k_pages", k_pages, shape=(pages, heads, ps, dim), dtype=e4m3)
    check_tensor("k_scale_pages", k_scale_pages, shape=(pages, heads, ps, dim // 32), dtype=e8m0)
    check_tensor("v_scale_pages", v_scale_pages, shape=(pages, heads, ps // 32, dim), dtype=e8m0)
    check_tensor("v_tail", v_tail, shape=(pages, heads, 32, dim), dtype=torch.bfloat16)
    for name, t in (("k", k), ("v", v)):
        check_tensor(name, t, shape=(tokens, heads, dim), dtype=_VALUE_DTYPES)
    token, page, offset = resolve_slots(slot_mapping, tokens, pages, ps)
    _require_in_order(token, page, offset)
    valid = slot_mapping >= 0
    require_finite("k", k, valid)
    v = v.detach().to(torch.bfloat16)
    require_finite("v", v, valid)
    _require_open_blocks(token, page, offset, v_pages, v_scale_pages, v_tail)

    codes, scale = quantize_mxfp8(k[token], name="k")
    _bytes(k_pages)[page, :, offset] = _bytes(codes)
    _bytes(k_scale_pages)[page, :, offset] = _bytes(scale)

    row_index = torch.arange(MXFP8_BLOCK, device=v.device)
    # A page has one tail, so its blocks pass through it one after another.
    for block in range(ps // MXFP8_BLOCK):
        chosen = (offset // MXFP8_BLOCK == block).nonzero().flatten()
        row = offset[chosen] % MXFP8_BLOCK
        v_tail[page[chosen], :, row] = v[token[chosen]]
        touched, where = page[chosen].unique(return_inverse=True)
        last = torch.zeros_like(touched).scatter_reduce_(0, where, row, "amax")
        live = (row_index <= last[:, None])[:, None, :, None]
        values = torch.where(live, v_tail[touched].float(), 0.0)
        byte = scale_byte(values.abs().amax(dim=2))
        rows = slice(block * MXFP8_BLOCK, (block + 1) * MXFP8_BLOCK)
        _bytes(v_pages)[touched, :, rows] = _bytes(encode_scaled(values, byte[:, :, None]))
        _bytes(v_scale_pages)[touched, :, block] = byte


def write_bf16(
    k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor, k: Tensor, v: Tensor
) -> None:
    """Scatter k and v ``[T, Hkv, D]``, rounded to bf16, into bf16 pages ``[P, Hkv, ps, D]``."""
    pages, heads, ps, dim = k_pages.shape
    tokens = k.shape[0]
    check_tensor("k_pages", k_pages, shape=(pages, heads, ps, dim), dtype=torch.bfloat16)
    check_tensor("v_pages", v_pages, shape=(pages, heads, ps, dim), dtype=torch.bfloat16)
    token, page, offset = resolve_slots(slot_mapping, tokens, pages, ps)
    stored = []
    for name, t in (("k", k), ("v", v)):
        check_tensor(name, t, shape=(tokens, heads, dim), dtype=_VALUE_DTYPES)
        t = t.detach().to(torch.bfloat16)
        require_finite(name, t, slot_mapping >= 0)
        stored.append(t)
    for pool, t in zip((k_pages, v_pages), stored, strict=True):
        pool[page, :, offset] = t[token]


def _locate(page_ids: Tensor, kv_len: int, num_pages: int, page_size: int) -> tuple[Tensor, Tensor]:
    """(page, offset) of the ``kv_len`` tokens of a request with the given pages."""
    if not 0 <= kv_len <= page_ids.numel() * page_size:
        raise ValueError(
            f"kv_len: {kv_len}, allowed are 0..{page_ids.numel() * page_size} "
            f"({page_ids.numel()} pages of {page_size})"
        )
    position = torch.arange(kv_len, device=page_ids.device)
    page = page_ids.long()[position // page_size]
    wrong = ((page < 0) | (page >= num_pages)).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(
            f"page_ids: {int(page[i])} at index {i // page_size}, allowed are 0..{num_pages - 1}"
        )
    return page, position % page_size


def gather_qk4pv8(
    k_pages: Tensor,
    k_scale_pages: Tensor,
    v_pages: Tensor,
    aux_delta: Tensor | None,
    aux_channels: Tensor | None,
    page_ids: Tensor,
    kv_len: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Operands of one request from qk4pv8 pages (shapes as in :func:`write_qk4pv8`).

    page_ids int ``[n]`` in token order. Returns contiguous fp32 k and v ``[kv_len, Hkv, D]``,
    delta ``[kv_len, Hq]`` and channels ``[kv_len, Hkv, c]`` (None where the pages have none).
    Bytes past kv_len are not read.
    """
    pages, _, ps, dim = v_pages.shape
    page, offset = _locate(page_ids, kv_len, pages, ps)
    if ps == ATOM_ROWS:
        blocks = torch.arange(dim // 16, device=page.device)
        atom, byte = scale_atom_offset(offset[:, None], blocks)
        scale = k_scale_pages[page[:, None], :, atom, byte].transpose(1, 2).contiguous()
    else:
        scale = k_scale_pages[page, :, offset]
    k = dequantize_nvfp4(k_pages[page, :, offset], scale)
    v = e4m3_decode(_bytes(v_pages)[page, :, offset])
    delta = channels = None
    if aux_delta is not None:
        delta = aux_delta[page, :, :, offset].float().flatten(1)
    if aux_channels is not None:
        channels = aux_channels[page, :, offset].float()
    return k, v, delta, channels


def gather_mxfp8(
    k_pages: Tensor,
    k_scale_pages: Tensor,
    v_pages: Tensor,
    v_scale_pages: Tensor,
    page_ids: Tensor,
    kv_len: int,
) -> tuple[Tensor, Tensor]:
    """Contiguous fp32 k and v ``[kv_len, Hkv, D]`` of one request from mxfp8 pages."""
    pages, _, ps, _ = v_pages.shape
    page, offset = _locate(page_ids, kv_len, pages, ps)
    k = dequantize_mxfp8(_bytes(k_pages)[page, :, offset], _bytes(k_scale_pages)[page, :, offset])
    v_scale = e8m0_decode(_bytes(v_scale_pages)[page, :, offset // MXFP8_BLOCK])
    return k, e4m3_decode(_bytes(v_pages)[page, :, offset]) * v_scale


def gather_bf16(
    k_pages: Tensor, v_pages: Tensor, page_ids: Tensor, kv_len: int
) -> tuple[Tensor, Tensor]:
    """Contiguous fp32 k and v ``[kv_len, Hkv, D]`` of one request from bf16 pages."""
    pages, _, ps, _ = k_pages.shape
    page, offset = _locate(page_ids, kv_len, pages, ps)
    return k_pages[page, :, offset].float(), v_pages[page, :, offset].float()


def dequantize_ragged_qk4pv8(
    k: Tensor, k_scale: Tensor, v: Tensor, begin: int, end: int
) -> tuple[Tensor, Tensor]:
    """fp32 k and v ``[end-begin, Hkv, D]`` of ragged tokens begin..end in the qk4pv8 format.

    k uint8 ``[nnz, Hkv, D/2]``, k_scale uint8 ``[nnz, Hkv, D/16]``, v e4m3 ``[nnz, Hkv, D]``.
    """
    tokens = slice(begin, end)
    return dequantize_nvfp4(k[tokens], k_scale[tokens]), e4m3_decode(v[tokens])


def dequantize_ragged_mxfp8(
    k: Tensor,
    k_scale: Tensor,
    v: Tensor,
    v_scale: Tensor,
    begin: int,
    end: int,
    v_scale_begin: int,
) -> tuple[Tensor, Tensor]:
    """fp32 k and v ``[end-begin, Hkv, D]`` of the request at ragged tokens begin..end, mxfp8.

    k, v e4m3 ``[nnz, Hkv, D]``; k_scale ue8m0 ``[nnz, Hkv, D/32]``; v_scale ue8m0
    ``[rows, Hkv, D]``, where row ``v_scale_begin`` belongs to the 32 tokens from ``begin`` on.
    """
    tokens = slice(begin, end)
    blocks = -(-(end - begin) // MXFP8_BLOCK)
    scale = v_scale[v_scale_begin : v_scale_begin + blocks]
    return dequantize_mxfp8(k[tokens], k_scale[tokens]), dequantize_mxfp8_tokens(v[tokens], scale)
