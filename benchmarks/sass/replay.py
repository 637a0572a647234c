# SPDX-License-Identifier: Apache-2.0
"""In-order replay of a loop body by the warps of one SM sub-partition.

Each warp issues its instructions in order. An instruction issues when the warp's stall count has run
out, the scoreboards that it waits for are free, its pipe can take it, and the sub-partition's one issue
slot is not used by another warp in that cycle. Stall counts and scoreboards are the compiler's own, so
fixed latencies need no table; the results that a scoreboard guards arrive after the pipe's backlog and
the latency of weights.py.

Barriers between warps and loads from memory count as fulfilled, banks as free of conflicts: what is
left is the best that this instruction stream can do, including the phases in which one warp's softmax
leaves the tensor pipe to the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import weights
from .parse import Instruction
from .weights import Arch

# Pipes with a queue in front: the warp goes on while the backlog is at most so many cycles.
_QUEUE = {weights.LSU: 32.0, weights.MUFU: 16.0, weights.TMEM: 64.0, weights.UNIFORM: 8.0}
_OPERANDS_READ = 10.0
# Trips that one warp can be ahead of another: they share the stages of a ring in shared memory.
_AHEAD = 2


@dataclass
class _Warp:
    position: int = 0
    trip: int = 0
    ready: float = 0.0
    scoreboard: list[float] = field(default_factory=lambda: [0.0] * 6)


@dataclass(frozen=True)
class Replay:
    """Steady state of ``warps`` warps in one sub-partition.

    Attributes:
        cycles: per trip of all of them.
        busy: pipe -> share of the cycles in which it works.
        waits: reason -> share of a warp's cycles spent waiting for it.
    """

    warps: int
    cycles: float
    busy: dict[str, float]
    waits: dict[str, float]


@dataclass(frozen=True)
class _Step:
    stall: float
    wait: tuple[int, ...]
    write: int | None
    read: int | None
    pipe: str | None
    cycles: float
    latency: float


def _steps(code: Sequence[Instruction], arch: Arch) -> list[_Step]:
    steps = []
    for i in code:
        cost = arch.cost(i)
        control = i.control
        steps.append(
            _Step(
                float(max(1, control.stall)),
                tuple(b for b in range(6) if control.wait >> b & 1),
                control.write_barrier,
                control.read_barrier,
                cost.pipe if cost else None,
                cost.cycles if cost else 0.0,
                arch.latency_of(i),
            )
        )
    return steps


def replay(
    code: Sequence[Instruction],
    arch: Arch,
    warps: int,
    trips: int = 24,
    warm: int = 8,
    offset: float = 37.0,
) -> Replay:
    """Runs ``trips`` trips of each warp and measures the ones after ``warm``.

    Args:
        offset: cycles between the starts of two warps.

    Raises:
        ValueError: an empty loop, or fewer trips than the measurement needs.
    """
    if not code:
        raise ValueError("code: the loop has no instruction")
    if trips < warm + 2 or warps < 1:
        raise ValueError(f"trips, warps: {trips} and {warps}; needs {warm + 2} and 1 or more")
    steps = _steps(code, arch)
    state = [_Warp(ready=offset * w) for w in range(warps)]
    free = dict.fromkeys([*weights.PIPES, weights.UNIFORM], 0.0)
    busy: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    now, last = 0.0, 0
    begin = None

    def blocked(warp: _Warp) -> tuple[float, str]:
        """(time at which the warp's next instruction can issue, what it waits for)."""
        step = steps[warp.position]
        when, why = warp.ready, "stall count"
        for b in step.wait:
            if warp.scoreboard[b] > when:
                when, why = warp.scoreboard[b], "scoreboard"
        if step.pipe is not None:
            at = free[step.pipe] - _QUEUE.get(step.pipe, 0.0)
            if at > when:
                when, why = at, step.pipe
        return when, why

    while True:
        options = []
        slowest = min(w.trip for w in state)
        for n, warp in enumerate(state):
            if warp.trip < slowest + _AHEAD:
                when, why = blocked(warp)
                options.append((max(when, now), n != last, warp.trip, warp.position, n, why))
        when, *_, chosen, _ = min(options)
        measured = begin is not None
        for at, _, _, _, n, why in options:
            if measured and n != chosen and at > now:
                waits[why] += min(at, when + 1) - now
        if measured and when > now:
            why = next(o[5] for o in options if o[4] == chosen)
            waits[why] += when - now
        now = when
        warp, step = state[chosen], steps[state[chosen].position]
        start = now
        if step.pipe is not None:
            start = max(now, free[step.pipe])
            free[step.pipe] = start + step.cycles
            if measured:
                busy[step.pipe] += step.cycles
        if measured:
            busy[weights.ISSUE] += 1
        done = start + step.latency
        if step.write is not None:
            warp.scoreboard[step.write] = max(warp.scoreboard[step.write], done)
        if step.read is not None:
            read = start + step.cycles + _OPERANDS_READ
            warp.scoreboard[step.read] = max(warp.scoreboard[step.read], read)
        warp.ready = now + step.stall
        warp.position += 1
        if warp.position == len(steps):
            warp.position = 0
            warp.trip += 1
            if begin is None and all(w.trip >= warm for w in state):
                begin = now
                progress = sum(w.trip + w.position / len(steps) for w in state)
        last = chosen
        now += 1
        if slowest >= trips:
            break
    done_trips = sum(w.trip + w.position / len(steps) for w in state) - progress
    span = now - begin
    return Replay(
        warps,
        span / done_trips * warps,
        {pipe: busy[pipe] / span for pipe in weights.PIPES},
        {why: value / (span * warps) for why, value in waits.most_common()},
    )


def alone(code: Sequence[Instruction], arch: Arch) -> float:
    """Cycles of one trip when one warp has the sub-partition for itself: the length of its chain as
    the compiler scheduled it."""
    return replay(code, arch, 1).cycles
