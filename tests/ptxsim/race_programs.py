# SPDX-License-Identifier: Apache-2.0
"""The small kernels of race/ with exact data: each function runs one and says whether it is right.

They are the programs of the race detector's tests, of the mutation test and of the negative controls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mpfa.sim import run_ptx, simulator

RACE = Path(__file__).resolve().parent / "race"
# CUtensorMapDataType and CUtensorMapSwizzle.
TYPES = {torch.uint8: 0, torch.float32: 7}
SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}


def tensor_map(tensor: torch.Tensor, box: Sequence[int], swizzle: int = 0) -> bytes:
    """The 128 bytes of a tensor map of a contiguous matrix; box is (rows, columns), swizzle in bytes.

    Raises:
        ValueError: the simulator's cuTensorMapEncodeTiled refuses it.
    """
    rows, columns = tensor.shape
    raw = ctypes.create_string_buffer(128 + 64)
    at = -ctypes.addressof(raw) % 64
    encode = simulator().lib.ptxsim_cuTensorMapEncodeTiled
    error = encode(
        ctypes.c_void_p(ctypes.addressof(raw) + at),
        TYPES[tensor.dtype],
        2,
        ctypes.c_void_p(tensor.data_ptr()),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(columns * tensor.element_size()),
        (ctypes.c_uint32 * 2)(box[1], box[0]),
        (ctypes.c_uint32 * 2)(1, 1),
        0,
        SWIZZLE[swizzle],
        0,
        0,
    )
    if error:
        raise ValueError(f"tensor: no map for shape {tuple(tensor.shape)}, box {tuple(box)}")
    return raw.raw[at : at + 128]


def ring(ptx: str) -> bool:
    x = torch.arange(64 * 6, dtype=torch.float32)
    y = torch.zeros_like(x)
    run_ptx(ptx, "ring", x, y, 6, block=(96,))
    return torch.equal(y, 2 * x)


def reduce(ptx: str) -> bool:
    x = torch.arange(128 * 3, dtype=torch.int32)
    partial, count, result = (torch.zeros(n, dtype=torch.int32) for n in (3, 1, 1))
    run_ptx(ptx, "reduce", x, partial, count, result, grid=(3,), block=(128,))
    return int(result) == int(x.sum())


def exchange(ptx: str) -> bool:
    x = torch.arange(64, dtype=torch.int32)
    y = torch.zeros_like(x)
    run_ptx(ptx, "exchange", x, y, grid=(2,), block=(32,))
    return torch.equal(y, torch.cat([x[32:], x[:32]]))


def copies(ptx: str) -> bool:
    x = torch.arange(5 * 64 * 4, dtype=torch.int32)
    y = torch.zeros_like(x)
    run_ptx(ptx, "copies", x, y, 5, block=(64,))
    return torch.equal(y, x.view(5, 2, 32, 4).flip(1).reshape(-1))


def gemm(ptx: str) -> bool:
    """Small integers: exact. Operands as 8 x 16-byte core matrices, K-major, no swizzle."""
    steps, rounds = 3, 2
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-3, 4, (steps, 128, 16), generator=generator).bfloat16()
    b = torch.randint(-3, 4, (steps, 64, 16), generator=generator).bfloat16()

    def core(m: torch.Tensor) -> torch.Tensor:
        return m.view(steps, -1, 8, 2, 8).permute(0, 1, 3, 2, 4).contiguous()

    d = torch.zeros(128, 64)
    run_ptx(ptx, "gemm", core(a), core(b), d, steps, rounds, block=(128,))
    return torch.equal(d, torch.einsum("kmc,knc->mn", a.float(), b.float()))


@dataclass(frozen=True)
class Scaled:
    """Integer-valued e4m3 rows with one ue8m0 scale per 32 elements: every product and sum is exact.

    Attributes:
        codes: e4m3 bytes [rows, K].
        scales: ue8m0 bytes [rows, blocks], padded with 1.0 to the tiles.
        values: codes times scales, float64 [rows, K].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor


def scaled(rows: int, k: int, pad_rows: int, pad_blocks: int, seed: int) -> Scaled:
    """Random integers -3 .. 3, random scales 1/4 .. 4, no two neighbouring scales equal."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (rows, k), generator=generator).float()
    blocks = k // 32
    # A walk by 1 .. 4 modulo 5 along K that starts shifted from row to row.
    steps = torch.randint(1, 5, (rows, blocks), generator=generator).cumsum(1)
    exponents = (steps + torch.arange(rows)[:, None]) % 5 - 2
    scales = torch.full((pad_rows, pad_blocks), 127, dtype=torch.uint8)
    scales[:rows, :blocks] = (127 + exponents).to(torch.uint8)
    values = x.double() * (2.0 ** exponents.double()).repeat_interleave(32, 1)
    return Scaled(x.to(torch.float8_e4m3fn).view(torch.uint8), scales, values)


def sm120_product(ptx: str, m: int, n: int, k: int, ctas: int) -> bool:
    tiles = row_tiles, column_tiles, k_tiles = -(-m // 64), -(-n // 32), -(-k // 128)
    a = scaled(m, k, 64 * row_tiles, 4 * k_tiles, 1)
    b = scaled(n, k, 32 * column_tiles, 4 * k_tiles, 2)

    def words(s: Scaled) -> torch.Tensor:
        """[k tile][row] words of four scales."""
        return s.scales.view(-1, k_tiles, 4).transpose(0, 1).contiguous()

    b_codes = b.codes.t().contiguous()
    d = torch.full((m, n), torch.nan)
    maps = (
        tensor_map(a.codes, (64, 128), 128),
        tensor_map(b_codes, (128, 32), 32),
        tensor_map(d, (64, 32)),
    )
    with simulator().tensors(a.codes, b_codes, d):
        run_ptx(ptx, "sm120_gemm", *maps, words(a), words(b), *tiles, grid=(ctas,), block=(96,))
    return torch.equal(d.double(), a.values @ b.values.t())


def sm120_gemm(ptx: str) -> bool:
    """Every tile count odd or even, the last tile of each direction partly outside the matrices.

    The second product fits the ring, so that nothing but the epilogue's own barriers separates the
    results of two tiles.
    """
    return sm120_product(ptx, 96, 48, 416, 2) and sm120_product(ptx, 64, 64, 160, 1)


def sm100_product(ptx: str, m: int, n: int, k: int, ctas: int) -> bool:
    row_tiles, column_tiles, k_tiles = -(-m // 128), -(-n // 64), -(-k // 128)
    a = scaled(m, k, 128 * row_tiles, 4 * k_tiles, 3)
    b = scaled(n, k, 64 * column_tiles, 4 * k_tiles, 4)

    def atoms(s: Scaled, rows: int) -> torch.Tensor:
        """[k tile][row tile] atoms of 128 rows: byte (r % 32) * 16 + (r / 32) * 4 + block."""
        x = s.scales.view(-1, rows, k_tiles, 4)
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 128 - rows), value=127)
        return x.view(-1, 4, 32, k_tiles, 4).permute(3, 0, 2, 1, 4).contiguous()

    b_codes = b.codes.t().contiguous()
    d = torch.full((m, n), torch.nan)
    maps = tensor_map(a.codes, (128, 128), 128), tensor_map(b_codes, (128, 64), 64)
    with simulator().tensors(a.codes, b_codes):
        run_ptx(
            ptx,
            "sm100_gemm",
            *maps,
            atoms(a, 128),
            atoms(b, 64),
            d,
            m,
            n,
            k_tiles,
            grid=(ctas,),
            block=(128,),
        )
    return torch.equal(d.double(), a.values @ b.values.t())


def sm100_gemm(ptx: str) -> bool:
    """As sm120_gemm, with tiles of 128 x 64."""
    return sm100_product(ptx, 160, 80, 416, 2) and sm100_product(ptx, 128, 128, 160, 1)


@dataclass(frozen=True)
class Module:
    """One PTX file of race/ and the programs in it."""

    name: str
    programs: tuple[Callable[[str], bool], ...]

    @property
    def ptx(self) -> str:
        return (RACE / f"{self.name}.ptx").read_text()

    @property
    def known(self) -> Path:
        """The mutants that are harmless, each with the edge that makes it so."""
        return RACE / f"{self.name}.known"

    def right(self, ptx: str) -> bool:
        return all(program(ptx) for program in self.programs)


MODULES = (
    Module("kernels", (ring, reduce, exchange, copies, gemm)),
    Module("sm100_gemm", (sm100_gemm,)),
    Module("sm120_gemm", (sm120_gemm,)),
)
