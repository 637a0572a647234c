# SPDX-License-Identifier: Apache-2.0
"""The race detector on small kernels: silent as they are, an error with any edge left out.

race/kernels.cu holds the kernels, race/kernels.ptx what nvcc made of them, race/kernels.known the
mutants that are harmless and why.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mpfa.sim import SimulationError, Simulator, mutants, run_ptx

RACE = Path(__file__).resolve().parent / "race"
PTX = (RACE / "kernels.ptx").read_text()
STRICT = "strict"


def ring(ptx: str) -> bool:
    x = torch.arange(64 * 6, dtype=torch.float32)
    y = torch.zeros_like(x)
    run_ptx(ptx, "ring", x, y, 6, block=(96,))
    return torch.equal(y, 2 * x)


def reduce(ptx: str) -> bool:
    x = torch.arange(128 * 3, dtype=torch.int32)
    partial, count, result = (torch.zeros(n, dtype=torch.int32) for n in (3, 1, 1))
    run_ptx(ptx, "reduce", x, partial, count, result, grid=(3,), block=(128,))
    return int(result) == int(x.sum())


def exchange(ptx: str) -> bool:
    x = torch.arange(64, dtype=torch.int32)
    y = torch.zeros_like(x)
    run_ptx(ptx, "exchange", x, y, grid=(2,), block=(32,))
    return torch.equal(y, torch.cat([x[32:], x[:32]]))


def copies(ptx: str) -> bool:
    x = torch.arange(5 * 64 * 4, dtype=torch.int32)
    y = torch.zeros_like(x)
    run_ptx(ptx, "copies", x, y, 5, block=(64,))
    return torch.equal(y, x.view(5, 2, 32, 4).flip(1).reshape(-1))


def gemm(ptx: str) -> bool:
    """Small integers: exact. Operands as 8 x 16-byte core matrices, K-major, no swizzle."""
    steps, rounds = 3, 3
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-3, 4, (steps, 128, 16), generator=generator).bfloat16()
    b = torch.randint(-3, 4, (steps, 64, 16), generator=generator).bfloat16()

    def core(m: torch.Tensor) -> torch.Tensor:
        return m.view(steps, -1, 8, 2, 8).permute(0, 1, 3, 2, 4).contiguous()

    d = torch.zeros(128, 64)
    run_ptx(ptx, "gemm", core(a), core(b), d, steps, rounds, block=(128,))
    return torch.equal(d, torch.einsum("kmc,knc->mn", a.float(), b.float()))


KERNELS: dict[str, Callable[[str], bool]] = {
    f.__name__: f for f in (ring, reduce, exchange, copies, gemm)
}


@pytest.fixture
def strict(sim: Simulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    """All watchers, the race detector with its strictest rules; a hanging mutant ends after 20 s."""
    monkeypatch.setenv("PTXSIM_RACE", STRICT)
    sim.set(watch="all", timeout=20)
    yield sim
    sim.set(watch="none")


@pytest.mark.parametrize("mode", ["eager", "random", "lazy"])
@pytest.mark.parametrize("name", KERNELS)
def test_correct_kernel_is_silent(strict: Simulator, name: str, mode: str, capfd) -> None:
    for seed in (1, 2):
        with strict.options(mode=mode, seed=seed):
            assert KERNELS[name](PTX)
    assert "ptxsim" not in capfd.readouterr().err


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


@pytest.mark.parametrize("mode", ["eager", "random", "lazy"])
def test_every_effective_mutant_is_caught(strict: Simulator, mode: str) -> None:
    def check(path: Path) -> tuple[bool, str]:
        text = path.read_text()
        try:
            return all(run(text) for run in KERNELS.values()), "wrong result"
        except SimulationError as error:
            return False, str(error)

    known = mutants.read_known(RACE / "kernels.known")
    with strict.options(mode=mode, seed=3):
        results = mutants.run(PTX, check, known=known)
    survived = [r for r in results if r.verdict in ("survived", "not executed")]
    assert not survived, mutants.table(results)
    assert len(results) >= 50
    assert set(known) <= {r.mutant.key for r in results}


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
