# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of the PTX simulator on this CPU.

    python benchmarks/sim_speed.py [--json FILE] [--repeats N] [--fmha PROGRAM]

- attention mix: warp-instructions per second of one core, without MMAs. Warps 0-3 run the instructions
  of a softmax warp and warps 4-7 those of a correction warp, the arithmetic in the shares counted in
  CUTLASS's example 77 (fp8, head dimension 128; it has three times the mov.b32), over Tensor Memory that
  is read and written as there. The aim is 4 M.
- two cores: the same with four CTAs on two threads, by wall clock, as a ratio to one thread and to two
  processes of one thread each, which is what the machine gives at that moment.
- MMA: one 128 x 128 x 128 block-scaled NVFP4 product (two tcgen05.mma). The aim is below 2 ms.
- memory: peak resident size of a process that runs both, less what it had before the first launch, while
  the kernels' tensors are below 1 MB. The aim is below 1 GB.
- with --fmha and CUTLASS's example 77 built for fp8 (tests/ptxsim/cutlass_build.py): the rate of its
  attention kernel with MMAs (1 head, 256 queries, 8192 keys), and that process's peak memory in all.

Rates count CPU seconds of the process where nothing else is said, so that other load on the machine
matters little; the best of the repeats is taken.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.rows import Row, context, cpu_name, make_row, save  # noqa: E402
from mpfa.sim import library_path, run_ptx, simulator  # noqa: E402

ROUNDS = 1024  # about a million warp-instructions a CTA: parsing and set-up do not show
PRODUCTS = 512
AIMS = {"attention mix": 4.0, "mma 128x128x128 nvfp4": 2.0, "peak memory": 1024.0}


def _module(registers: str, body: str, shared: int) -> str:
    return f""".version 9.0
.target sm_100a
.address_size 64
.visible .entry k(.param .u32 rounds)
{{
.reg .b32 %r<16>;
.reg .b32 %x<256>;
.reg .b64 %d<256>;
.reg .b16 %h<128>;
.reg .pred %p<8>;
{registers}
.shared .align 1024 .b8 smem[{shared}];
.shared .align 8 .b64 bar;
.shared .align 4 .b32 slot;
ld.param.u32 %r0, [rounds];
mov.u32 %r1, %tid.x;
shr.u32 %r2, %r1, 5;
setp.eq.u32 %p0, %r2, 0;
mov.u32 %r3, slot;
@%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 512;
bar.sync 0;
ld.shared.u32 %r4, [%r3];
and.b32 %r5, %r2, 3;
shl.b32 %r5, %r5, 21;
add.u32 %r5, %r4, %r5;
{body}
bar.sync 0;
@%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 512;
@%p0 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ret;
}}
"""


def _list(prefix: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"%{prefix}{k}" for k in range(first, first + count)) + "}"


def softmax_part(columns: int = 32) -> list[str]:
    """One tile of a softmax warp: running maximum, scaled exponentials, e4m3 codes, row sum."""
    lines = [
        f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {_list('x', 0, columns)}, [%r5];",
        "tcgen05.wait::ld.sync.aligned;",
        "mov.b32 %x100, 0fFF800000;",
    ]
    lines += [f"max.f32 %x100, %x100, %x{k};" for k in range(columns)]
    lines += ["mov.b64 %d100, {%x100, %x100};", "mov.b64 %d101, {%x101, %x101};"]
    for k in range(0, columns, 2):
        lines.append(f"mov.b64 %d{k}, {{%x{k}, %x{k + 1}}};")
        lines.append(f"fma.rn.f32x2 %d{k}, %d{k}, %d101, %d100;")
        lines.append(f"mov.b64 {{%x{k}, %x{k + 1}}}, %d{k};")
        lines += [f"ex2.approx.f32 %x{k + j}, %x{k + j};" for j in range(2)]
        lines += [f"mov.b32 %x{110 + j}, %x{k + j};" for j in range(2)]
        lines.append(f"cvt.rn.satfinite.e4m3x2.f32 %h{k}, %x{k + 1}, %x{k};")
        lines.append(f"mov.b64 %d{k}, {{%x110, %x111}};")
        lines.append(f"add.f32x2 %d102, %d102, %d{k};")
    for k in range(0, columns, 4):
        lines.append(f"mov.b32 %x{120 + k // 4}, {{%h{k}, %h{k + 2}}};")
    packed = columns // 4
    lines += [
        f"tcgen05.st.sync.aligned.32x32b.x{packed}.b32 [%r5 + 64], {_list('x', 120, packed)};",
        "tcgen05.wait::st.sync.aligned;",
        "bar.sync 1, 128;",
    ]
    return lines


def correction_part(columns: int = 32) -> list[str]:
    """One tile of a correction warp: the accumulator times a row factor."""
    lines = [
        f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {_list('x', 0, columns)}, [%r5 + 128];",
        "tcgen05.wait::ld.sync.aligned;",
        "mov.b64 %d100, {%x101, %x101};",
    ]
    for k in range(0, columns, 2):
        lines.append(f"mov.b64 %d{k}, {{%x{k}, %x{k + 1}}};")
        lines.append(f"mul.f32x2 %d{k}, %d{k}, %d100;")
        lines.append(f"mov.b64 {{%x{k}, %x{k + 1}}}, %d{k};")
    lines += [
        f"tcgen05.st.sync.aligned.32x32b.x{columns}.b32 [%r5 + 128], {_list('x', 0, columns)};",
        "tcgen05.wait::st.sync.aligned;",
        "bar.sync 2, 128;",
    ]
    return lines


def _loop(label: str, lines: list[str]) -> str:
    counted = ["add.s32 %r6, %r6, 1;", "setp.lt.s32 %p1, %r6, %r0;", f"@%p1 bra {label};"]
    return "\n".join(("mov.u32 %r6, 0;", f"{label}:", *lines, *counted))


def attention_mix() -> str:
    zero = "mov.b32 %x0, 0;\nmov.b64 %d102, 0;\nmov.b32 %x101, 0f3F000000;"
    clear = "\n".join(
        f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5 + {c}], {{%x0}};" for c in range(192)
    )
    body = f"""{zero}
{clear}
tcgen05.wait::st.sync.aligned;
setp.ge.u32 %p2, %r2, 4;
bar.sync 0;
@%p2 bra CORRECTION;
{_loop("SOFTMAX", softmax_part())}
bra DONE;
CORRECTION:
{_loop("SCALE", correction_part())}
DONE:"""
    return _module("", body, 16)


def block_scaled_mma() -> str:
    """128 x 128 x 128 per round: A and B K-major without swizzle, block16 ue4m3 scales."""
    descriptor = 8 | 16 << 16 | 1 << 30  # leading 128 bytes, stride 256 bytes, version 1
    low, high = (descriptor & 0xFFFF) << 16, 16 | 1 << 14
    idesc = 1 << 7 | 1 << 10 | (128 // 8) << 17 | (128 // 128) << 27
    fill = "\n".join(
        f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5 + {c}], {{%x0}};" for c in range(144)
    )
    part = []
    for step in range(2):
        for name, base in (("a", 0), ("b", 8192)):
            part.append(f"add.u32 %r8, %r7, {base + 4096 * step};")
            part.append("shr.u32 %r8, %r8, 4;")
            part.append(f"or.b32 %r8, %r8, {low};")
            part.append(f"mov.b64 %{name}, {{%r8, %r9}};")
        part.append(
            "@%p3 tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 "
            "[%r4], %a, %b, %r10, [%r11], [%r12], %p4;"
        )
    body = f"""mov.u32 %r7, smem;
mov.u32 %r13, bar;
setp.eq.u32 %p3, %r1, 0;
@%p3 mbarrier.init.shared::cta.b64 [%r13], 1;
mad.lo.u32 %r8, %r1, 128, %r7;
mul.lo.u32 %x1, %r1, 0x9E3779B1;
{chr(10).join(f"st.shared.u32 [%r8 + {4 * k}], %x1;" for k in range(32))}
mov.b32 %x0, 0x38383838;
{fill}
tcgen05.wait::st.sync.aligned;
fence.proxy.async;
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
mov.u32 %r9, {high};
mov.u32 %r10, {idesc};
add.u32 %r11, %r4, 128;
add.u32 %r12, %r4, 136;
setp.ne.u32 %p4, %r10, 0;
{_loop("MMA", part)}
@%p3 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r13];
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r13], 0;
@!%p5 bra WAIT;"""
    return _module(".reg .b64 %a, %b;", body, 16384)


FMHA = "--b=1 --h=1 --q=256 --k=8192 --d=128 --iterations=1 --warmup_iterations=0"


def attention_program(program: Path, repeats: int) -> list[Row]:
    env = dict(os.environ, PTXSIM_STATS="1", PTXSIM_THREADS="1", PTXSIM_TMEM_ST="issue")
    env["LD_LIBRARY_PATH"] = str(library_path().parent)
    pattern = re.compile(r"Sm100Fmha\w*: .* (\d+) warp instructions, (\d+) tcgen05.mma, ([\d.]+) s")

    def rate() -> float:
        line = [str(program), *FMHA.split()]
        done = subprocess.run(line, env=env, capture_output=True, text=True, check=True)
        found = pattern.search(done.stdout + done.stderr)
        if found is None:
            raise RuntimeError(f"{program}: no statistics of its attention kernel")
        return int(found[1]) / float(found[3]) * 1e-6

    value = best(repeats, rate)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return [
        row("CUTLASS 77 fp8, k=8192", "wall rate with MMAs", value, "M warp-instr/s"),
        row("CUTLASS 77 fp8, k=8192", "peak memory of the process", peak, "MiB"),
    ]


class Measured:
    """CPU and wall seconds and warp-instructions of one launch."""

    def __init__(self, text: str, rounds: int, ctas: int, block: int, threads: int) -> None:
        sim = simulator()
        with sim.options(threads=threads, mode="eager", watch="none"):
            sim.clear()
            cpu, wall = time.process_time(), time.perf_counter()
            run_ptx(text, "k", rounds, grid=(ctas,), block=(block,))
            self.cpu = time.process_time() - cpu
            self.wall = time.perf_counter() - wall
            launch = sim.launches()[-1]
        if launch["error"]:
            raise RuntimeError(launch["error"])
        self.instructions = int(launch["warp_instructions"])
        self.mmas = int(launch["tcgen05_mma"])


def _wall(job: tuple[str, int]) -> int:
    return Measured(job[0], job[1], 1, 256, 1).instructions


def best(repeats: int, value: Callable[[], float], larger: bool = True) -> float:
    values = [value() for _ in range(repeats)]
    return max(values) if larger else min(values)


def resident(peak: bool = False) -> float:
    """Resident MiB of this process; ``peak``: the most since the last call without it (Linux)."""
    if not peak:
        Path("/proc/self/clear_refs").write_text("5")
    field = "VmHWM:" if peak else "VmRSS:"
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index(field) + 1]) / 1024


def measure(repeats: int) -> list[Row]:
    mix, mma = attention_mix(), block_scaled_mma()

    def rate(kind: str, ctas: int, threads: int) -> float:
        run = Measured(mix, ROUNDS, ctas, 256, threads)
        return run.instructions / getattr(run, kind) * 1e-6

    def product() -> float:
        run = Measured(mma, PRODUCTS, 1, 128, 1)
        if run.mmas != 2 * PRODUCTS:
            raise RuntimeError(f"expected {2 * PRODUCTS} tcgen05.mma, found {run.mmas}")
        return run.cpu / PRODUCTS * 1e3

    def pair() -> float:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(_wall, [(mix, ROUNDS // 16)] * 2, chunksize=1)
            begin = time.perf_counter()
            counts = pool.map(_wall, [(mix, 2 * ROUNDS)] * 2, chunksize=1)
            return sum(counts) / (time.perf_counter() - begin) * 1e-6

    before = resident()
    core = best(repeats, lambda: rate("cpu", 2, 1))
    one = best(repeats, lambda: rate("wall", 4, 1))
    two = best(repeats, lambda: rate("wall", 4, 2))
    bound = best(repeats, pair)
    time_mma = best(repeats, product, larger=False)
    peak = resident(peak=True) - before
    return [
        row("attention mix", "rate per core", core, "M warp-instr/s"),
        row("attention mix, 4 CTAs", "wall rate, 1 thread", one, "M warp-instr/s"),
        row("attention mix, 4 CTAs", "wall rate, 2 processes", bound, "M warp-instr/s"),
        row(
            "attention mix, 4 CTAs",
            "wall rate, 2 threads",
            two,
            "M warp-instr/s",
            {"1 thread": round(two / one, 2), "2 processes": round(two / bound, 2)},
        ),
        row("mma 128x128x128 nvfp4", "time", time_mma, "ms"),
        row("peak memory", "resident, less that before", peak, "MiB"),
    ]


def row(
    case: str, metric: str, value: float, unit: str, ratio: dict[str, float] | None = None
) -> Row:
    common = context("simulator")
    return make_row("sim_speed", case, "ptxsim", metric, value, unit, common, ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="results file to merge the rows into")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fmha", type=Path, help="CUTLASS's example 77 built for fp8")
    args = parser.parse_args()
    rows = measure(args.repeats)
    if args.fmha:
        rows += attention_program(args.fmha, args.repeats)
    load = os.getloadavg()[0]
    print(f"PTX simulator on a {cpu_name()}, best of {args.repeats}, load average {load:.1f}")
    for r in rows:
        aim = AIMS.get(str(r["case"]))
        value = float(str(r["value"]))
        note = ""
        if aim is not None:
            met = value >= aim if r["unit"] == "M warp-instr/s" else value < aim
            note = f"aim {aim:g}: {'met' if met else 'missed'}"
        if r["ratio_to"]:
            note = f"ratio to {r['ratio_to']}"
        print(f"{r['case']:<24} {r['metric']:<28} {value:>9.3f} {r['unit']:<16} {note}")
    if args.json:
        save(args.json, rows)


if __name__ == "__main__":
    main()
