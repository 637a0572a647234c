# SPDX-License-Identifier: Apache-2.0
"""The documentation as tests see it: code blocks of a page, and running them in order."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.S | re.M)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, the line of its first line, and the text of the
    ``text`` block that follows it with nothing between, which is what a Python block prints."""

    language: str
    code: str
    line: int
    output: str | None


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = list(FENCE.finditer(text))
    result = []
    for i, match in enumerate(found):
        after = found[i + 1] if i + 1 < len(found) else None
        follows = after is not None and not text[match.end() : after.start()].strip()
        output = after.group(2) if follows and after.group(1) == "text" else None
        line = text.count("\n", 0, match.start()) + 2
        result.append(Block(match.group(1), match.group(2), line, output))
    return result


def python_blocks(path: Path) -> list[Block]:
    return [block for block in blocks(path) if block.language == "python"]


def run_page(path: Path, names: dict[str, object] | None = None) -> dict[str, object]:
    """Executes the Python blocks of a page one after another in one namespace, and returns it.

    Raises:
        AssertionError: a block printed something else than the text block behind it says.
    """
    module = types.ModuleType(f"page_{path.stem}")
    vars(module).update(names or {})
    sys.modules[module.__name__] = module  # dataclasses look up the module they are made in
    for block in python_blocks(path):
        # A traceback then names the line of the page.
        code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, vars(module))  # noqa: S102
        if block.output is not None:
            where = f"{path.name}:{block.line}"
            assert printed.getvalue().strip() == block.output.strip(), where
    return vars(module)


def anchors(path: Path) -> set[str]:
    """What GitHub makes of the headings: lower case, no punctuation, a number behind a repetition."""
    found: dict[str, int] = {}
    result = set()
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number = found.get(anchor, 0)
        found[anchor] = number + 1
        result.add(f"{anchor}-{number}" if number else anchor)
    return result


def pages() -> list[Path]:
    """Every Markdown file of the repository."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    return [ROOT / name for name in listing if name and (ROOT / name).is_file()]


def generator():
    """docs/generate.py as a module."""
    if "mpfa_docs_generate" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "mpfa_docs_generate", ROOT / "docs" / "generate.py"
        )
        module = importlib.util.module_from_spec(spec)
        before = list(sys.path)
        spec.loader.exec_module(module)
        sys.path[:] = before
        sys.modules["mpfa_docs_generate"] = module
    return sys.modules["mpfa_docs_generate"]
