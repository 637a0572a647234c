# SPDX-License-Identifier: Apache-2.0
"""Microseconds of one make_plan() call on this CPU, at 128K tokens of context per request.

    python benchmarks/plan_cpu.py [--json FILE] [--repeats N]

decode: one query token per request, partitions of 8 x 128 tokens. prefill: a chunk of 2048 query
tokens per request, causal, q tiles of 128 tokens, unsplit. 32 query and 8 KV heads, num_sm 148.
The aim is below 200 us for decode at batch 256 and page size 128.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from benchmarks.rows import Row, context, cpu_name, make_row, save  # noqa: E402
from mpfa.planner import PlanRequest, make_plan  # noqa: E402

CONTEXT = 131072
CHUNK = 2048
BATCHES = tuple(1 << n for n in range(11))
PAGE_SIZES = (128, 16)
MODES = ("decode", "prefill")
AIM = ("decode", 256, 128, 200.0)


def make_request(mode: str, batch: int, page_size: int) -> PlanRequest:
    qo_len = 1 if mode == "decode" else CHUNK
    pages = CONTEXT // page_size
    steps = torch.arange(batch + 1, dtype=torch.int32)
    random = torch.Generator().manual_seed(batch)
    return PlanRequest(
        mode=mode,
        qo_indptr=steps * qo_len,
        kv_indptr=steps * pages,
        kv_indices=torch.randperm(batch * pages, generator=random, dtype=torch.int32),
        last_page_len=torch.full((batch,), page_size, dtype=torch.int32),
        num_qo_heads=32,
        num_kv_heads=8,
        head_dim=128,
        page_size=page_size,
        causal=True,
        window_left=-1,
        q_tile_tokens=1 if mode == "decode" else 128,
        heads_per_group=4 if mode == "decode" else 1,
        kv_block=128,
        partition_tokens=1024 if mode == "decode" else 0,
        num_sm=148,
    )


def measure(request: PlanRequest, repeats: int) -> dict[str, float]:
    for _ in range(5):
        items = make_plan(request).num_items
    times = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        make_plan(request)
        times.append((time.perf_counter_ns() - begin) / 1000)
    times.sort()
    at = {name: times[int(q * (repeats - 1))] for name, q in (("p10", 0.1), ("p90", 0.9))}
    return {"median": times[repeats // 2], **at, "items": items}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="results file to merge the rows into")
    parser.add_argument("--repeats", type=int, default=201)
    args = parser.parse_args()
    rows: list[Row] = []
    common = context("measured")
    print(f"make_plan on a {cpu_name()}, {CONTEXT} tokens of context, {args.repeats} repeats, us")
    print(f"{'mode':<8}{'page':>5}{'batch':>7}{'items':>9}{'median':>10}{'p10':>10}{'p90':>10}")
    for mode in MODES:
        for page_size in PAGE_SIZES:
            for batch in BATCHES:
                result = measure(make_request(mode, batch, page_size), args.repeats)
                print(
                    f"{mode:<8}{page_size:>5}{batch:>7}{result['items']:>9}"
                    + "".join(f"{result[name]:>10.1f}" for name in ("median", "p10", "p90"))
                )
                case = f"{mode} context={CONTEXT} page_size={page_size} batch={batch}"
                rows += [
                    make_row("plan_cpu", case, "mpfa", name, result[name], "us", common)
                    for name in ("median", "p10", "p90")
                ]
                if (mode, batch, page_size) == AIM[:3]:
                    verdict = "met" if result["median"] < AIM[3] else "missed"
                    print(f"{'':<8}aim for this row: median below {AIM[3]:.0f} us: {verdict}")
    if args.json:
        save(args.json, rows)


if __name__ == "__main__":
    main()
