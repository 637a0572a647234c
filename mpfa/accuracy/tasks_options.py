# SPDX-License-Identifier: Apache-2.0
"""Options of python -m mpfa accuracy --tasks."""

from __future__ import annotations

import argparse

DTYPES = ("bfloat16", "float16", "float32")
BASELINES = ("sdpa", "eager", "flash_attention_2")
# why not argparse's defaults: an option that was given is told from one that was not.
DEFAULTS = {
    "batch_size": 1,
    "baseline": "sdpa",
    "backend": "auto",
    "page_size": 128,
    "ruler_length": 65536,
    "chat": False,
    "resume": False,
}
OPTIONS = (
    *DEFAULTS,
    "tasks_path",
    "limit",
    "shots",
    "device",
    "dtype",
    "max_length",
    "config_json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", metavar="PATH", help="also write the table as markdown")
    group = parser.add_argument_group(
        "tasks", "lm-evaluation-harness tasks over the same rows (docs/tasks.md)"
    )
    group.add_argument(
        "--tasks",
        metavar="TASK,TASK",
        help="mmlu, hellaswag, winogrande, gsm8k, ruler_qa with the paper's shots, or any other task "
        "of lm-evaluation-harness; --model may then also be a Hugging Face id",
    )
    group.add_argument("--tasks-path", metavar="FOLDER", help="folder with task files of your own")
    group.add_argument(
        "--limit", type=int, metavar="N", help="only the first N examples of each (sub)task"
    )
    group.add_argument(
        "--shots", metavar="TASK=N,...", help="other few-shot counts than docs/tasks.md lists"
    )
    group.add_argument("--batch-size", type=int, metavar="N", help="default: 1")
    group.add_argument(
        "--baseline",
        choices=BASELINES,
        help="the model's own attention that the first row runs with (default: sdpa)",
    )
    group.add_argument("--backend", help="mpfa backend of the other rows (default: auto)")
    group.add_argument("--page-size", type=int, metavar="N", help="default: 128")
    group.add_argument("--device", help="default: cuda where there is one, else cpu")
    group.add_argument(
        "--dtype", choices=DTYPES, help="of the weights (default: bfloat16 on a GPU, else float32)"
    )
    group.add_argument(
        "--max-length", type=int, metavar="N", help="context limit (default: the model's)"
    )
    group.add_argument(
        "--ruler-length",
        type=int,
        metavar="N",
        help="tokens that ruler_qa pads to (default: 65536, as the paper)",
    )
    group.add_argument(
        "--chat", action="store_true", default=None, help="apply the tokenizer's chat template"
    )
    group.add_argument(
        "--config-json",
        metavar="JSON",
        help="fields of the model's configuration to replace, such as rope_parameters for YaRN",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        default=None,
        help="keep what --json PATH already holds from a run with the same settings",
    )


def refuse_without_tasks(arguments: argparse.Namespace) -> None:
    """Raises ValueError for an option of this group that was given without --tasks."""
    for name in OPTIONS:
        value = getattr(arguments, name)
        if value is not None:
            raise ValueError(f"{name}: only used with --tasks, got {value!r}")


def with_defaults(arguments: argparse.Namespace) -> argparse.Namespace:
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    return argparse.Namespace(**{**vars(arguments), **DEFAULTS, **given})
