# SPDX-License-Identifier: Apache-2.0
"""Every synchronising instruction of both decode kernels, taken out or weakened one at a time: caught,
or listed in decode.known / decode_rows.known with the edge that orders the accesses anyway."""

from __future__ import annotations

from pathlib import Path

import decode_cases
import decode_mutants
import pytest
from proof_table import PROOF, mutant_row
from rows_replay import replay_rows

from mpfa import sim
from mpfa.sim import mutants

HERE = Path(__file__).parent
KERNELS = {
    "decode": ("128", None, decode_cases.replay),
    "decode_rows": ("rows", 32, replay_rows),
}


@pytest.fixture
def strict(monkeypatch):
    """The race detector with its strictest rules."""
    monkeypatch.setenv("PTXSIM_RACE", "strict")
    yield
    sim.simulator().set(watch="none")


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_every_mutant_is_caught_or_explained(name, modules, libraries, strict, record_property):
    module, tile_rows, replay = KERNELS[name]
    check = decode_mutants.Check(modules[module], modules["combine"], tile_rows, replay)
    ((_, ptx),) = sim.extract_ptx(libraries[module])
    listed = mutants.read_harmless(HERE / f"{name}.known")
    results = mutants.run(ptx, check, known={x.key: x.reason for x in listed})
    seconds = sum(r.seconds for r in results)
    record_property(PROOF, mutant_row(f"sm100 {name}", results, seconds))
    wrong = [r for r in results if r.verdict in ("survived", "not executed")]
    assert not wrong, mutants.table(results)
    assert mutants.stale(listed, results) == []
    assert len(results) > 80


@pytest.mark.parametrize("name", KERNELS)
def test_some_mutants(name, modules, libraries, strict):
    """One of each kind, for make test: the check can fail."""
    module, tile_rows, replay = KERNELS[name]
    check = decode_mutants.Check(modules[module], modules["combine"], tile_rows, replay)
    ((_, ptx),) = sim.extract_ptx(libraries[module])
    harmless = {x.key for x in mutants.read_harmless(HERE / f"{name}.known")}
    chosen = {}
    for m in mutants.mutants(ptx):
        if m.key not in harmless:
            chosen.setdefault((m.kind, m.opcode.split(".")[0]), m.key)
    results = mutants.run(ptx, check, keys=set(chosen.values()), coverage=False)
    assert [r.mutant.key for r in results if r.verdict != "caught"] == []
    assert len(results) >= 6
