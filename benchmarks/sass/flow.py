# SPDX-License-Identifier: Apache-2.0
"""Control flow of a function: basic blocks, natural loops, and the hot path of one loop trip.

The hot path is the path from a loop's header back to it that executes the most key instructions (MMAs,
else Tensor Memory loads) and, among those, the fewest others: the branches that a steady state does not
take (a rescale, a mask, a soft cap, a barrier that has to spin) drop out. A loop inside the path
counts one trip unless it only spins on a barrier, which counts its first test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from .parse import Function, Instruction

_ENDS = {"EXIT", "RET", "KILL", "BPT"}
_BRANCHES = {"BRA", "JMP", "BRX", "BRXU", "JMX", "JMXU"}
_WAITS = {"SYNCS", "NANOSLEEP", "UCGABAR_WAIT"}
_HEAVY = ("MMA", "MUFU", "LDTM", "STTM", "LDSM", "FFMA", "UTCBAR", "UTMA")

KeyWeight = Callable[[Instruction], float]


@dataclass(frozen=True)
class Block:
    index: int
    begin: int
    end: int  # one past its last instruction
    successors: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """A natural loop: ``blocks`` includes those of the loops inside it."""

    header: int
    blocks: frozenset[int]
    latches: frozenset[int]

    def contains(self, other: Loop) -> bool:
        return other.blocks < self.blocks


def _always(instruction: Instruction) -> bool:
    """A branch that never falls through: indirect, or without guard and predicate operand."""
    if instruction.base not in ("BRA", "JMP"):
        return True
    if instruction.guard and instruction.guard not in ("PT", "UPT"):
        return False
    return not any(
        o.lstrip("!").startswith(("P", "UP")) and o not in ("PT", "UPT")
        for o in instruction.operands[:-1]
    )


class Flow:
    """Blocks and loops of one function."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.blocks = self._build_blocks()
        self._block_at = {block.begin: block.index for block in self.blocks}

    def _build_blocks(self) -> list[Block]:
        code = self.function.instructions
        starts = {0}
        for label in self.function.labels.values():
            starts.add(label)
        for i, instruction in enumerate(code):
            if instruction.base in _BRANCHES or instruction.base in _ENDS:
                starts.add(i + 1)
        ordered = sorted(s for s in starts if s < len(code))
        number = {begin: n for n, begin in enumerate(ordered)}
        blocks = []
        for n, begin in enumerate(ordered):
            end = ordered[n + 1] if n + 1 < len(ordered) else len(code)
            last = code[end - 1]
            successors: list[int] = []
            if last.base in _BRANCHES:
                for target in last.targets:
                    index = self.function.index_of(target)
                    if index is not None and index in number:
                        successors.append(number[index])
                if not _always(last) and n + 1 < len(ordered):
                    successors.append(n + 1)
            elif last.base in _ENDS:
                if last.guard and n + 1 < len(ordered):
                    successors.append(n + 1)
            elif n + 1 < len(ordered):
                successors.append(n + 1)
            blocks.append(Block(n, begin, end, tuple(dict.fromkeys(successors))))
        return blocks

    def instructions(self, blocks: Iterable[int]) -> list[Instruction]:
        """The instructions of ``blocks``, block after block in the order given."""
        code = self.function.instructions
        found: list[Instruction] = []
        for b in blocks:
            found += code[self.blocks[b].begin : self.blocks[b].end]
        return found

    @cached_property
    def _predecessors(self) -> list[list[int]]:
        before: list[list[int]] = [[] for _ in self.blocks]
        for block in self.blocks:
            for successor in block.successors:
                before[successor].append(block.index)
        return before

    @cached_property
    def _roots(self) -> set[int]:
        """The entry, and the first block of whatever nothing above reaches."""
        roots: set[int] = set()
        seen: set[int] = set()
        for block in self.blocks:
            if block.index in seen:
                continue
            roots.add(block.index)
            work = [block.index]
            while work:
                b = work.pop()
                if b not in seen:
                    seen.add(b)
                    work += self.blocks[b].successors
        return roots

    @cached_property
    def _dominators(self) -> list[int]:
        """Bit masks of the blocks on every path to a block."""
        everything = (1 << len(self.blocks)) - 1
        found = [1 << b if b in self._roots else everything for b in range(len(self.blocks))]
        changed = True
        while changed:
            changed = False
            for b in range(len(self.blocks)):
                if b in self._roots:
                    continue
                mask = everything
                for p in self._predecessors[b]:
                    mask &= found[p]
                mask |= 1 << b
                if mask != found[b]:
                    found[b] = mask
                    changed = True
        return found

    @cached_property
    def loops(self) -> list[Loop]:
        """Natural loops, innermost (fewest blocks) first; loops with one header are one loop."""
        bodies: dict[int, set[int]] = {}
        latches: dict[int, set[int]] = {}
        for block in self.blocks:
            for header in block.successors:
                if not self._dominators[block.index] >> header & 1:
                    continue
                body = bodies.setdefault(header, {header})
                latches.setdefault(header, set()).add(block.index)
                work = [block.index]
                while work:
                    b = work.pop()
                    if b not in body:
                        body.add(b)
                        work += self._predecessors[b]
        loops = [Loop(h, frozenset(b), frozenset(latches[h])) for h, b in bodies.items()]
        return sorted(loops, key=lambda loop: (len(loop.blocks), loop.header))

    def is_spin(self, loop: Loop) -> bool:
        """A loop that waits: it tests a barrier or sleeps and computes nothing."""
        code = self.instructions(loop.blocks)
        waits = any(i.base in _WAITS for i in code)
        return waits and len(code) <= 24 and not any(_matches(i, _HEAVY) for i in code)

    def inner(self, loop: Loop) -> list[Loop]:
        """Loops inside ``loop`` that are not inside another one inside it."""
        nested = [other for other in self.loops if loop.contains(other)]
        return [n for n in nested if not any(m.contains(n) for m in nested)]

    def hot_path(self, loop: Loop, key: KeyWeight) -> list[int]:
        """Blocks of the hot path of one trip, header first."""
        inside = self.inner(loop)
        owner = {b: n for n, nested in enumerate(inside) for b in nested.blocks}
        best: dict[int, tuple[float, int, list[int]] | None] = {}

        def exits_of(nested: Loop) -> list[int]:
            return [s for b in nested.blocks for s in self.blocks[b].successors
                    if s not in nested.blocks]  # fmt: skip

        def visit(b: int) -> tuple[float, int, list[int]] | None:
            """Best continuation from block b to the header: (-key, instructions, path)."""
            if b in best:
                return best[b]
            best[b] = None  # cuts irreducible cycles
            if b in owner:
                nested = inside[owner[b]]
                path = [b] if self.is_spin(nested) else self.hot_path(nested, key)
                leaving = exits_of(nested)
                closes = loop.header in leaving
            else:
                path = [b]
                leaving = list(self.blocks[b].successors)
                closes = loop.header in leaving
            code = self.instructions(path)
            here = (-sum(key(i) for i in code), len(code))
            options = [(here[0], here[1], path)] if closes else []
            for s in dict.fromkeys(leaving):
                if s == loop.header or s not in loop.blocks:
                    continue
                rest = visit(s)
                if rest is not None:
                    options.append((here[0] + rest[0], here[1] + rest[1], path + rest[2]))
            best[b] = min(options, key=lambda o: (o[0], o[1]), default=None)
            return best[b]

        found = visit(loop.header)
        return found[2] if found else sorted(loop.blocks)


def _matches(instruction: Instruction, names: tuple[str, ...]) -> bool:
    return any(name in instruction.base for name in names)


def key_weight(instruction: Instruction) -> float:
    """What makes a path the hot one: matrix work, else Tensor Memory loads.

    why not the exponentials: a soft cap that is off would count as hot.
    """
    base = instruction.base
    if base.endswith("MMA") and base not in ("FFMA", "IMMA"):
        return 1000.0
    if base == "SYNCS" and "ARRIVE" in instruction.modifiers:
        return 1.0  # often behind a branch that one lane takes
    return 100.0 if base == "LDTM" else 0.0
