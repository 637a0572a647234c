# SPDX-License-Identifier: Apache-2.0
"""Runs a kernel job on a device: guard bands, poison, repeated runs, graph replays. No pytest.

Every storage that a job names is copied to the device between two guard bands. Outputs and whatever
else the job's builder left unused hold NaN bytes. After each run the guard bands, the inputs and the
bytes around the outputs must be what they were, and the outputs' bits those of the first run. Guard
bands hold NaN bytes in one run and zeros in the next: a kernel that uses what it reads there gives
NaN or two different results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from kernel_job import Job
from torch import Tensor

GUARD_BYTES = 64 << 10
# NaN as bf16, fp32 and e4m3, -1 as an index; then the bytes that hide a read best.
PATTERNS = (0xFF, 0x00)
# A text of faults is read by a person.
MAX_FAULTS = 12


class NotRun(Exception):
    """This executor cannot run the case; the message says why."""


class Graph(Protocol):
    def replay(self) -> None: ...

    def close(self) -> None: ...


class Executor(Protocol):
    """Where launches happen."""

    name: str
    device: torch.device

    def module(self, key: str) -> Any: ...

    def execute(self, body: Callable[[], object], run: int) -> None:
        """Runs ``body`` to its end; raises what its launches raise. ``run`` varies the timing."""

    def capture(self, body: Callable[[], object]) -> Graph: ...


@dataclass(frozen=True)
class Settings:
    """repeats: runs of a case, ``replays`` of them by a captured graph. guard_bytes 0: none, for a
    sanitizer that sees the ends of allocations itself."""

    repeats: int = 20
    replays: int = 10
    guard_bytes: int = GUARD_BYTES

    def __post_init__(self) -> None:
        if self.repeats < 1 or not 0 <= self.replays < self.repeats:
            raise ValueError(
                f"repeats, replays: must be >= 1 and below repeats, got {self.repeats} and "
                f"{self.replays}"
            )
        if self.guard_bytes % 512:
            raise ValueError(f"guard_bytes: must be a multiple of 512, got {self.guard_bytes}")


@dataclass
class Outcome:
    """What a case gave."""

    faults: list[str] = field(default_factory=list)
    repeats: int = 0
    replays: int = 0
    seconds: float = 0.0


class Arena:
    """The bytes of one host storage on a device, between guard bands."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device, guard: int) -> None:
        source = torch.empty(0, dtype=torch.uint8).set_(storage)
        self.names: list[str] = []
        self.guard, self.size = guard, source.numel()
        self.image = source.to(device, copy=True)
        self.raw = torch.empty(self.size + 2 * guard, dtype=torch.uint8, device=device)
        self.body = self.raw[guard : guard + self.size]
        self.fixed: Tensor | None = None  # which bytes must stay; None: all
        self.pattern = PATTERNS[0]

    def view(self, t: Tensor) -> Tensor:
        """The device's copy of ``t``, which lies in this storage."""
        offset = self.guard // t.element_size() + t.storage_offset()
        empty = torch.empty(0, dtype=t.dtype, device=self.raw.device)
        return empty.set_(self.raw.untyped_storage(), offset, t.shape, t.stride())

    def bytes_of(self, t: Tensor, base: Tensor | None = None, start: int | None = None) -> Tensor:
        """uint8 [*t.shape, itemsize] of ``t`` in ``base``, in this arena when left out."""
        base = self.raw if base is None else base
        start = self.guard if start is None else start
        size = t.element_size()
        strides = (*(s * size for s in t.stride()), 1)
        return base.as_strided((*t.shape, size), strides, start + t.storage_offset() * size)

    def allow(self, t: Tensor) -> None:
        """``t`` may be written."""
        if self.fixed is None:
            self.fixed = torch.ones(self.size, dtype=torch.bool, device=self.raw.device)
        self.bytes_of(t, self.fixed, 0).fill_(False)

    def reset(self, pattern: int) -> None:
        self.pattern = pattern
        self.raw.fill_(pattern)
        self.body.copy_(self.image)

    def faults(self) -> list[str]:
        label = "/".join(self.names)
        found = []
        for where, part, nearest in (
            ("before", self.raw[: self.guard], lambda i: self.guard - int(i[-1])),
            ("behind", self.raw[self.guard + self.size :], lambda i: int(i[0])),
        ):
            changed = part != self.pattern
            if bool(changed.any()):
                at = changed.nonzero().flatten()
                found.append(
                    f"{label}: {len(at)} bytes {where} the storage written, the nearest "
                    f"{nearest(at)} bytes away"
                )
        changed = self.body != self.image
        if self.fixed is not None:
            changed &= self.fixed
        if bool(changed.any()):
            at = changed.nonzero().flatten()
            what = "an input" if self.fixed is None else "bytes beside the output"
            found.append(f"{label}: {what} written, {len(at)} bytes, first at byte {int(at[0])}")
        return found


class Placement:
    """Tensors of one case on a device."""

    def __init__(self, device: torch.device, guard_bytes: int = GUARD_BYTES) -> None:
        self.device, self.guard_bytes = device, guard_bytes
        self.arenas: dict[int, Arena] = {}
        self.outputs: dict[str, tuple[Arena, Tensor]] = {}
        self._hosts: list[Tensor] = []  # keeps the keys of ``arenas`` alive

    def put(self, name: str, t: Tensor) -> Tensor:
        """The copy of ``t`` on the device; tensors that share a storage share the copy."""
        arena = self._arena(t)
        if name not in arena.names:
            arena.names.append(name)
        return arena.view(t)

    def put_output(self, name: str, t: Tensor, *, compared: bool = True) -> Tensor:
        """The same for a tensor that may be written; ``compared`` outputs must repeat their bits."""
        copy = self.put(name, t)
        arena = self._arena(t)
        arena.allow(t)
        if compared:
            self.outputs[name] = arena, t
        return copy

    def _arena(self, t: Tensor) -> Arena:
        storage = t.untyped_storage()
        key = storage.data_ptr()  # 0 for every empty one: they can share a copy
        if key not in self.arenas:
            self._hosts.append(t)
            self.arenas[key] = Arena(storage, self.device, self.guard_bytes)
        return self.arenas[key]

    def reset(self, run: int) -> None:
        """Everything as at the beginning; the guard bands' bytes alternate with ``run``."""
        for arena in self.arenas.values():
            arena.reset(PATTERNS[run % len(PATTERNS)])

    def faults(self) -> list[str]:
        return [line for arena in self.arenas.values() for line in arena.faults()]

    def snapshot(self) -> dict[str, Tensor]:
        """The bytes of the compared outputs, dense, on the device."""
        return {name: arena.bytes_of(t).clone() for name, (arena, t) in self.outputs.items()}

    def differences(self, first: Mapping[str, Tensor]) -> list[str]:
        found = []
        for name, (arena, t) in self.outputs.items():
            changed = (arena.bytes_of(t) != first[name]).any(dim=-1)
            if bool(changed.any()):
                at = tuple(changed.nonzero()[0].tolist())
                found.append(
                    f"{name}: {int(changed.sum())} of {changed.numel()} values have other bits than "
                    f"in the first run, first at {at}"
                )
        return found

    def host(self) -> dict[str, Tensor]:
        """The compared outputs, dense, on the host."""
        return {name: arena.view(t).cpu().contiguous() for name, (arena, t) in self.outputs.items()}


def repeat(
    placement: Placement,
    executor: Executor,
    settings: Settings,
    run: Callable[[], object],
    prepare: Callable[[], object] = lambda: None,
) -> tuple[Outcome, dict[str, Tensor]]:
    """Runs ``run`` as often as ``settings`` says, and the outputs of the first run.

    ``prepare`` comes before each run, after the reset (a plan's upload). The last
    ``settings.replays`` runs are replays of a graph that is captured once.
    """
    outcome = Outcome()
    begin = time.perf_counter()
    first: dict[str, Tensor] | None = None
    host: dict[str, Tensor] = {}
    graph: Graph | None = None
    try:
        for i in range(settings.repeats):
            replaying = i >= settings.repeats - settings.replays
            placement.reset(i)
            prepare()
            if replaying and graph is None:
                graph = executor.capture(run)
                placement.reset(i)
                prepare()
            executor.execute(graph.replay if replaying else run, i)
            outcome.repeats += 1
            outcome.replays += replaying
            faults = placement.faults()
            if first is None:
                first, host = placement.snapshot(), placement.host()
            else:
                faults += placement.differences(first)
            kind = "graph replay" if replaying else "run"
            outcome.faults += [f"{kind} {i}: {line}" for line in faults]
            if len(outcome.faults) > MAX_FAULTS:
                break
    finally:
        if graph is not None:
            graph.close()
    outcome.seconds = time.perf_counter() - begin
    return outcome, host


def run_job(job: Job, executor: Executor, settings: Settings) -> Outcome:
    """All runs of a job and the verdict on its outputs."""
    placement = Placement(executor.device, settings.guard_bytes)
    outputs = {id(t): name for name, t in job.outputs.items()}
    for name, t in job.outputs.items():
        placement.put_output(name, t)
    bound = []
    for call in job.calls:
        arguments = []
        for name, value in call.arguments.items():
            if isinstance(value, Tensor):
                value = placement.put(outputs.get(id(value), name), value)
            arguments.append(value)
        bound.append((executor.module(call.module), arguments))

    def run() -> None:
        for module, arguments in bound:
            module.run(*arguments)

    outcome, host = repeat(placement, executor, settings, run)
    outcome.faults = (job.faults(host) + outcome.faults)[:MAX_FAULTS]
    return outcome


# ---- devices ------------------------------------------------------------------------------------


class CudaGraph:
    def __init__(self, body: Callable[[], object]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            body()

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        self._graph.reset()


class Cuda:
    """A GPU. ``modules`` gives the loaded module of a key."""

    name = "cuda"

    def __init__(self, modules: Callable[[str], Any], device: torch.device) -> None:
        self.module, self.device = modules, device
        self._side = torch.cuda.Stream(device)
        # Larger than any L2, so that a write of it leaves the caches cold.
        self._noise = torch.zeros(256 << 20, dtype=torch.uint8, device=device)

    def execute(self, body: Callable[[], object], run: int) -> None:
        """In turn: alone, beside traffic of another stream, with cold caches."""
        torch.cuda.synchronize(self.device)
        if run % 3 == 1:
            with torch.cuda.stream(self._side):
                half = self._noise.numel() // 2
                self._noise[:half].copy_(self._noise[half:])
        elif run % 3 == 2:
            self._noise.zero_()
        body()
        torch.cuda.synchronize(self.device)

    def capture(self, body: Callable[[], object]) -> CudaGraph:
        return CudaGraph(body)


class Simulated:
    """The simulator in the GPU's place: CPU tensors, the same code path."""

    name = "simulator"
    device = torch.device("cpu")

    def __init__(
        self,
        modules: Callable[[str], Any],
        playing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        from mpfa import sim

        self.module, self._playing = modules, playing
        self._simulator = sim.simulator()

    def execute(self, body: Callable[[], object], run: int) -> None:
        with self._playing():
            self._simulator.clear()
            body()
            self._simulator.check()

    def capture(self, body: Callable[[], object]) -> Graph:
        from sim_graph import SimulatedGraph

        with self._playing():
            return SimulatedGraph(self._simulator, body)


def first_lines(lines: Iterable[str], limit: int = 4) -> str:
    """Faults as one line of a report."""
    found = list(lines)
    more = f" (and {len(found) - limit} more)" if len(found) > limit else ""
    return "; ".join(found[:limit]) + more
