# SPDX-License-Identifier: Apache-2.0
"""Append and combine kernels against a device-to-device copy that moves the same bytes.

    python benchmarks/append.py [--json FILE] [--commit HASH] [--variants] [--flashinfer]

Everything is captured into CUDA graphs and replayed in turns; a figure is the median over the rounds.
Large cases do not fit the L2; decode-size ones run from it and are compared with an empty kernel plus
bytes over bandwidth. Outputs are not checked here, see tests/gpu/run_quant.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from benchmarks.rows import Row, check_json, context, find_gpu, make_row, save  # noqa: E402
from mpfa.backends import cuda  # noqa: E402
from mpfa.cache import PagedKVCache  # noqa: E402
from mpfa.config import KVCacheConfig  # noqa: E402
from mpfa.stats import SmoothingStats  # noqa: E402

ROUNDS = 15
HEADS, GROUP, DIM = 8, 4, 128


@dataclass
class Job:
    case: str
    impl: str
    call: Callable[[], None]
    moved: int  # bytes read and written
    repeat: int  # calls in a graph
    capturable: bool = True
    graph: torch.cuda.CUDAGraph | None = None
    times: list[float] | None = None

    def capture(self) -> None:
        self.call()
        torch.cuda.synchronize()
        self.times = []
        if not self.capturable:
            return
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(self.repeat):
                self.call()

    def round(self) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        if self.graph is not None:
            self.graph.replay()
        else:
            for _ in range(self.repeat):
                self.call()
        end.record()
        end.synchronize()
        self.times.append(begin.elapsed_time(end) * 1e3 / self.repeat)

    @property
    def microseconds(self) -> float:
        return statistics.median(self.times)


def config_of(fmt: str, compensation: str, channels: int, four_over_six: bool) -> KVCacheConfig:
    return KVCacheConfig(fmt, HEADS, DIM, 128, HEADS * GROUP, compensation, channels, four_over_six)


def stats_of(config: KVCacheConfig, device: torch.device) -> SmoothingStats | None:
    if not config.needs_stats:
        return None
    q_mean = k_mean = index = None
    if config.uses_mean:
        q_mean = torch.randn(config.num_qo_heads, DIM, device=device)
        k_mean = torch.randn(HEADS, DIM, device=device)
    if config.uses_channels:
        index = torch.stack(
            [torch.randperm(DIM)[: config.channels].sort().values for _ in range(HEADS)]
        ).to(device, torch.int32)
    return SmoothingStats(q_mean, k_mean, index)


def append_job(
    config: KVCacheConfig, tokens: int, repeat: int, device: torch.device,
    with_q: bool = False, impl: str = "mpfa", pdl: bool = False,
) -> Job:  # fmt: skip
    """One append of ``tokens`` tokens into consecutive pages in a random order."""
    k, v = (torch.randn(tokens, HEADS, DIM, device=device).bfloat16() for _ in range(2))
    pages = -(-tokens // 128)
    cache = PagedKVCache.allocate(config, pages, device)
    order = torch.randperm(pages, device=device)
    t = torch.arange(tokens, device=device)
    slots = (order[t // 128] * 128 + t % 128).to(torch.int32)
    stats = stats_of(config, device)
    q = query = None
    moved = 2 * k.numel() * 2 + slots.numel() * 4 + tokens * config.bytes_per_token
    if with_q:
        q = torch.randn(tokens, HEADS * GROUP, DIM, device=device).bfloat16()
        query = cuda.empty_query(tokens, config, stats, q.dtype, device)
        outs = (query.q, query.q_scale, query.a_comp, query.row_term)
        moved += 2 * q.numel() + sum(o.numel() * o.element_size() for o in outs if o is not None)
    if config.format == "mxfp8":
        moved += pages * HEADS * 32 * DIM * 2  # v_tail
    parts = [config.format, config.compensation]
    parts += [f"c{config.channels}"] if config.channels else []
    parts += ["4over6"] if config.four_over_six else []
    parts += ["q"] if with_q else []
    name = f"append {'-'.join(parts)} T={tokens}"

    def call() -> None:
        cuda.append(k, v, cache, slots, stats, None, q, query=query, pdl=pdl)

    return Job(name, impl, call, moved, repeat)


def copy_job(moved: int, repeat: int, case: str, device: torch.device) -> Job:
    source = torch.randint(0, 255, (moved // 2,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Job(case, "copy", lambda: target.copy_(source), moved, repeat)


def flashinfer_job(tokens: int, repeat: int, device: torch.device) -> Job:
    import flashinfer.page as page

    k, v = (torch.randn(tokens, HEADS, DIM, device=device).bfloat16() for _ in range(2))
    pages, ps = -(-tokens // 128), 128
    shape = (pages, HEADS, ps)
    caches = [torch.zeros((*shape, DIM // 2), dtype=torch.uint8, device=device) for _ in range(2)]
    scales = [
        torch.zeros((*shape, DIM // 16), dtype=torch.float8_e4m3fn, device=device) for _ in range(2)
    ]
    t = torch.arange(tokens, device=device, dtype=torch.int32)
    indptr = torch.tensor([0, pages], dtype=torch.int32, device=device)
    last = torch.tensor([(tokens - 1) % ps + 1], dtype=torch.int32, device=device)
    indices = torch.arange(pages, dtype=torch.int32, device=device)
    zeros = torch.zeros_like(t)

    def call() -> None:
        page.nvfp4_quantize_append_paged_kv_cache(
            k, v, zeros, t, tuple(caches), tuple(scales), indices, indptr, last, 1.0, 1.0, "HND"
        )

    moved = 2 * k.numel() * 2 + tokens * HEADS * 2 * (DIM // 2 + DIM // 16)
    # why: it reads its scales on the host, so it cannot be captured; at this size the GPU is the limit.
    return Job(f"append T={tokens}", "flashinfer nvfp4 append", call, moved, repeat, False)


def combine_job(tokens: int, partitions: int, states: int, repeat: int, device) -> Job:
    rows, heads = tokens * partitions * states, HEADS * GROUP
    o = torch.randn(rows, heads, DIM, device=device)
    lse = torch.randn(rows, heads, device=device)
    indptr = torch.arange(tokens + 1, dtype=torch.int32, device=device) * partitions
    out = torch.empty(tokens, heads, DIM, dtype=torch.bfloat16, device=device)
    out_lse = torch.empty(tokens, heads, device=device)
    moved = o.numel() * 4 + lse.numel() * 8 + out.numel() * 2 + out_lse.numel() * 4

    def call() -> None:
        cuda.combine(o, lse, indptr, out, out_lse, states_per_partition=states)

    return Job(f"combine T={tokens} partitions={partitions}x{states}", "mpfa", call, moved, repeat)


def means_job(tokens: int, repeat: int, device: torch.device) -> Job:
    q = torch.randn(tokens, HEADS * GROUP, DIM, device=device).bfloat16()
    indptr = torch.tensor([0, tokens // 3, tokens], dtype=torch.int32, device=device)
    mean = torch.empty(2, HEADS * GROUP, DIM, device=device)
    partial = torch.empty(2, cuda.num_slices(tokens, 2), HEADS * GROUP * DIM, 2, device=device)
    call = lambda: cuda.segment_mean(q, indptr, mean=mean, partial=partial)  # noqa: E731
    return Job(f"means T={tokens} heads={HEADS * GROUP}", "mpfa", call, q.numel() * 2, repeat)


# Tuning knobs of the qk4pv8 module: CTAs per SM that registers allow, threads of a CTA, passes, rows
# of a thread at a time.
VARIANTS = ((8, 128, 4, 1), (8, 128, 8, 1), (7, 128, 8, 1), (6, 128, 8, 1))


def variant_modules() -> dict[str, object]:
    """The qk4pv8 module with other tuning knobs, by name."""
    from dataclasses import replace

    from mpfa.jit import cuda as jit
    from mpfa.jit import quant

    base, found = quant.QK4PV8[DIM], {}
    for ctas, threads, passes, tokens in VARIANTS:
        flags = (*base.flags, f"-DMPFA_QUANT_MIN_CTAS={ctas}", f"-DMPFA_QUANT_THREADS={threads}",
                 f"-DMPFA_QUANT_PASSES={passes}", f"-DMPFA_QUANT_TOKENS={tokens}")  # fmt: skip
        key = f"c{ctas}t{threads}p{passes}r{tokens}"
        found[key] = replace(base, name=f"{base.name}_{key}", flags=flags)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(found)) as pool:
        list(pool.map(jit.build, found.values()))
    return {name: jit.load(spec) for name, spec in found.items()}


LARGE = (
    ("qk4pv8", "none", 0, False),
    ("qk4pv8", "mean", 0, False),
    ("qk4pv8", "none", 0, True),
    ("qk4pv8", "mean", 0, True),
    ("qk4pv8", "channels", 16, False),
    ("qk4pv8", "channels", 15, True),
    ("qk4pv8", "mean+channels", 15, True),
    ("mxfp8", "none", 0, False),
)


def measure(jobs: list[Job]) -> None:
    for job in jobs:
        job.capture()
    for _ in range(ROUNDS):
        for job in jobs:
            job.round()


def rows_of(jobs: list[Job], base: dict[str, float], common: Row) -> list[Row]:
    rows = []
    for job in jobs:
        us = job.microseconds
        ratio = base[job.case] / us if job.case in base else None
        copy = {"copy": round(ratio, 3)} if ratio else None
        rate = job.moved / us / 1e3
        name = ("append", job.case, job.impl)
        rows.append(make_row(*name, "time", us, "us", common, copy))
        rows.append(make_row(*name, "bandwidth", rate, "GB/s", common))
        spread = (max(job.times) - min(job.times)) / us
        print(
            f"{job.case:52} {job.impl:24} {us:9.2f} us  {job.moved / us / 1e3:7.0f} GB/s  "
            f"{f'copy x {ratio:.3f}' if ratio else '':14} spread {spread:.1%}",
            flush=True,
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="results file to merge the rows into")
    parser.add_argument("--commit", help="recorded with the results; default: git's")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--variants", action="store_true", help="also other tuning knobs")
    parser.add_argument("--flashinfer", action="store_true", help="also FlashInfer's NVFP4 append")
    args = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    common = context("measured", find_gpu(), args.commit)
    check_json(parser, args.json, common)
    rows: list[Row] = []

    variants = {"mpfa": None, **(variant_modules() if args.variants else {})}
    from mpfa.jit import cuda as jit
    from mpfa.jit import quant

    default = jit.load(quant.QK4PV8[DIM])
    for choice in LARGE:
        config = config_of(*choice)
        jobs = []
        for name, module in variants.items():
            if name != "mpfa" and config.format != "qk4pv8":
                continue
            jit.replace_module(quant.QK4PV8[DIM], module or default)
            job = append_job(config, args.tokens, 4, device, impl=name)
            job.capture()
            jobs.append(job)
        jit.replace_module(quant.QK4PV8[DIM], default)
        copy = copy_job(jobs[0].moved, 4, jobs[0].case, device)
        copy.capture()
        jobs.append(copy)
        for _ in range(ROUNDS):
            for job in jobs:
                job.round()
        rows += rows_of(jobs, {copy.case: copy.microseconds}, common)
        del jobs, copy
        torch.cuda.empty_cache()

    config = config_of("qk4pv8", "mean+channels", 15, True)
    jobs = [append_job(config, args.tokens // 4, 4, device, with_q=True)]
    jobs.append(copy_job(jobs[0].moved, 4, jobs[0].case, device))
    jobs.append(means_job(args.tokens, 4, device))
    jobs.append(combine_job(2048, 16, 1, 4, device))
    jobs.append(copy_job(jobs[-1].moved, 4, jobs[-1].case, device))
    jobs.append(combine_job(64, 33, 4, 20, device))
    if args.flashinfer:
        jobs.append(flashinfer_job(args.tokens, 4, device))
    measure(jobs)
    rows += rows_of(jobs, {j.case: j.microseconds for j in jobs if j.impl == "copy"}, common)
    del jobs
    torch.cuda.empty_cache()

    empty = Job("empty kernel", "torch._sleep(0)", lambda: torch.cuda._sleep(0), 0, 100)
    small = [
        append_job(config_of(*choice), tokens, 100, device, impl=impl, pdl=impl == "mpfa pdl")
        for choice in (LARGE[0], LARGE[6], LARGE[7])
        for tokens in (1, 16, 64, 256)
        for impl in ("mpfa", "mpfa pdl")
    ]
    measure([empty, *small])
    decode = rows_of([empty, *small], {}, common)
    bandwidth = 4.3e6  # bytes per us
    bounds = {j.case: empty.microseconds + j.moved / bandwidth for j in small}
    for row in decode:
        if row["metric"] == "time" and row["case"] in bounds:
            ratio = round(row["value"] / bounds[row["case"]], 2)
            row["ratio_to"] = {"empty kernel + bytes/bandwidth": ratio}
            print(f"{row['case']:52} {row['impl']:9} {ratio} x (empty kernel + bytes/bandwidth)")
    rows += decode
    foreign = [r["value"] for r in rows if "flashinfer" in r["impl"] and r["metric"] == "time"]
    for row in rows:  # how many times FlashInfer's time on the same tokens
        whole = row["case"].startswith("append") and row["case"].endswith(f"T={args.tokens}")
        if foreign and whole and row["metric"] == "time" and row["impl"] == "mpfa":
            row["ratio_to"]["flashinfer nvfp4 append"] = round(foreign[0] / row["value"], 2)
    if args.json:
        save(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
