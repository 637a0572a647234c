# SPDX-License-Identifier: Apache-2.0
"""Causal prefill of mpfa beside FlashInfer's backends, FlashAttention-4 and torch SDPA.

    python benchmarks/prefill.py [--lengths 4096,...] [--heads 32,40] [--json FILE] [--baselines-only]

Kernel rows take operands that are quantised already: statistics, Delta and the cache write are not in
them. A "layer_prefill" row adds those (paper figure 11): means over the sequence, centring, quantised Q,
K and V written to pages of 128, then attention. Outputs are checked before timing (harness.py). Where no
prefill kernel exists for the GPU it says so; --baselines-only then measures the others alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from benchmarks import attention_baselines as others  # noqa: E402
from benchmarks import inputs  # noqa: E402
from benchmarks.harness import (  # noqa: E402
    TIMERS,
    Check,
    Job,
    Timer,
    WrongResultError,
    choose_timer,
    geometric_mean,
    measure,
    relative_l2,
    rows_of,
)
from benchmarks.inputs import HEAD_DIM, KV_HEADS, MODES, Shape  # noqa: E402
from benchmarks.rows import Row, check_json, context, find_gpu, make_row, save  # noqa: E402
from mpfa import (  # noqa: E402
    BatchPrefillWrapper,
    KVCacheConfig,
    PagedKVCache,
    QuantizedKV,
    QuantizedQuery,
    SmoothingStats,
    append_paged_kv_cache,
    quantize_kv,
    quantize_query,
    supports,
    workspace_size,
)
from mpfa.reference.cache_write import dequantize_ragged_mxfp8, dequantize_ragged_qk4pv8  # noqa: E402
from mpfa.reference.mxfp8 import dequantize_mxfp8  # noqa: E402
from mpfa.reference.nvfp4 import dequantize_nvfp4  # noqa: E402

LENGTHS = tuple(n << 10 for n in (4, 8, 16, 32, 64, 128))
HEADS = (32, 40)
FORMAT = {"sm100": "qk4pv8", "sm120": "mxfp8"}
# Query rows that a check looks at.
CHECKED_ROWS = 32
# P in e4m3 under exact products: 2^-4 at most, about a third of it on average.
LIMIT = 6e-2
# FP4 and FP8 products of another library, against the unquantised values.
LIMIT_LOW_BIT = 4e-1
MEAN_FROM = 16 << 10


@dataclass
class Case:
    """One request of L tokens: q [L, Hq, D], k and v [L, Hkv, D], bf16."""

    length: int
    heads: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    stats: dict[str, SmoothingStats | None]

    @property
    def name(self) -> str:
        return f"prefill {self.length >> 10}K causal, GQA {self.heads}:{KV_HEADS}"

    @property
    def group(self) -> int:
        return self.heads // KV_HEADS

    @property
    def flops(self) -> float:
        """Multiplications and additions of both products under the causal mask."""
        return 4.0 * HEAD_DIM * self.heads * self.length * (self.length + 1) / 2

    @property
    def indptr(self) -> torch.Tensor:
        return torch.tensor([0, self.length], dtype=torch.int32, device=self.q.device)

    def rows(self) -> torch.Tensor:
        """The query rows that a check looks at: the last ones and some before."""
        last = torch.arange(self.length - CHECKED_ROWS // 2, self.length)
        step = max(1, self.length // (CHECKED_ROWS // 2))
        return torch.cat([torch.arange(0, self.length, step), last]).unique().to(self.q.device)


def make_case(length: int, heads: int, device: torch.device) -> Case:
    tensors = inputs.make_tensors(Shape(1, length, heads), device)
    random = torch.Generator(device=device).manual_seed(2)
    q = torch.randn(
        (length, heads, HEAD_DIM), generator=random, device=device, dtype=torch.bfloat16
    )
    q += tensors.stats["mean"].q_mean.bfloat16()
    return Case(length, heads, q, tensors.k[0], tensors.v[0], tensors.stats)


def truth(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    extra: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """float64 causal attention of case.rows() in the last KV head: [rows, G, D].

    q [rows, G, D]; k, v [L, D]; ``extra`` adds what else belongs to the scores [rows, G, L].
    """
    rows = case.rows()
    scores = q.double() @ k.double().T
    if extra is not None:
        scores = extra(scores)
    hidden = torch.arange(case.length, device=rows.device) > rows[:, None]
    scores.masked_fill_(hidden[:, None], -torch.inf)
    return inputs.attention64(scores, v)


def original(case: Case) -> torch.Tensor:
    picked = case.q[case.rows(), -case.group :]
    return truth(case, picked, case.k[:, -1], case.v[:, -1])


def compare(
    case: Case, out: torch.Tensor, against: torch.Tensor, limit: float,
    name: str = "float64 of its operands",
) -> Check:  # fmt: skip
    got = out.view(case.length, case.heads, HEAD_DIM)[case.rows(), -case.group :]
    return Check(relative_l2(got, against), limit, name, relative_l2(got, original(case)))


def quantised_truth(case: Case, query: QuantizedQuery, kv: QuantizedKV) -> torch.Tensor:
    """Attention over what QuantizedQuery and QuantizedKV hold."""
    rows, g, length = case.rows(), case.group, case.length
    q, scale = (t[rows, -g:].contiguous() for t in (query.q, query.q_scale))
    k, v = kv.k[:, -1:].contiguous(), kv.v[:, -1:].contiguous()
    if query.config.format == "mxfp8":
        k, v = dequantize_ragged_mxfp8(
            k, kv.k_scale[:, -1:].contiguous(), v, kv.v_scale[:, -1:].contiguous(), 0, length, 0
        )  # fmt: skip
        return truth(case, dequantize_mxfp8(q, scale), k[:, 0], v[:, 0])
    k, v = dequantize_ragged_qk4pv8(k, kv.k_scale[:, -1:].contiguous(), v, 0, length)

    def extra(scores: torch.Tensor) -> torch.Tensor:
        first = 0
        if kv.aux_delta is not None:
            scores += kv.aux_delta[-g:].double()
            first = 1
        if kv.aux_channels is not None:
            slots = slice(first, first + kv.aux_channels.shape[-1])
            a = query.a_comp[rows, -g:, slots].double()
            scores += a @ kv.aux_channels[:, -1].double().T
        return scores

    return truth(case, dequantize_nvfp4(q, scale), k[:, 0], v[:, 0], extra)


def mpfa_config(case: Case, mode: str, format: str) -> KVCacheConfig:
    return KVCacheConfig(
        format, KV_HEADS, HEAD_DIM, 128, case.heads, mode, inputs.CHANNELS[mode]
    )  # fmt: skip


def planned(case: Case, config: KVCacheConfig, backend: str, *page_table) -> BatchPrefillWrapper:
    """A wrapper planned for the case; ragged without a page table."""
    device = case.q.device
    options = {
        "num_qo_heads": case.heads, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "causal": True, "config": config, "page_size": 128 if page_table else None,
    }  # fmt: skip
    limits: dict[str, object] = {}
    num_sm = 148
    if device.type == "cuda":
        limits = {"use_cuda_graph": True, "max_batch_size": 1, "max_total_qo_len": case.length,
                  "max_num_pages": case.length // 128}  # fmt: skip
        num_sm = torch.cuda.get_device_properties(device).multi_processor_count
    args = (case.indptr, *(page_table or (case.indptr,)))
    size = workspace_size(*args, num_sm=num_sm, **options, **limits)
    space = torch.empty(size, dtype=torch.uint8, device=device)
    wrapper = BatchPrefillWrapper(space, backend=backend, **limits)
    wrapper.plan(*args, **options)
    return wrapper


def kernel_job(case: Case, mode: str, format: str, backend: str = "auto") -> Job:
    """The attention kernel alone, over quantised ragged operands."""
    config, stats = mpfa_config(case, mode, format), case.stats[mode]
    wrapper = planned(case, config, backend)
    query = quantize_query(case.q, config, stats)
    kv = quantize_kv(case.k, case.v, config, case.indptr, stats)
    out = torch.full_like(case.q, float("nan"))

    names = ("q", "q_scale", "a_comp", "row_term")
    kv_names = ("k", "k_scale", "v", "v_scale", "aux_delta", "aux_channels")
    operands = tuple(
        getattr(owner, n) for owner, part in ((query, names), (kv, kv_names)) for n in part
    )

    def call(*operands):
        # Other copies of the same values: the timer keeps the L2 cold with them.
        held_query = replace(query, **dict(zip(names, operands, strict=False)))
        held_kv = replace(kv, **dict(zip(kv_names, operands[len(names) :], strict=True)))
        wrapper.run(held_query, held_kv, out=out)

    def check() -> Check:
        out.fill_(float("nan"))
        call(*operands)
        return compare(case, out, quantised_truth(case, query, kv), LIMIT)

    name = f"mpfa {mode}" + (f"({config.channels})" if config.channels else "")
    return Job(case.name, name, call, operands, 0, check, f"{format}, backend {wrapper.backend}")


def layer_job(case: Case, mode: str, format: str, backend: str = "auto") -> Job:
    """Statistics, centring, quantised cache write and attention of one layer."""
    config = mpfa_config(case, mode, format)
    device = case.q.device
    table = inputs.make_table(Shape(1, case.length, case.heads), 128, device)
    wrapper = planned(case, config, backend, table.indptr, table.indices, table.last_page_len)
    cache = PagedKVCache.allocate(config, table.num_pages, device)
    slots, rows = table.slots(), torch.zeros(case.length, dtype=torch.int32, device=device)
    fixed = case.stats[mode]
    index = None if fixed is None else fixed.channel_index
    out = torch.full_like(case.q, float("nan"))

    def call(q, k, v):
        stats, batch = fixed, None
        if config.uses_mean:
            stats = SmoothingStats.from_tensors(q, k, case.indptr, channel_index=index)
            batch = rows
        query = append_paged_kv_cache(
            k, v, cache, slots, stats=stats, batch_indices=batch, q=q
        )  # fmt: skip
        wrapper.run(query, cache, stats=stats, out=out)

    def check() -> Check:
        out.fill_(float("nan"))
        call(case.q, case.k, case.v)
        # The low-bit operands are the kernel row's business; here the whole path must be attention.
        return compare(case, out, original(case), LIMIT_LOW_BIT, "float64 of Q, K and V")

    name = f"mpfa {mode} layer_prefill" + (f"({config.channels})" if config.channels else "")
    return Job(case.name, name, call, (case.q, case.k, case.v), 0, check, f"{format}, per request")


def baseline_builders(case: Case, major: int) -> list[tuple[str, Callable[[], Job]]]:
    from benchmarks import prefill_baselines as library

    found = [
        (name, lambda build=build: build(case)) for name, build in library.builders(major).items()
    ]
    found.append(("torch sdpa bf16", lambda: library.sdpa_job(case)))
    if others.fa4_missing() is None:
        found.append(("fa4 bf16", lambda: library.fa4_job(case)))
    return found


def run_case(
    case: Case, timer: Timer, note: str, common: Row, args: argparse.Namespace
) -> list[Row]:
    jobs: list[Job] = []
    major = torch.cuda.get_device_capability(case.q.device)[0]
    if not args.baselines_only:
        format = FORMAT[f"sm{major}0"]
        modes = MODES if format == "qk4pv8" else ("none",)
        jobs += [kernel_job(case, m, format) for m in modes]
        jobs += [layer_job(case, m, format) for m in modes]
    for name, build in baseline_builders(case, major):
        try:
            job = build()
            job.checked = job.check()
            if job.checked.ok:
                jobs.append(job)
            else:
                print(f"left out {name}, {case.name}: wrong, relative L2 {job.checked.error:.3g}")
        except Exception as error:  # any library's own
            text = str(error).strip().split("\n")[0][:200]
            print(f"skipped {name}, {case.name}: {type(error).__name__}: {text}", flush=True)
    if not jobs:
        return []
    measure(jobs, timer)
    baselines = [j.impl for j in jobs if not j.impl.startswith("mpfa")]
    print(f"\n{case.name}")
    rows = rows_of("prefill", jobs, common, baselines, note)
    for job in jobs:
        rate = case.flops / job.timing.median / 1e6
        rows.append(make_row("prefill", case.name, job.impl, "rate", rate, "TFLOP/s", common))
        t = job.timing
        print(f"  {job.impl:38} {t.median:>10.1f} us  mean {t.mean:>10.1f}  spread {t.spread:>6.1%}  "
              f"{rate:>7.0f} TFLOP/s  rel L2 {job.checked.original:.2e}", flush=True)  # fmt: skip
    return rows


def summary(rows: list[Row]) -> list[str]:
    """Geometric means over 16K-128K (the paper's range)."""
    times = {(r["case"], r["impl"]): r["value"] for r in rows if r["metric"] == "time"}
    impls = list(dict.fromkeys(i for _, i in times))
    lines = []
    for heads in HEADS:
        cases = [f"prefill {n >> 10}K causal, GQA {heads}:{KV_HEADS}" for n in LENGTHS
                 if n >= MEAN_FROM]  # fmt: skip
        for own in (i for i in impls if i.startswith("mpfa")):
            for base in (i for i in impls if not i.startswith("mpfa")):
                if all((c, i) in times for c in cases for i in (own, base)):
                    mean = geometric_mean(times[c, base] / times[c, own] for c in cases)
                    lines.append(f"GQA {heads}:8, 16K-128K: {own} {mean:.2f} x {base}")
    return lines


def refusal(device_found: bool) -> str | None:
    """Why no prefill kernel of mpfa can be measured here, or None."""
    if not device_found:
        return "no CUDA GPU is usable from this torch"
    device = torch.device("cuda", 0)
    major = torch.cuda.get_device_capability(device)[0]
    ok, reasons = supports(
        device, operation="prefill", format=FORMAT.get(f"sm{major}0", "qk4pv8"), num_qo_heads=32,
        num_kv_heads=8,
    )  # fmt: skip
    return None if ok else "; ".join(reasons)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    numbers = lambda text: tuple(int(x) for x in text.split(","))  # noqa: E731
    parser.add_argument("--lengths", type=numbers, default=LENGTHS, help="multiples of 1024")
    parser.add_argument("--heads", type=numbers, default=HEADS, help="query heads, for 8 KV heads")
    parser.add_argument("--baselines-only", action="store_true")
    parser.add_argument("--timer", choices=TIMERS)
    parser.add_argument("--budget", type=float, help="seconds after which no new case begins")
    parser.add_argument("--json", type=Path, help="results file to merge the rows into")
    parser.add_argument("--commit", help="recorded with the results; default: git's")
    args = parser.parse_args(argv)
    reason = refusal(torch.cuda.is_available())
    if reason and not (args.baselines_only and torch.cuda.is_available()):
        print(f"skipped prefill: {reason}")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    common = context("measured", find_gpu(), args.commit)
    check_json(parser, args.json, common)
    method, timer = choose_timer(args.timer)
    missing = others.fa4_missing()
    if missing:
        print(f"skipped fa4: {missing}")
    begin, rows, failed = time.monotonic(), [], 0
    for heads in args.heads:
        for length in args.lengths:
            if args.budget and time.monotonic() - begin > args.budget:
                print(f"skipped prefill {length}, {heads} heads: the time is used up")
                continue
            try:
                case = make_case(length, heads, device)
                found = run_case(case, timer, f"timer {method}", common, args)
            except WrongResultError as error:
                print(f"WRONG RESULT, not timed: {error}", flush=True)
                failed += 1
                continue
            except torch.OutOfMemoryError:
                print(f"skipped prefill {length}, {heads} heads: out of GPU memory", flush=True)
                torch.cuda.empty_cache()
                continue
            rows += found
            if args.json:
                save(args.json, found)
            torch.cuda.empty_cache()
    print()
    for line in summary(rows):
        print(line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
