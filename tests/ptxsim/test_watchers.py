# SPDX-License-Identifier: Apache-2.0
"""Watchers: uninitialised memory, bounds of tensors, mbarrier discipline. A clean kernel is silent."""

from __future__ import annotations

import pytest
import torch
from ptx_text import STORE_R0, kernel, wait

from mpfa.sim import SimulationError, Simulator, run_ptx

SHARED = ".shared .align 16 .b8 buf[256];\n.shared .align 8 .b64 bar;"


def run(body: str, *tensors: torch.Tensor, threads: int = 32) -> torch.Tensor:
    out = torch.zeros(256, dtype=torch.int32)
    text = kernel(body + STORE_R0, module=SHARED)
    run_ptx(text, "k", out, *(tensors or (out,)), block=(threads,))
    return out


def test_read_of_uninitialised_shared_memory(sim: Simulator) -> None:
    sim.set(watch="init")
    body = "mov.u32 %r1, buf;\nmad.lo.u32 %r2, %lane, 4, %r1;\n"
    run(body + "st.shared.u32 [%r2], %lane;\nld.shared.u32 %r0, [%r2];\n")
    with pytest.raises(SimulationError, match="nothing wrote: offset 0x80") as error:
        run(body + "st.shared.u32 [%r2], %lane;\nld.shared.u32 %r0, [%r2+4];\n")
    assert "lane 31" in str(error.value)


TMEM = """
mov.u32 %r1, buf;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
ld.shared.u32 %r2, [%r1];
{STORE}
tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r0, %r3}, [%r2];
tcgen05.wait::ld.sync.aligned;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
"""


def test_read_of_uninitialised_tensor_memory(sim: Simulator) -> None:
    sim.set(watch="init")
    store = "tcgen05.st.sync.aligned.32x32b.x{N}.b32 [%r2], {REGS};\ntcgen05.wait::st.sync.aligned;"
    full = store.replace("{N}", "2").replace("{REGS}", "{%lane, %lane}")
    assert run(TMEM.replace("{STORE}", full))[:32].tolist() == list(range(32))
    half = store.replace("{N}", "1").replace("{REGS}", "{%lane}")
    with pytest.raises(SimulationError, match="Tensor Memory that nothing wrote: lane 0 column 1"):
        run(TMEM.replace("{STORE}", half))


def test_bounds_of_registered_tensors(sim: Simulator) -> None:
    sim.set(watch="bounds")
    data = torch.arange(64, dtype=torch.int32)
    body = "mad.wide.u32 %d0, %lane, 4, %p1;\nld.global.u32 %r0, [%d0{OFF}];\n"
    out = torch.zeros(32, dtype=torch.int32)
    with sim.tensors(data, out):
        text = kernel(body.replace("{OFF}", "+128") + STORE_R0)
        run_ptx(text, "k", out, data)
        assert out.tolist() == list(range(32, 64))
        text = kernel(body.replace("{OFF}", "+132") + STORE_R0)
        with pytest.raises(
            SimulationError, match="access of 4 bytes .* outside every allocation, 256 bytes from"
        ):
            run_ptx(text, "k", out, data)


def test_transactions_left_at_exit(sim: Simulator) -> None:
    sim.set(watch="phase")
    body = """
mov.u32 %r2, bar;
mov.u32 %r0, 0;
setp.eq.u32 %q0, %lane, 0;
@%q0 mbarrier.init.shared::cta.b64 [%r2], 1;
@%q0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 64;
"""
    with pytest.raises(SimulationError, match="exits with 64 transaction bytes outstanding"):
        run(body)


def test_phase_that_passes_a_waiter(sim: Simulator) -> None:
    sim.set(watch="phase", mode="eager")
    # Warp 1 looks once while phase 0 runs; warp 0 then completes phases 0, 1 and 2.
    body = """
mov.u32 %r2, bar;
mov.u32 %r0, 0;
setp.eq.u32 %q0, %lane, 0;
@%q0 mbarrier.init.shared::cta.b64 [%r2], 1;
bar.sync 0;
shr.u32 %r3, %lane, 5;
setp.eq.u32 %q1, %r3, 1;
mbarrier.test_wait.parity.shared::cta.b64 %q2, [%r2], 0;
bar.sync 0;
@%q0 mbarrier.arrive.shared::cta.b64 _, [%r2];
@%q0 mbarrier.arrive.shared::cta.b64 _, [%r2];
"""
    with pytest.raises(SimulationError, match="parity aliasing"):
        run(body, threads=64)
    run(body.replace("@%q0 mbarrier.arrive.shared::cta.b64 _, [%r2];\n", "", 1), threads=64)


def test_deferred_tensor_memory_store(sim: Simulator) -> None:
    # Without wait::st the manual promises nothing; the option that lands stores at issue hides it.
    store = "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r2], {%lane, %lane};"
    sim.set(mode="lazy")
    body = TMEM.replace("{STORE}", store)
    assert run(body)[:32].tolist() == [0x7FC00ABC] * 32
    sim.set(tmem_st="issue")
    assert run(body)[:32].tolist() == list(range(32))


def test_watchers_are_silent_on_a_clean_kernel(sim: Simulator) -> None:
    sim.set(watch="init,bounds,phase")
    body = """
mov.u32 %r1, buf;
mov.u32 %r2, bar;
setp.eq.u32 %q0, %lane, 0;
@%q0 mbarrier.init.shared::cta.b64 [%r2], 1;
bar.sync 0;
@%q0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;
@%q0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%p1], 128, [%r2];
"""
    body += wait("%r2", "0", "SPIN")
    body += "mad.lo.u32 %r3, %lane, 4, %r1;\nld.shared.u32 %r0, [%r3];\n"
    data = torch.arange(32, dtype=torch.int32)
    assert run(body, data)[:32].tolist() == list(range(32))


def test_proxy_fence_by_one_lane_only(sim: Simulator) -> None:
    sim.set(watch="race")
    body = """
mov.u32 %r0, 0;
mov.u32 %r1, buf;
mad.lo.u32 %r2, %lane, 4, %r1;
setp.eq.u32 %q0, %lane, 0;
st.shared.u32 [%r2], %lane;
{GUARD} fence.proxy.async.shared::cta;
bar.warp.sync 0xffffffff;
@%q0 cp.async.bulk.global.shared::cta.bulk_group [%p1], [%r1], 128;
@%q0 cp.async.bulk.commit_group;
@%q0 cp.async.bulk.wait_group 0;
"""
    data = torch.zeros(32, dtype=torch.int32)
    out = torch.zeros(32, dtype=torch.int32)
    run_ptx(kernel(body.replace("{GUARD}", ""), module=SHARED), "k", out, data)
    assert data.tolist() == list(range(32))
    with pytest.raises(SimulationError, match="missing proxy-fence") as error:
        run_ptx(kernel(body.replace("{GUARD}", "@%q0"), module=SHARED), "k", out, data)
    assert "other lanes ran one, lanes 0000000e of the writers did not" in str(error.value)


def test_dealloc_while_another_warp_still_reads(sim: Simulator) -> None:
    sim.set(watch="race")
    # Warp 1 reads the columns of warp 0's allocation; warp 0 frees them.
    body = """
mov.u32 %r1, buf;
mov.u32 %r0, 0;
shr.u32 %r4, %lane, 5;
setp.eq.u32 %q0, %r4, 0;
@%q0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
bar.sync 0;
ld.shared.u32 %r2, [%r1];
shl.b32 %r5, %r4, 21;
add.u32 %r5, %r5, %r2;
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5], {%lane};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r0}, [%r5];
tcgen05.wait::ld.sync.aligned;
{BARRIER}
@%q0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
"""
    assert run(body.replace("{BARRIER}", "bar.sync 0;"), threads=64)[:64].tolist() == list(
        range(64)
    )
    # Whichever warp comes first in the run: the load before the unordered dealloc, or behind it.
    for seed in range(4):
        sim.set(seed=seed)
        with pytest.raises(SimulationError, match="tcgen05.dealloc by warp 0|not allocated"):
            run(body.replace("{BARRIER}", ""), threads=64)
