# SPDX-License-Identifier: Apache-2.0
"""One-instruction PTX kernels with fixed inputs, for the simulator and for a GPU.

Every kernel reads four 64-bit words per thread (``%a0..%a3``; ``%x*`` and ``%h*`` are their low 32
and 16 bits), runs the body and stores ``%r0, %r1``. 1024 threads, half special values, half random
bits, from a seed that depends on the case's name only.
"""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import dataclass
from itertools import product

THREADS = 1024
BLOCK = 256


@dataclass(frozen=True)
class Case:
    """A kernel body.

    Attributes:
        name: unique; also the seed of its inputs.
        body: PTX statements that set %r0 and %r1.
        data: input class: int, f32, f64, f16, bf16, small.
        ulps: 0 for exact results, else the allowed distance of the f32 in %r0.
        sm: first architecture that has the instruction.
    """

    name: str
    body: str
    data: str
    ulps: int = 0
    sm: int = 90


def _hex(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


_INT = (0, 1, 2, 31, 32, 33, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000)
_INT64 = (*_INT, 0xFFFFFFFF, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_F32 = _hex(
    "00000000 80000000 3f800000 bf800000 7f800000 ff800000 7fc00000 7f800001 ffc12345 "
    "00000001 80000001 007fffff 00800000 80800000 7f7fffff ff7fffff 3f000000 3effffff "
    "3f7fffff 3f800001 4b000000 4affffff 4f000000 4effffff cf000000 5f000000 42fe0000 "
    "c3000000 43000000 33000000"
)
_F16 = _hex(
    "0000 8000 3c00 bc00 7c00 fc00 7e00 7d01 fe55 0001 8001 03ff 0400 7bff fbff 3555 6400 57bf 5f00"
)
_BF16 = _hex("0000 8000 3f80 bf80 7f80 ff80 7fc0 7f81 0001 807f 0080 7f7f ff7f 43e0 43e1 3e80 4040")


def _word(rng: random.Random, data: str) -> int:
    if data == "small":
        return rng.randrange(-70, 70) & (1 << 64) - 1
    if rng.random() < 0.5:
        if data == "f32":
            low = rng.choice(_F32)
            return low | rng.choice(_F32) << 32
        if data in ("f16", "bf16"):
            table = _F16 if data == "f16" else _BF16
            return sum(rng.choice(table) << 16 * k for k in range(4))
        if data == "f64":
            f = struct.unpack("<f", struct.pack("<I", rng.choice(_F32)))[0]
            return struct.unpack("<Q", struct.pack("<d", f))[0]
        return rng.choice(_INT64)
    if data == "f32" and rng.random() < 0.5:
        # Exponents near one, where results do not just overflow.
        return sum(
            (rng.getrandbits(1) << 31 | rng.randrange(110, 145) << 23 | rng.getrandbits(23))
            << 32 * k
            for k in range(2)
        )
    if data == "f64" and rng.random() < 0.5:
        return rng.getrandbits(1) << 63 | rng.randrange(1000, 1050) << 52 | rng.getrandbits(52)
    return rng.getrandbits(64)


def inputs(case: Case) -> bytes:
    """THREADS x 4 little-endian 64-bit words."""
    rng = random.Random(zlib.crc32(case.name.encode()))
    return struct.pack(f"<{THREADS * 4}Q", *(_word(rng, case.data) for _ in range(THREADS * 4)))


def module(case: Case, target: str = "sm_90a", version: str = "8.4") -> str:
    return f""".version {version}
.target {target}
.address_size 64
.visible .entry k(.param .u64 in, .param .u64 out)
{{
.reg .b64 %a<4>;
.reg .b64 %r<4>;
.reg .b64 %d<4>;
.reg .b32 %x<4>;
.reg .b32 %y<8>;
.reg .b16 %h<4>;
.reg .b16 %g<4>;
.reg .pred %p<4>;
.reg .b64 %in, %out, %t64;
.reg .b32 %lane, %cta, %i;
ld.param.u64 %in, [in];
ld.param.u64 %out, [out];
mov.u32 %lane, %tid.x;
mov.u32 %cta, %ctaid.x;
mad.lo.u32 %i, %cta, {BLOCK}, %lane;
mad.wide.u32 %in, %i, 32, %in;
mad.wide.u32 %out, %i, 16, %out;
ld.global.v2.b64 {{%a0, %a1}}, [%in];
ld.global.v2.b64 {{%a2, %a3}}, [%in+16];
cvt.u32.u64 %x0, %a0;
cvt.u32.u64 %x1, %a1;
cvt.u32.u64 %x2, %a2;
cvt.u32.u64 %x3, %a3;
cvt.u16.u64 %h0, %a0;
cvt.u16.u64 %h1, %a1;
cvt.u16.u64 %h2, %a2;
cvt.u16.u64 %h3, %a3;
mov.b64 %r0, 0;
mov.b64 %r1, 0;
{case.body}
st.global.v2.b64 [%out], {{%r0, %r1}};
ret;
}}
"""


def _r32(text: str) -> str:
    return f"{text}\ncvt.u64.u32 %r0, %y0;"


def _r16(text: str) -> str:
    return f"{text}\ncvt.u64.u16 %r0, %g0;"


def _pred(text: str) -> str:
    return f"{text}\nselp.b64 %r0, 1, 0, %p0;\nselp.b64 %r1, 1, 0, %p1;"


def _regs(bits: int) -> tuple[str, str, str]:
    """Destination, source prefix, result wrapper of a width."""
    return {16: ("%g0", "%h", "16"), 32: ("%y0", "%x", "32"), 64: ("%r0", "%a", "64")}[bits]


def _wrap(bits: int, text: str) -> str:
    return {16: _r16, 32: _r32, 64: lambda t: t}[bits](text)


def _op(op: str, bits: int, sources: int) -> str:
    d, s, _ = _regs(bits)
    return _wrap(bits, f"{op} {d}, " + ", ".join(f"{s}{k}" for k in range(sources)) + ";")


def _integer() -> list[Case]:
    out = []
    types = [(f"{k}{b}", b) for k in "us" for b in (16, 32, 64)]
    for t, b in types:
        for op in ("add", "sub", "mul.lo", "mul.hi", "min", "max", "div", "rem"):
            out.append((f"{op}.{t}", _op(f"{op}.{t}", b, 2)))
        for op in ("mad.lo", "sad") + (("mad.hi",) if b > 16 else ()):
            out.append((f"{op}.{t}", _op(f"{op}.{t}", b, 3)))
        if b < 64:
            d, s = ("%y0", "%h") if b == 16 else ("%r0", "%x")
            text = f"mul.wide.{t} {d}, {s}0, {s}1;"
            out.append((f"mul.wide.{t}", _r32(text) if b == 16 else text))
            c = "%x2" if b == 16 else "%a2"
            text = f"mad.wide.{t} {d}, {s}0, {s}1, {c};"
            out.append((f"mad.wide.{t}", _r32(text) if b == 16 else text))
        d, s, _ = _regs(b)
        out.append((f"shr.{t}", _wrap(b, f"shr.{t} {d}, {s}0, %x1;")))
        out.append((f"shr_small.{t}", _wrap(b, f"and.b32 %y1, %x1, 63;\nshr.{t} {d}, {s}0, %y1;")))
        if t[0] == "s":
            out += [(f"{o}.{t}", _op(f"{o}.{t}", b, 1)) for o in ("abs", "neg")]
        if b > 16:
            out.append((f"bfind.{t}", _r32(f"bfind.{t} %y0, {s}0;")))
            out.append((f"bfind.shiftamt.{t}", _r32(f"bfind.shiftamt.{t} %y0, {s}0;")))
            out.append((f"bfe.{t}", _wrap(b, f"bfe.{t} {d}, {s}0, %x1, %x2;")))
            text = f"and.b32 %y1, %x1, 63;\nand.b32 %y2, %x2, 63;\nbfe.{t} {d}, {s}0, %y1, %y2;"
            out.append((f"bfe_small.{t}", _wrap(b, text)))
    for b in (16, 32, 64):
        d, s, _ = _regs(b)
        for op in ("and", "or", "xor"):
            out.append((f"{op}.b{b}", _op(f"{op}.b{b}", b, 2)))
        out += [(f"{o}.b{b}", _op(f"{o}.b{b}", b, 1)) for o in ("not", "cnot")]
        out.append((f"shl.b{b}", _wrap(b, f"shl.b{b} {d}, {s}0, %x1;")))
        out.append(
            (f"shl_small.b{b}", _wrap(b, f"and.b32 %y1, %x1, 63;\nshl.b{b} {d}, {s}0, %y1;"))
        )
        if b > 16:
            out += [(f"{o}.b{b}", _r32(f"{o}.b{b} %y0, {s}0;")) for o in ("popc", "clz")]
            out.append((f"brev.b{b}", _op(f"brev.b{b}", b, 1)))
            text = (
                f"and.b32 %y1, %x2, 63;\nand.b32 %y2, %x3, 63;\nbfi.b{b} {d}, {s}0, {s}1, %y1, %y2;"
            )
            out.append((f"bfi.b{b}", _wrap(b, text)))
    out += [(f"{o}.sat.s32", _op(f"{o}.sat.s32", 32, 2)) for o in ("add", "sub")]
    out.append(("mad.hi.sat.s32", _op("mad.hi.sat.s32", 32, 3)))
    for m, t in product(("lo", "hi"), ("u32", "s32")):
        out.append((f"mul24.{m}.{t}", _op(f"mul24.{m}.{t}", 32, 2)))
        out.append((f"mad24.{m}.{t}", _op(f"mad24.{m}.{t}", 32, 3)))
    for lut in (0x01, 0x1B, 0x80, 0x96, 0xC0, 0xE8, 0xFE):
        out.append((f"lop3.{lut:02x}", _r32(f"lop3.b32 %y0, %x0, %x1, %x2, {lut};")))
    for d, m in product("lr", ("clamp", "wrap")):
        out.append((f"shf.{d}.{m}", _op(f"shf.{d}.{m}.b32", 32, 3)))
        text = f"and.b32 %y1, %x2, 63;\nshf.{d}.{m}.b32 %y0, %x0, %x1, %y1;"
        out.append((f"shf_small.{d}.{m}", _r32(text)))
    for m in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"):
        out.append((f"prmt{m}", _r32(f"prmt.b32{m} %y0, %x0, %x1, %x2;")))
    for a, b in product(("u32", "s32"), repeat=2):
        out.append((f"dp4a.{a}.{b}", _op(f"dp4a.{a}.{b}", 32, 3)))
        out += [(f"dp2a.{m}.{a}.{b}", _op(f"dp2a.{m}.{a}.{b}", 32, 3)) for m in ("lo", "hi")]
    for m in ("clamp", "wrap"):
        out += [(f"szext.{m}.{t}", _op(f"szext.{m}.{t}", 32, 2)) for t in ("u32", "s32")]
        out.append((f"bmsk.{m}", _op(f"bmsk.{m}.b32", 32, 2)))
        text = f"and.b32 %y1, %x0, 63;\nand.b32 %y2, %x1, 63;\nbmsk.{m}.b32 %y0, %y1, %y2;"
        out.append((f"bmsk_small.{m}", _r32(text)))
    for t in ("u16x2", "s16x2"):
        out += [(f"{o}.{t}", _op(f"{o}.{t}", 32, 2)) for o in ("min", "max", "add")]
    out.append(("max.relu.s32", _op("max.relu.s32", 32, 2)))
    out.append(("min.relu.s16x2", _op("min.relu.s16x2", 32, 2)))
    pair = "add.cc.u32 %y0, %x0, %x1;\naddc.u32 %y1, %x2, %x3;\nmov.b64 %r0, {%y0, %y1};"
    out.append(("addc.u32", pair))
    out.append(("subc.u32", pair.replace("add", "sub")))
    out.append(("addc.u64", "add.cc.u64 %r0, %a0, %a1;\naddc.u64 %r1, %a2, %a3;"))
    out.append(("subc.u64", "sub.cc.u64 %r0, %a0, %a1;\nsubc.u64 %r1, %a2, %a3;"))
    mad = "mad.lo.cc.u32 %y0, %x0, %x1, %x2;\nmadc.hi.u32 %y1, %x0, %x1, %x3;\nmov.b64 %r0, {%y0, %y1};"
    out.append(("madc.u32", mad))
    return [Case(n, b, "small" if "sad" in n and "16" in n else "int") for n, b in out]


_CMP_I = ("eq", "ne", "lt", "le", "gt", "ge")
_CMP_F = (*_CMP_I, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def _compare() -> list[Case]:
    out = []
    for c, (k, b) in product(_CMP_I, product("us", (16, 32, 64))):
        s = _regs(b)[1]
        out.append(Case(f"setp.{c}.{k}{b}", _pred(f"setp.{c}.{k}{b} %p0|%p1, {s}0, {s}1;"), "int"))
    for c in _CMP_F:
        for f in ("", ".ftz"):
            body = _pred(f"setp.{c}{f}.f32 %p0|%p1, %x0, %x1;")
            out.append(Case(f"setp.{c}{f}.f32", body, "f32"))
        out.append(Case(f"setp.{c}.f64", _pred(f"setp.{c}.f64 %p0|%p1, %a0, %a1;"), "f64"))
        out.append(Case(f"set.{c}.f32.f32", _r32(f"set.{c}.f32.f32 %y0, %x0, %x1;"), "f32"))
        out.append(Case(f"setp.{c}.f16x2", _pred(f"setp.{c}.f16x2 %p0|%p1, %x0, %x1;"), "f16"))
        text = f"setp.{c}.bf16 %p0, %h0, %h1;\nmov.pred %p1, 0;"
        out.append(Case(f"setp.{c}.bf16", _pred(text), "bf16"))
    for op in ("and", "or", "xor"):
        text = f"setp.lt.s32 %p2, %x2, %x3;\nsetp.gt.{op}.u32 %p0|%p1, %x0, %x1, !%p2;"
        out.append(Case(f"setp.gt.{op}.u32", _pred(text), "int"))
        text = f"setp.lt.s32 %p2, %x2, %x3;\nset.le.{op}.u32.f32 %y0, %x0, %x1, %p2;"
        out.append(Case(f"set.le.{op}.u32.f32", _r32(text), "f32"))
    for p in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
        out.append(
            Case(f"testp.{p}.f32", _pred(f"testp.{p}.f32 %p0, %x0;\nmov.pred %p1, 0;"), "f32")
        )
    out.append(Case("slct.s32", _r32("slct.b32.s32 %y0, %x0, %x1, %x2;"), "int"))
    out.append(Case("slct.f32", _r32("slct.b32.f32 %y0, %x0, %x1, %x2;"), "f32"))
    out.append(Case("copysign.f32", _op("copysign.f32", 32, 2), "f32"))
    out.append(Case("copysign.f64", _op("copysign.f64", 64, 2), "f64"))
    return out


def _floating() -> list[Case]:
    out = []
    for r, f, s in product(("rn", "rz", "rm", "rp"), ("", ".ftz"), ("", ".sat")):
        for op in ("add", "sub", "mul"):
            out.append(Case(f"{op}.{r}{f}{s}.f32", _op(f"{op}.{r}{f}{s}.f32", 32, 2), "f32"))
        out.append(Case(f"fma.{r}{f}{s}.f32", _op(f"fma.{r}{f}{s}.f32", 32, 3), "f32"))
    for r in ("rn", "rz", "rm", "rp"):
        for op in ("add", "sub", "mul", "div"):
            out.append(Case(f"{op}.{r}.f64", _op(f"{op}.{r}.f64", 64, 2), "f64"))
        out.append(Case(f"fma.{r}.f64", _op(f"fma.{r}.f64", 64, 3), "f64"))
        for op in ("rcp", "sqrt"):
            out.append(Case(f"{op}.{r}.f32", _op(f"{op}.{r}.f32", 32, 1), "f32"))
            out.append(Case(f"{op}.{r}.ftz.f32", _op(f"{op}.{r}.ftz.f32", 32, 1), "f32"))
            out.append(Case(f"{op}.{r}.f64", _op(f"{op}.{r}.f64", 64, 1), "f64"))
        for f in ("", ".ftz"):
            out.append(Case(f"div.{r}{f}.f32", _op(f"div.{r}{f}.f32", 32, 2), "f32"))
    for op, f, n in product(
        ("min", "max"), ("", ".ftz"), ("", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs")
    ):
        out.append(Case(f"{op}{f}{n}.f32", _op(f"{op}{f}{n}.f32", 32, 2), "f32"))
    for op in ("min", "max"):
        out.append(Case(f"{op}.f64", _op(f"{op}.f64", 64, 2), "f64"))
        for n, t in product(("", ".NaN", ".xorsign.abs"), ("f16", "f16x2", "bf16", "bf16x2")):
            b = 32 if t.endswith("x2") else 16
            out.append(Case(f"{op}{n}.{t}", _op(f"{op}{n}.{t}", b, 2), t.removesuffix("x2")))
    for op in ("abs", "neg"):
        out.append(Case(f"{op}.f32", _op(f"{op}.f32", 32, 1), "f32"))
        out.append(Case(f"{op}.ftz.f32", _op(f"{op}.ftz.f32", 32, 1), "f32"))
        out.append(Case(f"{op}.f64", _op(f"{op}.f64", 64, 1), "f64"))
        for t in ("f16", "f16x2", "bf16", "bf16x2"):
            b = 32 if t.endswith("x2") else 16
            out.append(Case(f"{op}.{t}", _op(f"{op}.{t}", b, 1), t.removesuffix("x2")))
    for t in ("f16", "f16x2", "bf16", "bf16x2"):
        b = 32 if t.endswith("x2") else 16
        data = t.removesuffix("x2")
        for op in ("add", "sub", "mul"):
            out.append(Case(f"{op}.rn.{t}", _op(f"{op}.rn.{t}", b, 2), data))
            if data == "f16":
                out.append(Case(f"{op}.rn.ftz.sat.{t}", _op(f"{op}.rn.ftz.sat.{t}", b, 2), data))
        out.append(Case(f"fma.rn.{t}", _op(f"fma.rn.{t}", b, 3), data))
        out.append(Case(f"fma.rn.relu.{t}", _op(f"fma.rn.relu.{t}", b, 3), data))
        if data == "f16":
            out.append(Case(f"fma.rn.sat.{t}", _op(f"fma.rn.sat.{t}", b, 3), data))
    for op, ulps in (("ex2", 2), ("lg2", 4), ("rcp", 1), ("rsqrt", 2), ("sqrt", 1)):
        for f in ("", ".ftz"):
            out.append(Case(f"{op}.approx{f}.f32", _op(f"{op}.approx{f}.f32", 32, 1), "f32", ulps))
    for op in ("div.approx", "div.full", "div.approx.ftz"):
        out.append(Case(f"{op}.f32", _op(f"{op}.f32", 32, 2), "f32", 2))
    return out


def _convert() -> list[Case]:
    out = []
    ints = [(f"{k}{b}", b) for k in "us" for b in (8, 16, 32, 64)]

    def reg(bits: int) -> int:
        return max(bits, 16)

    for (d, db), (s, sb) in product(ints, repeat=2):
        if d != s:
            dr, src = _regs(reg(db))[0], _regs(reg(sb))[1]
            out.append(Case(f"cvt.{d}.{s}", _wrap(reg(db), f"cvt.{d}.{s} {dr}, {src}0;"), "int"))
            # ptxas refuses .sat where no value can be out of range.
            fits = (d[0] == s[0] and db >= sb) or (d[0] == "s" and s[0] == "u" and db > sb)
            if not fits:
                text = f"cvt.sat.{d}.{s} {dr}, {src}0;"
                out.append(Case(f"cvt.sat.{d}.{s}", _wrap(reg(db), text), "int"))
    floats = {"f16": 16, "f32": 32, "f64": 64}
    for (f, fb), (i, ib) in product(floats.items(), ints):
        fs, isrc = _regs(fb)[1], _regs(reg(ib))[1]
        for r in ("rni", "rzi", "rmi", "rpi"):
            text = f"cvt.{r}.{i}.{f} {_regs(reg(ib))[0]}, {fs}0;"
            out.append(Case(f"cvt.{r}.{i}.{f}", _wrap(reg(ib), text), f))
        for r in ("rn", "rz", "rm", "rp"):
            text = f"cvt.{r}.{f}.{i} {_regs(fb)[0]}, {isrc}0;"
            out.append(Case(f"cvt.{r}.{f}.{i}", _wrap(fb, text), "int"))
    for (d, db), (s, sb) in product(floats.items(), repeat=2):
        src = _regs(sb)[1]
        for r in (
            ("rn", "rz", "rm", "rp")
            if db < sb
            else ("rni", "rzi", "rmi", "rpi")
            if d == s
            else ("",)
        ):
            mod = f".{r}" if r else ""
            text = f"cvt{mod}.{d}.{s} {_regs(db)[0]}, {src}0;"
            out.append(Case(f"cvt{mod}.{d}.{s}", _wrap(db, text), s))
    for r, m in product(("rn", "rz"), ("", ".relu", ".satfinite", ".relu.satfinite")):
        out.append(Case(f"cvt.{r}{m}.bf16.f32", _r16(f"cvt.{r}{m}.bf16.f32 %g0, %x0;"), "f32"))
        out.append(Case(f"cvt.{r}{m}.f16.f32", _r16(f"cvt.{r}{m}.f16.f32 %g0, %x0;"), "f32"))
        for t in ("f16x2", "bf16x2"):
            text = f"cvt.{r}{m}.{t}.f32 %y0, %x0, %x1;"
            out.append(Case(f"cvt.{r}{m}.{t}.f32", _r32(text), "f32"))
    out.append(Case("cvt.rna.tf32.f32", _r32("cvt.rna.tf32.f32 %y0, %x0;"), "f32"))
    out.append(Case("cvt.f32.bf16", _r32("cvt.f32.bf16 %y0, %h0;"), "bf16"))
    for t, relu in product(("e4m3x2", "e5m2x2"), ("", ".relu")):
        text = f"cvt.rn.satfinite{relu}.{t}.f32 %g0, %x0, %x1;"
        out.append(Case(f"cvt.rn.satfinite{relu}.{t}.f32", _r16(text), "f32"))
        text = f"cvt.rn.satfinite{relu}.{t}.f16x2 %g0, %x0;"
        out.append(Case(f"cvt.rn.satfinite{relu}.{t}.f16x2", _r16(text), "f16"))
        text = f"cvt.rn{relu}.f16x2.{t} %y0, %h0;"
        out.append(Case(f"cvt.rn{relu}.f16x2.{t}", _r32(text), "int"))
    for t in ("u16", "s16"):
        out.append(
            Case(f"cvt.pack.sat.{t}.s32", _r32(f"cvt.pack.sat.{t}.s32 %y0, %x0, %x1;"), "int")
        )
    text = "cvt.pack.sat.u8.s32.b32 %y0, %x0, %x1, %x2;"
    out.append(Case("cvt.pack.sat.u8.s32.b32", _r32(text), "int"))
    return out


def _warp() -> list[Case]:
    out = []
    for m, c in product(("up", "down", "bfly", "idx"), (0x1F, 0x181F, 0x1807, 0x0, 0x1C03)):
        c = 0 if m == "up" and c in (0x1F, 0x0) else c
        text = f"shfl.sync.{m}.b32 %y0|%p0, %x0, %x1, {c}, -1;\nselp.b64 %r1, 1, 0, %p0;"
        out.append(Case(f"shfl.{m}.{c:x}", _r32(text), "small"))
    for v in ("all", "any", "uni"):
        text = f"and.b32 %y1, %x0, 31;\nsetp.ne.u32 %p2, %y1, 7;\nvote.sync.{v}.pred %p0, %p2, -1;"
        out.append(Case(f"vote.{v}", _pred(text + "\nmov.pred %p1, 0;"), "int"))
    text = "setp.lt.s32 %p2, %x0, %x1;\nvote.sync.ballot.b32 %y0, !%p2, -1;"
    out.append(Case("vote.ballot", _r32(text), "int"))
    text = "and.b32 %y1, %x0, 3;\nmatch.any.sync.b32 %y0, %y1, -1;"
    out.append(Case("match.any.b32", _r32(text), "int"))
    text = "and.b64 %d0, %a0, 1;\nmatch.all.sync.b64 %y0|%p0, %d0, -1;\nselp.b64 %r1, 1, 0, %p0;"
    out.append(Case("match.all.b64", _r32(text), "small"))
    for o, t in product(("add", "min", "max"), ("u32", "s32")):
        out.append(Case(f"redux.{o}.{t}", _r32(f"redux.sync.{o}.{t} %y0, %x0, -1;"), "int"))
    for o in ("and", "or", "xor"):
        out.append(Case(f"redux.{o}.b32", _r32(f"redux.sync.{o}.b32 %y0, %x0, -1;"), "int"))
    # Divergence: an odd and an even branch, then a convergent vote.
    text = (
        "and.b32 %y1, %lane, 1;\nsetp.eq.u32 %p2, %y1, 0;\n@%p2 bra EVEN;\nmul.lo.u32 %y0, %x0, 3;\n"
        "bra JOIN;\nEVEN:\nadd.u32 %y0, %x0, 5;\nJOIN:\nbar.warp.sync -1;\n"
        "activemask.b32 %y2;\ncvt.u64.u32 %r1, %y2;"
    )
    out.append(Case("divergence", _r32(text), "int"))
    text = (
        "and.b32 %y1, %x0, 15;\nmov.b32 %y0, 0;\nLOOP:\nadd.u32 %y0, %y0, %x1;\n"
        "setp.eq.u32 %p2, %y1, 0;\nsub.u32 %y1, %y1, 1;\n@!%p2 bra LOOP;"
    )
    out.append(Case("divergent_loop", _r32(text), "int"))
    return out


def all_cases() -> list[Case]:
    cases = _integer() + _compare() + _floating() + _convert() + _warp()
    names = [c.name for c in cases]
    if len(set(names)) != len(names):
        # The same shuffle clamp appears twice after the .up normalisation.
        seen: dict[str, Case] = {}
        for c in cases:
            seen.setdefault(c.name, c)
        cases = list(seen.values())
    return cases
