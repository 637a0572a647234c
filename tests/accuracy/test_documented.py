# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/accuracy.md are those of the result files beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mpfa.accuracy.report import SCHEMA, Value
from mpfa.accuracy.rows import parse_row

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "accuracy.md").read_text(encoding="utf-8")
# (start of the part of the page, result file)
TABLES = (
    ("## SmolLM2", "smollm2"),
    ("How many channels", "smollm2-channels"),
    ("## Gemma", "gemma3-270m"),
    ("## Chunked prefill", "smollm2-chunked"),
)


def result_rows(name: str) -> dict[str, dict]:
    document = json.loads((DOCS / "accuracy" / f"{name}.json").read_text(encoding="utf-8"))
    assert document["schema"] == SCHEMA and "no GPU kernel" in document["kind"]
    return {row["key"]: row for row in document["rows"]}


def first_table(start: str) -> list[dict[str, str]]:
    """Cells by column of the first table after ``start``."""
    lines = PAGE[PAGE.index(start) :].splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[begin:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return [dict(zip(table[0], cells, strict=True)) for cells in table[2:]]


@pytest.mark.parametrize(("start", "name"), TABLES, ids=[name for _, name in TABLES])
def test_table_is_that_of_the_result_file(start, name):
    rows, table = result_rows(name), first_table(start)
    assert [cells["row"] for cells in table] == list(rows)
    for cells in table:
        row = rows[cells["row"]]
        assert parse_row(row["key"]).four_over_six == row["four_over_six"]
        assert cells["bytes"] == f"{row['bytes_per_token_head']:.0f}"
        if row["key"] != "bf16":
            assert cells["KL 1e-3 (95%)"] == Value(**row["kl"]).text(1, 1e3)
            assert cells["Rec. KL % (95%)"] == Value(**row["rec_kl"]).text(0, 100)
            assert cells["top-1 %"] == f"{100 * row['top1']['value']:.1f}"
        if "rel L2 (95%)" in cells:
            assert cells["rel L2 (95%)"] == Value(**row["rel_l2"]).text(4)


def test_synthetic_table_is_that_of_its_file():
    document = json.loads((DOCS / "accuracy" / "synthetic-d128.json").read_text(encoding="utf-8"))
    table = first_table("## Synthetic")
    assert [cells["row"] for cells in table] == [row["key"] for row in document["rows"]]
    for cells, row in zip(table, document["rows"], strict=True):
        by_case = dict(zip(document["layers"], row["rel_l2_by_layer"], strict=True))
        assert {k: cells[k] for k in by_case} == {k: f"{x:.4f}" for k, x in by_case.items()}


def test_every_suffix_of_the_grammar_is_explained():
    for word in ("+4/6", ":request", ":firstN", ":centred", "eigenC", "kmean", "mxfp8", "fp8"):
        assert f"`{word}`" in PAGE
    assert not re.search(r"@@|TODO", PAGE)
