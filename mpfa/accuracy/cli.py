# SPDX-License-Identifier: Apache-2.0
"""python -m mpfa accuracy: arguments, header, progress, table, reading, JSON and plots."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from mpfa.accuracy import tasks_options

DEFAULT_MODEL = "smollm2"
SYNTHETIC = "synthetic-d128"
VERSIONS = ("mpfa", "torch", "transformers")
QUICK_TOKENS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the accuracy command; imports nothing heavy."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"smollm2, gemma3-270m, {SYNTHETIC} (attention errors only) or the directory of a "
        f"transformers model, with --tasks also a Hugging Face id (default: {DEFAULT_MODEL})",
    )
    parser.add_argument(
        "--formats", help="comma-separated rows (docs/accuracy.md); bf16 always runs"
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument(
        "--quick", action="store_true", help=f"six rows on {QUICK_TOKENS} tokens, about 2 minutes"
    )
    amount.add_argument("--full", action="store_true", help="every row of docs/accuracy.md")
    parser.add_argument("--text", metavar="FILE", help="text to score (default: Persuasion)")
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="text that static statistics come from (default: Mansfield Park)",
    )
    parser.add_argument("--tokens", type=int, help="tokens to score (default: 2048)")
    parser.add_argument(
        "--window", type=int, help="tokens of each window, a request of its own (default: 1024)"
    )
    parser.add_argument(
        "--calibration-tokens", type=int, help="tokens to calibrate on (default: 1024)"
    )
    parser.add_argument(
        "--error-tokens",
        type=int,
        help="first tokens of each window whose attention error is taken (default: 512)",
    )
    parser.add_argument("--json", metavar="PATH", help="also write the results as JSON")
    parser.add_argument("--plots", metavar="DIR", help="also draw PNG plots (needs matplotlib)")
    parser.add_argument(
        "--store",
        metavar="DIR",
        help="keep finished rows here and take them from here; delete it when the code has changed",
    )
    parser.add_argument("--seed", type=int, default=0, help="page order and bootstrap (default: 0)")
    tasks_options.add_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the command; 2 for bad arguments, 1 when a package is missing."""
    # why here: --help answers without them.
    from mpfa.accuracy.models import ModelUnavailableError
    from mpfa.accuracy.plots import PlotsUnavailableError

    try:
        if arguments.tasks is not None:
            from mpfa.accuracy import tasks

            return tasks.main(arguments)
        tasks_options.refuse_without_tasks(arguments)
        return _run(arguments)
    except ValueError as error:
        return _refuse(error, 2)
    except (ModelUnavailableError, PlotsUnavailableError) as error:
        return _refuse(error, 1)


def _refuse(error: Exception, status: int) -> int:
    print(f"mpfa accuracy: {error}", file=sys.stderr)
    return status


def _settings(arguments: argparse.Namespace):
    from mpfa.accuracy.evaluate import AccuracySettings

    fields = {
        name: getattr(arguments, name)
        for name in ("tokens", "window", "calibration_tokens", "error_tokens", "seed")
        if getattr(arguments, name) is not None
    }
    if arguments.quick:
        fields = {"tokens": QUICK_TOKENS, "window": QUICK_TOKENS, **fields}
    for name in ("text", "calibration"):
        value = getattr(arguments, name)
        if value is not None:
            if arguments.model == SYNTHETIC:
                raise ValueError(f"{name}: {SYNTHETIC} reads no text, got {value!r}")
            fields[name] = Path(value)
    if arguments.store is not None and arguments.model == SYNTHETIC:
        raise ValueError(f"store: {SYNTHETIC} keeps no rows, got {arguments.store!r}")
    if "tokens" in fields and "window" not in fields:
        fields["window"] = min(AccuracySettings.window, fields["tokens"])
    return AccuracySettings(**fields)


def _run(arguments: argparse.Namespace) -> int:
    import torch

    from mpfa import doctor
    from mpfa.accuracy import models, outputs, plots, report
    from mpfa.accuracy.evaluate import Evaluation, SyntheticEvaluation
    from mpfa.accuracy.rows import DEFAULT_KEYS, FULL_KEYS, QUICK_KEYS, parse_rows

    started = time.monotonic()
    settings = _settings(arguments)
    default = QUICK_KEYS if arguments.quick else FULL_KEYS if arguments.full else DEFAULT_KEYS
    rows = parse_rows(arguments.formats, default)
    # why before the work: ten minutes later is too late for these.
    if arguments.plots is not None:
        plots.require_matplotlib()
    for name in ("json", "markdown"):
        outputs.check_file(name, getattr(arguments, name))
    for name in ("plots", "store"):
        outputs.check_folder(name, getattr(arguments, name))
    if arguments.model == SYNTHETIC:
        evaluation, name = SyntheticEvaluation(settings, rows), SYNTHETIC
    else:
        language = models.load(arguments.model)
        for row in rows:
            row.bytes_per_token_head(language)  # head_dim and heads that no row can have
        store = None if arguments.store is None else Path(arguments.store)
        evaluation, name = Evaluation(language, settings, rows, store=store), language.name
    versions = {package: doctor.package_version(package) for package in VERSIONS}
    print(_header(name, versions, settings, torch.get_num_threads()), flush=True)
    try:
        measured = evaluation.run()
    finally:
        evaluation.progress.clear()
    analysis = report.Analysis(measured, evaluation.geometry, settings.window, settings.seed)
    note = report.interval_note(analysis)
    print("\n" + report.format_table(analysis.reports) + (f"\n{note}" if note else ""))
    if name == SYNTHETIC:
        print("\nrel L2 by case\n" + report.format_layers(analysis.reports, evaluation.layer_names))
    print(report.reading(analysis) + "\n", flush=True)
    seconds = time.monotonic() - started
    if arguments.json is not None:
        document = report.as_json(
            analysis,
            settings,
            model=name,
            layer_names=evaluation.layer_names,
            versions=versions,
            seconds=seconds,
        )
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if arguments.markdown is not None:
        Path(arguments.markdown).write_text(
            report.format_markdown(analysis.reports) + (f"{note}\n" if note else ""),
            encoding="utf-8",
        )
    if arguments.plots is not None:
        written = plots.write_all(
            Path(arguments.plots),
            analysis.reports,
            evaluation.layer_names,
            evaluation.collect(),
            model=name,
        )
        print("\n".join(f"wrote {path}" for path in written))
    print(f"{time.monotonic() - started:.0f} s in all.")
    return 0


def _header(name: str, versions: dict[str, str], settings, threads: int) -> str:
    packages = ", ".join(f"{package} {version}" for package, version in versions.items())
    count = f"{threads} threads" if threads > 1 else "1 thread"
    lines = [
        f"{name}: reference emulation on the CPU ({count}), no GPU kernel",
        packages,
    ]
    if name == SYNTHETIC:
        lines.append(
            f"{settings.num_windows} draws of {settings.window} tokens; statistics from another "
            f"draw of {settings.calibration_tokens}"
        )
    else:
        lines.append(
            f"{settings.num_windows} x {settings.window} tokens of {settings.text.name}; static "
            f"statistics from {settings.calibration_tokens} tokens of {settings.calibration.name}"
        )
    return "\n".join(lines)
