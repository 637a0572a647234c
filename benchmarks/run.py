# SPDX-License-Identifier: Apache-2.0
"""make bench: every benchmark that this machine can run, what is skipped and why, and the report.

    python benchmarks/run.py [--list] [--only decode,append] [--results DIR] [--budget SECONDS]

Each benchmark is its own process and merges its rows into the results folder: the GPU's into <gpu>.json,
the planner's into cpu.json, the simulator's into cpu_sim.json. Where there is no Blackwell GPU, the SASS
model stands in, under that name: computed again if a disassembler is there and it ends in time, else
the kept rows. Then report.md is written.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import paper, report  # noqa: E402
from benchmarks.rows import RESULTS, Gpu, find_gpu, list_gpu, load, save, slug  # noqa: E402

MODEL_FILE = "sass_model.json"
# On two cores the model compiles its kernels for longer than anyone waits.
MODEL_SECONDS = 150
BLACKWELL = (10, 12)


@dataclass(frozen=True)
class Machine:
    """What decides which benchmarks run.

    Attributes:
        gpu: torch's current device; where torch has none, what nvidia-smi lists first, or None.
        cuda_torch: whether torch can use it.
        nvcc, compiler, disassembler: whether they are found.
    """

    gpu: Gpu | None
    cuda_torch: bool
    nvcc: bool
    compiler: bool
    disassembler: bool

    @property
    def major(self) -> int:
        return self.gpu.capability[0] if self.gpu else 0

    @property
    def stem(self) -> str:
        return slug(self.gpu.name) if self.gpu else "cpu"


def look() -> Machine:
    import torch

    from benchmarks.sass import tools
    from mpfa.jit.toolkit import find_toolkit

    try:
        tools.find_tool("nvdisasm")
        disassembler = True
    except tools.ToolError:
        disassembler = False
    compiler = any(shutil.which(c) for c in (os.environ.get("CXX") or "c++", "g++", "clang++"))
    gpu = find_gpu() or list_gpu()
    return Machine(
        gpu, torch.cuda.is_available(), find_toolkit() is not None, compiler, disassembler
    )


@dataclass(frozen=True)
class Benchmark:
    """A script, the results file it merges into, and why a machine cannot run it (or None)."""

    name: str
    script: str
    refusal: Callable[[Machine], str | None]
    arguments: tuple[str, ...] = ()
    file: str = ""  # default: the GPU's
    budgeted: bool = False  # takes --budget


def needs_gpu(least: tuple[int, int], what: str) -> Callable[[Machine], str | None]:
    def refusal(machine: Machine) -> str | None:
        if machine.gpu is None:
            return (
                f"{what} needs a CUDA GPU of capability {least[0]}.{least[1]} or more; none found"
            )
        if machine.gpu.capability < least:
            found = "{}.{}".format(*machine.gpu.capability)
            return f"{what} needs capability {least[0]}.{least[1]}; {machine.gpu.name} has {found}"
        if not machine.cuda_torch:
            return f"torch cannot use the {machine.gpu.name}: not a CUDA build, or no driver for it"
        return None if machine.nvcc else "no nvcc; make bench installs the wheels"

    return refusal


def attention(operation: str) -> Callable[[Machine], str | None]:
    """Whether the GPU has a kernel of the operation, by mpfa's own table of kernels."""
    usable = needs_gpu((8, 0), operation)

    def refusal(machine: Machine) -> str | None:
        from mpfa.backends.kernels import KERNELS

        served = sorted({k.major for k in KERNELS if k.operation == operation and k.ready})
        if machine.major in served:
            return usable(machine)
        names = ", ".join(f"{m}.x" for m in served)
        found = f"{machine.gpu.name} has {machine.major}.x" if machine.gpu else "none found"
        return f"mpfa has {operation} kernels for GPUs of capability {names}; {found}"

    return refusal


def needs_compiler(machine: Machine) -> str | None:
    return None if machine.compiler else "no C++ compiler found"


BENCHMARKS = (
    Benchmark("decode", "decode.py", attention("decode"), budgeted=True),
    Benchmark("prefill", "prefill.py", attention("prefill"), budgeted=True),
    Benchmark("append", "append.py", needs_gpu((8, 0), "append")),
    Benchmark("combine", "combine.py", needs_gpu((8, 0), "combine")),
    Benchmark("mma_peak", "mma_peak.py", needs_gpu((9, 0), "mma_peak"), ("--no-simulator",)),
    Benchmark("plan", "plan_cpu.py", needs_compiler, ("--repeats", "41"), "cpu.json"),
    Benchmark("simulator", "sim_speed.py", needs_compiler, ("--repeats", "3"), "cpu_sim.json"),
)  # fmt: skip
# What make bench leaves out, and how to run it.
ELSEWHERE = (
    ("serving", "needs a model and minutes per point: python benchmarks/serving.py"),
    ("append_ncu", "hardware counters under Nsight Compute: python benchmarks/append_ncu.py"),
    ("attention on the CPU", "the reference emulates the numerics; its speed says nothing"),
)


def run(command: Sequence[str], seconds: float | None = None) -> int:
    """Exit status of a process group; 124 when its time is up."""
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return 124
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def selected(names: Sequence[str] | None) -> list[Benchmark]:
    known = [b.name for b in BENCHMARKS]
    unknown = [n for n in names or () if n not in [*known, "sass_model"]]
    if unknown:
        raise ValueError(f"--only: unknown {unknown}, allowed are {', '.join(known)}, sass_model")
    return [b for b in BENCHMARKS if names is None or b.name in names]


def model_refusal(machine: Machine) -> str | None:
    """Why the SASS model cannot be computed here, or None."""
    if not machine.nvcc:
        return "no nvcc to compile the kernels with"
    if not machine.disassembler:
        return "no disassembler: pip install nvidia-cuda-nvdisasm nvidia-cuda-cuobjdump"
    return None


def model(machine: Machine, results: Path, seconds: float) -> None:
    """Prints the SASS model of the Blackwell kernels: computed here, or the kept rows."""
    reason = model_refusal(machine)
    if reason is None:
        script = str(ROOT / "benchmarks" / "sass_model.py")
        with tempfile.TemporaryDirectory() as folder:
            # why not straight into the kept file: that also holds baselines that are not built here.
            fresh = Path(folder) / MODEL_FILE
            status = run([sys.executable, script, "--all", "--json", str(fresh)], seconds)
            if status == 0:
                save(results / MODEL_FILE, load(fresh))
                return
        reason = f"did not end within {seconds:.0f} s" if status == 124 else f"exit {status}"
    kept = next((p for p in (results / MODEL_FILE, RESULTS / MODEL_FILE) if p.exists()), None)
    print(f"SASS model not computed here: {reason}")
    if kept is None:
        print("SASS model: no kept rows")
        return
    print("SASS model, kept rows; computed from machine code, nothing ran on a GPU:")
    page = report.Page()
    report.model_section(page, load(kept))
    for line in page.lines:
        if line.startswith("| ") and not line.startswith("| case"):
            print("  " + "  ".join(c.strip() for c in line.strip("| ").split(" | ")))


def print_paper(results: Path, machine: Machine) -> None:
    """The paper's figures beside a B200's, and only there."""
    path = results / f"{machine.stem}.json"
    for what, theirs, ours, unit, where in paper.beside(load(path)):
        print(f"  {what}: paper {theirs} {unit} ({where}), measured here {ours} {unit}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--list", action="store_true", help="what would run and what would not")
    parser.add_argument("--only", type=lambda t: t.split(","), help="comma-separated names")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for decode, prefill")
    parser.add_argument("--model-seconds", type=float, default=MODEL_SECONDS)
    parser.add_argument("--commit", help="recorded with GPU results; default: git's")
    parser.add_argument("--no-report", action="store_true")
    args = parser.parse_args(argv)
    try:
        chosen = selected(args.only)
    except ValueError as error:
        parser.error(str(error))
    args.results = args.results.resolve()
    args.results.mkdir(parents=True, exist_ok=True)
    machine = look()
    gpu = machine.gpu
    print(f"GPU: {gpu.name if gpu else 'none'}; nvcc: {'yes' if machine.nvcc else 'no'}; "
          f"disassembler: {'yes' if machine.disassembler else 'no'}")  # fmt: skip
    failed: list[str] = []
    skipped: list[tuple[str, str]] = []
    for benchmark in chosen:
        reason = benchmark.refusal(machine)
        if reason:
            skipped.append((benchmark.name, reason))
            continue
        if args.list:
            print(f"would run {benchmark.name}")
            continue
        print(f"\n=== {benchmark.name}", flush=True)
        file = args.results / (benchmark.file or f"{machine.stem}.json")
        command = [sys.executable, str(ROOT / "benchmarks" / benchmark.script), "--json", str(file)]
        command += benchmark.arguments
        command += ["--budget", f"{args.budget:g}"] if benchmark.budgeted else []
        command += ["--commit", args.commit] if args.commit and not benchmark.file else []
        begin = time.monotonic()
        status = run(command)
        print(f"=== {benchmark.name}: {time.monotonic() - begin:.0f} s", flush=True)
        if status:
            failed.append(f"{benchmark.name} (exit {status})")
    without_blackwell = machine.major not in BLACKWELL and args.only is None
    if (without_blackwell or "sass_model" in (args.only or ())) and not args.list:
        print("\n=== SASS model of the Blackwell kernels (no measurement)", flush=True)
        model(machine, args.results, args.model_seconds)
    print()
    for name, reason in [*skipped, *(() if args.only else ELSEWHERE)]:
        print(f"skipped {name}: {reason}")
    if args.list:
        return 0
    print_paper(args.results, machine)
    if not args.no_report:
        report.write(args.results, args.results / "report.md", with_plots=plots_possible())
        print(f"report: {args.results / 'report.md'}")
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


def plots_possible() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("report without plots: pip install matplotlib")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
