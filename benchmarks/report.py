# SPDX-License-Identifier: Apache-2.0
"""One page from the kept results: benchmarks/results/*.json -> report.md and its plots.

    python benchmarks/report.py [--results DIR] [--out FILE] [--no-plots] [--merge FILE]

Every table says where its numbers come from: measured on a named GPU or CPU, the SASS model, or the
simulator. The paper's figures stand only beside rows measured on a B200.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import decode_cases, paper  # noqa: E402
from benchmarks.rows import RESULTS, Row, by_origin, load, measured_gpu, save, slug  # noqa: E402

BASELINES = (
    "flashinfer bf16", "flashinfer fp8", "flashinfer nvfp4", "flashinfer fa3 bf16",
    "flashinfer fa3 fp8", "flashinfer cute-dsl fp8", "fa4 bf16", "fa4 bf16 unsplit",
    "fa4 bf16 best split", "torch sdpa bf16", "flashinfer merge_states",
)  # fmt: skip
BEST_SPLIT = "fa4 bf16 best split"
MARKERS = "osD^v<>*"
# Plots show one page size and GQA ratio; the tables hold all of them.
PLOT_PAGE, PLOT_HEADS = 128, 32


class Page:
    """Markdown lines with headings and tables."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, *lines: str) -> None:
        self.lines += lines

    def table(self, head: Sequence[str], body: Sequence[Sequence[str]]) -> None:
        self.add("", "| " + " | ".join(head) + " |", "|" + "---|" * len(head))
        self.add(*("| " + " | ".join(row) + " |" for row in body), "")

    @property
    def text(self) -> str:
        return re.sub(r"\n{3,}", "\n\n", "\n".join(self.lines)).strip() + "\n"


def select(rows: Sequence[Row], **wanted: object) -> list[Row]:
    return [r for r in rows if all(r[k] == v for k, v in wanted.items())]


def values(rows: Sequence[Row], metric: str) -> dict[tuple[str, str], float]:
    """(case, impl) -> value."""
    return {(r["case"], r["impl"]): r["value"] for r in rows if r["metric"] == metric}


def origin(rows: Sequence[Row]) -> str:
    """Where and when: GPUs, drivers, commits, dates."""
    gpus, drivers, commits, dates = (
        list(dict.fromkeys(str(r[key]) for r in rows))
        for key in ("gpu", "driver", "commit", "date")
    )
    parts = [", ".join(gpus)]
    if drivers != ["none"]:
        parts.append(f"driver {', '.join(drivers)}")
    return "; ".join([*parts, f"commit {', '.join(commits)}", ", ".join(sorted(dates))])


def natural(text: str) -> list[object]:
    """Sort key: numbers by value, K as 1024."""
    words = re.findall(r"\d+K?|\D+", text)
    return [
        (0, int(w.rstrip("K")) << (10 if w.endswith("K") else 0), "") if w[0].isdigit()
        else (1, 0, w)
        for w in words
    ]  # fmt: skip


def with_best_split(times: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """FlashAttention-4's num_splits as one column: the fastest of each case."""
    kept = {k: v for k, v in times.items() if "num_splits" not in k[1]}
    for case in dict.fromkeys(c for c, i in times if "num_splits" in i):
        kept[case, BEST_SPLIT] = min(
            v for (c, i), v in times.items() if c == case and i.startswith("fa4 bf16")
        )
    return kept


def wide_table(page: Page, rows: Sequence[Row]) -> None:
    """One line per case: median microseconds per implementation, then what "mpfa mean" makes of them.
    ``rows`` are of one origin."""
    times = with_best_split(values(rows, "time"))
    spreads = values(rows, "time, spread")
    shares = {
        (r["case"], r["impl"]): r["ratio_to"]["copy"]
        for r in rows if r["metric"] == "bandwidth" and r["ratio_to"] and "copy" in r["ratio_to"]
    }  # fmt: skip
    impls = [i for i in dict.fromkeys(impl for _, impl in times) if not i.startswith("copy")]
    impls.sort(key=lambda i: not i.startswith("mpfa"))
    own = next(
        (i for i in ("mpfa mean", "mpfa", *impls) if i.startswith("mpfa") and i in impls), ""
    )
    present = [b for b in BASELINES if b in impls] if own else []
    head = ["case", *impls, *(f"{own} over {b}" for b in present)]
    shares = shares if own else {}
    head += [f"{own}, of copy"] if shares else []
    head += ["largest spread"]
    body = []
    for case in sorted({c for c, _ in times}, key=natural):
        mine = times.get((case, own))
        row = [case] + [f"{times[case, i]:.1f}" if (case, i) in times else "" for i in impls]
        row += [
            f"{times[case, b] / mine:.2f} x" if mine and (case, b) in times else "" for b in present
        ]
        row += [f"{shares[case, own]:.0%}" if (case, own) in shares else ""] if shares else []
        worst = max((v for (c, _), v in spreads.items() if c == case), default=None)
        row.append("" if worst is None else f"{worst:.1f} %")
        body.append(row)
    page.table(head, body)


def measured_sections(page: Page, rows: Sequence[Row]) -> None:
    """Decode, prefill and combine of one GPU."""
    for bench, title in (
        ("decode", "Decode"),
        ("prefill", "Prefill, causal"),
        ("combine", "Combine of split-KV partials"),
    ):
        # why a table each: a ratio of two drivers, commits or days says nothing about two kernels.
        for number, found in enumerate(by_origin(select(rows, bench=bench, kind="measured"))):
            if number == 0:
                page.add("", f"### {title}")
            page.add("", f"Measured, median microseconds: {origin(found)}.")
            if select(found, metric="time"):
                wide_table(page, found)
            lines = decode_cases.verdicts(found)
            if bench != "decode" or slug(str(found[0]["gpu"])) != "h200" or not lines:
                continue
            named = [x for x in lines if x.endswith("MISSED") or "best of" not in x]
            page.add(f"Held to on an H200: {sum(x.endswith('met') for x in lines)} of {len(lines)} met. "
                     "The named bars and what is missed:", "")  # fmt: skip
            page.add(*(f"- {line}" for line in named))


def append_section(page: Page, rows: Sequence[Row]) -> None:
    found = [r for r in select(rows, bench="append", kind="measured") if r["metric"] == "time"]
    if not found:
        return
    page.add("", "### Append (quantise and write to the cache)", f"Measured: {origin(found)}.")
    body = []
    for r in sorted(found, key=lambda r: natural(str(r["case"]))):
        size = re.search(r"T=(\d+)", str(r["case"]))
        if r["impl"] == "mpfa" and r["ratio_to"] and size and size[1] not in ("16", "64"):
            ratios = ", ".join(f"{v:.2f} x {k}" for k, v in r["ratio_to"].items())
            body.append([str(r["case"]), str(r["impl"]), f"{r['value']:.1f}", ratios])
    page.table(["case", "implementation", "median us", "baseline's time over it"], body)


def other_rates(page: Page, rows: Sequence[Row]) -> None:
    found = [r for r in select(rows, bench="mma_peak", kind="measured") if r["metric"] == "rate"]
    if found:
        page.add("", "### Warp MMA rates", f"Measured: {origin(found)}.")
        body = [[str(r["case"]), str(r["impl"]), f"{r['value']:.0f}"] for r in found]
        page.table(["case", "instruction", "TFLOP/s"], body)


def plan_section(page: Page, rows: Sequence[Row]) -> None:
    found = select(rows, bench="plan_cpu", kind="measured")
    for cpu in dict.fromkeys(r["gpu"] for r in found):
        mine = [r for r in found if r["gpu"] == cpu]
        page.add("", "## Planner", f"Measured on the CPU: {origin(mine)}.")
        medians, slow = values(mine, "median"), values(mine, "p90")
        body = [[c, f"{v:.0f}", f"{slow[c, i]:.0f}"] for (c, i), v in medians.items()]
        keep = [b for b in body if re.search(r"batch=(1|16|256|1024)$", b[0])]
        page.table(["case", "median us", "90th percentile"], keep)


def model_section(page: Page, rows: Sequence[Row]) -> None:
    """Bounds of the Blackwell kernels; nothing here ran."""
    found = select(rows, kind="sass_model")
    if not found:
        return
    page.add(
        "", "## Blackwell kernels: SASS model",
        "Computed from machine code ([docs/sass_model.md](../../docs/sass_model.md)); nothing in this "
        f"section ran on a GPU. Commits {', '.join(dict.fromkeys(str(r['commit']) for r in found))}.",
    )  # fmt: skip
    wanted = ("bound", "chain bound", "slack", "replay, share of QMMA.SF peak",
              "bound, share of QMMA.SF peak", "HBM")  # fmt: skip
    body = []
    for case in dict.fromkeys(r["case"] for r in found):
        for impl in dict.fromkeys(r["impl"] for r in select(found, case=case)):
            mine = {r["metric"]: r for r in select(found, case=case, impl=impl)}
            cells = [
                f"{n} {mine[n]['value']:.4g} {mine[n]['unit']}".strip() for n in wanted if n in mine
            ]
            if cells:
                body.append([str(case), str(impl), "; ".join(cells)])
    page.table(["case", "implementation", "SASS model"], body)


def simulator_section(page: Page, rows: Sequence[Row]) -> None:
    found = select(rows, bench="sim_speed", kind="simulator")
    if found:
        page.add("", "## PTX simulator", f"Speed of the simulator itself: {origin(found)}.")
        body = [[str(r["case"]), str(r["metric"]), f"{r['value']:.4g} {r['unit']}"] for r in found]
        page.table(["case", "metric", "value"], body)


def paper_section(page: Page, rows: Sequence[Row]) -> None:
    lines = paper.beside(rows)
    page.add("", "## Beside the paper")
    if not lines:
        page.add("No B200 measured these kernels yet, so the paper's figures (benchmarks/paper.json) "
                 "are not set beside anything here.")  # fmt: skip
        return
    page.table(["what", "paper", "measured here", "unit", "paper's place"], lines)


def series(rows: Sequence[Row], pattern: str) -> dict[str, list[tuple[int, float]]]:
    """impl -> [(tokens, median us)] of cases that match ``pattern`` with the length as its group."""
    found: dict[str, list[tuple[int, float]]] = {}
    for (case, impl), value in with_best_split(values(rows, "time")).items():
        match = re.fullmatch(pattern, case)
        if match and not impl.startswith("copy"):
            found.setdefault(impl, []).append((int(match[1]) << 10, value))
    return {k: sorted(v) for k, v in found.items()}


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def store(figure, plots: Path, name: str) -> str:
    figure.tight_layout()
    plots.mkdir(parents=True, exist_ok=True)
    # why no metadata: the same rows must give the same file.
    figure.savefig(plots / name, metadata={"Software": None})
    pyplot().close(figure)
    return name


def draw(
    plots: Path, name: str, title: str, lines: dict[str, list[tuple[int, float]]]
) -> str | None:
    """A log-log plot of time over tokens; its file name, or None with fewer than two lengths."""
    lines = {k: v for k, v in lines.items() if len(v) > 1}
    if not lines:
        return None
    figure, axes = pyplot().subplots(figsize=(7, 4), dpi=100)
    for index, (impl, points) in enumerate(lines.items()):
        style = "-" if impl.startswith("mpfa") else "--"
        axes.plot(*zip(*points, strict=True), style, marker=MARKERS[index % len(MARKERS)],
                  markersize=4, label=impl)  # fmt: skip
    lengths = sorted({n for points in lines.values() for n, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{n >> 10}K" for n in lengths])
    axes.set(title=title, xlabel="tokens", ylabel="microseconds (median)")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=7)
    return store(figure, plots, name)


def bars(
    plots: Path, name: str, title: str, label: str, found: dict[str, float], mark: float | None
) -> str:
    """Horizontal bars, the first on top, with a line at ``mark``."""
    figure, axes = pyplot().subplots(figsize=(7, 0.9 + 0.28 * len(found)), dpi=100)
    names = list(found)[::-1]
    colours = ["tab:blue" if "mpfa" in n or "append" in n else "tab:gray" for n in names]
    shown = axes.barh(names, [found[n] for n in names], color=colours)
    axes.bar_label(shown, fmt="%.4g", fontsize=7, padding=2)
    if mark is not None:
        axes.axvline(mark, color="black", linewidth=0.8, linestyle=":")
    axes.tick_params(labelsize=7)
    axes.margins(x=0.1)
    axes.set_xlabel(label, fontsize=8)
    axes.set_title(title, fontsize=9)
    return store(figure, plots, name)


def plot_section(page: Page, stem: str, rows: Sequence[Row], plots: Path) -> None:
    gpu = rows[0]["gpu"]
    wanted: list[tuple[str, str, str]] = []
    for batch in (1, 8, 16):
        pattern = rf"decode {batch} x (\d+)K, GQA {PLOT_HEADS}:8, page {PLOT_PAGE}"
        title = f"Decode, batch {batch}, GQA {PLOT_HEADS}:8, page {PLOT_PAGE}, {gpu}"
        wanted.append((f"{stem}_decode_b{batch}.png", title, pattern))
    pattern = rf"prefill (\d+)K causal, GQA {PLOT_HEADS}:8"
    title = f"Prefill, causal, GQA {PLOT_HEADS}:8, {gpu}"
    wanted.append((f"{stem}_prefill.png", title, pattern))
    groups = by_origin(select(rows, kind="measured", metric="time"))
    for name, title, pattern in wanted:
        # A plot shows one origin; with several, each has its own and names it.
        drawn = [g for g in groups if any(len(v) > 1 for v in series(g, pattern).values())]
        for number, group in enumerate(drawn, 1):
            several = len(drawn) > 1
            file = name.replace(".png", f"_{number}.png") if several else name
            text = f"{title}; {origin(group).split('; ', 1)[1]}" if several else title
            draw(plots, file, text, series(group, pattern))
            page.add("", f"![{text}]({plots.name}/{file})")
    shares = {
        str(r["case"]): r["ratio_to"]["copy"]
        for r in rows
        if r["bench"] == "append" and r["metric"] == "time" and r["impl"] == "mpfa"
        and r["ratio_to"] and "copy" in r["ratio_to"]
    }  # fmt: skip
    if shares:
        title = f"Append, share of a copy of the same bytes, {gpu}"
        name = bars(plots, f"{stem}_append.png", title, "share of the copy", shares, 1.0)
        page.add("", f"![{title}]({plots.name}/{name})")


def plot_model(page: Page, rows: Sequence[Row], plots: Path) -> None:
    """Bounds of the SM100 prefill kernels beside FlashAttention-4's, in cycles per tile."""
    found = {
        f"{r['case']}, {r['impl']}": r["value"]
        for r in select(rows, kind="sass_model", metric="bound")
        if str(r["case"]).startswith("sm100_prefill d=128")
    }
    if found:
        title = "SASS model, no measurement: prefill, cycles per 128 x 128 tile"
        name = bars(plots, "sass_model_prefill.png", title, "cycles", found, None)
        page.add("", f"![{title}]({plots.name}/{name})", "")


def build(files: dict[str, list[Row]], plots: Path | None) -> str:
    """The page from the rows of each results file (by stem)."""
    page = Page()
    page.add(
        "# Benchmark report",
        "Generated by `benchmarks/report.py` from the JSON files beside it; how each number is taken: "
        "[docs/benchmarks.md](../../docs/benchmarks.md). "
        "\"A over B\" is B's time over A's: above 1 A is faster.",
    )  # fmt: skip
    everything = [row for rows in files.values() for row in rows]
    sections: list[Callable[[Page, Sequence[Row]], None]] = [
        measured_sections, append_section, other_rates,
    ]  # fmt: skip
    for stem, rows in files.items():
        measured_gpu(rows, f"{stem}.json")
        mine = [r for r in rows if r["kind"] == "measured" and not str(r["gpu"]).startswith("none")]
        if not mine:
            continue
        page.add("", f"## {mine[0]['gpu']}")
        for section in sections:
            section(page, mine)
        if plots is not None:
            plot_section(page, stem, mine, plots)
    plan_section(page, everything)
    model_section(page, everything)
    if plots is not None:
        plot_model(page, everything, plots)
    simulator_section(page, everything)
    paper_section(page, everything)
    return page.text


def write(results: Path, out: Path, with_plots: bool = True) -> None:
    files = {path.stem: load(path) for path in sorted(results.glob("*.json"))}
    plots = out.parent / "plots" if with_plots else None
    out.write_text(build(files, plots), encoding="utf-8")


def take_in(results: Path, rows: Sequence[Row]) -> None:
    """Merges rows that a GPU measured into the results file of that GPU."""
    for row in rows:
        if row["kind"] != "measured" or str(row["gpu"]).startswith("none"):
            raise ValueError(
                "--merge: only rows that a GPU measured, got kind "
                f"{row['kind']!r}, gpu {row['gpu']!r}"
            )
    gpu = measured_gpu(rows, "--merge")
    if gpu is not None:
        save(results / f"{slug(gpu)}.json", rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, help="default: report.md in the results folder")
    parser.add_argument("--no-plots", action="store_true")
    parser.add_argument("--merge", type=Path, action="append", default=[], metavar="FILE",
                        help="first take these measured rows into <gpu>.json; repeatable")  # fmt: skip
    args = parser.parse_args(argv)
    out = args.out or args.results / "report.md"
    if not args.results.is_dir():
        parser.error(f"--results: no such folder: {args.results}")
    if not out.resolve().parent.is_dir():
        parser.error(f"--out: in no existing folder: {out}")
    try:
        for file in args.merge:
            if not file.is_file():
                raise ValueError(f"--merge: no such file: {file}")
            take_in(args.results, load(file))
        write(args.results, out, not args.no_plots)
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
