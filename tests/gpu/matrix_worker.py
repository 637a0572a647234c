# SPDX-License-Identifier: Apache-2.0
"""Runs cases of the kernel matrices in a process of its own, so that a kernel that hangs or destroys
its CUDA context costs one case and not the run.

    python tests/gpu/matrix_worker.py [--device cuda:0|sim]          requests on stdin, see answer()
    python tests/gpu/matrix_worker.py --family NAME [--index N ...]  these cases, as text

Answers are lines of stdout that begin with MARK; everything else is for a person to read.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "gpu")]

MARK = "@matrix "


class Bench:
    """The device with the modules of the families that have been asked for."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._executors: dict[str, Any] = {}

    def executor(self, name: str) -> Any:
        """Builds the family's modules at the first use, in parallel."""
        if name not in self._executors:
            self._executors[name] = self._make(name)
        return self._executors[name]

    def _make(self, name: str) -> Any:
        import torch
        from families import families
        from kernel_runner import Cuda

        from mpfa.jit import cuda

        family = families()[name]
        specs = family.specs()
        if self.device == "sim":
            return self._simulated(family.major, specs)
        with ThreadPoolExecutor(max(1, min(len(specs), (os.cpu_count() or 2) // 2))) as pool:
            list(pool.map(cuda.build, specs.values()))
        modules = {key: cuda.load(spec) for key, spec in specs.items()}
        return Cuda(modules.__getitem__, torch.device(self.device))

    def _simulated(self, major: int, specs: dict[str, Any]) -> Any:
        from kernel_runner import Simulated

        from mpfa import sim
        from mpfa.jit import attention, cuda

        # What tests/sm90 and the other kernels' simulator tests compile for. flashinfer reads it once.
        os.environ.setdefault(cuda.ARCH_VARIABLE, "9.0a" if major == 9 else attention.SIM_ARCHS)
        options = {"mode": "lazy", "watch": "all", "seed": 3, "timeout": 120}
        simulator = sim.simulator()

        @functools.cache
        def module(key: str) -> Any:
            return sim.load(cuda.build(specs[key]), tvm_ffi=True)

        return Simulated(module, lambda: simulator.options(device=f"{major}.0", **options))

    def usable(self) -> bool:
        """Does the device still answer after an error?"""
        if self.device == "sim":
            return True
        import torch

        try:
            probe = torch.ones(4, device=self.device)
            torch.cuda.synchronize()
            return float(probe.sum()) == 4.0
        except RuntimeError:
            return False


def answer(bench: Bench, request: dict[str, Any]) -> dict[str, Any]:
    """{"family"} loads its modules; with "index", "repeats", "replays" and "guard_bytes" runs a case.

    The answer has "faults" (of a case that ran), "skipped" (a reason) or "error", and then whether
    the process is "lost".
    """
    import pytest
    from families import families
    from kernel_runner import NotRun, Settings

    begin = time.perf_counter()
    try:
        executor = bench.executor(request["family"])
        if "index" not in request:
            return {"seconds": time.perf_counter() - begin}
        family = families()[request["family"]]
        settings = Settings(request["repeats"], request["replays"], request["guard_bytes"])
        outcome = family.run(family.cases()[request["index"]], executor, settings)
    except (NotRun, pytest.skip.Exception) as reason:
        return {"skipped": str(reason)}
    except Exception as error:  # noqa: BLE001
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        return {"error": text[:2000], "lost": not bench.usable()}
    return vars(outcome) | {"seconds": time.perf_counter() - begin}


def serve(bench: Bench) -> int:
    for line in sys.stdin:
        reply = answer(bench, json.loads(line))
        print(MARK + json.dumps(reply), flush=True)
        if reply.get("lost"):
            # why not return: a destroyed context may wait for its kernel at the interpreter's end.
            os._exit(3)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cuda:0", help='"cuda:N", or "sim" for the simulator')
    parser.add_argument("--family", help="run cases of this matrix instead of serving")
    parser.add_argument("--index", type=int, nargs="*", help="positions in the list; all")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--replays", type=int, default=10)
    parser.add_argument("--guard-bytes", type=int, default=64 << 10)
    args = parser.parse_args()
    import torch
    from families import families

    torch.set_num_threads(1)
    bench = Bench(args.device)
    if args.family is None:
        return serve(bench)
    if args.family not in families():
        parser.error(f"--family: must be one of {', '.join(families())}, got {args.family!r}")
    cases = families()[args.family].cases()
    chosen = range(len(cases)) if args.index is None else args.index
    bad = ran = 0
    for index in chosen:
        reply = answer(
            bench,
            {"family": args.family, "index": index, "repeats": args.repeats,
             "replays": args.replays, "guard_bytes": args.guard_bytes},
        )  # fmt: skip
        faults = reply.get("faults", [reply["error"]] if "error" in reply else [])
        ran += "skipped" not in reply
        bad += bool(faults)
        verdict = reply.get("skipped") or "; ".join(faults) or "right"
        print(f"{index} {cases[index].name}: {verdict}", flush=True)
        if reply.get("lost"):
            break
    print(f"{args.family}: {ran} of {len(cases)} cases ran, {ran - bad} right")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
