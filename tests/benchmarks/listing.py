# SPDX-License-Identifier: Apache-2.0
"""Hand-written machine code for the model's tests."""

from __future__ import annotations

from pathlib import Path

from benchmarks.sass import parse
from benchmarks.sass.parse import NO_BARRIER, Function

SASS = Path(__file__).parent / "sass"


def encode(stall: int = 1, write: int = NO_BARRIER, read: int = NO_BARRIER, wait: int = 0) -> int:
    """The high word with these scheduling fields; all else 0."""
    return (stall | write << 5 | read << 8 | wait << 11) << 41


def listing(*lines: str | tuple[str, dict[str, int]], name: str = "k") -> str:
    """nvdisasm's format. A line is "LABEL:", an instruction, or (instruction, scheduling fields)."""
    out = [f'\t.section\t.text.{name},"ax",@progbits', f".text.{name}:"]
    address = 0
    for line in lines:
        text, fields = (line, {}) if isinstance(line, str) else line
        if text.endswith(":"):
            out.append(text)
            continue
        out.append(f"        /*{address:04x}*/    {text} ;   /* 0x{0:016x} */")
        out.append(f"            /* 0x{encode(**fields):016x} */")
        address += 16
    return "\n".join(out) + "\n"


def function(*lines: str | tuple[str, dict[str, int]]) -> Function:
    return parse.parse(listing(*lines))[0]


def snippet(name: str) -> list[Function]:
    """The functions of a committed listing; its source and compiler line stand beside it."""
    return parse.parse((SASS / f"{name}.sass").read_text())
