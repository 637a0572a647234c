# SPDX-License-Identifier: Apache-2.0
"""What an instruction costs: pipe, cycles and latency per architecture.

Cycles are those for which one warp instruction occupies its pipe in one SM sub-partition (four of them
in an SM). A pipe that the four sub-partitions share (shared memory, shuffles) counts as if all four used
it at once: 128 bytes a clock for the SM are 32 for each. docs/sass_model.md gives the source of every
number; those in ASSUMED have none for the architecture and are taken from a neighbour.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .parse import Instruction

ISSUE, FMA, ALU, MUFU, LSU, TENSOR, TMEM, UNIFORM = (
    "issue", "fma", "alu", "mufu", "smem", "tensor", "tmem", "uniform",
)  # fmt: skip
PIPES = (ISSUE, FMA, ALU, MUFU, LSU, TENSOR, TMEM)

_FMA = {"FFMA", "FADD", "FMUL", "FFMA32I", "FADD32I", "FMUL32I", "HFMA2", "HADD2", "HMUL2",
        "HFMA2_MMA", "IMAD", "FSWZADD"}  # fmt: skip
_FMA_PACKED = {"FFMA2", "FADD2", "FMUL2"}
_ALU = {
    "FMNMX", "FMNMX3", "FSEL", "FSETP", "FSET", "FCHK", "LOP3", "PLOP3", "LOP", "SHF", "SHL", "SHR",
    "LEA", "IADD3", "IADD", "ISETP", "IMNMX", "VIMNMX", "VIMNMX3", "VIADD", "VIADDMNMX", "PRMT", "SEL",
    "BMSK", "SGXT", "P2R", "R2P", "F2FP", "HMNMX2", "HSETP2", "HSET2", "VABSDIFF", "IABS", "I2FP", "MOV",
    "CS2R", "VOTE", "FLO",
}  # fmt: skip
_CONVERT = {"F2F", "F2I", "I2F", "F2IP", "FRND", "POPC", "BREV"}
_SHARED = {"LDS", "LDSM", "STS", "STSM", "LD", "ST", "ATOMS", "MOVM"}
_GLOBAL = {"LDG", "STG", "LDGSTS", "ATOM", "ATOMG", "RED", "REDG", "LDL", "STL"}
_UNIFORM = re.compile(
    r"^(U(?!TC|TMA|CGABAR|BLKCP|SETMAXREG|VIRTCOUNT)\w+|R2UR|S2UR|LDCU|VOTEU|REDUX|CREDUX|ELECT)$"
)


@dataclass(frozen=True)
class Cost:
    pipe: str
    cycles: float


@dataclass(frozen=True)
class Arch:
    """Tables of one GPU generation.

    Attributes:
        mufu: cycles of one MUFU warp instruction.
        scalar_fma, packed_fma, alu: cycles of those pipes.
        f2fp_e4m3: cycles of a conversion of two fp32 to e4m3.
        mma: (pattern of the opcode, cycles in its sub-partition) of warp MMAs, first match wins.
        umma: MMA kind -> {N: cycles in the SM} of tcgen05.mma with M = 128.
        latency: opcode base -> cycles from issue to result where a scoreboard guards it.
    """

    name: str
    text: str
    mufu: float
    scalar_fma: float = 1
    packed_fma: float = 2
    alu: float = 2
    mov: float = 1
    f2fp_e4m3: float = 4
    shared_bytes: float = 32
    shuffle: float = 4
    mma: tuple[tuple[str, float], ...] = ()
    umma: Mapping[int, float] = field(default_factory=dict)
    umma_tmem_a: float = 1.0
    tmem_bytes: float = 128
    latency: Mapping[str, float] = field(default_factory=dict)
    default_latency: float = 24

    def cost(self, instruction: Instruction) -> Cost | None:
        """Pipe of an instruction besides its issue slot, or None."""
        base, mods = instruction.base, instruction.modifiers
        if base.startswith("UTC") and base.endswith("MMA"):
            return None  # asynchronous, counted for the SM
        for pattern, cycles in self.mma:
            if re.match(pattern, instruction.opcode):
                return Cost(TENSOR, cycles)
        if base == "MUFU":
            return Cost(MUFU, self.mufu)
        if base == "F2FP":
            narrow = any(m in ("E4M3", "E5M2", "E2M1", "E2M3", "E3M2") for m in mods)
            return Cost(ALU, self.f2fp_e4m3 if narrow else self.alu)
        if base in ("MOV", "MOV32I", "CS2R"):
            return Cost(ALU, self.mov)
        if base in _FMA_PACKED:
            return Cost(FMA, self.packed_fma)
        if base in _FMA:
            return Cost(FMA, self.packed_fma if base == "IMAD" else self.scalar_fma)
        if base in _ALU:
            return Cost(ALU, self.alu)
        if base in _CONVERT:
            return Cost(MUFU, self.mufu)
        if base == "SHFL":
            return Cost(LSU, self.shuffle)
        if base in _SHARED:
            return Cost(LSU, warp_bytes(instruction) / self.shared_bytes)
        if base in ("LDTM", "STTM"):
            return Cost(TMEM, tmem_columns(instruction) * 128 / self.tmem_bytes)
        if _UNIFORM.match(base):
            return Cost(UNIFORM, 2)
        return None

    def latency_of(self, instruction: Instruction) -> float:
        """Cycles until a scoreboard that the instruction sets is released."""
        full = ".".join((instruction.base, *instruction.modifiers[:1]))
        return self.latency.get(full, self.latency.get(instruction.base, self.default_latency))

    def umma_cycles(self, n: int, tmem_a: bool = False) -> float:
        """Cycles of the SM's tensor pipe for one tcgen05.mma with M = 128 and width ``n``."""
        for width in sorted(self.umma):
            if n <= width:
                return self.umma[width] * (self.umma_tmem_a if tmem_a else 1)
        raise ValueError(f"n: {n} is wider than the widest entry {max(self.umma, default=0)}")


def warp_bytes(instruction: Instruction) -> float:
    """Shared-memory bytes that one warp moves, without bank conflicts and broadcast."""
    mods = instruction.modifiers
    if instruction.base in ("LDSM", "STSM"):
        # A matrix is 8 x 16 bytes; the transposed 8-bit form counts 16 x 16.
        count = int(mods[-1]) if mods[-1] in ("2", "4") else 1
        return count * (256 if any("MT1616" in m or "M1616" in m for m in mods) else 128)
    for m in mods:
        if m in ("64", "128"):
            return 32 * int(m) / 8
    # why: narrower accesses still move a 4-byte bank a lane.
    return 128


def tmem_columns(instruction: Instruction) -> int:
    """32-bit columns that LDTM/STTM move for each of the warp's 32 lanes."""
    for m in instruction.modifiers:
        if re.fullmatch(r"x\d+", m):
            return int(m[1:])
    return 1


# Latencies where a scoreboard says when a result is there (fixed ones are in the stall counts).
_LATENCY = {
    "MUFU": 20, "LDS": 29, "LDSM": 33, "SHFL": 24, "SYNCS": 24, "LDTM": 36, "STTM": 24, "LDC": 28,
    "LDCU": 28, "LDG": 500, "F2F": 20, "F2I": 20, "I2F": 20, "POPC": 16, "VOTEU": 12, "R2UR": 12,
    "S2R": 24, "REDUX": 24, "CREDUX": 24, "STS": 20, "BAR": 16, "ATOMS": 60,
}  # fmt: skip

# Measured back-to-back cycles of one tcgen05.mma, M = 128, f16 (K16) and f8 (K32) alike (GB300).
_UMMA = {32: 55.5, 64: 62, 128: 80, 256: 140}

SM120 = Arch(
    "sm_120",
    "GeForce/RTX PRO Blackwell, GB20x",
    mufu=8,
    mma=(
        (r"QMMA\.SF\.16832", 16),
        (r"OMMA\.SF\.16864", 16),
        (r"QMMA\.16832\.F32", 32),
        (r"QMMA\.16832\.F16", 16),
        (r"HMMA\.16816\.F32", 32),
        (r"HMMA\.16816\.F16", 16),
        (r"HMMA\.1688\.F32", 16),
        (r"IMMA\.16832", 16),
    ),
    latency={**_LATENCY, "QMMA": 35, "OMMA": 35, "HMMA": 35},
)
SM100 = Arch("sm_100", "B200", mufu=8, umma=_UMMA, umma_tmem_a=0.9, latency=_LATENCY)
SM103 = Arch("sm_103", "B300", mufu=4, umma=_UMMA, umma_tmem_a=0.9, latency=_LATENCY)
ARCHS = {a.name: a for a in (SM120, SM100, SM103)}
ARCHS["sm_121"] = SM120

# Where no measurement of this architecture is known; sensitivity is in docs/sass_model.md.
ASSUMED = ("sm_120 f2fp_e4m3", "sm_120 alu", "sm_120 OMMA", "latencies of scoreboards")


def arch_of(target: str) -> Arch:
    """Tables for a target such as "sm_120a".

    Raises:
        ValueError: no tables for it.
    """
    name = target.rstrip("af")
    if name not in ARCHS:
        raise ValueError(f"target: no cycle table for {target!r}; known: {', '.join(ARCHS)}")
    return ARCHS[name]


def mma_flop(instruction: Instruction) -> int:
    """Multiply-adds times two of a warp MMA, from its shape modifier; 0 for others."""
    if not instruction.base.endswith("MMA") or instruction.base.startswith("UTC"):
        return 0
    for m in instruction.modifiers:
        if re.fullmatch(r"168\d{1,2}", m):
            return 2 * 16 * 8 * int(m[3:])
    return 0
