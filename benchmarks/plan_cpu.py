# SPDX-License-Identifier: Apache-2.0
"""Microseconds of one make_plan() call on this CPU, at 128K tokens of context per request.

    python benchmarks/plan_cpu.py [--json FILE] [--repeats N]

decode: one query token per request, partitions of 8 x 128 tokens. prefill: a chunk of 2048 query
tokens per request, causal, q tiles of 128 tokens, unsplit. 32 query and 8 KV heads, num_sm 148.
The aim is below 200 us for decode at batch 256 and page size 128.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import time
from pathlib import Path

import torch

from mpfa.planner import PlanRequest, make_plan

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


def cpu_name() -> str:
    """Architecture and core count: enough to compare rows, nothing that names a machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores}-core {platform.machine()} CPU"


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write the rows there as a JSON list")
    parser.add_argument("--repeats", type=int, default=201)
    args = parser.parse_args()
    rows = []
    common = {
        "ratio_to": None,
        "gpu": f"none ({cpu_name()})",
        "driver": "none",
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "kind": "measured",
    }
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
                for name in ("median", "p10", "p90"):
                    row = {"bench": "plan_cpu", "case": case, "impl": "mpfa", "metric": name}
                    rows.append({**row, "value": round(result[name], 2), "unit": "us", **common})
                if (mode, batch, page_size) == AIM[:3]:
                    verdict = "met" if result["median"] < AIM[3] else "missed"
                    print(f"{'':<8}aim for this row: median below {AIM[3]:.0f} us: {verdict}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
