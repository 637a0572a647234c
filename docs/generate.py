# SPDX-License-Identifier: Apache-2.0
"""python docs/generate.py [--check]: writes the pages that follow from the code.

docs/api.md comes from the docstrings (docs/api_page.py), docs/support.md from mpfa.supports()
(docs/support_page.py). --check writes nothing and exits with 1 when a page is not what the code says.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER)]

import api_page  # noqa: E402
import support_page  # noqa: E402

PAGES = {"api.md": api_page.render, "support.md": support_page.render}


def difference(name: str) -> str:
    """Unified diff from the committed page to the generated one, empty when they are equal."""
    path = FOLDER / name
    committed = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = (text.splitlines(keepends=True) for text in (committed, PAGES[name]()))
    return "".join(difflib.unified_diff(*lines, f"docs/{name}", "python docs/generate.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated pages of docs/.")
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    stale = 0
    for name, render in PAGES.items():
        if check:
            found = difference(name)
            stale += bool(found)
            print(found or f"docs/{name}: up to date")
        else:
            (FOLDER / name).write_text(render(), encoding="utf-8")
            print(f"docs/{name}: written")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
