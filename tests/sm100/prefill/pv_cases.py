# SPDX-License-Identifier: Apache-2.0
"""The comparison builds of the SM100 prefill kernel, P and V in bf16 or NVFP4: their V, their launch,
and a replay with their numerics."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import attention_cases as cases
import prefill_cases as pc
import torch

from mpfa import reference as ref
from mpfa.reference import replay
from mpfa.reference.codecs import e2m1_decode, e2m1_encode, e4m3_decode, e4m3_encode
from mpfa.reference.replay import KVOperands, Scheme

# What the kernel multiplies P by: the largest e4m3 scale times the largest e2m1 element.
NVFP4_TOP = 448.0 * 6.0
SMALLEST_SCALE = 2.0**-9


@dataclass
class PvOperands:
    """A case with V in another format. v, v_scale: what the launcher takes; values: V as fp32, shaped
    like the e4m3 cache that it replaces."""

    bits: int
    base: pc.Operands
    v: torch.Tensor
    v_scale: torch.Tensor | None
    values: torch.Tensor

    @property
    def case(self) -> pc.Case:
        return self.base.case


def written(v: torch.Tensor) -> torch.Tensor:
    """bool [..., tokens]: rows that hold a token; the others are poison."""
    return (v.view(torch.uint8) != cases.POISON_BYTE).all(dim=-1)


def operands(bits: int, o: pc.Operands, integers: bool = False) -> PvOperands:
    """V made from the case's e4m3 V, with bits that e4m3 does not hold unless ``integers``."""
    gen = torch.Generator().manual_seed(o.case.seed + 9)
    values = o.kv.v.float()
    if not integers:
        values = values * (0.5 + torch.rand(values.shape, generator=gen))
    if bits == 16:
        v = values.bfloat16()
        return PvOperands(bits, o, v.view(torch.uint8), None, v.float())
    # NVFP4: blocks of 16 tokens. Codes of tokens that nobody wrote are poison; scales must not be NaN.
    seen = written(o.kv.v).unsqueeze(-2)
    transposed = torch.where(seen, values.transpose(-1, -2), 0.0)
    codes, scale = ref.quantize_nvfp4(transposed)
    # Byte b of a row holds tokens 2b and 2b + 1.
    both = (seen[..., ::2] & seen[..., 1::2]).expand_as(codes)
    low = seen[..., ::2].expand_as(codes)
    codes = torch.where(both, codes, torch.where(low, codes & 0x0F | 0xF0, cases.POISON_BYTE))
    scale = scale.view(torch.uint8)
    scale = torch.where(seen[..., ::16].expand_as(scale), scale, 0x7E)
    decoded = ref.dequantize_nvfp4(codes, scale.view(torch.float8_e4m3fn))
    return PvOperands(
        bits,
        o,
        codes.contiguous(),
        ref.pack_scale_atoms(scale),
        decoded.transpose(-1, -2).contiguous(),
    )


def launch(module, x: PvOperands) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = pc.empty_outputs(x.base)
    arguments = {**pc.call(x.base, outputs).arguments, "v": x.v, "v_scale": x.v_scale}
    module.run(*arguments.values())
    return pc.finish(x.base, outputs)


def quantise_p(p: torch.Tensor, p_mode: str) -> tuple[torch.Tensor, float]:
    """P as the PV product sees it, times the returned factor."""
    if p_mode == "bf16":
        return p.bfloat16().float(), 1.0
    x = (p * NVFP4_TOP).unflatten(-1, (-1, 16))
    top = x.amax(dim=-1, keepdim=True).clamp_min(6.0 * SMALLEST_SCALE)
    sixth = torch.tensor(1.0 / 6.0, dtype=torch.float32)
    scale = e4m3_decode(e4m3_encode(top * sixth))
    return (e2m1_decode(e2m1_encode(x * (1.0 / scale))) * scale).flatten(-2), NVFP4_TOP


@contextmanager
def numerics_of(x: PvOperands):
    """prefill_cases.replay with this V and P's format."""
    plain = pc.request_operands

    def request_operands(o: pc.Operands, b: int) -> KVOperands:
        kv, length = plain(o, b), o.case.kv_lens[b]
        if o.table is None:
            begin = sum(o.case.kv_lens[:b])
            v = x.values[begin : begin + length]
        else:
            pages = o.table[1][o.table[0][b] : o.table[0][b + 1]].long()
            v = x.values[pages].transpose(1, 2).flatten(0, 1)[:length]
        return KVOperands(kv.k, v, kv.delta, kv.channels)

    mode = {16: "bf16", 4: "nvfp4"}[x.bits]
    with (
        mock.patch.object(pc, "request_operands", request_operands),
        mock.patch.object(pc, "scheme_for", lambda *_: Scheme(128, mode)),
        mock.patch.object(replay, "_quantise_p", quantise_p),
    ):
        yield
