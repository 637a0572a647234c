# SPDX-License-Identifier: Apache-2.0
"""A progress bar on stderr: redrawn on a terminal, one line per finished stage elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

BAR_WIDTH = 24
REDRAW_SECONDS = 0.1


class ProgressBar:
    """Counts work units of known total, each stage under its own label."""

    def __init__(self, total: float, stream: TextIO | None = None) -> None:
        self._total = max(total, 1e-9)
        self._done = 0.0
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._started = self._stage_started = time.monotonic()
        self._drawn = 0.0
        self._label = ""

    def stage(self, label: str) -> None:
        """Start a stage; the one before it is finished."""
        self._finish_stage()
        self._label, self._stage_started = label, time.monotonic()
        self._draw(force=True)

    def advance(self, units: float = 1.0) -> None:
        self._done = min(self._done + units, self._total)
        self._draw()

    def clear(self) -> None:
        """Finish the stage and take the bar off the terminal."""
        self._finish_stage()
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _finish_stage(self) -> None:
        if self._label and not self._terminal:
            seconds = time.monotonic() - self._stage_started
            self._stream.write(f"[{self._percent():3.0f}%] {self._label}: {seconds:.1f} s\n")
            self._stream.flush()
        self._label = ""

    def _percent(self) -> float:
        return 100.0 * self._done / self._total

    def _draw(self, force: bool = False) -> None:
        now = time.monotonic()
        if not self._terminal or (not force and now - self._drawn < REDRAW_SECONDS):
            return
        self._drawn = now
        full = int(BAR_WIDTH * self._done / self._total)
        bar = "#" * full + "-" * (BAR_WIDTH - full)
        status = f"[{bar}] {self._percent():3.0f}% {now - self._started:4.0f} s  {self._label}"
        self._stream.write(f"\r\x1b[K{status}")
        self._stream.flush()
