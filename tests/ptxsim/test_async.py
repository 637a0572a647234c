# SPDX-License-Identifier: Apache-2.0
"""cp.async, bulk copies and mbarriers in every completion mode; each pattern also with its wait left
out, which must show in some mode."""

from __future__ import annotations

import pytest
import torch
from ptx_text import STORE_R0, kernel, wait

from mpfa.sim import SimulationError, Simulator, run_ptx

MODES = ["eager", "random", "lazy"]
BULK = """
mov.u32 %r1, buf;
mov.u32 %r2, bar;
setp.eq.u32 %q0, %lane, 0;
@!%q0 bra GO;
mbarrier.init.shared::cta.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
GO: bar.sync 0;
@!%q0 bra WAIT;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%p1], 256, [%r2];
WAIT:
"""
SHARED = ".shared .align 128 .b8 buf[256];\n.shared .align 8 .b64 bar;"
READ = "mad.lo.u32 %r3, %lane, 4, %r1;\nld.shared.u32 %r0, [%r3];\n" + STORE_R0


def run_bulk(body: str) -> list[int]:
    data = torch.arange(1000, 1064, dtype=torch.int32)
    out = torch.zeros(64, dtype=torch.int32)
    run_ptx(kernel(body, module=SHARED), "k", out, data, block=(64,))
    return out.tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_bulk_load(sim: Simulator, mode: str, seed: int) -> None:
    sim.set(mode=mode, seed=seed, watch="init,phase")
    assert run_bulk(BULK + wait("%r2", "0", "SPIN") + READ) == list(range(1000, 1064))


def test_bulk_load_without_the_wait_reads_poison(sim: Simulator) -> None:
    sim.set(mode="lazy")
    assert run_bulk(BULK + READ + wait("%r2", "0", "SPIN")) == [-1] * 64


@pytest.mark.parametrize("mode", MODES)
def test_cp_async_groups(sim: Simulator, mode: str) -> None:
    sim.set(mode=mode)
    body = """
mov.u32 %r1, buf;
mad.lo.u32 %r2, %lane, 4, %r1;
mad.wide.u32 %d1, %lane, 4, %p1;
cp.async.ca.shared.global [%r2], [%d1], 4;
cp.async.commit_group;
cp.async.ca.shared.global [%r2+128], [%d1+128], 4, 2;
cp.async.commit_group;
cp.async.wait_group 1;
ld.shared.u32 %r3, [%r2];
cp.async.wait_all;
ld.shared.u32 %r4, [%r2+128];
add.u32 %r0, %r3, %r4;
"""
    data = torch.arange(70000, 70064, dtype=torch.int32)
    out = torch.zeros(32, dtype=torch.int32)
    run_ptx(kernel(body + STORE_R0, module=SHARED), "k", out, data, block=(32,))
    # src-size 2 of 4 bytes: the upper half is zero-filled.
    assert out.tolist() == [70000 + i + ((70032 + i) & 0xFFFF) for i in range(32)]


def test_cp_async_without_the_wait_reads_poison(sim: Simulator) -> None:
    sim.set(mode="lazy")
    body = """
mov.u32 %r1, buf;
mad.lo.u32 %r2, %lane, 4, %r1;
mad.wide.u32 %d1, %lane, 4, %p1;
cp.async.ca.shared.global [%r2], [%d1], 4;
cp.async.commit_group;
cp.async.wait_group 1;
ld.shared.u32 %r0, [%r2];
"""
    data = torch.arange(32, dtype=torch.int32)
    out = torch.zeros(32, dtype=torch.int32)
    run_ptx(kernel(body + STORE_R0, module=SHARED), "k", out, data, block=(32,))
    assert out.tolist() == [-1] * 32


STORE = """
mov.u32 %r1, buf;
mad.lo.u32 %r2, %lane, 8, %r1;
st.shared.u32 [%r2], %lane;
st.shared.u32 [%r2+4], %lane;
fence.proxy.async.shared::cta;
bar.warp.sync -1;
setp.eq.u32 %q0, %lane, 0;
@!%q0 bra REUSE;
cp.async.bulk.global.shared::cta.bulk_group [%p0], [%r1], 256;
cp.async.bulk.commit_group;
{WAIT}
REUSE: bar.warp.sync -1;
st.shared.u32 [%r2], -7;
"""


@pytest.mark.parametrize("mode", MODES)
def test_bulk_store_reads_before_wait_group_read(sim: Simulator, mode: str) -> None:
    sim.set(mode=mode)
    out = torch.zeros(64, dtype=torch.int32)
    body = STORE.replace("{WAIT}", "cp.async.bulk.wait_group.read 0;")
    run_ptx(kernel(body, params=".param .u64 p0", module=SHARED), "k", out, block=(32,))
    assert out.tolist() == [i // 2 for i in range(64)]


def test_bulk_store_without_the_wait_sees_the_reuse(sim: Simulator) -> None:
    sim.set(mode="lazy")
    out = torch.zeros(64, dtype=torch.int32)
    body = STORE.replace("{WAIT}", "")
    run_ptx(kernel(body, params=".param .u64 p0", module=SHARED), "k", out, block=(32,))
    assert -7 in out.tolist()


RING = """
mov.u32 %r1, buf;
mov.u32 %r2, full;
mov.u32 %r3, empty;
setp.eq.u32 %q0, %lane, 0;
@!%q0 bra GO;
mbarrier.init.shared::cta.b64 [%r2], 1;
mbarrier.init.shared::cta.b64 [%r2+8], 1;
mbarrier.init.shared::cta.b64 [%r3], 32;
mbarrier.init.shared::cta.b64 [%r3+8], 32;
GO: bar.sync 0;
shr.u32 %r4, %lane, 5;
mov.u32 %r10, 0;
mov.u32 %r0, 0;
setp.eq.u32 %q1, %r4, 0;
@%q1 bra PRODUCER;
CONSUMER:
and.b32 %r11, %r10, 1;
shr.u32 %r12, %r10, 1;
and.b32 %r12, %r12, 1;
mad.lo.u32 %r13, %r11, 8, %r2;
{FULL}
mad.lo.u32 %r14, %r11, 128, %r1;
and.b32 %r15, %lane, 31;
mad.lo.u32 %r14, %r15, 4, %r14;
ld.shared.u32 %r16, [%r14];
add.u32 %r0, %r0, %r16;
mad.lo.u32 %r17, %r11, 8, %r3;
mbarrier.arrive.shared::cta.b64 _, [%r17];
add.u32 %r10, %r10, 1;
setp.lt.u32 %q2, %r10, 16;
@%q2 bra CONSUMER;
bra DONE;
PRODUCER:
@!%q0 bra DONE;
NEXT:
and.b32 %r11, %r10, 1;
shr.u32 %r12, %r10, 1;
and.b32 %r12, %r12, 1;
xor.b32 %r12, %r12, 1;
mad.lo.u32 %r17, %r11, 8, %r3;
{EMPTY}
mad.lo.u32 %r13, %r11, 8, %r2;
mad.lo.u32 %r14, %r11, 128, %r1;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r13], 128;
mad.wide.u32 %d1, %r10, 128, %p1;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r14], [%d1], 128, [%r13];
add.u32 %r10, %r10, 1;
setp.lt.u32 %q2, %r10, 16;
@%q2 bra NEXT;
DONE:
"""
RING_SHARED = (
    ".shared .align 128 .b8 buf[256];\n.shared .align 8 .b64 full[2];\n"
    ".shared .align 8 .b64 empty[2];"
)
FULL = wait("%r13", "%r12", "WF")
EMPTY = wait("%r17", "%r12", "WE")


def run_ring(full: str, empty: str) -> bool:
    body = RING.replace("{FULL}", full).replace("{EMPTY}", empty) + STORE_R0
    data = torch.randint(0, 1000, (16, 32), dtype=torch.int32)
    out = torch.zeros(64, dtype=torch.int32)
    run_ptx(kernel(body, module=RING_SHARED), "k", out, data, block=(64,))
    return torch.equal(out[32:], data.sum(0).to(torch.int32))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_ring_of_two_stages(sim: Simulator, mode: str, seed: int) -> None:
    sim.set(mode=mode, seed=seed, watch="init,phase")
    assert run_ring(FULL, EMPTY)


def test_ring_without_the_full_wait_is_wrong(sim: Simulator) -> None:
    # The consumer runs ahead of the producer, which then waits for phases that are over: a deadlock.
    sim.set(mode="lazy")
    with pytest.raises(SimulationError, match="deadlock") as error:
        run_ring("", EMPTY)
    assert "last failed wait: mbarrier at shared offset 0x11" in str(error.value)
    assert "mbarrier.try_wait.parity" in str(error.value)
