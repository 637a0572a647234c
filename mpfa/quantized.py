# SPDX-License-Identifier: Apache-2.0
"""QuantizedQuery and QuantizedKV: ragged low-bit operands."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mpfa.config import MX_BLOCK, KVCacheConfig
from mpfa.stats import SmoothingStats


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
    """

    q: torch.Tensor
    q_scale: torch.Tensor
    a_comp: torch.Tensor | None
    row_term: torch.Tensor | None
    config: KVCacheConfig
    stats: SmoothingStats | None
    dtype: torch.dtype

    @property
    def num_tokens(self) -> int:
        return self.q.shape[0]

    @property
    def device(self) -> torch.device:
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

    @property
    def num_tokens(self) -> int:
        return self.k.shape[0]

    @property
    def device(self) -> torch.device:
        return self.k.device


def ragged_v_scale_rows(bounds: list[int]) -> list[int]:
    """First v_scale row of every request, and the total: cumulative ceil(len/32)."""
    rows = [0]
    for begin, end in zip(bounds, bounds[1:], strict=False):
        rows.append(rows[-1] + -(-(end - begin) // MX_BLOCK))
    return rows
