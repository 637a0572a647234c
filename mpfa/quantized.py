# SPDX-License-Identifier: Apache-2.0
"""QuantizedQuery and QuantizedKV: ragged low-bit operands."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mpfa.config import MX_BLOCK, NVFP4_BLOCK, KVCacheConfig, check_is_config
from mpfa.errors import HALF_DTYPES, Layout, check_choice, check_indptr, check_layout, check_tensor
from mpfa.stats import SmoothingStats


def query_layout(config: KVCacheConfig, num_tokens: int) -> Layout:
    """Shape and dtype of every tensor of a QuantizedQuery."""
    rows, d = (num_tokens, config.num_qo_heads), config.head_dim
    layout: Layout = dict.fromkeys(("q", "q_scale", "a_comp", "row_term"))
    if config.format == "mxfp8":
        layout["q"] = ((*rows, d), torch.float8_e4m3fn)
        layout["q_scale"] = ((*rows, d // MX_BLOCK), torch.float8_e8m0fnu)
        return layout
    layout["q"] = ((*rows, d // 2), torch.uint8)
    layout["q_scale"] = ((*rows, d // NVFP4_BLOCK), torch.uint8)
    if config.needs_stats:
        layout["a_comp"] = ((*rows, config.comp_slots), torch.bfloat16)
    if config.uses_mean:
        layout["row_term"] = (rows, torch.float32)
    return layout


def ragged_layout(config: KVCacheConfig, num_tokens: int) -> Layout:
    """Shape and dtype of every tensor of a QuantizedKV."""
    rows, d = (num_tokens, config.num_kv_heads), config.head_dim
    layout: Layout = dict.fromkeys(("k", "k_scale", "v", "v_scale", "aux_delta", "aux_channels"))
    layout["v"] = ((*rows, d), torch.float8_e4m3fn)
    if config.format == "mxfp8":
        layout["k"] = layout["v"]
        layout["k_scale"] = ((*rows, d // MX_BLOCK), torch.float8_e8m0fnu)
        layout["v_scale"] = (("blocks", config.num_kv_heads, d), torch.float8_e8m0fnu)
        return layout
    layout["k"] = ((*rows, d // 2), torch.uint8)
    layout["k_scale"] = ((*rows, d // NVFP4_BLOCK), torch.uint8)
    if config.uses_mean:
        layout["aux_delta"] = ((config.num_qo_heads, num_tokens), torch.bfloat16)
    if config.uses_channels:
        layout["aux_channels"] = ((*rows, config.channels), torch.bfloat16)
    return layout


def _check_low_bit(owner: str, config: KVCacheConfig) -> None:
    check_choice(f"{owner}.config.format", check_is_config(config).format, ("qk4pv8", "mxfp8"))


@dataclass(frozen=True, eq=False)
class QuantizedQuery:
    """Q as the kernels read it.

    Attributes:
        q: qk4pv8 uint8 [nnz, Hq, D/2] (two e2m1 codes per byte, low nibble = even channel);
            mxfp8 e4m3 [nnz, Hq, D].
        q_scale: qk4pv8 uint8 (e4m3 bits) [nnz, Hq, D/16]; mxfp8 ue8m0 [nnz, Hq, D/32].
        a_comp: bf16 [nnz, Hq, R] compensation operand, R = 16*ceil(slots/16): slot 0 is 1.0 when the
            compensation centres (it multiplies Delta), the next c slots hold the row's own channel
            values, the rest is 0. None without compensation.
        row_term: fp32 [nnz, Hq], q.k_mean of the unrounded q; None unless centred.
        config, stats: what the query was quantised for; run() refuses another pairing.
        dtype: dtype of the query it was made from, and of the attention output by default.

    Made by quantize_query() or append_paged_kv_cache(). The constructor checks every shape, dtype,
    device and stride (ValueError).
    """

    q: torch.Tensor
    q_scale: torch.Tensor
    a_comp: torch.Tensor | None
    row_term: torch.Tensor | None
    config: KVCacheConfig
    stats: SmoothingStats | None
    dtype: torch.dtype

    def __post_init__(self) -> None:
        _check_low_bit("q", self.config)
        check_tensor("q.q", self.q, shape=("nnz", "Hq", "D"))
        check_choice("q.dtype", self.dtype, HALF_DTYPES)
        check_layout("q", self, query_layout(self.config, self.num_tokens), device=self.device)

    @property
    def num_tokens(self) -> int:
        """nnz, the query tokens of all requests."""
        return self.q.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of every tensor."""
        return self.q.device


@dataclass(frozen=True, eq=False)
class QuantizedKV:
    """Ragged K and V in a cache format, for prefill without a page table.

    Attributes:
        k: qk4pv8 uint8 [nnz, Hkv, D/2]; mxfp8 e4m3 [nnz, Hkv, D].
        k_scale: qk4pv8 uint8 (e4m3 bits) [nnz, Hkv, D/16]; mxfp8 ue8m0 [nnz, Hkv, D/32].
        v: e4m3 [nnz, Hkv, D].
        v_scale: mxfp8 ue8m0 [sum of ceil(len/32), Hkv, D]; request b starts at row
            sum over i < b of ceil(len_i/32). None for qk4pv8.
        aux_delta: bf16 [Hq, nnz] Delta_S (paper equation 9), or None.
        aux_channels: bf16 [nnz, Hkv, c] outlier channels of K, or None.
        indptr: int32 [B+1] token offsets it was quantised with.
        config, stats: as in QuantizedQuery.

    Made by quantize_kv(). The constructor checks every shape, dtype, device and stride (ValueError).
    """

    k: torch.Tensor
    k_scale: torch.Tensor
    v: torch.Tensor
    v_scale: torch.Tensor | None
    aux_delta: torch.Tensor | None
    aux_channels: torch.Tensor | None
    indptr: torch.Tensor
    config: KVCacheConfig
    stats: SmoothingStats | None

    def __post_init__(self) -> None:
        _check_low_bit("kv", self.config)
        check_tensor("kv.k", self.k, shape=("nnz", "Hkv", "D"))
        check_layout("kv", self, ragged_layout(self.config, self.num_tokens), device=self.device)
        check_tensor("kv.indptr", self.indptr, shape=("B+1",), dtype=torch.int32)
        if self.v_scale is not None and self.indptr.device.type == "cpu":
            bounds = check_indptr("kv.indptr", self.indptr, self.num_tokens)
            shape = (ragged_v_scale_rows(bounds)[-1], *self.v_scale.shape[1:])
            check_tensor("kv.v_scale", self.v_scale, shape=shape)

    @property
    def num_tokens(self) -> int:
        """nnz, the KV tokens of all requests."""
        return self.k.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of every tensor; indptr may be elsewhere."""
        return self.k.device


def ragged_v_scale_rows(bounds: list[int]) -> list[int]:
    """First v_scale row of every request, and the total: cumulative ceil(len/32)."""
    rows = [0]
    for begin, end in zip(bounds, bounds[1:], strict=False):
        rows.append(rows[-1] + -(-(end - begin) // MX_BLOCK))
    return rows
