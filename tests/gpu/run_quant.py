# SPDX-License-Identifier: Apache-2.0
"""Every quantise, cache-write, statistics and combine case on a GPU, without pytest.

    python tests/gpu/run_quant.py [--small] [--json FILE] [--repeat N]

Compares each output byte with the reference, computed on the CPU in parallel processes. Exits 1 when
a case differs. ``--small`` is what a sanitizer run can afford.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import quant_cases  # noqa: E402
import state_cases  # noqa: E402
import torch  # noqa: E402

from mpfa.backends import reference  # noqa: E402


def _reference(job: tuple[int, bool, str]) -> str:
    index, small, folder = job
    torch.set_num_threads(1)
    case = (quant_cases.small_cases() if small else quant_cases.cases())[index]
    inputs = quant_cases.build(case)
    outputs = quant_cases.run(case, inputs, torch.device("cpu"), reference)
    path = f"{folder}/{index}.pt"
    torch.save({name: quant_cases.raw(t) for name, t in outputs.items()}, path)
    return path


def compile_modules() -> float:
    """Seconds to have all modules loaded, compiling what is missing, in parallel."""
    from mpfa.jit import cuda, quant

    begin = time.perf_counter()
    with ThreadPoolExecutor(len(quant.ALL)) as pool:
        list(pool.map(cuda.build, quant.ALL))
    for spec in quant.ALL:
        cuda.load(spec)
    return time.perf_counter() - begin


def check_capture(device: torch.device) -> list[str]:
    """A captured append with q, replayed on new inputs, gives the bytes of a direct call."""
    from mpfa.backends import cuda

    case = quant_cases.Case(
        "append", "qk4pv8", 96, 16, "mean+channels", 15, True, with_q=True, slots="sequence", seed=7
    )
    inputs = quant_cases.build(case)
    config, stats = case.config, inputs.stats.to(device)

    def cache():
        pages = {n: t.to(device) for n, t in inputs.pages.items()}
        return quant_cases.PagedKVCache(config=config, **pages)

    static = [t.to(device) for t in (inputs.k, inputs.v, inputs.slots, inputs.q)]
    target = cache()
    query = cuda.empty_query(case.tokens, config, stats, case.dtype, device)
    k, v, slots, q = static
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        cuda.append(k, v, target, slots, stats, None, q, query=query)
        grown = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    faults = [] if grown == 0 else [f"capture: append made {grown} allocations"]
    for t in (k, v, q):
        t.copy_(t.flip(0))
    graph.replay()
    other = cache()
    direct = cuda.append(k, v, other, slots, stats, None, q)
    got = {**target.tensors, **quant_cases._query_outputs(query)}
    want = {**other.tensors, **quant_cases._query_outputs(direct)}
    return faults + quant_cases.differences(got, want)


def check_large_cache(device: torch.device) -> list[str]:
    """A V pool of more than 2^32 bytes: the first and the last slots, against a small cache."""
    from mpfa.backends import cuda
    from mpfa.cache import PagedKVCache

    faults = []
    for fmt in ("qk4pv8", "mxfp8"):
        case = quant_cases.Case("append", fmt, 4, 128, num_kv_heads=8, seed=11, slots="sequence")
        inputs = quant_cases.build(case)
        pages = (1 << 32) // (8 * 128 * 128) + 2
        big = PagedKVCache.allocate(case.config, pages, device)
        small = PagedKVCache.allocate(case.config, 2, device)
        k, v = inputs.k.to(device), inputs.v.to(device)
        offsets = torch.arange(4, device=device)
        cuda.append(k, v, big, (pages - 1) * 128 + offsets, None, None)
        cuda.append(k, v, small, 128 + offsets, None, None)
        for name, t in big.tensors.items():
            if not torch.equal(
                t[-1].view(torch.uint8).cpu(), small.tensors[name][-1].view(torch.uint8).cpu()
            ):
                faults.append(f"{fmt} {name}: last page of a pool of {pages} pages differs")
            if bool(t[: pages // 2].view(torch.uint8).any()):
                faults.append(f"{fmt} {name}: an untouched page changed")
    return faults


def check_compile(device: torch.device) -> list[str]:
    """torch.compile traces the ops without a graph break."""
    from mpfa.backends import cuda

    case = quant_cases.Case("query", "qk4pv8", 65, compensation="mean", seed=3)
    inputs = quant_cases.build(case)
    stats, q = inputs.stats.to(device), inputs.q.to(device)

    def step(x):
        query = cuda.empty_query(x.shape[0], case.config, stats, x.dtype, x.device)
        out = (query.q, query.q_scale, query.a_comp, query.row_term)
        torch.ops.mpfa.quantize_query_qk4pv8(
            x * 1.0, None, None, stats.q_mean, stats.k_mean, None, *out, 2, False, False
        )
        return out

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    pairs = zip(compiled(q), step(q), strict=True)
    return [f"output {i} differs" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--small", action="store_true", help="few tokens only, for sanitizers")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each case, bits must agree")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()

    cases = quant_cases.small_cases() if args.small else quant_cases.cases()
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        # why: the processes are forked before this one touches CUDA.
        with multiprocessing.get_context("fork").Pool(max(1, (os.cpu_count() or 2) - 2)) as pool:
            pending = pool.imap(_reference, [(i, args.small, folder) for i in range(len(cases))])
            pool.close()
            print(f"modules ready in {compile_modules():.1f} s", flush=True)
            from mpfa.backends import cuda

            device = torch.device("cuda", torch.cuda.current_device())
            begin = time.perf_counter()
            for case, path in zip(cases, pending, strict=True):
                want = torch.load(path)
                inputs = quant_cases.build(case)
                faults: list[str] = []
                for _ in range(args.repeat):
                    faults = faults or quant_cases.differences(
                        quant_cases.run(case, inputs, device, cuda), want
                    )
                results.append({"case": case.name, "faults": faults})
                os.unlink(path)
        others = state_cases.checks(args.small)
        if not args.small:
            others += [
                ("graph-capture", lambda d, _: check_capture(d)),
                ("large-cache", lambda d, _: check_large_cache(d)),
                ("torch-compile", lambda d, _: check_compile(d)),
            ]
        for name, function in others:
            try:
                faults = function(device, cuda)
            except Exception as error:  # noqa: BLE001
                faults = [f"{type(error).__name__}: {error}"[:600]]
            results.append({"case": name, "faults": faults})
        torch.cuda.synchronize()
    bad = [r for r in results if r["faults"]]
    for r in bad:
        print(f"DIFFERS {r['case']}: {'; '.join(r['faults'])}"[:1500])
    print(
        f"{len(results) - len(bad)} of {len(results)} cases equal the reference on "
        f"{torch.cuda.get_device_name()}, {time.perf_counter() - begin:.0f} s"
    )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
