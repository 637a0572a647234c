# SPDX-License-Identifier: Apache-2.0
"""Options, the worker that runs the kernel matrices, and the summary of make test-gpu."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))

import summary  # noqa: E402


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("gpu")
    group.addoption(
        "--sanitize", nargs="?", const="memcheck,racecheck", default=None, metavar="TOOLS",
        help="also run a sample of every matrix under compute-sanitizer",
    )  # fmt: skip
    group.addoption("--repeats", type=int, default=20, help="runs of each case, bits must agree")
    group.addoption("--report", type=Path, default=None, help="write the results here as JSON")
    group.addoption(
        "--require-gpu",
        action="store_true",
        help="stop where torch sees no GPU, instead of skipping",
    )


def pytest_configure(config: Any) -> None:
    if config.getoption("--require-gpu", default=False) and not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"built for CUDA {built}, sees no GPU" if built else "is a build without CUDA"
        raise pytest.UsageError(f"--require-gpu: torch {torch.__version__} {why}")


def gpu_name() -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} ({major}.{minor})"


@pytest.fixture(scope="session")
def matrix(request: Any):
    from matrix import Matrix

    repeats = request.config.getoption("--repeats", default=20)
    found = Matrix(
        [sys.executable, str(FOLDER / "matrix_worker.py"), "--device", "cuda:0"],
        repeats=repeats,
        replays=repeats // 2,
    )
    yield found
    found.close()


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    reports = [
        r
        for kind in ("passed", "failed", "skipped")
        for r in terminalreporter.stats.get(kind, [])
        if getattr(r, "user_properties", None) and r.when == "call"
    ]
    found = summary.entries(reports)
    sanitized = summary.entries(reports, summary.SANITIZER)
    if not found and not sanitized:
        return
    name = gpu_name()
    terminalreporter.section("kernel cases on this GPU")
    for line in (*summary.lines(found, name), *summary.sanitizer_lines(sanitized)):
        terminalreporter.write_line(line)
    path = config.getoption("--report", default=None)
    if path is not None:
        summary.write(path, name, found, sanitized)
        terminalreporter.write_line(f"written to {path}")
