# SPDX-License-Identifier: Apache-2.0
"""The committed English prose: what is scored and what is calibrated on (data/SOURCES.md)."""

from __future__ import annotations

from pathlib import Path

import torch

DATA = Path(__file__).parent / "data"
SCORED = "persuasion.txt"
CALIBRATION = "mansfield_park.txt"


def read_prose(name: str) -> str:
    """Text of one data file with the line breaks inside paragraphs undone."""
    paragraphs = (DATA / name).read_text(encoding="utf-8").split("\n\n")
    return "\n\n".join(" ".join(p.split()) for p in paragraphs if p.strip())


def tokens_of(tokenizer: object, name: str, count: int) -> torch.Tensor:
    """The first ``count`` token ids of a data file, int64 [count]."""
    ids = tokenizer(read_prose(name)).input_ids
    if len(ids) < count:
        raise ValueError(f"{name} has {len(ids)} tokens, {count} were asked for")
    return torch.tensor(ids[:count], dtype=torch.int64)


def scored_windows(tokenizer: object, num_windows: int, tokens_per_window: int) -> torch.Tensor:
    """Consecutive windows of the scored text, int64 [num_windows, tokens_per_window + 1].

    The last token of a window is only a target, never an input.
    """
    length = tokens_per_window + 1
    return tokens_of(tokenizer, SCORED, num_windows * length).view(num_windows, length)
