# SPDX-License-Identifier: Apache-2.0
"""docs/support.md cell by cell: against supports(), and against what the wrappers do."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from doc_pages import ROOT

import mpfa
from mpfa import support
from mpfa.config import COMPENSATIONS, FORMATS, HEAD_DIMS

PAGE = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
BACKENDS = [name for name in support.HARDWARE if name != "sim"]


def table(heading: str) -> list[dict[str, str]]:
    """Rows of the first table under a heading, by column name."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.split("\n") if line.startswith("|")]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def listed(cell: str) -> list[str]:
    return [] if cell == "-" else cell.split(", ")


def shape_cells() -> list[tuple[str, str, int, int | None, tuple[str, ...]]]:
    cells = []
    for row in table("By format, head_dim and page size"):
        operation, format, dims = row.pop("operation"), row.pop("format"), row.pop("head_dim")
        for head_dim, (column, cell) in itertools.product(listed(dims), row.items()):
            page_size = None if column == "ragged" else int(column.removeprefix("page "))
            cells.append((operation, format, int(head_dim), page_size, tuple(listed(cell))))
    return cells


CELLS = shape_cells()


def test_the_table_has_every_cell_once() -> None:
    found = [cell[:4] for cell in CELLS]
    sizes = (None, 1, 16, 32, 64, 128)
    assert sorted(found, key=str) == sorted(
        itertools.product(("prefill", "decode"), FORMATS, HEAD_DIMS, sizes), key=str
    )


def test_every_cell_is_what_supports_says() -> None:
    for operation, format, head_dim, page_size, backends in CELLS:
        asked = {
            "operation": operation,
            "format": format,
            "head_dim": head_dim,
            "page_size": page_size,
        }
        for backend in BACKENDS:
            assert mpfa.supports(backend, **asked)[0] == (backend in backends), (backend, asked)
        kernels = set(backends) - {"reference"}
        assert mpfa.supports("sim", **asked)[0] == bool(kernels), asked


def test_every_cell_is_what_plan_does() -> None:
    """On the CPU: plan() of "reference" and of "sim", which takes what any kernel takes."""
    one = torch.tensor([0, 1], dtype=torch.int32)
    page, last = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    workspace = torch.empty(1 << 20, dtype=torch.uint8)
    for operation, format, head_dim, page_size, backends in CELLS:
        if page_size is None and operation == "decode":
            assert not backends  # decode has no call without pages
            continue
        heads = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": head_dim}
        paged = page_size is not None
        for backend, expected in (
            ("reference", "reference" in backends),
            ("sim", bool(set(backends) - {"reference"})),
        ):
            try:
                config = mpfa.KVCacheConfig(format, page_size=page_size or 128, **heads)
                options = {**heads, "page_size": page_size, "config": config}
                if operation == "prefill":
                    wrapper = mpfa.BatchPrefillWrapper(workspace, backend=backend)
                    wrapper.plan(one, one, *((page, last) if paged else ()), **options)
                else:
                    wrapper = mpfa.BatchDecodeWrapper(workspace, backend=backend)
                    wrapper.plan(one, page, last, **options)
                happened = True
            except ValueError:
                happened = False
            assert happened == expected, (operation, format, head_dim, page_size, backend)


def capabilities() -> list[tuple[tuple[int, int], dict[str, str]]]:
    found = []
    for row in table("By GPU"):
        numbers = re.findall(r"\b(\d+)\.(\d)\b", row["tensors on"])
        found += [((int(major), int(minor)), row) for major, minor in numbers]
    return found


@pytest.mark.parametrize("capability,row", capabilities(), ids=str)
def test_the_gpu_table_is_what_auto_does(monkeypatch, capability, row) -> None:
    """A GPU that torch only pretends to have: resolve_backend() decides at construction."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    device = torch.device("cuda:0")
    for operation in ("prefill", "decode"):
        formats = listed(row[operation])
        for format in FORMATS:
            asked = {"operation": operation, "format": format, "page_size": 128}
            assert mpfa.supports("cuda:0", **asked)[0] == (format in formats), format
        if not formats:
            with pytest.raises(mpfa.GPUArchitectureError, match=operation):
                support.resolve_backend("auto", device, operation)
        else:
            backend = support.resolve_backend("auto", device, operation)
            served = [f for f in FORMATS if mpfa.supports(backend, operation=operation,
                      format=f, page_size=128)[0]]  # fmt: skip
            assert served == formats and backend != "reference"


def test_the_gpu_table_names_every_generation_with_a_kernel() -> None:
    from mpfa.backends.kernels import KERNELS

    majors = {capability[0] for capability, _ in capabilities()}
    assert {kernel.major for kernel in KERNELS} | {8, 9, 11} == majors


def test_compensation() -> None:
    """The table, for every backend and operation that reads the format."""
    rows = {row["format"]: row for row in table("Compensation")}
    assert list(rows) == list(FORMATS)
    for format, compensation in itertools.product(FORMATS, COMPENSATIONS):
        cell = rows[format][f"`{compensation}`"]
        if cell == "-":
            allowed: set[int] = set()
        elif cell == "yes":
            allowed = {0}
        else:
            first, last = cell.split("-")
            allowed = set(range(int(first), int(last) + 1))
        for backend, operation in itertools.product(BACKENDS, ("prefill", "decode")):
            asked = {"operation": operation, "format": format, "page_size": 128}
            if not mpfa.supports(backend, **asked)[0]:
                continue
            for channels in range(19):
                answer = mpfa.supports(
                    backend, compensation=compensation, channels=channels, **asked
                )[0]
                assert answer == (channels in allowed), (backend, compensation, channels)
                try:
                    mpfa.KVCacheConfig(format, 2, 128, 128, 4, compensation, channels)
                    made = True
                except ValueError:
                    made = False
                assert made == answer


def test_the_readme_has_the_same_shapes() -> None:
    """Its table is by kernel; head_dim and page sizes are those of the format that each one reads."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Support")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.split("\n") if line.startswith("| ")]
    cells = {row[0].strip(): [c.strip() for c in row[1:]] for row in rows}
    named = set()
    for i, column in enumerate(cells[""]):
        backend, *operations = re.findall(r"\w+", column.replace("(CPU)", "prefill, decode"))
        formats = listed(cells["cache format"][i])
        dims = {int(d) for d in re.findall(r"\d+", cells["head_dim"][i])}
        for operation in operations:
            named.add((backend, operation))
            mine = [c for c in CELLS if backend in c[4] and c[0] == operation]
            assert {c[1] for c in mine} == set(formats), column
            assert {c[2] for c in mine} == dims, column
            told = re.sub(r"\([^)]*:.*?\)", "", cells["page sizes"][i])
            sizes: set[int | None] = {int(p) for p in re.findall(r"\d+", told)}
            if "ragged" in told and operation == "prefill":
                sizes.add(None)
            assert {c[3] for c in mine} == sizes, column
    assert named == {(b, c[0]) for c in CELLS for b in c[4]}


def test_features_name_every_backend_with_a_kernel() -> None:
    columns = [c for c in table("Features")[0] if c != "feature"]
    expected = {
        f"{backend} {operation}" for operation, _, _, _, backends in CELLS for backend in backends
    }
    assert set(columns) == expected and len(columns) == len(expected)
    # A "no" would need its reason in the text of the page, which has none today.
    assert all(row[c] == "yes" for row in table("Features") for c in columns)


def test_refusals_are_the_texts_that_a_user_gets() -> None:
    lines = re.findall(r"^- (.+)$", PAGE.split("## What is refused, and why")[1], re.M)
    said = set()
    for backend, operation, format in itertools.product(BACKENDS, ("prefill", "decode"), FORMATS):
        for head_dim, page_size in itertools.product(HEAD_DIMS, (None, 1, 16, 32, 64, 128)):
            asked = {
                "operation": operation,
                "format": format,
                "head_dim": head_dim,
                "page_size": page_size,
            }
            said.update(mpfa.supports(backend, **asked)[1])
    assert lines and not [line for line in lines if line not in said]
