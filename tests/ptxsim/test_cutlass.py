# SPDX-License-Identifier: Apache-2.0
"""CUTLASS's example programs, unmodified, under the simulator: each must print its own verdict.

Nobody here wrote them and they are right on real hardware, so they check the simulator independently
of this repository's kernels. Every run is a process of its own and covers launch, TMA, barriers,
tcgen05 or mma.sync, and the program's own reference and comparison kernels.

77 publishes row statistics by tcgen05.st and mbarrier.arrive without a tcgen05.wait::st between them.
By the PTX manual such a store may land later than the arrive, and with the default ``tmem_st=deferred``
the reader sees old values and the program prints [FAIL]; it runs here with ``tmem_st=issue``.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cutlass_build
import pytest
from proof_table import PROOF, row

from mpfa.sim import library_path

# All watchers, the race detector included, on one shape of each program.
WATCHED = ("watch=all",)
ISSUE = ("tmem_st=issue", "race=tmem-at-issue")


@dataclass(frozen=True)
class Run:
    """Arguments of one run and the simulator's options for it."""

    arguments: str
    options: tuple[str, ...] = ()


def gemm(m: int, n: int, k: int, *options: str, scale: str = "") -> Run:
    return Run(f"--m={m} --n={n} --k={k} {scale} --iterations=0".replace("  ", " "), options)


def attention(text: str, *options: str) -> Run:
    return Run(f"{text} --verify --iterations=1 --warmup_iterations=0", (*ISSUE, *options))


_SCALED = "--alpha=0.5 --beta=2"
_GEMM = [
    gemm(256, 256, 256, *WATCHED),
    gemm(256, 256, 768, "mode=lazy", scale=_SCALED),
    gemm(384, 384, 1024, "mode=eager"),
    gemm(512, 256, 512, "seed=7"),
]
_ATTENTION = [
    attention("--b=1 --h=1 --q=256 --k=256 --d=64 --mask=causal", *WATCHED),
    attention("--b=1 --h=1 --q=256 --k=512 --d=128 --mask=causal"),
    attention("--b=1 --h=1 --q=300 --k=500 --d=64 --mask=residual", "mode=lazy"),
    attention(
        "--b=2 --h=1 --varlen-q=100:300 --varlen-k=260:130 --d=128 --varlen --mask=residual",
        "seed=7",
    ),
    attention("--b=1 --h=2 --h_k=1 --q=256 --k=256 --d=64 --persistent", "mode=eager"),
]
RUNS = {
    "48": [
        gemm(256, 256, 128, *WATCHED),
        gemm(512, 256, 96, "mode=lazy", scale=_SCALED),
        gemm(384, 320, 64, "mode=eager"),
    ],
    "70": [
        gemm(256, 128, 64, *WATCHED),
        gemm(512, 512, 256, "mode=lazy", scale="--beta=1"),
        gemm(512, 256, 128, "mode=eager"),
    ],
    "72a": _GEMM,
    "72b": [*_GEMM, gemm(128, 128, 256), gemm(384, 384, 2048, scale=_SCALED)],
    "72c": _GEMM,
    "77_fp8": _ATTENTION,
    "77_fp16": _ATTENTION,
    "79a": _GEMM,
    "79b": _GEMM,
    "79c": _GEMM,
}
QUICK = [gemm(128, 128, 256, *WATCHED), gemm(256, 256, 768, "mode=lazy", scale=_SCALED)]
SECONDS = 600


@dataclass(frozen=True)
class Outcome:
    """What a run gave."""

    run: Run
    passed: bool
    instructions: int
    mmas: int
    seconds: float
    tail: str

    def __str__(self) -> str:
        words = " ".join((*self.run.options, self.run.arguments))
        return f"{words}: {self.verdict}"

    @property
    def verdict(self) -> str:
        return "passed" if self.passed else "failed"


def execute(program: Path, run: Run) -> Outcome:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PTXSIM_")}
    env["LD_LIBRARY_PATH"] = str(library_path().parent)
    env["PTXSIM_STATS"] = "1"
    for option in run.options:
        name, value = option.split("=", 1)
        env[f"PTXSIM_{name.upper()}"] = value
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            [str(program), *run.arguments.split()],
            env=env,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        out, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired:
        out, code = f"no end after {SECONDS} s", 1
    seconds = time.perf_counter() - begin
    good = re.search(r"Disposition: Passed|^ *\[OK\]", out, re.MULTILINE) is not None
    bad = re.search(r"Disposition: Failed|^ *\[FAIL\]|ptxsim: error", out, re.MULTILINE) is not None
    count = sum(int(n) for n in re.findall(r"(\d+) warp instructions", out))
    mmas = sum(int(n) for n in re.findall(r"(\d+) tcgen05\.mma", out))
    return Outcome(run, good and not bad and code == 0, count, mmas, seconds, out[-2000:])


Record = Callable[[str, object], None]


def check(name: str, program: Path, runs: list[Run], record_property: Record) -> None:
    outcomes = [execute(program, run) for run in runs]
    for o in outcomes:
        words = re.sub(r" --(verify|(warmup_)?iterations=\d)", "", o.run.arguments)
        program_row = f"CUTLASS {name} {' '.join((*o.run.options, words))}"
        mmas = f", {o.mmas:,} tcgen05.mma" if o.mmas else ""
        entry = row(1, program_row, o.passed, o.verdict + mmas, o.instructions, o.seconds)
        record_property(PROOF, entry)
    failed = [f"{o}\n{o.tail}" for o in outcomes if not o.passed]
    assert not failed, "\n".join(failed)
    assert all(o.instructions > 0 for o in outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("name", cutlass_build.EXAMPLES)
def test_prints_its_own_verdict(name: str, record_property: Record) -> None:
    try:
        program = cutlass_build.build(name)
    except cutlass_build.Unavailable as reason:
        pytest.skip(str(reason))
    check(name, program, RUNS[name], record_property)


def test_72b_if_it_is_built(record_property: Record) -> None:
    try:
        program = cutlass_build.cached("72b")
    except cutlass_build.Unavailable as reason:
        pytest.skip(str(reason))
    if program is None:
        pytest.skip("CUTLASS 72b is not in the cache; python tests/ptxsim/cutlass_build.py 72b")
    check("72b", program, QUICK, record_property)


def test_a_wrong_result_is_seen(tmp_path: Path) -> None:
    program = tmp_path / "program"
    for text, passed in (
        ("  Disposition: Passed", True),
        ("  Disposition: Failed", False),
        ("[FAIL] tma ws", False),
        ("", False),
        ("[OK] a\\nptxsim: error 719: kernel", False),
    ):
        program.write_text(f"#!/bin/sh\nprintf '{text}\\n'\n")
        program.chmod(0o755)
        assert execute(program, Run("")).passed is passed, text
