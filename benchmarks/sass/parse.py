# SPDX-License-Identifier: Apache-2.0
"""nvdisasm listings (with -hex) as instructions: opcode, operands, guard, scheduling fields.

The scheduling fields sit at bits 105..121 of the 128-bit encoding on every architecture since Volta:
stall cycles, yield, the scoreboard that the instruction releases when its result is written or its
operands are read, and the mask of scoreboards that it waits for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*(?:/\* (0x[0-9a-f]{16}) \*/)?\s*$"
)
_HIGH_WORD = re.compile(r"^\s*/\* (0x[0-9a-f]{16}) \*/\s*$")
_LABEL = re.compile(r"^(\.?[\w$.@]+):\s*$")
_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)")
_ANY_SECTION = re.compile(r"^\s*\.section\s+")
_GUARD = re.compile(r"^@(!?U?P\w+)\s+")
_TARGET = re.compile(r"`\(([^)]+)\)")
_TARGET_LIST = re.compile(r'\(\*"BRANCH_TARGETS ([^"]+)"\*\)')
NO_BARRIER = 7


@dataclass(frozen=True)
class Control:
    """How the compiler scheduled an instruction."""

    stall: int  # cycles until the next instruction of the warp may issue
    yields: bool
    write_barrier: int | None  # released when the result is there
    read_barrier: int | None  # released when the operands have been read
    wait: int  # mask of the barriers that must be free first

    @classmethod
    def of(cls, high: int) -> Control:
        bits = high >> 41
        write, read = (bits >> 5) & 7, (bits >> 8) & 7
        return cls(
            stall=bits & 15,
            yields=not (bits >> 4) & 1,
            write_barrier=None if write == NO_BARRIER else write,
            read_barrier=None if read == NO_BARRIER else read,
            wait=(bits >> 11) & 63,
        )


@dataclass(frozen=True)
class Instruction:
    address: int
    opcode: str  # with modifiers: "QMMA.SF.16832.F32.E4M3.E4M3.E8"
    operands: tuple[str, ...]
    guard: str  # "", "P0", "!UP1"
    control: Control
    targets: tuple[str, ...]  # labels that a branch may go to

    @property
    def base(self) -> str:
        return self.opcode.split(".", 1)[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.opcode.split(".")[1:])

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{self.address:#06x} {guard}{self.opcode} {', '.join(self.operands)}"


@dataclass(frozen=True)
class Function:
    name: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]  # label -> index of the instruction that follows it

    def index_of(self, label: str) -> int | None:
        return self.labels.get(label)


def split_operands(text: str) -> tuple[str, ...]:
    """Operands at commas outside brackets: "R4, [R2.64+0x10], c[0x0][0x37c]"."""
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char in "[({") - (char in "])}")
        if char == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    if current.strip():
        parts.append(current.strip())
    return tuple(parts)


def _instruction(address: int, text: str, high: int) -> Instruction:
    guard = _GUARD.match(text)
    if guard:
        text = text[guard.end() :]
    opcode, _, rest = text.partition(" ")
    listed = _TARGET_LIST.search(rest)  # an indirect branch
    if listed:
        targets = tuple(listed.group(1).split(","))
        rest = rest[: listed.start()]
    else:
        targets = tuple(_TARGET.findall(rest))
    return Instruction(
        address,
        opcode,
        split_operands(rest),
        guard.group(1) if guard else "",
        Control.of(high),
        targets,
    )


def parse(listing: str) -> list[Function]:
    """The functions of a listing, in its order.

    Raises:
        ValueError: an instruction without its second word, i.e. a listing made without -hex.
    """
    functions: list[Function] = []
    name: str | None = None
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    pending: tuple[int, str] | None = None

    def close() -> None:
        if name is not None and instructions:
            functions.append(Function(name, tuple(instructions), dict(labels)))
        instructions.clear()
        labels.clear()

    for line in listing.splitlines():
        if pending is not None:
            high = _HIGH_WORD.match(line)
            if not high:
                raise ValueError(
                    f"listing: {pending[1]!r} at {pending[0]:#x} has no second word; "
                    "disassemble with nvdisasm -hex"
                )
            instructions.append(_instruction(*pending, int(high.group(1), 16)))
            pending = None
            continue
        section = _SECTION.match(line)
        if section or _ANY_SECTION.match(line):
            close()
            name = section.group(1) if section else None
            continue
        if name is None:
            continue
        label = _LABEL.match(line)
        if label:
            labels[label.group(1)] = len(instructions)
            continue
        found = _INSTRUCTION.match(line)
        if found:
            if found.group(3) is None:
                raise ValueError(
                    f"listing: {found.group(2)!r} at {found.group(1)} has no encoding; "
                    "disassemble with nvdisasm -hex"
                )
            pending = (int(found.group(1), 16), found.group(2))
    close()
    return functions


def code_only(listing: str) -> str:
    """The text sections of a listing, for committed snippets."""
    kept, inside = [], False
    for line in listing.splitlines():
        if _ANY_SECTION.match(line):
            inside = bool(_SECTION.match(line))
        if inside and not line.startswith("//-----"):
            kept.append(re.sub(r"\s+(/\* 0x)", r" \1", line.rstrip()))
    return "\n".join(line for line in kept if line) + "\n"
