# SPDX-License-Identifier: Apache-2.0
"""The split-KV combine of decode beside flashinfer.merge_states and a copy of the same bytes.

    python benchmarks/combine.py [--json FILE]

Cases are what decode leaves behind: fp32 partial outputs and base-2 LSEs of partitions of 1024 tokens,
for 32 query heads of 128 channels. Checked against float64 before timing (harness.py). Needs a CUDA
GPU of capability 8.0 or more.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from benchmarks.harness import (  # noqa: E402
    TIMERS,
    Check,
    Job,
    choose_timer,
    copy_jobs,
    measure,
    print_table,
    relative_l2,
    rows_of,
)
from benchmarks.inputs import HEAD_DIM  # noqa: E402
from benchmarks.rows import Row, check_json, context, find_gpu, save  # noqa: E402

HEADS = 32
PARTITION = 1024
# (tokens, context): one query token per request.
CASES = (
    (1, 8 << 10),
    (1, 128 << 10),
    (8, 32 << 10),
    (16, 128 << 10),
    (32, 8 << 10),
    (256, 32 << 10),
)
# An fp32 sum of at most 128 states, rounded to bf16 once.
LIMIT = 4e-3
MERGE = "flashinfer merge_states"


def exact(o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """float64 merge of o [T, P, H, D] with base-2 lse [T, P, H]: [T, H, D]."""
    weight = torch.softmax(lse.double() * torch.log(torch.tensor(2.0, dtype=torch.float64)), dim=1)
    return (o.double() * weight.unsqueeze(-1)).sum(dim=1)


def jobs_of(tokens: int, length: int, device: torch.device) -> list[Job]:
    from mpfa.backends import cuda

    parts = length // PARTITION
    case = f"combine {tokens} x {length >> 10}K, {parts} partitions"
    random = torch.Generator(device=device).manual_seed(0)
    o = torch.randn(tokens, parts, HEADS, HEAD_DIM, generator=random, device=device)
    lse = 4.0 * torch.randn(tokens, parts, HEADS, generator=random, device=device)
    indptr = torch.arange(tokens + 1, dtype=torch.int32, device=device) * parts
    out = torch.empty(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    out_lse = torch.empty(tokens, HEADS, device=device)
    moved = o.numel() * 4 + lse.numel() * 4 + out.numel() * 2 + out_lse.numel() * 4
    merged: list[torch.Tensor] = []

    def ours(o, lse):
        cuda.combine(o.flatten(0, 1), lse.flatten(0, 1), indptr, out, out_lse)

    def theirs(o, lse):
        import flashinfer

        merged[:] = [flashinfer.merge_states(o, lse)[0]]

    def check(call, result) -> Check:
        out.fill_(float("nan"))
        call(o, lse)
        return Check(relative_l2(result(), exact(o, lse)), LIMIT, "float64")

    jobs = [
        Job(case, "mpfa", ours, (o, lse), moved, lambda: check(ours, lambda: out)),
        *copy_jobs(case, device, moved // 2),
    ]
    # It returns fp32, ours bf16.
    other = Job(
        case,
        MERGE,
        theirs,
        (o, lse),
        moved + out.numel() * 2,
        lambda: check(theirs, lambda: merged[0]),
    )
    try:
        other.checked = other.check()
        jobs.append(other)
    except Exception as error:  # the library's own
        print(f"skipped {MERGE}, {case}: {type(error).__name__}: {str(error)[:200]}")
    return jobs


def refusal() -> str | None:
    """Why nothing can be measured here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA GPU is usable from this torch"
    capability = torch.cuda.get_device_capability()
    return None if capability >= (8, 0) else f"capability {capability} is below 8.0"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--timer", choices=TIMERS)
    parser.add_argument("--json", type=Path, help="results file to merge the rows into")
    parser.add_argument("--commit", help="recorded with the results; default: git's")
    args = parser.parse_args(argv)
    reason = refusal()
    if reason:
        print(f"skipped combine: {reason}")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    common = context("measured", find_gpu(), args.commit)
    check_json(parser, args.json, common)
    method, timer = choose_timer(args.timer)
    rows: list[Row] = []
    for tokens, length in CASES:
        jobs = jobs_of(tokens, length, device)
        measure(jobs, timer)
        print_table(jobs[0].case, jobs, (MERGE,))
        rows += rows_of("combine", jobs, common, (MERGE,), f"timer {method}")
    if args.json:
        save(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
