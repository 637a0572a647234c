# SPDX-License-Identifier: Apache-2.0
"""Every synchronising instruction of the kernel left out or weakened: caught, or harmless with the
edge that makes it so (mutants.known)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sm120_cases import Case, built, launch

from mpfa import sim
from mpfa.sim import mutants

KNOWN = Path(__file__).with_name("mutants.known")


def case_for(head_dim: int) -> Case:
    """One worker, two items, more blocks than stages in each, a tail that is cleared in both."""
    block = 128 if head_dim == 64 else 64
    return Case(head_dim, (20, 3), (7 * block + 40, 6 * block + 5), page_size=64, num_sm=1, seed=1)


def ptx_of(library: Path) -> str:
    texts = [text for _, text in sim.extract_ptx(library) if "sm120_prefill" in text]
    assert len(texts) == 1
    return texts[0]


@pytest.mark.parametrize(
    ("head_dim", "mode"),
    [(128, "lazy")]
    + [pytest.param(d, m, marks=pytest.mark.slow) for d in (64, 128) for m in ("eager", "random")]
    + [pytest.param(64, "lazy", marks=pytest.mark.slow)],
)
def test_every_effective_mutant_is_caught(
    head_dim, mode, libraries, modules, simulator, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("PTXSIM_RACE", "strict")
    simulator.set(watch="all")  # reads the variable
    module, inputs = modules[head_dim], built(case_for(head_dim))
    with simulator.options(mode=mode, timeout=20):
        want = launch(inputs, module, simulator)

        def check(path: Path) -> tuple[bool, str]:
            try:
                with simulator.options(ptx=path):
                    got = launch(inputs, module, simulator)
            except (sim.SimulationError, RuntimeError) as error:
                return False, str(error).splitlines()[0]
            return torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse), "wrong result"

        known = mutants.read_known(KNOWN)
        results = mutants.run(ptx_of(libraries[head_dim]), check, known=known)
    with capsys.disabled():
        print(f"\nsm120 d{head_dim} {mode}\n{mutants.table(results)}")
    left = [r for r in results if r.verdict in ("survived", "not executed")]
    assert not left, mutants.table(results)
    assert len(results) >= 23
    assert set(known) <= {r.mutant.key for r in results}
