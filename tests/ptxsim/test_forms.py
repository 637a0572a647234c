# SPDX-License-Identifier: Apache-2.0
"""Instructions that no GPU at hand has, with values worked out here, and forms by device."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from ptx_text import STORE_R0, kernel

from mpfa.sim import SimulationError, Simulator, check_ptx, run_ptx

SHARED = ".shared .align 128 .b8 buf[2048];\n.shared .align 8 .b64 bar;"


def run(body: str, target: str = "sm_100a", data: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.zeros(256, dtype=torch.int32)
    text = kernel(body, module=SHARED, target=target)
    run_ptx(text, "k", out, out if data is None else data, block=(32,))
    return out


def words(values: list[float]) -> torch.Tensor:
    return torch.frombuffer(bytearray(struct.pack(f"<{len(values)}f", *values)), dtype=torch.int32)


LOAD_REDUCE = """
mov.u32 %r1, buf;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
ld.shared.u32 %r2, [%r1];
mad.wide.u32 %d0, %lane, 16, %p1;
ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%d0];
tcgen05.st.sync.aligned.32x32b.x4.b32 [%r2], {%r4, %r5, %r6, %r7};
tcgen05.wait::st.sync.aligned;
{LOAD}
tcgen05.wait::ld.sync.aligned;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
mov.u32 %r0, %r8;
"""


def load_reduce(op: str, data: torch.Tensor) -> list[int]:
    load = f"tcgen05.ld.red.sync.aligned.32x32b.x4.{op} {{%r4, %r5, %r6, %r7}}, %r8, [%r2];"
    out = run(LOAD_REDUCE.replace("{LOAD}", load) + STORE_R0, "sm_103a", data)
    return out[:32].tolist()


def test_tensor_memory_load_with_reduction(sim: Simulator) -> None:
    values = [float((7 * k + 3) % 41 - 20) for k in range(128)]
    rows = [values[4 * k : 4 * k + 4] for k in range(32)]
    data = words(values)
    assert load_reduce("max.f32", data) == words([max(r) for r in rows]).tolist()
    assert load_reduce("min.f32", data) == words([min(r) for r in rows]).tolist()
    largest = [max(abs(v) for v in r) for r in rows]
    assert load_reduce("max.abs.f32", data) == words(largest).tolist()
    numbers = data.view(32, 4)
    assert load_reduce("max.s32", data) == numbers.amax(1).tolist()
    unsigned = (numbers.long() & 0xFFFFFFFF).amin(1)
    assert [v & 0xFFFFFFFF for v in load_reduce("min.u32", data)] == unsigned.tolist()


def test_reduction_of_nan(sim: Simulator) -> None:
    values = [1.0, 2.0, math.nan, 3.0] + [math.nan] * 4 + [0.0] * 120
    data = words(values)
    nan = 0x7FFFFFFF
    assert load_reduce("max.f32", data)[:3] == [words([3.0])[0], nan, 0]
    assert load_reduce("max.NaN.f32", data)[:3] == [nan, nan, 0]


@pytest.mark.parametrize(
    ("form", "want"), [("max", 5.0), ("min", -9.0), ("max.abs", 9.0), ("max.NaN", math.nan)]
)
def test_redux_f32(sim: Simulator, form: str, want: float) -> None:
    values = [1.0] * 32
    values[3], values[7], values[20] = 5.0, -9.0, math.nan
    body = f"""
mad.wide.u32 %d0, %lane, 4, %p1;
ld.global.f32 %f0, [%d0];
redux.sync.{form}.f32 %f1, %f0, 0xffffffff;
mov.b32 %r0, %f1;
"""
    out = run(body + STORE_R0, data=words(values))[:32].tolist()
    assert set(out) == {0x7FFFFFFF if math.isnan(want) else int(words([want])[0])}


NUMBERED = """
mov.u32 %r1, buf;
shl.b32 %r4, %lane, 2;
mad.lo.u32 %r4, %r4, 0x01010101, 0x03020100;
"""


def test_stmatrix_b8_stores_columns(sim: Simulator) -> None:
    body = """
mad.lo.u32 %r2, %lane, 16, %r1;
stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r2], {%r4};
bar.warp.sync 0xffffffff;
mad.lo.u32 %r2, %lane, 4, %r1;
ld.shared.u32 %r0, [%r2];
"""
    memory = run(NUMBERED + body + STORE_R0)[:32].view(torch.uint8).view(8, 16)
    # Lane 4 g + t holds rows g and g + 8 of columns 2 t and 2 t + 1, as mma's accumulator does.
    want = torch.zeros(8, 16, dtype=torch.uint8)
    for lane in range(32):
        for e in range(4):
            want[2 * (lane % 4) + e % 2, lane // 4 + 8 * (e // 2)] = 4 * lane + e
    assert torch.equal(memory, want)


@pytest.mark.parametrize("register", [0, 1])
def test_ldmatrix_b8_transposes(sim: Simulator, register: int) -> None:
    body = """
mad.lo.u32 %r2, %lane, 4, %r1;
st.shared.u32 [%r2], %r4;
add.u32 %r4, %r4, 0x80808080;
st.shared.u32 [%r2+128], %r4;
bar.warp.sync 0xffffffff;
and.b32 %r2, %lane, 15;
mad.lo.u32 %r2, %r2, 16, %r1;
ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r6, %r7}, [%r2];
"""
    body += f"mov.u32 %r0, %r{6 + register};\n"
    got = run(NUMBERED + body + STORE_R0)[:32].view(torch.uint8).view(32, 4).tolist()
    # Memory byte 16 k + n holds 16 k + n; lane 4 g + t gets k = 4 t .. 4 t + 3 of column n.
    for lane in range(32):
        n = lane // 4 + 8 * register
        assert got[lane] == [16 * (4 * (lane % 4) + e) + n for e in range(4)]


def test_release_and_acquire_order_ordinary_accesses(sim: Simulator) -> None:
    sim.set(watch="race")
    # CTA 0 writes data and sets a flag, CTA 1 waits for it and reads.
    body = """
setp.eq.u32 %q0, %cta, 0;
@!%q0 bra READ;
mov.u32 %r1, 77;
st.global.u32 [%p1+256], %r1;
setp.eq.u32 %q1, %lane, 0;
mov.u32 %r2, 1;
@%q1 st.{RELEASE}.gpu.global.u32 [%p1], %r2;
bra END;
READ:
ld.{ACQUIRE}.gpu.global.u32 %r3, [%p1];
setp.ne.u32 %q2, %r3, 1;
@%q2 bra READ;
ld.global.u32 %r0, [%p1+256];
mad.wide.u32 %d31, %lane, 4, %p0;
st.global.u32 [%d31], %r0;
END:
"""

    def go(release: str, acquire: str) -> list[int]:
        out, data = torch.zeros(32, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
        text = kernel(body.replace("{RELEASE}", release).replace("{ACQUIRE}", acquire))
        run_ptx(text, "k", out, data, grid=(2,), block=(1,))
        return out[:1].tolist()

    assert go("release", "acquire") == [77]
    for pair in (("relaxed", "acquire"), ("release", "relaxed"), ("relaxed", "relaxed")):
        with pytest.raises(SimulationError, match=r"missing barrier.*data race"):
            go(*pair)


HEAD = """.reg .b32 r<72>; .reg .b64 d<8>; .reg .f32 f<8>; .reg .pred q<4>; .reg .b16 h<4>;
.reg .f64 e<20>;"""
FORMS = {
    "sm_90a": [
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {e0,e1}, {e2}, {e3}, {e4,e5};",
        "mma.sync.aligned.m8n8k32.row.col.s32.s4.s4.s32 {r0,r1}, {r2}, {r3}, {r4,r5};",
        "mma.sync.aligned.m8n8k32.row.col.satfinite.s32.u4.s4.s32 {r0,r1}, {r2}, {r3}, {r4,r5};",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32.satfinite "
        "{r0,r1,r2,r3}, {r4,r5,r6,r7}, {r8,r9}, {r10,r11,r12,r13};",
        "ld.global.acquire.gpu.b32 r0, [d0];",
        "st.global.release.gpu.b32 [d0], r0;",
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [r0];",
        "setmaxnreg.inc.sync.aligned.u32 232;",
        "cvt.rn.satfinite.e4m3x2.f32 h0, f0, f1;",
    ],
    "sm_100a": [
        "redux.sync.max.NaN.f32 f0, f1, 0xffffffff;",
        "ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {r0,r1,r2,r3}, [r4];",
        "stmatrix.sync.aligned.m16n8.x4.trans.shared::cta.b8 [r4], {r0,r1,r2,r3};",
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [r0], [d0], r1, [r2];",
        "cvt.rn.satfinite.e4m3x2.f32 h0, f0, f1;",
        "cvt.rp.satfinite.ue8m0x2.f32 h0, f0, f1;",
        "cvt.rs.satfinite.e4m3x4.f32 r1, {f0,f1,f2,f3}, r0;",
    ],
    "sm_103a": ["tcgen05.ld.red.sync.aligned.16x32bx2.x2.max.NaN.f32 {r0,r1}, r2, [r3], 16;"],
    "sm_120a": [
        "ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {r0,r1,r2,r3}, [r4];",
        "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3"
        ".f32.ue8m0 {f0,f1,f2,f3}, {r4,r5,r6,r7}, {r8,r9}, {f4,f5,f6,f7}, r20, {h0,h1}, r21, "
        "{h2,h3};",
        "griddepcontrol.wait;",
    ],
}
REFUSED = [
    ("sm_100a", "tcgen05.ld.red.sync.aligned.32x32b.x2.max.f32 {r0,r1}, r2, [r3];", "sm_103"),
    ("sm_103a", "tcgen05.ld.red.sync.aligned.32x32b.x1.max.f32 {r0}, r2, [r3];", ".x1"),
    ("sm_120a", "redux.sync.max.f32 f0, f1, 0xffffffff;", "sm_100 and sm_103 only"),
    ("sm_120a", "tcgen05.wait::ld.sync.aligned;", "tcgen05 exists on"),
    ("sm_90a", "cvt.rn.satfinite.e2m1x2.f32 h0, f0, f1;", "needs sm_100"),
    ("sm_90a", "tcgen05.mma.cta_group::1.kind::f16 [r0], d0, d1, r1, q0;", "needs sm_100"),
]


def unsupported(target: str, instruction: str) -> list[str]:
    text = f".version 9.0\n.target {target}\n.address_size 64\n"
    text += f".visible .entry k() {{\n{HEAD}\n{instruction}\nret;\n}}\n"
    return check_ptx(text)["unsupported"]


@pytest.mark.parametrize(("target", "form"), [(t, f) for t, fs in FORMS.items() for f in fs])
def test_form_is_known(target: str, form: str) -> None:
    assert unsupported(target, form) == []


@pytest.mark.parametrize(("target", "form", "why"), REFUSED)
def test_form_that_the_device_lacks(target: str, form: str, why: str) -> None:
    (text,) = unsupported(target, form)
    assert why in text
