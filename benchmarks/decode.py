# SPDX-License-Identifier: Apache-2.0
"""mpfa's decode beside FlashInfer's BF16, FP8 and NVFP4 KV decode, FlashAttention-4 and torch SDPA.

    python benchmarks/decode.py [--set core|matrix|all] [--pages 16,128] [--json FILE] [--budget S]

All implementations of a shape run in one process, checked first, then timed in turns (harness.py), with
a device-to-device copy among them. Bandwidth is KV bytes read over the GPU time of all kernels of a
call, the combine included; the copy's counts bytes read plus written. Compensation "none" is the
paper's direct kernel. On sm100 the query comes quantised, as the cache write leaves it; statistics and
Delta are not in these times. Without a GPU that has a decode kernel, it says what it skips and why.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from benchmarks import attention_baselines as others  # noqa: E402
from benchmarks import inputs  # noqa: E402
from benchmarks.decode_cases import (  # noqa: E402
    MODES,
    PAGES,
    SETS,
    Shape,
    mpfa_name,
    summary,
    verdicts,
)
from benchmarks.harness import (  # noqa: E402
    TIMERS,
    Check,
    Job,
    Timer,
    WrongResultError,
    choose_timer,
    copy_jobs,
    measure,
    print_table,
    rows_of,
)
from benchmarks.inputs import MXFP8, PageTable, Tensors  # noqa: E402
from benchmarks.rows import Row, check_json, context, find_gpu, save  # noqa: E402
from mpfa import BatchDecodeWrapper, quantize_query, supports, workspace_size  # noqa: E402
from mpfa.cache import PagedKVCache  # noqa: E402
from mpfa.reference.mxfp8 import dequantize_mxfp8  # noqa: E402
from mpfa.reference.nvfp4 import dequantize_nvfp4  # noqa: E402

# Limits of relative L2 to float64 attention over the cache's own values: 16-bit products, or an e4m3 P.
LIMITS = {"sm90": 1e-2, "sm100": 5e-2, "sm120": 5e-2, "reference": 5e-2, "sim": 5e-2}


def mpfa_job(
    tensors: Tensors, table: PageTable, mode: str, case: str, backend: str = "auto"
) -> Job:
    """BatchDecodeWrapper over a qk4pv8 cache with one compensation mode, or over an mxfp8 cache."""
    shape, device = tensors.shape, tensors.q.device
    config = inputs.config_of(shape, table.page_size, mode)
    stats = tensors.stats.get(mode)
    cache = inputs.fill_cache(tensors.k, tensors.v, config, table, stats)
    plan_args = (table.indptr, table.indices, table.last_page_len)
    options = {
        "num_qo_heads": shape.num_qo_heads, "num_kv_heads": shape.num_kv_heads,
        "head_dim": inputs.HEAD_DIM, "page_size": table.page_size, "config": config,
    }  # fmt: skip
    limits: dict[str, object] = {}
    num_sm = 148
    if device.type == "cuda":
        limits = {"use_cuda_graph": True, "max_batch_size": shape.batch,
                  "max_total_qo_len": shape.batch, "max_num_pages": table.num_pages}  # fmt: skip
        num_sm = torch.cuda.get_device_properties(device).multi_processor_count
    size = workspace_size(*plan_args, num_sm=num_sm, **options, **limits)
    wrapper = BatchDecodeWrapper(
        torch.empty(size, dtype=torch.uint8, device=device), backend=backend, **limits
    )
    wrapper.plan(*plan_args, **options)
    out = torch.full_like(tensors.q, float("nan"))
    quantised = wrapper.backend != "sm90"
    query = quantize_query(tensors.q, config, stats)
    pages = (
        cache.k, cache.v, cache.k_scale, cache.v_scale, cache.aux_delta, cache.aux_channels,
        cache.v_tail,
    )  # fmt: skip

    def call(q, *pages):
        held = PagedKVCache(config, *pages, stats=stats)
        wrapper.run(query if quantised else q, held, out=out)

    # What the check looks at.
    request, head = shape.batch - 1, shape.num_kv_heads - 1
    rows = slice(head * shape.group, (head + 1) * shape.group)

    def operands() -> tuple[torch.Tensor, torch.Tensor | None]:
        """The query rows and their outlier channels as the kernel's products see them."""
        channels = None
        if quantised:
            if config.uses_channels:
                first = int(config.uses_mean)
                channels = query.a_comp[request, rows, first : first + config.channels]
            decode = dequantize_mxfp8 if config.format == MXFP8 else dequantize_nvfp4
            return decode(query.q[request, rows], query.q_scale[request, rows]), channels
        # Unrounded: what a kernel rounds its 16-bit query to counts as its error.
        q = tensors.q[request, rows].float()
        if config.uses_mean:
            q = q - stats.q_mean[rows]
        if config.uses_channels:
            channels = q[:, stats.channel_index[head].long()]
        return q, channels

    def check() -> Check:
        out.fill_(float("nan"))
        call(tensors.q, *pages)
        truth = inputs.cached_head(cache, table, request, head, *operands())
        return inputs.check_slice(out, truth, tensors, request, head, LIMITS[wrapper.backend])

    moved = shape.batch * shape.context * config.bytes_per_token
    note = f"backend {wrapper.backend}"
    return Job(case, mpfa_name(mode), call, (tensors.q, *pages), moved, check, note)


def baseline_builders(
    tensors: Tensors, table: PageTable, case: str, major: int, variants: bool,
    xqa: tuple[str, ...],
) -> list[tuple[str, Callable[[], Job]]]:  # fmt: skip
    """(name, builder) of every baseline that this GPU may have."""
    found: list[tuple[str, Callable[[], Job]]] = []

    def flashinfer(kind: str, **options) -> None:
        name = others.flashinfer_name(kind, **options)
        build = lambda: others.flashinfer_job(tensors, table, kind, case, **options)  # noqa: E731
        found.append((name, build))

    for kind in others.KV_KINDS:
        flashinfer(kind)
        if kind in xqa:
            found.append((others.xqa_name(kind),
                          lambda kind=kind: others.xqa_job(tensors, table, kind, case)))  # fmt: skip
        if variants:
            flashinfer(kind, graph=False)
            flashinfer(kind, layout="NHD")
        # NVFP4 pages of trtllm-gen hold V's scales in another order; cute-dsl reads none.
        if major == 10 and kind != "nvfp4":
            flashinfer(kind, backend="trtllm-gen")
            flashinfer(kind, backend="cute-dsl")
    return found


def dense_builders(tensors: Tensors, case: str, splits: tuple[int, ...]):
    """Baselines over contiguous K and V, which know no page size."""
    found = [("torch sdpa bf16", lambda: others.sdpa_job(tensors, case))]
    if others.fa4_missing() is None:
        found += [
            (others.fa4_name(n), lambda n=n: others.fa4_job(tensors, n, case)) for n in splits
        ]
    return found


def jobs_of(
    shape: Shape, page_size: int, device: torch.device, args: argparse.Namespace
) -> list[Job]:
    """All implementations of one shape and page size; what cannot be built is named."""
    case = f"decode {shape.name}, page {page_size}"
    tensors = inputs.make_tensors(shape, device)
    table = inputs.make_table(shape, page_size, device)
    jobs = copy_jobs(case, device)
    major = torch.cuda.get_device_capability(device)[0]
    for mode in (MXFP8,) if major == 12 else args.modes:
        format = MXFP8 if mode == MXFP8 else "qk4pv8"
        compensation = "none" if mode == MXFP8 else mode
        ok, reasons = supports(
            device, operation="decode", format=format, page_size=page_size,
            num_qo_heads=shape.num_qo_heads, num_kv_heads=shape.num_kv_heads,
            compensation=compensation, channels=inputs.CHANNELS[compensation],
        )  # fmt: skip
        if ok:
            jobs.append(mpfa_job(tensors, table, mode, case))
        else:
            print(f"skipped {mpfa_name(mode)}, {case}: {'; '.join(reasons)}")
    builders = baseline_builders(tensors, table, case, major, args.variants, args.xqa)
    if page_size == args.pages[-1]:
        builders += dense_builders(tensors, case, args.fa4_splits)
    for name, build in builders:
        try:
            job = build()
            # why here: what a library cannot do shows in its first call, not in its constructor.
            job.checked = job.check()
            if job.checked.ok:
                jobs.append(job)
            else:
                print(f"left out {name}, {case}: wrong, relative L2 {job.checked.error:.3g}")
        except Exception as error:  # any library's own
            text = str(error).strip().split("\n")[0][:200]
            print(f"skipped {name}, {case}: {type(error).__name__}: {text}", flush=True)
    return jobs


def run_case(
    shape: Shape, page_size: int, device: torch.device, timer: Timer, note: str, common: Row,
    args: argparse.Namespace,
) -> list[Row]:  # fmt: skip
    jobs = jobs_of(shape, page_size, device, args)
    measure(jobs, timer)
    baselines = [others.flashinfer_name(kind) for kind in others.KV_KINDS]
    print_table(f"{jobs[0].case}", jobs, baselines)
    return rows_of("decode", jobs, common, baselines, note)


def refusal(device_found: bool) -> str | None:
    """Why nothing can be measured here, or None."""
    if not device_found:
        return "no CUDA GPU is usable from this torch"
    device = torch.device("cuda", 0)
    format = MXFP8 if torch.cuda.get_device_capability(device)[0] == 12 else "qk4pv8"
    ok, reasons = supports(device, operation="decode", format=format, page_size=128,
                           num_qo_heads=32, num_kv_heads=8)  # fmt: skip
    return None if ok else "; ".join(reasons)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--set", choices=SETS, default="all")
    parser.add_argument("--pages", type=_numbers, default=PAGES, help="page sizes, 16,128")
    parser.add_argument("--modes", type=lambda t: tuple(t.split(",")), default=MODES)
    parser.add_argument(
        "--shape", type=_shape, action="append",
        help="batch x context x query heads (8 KV heads), as 1x131072x32; repeatable",
    )  # fmt: skip
    parser.add_argument("--variants", action="store_true", help="also FlashInfer's NHD, eager plan")
    parser.add_argument(
        "--xqa", type=lambda text: tuple(text.split(",")), default=(), metavar="KINDS",
        help="also FlashInfer's XQA decode over these KV dtypes: bf16,fp8,nvfp4",
    )  # fmt: skip
    parser.add_argument("--fa4-splits", type=_numbers, default=others.FA4_SPLITS)
    parser.add_argument("--timer", choices=TIMERS)
    parser.add_argument("--budget", type=float, help="seconds after which no new case begins")
    parser.add_argument("--json", type=Path, help="results file to merge the rows into")
    parser.add_argument("--commit", help="recorded with the results; default: git's")
    args = parser.parse_args(argv)
    unknown = [m for m in args.modes if m not in MODES]
    if unknown:
        parser.error(f"--modes: unknown {unknown}, allowed are {', '.join(MODES)}")
    reason = refusal(torch.cuda.is_available())
    if reason:
        print(f"skipped decode: {reason}")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    common = context("measured", find_gpu(), args.commit)
    check_json(parser, args.json, common)
    method, timer = choose_timer(args.timer)
    print(f"decode on {common['gpu']}, timer {method}, KV bytes of K, V, scales and side data")
    missing = others.fa4_missing()
    if missing:
        print(f"skipped fa4: {missing}")
    begin, rows, failed = time.monotonic(), [], 0
    cases = [(s, p) for s in (args.shape or SETS[args.set]) for p in args.pages]
    for shape, page in cases:
        if args.budget and time.monotonic() - begin > args.budget:
            print(f"skipped decode {shape.name}, page {page}: the {args.budget:g} s are used up")
            continue
        try:
            found = run_case(shape, page, device, timer, f"timer {method}", common, args)
        except WrongResultError as error:
            print(f"WRONG RESULT, not timed: {error}", flush=True)
            failed += 1
            continue
        except torch.OutOfMemoryError:
            print(f"skipped decode {shape.name}, page {page}: out of GPU memory", flush=True)
            torch.cuda.empty_cache()
            continue
        rows += found
        if args.json:
            save(args.json, found)
        torch.cuda.empty_cache()
    print()
    for line in summary(rows) + verdicts(rows):
        print(line)
    return 1 if failed else 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(","))


def _shape(text: str) -> Shape:
    batch, context_len, heads = (int(x) for x in text.split("x"))
    return Shape(batch, context_len, heads)


if __name__ == "__main__":
    sys.exit(main())
