# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer on a child process, and what its summary says.

A child allocates every tensor by itself (no caching allocator, no guard bands), so that memcheck knows
where each one ends.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
_SUMMARY = {
    "racecheck": r"RACECHECK SUMMARY: (\d+) hazards? displayed",
    None: r"ERROR SUMMARY: (\d+) errors?",
}
ENV = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_LAUNCH_BLOCKING": "1"}


@dataclass(frozen=True)
class Verdict:
    """count: errors or hazards, None when the tool gave no summary: then it did not run."""

    count: int | None
    text: str

    @property
    def clean(self) -> bool:
        return self.count == 0


def find(explicit: str | None = None) -> str | None:
    """The compute-sanitizer program: on PATH, else in the CUDA toolkit."""
    if explicit:
        return explicit
    on_path = shutil.which("compute-sanitizer")
    if on_path:
        return on_path
    from mpfa.jit import toolkit

    found = toolkit.find_toolkit()
    homes = [found.home] if found else []
    homes += [Path(os.environ[n]) for n in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(n)]
    homes.append(Path("/usr/local/cuda"))
    for home in homes:
        for place in ("bin", "compute-sanitizer"):
            program = home / place / "compute-sanitizer"
            if program.is_file() and os.access(program, os.X_OK):
                return str(program)
    return None


def parse(tool: str, output: str) -> Verdict:
    """The summary line of ``tool``; without one, the first thing that the tool said."""
    pattern = _SUMMARY.get(tool, _SUMMARY[None])
    counts = [int(n) for n in re.findall(pattern, output)]
    said = [x for x in output.splitlines() if x.startswith("=========")]
    said = [x for x in (line.lstrip("= ").strip() for line in said) if x]
    if not counts:
        words = [x for x in said if x != "COMPUTE-SANITIZER"] or output.strip().splitlines()[-1:]
        return Verdict(None, f"not run: {words[0] if words else 'no output'}")
    noun = "hazards" if tool == "racecheck" else "errors"
    if sum(counts) == 0:
        return Verdict(0, f"0 {noun}")
    first = next((x for x in said if x != "COMPUTE-SANITIZER"), "")
    return Verdict(sum(counts), f"{sum(counts)} {noun}, first: {first}")


def check(
    program: str, tool: str, command: Sequence[str], timeout: float
) -> tuple[Verdict, str, int | None]:
    """(verdict, all output, the command's exit status or None when it was killed)."""
    try:
        done = subprocess.run(
            [program, "--tool", tool, "--target-processes", "application-only", *command],
            env={**os.environ, **ENV}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", timeout=timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        output = error.stdout or ""
        output = output.decode(errors="replace") if isinstance(output, bytes) else output
        return Verdict(None, f"not finished within {timeout:.0f} s"), output, None
    except OSError as error:
        return Verdict(None, f"not run: {error}"), "", None
    return parse(tool, done.stdout), done.stdout, done.returncode
