# SPDX-License-Identifier: Apache-2.0
"""Result rows: what a measurement says, where it is kept, how a new run replaces an old one.

A results file, benchmarks/results/<gpu>.json, is a JSON list of rows with the keys KEYS; ``note`` may
be added. The rows of one (bench, kind, gpu, case, impl) belong to one run and are replaced together.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
KEYS = ("bench", "case", "impl", "metric", "value", "unit", "ratio_to", "gpu", "driver", "commit",
        "date", "kind")  # fmt: skip
OPTIONAL = ("note",)
KINDS = ("measured", "sass_model", "simulator")
# What names the run that a row comes from.
IDENTITY = ("bench", "kind", "gpu", "case", "impl")

Row = dict[str, object]


@dataclass(frozen=True)
class Gpu:
    name: str
    driver: str
    capability: tuple[int, int]


def find_gpu() -> Gpu | None:
    """The first GPU that nvidia-smi lists, without touching CUDA."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    fields = [f.strip() for f in done.stdout.split("\n", 1)[0].split(",")]
    if done.returncode or len(fields) != 3:
        return None
    major, _, minor = fields[2].partition(".")
    return Gpu(fields[0], fields[1], (int(major), int(minor)))


def cpu_name() -> str:
    """Architecture and core count: enough to compare rows, nothing that names a machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores}-core {platform.machine()} CPU"


def git_commit() -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or "unknown"


def context(kind: str, gpu: Gpu | str | None = None, commit: str | None = None) -> Row:
    """What every row of a run shares.

    Args:
        gpu: the GPU measured on, a text for rows that no GPU made, or None for the CPU.
        commit: as given, else git's.
    """
    name, driver = f"none ({cpu_name()})", "none"
    if isinstance(gpu, Gpu):
        name, driver = gpu.name, gpu.driver
    elif gpu is not None:
        name = gpu
    return {
        "gpu": name, "driver": driver, "commit": commit or git_commit(),
        "date": datetime.date.today().isoformat(), "kind": kind,
    }  # fmt: skip


def make_row(
    bench: str, case: str, impl: str, metric: str, value: float, unit: str, common: Row,
    ratio_to: dict[str, float] | None = None, note: str | None = None,
) -> Row:  # fmt: skip
    """One row, rounded to four decimals."""
    row: Row = {"bench": bench, "case": case, "impl": impl, "metric": metric,
                "value": round(value, 4), "unit": unit, "ratio_to": ratio_to, **common}  # fmt: skip
    if note is not None:
        row["note"] = note
    validate(row)
    return row


def validate(row: Row) -> None:
    """ValueError naming the key, what it holds and what is allowed."""
    missing = [k for k in KEYS if k not in row]
    unknown = [k for k in row if k not in KEYS + OPTIONAL]
    if missing or unknown:
        raise ValueError(f"row: keys missing {missing}, keys unknown {unknown}; allowed are {KEYS}")
    for key in ("bench", "case", "impl", "metric", "unit", "gpu", "driver", "commit", "date"):
        if not isinstance(row[key], str) or (not row[key] and key != "unit"):
            raise ValueError(f"{key}: must be a text, got {row[key]!r}")
    if row["kind"] not in KINDS:
        raise ValueError(f"kind: allowed are {KINDS}, got {row['kind']!r}")
    if not _is_number(row["value"]):
        raise ValueError(f"value: must be a finite number, got {row['value']!r}")
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", str(row["date"])):
        raise ValueError(f"date: must be YYYY-MM-DD, got {row['date']!r}")
    ratio = row["ratio_to"]
    if ratio is None:
        return
    if not isinstance(ratio, dict) or not all(
        isinstance(k, str) and _is_number(v) for k, v in ratio.items()
    ):
        raise ValueError(f"ratio_to: must be None or {{name: number}}, got {ratio!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def slug(gpu: str) -> str:
    """File stem of a GPU's results: "NVIDIA GeForce RTX 5090" gives "rtx_5090"."""
    words = re.findall(r"[a-z0-9]+", gpu.lower())
    return "_".join(w for w in words if w not in ("nvidia", "geforce", "graphics")) or "unknown"


def results_file(gpu: Gpu | None) -> Path:
    return RESULTS / f"{slug(gpu.name) if gpu else 'cpu'}.json"


def load(path: Path) -> list[Row]:
    """The rows of a file, validated; none if it does not exist."""
    if not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))
    for index, row in enumerate(rows):
        try:
            validate(row)
        except ValueError as error:
            raise ValueError(f"{path.name}: row {index}: {error}") from None
    return rows


def merge(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """``old`` with the runs that ``new`` repeats taken out and ``new`` added at the end."""
    new = list(new)
    for row in new:
        validate(row)
    redone = {tuple(row[k] for k in IDENTITY) for row in new}
    return [r for r in old if tuple(r[k] for k in IDENTITY) not in redone] + new


def save(path: Path, new: Iterable[Row]) -> None:
    """Merges ``new`` into the file."""
    rows = merge(load(path), new)
    path.parent.mkdir(parents=True, exist_ok=True)
    # why a rename: a run that is interrupted here must not leave half a file.
    private = path.with_name(f"{path.name}.{os.getpid()}")
    private.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    private.replace(path)
