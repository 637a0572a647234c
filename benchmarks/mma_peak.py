# SPDX-License-Identifier: Apache-2.0
"""Tensor rate of the warp MMA instructions, operands in registers: the MXFP8 RFC's table, rebuilt.

    python benchmarks/mma_peak.py [--json FILE] [--arch 12.0a] [--no-simulator]

On a machine with a GPU of capability 9.0 or more: builds benchmarks/mma_peak.cu for it, runs every row
that its instruction set has and prints TFLOP/s and clocks per instruction and SM sub-partition. Rows
that it lacks are named. Everywhere: the MMA instructions inside each timed loop, read from the machine
code, and the all-ones check of the same program in the simulator (each element must be exactly
K * iterations; one spoiled input must be noticed). Nothing but a GPU run is a speed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import rows as results  # noqa: E402
from benchmarks.rows import Gpu, find_gpu, make_row  # noqa: E402
from benchmarks.sass import flow, parse, tools  # noqa: E402
from mpfa.jit.paths import cache_root  # noqa: E402
from mpfa.jit.toolkit import find_toolkit, missing_text  # noqa: E402

SOURCE = ROOT / "benchmarks" / "mma_peak.cu"
HEADER = ROOT / "include" / "mpfa" / "ptx" / "mma_peak.cuh"
ILP = (8, 16)


@dataclass(frozen=True)
class Row:
    """A line of the table; ``rfc`` is the RFC's TFLOP/s on an RTX 5060 Ti (its measurement)."""

    kind: str
    kernel: str  # as the mangled name has it
    text: str
    rfc: float | None
    blackwell_rtx: bool = False  # an instruction of capability 12.x only
    instead: str = ""  # what the others have


EMULATED = (
    "ptxas rewrites it as HMMA, conversions and additions, which is no rate of an instruction"
)
ABSENT = "no such instruction"


ROWS = (
    Row("f16_f16", "F16F16", "FP16 / FP16 acc", 103),
    Row("f16_f32", "F16F32", "FP16 / FP32 acc", 51),
    Row("bf16_f32", "Bf16F32", "BF16 / FP32 acc", None),
    Row("e4m3_f32", "E4m3F32", "FP8 e4m3 / FP32 acc", 102, True, EMULATED),
    Row("e4m3_f16", "E4m3F16", "FP8 e4m3 / FP16 acc", 206, True, EMULATED),
    Row("mxf8_f32", "Mxf8F32", "MXFP8 e4m3 + ue8m0 / FP32 acc", 202, True, ABSENT),
    Row("nvf4_f32", "Nvf4F32", "NVFP4 e2m1 + ue4m3 / FP32 acc", None, True, ABSENT),
)


def build(arch: str, runtime: str) -> Path:
    """The program for ``arch`` ("12.0a"), its PTX embedded.

    Args:
        runtime: "static" for a GPU, "shared" for the simulator.
    """
    toolkit = find_toolkit()
    if toolkit is None:
        raise tools.ToolError(missing_text())
    number = arch.replace(".", "")
    program = cache_root() / "benchmarks" / f"mma_peak-{number}-{runtime}"
    newest = max(SOURCE.stat().st_mtime, HEADER.stat().st_mtime)
    if program.is_file() and program.stat().st_mtime > newest:
        return program
    program.parent.mkdir(parents=True, exist_ok=True)
    private = program.with_suffix(f".{os.getpid()}")
    line = [str(toolkit.nvcc), "-std=c++17", "-O3", "-cudart", runtime, f"-I{ROOT / 'include'}"]
    line += [f"-gencode=arch=compute_{number},code=[sm_{number},compute_{number}]"]
    done = subprocess.run(
        [*line, "-o", str(private), str(SOURCE)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise tools.ToolError(f"{' '.join(line)}\n{done.stderr}")
    private.rename(program)
    return program


@dataclass(frozen=True)
class LoopCode:
    """The timed loop of one kernel in the machine code."""

    mma: Counter[str]
    other: Counter[str]


def loop_code(program: Path, arch: str) -> dict[tuple[str, int], LoopCode]:
    """(kernel, ilp) -> what its timed loop executes per iteration."""
    found = {}
    for _, listing in tools.listings(program, f"sm_{arch.replace('.', '')}"):
        for function in parse.parse(listing):
            name = re.search(r"mma_peakI.*?\d+([A-Z]\w*?)ELi(\d+)E", function.name)
            if not name:
                continue
            graph = flow.Flow(function)
            loops = [x for x in graph.loops if not graph.is_spin(x)]
            best = max(
                (graph.instructions(graph.hot_path(x, flow.key_weight)) for x in loops),
                key=lambda code: sum(map(flow.key_weight, code)),
                default=[],
            )
            mma = Counter(i.opcode for i in best if flow.key_weight(i) >= 1000)
            other = Counter(i.base for i in best if flow.key_weight(i) < 1000)
            found[name.group(1), int(name.group(2))] = LoopCode(mma, other)
    return found


def print_listing(arch: str, code: dict[tuple[str, int], LoopCode]) -> None:
    print(f"machine code of the timed loops, sm_{arch.replace('.', '')}:")
    for row in ROWS:
        for ilp in ILP:
            loop = code.get((row.kernel, ilp))
            if loop is None or not loop.mma:
                print(f"  {row.text:31} ILP {ilp:2}  no MMA: not an instruction of this target")
                continue
            emulated = "" if sum(loop.mma.values()) == ilp else " (emulated)"
            mma = ", ".join(f"{n} {op}" for op, n in loop.mma.items())
            other = ", ".join(f"{n} {op}" for op, n in sorted(loop.other.items()))
            print(f"  {row.text:31} ILP {ilp:2}  {mma}{emulated}; {other}")


def run_program(command: list[str], env: dict[str, str] | None = None) -> list[dict]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def simulate(program: Path, device: str, *options: str) -> list[dict]:
    """The program's check under the simulator, which plays ``device``."""
    from mpfa.sim import library_path

    env = {**os.environ, "PTXSIM_DEVICE": device}
    folders = [str(library_path().parent), *filter(None, [env.get("LD_LIBRARY_PATH")])]
    env["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
    return run_program([str(program), "--check", *options], env)


def check_in_simulator(program: Path, device: str) -> bool:
    """The all-ones check, and that it notices one spoiled input."""
    good = simulate(program, device)
    spoiled = simulate(program, device, "--corrupt")
    wrong = [
        f"{c['kind']} ILP {c['ilp']}: {c['wrong']} of {c['checked']}" for c in good if c["wrong"]
    ]
    blind = [f"{c['kind']} ILP {c['ilp']}" for c in spoiled if not c["wrong"]]
    checked = sum(c["checked"] for c in good)
    kinds = len({c["kind"] for c in good})
    print(
        f"simulator (device {device}), inputs all 1: {checked} elements of {kinds} kinds, ILP 8 and 16,"
        f" {'all exactly K * iterations' if not wrong else 'WRONG: ' + '; '.join(wrong)}"
    )
    print(
        "  one input of lane 5 set to 0: "
        + ("noticed in every kind" if not blind else f"NOT noticed: {', '.join(blind)}")
    )
    return not wrong and not blind


def measure(
    program: Path, gpu: Gpu, code: dict[tuple[str, int], LoopCode], commit: str | None
) -> list[dict]:
    """Runs on the GPU, prints the table and returns its rows; an inexact result raises."""
    cases = []
    for row in ROWS:
        if row.blackwell_rtx and gpu.capability[0] != 12:
            print(f"skipped {row.text} on capability {gpu.capability[0]}.x: {row.instead}")
        else:
            cases += run_program([str(program), "--kind", row.kind])
    common = results.context("measured", gpu, commit)
    texts = {row.kind: row for row in ROWS}
    rows = []
    print(f"measured on {gpu.name}:")
    for case in cases:
        row = texts[case["kind"]]
        if case["wrong"]:
            raise RuntimeError(f"{case['kind']} ILP {case['ilp']}: {case['wrong']} wrong elements")
        loop = code.get((row.kernel, case["ilp"]))
        if loop and sum(loop.mma.values()) != case["ilp"]:
            raise RuntimeError(f"{case['kind']}: the timed loop holds {dict(loop.mma)}")
        impl = ", ".join(loop.mma) if loop and loop.mma else "unknown instruction"
        name = f"{row.text}, ILP {case['ilp']}"
        mine = ("mma_peak", name, impl)
        rows.append(make_row(*mine, "rate", case["tflops"], "TFLOP/s", common))
        metric = "clocks per PTX mma and sub-partition"
        rows.append(make_row(*mine, metric, case["cycles"], "clocks", common))
        rfc = f"RFC, RTX 5060 Ti: {row.rfc:g}" if row.rfc else ""
        print(
            f"  {name:40} {case['tflops']:8.1f} TFLOP/s {case['cycles']:7.2f} clocks  "
            f"{case['checked']} elements exact  {impl}  {rfc}"
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="results file to merge the measured rows into")
    parser.add_argument(
        "--arch", help='target of the listing, "12.0a"; default: the GPU\'s, else 12.0a'
    )
    parser.add_argument("--commit", help="recorded with the results; default: git's")
    parser.add_argument("--no-simulator", action="store_true")
    args = parser.parse_args()
    gpu = find_gpu()
    usable = gpu is not None and gpu.capability >= (9, 0)
    arch = args.arch or (f"{gpu.capability[0]}.{gpu.capability[1]}a" if usable else "12.0a")
    if not re.fullmatch(r"\d+\.\d[af]?", arch):
        parser.error(f"--arch: {arch!r} is not of the form 12.0a")
    here = usable and arch.rstrip("af") == "{}.{}".format(*gpu.capability)
    major = int(arch.split(".")[0])
    program = build(arch, "static" if here else "shared")
    try:
        code = loop_code(program, arch)
    except tools.ToolError as error:
        code = {}
        print(f"skipped the machine code: {error}")
    if code:
        print_listing(arch, code)
    ok = True
    if here:
        common = results.context("measured", gpu, args.commit)
        results.check_json(parser, args.json, common)
        rows = measure(program, gpu, code, args.commit)
        if args.json:
            results.save(args.json, rows)
    else:
        found = (
            f"{gpu.name}, capability {gpu.capability[0]}.{gpu.capability[1]}" if gpu else "no GPU"
        )
        print(
            f"skipped all rates: they need a GPU of capability {arch.rstrip('af')}; found {found}"
        )
        if args.json:
            print(f"skipped {args.json}: nothing was measured")
    if args.no_simulator or major < 9:
        print("skipped the check in the simulator")
    else:
        shared = build(arch, "shared")
        ok = check_in_simulator(shared, arch.rstrip("af"))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
