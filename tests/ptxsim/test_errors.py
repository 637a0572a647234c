# SPDX-License-Identifier: Apache-2.0
"""Bad input and bad kernels: each ends in an error that names the place, never in a crash."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from ptx_text import kernel, wait

from mpfa.sim import SimulationError, Simulator, check_ptx, extract_ptx, run_ptx
from mpfa.sim.__main__ import support_markdown

GOOD = kernel("mov.u32 %r0, 1;")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no .version directive"),
        ("hello", ":1: expected a directive, found 'hello'"),
        (GOOD.replace("mov.u32 %r0, 1;", "mov.u32 %r0, 1"), "expected ';'"),
        (GOOD.replace("%r0, 1", "%r99, 1"), "undeclared register %r99"),
        (GOOD.replace("mov.u32 %r0", "movv.u32 %r0"), "unknown instruction 'movv.u32'"),
        (GOOD.replace("mov.u32 %r0", "mov.u33 %r0"), "unsupported modifier '.u33'"),
        (GOOD.replace("mov.u32 %r0, 1;", "add.u32 %r0, 1;"), "takes 3 to 3 operands, found 2"),
        (GOOD.replace("mov.u32 %r0, 1;", "add.u32 %r0, %d0, 1;"), "has 64 bits"),
        (GOOD.replace("mov.u32 %r0, 1;", "bra NOWHERE;"), "undefined label NOWHERE"),
        (GOOD.replace("mov.u32 %r0, 1;", "A: bra A;\nA: bra A;"), "defined twice"),
        (GOOD.replace("mov.u32 %r0, 1;", "{"), "missing '}'"),
        (GOOD[: len(GOOD) // 2], "missing '}'"),
        (GOOD.replace("ret;", "ret; \x01"), "unexpected byte 0x01"),
        (GOOD.replace(".b32 %r<64>", ".b77 %r<64>"), "unknown register type"),
        (GOOD.replace(".address_size 64", ".address_size 32"), "only .address_size 64"),
    ],
)
def test_malformed_ptx_names_the_line(sim: Simulator, text: str, message: str) -> None:
    with pytest.raises(SimulationError, match=r"bad.ptx:\d+: ") as error:
        run_ptx(text, "k", torch.zeros(4), torch.zeros(4), name="bad.ptx")
    assert message in str(error.value)


def test_every_truncation_is_an_error_or_a_module(sim: Simulator) -> None:
    for end in range(0, len(GOOD), 7):
        result = check_ptx(GOOD[:end], "cut.ptx")
        assert result["unsupported"] or result["kernels"] == [] or end > len(GOOD) - 8


def test_check_lists_every_unsupported_instruction(sim: Simulator) -> None:
    text = kernel("mov.u32 %r0, 1;\nfoo.u32 %r0;\nadd.u32.bar %r0, 1, 2;")
    faults = check_ptx(text, "x.ptx")["unsupported"]
    assert len(faults) == 2 and "foo" in faults[0] and ".bar" in faults[1]


def test_instruction_of_a_later_device_is_refused(sim: Simulator) -> None:
    sim.set(device="9.0")
    try:
        body = "tcgen05.fence::before_thread_sync;"
        with pytest.raises(SimulationError, match="needs sm_100, the simulated device is sm_90"):
            run_ptx(kernel(body, target="sm_90a"), "k", torch.zeros(1), torch.zeros(1))
    finally:
        sim.set(device="auto")


def run(body: str, *, threads: int = 32, **options: str) -> None:
    out = torch.zeros(1024, dtype=torch.int32)
    run_ptx(kernel(body, **options), "k", out, out, block=(threads,))


SHARED = {"module": ".shared .align 16 .b8 buf[64];\n.shared .align 8 .b64 bar;"}
BARRIER = "mov.u32 %r2, bar;\nsetp.eq.u32 %q0, %lane, 0;\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mov.u32 %r1, buf;\nld.shared.u32 %r0, [%r1+72];", "outside the 64 bytes of the CTA"),
        ("mov.u32 %r1, buf;\nld.shared.u32 %r0, [%r1+2];", "not aligned to 4 bytes"),
        (
            "mov.u64 %d0, 16;\nld.global.u32 %r0, [%d0];",
            "access of 4 bytes at 0x10 outside every allocation",
        ),
        ("mov.u32 %r1, buf;\nld.shared::cluster.u32 %r0, [%r1+16777216];", "the cluster has 1 CTA"),
        ("trap;", "trap executed"),
        ("bar.sync 16;", "allowed are 0 .. 15"),
        ("bar.sync 1, 33;", "not a positive multiple of 32"),
        ("shfl.sync.idx.b32 %r0, %lane, 0, 31, 1;", "not in the member mask"),
        (BARRIER + "@%q0 mbarrier.arrive.shared::cta.b64 _, [%r2];", "no initialised mbarrier"),
        (BARRIER + "@%q0 mbarrier.init.shared::cta.b64 [%r2], 0;", "count 0, allowed 1"),
        (
            BARRIER + "@%q0 mbarrier.init.shared::cta.b64 [%r2], 1;\n"
            "@%q0 mbarrier.expect_tx.shared::cta.b64 [%r2], 64;\n"
            "@%q0 mbarrier.arrive.shared::cta.b64 _, [%r2];\n"
            "@%q0 mbarrier.arrive.shared::cta.b64 _, [%r2];",
            "only 0 of 1 are pending",
        ),
        (
            BARRIER + "@%q0 mbarrier.init.shared::cta.b64 [%r2], 1;\n"
            "@%q0 st.shared.u32 [%r2], 5;\n@%q0 mbarrier.arrive.shared::cta.b64 _, [%r2];",
            "was overwritten",
        ),
        (
            BARRIER + "@%q0 mbarrier.init.shared::cta.b64 [%r2], 1;\n"
            "@%q0 mbarrier.expect_tx.shared::cta.b64 [%r2], 1048576;",
            "leaves the range",
        ),
        (
            BARRIER + "@%q0 mbarrier.init.shared::cta.b64 [%r2], 1;\n"
            "@%q0 mbarrier.try_wait.parity.shared::cta.b64 %q1, [%r2], 2;",
            "must be 0 or 1",
        ),
        (
            "mov.u32 %r1, buf;\nmov.u32 %r2, bar;\nsetp.eq.u32 %q0, %lane, 0;\n"
            "@%q0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes "
            "[%r1], [%p1], 24, [%r2];",
            "must be multiples of 16",
        ),
        (
            "mov.u32 %r1, buf;\ntcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 48;",
            "power of two in 32",
        ),
        (
            "mov.u32 %r1, buf;\ntcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;",
            "missing tcgen05.dealloc",
        ),
        (
            "mov.u32 %r1, 0;\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;",
            "no such allocation",
        ),
        (
            "mov.u32 %r1, 0;\ntcgen05.ld.sync.aligned.32x32b.x1.b32 {%r0}, [%r1];",
            "column 0 of CTA rank 0, which is not allocated",
        ),
    ],
)
def test_misuse_is_an_error_with_the_place(sim: Simulator, body: str, message: str) -> None:
    with pytest.raises(SimulationError, match="PTX line") as error:
        run(body, **SHARED)
    assert message in str(error.value)
    # The process lives and the next launch works.
    run("mov.u32 %r0, 1;")


def test_deadlock_report_names_warps_and_barriers(sim: Simulator) -> None:
    body = BARRIER + "@%q0 mbarrier.init.shared::cta.b64 [%r2], 2;\nbar.sync 0;\n"
    body += wait("%r2", "0", "SPIN")
    with pytest.raises(SimulationError) as error:
        run(body, threads=64, **SHARED)
    text = str(error.value)
    assert "deadlock" in text and "warp 0 lanes ffffffff" in text and "warp 1 lanes" in text
    assert "phase 0, pending 2 of 2 arrivals, tx 0 bytes" in text


def test_half_a_barrier_is_a_deadlock(sim: Simulator) -> None:
    with pytest.raises(SimulationError, match="32 threads arrived of 64"):
        run("setp.lt.u32 %q0, %lane, 32;\n@%q0 bar.sync 1, 64;\n@!%q0 bar.sync 2, 64;", threads=64)


def test_watchdog_ends_an_endless_loop(sim: Simulator) -> None:
    sim.set(timeout=1)
    with pytest.raises(SimulationError, match="watchdog"):
        run("L: add.u32 %r0, %r0, 1;\nbra L;")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": (1025,)}, "1025 threads per block"),
        ({"block": (0,)}, "every size must be positive"),
        ({"smem": 300000}, "the device limit is 232448"),
    ],
)
def test_launch_limits(sim: Simulator, options: dict, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        run_ptx(GOOD, "k", torch.zeros(1), torch.zeros(1), **options)


def test_unknown_kernel_and_options(sim: Simulator) -> None:
    with pytest.raises(SimulationError, match="no kernel named nope"):
        run_ptx(GOOD, "nope", torch.zeros(1))
    with pytest.raises(ValueError, match="eager, random or lazy"):
        sim.set(mode="fast")
    with pytest.raises(ValueError, match="unknown option"):
        sim.set(colour=1)
    with pytest.raises(ValueError, match="unknown watcher 'x'"):
        sim.set(watch="x")


def container(entry: bytes) -> bytes:
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry)) + entry


def entry(payload: bytes, flags: int = 0, plain: int = 0, compressed: int = 0) -> bytes:
    head = bytearray(64)
    struct.pack_into("<HHIQ", head, 0, 1, 0x101, 64, len(payload))
    struct.pack_into("<I", head, 0x10, compressed)
    struct.pack_into("<I", head, 0x1C, 100)
    struct.pack_into("<Q", head, 0x28, flags)
    struct.pack_into("<Q", head, 0x38, plain)
    return bytes(head) + payload


def test_fatbin_containers(sim: Simulator, tmp_path: Path) -> None:
    path = tmp_path / "x.fatbin"
    path.write_bytes(container(entry(GOOD.encode() + b"\0\0")))
    assert extract_ptx(path) == [(100, GOOD)]
    # LZ4: all literals.
    data = GOOD.encode()
    block = b"\xf0" + b"\xff" * ((len(data) - 15) // 255) + bytes([(len(data) - 15) % 255]) + data
    path.write_bytes(container(entry(block, 0x2000, len(data), len(block))))
    assert extract_ptx(path) == [(100, GOOD)]
    bad = [
        (container(entry(b"xyz" * 9, 0x8000, 100, 27)), "corrupt zstd payload"),
        (container(entry(b"\x1fabc", 0x2000, 100, 4)), "corrupt LZ4 payload"),
        (container(entry(GOOD.encode()))[:-40], "truncated"),
        (container(entry(b"", 0x8000, 1 << 40, 0)), "implausible"),
        (container(b"\1\0" + b"\xff" * 70), "truncated entry"),
    ]
    for blob, message in bad:
        path.write_bytes(blob)
        with pytest.raises(SimulationError, match=message):
            extract_ptx(path)


def test_support_page_is_generated(sim: Simulator) -> None:
    page = Path(__file__).parents[2] / "csrc" / "ptxsim" / "SUPPORT.md"
    assert page.read_text() == support_markdown(), "run python -m mpfa.sim isa --markdown"
