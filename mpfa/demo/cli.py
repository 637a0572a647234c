# SPDX-License-Identifier: Apache-2.0
"""The demo as a command: header, progress, table, reading, two answers."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from mpfa import doctor
from mpfa.accuracy.outputs import check_file
from mpfa.accuracy.rows import RowSpec
from mpfa.demo import report
from mpfa.demo.model import MODEL_NAME, ModelUnavailableError, load_model
from mpfa.demo.rows import ROWS, select_rows
from mpfa.demo.run import Demo, DemoSettings

VERSIONS = ("mpfa", "torch", "transformers", "apache-tvm-ffi")


def main(arguments: argparse.Namespace) -> int:
    """Run the demo; 2 for bad arguments, 1 when a package is missing."""
    started = time.monotonic()
    fields = {
        "tokens": arguments.tokens,
        "decode_tokens": arguments.decode_tokens,
        "answer_tokens": arguments.answer_tokens,
        "seed": arguments.seed,
    }
    if arguments.prompt is not None:
        fields["prompt"] = arguments.prompt
    try:
        check_file("json", arguments.json)
        settings = DemoSettings(**fields)
        rows = select_rows(arguments.formats.split(",") if arguments.formats else None)
    except ValueError as error:
        return _refuse(error, 2)
    try:
        model = load_model()
    except ModelUnavailableError as error:
        return _refuse(error, 1)
    try:
        demo = Demo(model, settings, rows)
    except ValueError as error:
        return _refuse(error, 2)
    versions = {name: doctor.package_version(name) for name in VERSIONS}
    print(_header(versions, settings), flush=True)
    try:
        results = demo.run()
        demo.pause()
        print("\n" + report.format_table(results))
        print(report.reading(results, settings.seed) + "\n", flush=True)
        answers = _answers(demo, settings, rows, report.best_low_bit(results))
    finally:
        demo.pause()
    seconds = time.monotonic() - started
    print(f"\n{seconds:.0f} s in all.")
    if arguments.json is not None:
        document = report.as_json(settings, versions, results, answers, seconds)
        Path(arguments.json).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


def _refuse(error: Exception, status: int) -> int:
    print(f"mpfa demo: {error}", file=sys.stderr)
    return status


def _header(versions: dict[str, str], settings: DemoSettings) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    device = doctor.gpus()[0] + " (not used)" if doctor.gpus() else "no GPU found"
    prompt = settings.window_tokens - settings.decode_tokens
    return (
        f"{MODEL_NAME}, attention by mpfa's reference backend on the CPU "
        f"({torch.get_num_threads()} threads); {device}\n{packages}\n"
        f"{settings.num_requests} requests x {settings.window_tokens} scored tokens of Persuasion: "
        f"{prompt} in one prefill, then {settings.decode_tokens} decoded one by one over the same "
        f"paged cache\n"
        f"static statistics from {settings.calibration_tokens} tokens of Mansfield Park"
    )


def _answers(
    demo: Demo, settings: DemoSettings, rows: list[RowSpec], best: report.RowResult | None
) -> dict[str, str]:
    """Generate and print the bf16 answer and the best low-bit row's."""
    if not settings.answer_tokens:
        return {}
    chosen = [ROWS[0]] + ([best.row] if best is not None else [])
    answers = {row.key: demo.answer(row) for row in chosen}
    demo.pause()
    print(f"Prompt: {settings.prompt}")
    width = max(len(key) for key in answers)
    for key, answer in answers.items():
        print(f"  {key.ljust(width)}  {' '.join(answer.split())}")
    return answers
