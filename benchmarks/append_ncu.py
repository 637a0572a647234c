# SPDX-License-Identifier: Apache-2.0
"""Hardware counters of the append kernels, read by Nsight Compute.

    python benchmarks/append_ncu.py [--json FILE] [--commit HASH]

Every case is launched once under ncu (clocks left alone, caches warm); times under ncu are not those
of benchmarks/append.py.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.rows import check_json, context, find_gpu, make_row, save  # noqa: E402

STALLS = ("long_scoreboard", "short_scoreboard", "barrier", "wait", "imc_miss", "no_instruction",
          "lg_throttle", "branch_resolving", "math_pipe_throttle", "not_selected",
          "dispatch_stall")  # fmt: skip
METRICS = {  # name in the results: (counter, unit, factor)
    "duration": ("gpu__time_duration.sum", "us", 1e-3),
    "cycles": ("sm__cycles_elapsed.max", "cycles", 1),
    "warp instructions": ("smsp__inst_executed.sum", "million", 1e-6),
    "warps": ("smsp__warps_launched.sum", "warps", 1),
    "issue slots used": ("smsp__issue_active.avg.pct_of_peak_sustained_active", "%", 1),
    "ALU pipe": ("sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active", "%", 1),
    "L1 data path": ("l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed", "%", 1),
    "DRAM": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", 1),
    "warps resident": ("sm__warps_active.avg.pct_of_peak_sustained_active", "%", 1),
    "cycles between instructions": ("smsp__average_warp_latency_per_inst_issued.ratio",
                                    "cycles", 1),
    **{f"stalled: {name.replace('_', ' ')}":
       (f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio", "cycles", 1)
       for name in STALLS},
}  # fmt: skip
DECODE = (("qk4pv8", "none", 0, False), ("qk4pv8", "mean+channels", 15, True),
          ("mxfp8", "none", 0, False))  # fmt: skip
DECODE_TOKENS = (1, 256)


def profile() -> None:
    """Launches every case once between cudaProfilerStart and cudaProfilerStop; prints its name."""
    import torch

    from benchmarks import append

    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    cases = [(choice, 65536) for choice in append.LARGE]
    cases += [(choice, tokens) for choice in DECODE for tokens in DECODE_TOKENS]
    for choice, tokens in cases:
        job = append.append_job(append.config_of(*choice), tokens, 1, device)
        for _ in range(3):
            job.call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        job.call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
        print(f"case\t{job.case}", file=sys.stderr, flush=True)
        del job
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="results file to merge the rows into")
    parser.add_argument("--commit", help="recorded with the results; default: git's")
    parser.add_argument("--profile", action="store_true", help="what runs under ncu")
    args = parser.parse_args()
    if args.profile:
        profile()
        return 0
    common = context("measured", find_gpu(), args.commit)
    check_json(parser, args.json, common)
    names = ",".join(counter for counter, _, _ in METRICS.values())
    command = ["ncu", "--clock-control", "none", "--cache-control", "none", "--csv", "--page", "raw",
               "--print-units", "base", "--profile-from-start", "off", "--metrics", names,
               sys.executable, __file__, "--profile"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    cases = [x.split("\t")[1] for x in done.stderr.splitlines() if x.startswith("case\t")]
    lines = done.stdout.splitlines()
    begin = next((i for i, x in enumerate(lines) if x.startswith('"ID"')), None)
    if begin is None:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
        return 1
    table = [r for r in csv.DictReader(lines[begin:]) if r["ID"]]
    if len(table) != len(cases):
        print(f"{len(table)} launches for {len(cases)} cases", file=sys.stderr)
        return 1
    rows = []
    for case, found in zip(cases, table, strict=True):
        shown = []
        for metric, (counter, unit, factor) in METRICS.items():
            text = found.get(counter, "").replace(",", "")
            if not text:
                continue
            value = round(float(text) * factor, 3)
            rows.append(make_row("append_ncu", case, "mpfa", metric, value, unit, common))
            shown.append(f"{metric} {value} {unit}")
        print(f"{case}: {'; '.join(shown)}", flush=True)
    if args.json:
        save(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
