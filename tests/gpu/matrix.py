# SPDX-License-Identifier: Apache-2.0
"""Sends cases to a worker process and survives what happens to it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from matrix_worker import MARK


class Lost(RuntimeError):
    """The worker process ended or did not answer in time."""


class Worker:
    """A child process that answers requests, one JSON line each."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            text=True, env=None if env is None else {**os.environ, **env},
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.startswith(MARK):
                self._lines.put(line[len(MARK) :])
        self._lines.put(None)

    def ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """The answer.

        Raises:
            Lost: none came within ``timeout`` seconds (the process is then killed) or the process
                ended; the message says how, with the end of what it wrote.
        """
        try:
            self.process.stdin.write(json.dumps(dict(request)) + "\n")
            self.process.stdin.flush()
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            self.close()
            raise Lost(f"no answer within {timeout:.0f} s, killed{self._tail()}") from None
        except OSError:  # the pipe is closed
            line = None
        if line is None:
            code = self._wait()
            raise Lost(f"the process ended with status {code}{self._tail()}")
        return json.loads(line)

    def _wait(self) -> int | None:
        try:
            return self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return None

    def _tail(self) -> str:
        self._log.seek(0)
        text = self._log.read().strip()
        return f"; it wrote:\n{text[-1500:]}" if text else ""

    def close(self) -> None:
        self.process.kill()
        self._wait()
        self.process.stdout.close()


class Matrix:
    """Cases one after the other, with a new worker after each one that was lost.

    ``case_timeout`` is for one case with all its runs, ``load_timeout`` for compiling a family's
    modules. After ``max_lost`` lost cases the rest of the family is not run.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        repeats: int = 20,
        replays: int = 10,
        guard_bytes: int = 64 << 10,
        case_timeout: float = 180.0,
        load_timeout: float = 1800.0,
        max_lost: int = 3,
    ) -> None:
        self.command = command
        self.settings = {"repeats": repeats, "replays": replays, "guard_bytes": guard_bytes}
        self.timeouts = (load_timeout, case_timeout)
        self.max_lost = max_lost
        self.lost: dict[str, int] = {}
        self._worker: Worker | None = None
        self._loaded: set[str] = set()
        self._unbuilt: dict[str, str] = {}

    def run(self, family: str, index: int) -> dict[str, Any]:
        """The worker's answer; "error" when it was lost, "skipped" when the case is not run."""
        if family in self._unbuilt:
            return {"skipped": f"its modules cannot be built or loaded: {self._unbuilt[family]}"}
        if self.lost.get(family, 0) >= self.max_lost:
            return {"skipped": f"not run: {self.max_lost} cases before ended their process"}
        try:
            if not self._load(family):
                # The first case that needs the modules fails; the others say why they do not run.
                return {"error": self._unbuilt[family]}
            reply = self._worker.ask(
                {"family": family, "index": index, **self.settings}, self.timeouts[1]
            )
        except Lost as error:
            reply = {"error": str(error), "lost": True}
        if reply.get("lost"):
            self.lost[family] = self.lost.get(family, 0) + 1
            self.close()
        return reply

    def _load(self, family: str) -> bool:
        if self._worker is None:
            self._worker = Worker(self.command)
            self._loaded = set()
        if family not in self._loaded:
            reply = self._worker.ask({"family": family}, self.timeouts[0])
            if "error" in reply:
                self._unbuilt[family] = reply["error"]
                return False
            self._loaded.add(family)
        return True

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None
