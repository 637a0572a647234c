# SPDX-License-Identifier: Apache-2.0
"""The kernels through plan() and run(): paged, ragged and raw operands, split KV, every compensation,
and a graph that is captured once and replayed after further plans. Needs torch and mpfa, no pytest.

Held to backend="reference" on the CPU, which walks the same plan; workspace, outputs, pages and
queries lie between guard bands (tests/kernel_runner.py).
"""

from __future__ import annotations

import itertools
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from attention_cases import (
    POISON_BYTE,
    assert_lse_close,
    config_for,
    head_rel_l2,
    int32,
    make_batch,
    offsets,
    paged,
    static_stats,
)
from kernel_job import as_faults
from kernel_runner import MAX_FAULTS, Executor, NotRun, Outcome, Placement, Settings, repeat

import mpfa
from mpfa.backends import reference as backend_reference
from mpfa.backends.kernels import AttentionKernel
from mpfa.reference.replay import dequant_scheme

COMPENSATIONS = {
    "mxfp8": (("none", 0),),
    "qk4pv8": (("none", 0), ("mean", 0), ("channels", 16), ("mean+channels", 15)),
}
# docs/numerics.md: rel L2 per head to the reference's fp32 result.
GATE = {torch.float32: 2e-3, torch.bfloat16: 3e-3, torch.float16: 3e-3}
HEADS = (6, 2)
Q_LEN = 2  # of decode
PLAIN = {"causal": True}
EXTRAS = {"causal": True, "logits_soft_cap": 20.0, "window_left": 500}
# Requests of the plans that one captured graph serves: query lengths of prefill, KV lengths.
GRAPH_BATCHES = (
    ((3, 1, 5), (300, 64, 700)),
    ((4, 2), (1100, 129)),
    ((0, 9, 0), (0, 1500, 1)),
    ((1,), (2,)),
    ((2, 6, 1), (65, 0, 1024)),
)
GRAPH_ROWS, GRAPH_PAGES = 9, 64
GRAPH_LIMITS = {
    "use_cuda_graph": True, "max_batch_size": 3, "max_total_qo_len": GRAPH_ROWS,
    "max_num_pages": GRAPH_PAGES,
}  # fmt: skip


@dataclass(frozen=True)
class WrapperCase:
    """kind: "decode", "paged", "ragged" (quantised operands), "raw" (bf16 operands, quantised by
    run(); "mean" without statistics: those of the requests). explicit: name the backend."""

    backend: str
    format: str
    kind: str
    head_dim: int
    compensation: str
    channels: int
    page_size: int
    extras: bool = False
    split_pages: int | None = None
    out: torch.dtype = torch.float32
    explicit: bool = False
    graph: bool = False
    raw_query: bool = True
    seed: int = 0

    @property
    def name(self) -> str:
        parts = [
            self.kind, f"d{self.head_dim}", f"{self.compensation}{self.channels or ''}",
            f"p{self.page_size}", str(self.out).removeprefix("torch."),
        ]  # fmt: skip
        flags = {
            "cap-window": self.extras,
            f"split{self.split_pages}": self.split_pages is not None,
            self.backend: self.explicit,
            "graph": self.graph,
            "quantised-query": not self.raw_query,
        }
        return "-".join(parts + [word for word, on in flags.items() if on])


def cases(kernel: AttentionKernel) -> list[WrapperCase]:
    """Every compensation and head dimension with every kind; page sizes, extras, outputs and the
    backend's name in turn."""
    kinds = ["decode"] if kernel.operation == "decode" else ["paged"]
    if kernel.operation == "prefill" and kernel.ragged:
        kinds += ["ragged", "raw"]
    found = []
    combinations = itertools.product(COMPENSATIONS[kernel.format], kernel.tilings, kinds)
    for n, ((compensation, channels), head_dim, kind) in enumerate(combinations):
        base = WrapperCase(
            kernel.backend, kernel.format, kind, head_dim, compensation, channels,
            kernel.page_sizes[n % len(kernel.page_sizes)], explicit=n % 2 == 1, seed=n,
        )  # fmt: skip
        found.append(replace(base, raw_query=kind != "ragged"))
        found.append(
            replace(
                base,
                extras=True,
                split_pages=1 if kind in ("ragged", "raw") else None,
                out=torch.bfloat16,
                raw_query=kind == "raw",
                page_size=kernel.page_sizes[(n + 1) % len(kernel.page_sizes)],
            )
        )
        if kind in ("decode", "paged"):
            for raw_query in (True, False):
                found.append(replace(base, page_size=64, graph=True, raw_query=raw_query))
    return found


@dataclass
class Setup:
    """Host operands of a case and the arguments of plan() and run()."""

    case: WrapperCase
    batch: Any
    config: mpfa.KVCacheConfig
    stats: mpfa.SmoothingStats | None
    q: Any
    kv: Any
    args: tuple[torch.Tensor, ...]
    options: dict[str, Any]
    sinks: torch.Tensor


def sinks() -> torch.Tensor:
    return torch.linspace(-3.0, 4.0, HEADS[0])


def options_of(case: WrapperCase, batch: Any, config: mpfa.KVCacheConfig) -> dict[str, Any]:
    options = {**batch.heads, "config": config, **(EXTRAS if case.extras else PLAIN)}
    if case.split_pages is not None:
        options["fixed_split_pages"] = case.split_pages
    if case.kind == "decode":
        options["q_len_per_request"] = Q_LEN
    return options


def build(case: WrapperCase) -> Setup:
    q_lens = (Q_LEN,) * 3 if case.kind == "decode" else (5, 0, 200)
    kv_lens = (300, 0, 1400) if case.kind in ("decode", "paged") else (70, 9, 333)
    batch = make_batch(
        q_lens, kv_lens, *HEADS, case.head_dim, seed=case.seed, k_bias=3.0, outliers=4.0
    )
    stats = static_stats(batch, case.compensation, case.channels)
    config = config_for(batch, case.format, case.compensation, case.channels, case.page_size)
    args = (offsets(q_lens), offsets(kv_lens))
    if case.kind in ("decode", "paged"):
        pages = paged(batch, config, stats=stats, seed=case.seed + 9)
        kv = pages.cache
        args = pages.table if case.kind == "decode" else (args[0], *pages.table)
    elif case.kind == "ragged":
        kv = mpfa.quantize_kv(*batch.kv, config, args[1], stats)
    else:
        kv = batch.kv
        stats = None if case.compensation == "mean" else stats
    q = batch.query if case.raw_query else mpfa.quantize_query(batch.query, config, stats)
    return Setup(case, batch, config, stats, q, kv, args, options_of(case, batch, config), sinks())


def wrapper_class(case: WrapperCase) -> type:
    return mpfa.BatchDecodeWrapper if case.kind == "decode" else mpfa.BatchPrefillWrapper


def reference(setup: Setup) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 (out, lse) of the reference on the CPU."""
    size = mpfa.workspace_size(*setup.args, num_sm=148, **setup.options)
    wrapper = wrapper_class(setup.case)(
        torch.full((size,), POISON_BYTE, dtype=torch.uint8), backend="reference"
    )
    wrapper.plan(*setup.args, **setup.options)
    out = torch.full(setup.batch.query.shape, torch.nan)
    extra = {"stats": setup.stats} if setup.case.kind == "raw" else {}
    with numerics_of(setup.case):
        return wrapper.run(setup.q, setup.kv, out=out, return_lse=True, sinks=setup.sinks, **extra)


def numerics_of(case: WrapperCase) -> AbstractContextManager[Any]:
    """backend="reference" does what the cache format implies; SM90 converts K and V and keeps q."""
    if case.backend != "sm90":
        return nullcontext()
    plain = backend_reference.run

    def run(spec: Any, plan: Any, *others: Any) -> None:
        rows = plan.request.q_tile_tokens * plan.request.heads_per_group
        plain(spec, plan, *others, scheme=dequant_scheme(rows))

    return mock.patch.object(backend_reference, "run", run)


def compare(case: WrapperCase, got: dict[str, torch.Tensor], want: Any) -> list[str]:
    def check() -> None:
        out, lse = got["out"], got["lse"]
        assert not out.isnan().any(), "out holds NaN"
        assert not lse.isnan().any(), "lse holds NaN"
        error = head_rel_l2(out, want[0]) if out.shape[0] else 0.0
        assert error <= GATE[case.out], f"rel L2 {error:.3g}, allowed {GATE[case.out]}"
        assert_lse_close(lse, want[1], 2e-4)

    return as_faults(check)


# ---- on the device ------------------------------------------------------------------------------


def num_sm(executor: Executor) -> int:
    if executor.device.type == "cuda":
        return torch.cuda.get_device_properties(executor.device).multi_processor_count
    return 148


def backend_of(case: WrapperCase, executor: Executor) -> str:
    if executor.device.type != "cuda":
        return "sim"
    return case.backend if case.explicit else "auto"


def put_fields(placement: Placement, value: Any, prefix: str, stats: Any) -> Any:
    """A QuantizedQuery or QuantizedKV with its tensors on the device."""
    moved = {}
    for name, t in vars(value).items():
        if isinstance(t, torch.Tensor) and name != "indptr":
            moved[name] = placement.put(prefix + name, t)
    if "indptr" in vars(value):
        moved["indptr"] = value.indptr.to(placement.device)
    return replace(value, **moved, stats=stats)


class OnDevice:
    """A setup's operands between guard bands."""

    def __init__(self, setup: Setup, executor: Executor, settings: Settings) -> None:
        self.setup = setup
        place = self.placement = Placement(executor.device, settings.guard_bytes)
        stats = None if setup.stats is None else setup.stats.to(executor.device)
        self.stats = stats
        if isinstance(setup.kv, mpfa.PagedKVCache):
            tensors = {n: place.put(n, t) for n, t in setup.kv.tensors.items()}
            self.kv = mpfa.PagedKVCache(config=setup.config, stats=stats, **tensors)
        elif isinstance(setup.kv, tuple):
            self.kv = tuple(place.put(n, t) for n, t in zip("kv", setup.kv, strict=True))
        else:
            self.kv = put_fields(place, setup.kv, "", stats)
        if isinstance(setup.q, torch.Tensor):
            self.q = place.put("query", setup.q)
        else:
            self.q = put_fields(place, setup.q, "query ", stats)
        self.sinks = place.put("sinks", setup.sinks)

    def outputs(self, rows: int) -> None:
        case, heads = self.setup.case, HEADS[0]
        out = torch.full((rows, heads, case.head_dim), torch.nan, dtype=case.out)
        self.out = self.placement.put_output("out", out)
        self.lse = self.placement.put_output("lse", torch.full((rows, heads), torch.nan))

    def workspace(self, size: int) -> torch.Tensor:
        poison = torch.full((size,), POISON_BYTE, dtype=torch.uint8)
        return self.placement.put_output("workspace", poison, compared=False)

    def run(self, wrapper: Any, rows: int | None = None) -> None:
        """One run() into the first ``rows`` rows."""
        extra = {"stats": self.stats} if self.setup.case.kind == "raw" else {}
        q = self.q if rows is None else first_rows(self.q, rows)
        part = slice(0, rows)
        wrapper.run(
            q, self.kv, out=self.out[part], lse=self.lse[part], return_lse=True, sinks=self.sinks,
            **extra,
        )  # fmt: skip


def first_rows(q: Any, rows: int) -> Any:
    if isinstance(q, torch.Tensor):
        return q[:rows]
    parts = {n: getattr(q, n) for n in ("q", "q_scale", "a_comp", "row_term")}
    return replace(q, **{n: None if t is None else t[:rows] for n, t in parts.items()})


def run(case: WrapperCase, executor: Executor, settings: Settings) -> Outcome:
    if executor.device.type != "cuda" and case.backend == "sm90":
        raise NotRun('backend "sim" plays the SM100 kernel for this format')
    if case.graph:
        return run_graph(case, executor, settings)
    setup = build(case)
    on = OnDevice(setup, executor, settings)
    on.outputs(setup.batch.query.shape[0])
    size = mpfa.workspace_size(*setup.args, num_sm=num_sm(executor), **setup.options)
    wrapper = wrapper_class(case)(on.workspace(size), backend=backend_of(case, executor))
    args = tuple(t.to(executor.device) for t in setup.args)
    outcome, host = repeat(
        on.placement,
        executor,
        replace(settings, replays=0),  # this wrapper refuses to be captured
        lambda: on.run(wrapper),
        lambda: wrapper.plan(*args, **setup.options),
    )
    if executor.device.type == "cuda" and wrapper.backend != case.backend:
        outcome.faults.append(f"backend: {wrapper.backend}, expected {case.backend}")
    outcome.faults = (compare(case, host, reference(setup)) + outcome.faults)[:MAX_FAULTS]
    return outcome


# ---- graphs -------------------------------------------------------------------------------------


def graph_pool(case: WrapperCase) -> tuple[Setup, torch.Tensor]:
    """Filled pages and the largest query buffer, and the ids of the pages; others hold poison."""
    full = (32 * case.page_size,)
    batch = make_batch(
        (GRAPH_ROWS,), full, *HEADS, case.head_dim, seed=case.seed, k_bias=3.0, outliers=4.0
    )
    stats = static_stats(batch, case.compensation, case.channels)
    config = config_for(batch, case.format, case.compensation, case.channels, case.page_size)
    pages = paged(batch, config, stats=stats, seed=case.seed + 9)
    q = batch.query if case.raw_query else mpfa.quantize_query(batch.query, config, stats)
    options = options_of(case, batch, config)
    if case.kind == "paged":
        options["fixed_split_pages"] = 4
    return Setup(case, batch, config, stats, q, pages.cache, (), options, sinks()), pages.indices


def graph_args(
    case: WrapperCase, filled: torch.Tensor, q_lens: tuple[int, ...], kv_lens: tuple[int, ...]
) -> tuple[tuple[torch.Tensor, ...], int]:
    """plan()'s arguments for requests over pages of the pool, and their query rows."""
    gen = torch.Generator().manual_seed(sum(kv_lens))
    counts = [-(-n // case.page_size) for n in kv_lens]
    picks = filled[torch.randint(0, len(filled), (sum(counts),), generator=gen)].to(torch.int32)
    last = int32([(n - 1) % case.page_size + 1 if n else 0 for n in kv_lens])
    table = (offsets(counts), picks, last)
    if case.kind == "decode":
        return table, Q_LEN * len(kv_lens)
    return (offsets(q_lens), *table), sum(q_lens)


def run_graph(case: WrapperCase, executor: Executor, settings: Settings) -> Outcome:
    """Each replay after a plan: the bits of a run without a graph, and the reference's values.

    why SM90's run without a graph has the graph's limits: the launch takes its kernel by the number
    of rows that a tile may have, and kernels for more rows split a block over fewer warps.
    """
    if executor.device.type != "cuda" and case.raw_query:
        raise NotRun('backend "sim" quantises on the host, which a graph does not capture')
    begin = time.perf_counter()
    outcome = Outcome()
    pool, filled = graph_pool(case)
    plans = [graph_args(case, filled, *lens) for lens in GRAPH_BATCHES]
    on = OnDevice(pool, executor, settings)
    on.outputs(GRAPH_ROWS)
    sizes = [
        mpfa.workspace_size(*args, num_sm=num_sm(executor), **pool.options, **limits)
        for args, _ in plans
        for limits in ({}, GRAPH_LIMITS)
    ]
    workspace = on.workspace(max(sizes))
    backend, cls = backend_of(case, executor), wrapper_class(case)
    graphed = cls(workspace, backend=backend, **GRAPH_LIMITS)
    plain = cls(workspace, backend=backend, **(GRAPH_LIMITS if case.backend == "sm90" else {}))
    device_args = [tuple(t.to(executor.device) for t in args) for args, _ in plans]

    def note(label: str, lines: list[str]) -> None:
        outcome.faults += [f"plan {label}: {line}" for line in lines]

    on.placement.reset(0)
    graphed.plan(*device_args[0], **pool.options)
    if settings.replays == 0:  # without graphs: what a sanitizer runs
        executor.execute(lambda: on.run(graphed, plans[0][1]), 0)
        note("0", on.placement.faults())
        outcome.repeats, outcome.seconds = 1, time.perf_counter() - begin
        return outcome
    executor.execute(lambda: on.run(graphed), 0)  # modules are loaded at the first run
    graph = executor.capture(lambda: on.run(graphed))
    try:
        for i, (args, rows) in enumerate(plans):
            on.placement.reset(i)
            plain.plan(*device_args[i], **pool.options)
            executor.execute(lambda rows=rows: on.run(plain, rows), i)
            note(f"{i}, no graph", on.placement.faults())
            first, host = on.placement.snapshot(), on.placement.host()
            setup = replace(pool, args=args, q=first_rows(pool.q, rows))
            setup.batch = replace(pool.batch, q=[pool.batch.q[0][:rows]])
            got = {name: t[:rows] for name, t in host.items()}
            note(f"{i}, no graph", compare(case, got, reference(setup)))
            for again in range(max(1, settings.replays // len(plans))):
                on.placement.reset(i + again + 1)
                graphed.plan(*device_args[i], **pool.options)
                executor.execute(graph.replay, i + again)
                note(f"{i}, replay", on.placement.faults() + on.placement.differences(first))
                outcome.replays += 1
            outcome.repeats += 1
            if len(outcome.faults) > MAX_FAULTS:
                break
    finally:
        graph.close()
    outcome.repeats += outcome.replays
    outcome.faults = outcome.faults[:MAX_FAULTS]
    outcome.seconds = time.perf_counter() - begin
    return outcome
