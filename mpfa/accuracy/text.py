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


def token_ids(tokenizer: object, path: Path, *, name: str = "text") -> list[int]:
    """All token ids of a text file, the tokenizer's start token first where it sets one.

    ``name`` is the argument that errors blame.

    Raises:
        ValueError: the file cannot be read as UTF-8 text.
    """
    # why: only the committed novels are wrapped prose; a user's file is taken as it is.
    try:
        content = read_prose(path) if path.parent == DATA else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: cannot read {path}: {error}") from error
    return tokenizer(content).input_ids


def tokens_of(tokenizer: object, path: Path, count: int, *, name: str = "text") -> torch.Tensor:
    """The first ``count`` token ids of a text file, int64 [count].

    Raises:
        ValueError: the file cannot be read or is too short.
    """
    ids = token_ids(tokenizer, path, name=name)
    if len(ids) < count:
        raise ValueError(f"{name}: {path.name} has {len(ids)} tokens, {count} were asked for")
    return torch.tensor(ids[:count], dtype=torch.int64)


# A passage that two texts share by quotation or boilerplate is shorter than this as a rule.
_SHARED_TOKENS = 64
_FEWEST_TOKENS = 8


def require_disjoint(
    windows: torch.Tensor, calibration: torch.Tensor, text: Path, calibration_text: Path
) -> None:
    """Statistics must not come from tokens that are scored with them.

    Args:
        windows: [W, n] scored tokens.
        calibration: [T] tokens of the calibration text that are used.
        text, calibration_text: their files.

    Raises:
        ValueError: the files have the same content, or a scored window and the calibration tokens
            share a run of 64 tokens (of all calibration tokens, where they are fewer).
    """
    if text.read_bytes() == calibration_text.read_bytes():
        raise ValueError(
            f"calibration: {calibration_text} is the scored text {text}; static statistics must come "
            "from another text"
        )
    length = min(_SHARED_TOKENS, len(calibration), windows.shape[1])
    if length < _FEWEST_TOKENS:
        return
    held = {run.numpy().tobytes(): i for i, run in enumerate(calibration.unfold(0, length, 1))}
    for window in windows:
        for i, run in enumerate(window.unfold(0, length, 1)):
            at = held.get(run.contiguous().numpy().tobytes())
            if at is not None:
                raise ValueError(
                    f"calibration: tokens {at}..{at + length - 1} of {calibration_text} are also "
                    f"scored (token {i} of a window of {text}); static statistics must come from "
                    "another text"
                )


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
