# SPDX-License-Identifier: Apache-2.0
"""Directions instead of channels in the BF16 slots: what the best choice of a subspace would give.

With an orthonormal basis U [D, r] of a KV head, q.k = (q U).(k U) + q'.k' where q' = q - U U^T q and
k' = k - U U^T k, because a residual is orthogonal to every projection. The projections go through the
BF16 slots, the residuals become the NVFP4 operands. Channels are the case in which the columns of U
are unit vectors; a general U costs a D x r product per token when the cache is written, so no cache
format of mpfa stores one.
"""

from __future__ import annotations

import torch

from mpfa.accuracy.attention import PLAIN, LayerOptions, OneStepRunner
from mpfa.accuracy.rows import RowSpec
from mpfa.reference import (
    delta_scores,
    dequantize_nvfp4,
    e4m3_decode,
    e4m3_encode,
    quantize_nvfp4,
)
from mpfa.reference.replay import KVOperands, QueryOperands, attend_request, scheme_for

# Each iteration lowers the objective; it has settled to 1e-4 of itself after three or four.
_ITERATIONS = 8


def residual_energy(q_moment: torch.Tensor, k_moment: torch.Tensor, basis: torch.Tensor):
    """tr((I - P) Cq) and tr((I - P) Ck) [Hkv], P = U U^T."""
    return tuple(
        c.diagonal(dim1=-2, dim2=-1).sum(-1) - (basis.mT @ c @ basis).diagonal(0, -2, -1).sum(-1)
        for c in (q_moment, k_moment)
    )


def best_basis(q_moment: torch.Tensor, k_moment: torch.Tensor, rank: int) -> torch.Tensor:
    """Orthonormal fp64 [Hkv, D, rank] that makes E|q'|^2 E|k'|^2 small.

    The error of a 4-bit product goes with the energies of both operands. The logarithm of their
    product is concave in P, so its tangent bounds it from above: each iteration takes the top
    eigenvectors of Cq / E|q'|^2 + Ck / E|k'|^2, which never raises the product.

    Args:
        q_moment, k_moment: fp64 [Hkv, D, D], E[q q^T] summed over the group's heads and E[k k^T].
    """
    count, dim = q_moment.shape[0], q_moment.shape[-1]
    basis = q_moment.new_zeros(count, dim, 0)
    for _ in range(_ITERATIONS):
        weights = [e.clamp_min(1e-30) for e in residual_energy(q_moment, k_moment, basis)]
        mixed = q_moment / weights[0][:, None, None] + k_moment / weights[1][:, None, None]
        basis = torch.linalg.eigh(mixed).eigenvectors[..., dim - rank :]
    return basis


def second_moment(x: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """fp64 [Hkv, D, D]: E[x x^T] of [T, H, D], summed over the heads of a group."""
    grouped = x.double().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    return (grouped.mT @ grouped).sum(dim=1) / x.shape[0]


class EigenBasis:
    """Means and basis of one layer, from sample activations.

    Args:
        q, k: bf16 [T, Hq, D] and [T, Hkv, D].
    """

    def __init__(self, q: torch.Tensor, k: torch.Tensor, rank: int, center: bool) -> None:
        q, k = q.float(), k.float()
        self.q_mean, self.k_mean = (
            (x.double().mean(dim=0).float() if center else torch.zeros_like(x[0])) for x in (q, k)
        )
        self.center, num_kv_heads = center, k.shape[1]
        moments = (
            second_moment(x - m, num_kv_heads) for x, m in ((q, self.q_mean), (k, self.k_mean))
        )
        self.basis = best_basis(*moments, rank).float()

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual fp32 [T, H, D] and bf16 projections [T, H, rank] of fp32 x, Hkv or Hq heads."""
        basis = self.basis.repeat_interleave(x.shape[1] // self.basis.shape[0], dim=0)
        values = torch.einsum("thd,hdr->thr", x, basis)
        return x - torch.einsum("thr,hdr->thd", values, basis), values.to(torch.bfloat16)


class EigenRunner(OneStepRunner):
    """Attention with an eigenbasis over one request in one step, numerics as qk4pv8's otherwise.

    Args:
        bases: per layer; None takes them from each layer's own tokens (stats "request").
    """

    def __init__(self, row: RowSpec, bases: dict[int, EigenBasis] | None) -> None:
        super().__init__()
        self._row, self._bases = row, bases

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: LayerOptions = PLAIN,
    ) -> torch.Tensor:
        row = self._row
        if self._bases is None:
            basis = EigenBasis(q, k, row.channels, row.uses_mean)
        else:
            basis = self._bases[layer]
        k_centred = k.float() - basis.k_mean
        q_rest, q_values = basis.split(q.float() - basis.q_mean)
        k_rest, k_values = basis.split(k_centred)
        delta = delta_scores(k_centred, basis.q_mean) if basis.center else None
        ones = q_values.new_ones(*q_values.shape[:2], 1 if basis.center else 0)
        rounded = (
            dequantize_nvfp4(*quantize_nvfp4(x, four_over_six=row.four_over_six))
            for x in (q_rest, k_rest)
        )
        q_value, k_value = rounded
        query = QueryOperands(q_value, torch.cat([ones, q_values], dim=2))
        kv = KVOperands(k_value, e4m3_decode(e4m3_encode(v.float())), delta, k_values)
        if options.logits_soft_cap:
            raise ValueError("eigen rows: a soft cap is not supported")
        scheme = scheme_for("qk4pv8", q.shape[2])
        out, _ = attend_request(query, kv, causal=True, scheme=scheme, **vars(options))
        return out.to(q.dtype)
