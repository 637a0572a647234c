# SPDX-License-Identifier: Apache-2.0
"""Command line: python -m mpfa doctor, demo or accuracy."""

from __future__ import annotations

import argparse
import sys

from mpfa.accuracy.cli import add_arguments as add_accuracy_arguments


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m mpfa", description="Attention over low-bit KV caches."
    )
    commands = top.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor", help="what this machine has and which backends work on it"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    demo = commands.add_parser(
        "demo", help="a real language model over every cache format, on the CPU"
    )
    demo.add_argument("--tokens", type=int, default=2048, help="tokens to score (default: 2048)")
    demo.add_argument(
        "--decode-tokens",
        type=int,
        default=32,
        help="of each of the two windows, tokens fed one by one (default: 32)",
    )
    demo.add_argument(
        "--formats",
        help="comma-separated rows, listed in docs/demo.md (default: the seven of the table there)",
    )
    demo.add_argument("--prompt", help="question for the two generated answers")
    demo.add_argument(
        "--answer-tokens",
        type=int,
        default=24,
        help="length of the answers, 0 = none (default: 24)",
    )
    demo.add_argument("--json", metavar="PATH", help="also write the results as JSON")
    demo.add_argument("--seed", type=int, default=0, help="page order and bootstrap (default: 0)")
    accuracy = commands.add_parser(
        "accuracy", help="what each cache format keeps of a model's accuracy, on the CPU"
    )
    add_accuracy_arguments(accuracy)
    return top


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    # why: imported after parsing, so that --help answers at once.
    if arguments.command == "doctor":
        from mpfa import doctor

        return doctor.main(arguments.json)
    if arguments.command == "accuracy":
        from mpfa.accuracy import cli as accuracy

        return accuracy.main(arguments)
    from mpfa.demo import cli

    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
