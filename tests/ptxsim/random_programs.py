# SPDX-License-Identifier: Apache-2.0
"""Random straight-line PTX programs, for the simulator and for a GPU.

    python tests/ptxsim/random_programs.py out.json [raw.json]

runs them on GPU 0 and writes the golden file; standard library only. A program is 64 instructions in
single assignment over 16-, 32- and 64-bit registers and predicates; sources are inputs or earlier
results, mostly of the type that the instruction reads, sometimes any bits of that width. Every result
is stored. NaN results of arithmetic are replaced by one NaN, since PTX leaves their bits open (the
one-instruction cases pin them). All rounding is explicit (PTX may fuse a mul and an add that name no
rounding) and approximate functions are left out, so results are defined to the bit. The GPU's compiler
runs without optimisation: with it, driver 580.159.04 gave other results for two percent of the programs,
each where neighbours were merged (abs.s16 of -32768 used as +32768, a shift by cnot, xorsign of an abs).
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import random
import re
import struct
import sys
import zlib
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

VERSION = 1
PROGRAMS = 320
STEPS = 64
# In these the GPU's compiler (driver 580.159.04, also without optimisation) takes the f32 result of a
# `set` for an integer: a guarded-off set.*.f32.f32 converts the old value of its destination to f32, and
# a shift by the result 1.0f (0x3f800000) shifts by one. The instruction alone is right (set.*.f32.f32 in
# the one-instruction cases), so these programs say nothing about the simulator.
EXCLUDED = (57, 99, 201, 299, 318)
WIDTH = {"i16": 16, "f16": 16, "bf16": 16, "i32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32}
WIDTH |= {"i64": 64, "f64": 64}
_REGISTER = {16: "%h", 32: "%x", 64: "%d"}
_INPUTS = (*["i64"] * 3, *["f64"] * 3, *["i32"] * 4, *["f32"] * 5, "f16x2", "f16x2", "bf16x2")
_INPUTS += ("bf16x2", "i16", "i16", "f16", "f16", "bf16", "bf16")
_ROW = (sum(WIDTH[k] for k in _INPUTS) // 8 + 7) // 8 * 8

# "opcode = destination, sources": (a|b) one of, [a] optional. Sources: a type, `sh` a shift amount
# (half of them below 64), `byte` one of 0..255, `p` a predicate, `lut` an 8-bit immediate.
# Destination `p` makes two.
_TABLE = """
(add|sub|min|max|mul.lo|mul.hi|div|rem).(u|s)16 = i16, i16 i16
(add|sub|min|max|mul.lo|mul.hi|div|rem).(u|s)32 = i32, i32 i32
(add|sub|min|max|mul.lo|mul.hi|div|rem).(u|s)64 = i64, i64 i64
mad.lo.(u|s)16 = i16, i16 i16 i16
(mad.lo|mad.hi|sad).(u|s)32 = i32, i32 i32 i32
(mad.lo|mad.hi|sad).(u|s)64 = i64, i64 i64 i64
mul.wide.(u|s)16 = i32, i16 i16
mul.wide.(u|s)32 = i64, i32 i32
mad.wide.(u|s)16 = i32, i16 i16 i32
mad.wide.(u|s)32 = i64, i32 i32 i64
mul24.(lo|hi).(u|s)32 = i32, i32 i32
mad24.(lo|hi).(u|s)32 = i32, i32 i32 i32
(add|sub).sat.s32 = i32, i32 i32
mad.hi.sat.s32 = i32, i32 i32 i32
max.relu.s32 = i32, i32 i32
(abs|neg).s32 = i32, i32
(abs|neg).s16 = i16, i16
(abs|neg).s64 = i64, i64
(add|min|max).(u|s)16x2 = i32, i32 i32
(min|max).relu.s16x2 = i32, i32 i32
(popc|clz).b32 = i32, i32
(popc|clz).b64 = i32, i64
bfind[.shiftamt].(u|s)32 = i32, i32
bfind[.shiftamt].(u|s)64 = i32, i64
brev.b32 = i32, i32
brev.b64 = i64, i64
bfe.(u|s)32 = i32, i32 sh sh
bfe.(u|s)64 = i64, i64 sh sh
bfi.b32 = i32, i32 i32 sh sh
bfi.b64 = i64, i64 i64 byte byte
szext.(clamp|wrap).(u|s)32 = i32, i32 sh
bmsk.(clamp|wrap).b32 = i32, sh sh
dp4a.(u|s)32.(u|s)32 = i32, i32 i32 i32
dp2a.(lo|hi).(u|s)32.(u|s)32 = i32, i32 i32 i32
(and|or|xor).b16 = i16, i16 i16
(and|or|xor).b32 = i32, i32 i32
(and|or|xor).b64 = i64, i64 i64
(not|cnot).b16 = i16, i16
(not|cnot).b32 = i32, i32
(not|cnot).b64 = i64, i64
lop3.b32 = i32, i32 i32 i32 lut
shf.(l|r).(clamp|wrap).b32 = i32, i32 i32 sh
shl.b16 = i16, i16 sh
shl.b32 = i32, i32 sh
shl.b64 = i64, i64 sh
shr.(b|u|s)16 = i16, i16 sh
shr.(b|u|s)32 = i32, i32 sh
shr.(b|u|s)64 = i64, i64 sh
prmt.b32[.f4e|.b4e|.rc8|.ecl|.ecr|.rc16] = i32, i32 i32 i32
(add|sub|mul).(rn|rz|rm|rp)[.ftz][.sat].f32 = f32, f32 f32
fma.(rn|rz|rm|rp)[.ftz][.sat].f32 = f32, f32 f32 f32
(rcp|sqrt).(rn|rz|rm|rp)[.ftz].f32 = f32, f32
div.(rn|rz|rm|rp)[.ftz].f32 = f32, f32 f32
(min|max)[.ftz][.NaN][.xorsign.abs].f32 = f32, f32 f32
(abs|neg)[.ftz].f32 = f32, f32
copysign.f32 = f32, f32 f32
(add|sub|mul|div).(rn|rz|rm|rp).f64 = f64, f64 f64
fma.(rn|rz|rm|rp).f64 = f64, f64 f64 f64
(rcp|sqrt).(rn|rz|rm|rp).f64 = f64, f64
(min|max).f64 = f64, f64 f64
(abs|neg).f64 = f64, f64
copysign.f64 = f64, f64 f64
(add|sub|mul).rn[.ftz][.sat].f16 = f16, f16 f16
(add|sub|mul).rn[.ftz][.sat].f16x2 = f16x2, f16x2 f16x2
fma.rn[.ftz][.sat|.relu].f16 = f16, f16 f16 f16
fma.rn[.ftz][.sat|.relu].f16x2 = f16x2, f16x2 f16x2 f16x2
(min|max)[.NaN][.xorsign.abs].f16 = f16, f16 f16
(min|max)[.NaN][.xorsign.abs].f16x2 = f16x2, f16x2 f16x2
(abs|neg).f16 = f16, f16
(abs|neg).f16x2 = f16x2, f16x2
(add|sub|mul).rn.bf16 = bf16, bf16 bf16
(add|sub|mul).rn.bf16x2 = bf16x2, bf16x2 bf16x2
fma.rn[.relu].bf16 = bf16, bf16 bf16 bf16
fma.rn[.relu].bf16x2 = bf16x2, bf16x2 bf16x2 bf16x2
(min|max)[.NaN][.xorsign.abs].bf16 = bf16, bf16 bf16
(min|max)[.NaN][.xorsign.abs].bf16x2 = bf16x2, bf16x2 bf16x2
(abs|neg).bf16 = bf16, bf16
(abs|neg).bf16x2 = bf16x2, bf16x2
setp.(eq|ne|lt|le|gt|ge).(u|s)16 = p, i16 i16
setp.(eq|ne|lt|le|gt|ge).(u|s)32 = p, i32 i32
setp.(eq|ne|lt|le|gt|ge).(u|s)64 = p, i64 i64
setp.(eq|ne|lt|le|gt|ge).(and|or|xor).(u|s)32 = p, i32 i32 p
setp.(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)[.ftz].f32 = p, f32 f32
setp.(eq|lt|ge|neu|gtu|num|nan).(and|or|xor)[.ftz].f32 = p, f32 f32 p
setp.(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan).f64 = p, f64 f64
setp.(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)[.ftz].f16x2 = p, f16x2 f16x2
setp.(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan).bf16x2 = p, bf16x2 bf16x2
set.(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)[.ftz].(f32|u32|s32).f32 = i32, f32 f32
set.(eq|ne|lt|le|gt|ge).(and|or|xor).u32.(u|s)32 = i32, i32 i32 p
selp.b16 = i16, i16 i16 p
selp.b32 = i32, i32 i32 p
selp.f32 = f32, f32 f32 p
selp.b64 = i64, i64 i64 p
slct.b32.s32 = i32, i32 i32 i32
slct.f32.f32 = f32, f32 f32 f32
slct.b64.s32 = i64, i64 i64 i32
mov.b32 = f32, i32
mov.b64 = f64, i64
"""

_CROSS_LANE = """
shfl.sync.(bfly|idx).b32 = i32, i32 lane clamp all
vote.sync.ballot.b32 = i32, p all
redux.sync.(add|min|max).(u|s)32 = i32, i32 all
redux.sync.(and|or|xor).b32 = i32, i32 all
"""


def _convert_table() -> list[str]:
    ints = [(f"{k}{b}", b) for k in "us" for b in (8, 16, 32, 64)]
    floats = {"f16": 16, "f32": 32, "f64": 64}
    reg = {8: "i16", 16: "i16", 32: "i32", 64: "i64"}
    out = []
    for (d, db), (s, sb) in product(ints, repeat=2):
        if d != s:
            # ptxas refuses .sat where no value can be out of range.
            fits = (d[0] == s[0] and db >= sb) or (d[0] == "s" and s[0] == "u" and db > sb)
            out.append(f"cvt{'' if fits else '[.sat]'}.{d}.{s} = {reg[db]}, {reg[sb]}")
    for (f, _), (i, ib) in product(floats.items(), ints):
        out.append(f"cvt.(rni|rzi|rmi|rpi).{i}.{f} = {reg[ib]}, {f}")
        out.append(f"cvt.(rn|rz|rm|rp).{f}.{i} = {f}, {reg[ib]}")
    out += [f"cvt.(rn|rz|rm|rp).{d}.{s} = {d}, {s}" for d, s in (("f16", "f32"), ("f16", "f64"))]
    out += ["cvt.(rn|rz|rm|rp)[.ftz].f32.f64 = f32, f64", "cvt.f64.f32 = f64, f32"]
    out += ["cvt.f32.f16 = f32, f16", "cvt.f64.f16 = f64, f16", "cvt.f32.bf16 = f32, bf16"]
    out += [f"cvt.(rni|rzi|rmi|rpi).{f}.{f} = {f}, {f}" for f in floats]
    out.append("cvt.(rn|rz)[.relu][.satfinite].bf16.f32 = bf16, f32")
    out.append("cvt.(rn|rz)[.relu][.satfinite].f16.f32 = f16, f32")
    out += [f"cvt.(rn|rz)[.relu][.satfinite].{t}.f32 = {t}, f32 f32" for t in ("f16x2", "bf16x2")]
    out.append("cvt.rna.tf32.f32 = f32, f32")
    out.append("cvt.rn.satfinite[.relu].(e4m3x2|e5m2x2).f32 = i16, f32 f32")
    out.append("cvt.rn.satfinite[.relu].(e4m3x2|e5m2x2).f16x2 = i16, f16x2")
    out.append("cvt.rn[.relu].f16x2.(e4m3x2|e5m2x2) = f16x2, i16")
    out.append("cvt.pack.sat.(u16|s16).s32 = i32, i32 i32")
    out.append("cvt.pack.sat.u8.s32.b32 = i32, i32 i32 i32")
    return out


def _rows(text: str) -> list[tuple[str, str, tuple[str, ...]]]:
    rows = []
    for line in text.strip().splitlines():
        opcode, operands = line.split(" = ")
        target, sources = operands.split(", ")
        rows.append((opcode, target, tuple(sources.split())))
    return rows


_PLAIN = _rows(_TABLE)
_CONVERT = _rows("\n".join(_convert_table()))
_LANES = _rows(_CROSS_LANE)
_CARRY = ("add", "sub")
_MASK = {"sh": 63, "byte": 255, "lane": 31}
_NAN = {"f16": "0x7e00", "bf16": "0x7fc0", "f32": "0x7fc00000", "f64": "0x7ff8000000000000"}


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        seed: names it; also the seed of its inputs.
        lanes: threads of its one block, 32 or 64.
        opcodes: the instruction of every step.
        places: (byte offset in a lane's output row, bytes) of every result, with the step it is of.
        row: bytes of a lane's output row.
        text: the PTX module, kernel ``k(in, out)``.
    """

    seed: int
    lanes: int
    opcodes: tuple[str, ...]
    places: tuple[tuple[int, int, int], ...]
    row: int
    text: str

    def columns(self, output: bytes) -> list[bytes]:
        """The bytes of every result, lane after lane; padding of the rows left out."""
        return [
            b"".join(
                output[lane * self.row + offset : lane * self.row + offset + size]
                for lane in range(self.lanes)
            )
            for offset, size, _ in self.places
        ]


def _choose(rng: random.Random, pattern: str) -> str:
    text = re.sub(r"\(([^()]*)\)", lambda m: rng.choice(m[1].split("|")), pattern)

    def optional(match: re.Match[str]) -> str:
        return rng.choice(match[1].split("|")) if rng.random() < 0.4 else ""

    return re.sub(r"\[([^\[\]]*)\]", optional, text)


class _Writer:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed * 2654435761 + VERSION)
        self.lines: list[str] = []
        self.known: dict[str, list[str]] = {kind: [] for kind in WIDTH}
        self.inputs: dict[str, list[str]] = {kind: [] for kind in WIDTH}
        self.predicates = ["%p0", "%p1"]
        self.count = {16: 0, 32: 0, 64: 0, "p": 2, "t": 0}
        self.opcodes: list[str] = []
        self.results: list[tuple[str, int, int]] = []

    def fresh(self, kind: str) -> str:
        width = WIDTH[kind]
        self.count[width] += 1
        return f"{_REGISTER[width]}{self.count[width] - 1}"

    def scratch(self) -> str:
        self.count["t"] += 1
        return f"%t{self.count['t'] - 1}"

    def value(self, kind: str) -> str:
        rng = self.rng
        if rng.random() < 0.12:
            kind = rng.choice([k for k in WIDTH if WIDTH[k] == WIDTH[kind]])
        if self.known[kind] and rng.random() < 0.6:
            # Results fade to NaN and zero along a chain; inputs keep the operands alive.
            return rng.choice(self.known[kind][-6:])
        return rng.choice(self.inputs[kind])

    def source(self, kind: str) -> str:
        rng = self.rng
        if kind == "p":
            return rng.choice(self.predicates[-8:])
        if kind == "lut":
            return str(rng.randrange(256))
        if kind == "all":
            return "-1"
        if kind == "clamp":
            return str(rng.choice((0x1F, 0x181F, 0x1C1F, 0x1807)))
        value = self.value("i32" if kind in _MASK else kind)
        if kind not in _MASK or (kind == "sh" and rng.random() < 0.5):
            return value
        small = self.scratch()
        self.lines.append(f"and.b32 {small}, {value}, {_MASK[kind]};")
        return small

    def one_nan(self, kind: str, register: str) -> str:
        """A copy of ``register`` with one NaN for all: PTX leaves sign and payload of a computed NaN
        open, and what the GPU gives depends on the operand order that its compiler picks."""
        base, copy = kind.removesuffix("x2"), self.fresh(kind)
        bits = WIDTH[base]
        if base == kind:
            self.lines.append(f"setp.nan.{base} %nan0, {register}, {register};")
            self.lines.append(f"selp.b{bits} {copy}, {_NAN[base]}, {register}, %nan0;")
            return copy
        self.lines.append(f"mov.b32 {{%lo, %hi}}, {register};")
        for k, half in enumerate(("%lo", "%hi")):
            self.lines.append(f"setp.nan.{base} %nan{k}, {half}, {half};")
            self.lines.append(f"selp.b16 {half}, {_NAN[base]}, {half}, %nan{k};")
        self.lines.append(f"mov.b32 {copy}, {{%lo, %hi}};")
        return copy

    def keep(self, kind: str, register: str, step: int) -> None:
        self.known[kind].append(register)
        self.results.append((register, WIDTH[kind] // 8, step))

    def compare(self, opcode: str, sources: list[str], step: int) -> None:
        pair = [f"%p{self.count['p'] + k}" for k in range(2)]
        self.count["p"] += 2
        self.lines.append(f"{opcode} {pair[0]}|{pair[1]}, {', '.join(sources)};")
        self.predicates += pair
        kept = self.scratch()
        other = self.scratch()
        self.lines.append(f"selp.b32 {kept}, 1, 0, {pair[0]};")
        self.lines.append(f"selp.b32 {other}, 2, 0, {pair[1]};")
        self.lines.append(f"or.b32 {kept}, {kept}, {other};")
        self.results.append((kept, 4, step))

    def carry(self, step: int) -> str:
        """A chain of two instructions through the carry flag."""
        op, kind = self.rng.choice(_CARRY), self.rng.choice(("i32", "i64"))
        t = "u32" if kind == "i32" else "u64"
        low, high = self.fresh(kind), self.fresh(kind)
        a, b, c, d = (self.source(kind) for _ in range(4))
        self.lines.append(f"{op}.cc.{t} {low}, {a}, {b};")
        self.lines.append(f"{op}c.{t} {high}, {c}, {d};")
        self.keep(kind, low, step)
        self.keep(kind, high, step)
        return f"{op}.cc.{t}+{op}c.{t}"

    def step(self, step: int) -> None:
        rng = self.rng
        dice = rng.random()
        if dice < 0.03:
            self.opcodes.append(self.carry(step))
            return
        table = _LANES if dice < 0.07 else _CONVERT if dice < 0.3 else _PLAIN
        pattern, target, kinds = rng.choice(table)
        opcode = _choose(rng, pattern)
        sources = [self.source(kind) for kind in kinds]
        if kinds[-1] == "p" and opcode.startswith("setp") and rng.random() < 0.5:
            sources[-1] = "!" + sources[-1]
        self.opcodes.append(opcode)
        if target == "p":
            self.compare(opcode, sources, step)
            return
        guard = ""
        register = self.fresh(target)
        if table is not _LANES and rng.random() < 0.1:
            bits = WIDTH[target]
            self.lines.append(f"mov.b{bits} {register}, {self.value(target)};")
            guard = f"@{rng.choice(('', '!'))}{self.source('p')} "
        self.lines.append(f"{guard}{opcode} {register}, {', '.join(sources)};")
        if target[0] in "fb" and opcode.split(".")[0] not in ("selp", "slct", "mov"):
            register = self.one_nan(target, register)
        self.keep(target, register, step)


def program(seed: int) -> Program:
    """The program of a seed."""
    writer = _Writer(seed)
    loads = []
    offset = 0
    for kind in _INPUTS:
        register = writer.fresh(kind)
        writer.inputs[kind].append(register)
        loads.append(f"ld.global.b{WIDTH[kind]} {register}, [%in+{offset}];")
        offset += WIDTH[kind] // 8
    a, b = writer.inputs["i32"][:2]
    loads += [f"setp.lt.s32 %p0, {a}, {b};", f"setp.gt.u32 %p1, {a}, {b};"]
    for step in range(STEPS):
        writer.step(step)
    places, stores = [], []
    row = 0
    for register, size, step in writer.results:
        row = (row + size - 1) // size * size
        places.append((row, size, step))
        stores.append(f"st.global.b{size * 8} [%out+{row}], {register};")
        row += size
    row = (row + 15) // 16 * 16
    n = writer.count
    body = "\n".join((*loads, *writer.lines, *stores))
    text = f""".version 8.4
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 in, .param .u64 out)
{{
.reg .b16 %h<{n[16]}>;
.reg .b32 %x<{n[32]}>;
.reg .b64 %d<{n[64]}>;
.reg .b32 %t<{n["t"] + 1}>;
.reg .pred %p<{n["p"]}>;
.reg .pred %nan0, %nan1;
.reg .b16 %lo, %hi;
.reg .b64 %in, %out;
.reg .b32 %lane;
ld.param.u64 %in, [in];
ld.param.u64 %out, [out];
mov.u32 %lane, %tid.x;
mad.wide.u32 %in, %lane, {_ROW}, %in;
mad.wide.u32 %out, %lane, {row}, %out;
{body}
ret;
}}
"""
    lanes = 32 + 32 * (seed % 2)
    return Program(seed, lanes, tuple(writer.opcodes), tuple(places), row, text)


def _hex(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


_SPECIAL = {
    "i": (0, 1, 2, 3, 31, 32, 33, 64, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF),
    # 0, one, Inf, quiet and signalling NaN, smallest and largest (de)normals, integer limits.
    "f32": _hex(
        "0 3f800000 7f800000 7fc00000 7fa00001 1 7fffff 800000 7f7fffff 4b000000 4effffff 4f000000 "
        "5f000000 34000000 3effffff 3f000000 1f800000 477fe000 33000001 3f7fffff 3f8ccccd"
    ),
    "f64": _hex(
        "0 3ff0000000000000 7ff0000000000000 7ff8000000000000 7ff4000000000001 1 fffffffffffff "
        "10000000000000 7fefffffffffffff 41dfffffffc00000 41e0000000000000 43e0000000000000 "
        "380fffffffffffff 3690000000000000 47efffffe0000000 47efffffefffffff 3fefffffffffffff"
    ),
    "f16": _hex("0 3c00 7c00 7e00 7d01 1 3ff 400 7bff 3555 6400 57bf 5f00 3800 37ff 0401"),
    "bf16": _hex("0 3f80 7f80 7fc0 7fa1 1 7f 80 7f7f 43e0 43e1 3e80 4f00 5f00 3f00 4780"),
}
# First and last exponent of ordinary values, and where the exponent field is.
_ORDINARY = {
    "f32": (107, 147, 23),
    "f64": (993, 1053, 52),
    "f16": (9, 22, 10),
    "bf16": (112, 142, 7),
}


def _number(rng: random.Random, kind: str, bits: int) -> int:
    dice = rng.random()
    if kind == "i":
        if dice < 0.35:
            base = rng.choice(_SPECIAL["i"])
            base = rng.choice((base, -base, base << (bits - 16), (1 << (bits - 1)) - base))
            return base & ((1 << bits) - 1)
        return rng.getrandbits(rng.choice((bits, bits, 8, bits // 2)))
    sign = rng.getrandbits(1) << (bits - 1)
    if dice < 0.3:
        return sign | rng.choice(_SPECIAL[kind])
    if dice < 0.8:
        first, last, shift = _ORDINARY[kind]
        return sign | rng.randrange(first, last) << shift | rng.getrandbits(shift)
    return rng.getrandbits(bits)


def inputs(seed: int, lanes: int) -> bytes:
    """One row of inputs per lane, little-endian."""
    rng = random.Random(seed * 40503 + 17)
    out = bytearray()
    for _ in range(lanes):
        row = bytearray()
        for kind in _INPUTS:
            base = kind.removesuffix("x2")
            base = "i" if base[0] == "i" else base
            count = 2 if kind.endswith("x2") else 1
            bits = WIDTH[kind] // count
            word = sum(_number(rng, base, bits) << bits * k for k in range(count))
            row += word.to_bytes(WIDTH[kind] // 8, "little")
        out += row.ljust(_ROW, b"\0")
    return bytes(out)


def golden_entry(made: Program, output: bytes) -> dict[str, str]:
    """What the golden file keeps: a digest of everything, a checksum per result, lane 0 in full."""
    columns = made.columns(output)
    checks = struct.pack(f"<{len(columns)}H", *(zlib.crc32(c) & 0xFFFF for c in columns))
    first = b"".join(c[:size] for c, (_, size, _) in zip(columns, made.places, strict=True))
    return {
        "digest": hashlib.sha256(b"".join(columns)).hexdigest()[:32],
        "results": base64.b64encode(checks).decode(),
        "lane0": base64.b64encode(first).decode(),
    }


def difference(made: Program, output: bytes, golden: dict[str, str]) -> str:
    """Where an output first departs from the golden entry; empty when it does not."""
    mine = golden_entry(made, output)
    if mine == golden:
        return ""
    theirs, ours = (
        struct.unpack(f"<{len(made.places)}H", base64.b64decode(entry["results"]))
        for entry in (golden, mine)
    )
    lane0 = base64.b64decode(golden["lane0"])
    position = 0
    for index, (_, size, step) in enumerate(made.places):
        want = lane0[position : position + size]
        position += size
        if theirs[index] != ours[index]:
            got = made.columns(output)[index][:size]
            return (
                f"program {made.seed}, instruction {step}: {made.opcodes[step]}; lane 0: "
                f"gpu 0x{want[::-1].hex()}, simulator 0x{got[::-1].hex()}"
            )
    return f"program {made.seed}: the digest differs, no checksum does"


def unoptimised(gpu: Any) -> None:
    """Makes ``gpu`` (a gpu_runner.Gpu) translate modules without optimisation."""
    load = gpu.cu.cuModuleLoadDataEx
    key = (ctypes.c_int * 1)(7)  # CU_JIT_OPTIMIZATION_LEVEL
    value = (ctypes.c_void_p * 1)(None)
    gpu.cu.cuModuleLoadDataEx = lambda module, text, *_: load(module, text, 1, key, value)


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent))
    import gpu_runner

    gpu = gpu_runner.Gpu()
    unoptimised(gpu)
    out: dict[str, object] = {"version": VERSION, "gpu": gpu.name, "driver": driver_version()}
    programs: dict[str, dict[str, str]] = {}
    raw: dict[str, str] = {}
    failed = []
    for seed in range(PROGRAMS):
        made = program(seed)
        try:
            data = inputs(seed, made.lanes)
            result = gpu.run(made.text, data, made.row * made.lanes, 1, made.lanes)
        except gpu_runner.DriverError as error:
            failed.append(f"program {seed}: {error}")
            continue
        programs[str(seed)] = golden_entry(made, result)
        raw[str(seed)] = base64.b64encode(zlib.compress(result, 6)).decode()
    out["programs"] = programs
    Path(sys.argv[1]).write_text(json.dumps(out, indent=0, sort_keys=True) + "\n")
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps(raw))
    print(f"{gpu.name}, driver {out['driver']}: {len(programs)} programs, {len(failed)} failed")
    for line in failed:
        print(line)
    return 1 if failed else 0


def driver_version() -> str:
    """ "580.159.04" as the kernel module states it, or "unknown"."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found[0] if found else "unknown"


if __name__ == "__main__":
    sys.exit(main())
