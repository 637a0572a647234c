# SPDX-License-Identifier: Apache-2.0
"""Time to first token, time per output token and output tokens/s of a whole model.

    python benchmarks/serving.py [--model NAME | --shape NAME] [--formats KEY,KEY] [--json FILE]

The model runs in transformers: with its own attention over a preallocated BF16 cache, and with
attn_implementation="mpfa" over each cache format. All requests of a case arrive together, have the
same length and are decoded as one batch. --engine plugs in another engine (class Engine).
docs/serving.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from benchmarks.rows import Row, check_target, context, find_gpu, make_row, save  # noqa: E402
from mpfa.accuracy.rows import DIRECT, REFERENCE, RowSpec, parse_rows  # noqa: E402

# Paper section 7.3: fixed input length, 1024 output tokens.
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
CONCURRENCIES = (1, 8, 16)
OUTPUT_TOKENS = 1024
# On a CPU the reference backend runs: sizes that show that everything works, nothing more.
CPU_CONTEXTS, CPU_CONCURRENCIES, CPU_OUTPUT_TOKENS = (64, 256), (1, 2), 8
DEFAULT_KEYS = (REFERENCE, "mxfp8", DIRECT, "mean:request", "mean", "channels16+4/6")
CHECK_TOKENS = 200
BASELINES = ("sdpa", "eager", "flash_attention_2")


class Engine(Protocol):
    """What is measured. One instance serves one batch at a time."""

    name: str

    def refusal(self, length: int, concurrency: int, output_tokens: int) -> str | None:
        """Why this case is not run, or None."""

    def prefill(self, prompts: torch.Tensor, output_tokens: int) -> torch.Tensor:
        """Starts int64 [B, n] prompts (on the host), to be followed by at most ``output_tokens``
        tokens each, and returns the first of them: int64 [B] on the host."""

    def step(self) -> torch.Tensor:
        """The next token of each request, int64 [B] on the host."""

    def cache_bytes(self) -> int:
        """Bytes of the KV cache now."""

    def release(self) -> None:
        """Forgets the requests and frees their cache."""


@dataclass(frozen=True)
class Case:
    """One point. ``model`` (with its dtype) and ``prefill_tokens`` are part of the name: rows of
    another model or chunk size are other rows."""

    length: int
    concurrency: int
    output_tokens: int
    model: str
    prefill_tokens: int

    @property
    def name(self) -> str:
        return (
            f"{self.model}, prompt={self.length} concurrency={self.concurrency} "
            f"output={self.output_tokens} prefill-tokens={self.prefill_tokens}"
        )


@dataclass
class Measurement:
    """Seconds of every run of one engine at one case."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    cache_bytes: int = 0

    def add(self, engine: Engine, prompts: torch.Tensor, output_tokens: int) -> None:
        begin = time.perf_counter()
        engine.prefill(prompts, output_tokens)
        first = time.perf_counter()
        for _ in range(output_tokens - 1):
            engine.step()
        end = time.perf_counter()
        self.cache_bytes = engine.cache_bytes()
        self.ttft.append(first - begin)
        self.tpot.append((end - first) / (output_tokens - 1))
        self.total.append(end - begin)


def measure(
    engines: Sequence[Engine], case: Case, prompts: torch.Tensor, runs: int
) -> tuple[dict[str, Measurement], dict[str, str]]:
    """({engine: times}, {engine: why it was skipped}); the engines take turns."""
    skipped, kept = {}, []
    for engine in engines:
        reason = engine.refusal(case.length, case.concurrency, case.output_tokens)
        if reason is None:
            kept.append(engine)
        else:
            skipped[engine.name] = reason
    results = {engine.name: Measurement() for engine in kept}
    # Run 0 compiles and warms up; it decodes a few tokens only.
    for run in range(runs + 1):
        for engine in kept:
            if run == 0:
                Measurement().add(engine, prompts, min(4, case.output_tokens))
            else:
                results[engine.name].add(engine, prompts, case.output_tokens)
            engine.release()
    return results, skipped


def rows_of(
    case: Case, results: dict[str, Measurement], baseline: str, common: Row, note: str | None
) -> list[Row]:
    """Medians, means and spreads; ``ratio_to`` is how many times better than the baseline."""
    base = results.get(baseline)
    rows = []
    for name, m in results.items():
        rate = [case.concurrency * case.output_tokens / t for t in m.total]
        metrics = [
            ("TTFT", [1e3 * t for t in m.ttft], "ms", base and statistics.median(base.ttft) * 1e3),
            ("TPOT", [1e3 * t for t in m.tpot], "ms", base and statistics.median(base.tpot) * 1e3),
            ("output tokens/s", rate, "1/s", base and statistics.median(
                [case.concurrency * case.output_tokens / t for t in base.total])),
        ]  # fmt: skip
        for metric, values, unit, reference in metrics:
            middle = statistics.median(values)
            ratio = None
            if reference and name != baseline:
                better = middle / reference if unit == "1/s" else reference / middle
                ratio = {baseline: round(better, 3)}
            spread = 100.0 * (max(values) - min(values)) / middle
            for suffix, value, its_unit, its_ratio in (
                ("", middle, unit, ratio),
                (f", mean of {len(values)}", statistics.fmean(values), unit, None),
                (", spread", spread, "%", None),
            ):
                rows.append(make_row("serving", case.name, name, metric + suffix, value, its_unit,
                                     common, its_ratio, note))  # fmt: skip
        rows.append(make_row("serving", case.name, name, "KV cache", m.cache_bytes / 2**20, "MiB",
                             common, None, note))  # fmt: skip
    return rows


def cache_rows(keys: str | None) -> list[RowSpec]:
    """The rows of --formats.

    Raises:
        ValueError: a key that parse_rows() does not know, or whose cache an engine here cannot hold:
            MpfaCache has no per-tensor FP8, no directions and no K centred alone, and takes its means
            either from the calibration or from a request's first step, the latter without channels.
    """
    rows = parse_rows(keys, DEFAULT_KEYS)
    for row in rows:
        other_stats = row.centred_choice or row.stats == "first" or not row.centre_q
        if row.cache_format is None or other_stats or (row.takes_own_means and row.channels > 0):
            raise ValueError(
                f"formats: {row.key!r} is not available here; use bf16, mxfp8, none, mean, "
                "mean:request, channelsC or mean+channelsC, with +4/6 where wanted"
            )
    return rows


def chosen_baselines(text: str) -> list[str]:
    """ValueError for a name that is not in BASELINES, or given twice."""
    names = text.split(",")
    if len(set(names)) != len(names) or not set(names) <= set(BASELINES):
        raise ValueError(
            f"baselines: must be different names of {', '.join(BASELINES)}, got {text!r}"
        )
    return names


def plugged_in(targets: Sequence[str], arguments: argparse.Namespace) -> list[Engine]:
    """The engines of --engine; ValueError if one is not there or lacks a method of Engine."""
    engines: list[Engine] = []
    for target in targets:
        module, _, function = target.partition(":")
        try:
            make = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"engine: must be MODULE:FUNCTION, got {target!r} ({error})"
            ) from error
        engines += make(arguments)
    methods = ("refusal", "prefill", "step", "cache_bytes", "release")
    for engine in engines:
        lacking = [m for m in methods if not callable(getattr(engine, m, None))]
        if lacking or not isinstance(getattr(engine, "name", None), str):
            raise ValueError(
                f"engine: {type(engine).__name__} lacks {', '.join(lacking) or 'a name'}"
            )
    return engines


def check_tokens(engine: Engine, prompts: torch.Tensor) -> None:
    """A prefill and a step of an engine from elsewhere, before anything is timed. It shows no logits, so
    only the form of its tokens is checked, not which they are.

    Raises:
        RuntimeError: not int64 [B] on the host.
    """
    try:
        for what, tokens in (("prefill", engine.prefill(prompts, 2)), ("step", engine.step())):
            right = isinstance(tokens, torch.Tensor) and tokens.device.type == "cpu"
            if not right or tokens.dtype != torch.int64 or tokens.shape != (len(prompts),):
                raise RuntimeError(
                    f"{engine.name}: {what}() must give int64 [{len(prompts)}] on the host, got "
                    f"{getattr(tokens, 'dtype', type(tokens).__name__)} "
                    f"{list(getattr(tokens, 'shape', []))}; nothing was timed"
                )
    finally:
        engine.release()


def print_case(case: Case, results: dict[str, Measurement], skipped: dict[str, str]) -> None:
    print(f"\n{case.name}")
    if results:
        width = max(len(name) for name in results)
        print(f"  {'':{width}}  {'TTFT ms':>9} {'TPOT ms':>9} {'tokens/s':>9} {'cache MiB':>10}")
    for name, m in results.items():
        ttft, tpot, total = (statistics.median(x) for x in (m.ttft, m.tpot, m.total))
        rate = case.concurrency * case.output_tokens / total
        print(f"  {name:{width}}  {1e3 * ttft:>9.1f} {1e3 * tpot:>9.2f} {rate:>9.1f}"
              f" {m.cache_bytes / 2**20:>10.1f}", flush=True)  # fmt: skip
    for name, reason in skipped.items():
        print(f"  {name}: skipped: {reason}", flush=True)


def integers(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {text}")
    return values


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    from benchmarks.serving_models import SHAPES

    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", help="Hugging Face id or directory")
    model.add_argument(
        "--shape", choices=tuple(SHAPES),
        help="random weights in this shape (default: llama-3.1-8b on a GPU, tiny on a CPU)",
    )  # fmt: skip
    parser.add_argument("--formats", help=f"rows as in docs/accuracy.md ({','.join(DEFAULT_KEYS)})")
    parser.add_argument("--baselines", default="sdpa", help=f"{','.join(BASELINES)} (sdpa)")
    parser.add_argument("--contexts", type=integers, help="prompt tokens (4096 to 131072)")
    parser.add_argument("--concurrency", type=integers, help="requests at a time (1,8,16)")
    parser.add_argument("--output-tokens", type=int, help="per request, at least 2 (1024)")
    parser.add_argument("--runs", type=int, default=5, help="after one warm-up (5)")
    parser.add_argument(
        "--prefill-tokens", type=int, default=131072,
        help="of one forward pass over the whole batch; longer prompts go in chunks (131072)",
    )  # fmt: skip
    parser.add_argument("--engine", metavar="MODULE:FUNCTION", action="append", default=[],
                        help="function(arguments) that returns engines to measure as well")  # fmt: skip
    parser.add_argument("--json", type=Path, help="merge the rows into this results file")
    parser.add_argument("--commit", help="recorded instead of git's")
    arguments = parser.parse_args(argv)
    on_gpu = torch.cuda.is_available()
    if arguments.model is None and arguments.shape is None:
        arguments.shape = "llama-3.1-8b" if on_gpu else "tiny"
    defaults = (CONTEXTS, CONCURRENCIES, OUTPUT_TOKENS)
    if not on_gpu:
        defaults = (CPU_CONTEXTS, CPU_CONCURRENCIES, CPU_OUTPUT_TOKENS)
        if arguments.contexts is None:
            print(f"no GPU: the contexts {', '.join(map(str, CONTEXTS))} are skipped, they would take "
                  f"hours on a CPU; {', '.join(map(str, CPU_CONTEXTS))} run instead")  # fmt: skip
    for name, value in zip(("contexts", "concurrency", "output_tokens"), defaults, strict=True):
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    for name, least in (("output_tokens", 2), ("runs", 1), ("prefill_tokens", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name.replace('_', '-')}: must be >= {least}")
    # why before the work: loading a model takes minutes.
    try:
        arguments.rows = cache_rows(arguments.formats)
        arguments.baselines = chosen_baselines(arguments.baselines)
        arguments.gpu = find_gpu()
        arguments.common = context("measured", arguments.gpu, arguments.commit)
        check_target(arguments.json, arguments.common)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    from benchmarks.serving_engine import check, make_engines, random_prompts
    from benchmarks.serving_models import load

    arguments = parse(argv)
    try:
        others = plugged_in(arguments.engine, arguments)
    except ValueError as error:
        print(f"serving: {error}", file=sys.stderr)
        return 2
    model, source = load(arguments.model, arguments.shape)
    own = make_engines(model, arguments.rows, arguments.baselines, arguments.prefill_tokens)
    engines: list[Engine] = [*own, *others]
    if len({engine.name for engine in engines}) != len(engines):
        names = ", ".join(engine.name for engine in engines)
        print(f"serving: engine: the names must differ, got {names}", file=sys.stderr)
        return 2
    gpu, common = arguments.gpu, arguments.common
    print(f"{source} on {gpu.name if gpu else 'the CPU'}; {arguments.runs} runs")
    prompts = random_prompts(model, 1, CHECK_TOKENS, seed=3)
    for engine in engines[1:]:
        reason = engine.refusal(CHECK_TOKENS, 1, 2)
        if reason is not None:
            print(f"  {engine.name}: not checked: {reason}")
        elif engine in others:
            check_tokens(engine, prompts)
            print(f"  {engine.name}: the form of its tokens is right; its logits are not compared")
        else:
            error = check(engine, own[0], prompts)
            print(f"  {engine.name}: logits at relative L2 {error:.4f} to {own[0].name}")
    for length in arguments.contexts:
        for concurrency in arguments.concurrency:
            case = Case(
                length, concurrency, arguments.output_tokens, source, arguments.prefill_tokens
            )
            prompts = random_prompts(model, concurrency, length, seed=length)
            results, skipped = measure(engines, case, prompts, arguments.runs)
            print_case(case, results, skipped)
            if arguments.json is not None and results:
                save(arguments.json, rows_of(case, results, engines[0].name, common, None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
