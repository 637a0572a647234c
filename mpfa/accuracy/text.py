# SPDX-License-Identifier: Apache-2.0
"""Text files as tokens: by default the committed English prose (data/SOURCES.md)."""

from __future__ import annotations

from pathlib import Path

import torch

DATA = Path(__file__).parent / "data"
SCORED = DATA / "persuasion.txt"
CALIBRATION = DATA / "mansfield_park.txt"


def read_prose(path: Path) -> str:
    """Text of a file with the line breaks inside paragraphs undone."""
    paragraphs = path.read_text(encoding="utf-8").split("\n\n")
    return "\n\n".join(" ".join(p.split()) for p in paragraphs if p.strip())


def token_ids(tokenizer: object, path: Path) -> list[int]:
    """All token ids of a text file, the tokenizer's start token first where it sets one.

    Raises:
        ValueError: the file cannot be read as UTF-8 text.
    """
    # why: only the committed novels are wrapped prose; a user's file is taken as it is.
    try:
        content = read_prose(path) if path.parent == DATA else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"text: cannot read {path}: {error}") from error
    return tokenizer(content).input_ids


def tokens_of(tokenizer: object, path: Path, count: int) -> torch.Tensor:
    """The first ``count`` token ids of a text file, int64 [count].

    Raises:
        ValueError: the file cannot be read or is too short.
    """
    ids = token_ids(tokenizer, path)
    if len(ids) < count:
        raise ValueError(f"{path.name} has {len(ids)} tokens, {count} were asked for")
    return torch.tensor(ids[:count], dtype=torch.int64)


def scored_windows(
    tokenizer: object, num_windows: int, tokens_per_window: int, path: Path = SCORED
) -> torch.Tensor:
    """Consecutive windows of a text, int64 [num_windows, tokens_per_window + 1].

    The last token of a window is only a target, never an input. Where the tokenizer starts a text
    with a start token, every window gets one: such a model is lost without it.
    """
    length = tokens_per_window + 1
    first = tokens_of(tokenizer, path, 1)
    starts = int(first[0]) == getattr(tokenizer, "bos_token_id", None)
    rest = length - starts
    ids = tokens_of(tokenizer, path, starts + num_windows * rest)[int(starts) :]
    windows = ids.view(num_windows, rest)
    return torch.cat([first.expand(num_windows, 1), windows], dim=1) if starts else windows
