# SPDX-License-Identifier: Apache-2.0
"""Control flow, memory spaces, calls, atomics, launches: what a kernel computes."""

from __future__ import annotations

import pytest
import torch
from ptx_text import STORE_R0, kernel

from mpfa.sim import SimulationError, Simulator, run_ptx


def run_r0(body: str, threads: int = 32, blocks: int = 1, **options: str) -> list[int]:
    """%r0 of every thread."""
    out = torch.full((threads * blocks,), -1, dtype=torch.int32)
    text = kernel(body + "\n" + STORE_R0, params=".param .u64 p0", **options)
    run_ptx(text, "k", out, grid=(blocks,), block=(threads,))
    return out.tolist()


def test_special_registers(sim: Simulator) -> None:
    out = torch.zeros(4 * 6 * 8, dtype=torch.int32)
    body = """
mov.u32 %r1, %tid.y;
mov.u32 %r2, %ntid.x;
mad.lo.u32 %r3, %r1, %r2, %lane;
mov.u32 %r4, %ctaid.y;
mov.u32 %r5, %nctaid.x;
mad.lo.u32 %r6, %r4, %r5, %cta;
mov.u32 %r7, %ntid.y;
mul.lo.u32 %r8, %r2, %r7;
mad.lo.u32 %g, %r6, %r8, %r3;
mov.u32 %r0, %laneid;
"""
    text = kernel(body + STORE_R0, params=".param .u64 p0")
    run_ptx(text, "k", out, grid=(2, 2), block=(6, 8))
    assert out.tolist() == [i % 48 % 32 for i in range(192)]


def test_divergent_branches_reconverge(sim: Simulator) -> None:
    got = run_r0("""
and.b32 %r1, %lane, 3;
setp.eq.u32 %q0, %r1, 0;
@%q0 bra A;
setp.eq.u32 %q1, %r1, 1;
@%q1 bra B;
mov.u32 %r0, 30;
bra J;
A: mov.u32 %r0, 10;
bra J;
B: mov.u32 %r0, 20;
J: activemask.b32 %r2;
popc.b32 %r2, %r2;
add.u32 %r0, %r0, %r2;
""")
    assert got == [(10, 20, 30, 30)[i % 4] + 32 for i in range(32)]


def test_independent_lanes_make_progress(sim: Simulator) -> None:
    # Lane 0 releases the flag that the other lanes of its warp spin on.
    got = run_r0(
        """
mov.u32 %r5, flag;
st.volatile.shared.u32 [%r5], 0;
bar.warp.sync -1;
setp.eq.u32 %q0, %lane, 0;
@%q0 bra SET;
SPIN: ld.volatile.shared.u32 %r1, [%r5];
setp.eq.u32 %q1, %r1, 0;
@%q1 bra SPIN;
bra J;
SET: st.volatile.shared.u32 [%r5], 7;
mov.u32 %r1, 7;
J: mov.u32 %r0, %r1;
""",
        module=".shared .align 4 .u32 flag;",
    )
    assert got == [7] * 32


def test_branch_table_and_scoped_labels(sim: Simulator) -> None:
    got = run_r0("""
and.b32 %r1, %lane, 1;
{
.reg .b32 %r1;
mov.u32 %r1, 99;
DONE: add.u32 %r2, %r1, 1;
}
{
DONE: mov.u32 %r3, %r2;
}
T: .branchtargets X, Y;
brx.idx %r1, T;
X: mov.u32 %r0, %r3;
bra J;
Y: mov.u32 %r0, 5;
J:
""")
    assert got == [100, 5] * 16


def test_functions_local_memory_and_constants(sim: Simulator) -> None:
    module = """
.const .align 4 .b32 table[4] = {10, 20, 30, 40};
.global .align 8 .u64 pointer = generic(table);
.func (.param .b32 out) twice(.param .b32 in)
{
.reg .b32 %a;
.reg .pred %p;
ld.param.b32 %a, [in];
setp.gt.s32 %p, %a, 25;
@%p bra BIG;
shl.b32 %a, %a, 1;
st.param.b32 [out], %a;
ret;
BIG: st.param.b32 [out], 0;
ret;
}
"""
    body = """
.local .align 16 .b8 depot[64];
and.b32 %r1, %lane, 3;
ld.global.u64 %d0, [pointer];
mad.wide.u32 %d1, %r1, 4, %d0;
ld.global.u32 %r2, [%d1];
mov.u64 %d2, depot;
mad.wide.u32 %d3, %r1, 4, %d2;
st.local.u32 [%d3+16], %r2;
ld.local.u32 %r3, [%d3+16];
{
.param .b32 a;
.param .b32 b;
st.param.b32 [a], %r3;
call.uni (b), twice, (a);
ld.param.b32 %r0, [b];
}
"""
    assert run_r0(body, module=module) == [20, 40, 0, 0] * 8


def test_recursion_and_indirect_calls_are_refused(sim: Simulator) -> None:
    module = ".func f()\n{\ncall f;\nret;\n}"
    with pytest.raises(SimulationError, match="recursion through f"):
        run_r0("call f;\nmov.u32 %r0, 0;", module=module)


@pytest.mark.parametrize("mode", ["eager", "random", "lazy"])
def test_atomics_across_ctas(sim: Simulator, mode: str) -> None:
    sim.set(mode=mode)
    out = torch.zeros(4, dtype=torch.int32)
    body = """
atom.global.add.u32 %r1, [%p0], 1;
red.global.max.u32 [%p0+4], %r1;
red.global.add.f32 [%p0+8], 0f3F000000;
CAS: ld.relaxed.gpu.global.u32 %r2, [%p0+12];
add.u32 %r3, %r2, 2;
atom.global.cas.b32 %r4, [%p0+12], %r2, %r3;
setp.ne.u32 %q0, %r4, %r2;
@%q0 bra CAS;
"""
    text = kernel(body, params=".param .u64 p0")
    run_ptx(text, "k", out, grid=(8,), block=(64,))
    assert out[0] == 512 and out[1] == 511 and out[3] == 1024
    assert out.view(torch.float32)[2] == 256.0


def test_cluster_and_distributed_shared_memory(sim: Simulator) -> None:
    body = """
mov.u32 %r1, buf;
mov.u32 %r2, %cluster_ctarank;
add.u32 %r3, %r2, 100;
mad.lo.u32 %r4, %lane, 4, %r1;
mad.lo.u32 %r5, %r3, 1000, %lane;
st.shared.u32 [%r4], %r5;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
xor.b32 %r6, %r2, 1;
mapa.shared::cluster.u32 %r7, %r4, %r6;
ld.shared::cluster.u32 %r0, [%r7];
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""
    got = run_r0(
        body,
        blocks=4,
        module=".shared .align 4 .b32 buf[32];",
        directives=".reqnctapercluster 2, 1, 1",
    )
    assert got == [(100 + (c % 2 ^ 1)) * 1000 + i for c in range(4) for i in range(32)]


def test_named_barriers_and_reduction(sim: Simulator) -> None:
    # Warps 0-1 produce and only arrive; warps 2-3 wait. Then all reduce.
    body = """
mov.u32 %r1, buf;
shr.u32 %r2, %lane, 5;
setp.lt.u32 %q0, %r2, 2;
@!%q0 bra WAIT;
mad.lo.u32 %r3, %lane, 4, %r1;
st.shared.u32 [%r3], %lane;
bar.arrive 1, 128;
mov.u32 %r0, 0;
bra J;
WAIT: bar.sync 1, 128;
sub.u32 %r4, %lane, 64;
mad.lo.u32 %r3, %r4, 4, %r1;
ld.shared.u32 %r0, [%r3];
J: setp.gt.u32 %q1, %r0, 40;
bar.red.popc.u32 %r5, 0, %q1;
mad.lo.u32 %r0, %r5, 1000, %r0;
"""
    for seed in range(5):
        sim.set(seed=seed)
        got = run_r0(body, threads=128, module=".shared .align 4 .b32 buf[64];")
        assert got == [23000] * 64 + [23000 + i for i in range(64)]


def test_exited_warps_leave_the_barrier(sim: Simulator) -> None:
    got = run_r0(
        "setp.ge.u32 %q0, %lane, 64;\n@%q0 bra OUT;\nbar.sync 0;\nOUT: mov.u32 %r0, 1;",
        threads=96,
    )
    assert got == [1] * 96


def test_vector_and_narrow_memory_accesses(sim: Simulator) -> None:
    data = torch.arange(256, dtype=torch.uint8)
    out = torch.zeros(32, dtype=torch.int32)
    body = """
mul.wide.u32 %d0, %lane, 8;
add.u64 %d0, %d0, %p1;
ld.global.v4.u8 {%h0, %h1, %h2, %h3}, [%d0];
ld.global.s8 %r1, [%d0+7];
cvt.u32.u16 %r2, %h3;
shl.b32 %r2, %r2, 8;
add.s32 %r0, %r1, %r2;
"""
    run_ptx(kernel(body + STORE_R0), "k", out, data, block=(32,))

    def signed(v: int) -> int:
        return v - 256 if v > 127 else v

    assert out.tolist() == [(8 * i + 3) * 256 + signed(8 * i + 7) for i in range(32)]


def test_launch_records_name_the_kernel(sim: Simulator) -> None:
    run_r0("mov.u32 %r0, 1;", threads=64, blocks=3)
    (record,) = sim.launches()
    assert record["kernel"] == "k" and record["grid"] == [3, 1, 1] and record["error"] == ""
    assert record["warp_instructions"] > 6 * 8
