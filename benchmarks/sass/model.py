# SPDX-License-Identifier: Apache-2.0
"""Counts and pipe bounds of one loop trip."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import flow, weights
from .parse import Function, Instruction
from .weights import Arch


@dataclass(frozen=True)
class Body:
    """The hot path of one trip of a loop."""

    function: str
    address: int  # of the loop's first instruction
    code: tuple[Instruction, ...]
    whole: int  # instructions of the loop with its cold branches
    addresses: frozenset[int]  # of all of them

    def contains(self, other: Body) -> bool:
        return other.addresses < self.addresses

    def count(self, *bases: str) -> int:
        return sum(i.base in bases for i in self.code)

    @property
    def kinds(self) -> Counter[str]:
        return Counter(i.base for i in self.code)

    @property
    def mma(self) -> Counter[str]:
        """Matrix instructions by opcode."""
        return Counter(i.opcode for i in self.code if flow.key_weight(i) >= 1000)

    @property
    def flop(self) -> int:
        """Of the warp MMAs."""
        return sum(weights.mma_flop(i) for i in self.code)

    @property
    def score_columns(self) -> int:
        """Tensor Memory columns loaded, each one score for each of a warp's lanes."""
        return sum(weights.tmem_columns(i) for i in self.code if i.base == "LDTM")


def bodies(function: Function) -> list[Body]:
    """Every loop of a function that is not a wait, innermost first."""
    graph = flow.Flow(function)
    found = []
    for loop in graph.loops:
        if graph.is_spin(loop):
            continue
        code = graph.instructions(graph.hot_path(loop, flow.key_weight))
        address = function.instructions[graph.blocks[loop.header].begin].address
        every = frozenset(i.address for i in graph.instructions(loop.blocks))
        found.append(Body(function.name, address, tuple(code), len(every), every))
    return found


def warp_mma_loop(found: Sequence[Body]) -> Body | None:
    """The main loop of a kernel of warp MMAs: of the innermost loops with the most matrix work, the one
    with the shortest path, i.e. without masks."""
    loops = [b for b in found if b.flop]
    innermost = [b for b in loops if not any(b.contains(other) for other in loops)]
    most = max((b.flop for b in innermost), default=0)
    return min((b for b in innermost if b.flop == most), key=lambda b: len(b.code), default=None)


def softmax_loop(found: Sequence[Body]) -> Body | None:
    """The softmax loop of a Tensor Memory kernel: the innermost one that waits for scores, loads them
    and takes exponentials; of two (with and without masks) the shorter path."""
    loops = [b for b in found if b.count("MUFU") > 1 and b.score_columns and b.count("SYNCS")]
    if not loops:
        return None
    innermost = [b for b in loops if not any(b.contains(other) for other in loops)]
    return min(innermost, key=lambda b: len(b.code))


def umma_loop(found: Sequence[Body]) -> Body | None:
    """The loop of the warp that issues tcgen05.mma."""
    with_mma = [b for b in found if any(op.startswith("UTC") for op in b.mma)]
    return min(with_mma, key=lambda b: b.whole, default=None)


@dataclass(frozen=True)
class Bound:
    """Cycles of one sub-partition per trip of one warp."""

    cycles: dict[str, float]
    unknown: Counter[str] = field(default_factory=Counter)

    @property
    def limit(self) -> tuple[str, float]:
        return max(self.cycles.items(), key=lambda item: item[1])


_NO_PIPE = {
    "NOP", "BRA", "BSSY", "BSYNC", "BAR", "SYNCS", "WARPSYNC", "EXIT", "NANOSLEEP", "DEPBAR", "FENCE",
    "LDGDEPBAR", "UTCBAR", "UTCCP", "UTMALDG", "UTMASTG", "UTMACMDFLUSH", "UTMACCTL", "UTMAPF", "UBLKCP",
    "LDC", "S2R", "MEMBAR", "ERRBAR", "CCTL", "USETMAXREG", "RPCMOV", "BPT", "YIELD", "CALL", "RET",
    "WARPGROUP", "ARRIVES", "LEPC", "BRX", "UTCATOMSWS", "ACQBULK", "PREEXIT", "UCGABAR_ARV",
}  # fmt: skip


def bound(code: Sequence[Instruction], arch: Arch) -> Bound:
    """Cycles that each pipe needs for ``code`` in one sub-partition."""
    cycles = dict.fromkeys(weights.PIPES, 0.0)
    unknown: Counter[str] = Counter()
    for instruction in code:
        cycles[weights.ISSUE] += 1
        cost = arch.cost(instruction)
        if cost is None:
            base = instruction.base
            known = base in _NO_PIPE or base.startswith("UTC") or base in weights._GLOBAL
            if not known:
                unknown[base] += 1
        elif cost.pipe in cycles:
            cycles[cost.pipe] += cost.cycles
    return Bound(cycles, unknown)
