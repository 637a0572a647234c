# SPDX-License-Identifier: Apache-2.0
"""Result rows: what a measurement says, where it is kept, how a new run replaces an old one.

A results file, benchmarks/results/<gpu>.json, is a JSON list of rows with the keys KEYS; ``note`` may
be added. The rows of one (bench, kind, gpu, case, impl) belong to one run and are replaced together.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
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
# Rows that differ in one of these are not set against each other.
ORIGIN = ("gpu", "driver", "commit", "date")

Row = dict[str, object]


@dataclass(frozen=True)
class Gpu:
    name: str
    driver: str
    capability: tuple[int, int]


def _listed() -> dict[str, Gpu]:
    """The GPUs that nvidia-smi lists, by UUID, without touching CUDA."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = "--query-gpu=uuid,name,driver_version,compute_cap"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {}
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        fields = [f.strip() for f in line.split(",")]
        if len(fields) == 4 and re.fullmatch(r"\d+\.\d+", fields[3]):
            major, minor = fields[3].split(".")
            found[fields[0]] = Gpu(fields[1], fields[2], (int(major), int(minor)))
    return found


def find_gpu() -> Gpu | None:
    """torch's current CUDA device, which is the one measured on; None where torch has no CUDA.

    The driver's version is what nvidia-smi says of the device with that UUID. A MIG slice is not
    listed by its own UUID: then the version that all listed GPUs share, else "unknown".
    """
    import torch

    if not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device()
    listed = _listed()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    same = listed.get(f"GPU-{uuid}")
    drivers = {same.driver} if same else {gpu.driver for gpu in listed.values()}
    driver = drivers.pop() if len(drivers) == 1 else "unknown"
    return Gpu(torch.cuda.get_device_name(index), driver, torch.cuda.get_device_capability(index))


def list_gpu() -> Gpu | None:
    """The first GPU that nvidia-smi lists: to say what is there where torch has no CUDA. Nothing is
    measured on it."""
    return next(iter(_listed().values()), None)


def cpu_name() -> str:
    """Architecture and core count: enough to compare rows, nothing that names a machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores}-core {platform.machine()} CPU"


def git_commit(root: Path = ROOT) -> str:
    """HEAD, and for a changed tree "-dirty." and six digits of its tracked changes and the names of its
    new files. benchmarks/results does not count: the benchmarks themselves write there."""

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *command], capture_output=True, text=True, check=False
        )
        return done.stdout if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD").strip()
    if not commit:
        return "unknown"
    where = ("--", ".", ":(exclude)benchmarks/results")
    changes = git("status", "--porcelain", *where)
    if not changes:
        return commit
    digest = hashlib.sha256((changes + git("diff", "HEAD", *where)).encode()).hexdigest()
    return f"{commit}-dirty.{digest[:6]}"


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


def by_origin(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that may be set against each other: the same GPU, driver, commit and date."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in ORIGIN), []).append(row)
    return list(groups.values())


def measured_gpu(rows: Iterable[Row], where: str) -> str | None:
    """The one GPU that measured ``rows``; None if a CPU did, a model or the simulator.

    Raises:
        ValueError: there are two.
    """
    found = dict.fromkeys(
        str(r["gpu"]) for r in rows
        if r["kind"] == "measured" and not str(r["gpu"]).startswith("none")
    )  # fmt: skip
    if len(found) > 1:
        raise ValueError(
            f"{where}: holds rows measured on {' and '.join(found)}; a results file is one GPU's"
        )
    return next(iter(found), None)


def load(path: Path) -> list[Row]:
    """The rows of a file, validated; none if it does not exist.

    Raises:
        ValueError: no JSON list of rows, or rows that two GPUs measured.
    """
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise ValueError(f"{path.name}: not JSON ({error})") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path.name}: must be a JSON list of rows")
    for index, row in enumerate(rows):
        try:
            validate(row)
        except ValueError as error:
            raise ValueError(f"{path.name}: row {index}: {error}") from None
    measured_gpu(rows, path.name)
    return rows


def check_target(path: Path | None, common: Row) -> None:
    """Before a run: whether rows with ``common`` could be merged into the file.

    Raises:
        ValueError: it is no results file, or another GPU's.
    """
    if path is not None:
        measured_gpu([*load(path), common], path.name)


def check_json(parser: argparse.ArgumentParser, path: Path | None, common: Row) -> None:
    """check_target() for a command line: one line and exit status 2."""
    try:
        check_target(path, common)
    except ValueError as error:
        parser.error(f"--json: {error}")


def merge(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """``old`` with the runs that ``new`` repeats taken out and ``new`` added at the end."""
    new = list(new)
    for row in new:
        validate(row)
    redone = {tuple(row[k] for k in IDENTITY) for row in new}
    return [r for r in old if tuple(r[k] for k in IDENTITY) not in redone] + new


def save(path: Path, new: Iterable[Row]) -> None:
    """Merges ``new`` into the file; ValueError if it is another GPU's."""
    rows = merge(load(path), new)
    measured_gpu(rows, path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    # why a rename: a run that is interrupted here must not leave half a file.
    private = path.with_name(f"{path.name}.{os.getpid()}")
    private.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    private.replace(path)
