# SPDX-License-Identifier: Apache-2.0
"""Shapes and names of the decode benchmark, and what its rows amount to."""

from __future__ import annotations

from benchmarks.attention_baselines import KV_KINDS, flashinfer_name
from benchmarks.harness import COPY, geometric_mean
from benchmarks.inputs import CHANNELS, MODES, Shape
from benchmarks.rows import Row, by_origin

PAGES = (16, 128)
K = 1024
CORE = (
    *(Shape(b, n * K, 32) for b, n in ((1, 8), (1, 32), (1, 128), (8, 32), (32, 8))),
    Shape(1, 128 * K, 40),
    Shape(1, 128 * K, 64),
)
MATRIX = tuple(
    Shape(batch, n * K, heads)
    for heads in (32, 40)
    for batch in (1, 8, 16)
    for n in (4, 8, 16, 32, 64, 128)
)
SETS = {"core": CORE, "matrix": MATRIX, "all": tuple(dict.fromkeys(CORE + MATRIX))}
# What sm90 decode with compensation "mean" is held to on an H200: speed over, share of the copy.
BARS = {"flashinfer fp8": 1.6, "flashinfer bf16": 1.9}
BAR_SHAPES = (Shape(1, 128 * K, 32), Shape(8, 32 * K, 32))
BAR_COPY = 0.75


def mpfa_name(mode: str) -> str:
    channels = CHANNELS.get(mode)
    return f"mpfa {mode}({channels})" if channels else f"mpfa {mode}"


def verdicts(rows: list[Row]) -> list[str]:
    """The bars above, met or missed, from measured rows; only rows of one origin are compared."""
    return [line for group in by_origin(rows) for line in _verdicts(group)]


def _verdicts(rows: list[Row]) -> list[str]:
    times = {(r["case"], r["impl"]): r["value"] for r in rows if r["metric"] == "time"}
    shares = {
        (r["case"], r["impl"]): r["ratio_to"][COPY]
        for r in rows
        if r["metric"] == "bandwidth" and r["ratio_to"]
    }
    own = mpfa_name("mean")
    lines = []

    def line(case: str, text: str, got: float, bar: float) -> None:
        lines.append(f"{case}: {text} {got:.3f}, bar {bar:g}: {'met' if got >= bar else 'MISSED'}")

    for page in PAGES:
        for shape in BAR_SHAPES:
            case = f"decode {shape.name}, page {page}"
            if (case, own) not in times:
                continue
            for name, bar in BARS.items():
                if (case, name) in times:
                    line(case, f"speed over {name}", times[case, name] / times[case, own], bar)
            if (case, own) in shares:
                line(case, "share of the copy's bandwidth", shares[case, own], BAR_COPY)
    for case in dict.fromkeys(c for c, impl in times if impl == own):
        if " x 4K," in case:  # below what the kernels are for
            continue
        known = [times[case, n] for n in map(flashinfer_name, KV_KINDS)
                 if (case, n) in times]  # fmt: skip
        if known:
            line(case, "speed over the best of FlashInfer's", min(known) / times[case, own], 1.0)
    return lines


def summary(rows: list[Row]) -> list[str]:
    """Geometric means over 8K-128K per page size, batch and GQA ratio (the paper's range), each
    from rows of one origin."""
    return [line for group in by_origin(rows) for line in _summary(group)]


def _summary(rows: list[Row]) -> list[str]:
    times = {(r["case"], r["impl"]): r["value"] for r in rows if r["metric"] == "time"}
    lines = []
    for page in PAGES:
        for heads, batch in dict.fromkeys((s.num_qo_heads, s.batch) for s in MATRIX):
            shapes = [Shape(batch, n * K, heads) for n in (8, 16, 32, 64, 128)]
            cases = [f"decode {s.name}, page {page}" for s in shapes]
            for mode in MODES:
                for base in map(flashinfer_name, KV_KINDS):
                    keys = [((c, base), (c, mpfa_name(mode))) for c in cases]
                    if not all(a in times and b in times for a, b in keys):
                        continue
                    mean = geometric_mean(times[a] / times[b] for a, b in keys)
                    lines.append(f"batch {batch}, GQA {heads}:8, page {page}, 8K-128K: "
                                 f"{mpfa_name(mode)} {mean:.2f} x {base}")  # fmt: skip
    return lines
