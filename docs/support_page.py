# SPDX-License-Identifier: Apache-2.0
"""docs/support.md: every cell is an answer of mpfa.supports()."""

from __future__ import annotations

from unittest import mock

import torch

import mpfa
from mpfa import support
from mpfa.backends import kernels
from mpfa.config import COMPENSATIONS, FORMATS, HEAD_DIMS, MAX_CHANNELS, PAGE_SIZES

# "sim" runs all kernels and gets no column of its own.
BACKENDS = [name for name in support.HARDWARE if name != "sim"]
PAGES = (None, *PAGE_SIZES["qk4pv8"])
GPUS = {
    "8.0-8.9 (Ampere, Ada)": [(8, 0), (8, 6), (8, 9)],
    "9.0 (Hopper)": [(9, 0)],
    "10.0, 10.3 (B200, B300)": [(10, 0), (10, 3)],
    "11.0 (Thor)": [(11, 0)],
    "12.0, 12.1 (RTX 50, RTX PRO, GB10)": [(12, 0), (12, 1)],
}
PAGE = """\
# Support matrix

Written by `python docs/generate.py`: every cell is an answer of `mpfa.supports()`, and a test
compares the page with it and with what the wrappers do. Supported means that the code is there
and equals the reference in the simulator or on a GPU; which of them, and what was measured, is on
each kernel's page ([index.md](index.md)). Nothing has run on a Blackwell GPU.

## By GPU
Formats that `backend="auto"` serves, by compute capability.

{gpus}

## By format, head_dim and page size
The backends that serve each cell; "ragged" is K/V without pages. `backend="sim"` runs every kernel
named here on CPU tensors.

{shapes}

## Compensation
Every backend that reads qk4pv8 takes all of it, with `four_over_six` scales or without. A number is
the range of `channels`.

{compensations}

## Features

{features}

Decode takes any `q_len_per_request`. Every backend plans with `use_cuda_graph=True`; capture needs
a GPU. KV heads: up to {max_kv_heads} on a GPU.

## What is refused, and why
What `supports()` says beyond the rules of the format itself.

{refusals}

Out of scope on every backend: MLA, backward passes, custom and tree masks, other head dimensions,
different head dimensions of QK and V.
"""
FEATURES = {
    "causal": {"causal": True},
    "`window_left`": {"window_left": 100},
    "`logits_soft_cap`": {"logits_soft_cap": 30.0},
    "`sinks`": {"sinks": True},
    "`return_lse`, base 2 or e": {"return_lse": True},
    "bfloat16 q, k, v": {"dtype": torch.bfloat16},
    "float16 q, k, v": {"dtype": torch.float16},
    "GQA 1, 3, 4, 5, 7, 8, 16 : 1": [
        {"num_qo_heads": 2 * g, "num_kv_heads": 2} for g in (1, 3, 4, 5, 7, 8, 16)
    ],
}


def render() -> str:
    pairs = served()
    pages = ["ragged" if size is None else f"page {size}" for size in PAGES]
    channels = [[f, *(channel_range(f, c) for c in COMPENSATIONS)] for f in FORMATS]
    features = [
        [name, *("yes" if has_feature(*pair, asked) else "no" for pair in pairs)]
        for name, asked in FEATURES.items()
    ]
    operations = ["prefill", "decode", "append, quantise, statistics"]
    return PAGE.format(
        gpus=_table(["tensors on", *operations], gpu_rows()),
        shapes=_table(["operation", "format", "head_dim", *pages], shape_rows()),
        compensations=_table(["format", *(f"`{c}`" for c in COMPENSATIONS)], channels),
        features=_table(["feature", *(" ".join(pair) for pair in pairs)], features),
        max_kv_heads=kernels.MAX_KV_HEADS,
        refusals="\n".join(f"- {line}" for line in refusals()),
    )


def gpu_rows() -> list[list[str]]:
    rows = [["CPU", *(_formats_on("cpu", o) for o in support.OPERATIONS)]]
    for name, capabilities in GPUS.items():
        answers = set()
        for capability in capabilities:
            with (
                mock.patch.object(torch.cuda, "is_available", lambda: True),
                mock.patch.object(
                    torch.cuda, "get_device_capability", lambda device=None, c=capability: c
                ),
            ):
                answers.add(tuple(_formats_on("cuda:0", o) for o in support.OPERATIONS))
        (answer,) = answers
        rows.append([name, *answer])
    return rows


def _formats_on(device: str, operation: str) -> str:
    served = [f for f in FORMATS if mpfa.supports(device, **shape(operation, f))[0]]
    return ", ".join(served) or "-"


def shape(operation: str, format: str, head_dim: int = 128, page_size: int | None = 128) -> dict:
    return {
        "operation": operation,
        "format": format,
        "head_dim": head_dim,
        "page_size": page_size,
    }


def shape_rows() -> list[list[str]]:
    """One row per operation and format; head dimensions with the same cells share it."""
    rows = []
    for operation in kernels.OPERATIONS:
        for format in FORMATS:
            by_cells: dict[tuple[str, ...], list[str]] = {}
            for head_dim in HEAD_DIMS:
                cells = tuple(backends_of(operation, format, head_dim, page) for page in PAGES)
                by_cells.setdefault(cells, []).append(str(head_dim))
            rows.extend([operation, format, ", ".join(d), *c] for c, d in by_cells.items())
    return rows


def backends_of(operation: str, format: str, head_dim: int, page_size: int | None) -> str:
    asked = shape(operation, format, head_dim, page_size)
    return ", ".join(b for b in BACKENDS if mpfa.supports(b, **asked)[0]) or "-"


def channel_range(format: str, compensation: str) -> str:
    """The channels that the reference takes, e.g. "1-16", "yes" for 0 only, "-" for none."""
    counts = [
        c
        for c in range(max(MAX_CHANNELS.values()) + 2)
        if mpfa.supports("reference", format=format, compensation=compensation, channels=c)[0]
    ]
    if not counts:
        return "-"
    return "yes" if counts == [0] else f"{counts[0]}-{counts[-1]}"


def served() -> list[tuple[str, str]]:
    """(backend, operation) pairs that serve something."""
    return [
        (b, o)
        for b in BACKENDS
        for o in kernels.OPERATIONS
        if any(mpfa.supports(b, **shape(o, f))[0] for f in FORMATS)
    ]


def has_feature(backend: str, operation: str, asked: dict | list[dict]) -> bool:
    """Whether every format that the backend reads has it."""
    formats = [f for f in FORMATS if mpfa.supports(backend, **shape(operation, f))[0]]
    cases = asked if isinstance(asked, list) else [asked]
    return all(
        mpfa.supports(backend, **shape(operation, f), **case)[0] for f in formats for case in cases
    )


def refusals() -> list[str]:
    """What a backend refuses and the reference does not, and backends without a kernel."""
    lines = []
    for backend in BACKENDS[1:]:
        for operation in kernels.OPERATIONS:
            for format in FORMATS:
                for head_dim, page_size in ((128, 128), (256, 128), *((128, p) for p in PAGES)):
                    asked = shape(operation, format, head_dim, page_size)
                    own = set(mpfa.supports("reference", **asked)[1])
                    reasons = [r for r in mpfa.supports(backend, **asked)[1] if r not in own]
                    lines.extend(_told(reason, backend, operation) for reason in reasons)
    return list(dict.fromkeys(lines))


def _told(reason: str, backend: str, operation: str) -> str:
    return reason if backend in reason else f"{backend} {operation}: {reason}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
