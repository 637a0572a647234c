# SPDX-License-Identifier: Apache-2.0
"""The same PTX on the GPU of this machine and in the simulator, bit for bit; no pytest needed.

    python tests/ptxsim/gpu_twins.py [--fresh N] [--json FILE]

Every instruction case, the random programs that have golden results and N without. The GPU works in
a child process, through the driver API alone; the simulator in this one. Exits 1 on a difference.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import pickle
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

import gpu_runner  # noqa: E402
import instr_cases  # noqa: E402
import random_programs  # noqa: E402
import torch  # noqa: E402

from mpfa.sim import run_ptx  # noqa: E402

CAPABILITY = (9, 0)
FRESH = 10_000  # first seed without golden results
LG2_ABS = 2.0**-22  # the manual's bound for lg2 near one


@dataclass
class Outcome:
    """What was compared. differences names each case that is not equal, and with what."""

    gpu: str
    driver: str
    instructions: int = 0
    programs: int = 0
    golden_compared: int = 0
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0


def seeds(fresh: int) -> list[int]:
    known = [s for s in range(random_programs.PROGRAMS) if s not in random_programs.EXCLUDED]
    new = [s for s in range(FRESH, FRESH + fresh) if not compiler_fault(random_programs.program(s))]
    return known + new


def compiler_fault(made: random_programs.Program) -> bool:
    """random_programs.EXCLUDED says what ptxas does to a set with an f32 result."""
    return any(opcode[:4] == "set." and ".f32.f32" in opcode for opcode in made.opcodes)


def capability(gpu: gpu_runner.Gpu) -> tuple[int, int]:
    numbers = []
    for attribute in (75, 76):  # compute capability major, minor
        value = ctypes.c_int()
        gpu.check(gpu.cu.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0))
        numbers.append(value.value)
    return numbers[0], numbers[1]


def work_of_the_gpu(target: str, fresh: int) -> None:
    """Runs everything on the GPU and writes the outputs to a file. The child process."""
    gpu = gpu_runner.Gpu()
    out: dict[str, Any] = {
        "gpu": gpu.name,
        "driver": random_programs.driver_version(),
        "capability": capability(gpu),
        "cases": {},
        "programs": {},
    }
    if out["capability"] == CAPABILITY:
        blocks = instr_cases.THREADS // instr_cases.BLOCK
        for case in instr_cases.all_cases():
            text, data = instr_cases.module(case), instr_cases.inputs(case)
            size = instr_cases.THREADS * 16
            out["cases"][case.name] = gpu.run(text, data, size, blocks, instr_cases.BLOCK)
        random_programs.unoptimised(gpu)
        for seed in seeds(fresh):
            made = random_programs.program(seed)
            data = random_programs.inputs(seed, made.lanes)
            size = made.row * made.lanes
            out["programs"][seed] = gpu.run(made.text, data, size, 1, made.lanes)
    Path(target).write_bytes(pickle.dumps(out))


def results_of_the_gpu(fresh: int) -> dict[str, Any]:
    """Outputs by case name and by seed.

    Raises:
        RuntimeError: no GPU, a driver call failed, or the GPU is not of capability 9.0.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "results"
        line = [sys.executable, str(Path(__file__).resolve()), "--gpu", str(target)]
        done = subprocess.run(
            [*line, "--fresh", str(fresh)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the GPU side failed: {done.stderr.strip()[-500:]}")
        out = pickle.loads(target.read_bytes())
    if tuple(out["capability"]) != CAPABILITY:
        raise RuntimeError(
            f"{out['gpu']} has capability {out['capability']}; the programs are PTX for sm_90a"
        )
    return out


def golden(name: str) -> dict[str, Any]:
    return json.loads((HERE / "golden" / name).read_text())


def simulate_case(case: instr_cases.Case) -> bytes:
    data = torch.frombuffer(bytearray(instr_cases.inputs(case)), dtype=torch.uint8)
    out = torch.zeros(instr_cases.THREADS * 16, dtype=torch.uint8)
    blocks = instr_cases.THREADS // instr_cases.BLOCK
    run_ptx(instr_cases.module(case), "k", data, out, grid=(blocks,), block=(instr_cases.BLOCK,))
    return out.numpy().tobytes()


def simulate_program(made: random_programs.Program) -> bytes:
    inputs = random_programs.inputs(made.seed, made.lanes)
    data = torch.frombuffer(bytearray(inputs), dtype=torch.uint8)
    out = torch.zeros(made.row * made.lanes, dtype=torch.uint8)
    run_ptx(made.text, "k", data, out, block=(made.lanes,))
    return out.numpy().tobytes()


def as_float(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word))[0]


def ordered(word: int) -> int:
    return word if word < 1 << 31 else (1 << 31) - word


def close(case: instr_cases.Case, gpu: int, sim: int) -> bool:
    """Whether two f32 results of an approximate case are within its bound."""
    if gpu == sim:
        return True
    a, b = as_float(gpu), as_float(sim)
    if math.isnan(a) or math.isnan(b):
        return False
    if case.name.startswith("lg2") and abs(a - b) <= LG2_ABS:
        return True
    return abs(ordered(gpu) - ordered(sim)) <= case.ulps


def compare_case(case: instr_cases.Case, gpu: bytes) -> str:
    """Where simulator and GPU differ; empty when they do not."""
    simulated = simulate_case(case)
    if not case.ulps:
        return "" if simulated == gpu else "simulator and GPU differ"
    count = instr_cases.THREADS
    pairs = zip(
        struct.unpack(f"<{count * 4}I", gpu)[::4],
        struct.unpack(f"<{count * 4}I", simulated)[::4],
        strict=True,
    )
    wrong = [(k, a, b) for k, (a, b) in enumerate(pairs) if not close(case, a, b)]
    if wrong:
        k, a, b = wrong[0]
        return f"thread {k}: GPU {a:#010x}, simulator {b:#010x}, bound {case.ulps} ulp"
    return ""


def compare(fresh: int) -> Outcome:
    """Runs both sides and compares them, and the GPU with the golden files."""
    begin = time.perf_counter()
    native = results_of_the_gpu(fresh)
    outcome = Outcome(native["gpu"], native["driver"])
    instructions = golden("h200.json")["cases"]
    for case in instr_cases.all_cases():
        result = native["cases"][case.name]
        outcome.instructions += 1
        text = compare_case(case, result)
        if text:
            outcome.differences.append(f"{case.name}: {text}")
        outcome.golden_compared += 1
        if gpu_runner.summary(case, result) != instructions[case.name]:
            outcome.differences.append(f"{case.name}: the GPU contradicts golden/h200.json")
    programs = golden("random_h200.json")["programs"]
    for seed, result in native["programs"].items():
        made = random_programs.program(seed)
        outcome.programs += 1
        entry = random_programs.golden_entry(made, result)
        text = random_programs.difference(made, simulate_program(made), entry)
        if text:
            outcome.differences.append(f"random program {seed}: {text}")
        if str(seed) in programs:
            outcome.golden_compared += 1
            text = random_programs.difference(made, result, programs[str(seed)])
            if text:
                outcome.differences.append(f"random program {seed}, GPU and golden file: {text}")
    outcome.seconds = time.perf_counter() - begin
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", type=int, default=40, help="random programs without golden")
    parser.add_argument("--json", type=Path, help="write the outcome")
    parser.add_argument("--gpu", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gpu:
        work_of_the_gpu(options.gpu, options.fresh)
        return 0
    outcome = compare(options.fresh)
    if options.json:
        options.json.write_text(json.dumps(asdict(outcome), indent=1) + "\n")
    print(
        f"{outcome.gpu}, driver {outcome.driver}: {outcome.instructions} instruction cases, "
        f"{outcome.programs} random programs, {outcome.golden_compared} golden results, "
        f"{len(outcome.differences)} differences, {outcome.seconds:.0f} s"
    )
    for line in outcome.differences[:20]:
        print(line)
    return 1 if outcome.differences else 0


if __name__ == "__main__":
    sys.exit(main())
