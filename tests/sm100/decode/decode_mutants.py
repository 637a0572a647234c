# SPDX-License-Identifier: Apache-2.0
"""What a mutant of the decode module has to survive: two launches that use every role, ring and branch
of the kernel, under all watchers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import decode_cases
import torch
from decode_cases import Case

from mpfa import sim

# Rings wrap, a worker walks several items, scales are stored as atoms and built, values are cleared
# at a tail and outside a window, O is rescaled, partials are written and final rows too.
CASES = (
    Case((700, 130, 1, 0), 3, 128, 32, "mean+channels", 15, 2, split_tokens=512, k_bias=2.0),
    Case((530, 200, 90), 10, 128, 128, "mean", 0, 2, window_left=300, sinks=True, scale=3.0),
)
OPTIONS = {"device": "10.0", "mode": "lazy", "watch": "all", "seed": 5, "timeout": 20}


class Check:
    """check(path of a PTX module) -> (right, why not)."""

    def __init__(self, decode, combine, tile_rows: int | None, replay) -> None:
        self.modules = (decode, combine)
        self.inputs = [replace(decode_cases.build(case), tile_rows=tile_rows) for case in CASES]
        # Two workers, so that they walk several items each.
        self.want = [self.run(i) for i in self.inputs]
        for inputs, got in zip(self.inputs, self.want, strict=True):
            found = decode_cases.faults(got, replay(inputs))
            if found:
                raise ValueError(f"{inputs.case.name}: {found}")

    def run(self, inputs):
        with sim.simulator().options(**OPTIONS) as simulator:
            simulator.clear()
            got = decode_cases.run(*self.modules, inputs, num_sm=1)
            simulator.check()
        return got

    def __call__(self, path: Path) -> tuple[bool, str]:
        with sim.simulator().options(ptx=str(path)):
            for inputs, want in zip(self.inputs, self.want, strict=True):
                try:
                    got = self.run(inputs)
                except (sim.SimulationError, RuntimeError) as error:
                    return False, str(error).splitlines()[0][:300]
                if not (torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])):
                    return False, "wrong result"
        return True, ""
