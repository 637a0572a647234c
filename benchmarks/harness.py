# SPDX-License-Identifier: Apache-2.0
"""Timing on a GPU: every implementation of a case is checked, then all are timed in turns.

A Job is one implementation of one case. measure() first runs each job's own check; a wrong result raises
and nothing is timed. Then come ROUNDS rounds over all jobs, so that clocks and temperature hit everyone
alike. Times are flashinfer.testing's: the job is captured into a CUDA graph and replayed with a cold
L2, see TIMERS. CUPTI (cupti-python 13 or later) gives the span from the first kernel's start to the last
one's end.
"""

from __future__ import annotations

import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.rows import Row, make_row

ROUNDS = 5
REPEATS = 10
WARM_UP = 2
COPY = "copy"
COPY_KERNEL = "copy by a kernel"
COPY_BYTES = 1 << 30
# rotate, flush: CUPTI's span of a replay, the L2 made cold by other copies of the operands, or by
# writing a buffer of twice its size, whose lines the timed kernels then have to evict to memory;
# events: CUDA events around a graph of many calls over such copies.
TIMERS = ("rotate", "flush", "events")


class WrongResultError(RuntimeError):
    """A job's output is not what it must be."""


@dataclass
class Check:
    """Relative L2 distance of a job's output to what it must be, and the limit.

    ``original``: the distance to float64 attention over the values before quantisation, for the record.
    """

    error: float
    limit: float
    against: str
    original: float | None = None

    @property
    def ok(self) -> bool:
        return self.error <= self.limit  # False for NaN


@dataclass
class Job:
    """One implementation of one case.

    Attributes:
        call: launches the work; takes ``args``.
        args: the tensors that the work reads and writes. The event timer rotates over copies of them,
            so nothing large may hide in the closure.
        moved: bytes that ``bandwidth`` counts: KV bytes read, or read plus written for a copy.
        check: runs the job once and compares; None for a copy.
    """

    case: str
    impl: str
    call: Callable[..., object]
    args: tuple = ()
    moved: int = 0
    check: Callable[[], Check] | None = None
    note: str | None = None
    checked: Check | None = None
    rounds: list[list[float]] = field(default_factory=list)

    @property
    def timing(self) -> Timing:
        return Timing.of(self.rounds)


@dataclass(frozen=True)
class Timing:
    """Microseconds. ``spread``: largest minus smallest round median, over the median."""

    median: float
    mean: float
    spread: float

    @staticmethod
    def of(rounds: Sequence[Sequence[float]]) -> Timing:
        if not rounds or not all(rounds):
            raise ValueError("rounds: every round needs at least one time")
        middles = [statistics.median(r) for r in rounds]
        median = statistics.median(t for r in rounds for t in r)
        return Timing(median, statistics.fmean(middles), (max(middles) - min(middles)) / median)


Timer = Callable[[Job], list[float]]


def geometric_mean(values: Iterable[float]) -> float:
    values = list(values)
    if not values or min(values) <= 0.0:
        raise ValueError(f"values: need at least one, all positive, got {values}")
    return math.exp(statistics.fmean(math.log(v) for v in values))


def relative_l2(got: torch.Tensor, truth: torch.Tensor) -> float:
    """|got - truth| / |truth| in float64; NaN anywhere gives NaN."""
    truth = truth.double()
    return float((got.double().to(truth.device) - truth).norm() / truth.norm())


def copies_of(job: Job, count: int) -> list[tuple]:
    """The job's args and ``count`` - 1 copies of them."""

    def clone(x):
        return x.clone() if isinstance(x, torch.Tensor) else x

    return [job.args, *(tuple(map(clone, job.args)) for _ in range(count - 1))]


def capture(job: Job, args: tuple) -> torch.cuda.CUDAGraph:
    """One call of the job as a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        job.call(*args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.call(*args)
    return graph


def flashinfer_timer(method: str) -> Timer:
    """Microseconds per run from flashinfer.testing, by graph replay with a cold L2."""
    from flashinfer import testing

    # Graphs of a job, kept over the rounds, with the job, so that no id is reused, and the copies that
    # they read.
    graphs: dict[int, tuple[Job, list[tuple], Iterator[torch.cuda.CUDAGraph]]] = {}

    def count(job: Job) -> int:
        """Copies of the operands that rotation needs: five times the L2 in all, and at least two.

        why two: the end of a pass over large operands would meet the next pass in the L2, which
        helps small formats more than large ones.
        """
        tensors = [t for t in job.args if isinstance(t, torch.Tensor)]
        return max(2, testing.utils.calculate_rotation_count(tensors))

    def rotate(job: Job) -> dict[str, object]:
        if id(job) not in graphs:
            copies = copies_of(job, count(job))
            turns = itertools.cycle([capture(job, args) for args in copies])
            graphs[id(job)] = (job, copies, turns)
        turns = graphs[id(job)][2]
        return {"fn": lambda: next(turns).replay(), "enable_cupti": True, "cold_l2_cache": False}

    def run(job: Job) -> list[float]:
        if method == "rotate":
            options = rotate(job)
        else:
            options = {"fn": job.call, "input_args": job.args, "use_cuda_graph": True,
                       "enable_cupti": method == "flush", "cold_l2_cache": True}  # fmt: skip
        if method == "events":
            # why: fewer calls in the graph than copies would meet a part of the operands in the L2.
            options["num_iters_within_graph"] = max(10, min(count(job), 200))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="CUPTI is not installed")
            times = testing.bench_gpu_time(
                dry_run_iters=WARM_UP, repeat_iters=REPEATS, **options
            )  # fmt: skip
        return [t * 1e3 for t in times]

    def forget() -> None:
        graphs.clear()

    run.forget = forget
    return run


def cupti_refusal() -> str | None:
    """Why CUPTI cannot time here, or None."""
    try:
        from importlib.metadata import version

        import cupti.cupti  # noqa: F401

        found = version("cupti-python")
    except Exception as error:  # not installed, or its library does not load
        return f"cupti-python 13 or later is not usable ({error})"
    if int(found.split(".")[0]) < 13:
        return f"cupti-python is {found}, 13 or later is needed"
    probe = torch.empty(1 << 20, device="cuda")
    try:
        flashinfer_timer("flush")(Job("probe", "probe", lambda x: x.mul_(1.0), (probe,)))
    except Exception as error:  # CUPTI's own errors, by driver and permission
        return f"CUPTI failed: {type(error).__name__}: {error}"
    return None


def choose_timer(method: str | None) -> tuple[str, Timer]:
    """The timer asked for, else "rotate" where CUPTI works, else "events"."""
    if method is None:
        refusal = cupti_refusal()
        method = "events" if refusal else "rotate"
        if refusal:
            print(f"timer: events, not CUPTI; {refusal}", flush=True)
    if method not in TIMERS:
        raise ValueError(f"timer: allowed are {', '.join(TIMERS)}, got {method!r}")
    return method, flashinfer_timer(method)


def copy_jobs(case: str, device: torch.device, size: int = COPY_BYTES) -> list[Job]:
    """Device-to-device copies by the driver and by a kernel; count bytes read plus written.

    why both: the driver's copy of 1 GiB reached 2.5 TB/s on an H200 when replayed from a graph, and
    4.05 when launched on a stream. The faster of the two is what bandwidths are compared with.
    """
    source = torch.rand(size // 4, device=device)
    target = torch.empty_like(source)
    return [
        Job(case, COPY, lambda to, of: to.copy_(of), (target, source), 2 * size),
        Job(case, COPY_KERNEL, lambda to, of: torch.neg(of, out=to), (target, source), 2 * size),
    ]


def check_all(jobs: Sequence[Job]) -> None:
    """Runs every job's check; a wrong result raises before anything is timed."""
    for job in jobs:
        if job.check is None:
            continue
        if job.checked is None:
            job.checked = job.check()
        if not job.checked.ok:
            found = job.checked
            raise WrongResultError(
                f"{job.case}, {job.impl}: relative L2 {found.error:.3g} to {found.against}, "
                f"at most {found.limit:g} allowed; nothing was timed"
            )


def measure(jobs: Sequence[Job], timer: Timer, rounds: int = ROUNDS) -> None:
    """Checks all jobs, then times them in turns."""
    check_all(jobs)
    try:
        for _ in range(rounds):
            for job in jobs:
                job.rounds.append(timer(job))
    finally:
        getattr(timer, "forget", lambda: None)()


def copy_bandwidth(jobs: Iterable[Job]) -> float | None:
    """GB/s of the faster copy among the jobs."""
    found = [j.moved / j.timing.median / 1e3 for j in jobs if j.impl in (COPY, COPY_KERNEL)]
    return max(found, default=None)


def rows_of(
    bench: str, jobs: Sequence[Job], common: Row, baselines: Sequence[str] = (), note: str = ""
) -> list[Row]:
    """Median, mean of the rounds, spread, bandwidth and error of every job.

    ``ratio_to`` of a time is the baseline's time over this one (above 1: this one is faster), of a
    bandwidth its share of the copy's.
    """
    copy = copy_bandwidth(jobs)
    rows = []
    for job in jobs:
        timing = job.timing
        ratios = {
            other.impl: round(other.timing.median / timing.median, 3)
            for other in jobs
            if other.impl in baselines and other is not job
        }
        text = "; ".join(filter(None, [note, job.note])) or None

        def add(metric, value, unit, ratio=None, job=job, text=text):
            rows.append(
                make_row(bench, job.case, job.impl, metric, value, unit, common, ratio, text)
            )

        add("time", timing.median, "us", ratios or None)
        add(f"time, mean of {len(job.rounds)}", timing.mean, "us")
        add("time, spread", 100.0 * timing.spread, "%")
        if job.moved:
            rate = job.moved / timing.median / 1e3
            add("bandwidth", rate, "GB/s", {COPY: round(rate / copy, 3)} if copy else None)
        if job.checked is not None:
            add(f"relative L2 to {job.checked.against}", job.checked.error, "")
            if job.checked.original is not None:
                add("relative L2 to float64 of the original values", job.checked.original, "")
    return rows


def print_table(title: str, jobs: Sequence[Job], baselines: Sequence[str] = ()) -> None:
    """One line per job; the ratio columns are the baseline's time over the job's."""
    copy = copy_bandwidth(jobs)
    present = [b for b in baselines if any(j.impl == b for j in jobs)]
    width = max(len(j.impl) for j in jobs)
    print(f"\n{title}")
    heads = "".join(f"  {'x ' + b:>{max(len(b) + 2, 7)}}" for b in present)
    print(f"  {'':{width}}  {'median us':>10} {'mean':>9} {'spread':>7} {'GB/s':>7} {'of copy':>8}"
          f" {'rel L2':>9}{heads}")  # fmt: skip
    for job in jobs:
        t = job.timing
        rate = job.moved / t.median / 1e3 if job.moved else None
        share = f"{rate / copy:.1%}" if rate and copy else ""
        found = job.checked.original if job.checked else None
        error = "" if found is None else f"{found:.2e}"
        line = f"  {job.impl:{width}}  {t.median:>10.2f} {t.mean:>9.2f} {t.spread:>7.1%}"
        line += f" {'' if rate is None else f'{rate:.0f}':>7} {share:>8} {error:>9}"
        for b in present:
            other = next(j for j in jobs if j.impl == b).timing.median
            cell = "1" if job.impl == b else f"{other / t.median:.2f}"
            line += f"  {cell:>{max(len(b) + 2, 7)}}"
        print(line, flush=True)
