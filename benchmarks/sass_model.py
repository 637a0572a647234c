# SPDX-License-Identifier: Apache-2.0
"""SASS model: cycles of the attention kernels from their machine code, without running them.

    python benchmarks/sass_model.py --kernel sm120 --head-dim 128
    python benchmarks/sass_model.py --kernel sm100_prefill --head-dim 128 [--arch 10.3a]
    python benchmarks/sass_model.py --kernel sm100_decode --head-dim 128 [--group 4]
    python benchmarks/sass_model.py --all [--json benchmarks/results/sass_model.json]
    python benchmarks/sass_model.py --loops FILE                 every loop of any cubin or library

Compiles the kernel through mpfa.jit where --cubin FILE does not name it. Baselines that
benchmarks/sass/baselines.py has built stand beside it. What the figures mean, and where each weight
comes from: docs/sass_model.md. Nothing here is a measurement.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.sass import kernels, model, parse, tools, weights  # noqa: E402
from benchmarks.sass.kernels import Figure  # noqa: E402
from mpfa.jit.paths import cache_root  # noqa: E402

KERNELS = {
    "sm120": ("mpfa_sm120_prefill", "12.0a"),
    "sm100_prefill": ("mpfa_sm100_prefill", "10.0a"),
    "sm100_decode": ("mpfa_sm100_decode", "10.0a"),
}
# why one list: the architectures of a process are fixed by the first module that it builds.
BUILD_ARCHS = "10.0a 10.3a 12.0a"
HEAD_DIMS = (64, 128)
# MMA warps in a sub-partition: 8 of a 12-warp thread block, one block in an SM.
SM120_WARPS = 2
ROWS_VARIANT = "mpfa replicated rows"
# Bits of P and V of the comparison builds of sm100_prefill (paper, Figure 3).
PV_VARIANTS = {16: "mpfa QK4, BF16 PV", 4: "mpfa QK4, NVFP4 PV"}
LABEL = "SASS model"


@dataclass(frozen=True)
class Image:
    """One implementation's machine code for one case."""

    impl: str
    file: Path


def own_image(kernel: str, head_dim: int) -> Image:
    """The shipped kernel, compiled if it is not in the cache."""
    from mpfa.backends import kernels as table
    from mpfa.jit import attention, cuda

    module, _ = KERNELS[kernel]
    entry = next(k for k in table.KERNELS if k.module == module)
    return Image("mpfa", cuda.build(attention.attention_spec(entry, head_dim), BUILD_ARCHS))


def replicated_rows_image(head_dim: int) -> Image:
    """The paper's own decode scheme, the second variant of the decode kernel."""
    from mpfa.jit import cuda
    from mpfa.jit.spec import CudaSpec

    name = f"mpfa_sm100_decode_rows_d{head_dim}"
    flags = (f"-DMPFA_HEAD_DIM={head_dim}",)
    spec = CudaSpec(name, ("sm100_decode_rows.cu",), (10,), 40, flags)
    return Image(ROWS_VARIANT, cuda.build(spec, BUILD_ARCHS))


def pv_image(bits: int) -> Image:
    """The prefill kernel with another precision of P and V, head_dim 128."""
    from mpfa.jit import cuda
    from mpfa.jit.spec import CudaSpec

    name, flags = f"mpfa_sm100_prefill_pv{bits}_d128", (f"-DMPFA_SM100_PV={bits}",)
    spec = CudaSpec(name, ("sm100_prefill_pv.cu",), (10,), 40, flags)
    return Image(PV_VARIANTS[bits], cuda.build(spec, BUILD_ARCHS))


def baseline_folder() -> Path:
    return cache_root() / "benchmarks" / "baselines"


def baselines(kernel: str, head_dim: int, arch: str) -> list[Image]:
    """Cubins that benchmarks/sass/baselines.py wrote: <kernel>-d<head_dim>-<target>-<impl>.cubin."""
    pattern = f"{kernel}-d{head_dim}-sm_{arch.replace('.', '')}-*.cubin"
    found = sorted(baseline_folder().glob(pattern))
    return [Image(f.stem.split("-", 3)[3].replace("_", " "), f) for f in found]


def functions_of(file: Path, arch: str) -> list[parse.Function]:
    target = f"sm_{arch.replace('.', '')}"
    functions = []
    for _, listing in tools.listings(file, None if file.suffix in (".cubin", ".sass") else target):
        functions += parse.parse(listing)
    return functions


def figures_of(kernel: str, head_dim: int, arch: str, group: int, image: Image) -> list[Figure]:
    functions = functions_of(image.file, arch)
    table = weights.arch_of(f"sm_{arch.replace('.', '')}")
    if kernel == "sm120":
        return kernels.warp_mma_kernel(functions, table, head_dim, SM120_WARPS)
    if kernel == "sm100_prefill":
        return kernels.umma_prefill_kernel(functions, table, head_dim)
    if image.impl == ROWS_VARIANT:
        moved = kernels.qk4pv8_block_bytes(head_dim, group)
        shape = kernels.DecodeShape(128, head_dim, True, moved)
    elif image.impl == "mpfa":
        # S^T = K Q^T and O^T = V^T P^T: N is the heads of a group, in steps of 16.
        columns = -(-group // 16) * 16
        moved = kernels.qk4pv8_block_bytes(head_dim, group)
        shape = kernels.DecodeShape(columns, columns, False, moved)
    else:
        moved = 128 * 2 * head_dim * (2 if "bf16" in image.impl else 1)
        shape = kernels.DecodeShape(128, head_dim, True, moved)
    return kernels.umma_decode_kernel(functions, table, head_dim, shape)


def print_table(title: str, columns: list[tuple[str, list[Figure]]]) -> None:
    print(f"\n{LABEL}: {title}")
    names: list[str] = []
    for _, figures in columns:
        names += [f.metric for f in figures if f.metric not in names]
    width = max(len(n) for n in names)
    heads = [impl[:26] for impl, _ in columns]
    print(f"  {'':{width}}  " + "  ".join(f"{h:>26}" for h in heads) + "  unit")
    for name in names:
        cells, unit = [], ""
        for _, figures in columns:
            found = next((f for f in figures if f.metric == name), None)
            cells.append("" if found is None else f"{found.value:.4g}")
            if found is not None:
                unit = unit or " ".join(filter(None, [found.unit, found.note]))
        print(f"  {name:{width}}  " + "  ".join(f"{c:>26}" for c in cells) + f"  {unit}")


def aims(
    kernel: str, head_dim: int, arch: str, columns: list[tuple[str, list[Figure]]]
) -> list[str]:
    """What was aimed at, beside what the model says."""
    value = {impl: {f.metric: f.value for f in figures} for impl, figures in columns}
    own = value.get("mpfa")
    if own is None:
        return []
    lines = []

    def line(text: str, got: float, limit: float, most: bool) -> None:
        good = got <= limit if most else got >= limit
        word = "<=" if most else ">="
        lines.append(f"{text}: {got:.4g}, aim {word} {limit:.4g}: {'met' if good else 'NOT met'}")

    if kernel == "sm120":
        aim = {128: 0.65, 64: 0.45}[head_dim]
        line("share of the QMMA.SF peak, two warps, rescale weighted",
             own["replay, share of QMMA.SF peak"], aim, False)  # fmt: skip
    elif kernel == "sm100_prefill":
        if head_dim == 128 and arch == "10.0a":
            line("bound against 0.85 x FA4 FP8's 776 cycles", own["bound"], 0.85 * 776, True)
        extra = own["bound"] / own["bound without compensation"] - 1
        line("compensation, on the pipe bound", extra, 0.03, True)
        extra = own["chain bound"] / own["chain bound without compensation"] - 1
        line("compensation, on the chain bound", extra, 0.03, True)
        extra = own["chain of one stage"] / own["  without compensation"] - 1
        lines.append(f"compensation, on the latency of one stage alone: {extra:.4g} (no aim)")
    else:
        text = "HBM cycles over the slowest pipe"
        if head_dim == 128:
            line(text, own["slack"], 1.5, False)
        else:
            lines.append(f"{text}: {own['slack']:.4g} (no aim)")
    return lines


def rows_of(case: str, arch: str, columns: list[tuple[str, list[Figure]]]) -> list[dict]:
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    common = {
        "gpu": f"none (model of sm_{arch.replace('.', '')})", "driver": "none",
        "commit": commit or "none", "date": datetime.date.today().isoformat(),
        "kind": "sass_model",
    }  # fmt: skip
    own = {f.metric: f.value for impl, figures in columns if impl == "mpfa" for f in figures}
    rows = []
    for impl, figures in columns:
        for f in figures:
            ratio = None
            if impl != "mpfa" and own.get(f.metric):
                ratio = {"mpfa": round(f.value / own[f.metric], 3)}
            rows.append({
                "bench": "sass_model", "case": case, "impl": impl, "metric": f.metric.strip(),
                "value": round(f.value, 4), "unit": f.unit, "note": f.note, "ratio_to": ratio,
                **common,
            })  # fmt: skip
    return rows


def run(kernel: str, head_dim: int, arch: str, group: int, cubin: Path | None) -> list[dict]:
    images = [Image("mpfa", cubin) if cubin else own_image(kernel, head_dim)]
    if kernel == "sm100_decode" and head_dim == 128 and cubin is None:
        images.append(replicated_rows_image(head_dim))
    if kernel == "sm100_prefill" and head_dim == 128 and cubin is None:
        images += [pv_image(bits) for bits in PV_VARIANTS]
    images += baselines(kernel, head_dim, arch)
    columns = []
    for image in images:
        try:
            columns.append((image.impl, figures_of(kernel, head_dim, arch, group, image)))
        except ValueError as error:
            if image.impl == "mpfa":
                raise
            print(f"left out {image.impl}: {error}", file=sys.stderr)
    case = f"{kernel} d={head_dim} sm_{arch.replace('.', '')}"
    if kernel == "sm100_decode":
        case += f" group {group}"
    print_table(case, columns)
    for text in aims(kernel, head_dim, arch, columns):
        print(f"  {text}")
    return rows_of(case, arch, columns)


def print_loops(file: Path, arch: str | None) -> None:
    """Every loop of a file that is not a wait: size, pipes, instruction mix."""
    target = f"sm_{arch.replace('.', '')}" if arch else None
    for name, listing in tools.listings(file, target):
        table = weights.arch_of(kernels.target_of(name, listing))
        for function in parse.parse(listing):
            print(f"{name}: {function.name[:100]}, {len(function.instructions)} instructions")
            for body in model.bodies(function):
                bound = model.bound(body.code, table)
                pipes = ", ".join(f"{p} {c:.0f}" for p, c in bound.cycles.items() if c)
                mix = ", ".join(f"{n} {k}" for k, n in body.kinds.most_common(12))
                print(f"  {body.address:#07x} {len(body.code)} of {body.whole}: {pipes}; {mix}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kernel", choices=sorted(KERNELS))
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, default=128)
    parser.add_argument("--arch", help="12.0a, 10.0a, 10.3a; default: the kernel's first")
    parser.add_argument("--group", type=int, default=4, help="query heads per KV head (decode)")
    parser.add_argument(
        "--cubin", type=Path, help="cubin, library or nvdisasm -hex listing (.sass)"
    )
    parser.add_argument("--all", action="store_true", help="every kernel and head dimension")
    parser.add_argument("--loops", type=Path, help="print every loop of this file instead")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.loops:
        print_loops(args.loops, args.arch)
        return 0
    if args.all == (args.kernel is not None):
        parser.error("name one of --kernel, --all and --loops")
    if args.group < 1:
        parser.error(f"--group: must be at least 1, got {args.group}")
    if args.all:
        cases = [(k, d, a) for k, (_, a) in KERNELS.items() for d in HEAD_DIMS]
        cases.append(("sm100_prefill", 128, "10.3a"))
        rows = [row for k, d, a in cases for row in run(k, d, a, args.group, None)]
    else:
        arch = args.arch or KERNELS[args.kernel][1]
        rows = run(args.kernel, args.head_dim, arch, args.group, args.cubin)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
