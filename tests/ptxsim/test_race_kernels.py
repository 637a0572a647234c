# SPDX-License-Identifier: Apache-2.0
"""The race detector on small kernels: silent as they are, an error with any edge left out.

race/*.cu holds the kernels, race/*.ptx what nvcc made of them, race/*.known the mutants that are
harmless and why.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from proof_table import PROOF, mutant_row, row
from race_programs import MODULES, RACE, Module, gemm, ring, sm120_gemm
from race_programs import reduce as block_reduce

from mpfa.jit.toolkit import find_toolkit
from mpfa.sim import SimulationError, Simulator, mutants

Record = Callable[[str, object], None]
MODES = ["eager", "random", "lazy"]
STRICT = "strict"
PTX = MODULES[0].ptx
SCALED = next(m for m in MODULES if m.name == "sm120_gemm").ptx
MUTANTS = {"kernels": 54, "sm100_gemm": 26, "sm120_gemm": 14}


@pytest.fixture
def strict(sim: Simulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    """All watchers, the race detector with its strictest rules; a hanging mutant ends after 20 s."""
    monkeypatch.setenv("PTXSIM_RACE", STRICT)
    sim.set(watch="all", timeout=20)
    yield sim
    sim.set(watch="none")


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.name)
def test_ptx_is_what_nvcc_makes_of_the_source(module: Module, tmp_path: Path) -> None:
    toolkit = find_toolkit()
    if toolkit is None or f"V{toolkit.version}\n" not in module.ptx:
        pytest.skip("another nvcc than the one that made the PTX")
    made = tmp_path / "made.ptx"
    arch = re.search(r"\.target sm_(\w+)", module.ptx)[1]
    source = RACE / f"{module.name}.cu"
    command = [toolkit.nvcc, "-ptx", f"-arch=compute_{arch}", source, "-o", made]
    subprocess.run(command, check=True, capture_output=True)
    assert made.read_text() == module.ptx, f"{source.name} changed: make its PTX again"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.name)
def test_correct_kernel_is_silent(
    strict: Simulator, module: Module, mode: str, record_property: Record, capfd
) -> None:
    begin = time.perf_counter()
    for seed in (1, 2):
        with strict.options(mode=mode, seed=seed):
            assert module.right(module.ptx)
    count = sum(launch["warp_instructions"] for launch in strict.launches())
    name = f"{module.name}.ptx, {mode}, all watchers"
    record_property(PROOF, row(4, name, True, "passed", count, time.perf_counter() - begin))
    assert "ptxsim" not in capfd.readouterr().err


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.name)
def test_right_in_every_accumulation_mode(sim: Simulator, module: Module) -> None:
    for mode in ("exact", "sequential", "truncating"):
        with sim.options(accumulate=mode):
            assert module.right(module.ptx), mode


def test_every_scale_selector_matters(sim: Simulator) -> None:
    """Each byte-id and thread-id of the first block-scaled mma.sync of its kind, changed alone."""
    pattern = re.compile(r"\{(\d), (\d)\}(?=, \{%r\d+\}, \{|;)")
    seen: set[tuple[int, str, int]] = set()
    for line in [x for x in SCALED.splitlines() if "{%r" in x and pattern.search(x)]:
        for side, found in enumerate(pattern.finditer(line)):
            byte, thread = int(found[1]), int(found[2])
            for what, changed in (
                ("byte", (byte ^ 1, thread)),
                ("thread", (byte, thread ^ 1)),
            ):
                key = (side, what, byte if what == "byte" else thread)
                if key in seen:
                    continue
                seen.add(key)
                text = f"{{{changed[0]}, {changed[1]}}}"
                wrong = line[: found.start()] + text + line[found.end() :]
                assert not sm120_gemm(SCALED.replace(line, wrong, 1)), (line, wrong)
    assert len(seen) == 4 + 4 + 2 + 4


def entry(ptx: str, name: str) -> str:
    """The module header and one kernel of it."""
    head, *rest = ptx.split(".visible .entry ")
    return head + ".visible .entry " + next(r for r in rest if r.startswith(name + "("))


REPORTS = [
    ("ring", "fence.proxy.async.shared::cta;", "[missing proxy-fence] proxy error"),
    ("ring", "cp.async.bulk.wait_group.read 0;", "[missing bulk-wait] data race"),
    ("ring", "bar.sync \t0;", "[missing mbarrier-init]"),
    ("reduce", "membar.gl;", "[missing barrier] data race on 4 bytes at global"),
    ("gemm", "tcgen05.wait::ld.sync.aligned;", "[missing tcgen05-wait] data race on 8 columns"),
]


KERNELS = {"ring": ring, "reduce": block_reduce, "gemm": gemm}


def reports(sim: Simulator, kernel: Callable[[str], bool], ptx: str) -> list[str]:
    """What eight schedules say; every one of them has to fail the launch."""
    found = []
    for seed in range(1, 9):
        with sim.options(seed=seed), pytest.raises(SimulationError) as error:
            kernel(ptx)
        found.append(str(error.value))
    return found


@pytest.mark.parametrize(("name", "removed", "report"), REPORTS)
def test_report_names_the_missing_edge(
    strict: Simulator, name: str, removed: str, report: str
) -> None:
    """Which of two broken rules is met first depends on the schedule; some schedule names this one."""
    text = entry(PTX, name)
    assert removed in text
    strict.set(watch="race")
    found = reports(strict, KERNELS[name], text.replace(removed, "", 1))
    named = [message for message in found if report in message]
    assert named, found
    assert all(message.count("PTX line") >= 2 for message in named)


def test_commit_by_the_wrong_instruction(strict: Simulator) -> None:
    """A plain arrive in place of tcgen05.commit: right often enough by timing, never by rule."""
    strict.set(watch="race")
    commits = [m for m in mutants.mutants(entry(PTX, "gemm"), ["arrive"])]
    assert len(commits) == 2
    for m in commits:
        found = reports(strict, gemm, m.text)
        assert any("missing tcgen05-commit" in message for message in found), found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.name)
def test_every_effective_mutant_is_caught(
    strict: Simulator, module: Module, mode: str, record_property: Record
) -> None:
    def check(path: Path) -> tuple[bool, str]:
        try:
            return module.right(path.read_text()), "wrong result"
        except SimulationError as error:
            return False, str(error)

    listed = mutants.read_harmless(module.known)
    known = {x.key: x.reason for x in listed}
    with strict.options(mode=mode, seed=3):
        results = mutants.run(module.ptx, check, known=known)
    seconds = sum(r.seconds for r in results)
    record_property(PROOF, mutant_row(f"{module.name}.ptx, {mode}", results, seconds))
    survived = [r for r in results if r.verdict in ("survived", "not executed")]
    assert not survived, mutants.table(results)
    assert len(results) == MUTANTS[module.name]
    assert mutants.stale(listed, results) == []


def test_race_alone_does_not_depend_on_timing(strict: Simulator) -> None:
    """What happens-before finds in one schedule, it finds in the eager one too, where no mutant of
    the full wait reads wrong data."""
    strict.set(watch="race")
    with strict.options(mode="eager", seed=1):
        waits = [m for m in mutants.mutants(entry(PTX, "gemm"), ["drop"]) if "wait" in m.original]
        for m in waits:
            with pytest.raises(SimulationError):
                gemm(m.text)


def test_unknown_race_option_is_named(sim: Simulator, monkeypatch, capfd) -> None:
    monkeypatch.setitem(os.environ, "PTXSIM_RACE", "sharp")
    sim.set(watch="race")
    sim.set(watch="none")
    assert "PTXSIM_RACE: race option 'sharp'" in capfd.readouterr().err
