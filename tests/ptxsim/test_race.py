# SPDX-License-Identifier: Apache-2.0
"""The race detector on hand-written event sequences: each rule with its edge present and left out.

The cases are in race/cases_*.cpp: what happens and which reports are due, exactly. This file builds
and runs them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).resolve().parent / "race"
WATCH = ROOT / "csrc/ptxsim/watch"
SOURCES = [
    WATCH / "race.cpp",
    WATCH / "race_access.cpp",
    WATCH / "race_proxy.cpp",
    *sorted(CASES.glob("*.cpp")),
]
HEADERS = [ROOT / "csrc/ptxsim/watch.h", *sorted(WATCH.glob("race*.h")), CASES / "driver.h"]


def case_names() -> list[str]:
    text = "".join(path.read_text() for path in sorted(CASES.glob("cases_*.cpp")))
    return re.findall(r'\{"([^"]+)",\s*"[^"]*",\s*\[\]', text)


@pytest.fixture(scope="session")
def driver() -> Path:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    digest = hashlib.sha256()
    for path in SOURCES + HEADERS:
        digest.update(path.read_bytes())
    name = f"mpfa-race-driver-{digest.hexdigest()[:16]}"
    folder = Path(os.environ.get("PYTEST_RACE_BUILD", tempfile.gettempdir())) / name
    program = folder / "driver"
    if program.exists():
        return program
    folder.mkdir(parents=True, exist_ok=True)
    # Private names, renamed at the end: several pytest workers may build at once.
    with tempfile.TemporaryDirectory(dir=folder) as work:
        objects = []
        for source in SOURCES:
            objects.append(f"{work}/{source.stem}.o")
            flags = ["-std=c++17", "-O1", "-Wall", "-Werror", "-c"]
            subprocess.run([compiler, *flags, str(source), "-o", objects[-1]], check=True)
        subprocess.run([compiler, *objects, "-o", f"{work}/driver"], check=True)
        os.replace(f"{work}/driver", program)
    return program


@pytest.fixture(scope="session")
def results(driver: Path) -> dict[str, str]:
    out = subprocess.run([str(driver)], capture_output=True, text=True)
    found: dict[str, str] = {}
    name = ""
    for line in out.stdout.splitlines():
        word, _, rest = line.partition(" ")
        if word in ("ok", "FAIL"):
            name = rest
            found[name] = "" if word == "ok" else "failed"
        else:
            found[name] += "\n" + line
    assert found, out.stderr
    return found


def test_all_cases_are_collected(results: dict[str, str]) -> None:
    assert sorted(results) == sorted(case_names())


@pytest.mark.parametrize("name", case_names())
def test_case(results: dict[str, str], name: str) -> None:
    assert results[name] == ""


def test_report_names_both_sides(driver: Path) -> None:
    args = [str(driver), "--text", "store: one writer without proxy fence"]
    text = subprocess.run(args, capture_output=True, text=True, check=True).stdout
    assert "16 bytes at shared memory offset 0x10 of CTA 0" in text
    assert "write by warp 1 of CTA 0\n    <st b>" in text
    assert "read (async proxy) by bulk copy out of shared memory issued by warp 0" in text
    assert "fence.proxy.async by the writing thread" in text


def test_unknown_option_is_an_error(driver: Path) -> None:
    args = [str(driver), "--options", "stricter"]
    out = subprocess.run(args, capture_output=True, text=True)
    assert out.returncode == 2
    assert "'stricter'" in out.stderr and "strict-tcgen" in out.stderr
