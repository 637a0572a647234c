# SPDX-License-Identifier: Apache-2.0
"""Structure rules that no formatter knows; part of make lint.

- every source file starts with the SPDX line;
- include/ is free of torch and tvm-ffi, and inline asm lives in include/mpfa/ptx only;
- source files stay under 800 lines;
- relative links and code paths in Markdown files exist.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPDX = "SPDX-License-Identifier: Apache-2.0"
SOURCES = {".py", ".h", ".cuh", ".cpp", ".cu", ".def"}
MAX_LINES = 800
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
# `path/to/file.ext` in backquotes, as the docs refer to code.
CODE_PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|h|cuh|cpp|cu|md|txt|toml))`")


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    return [ROOT / name for name in listing if name and (ROOT / name).is_file()]


def source_faults(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    faults = []
    if SPDX not in "\n".join(lines[:2]):
        faults.append("first line must hold the SPDX licence identifier")
    if len(lines) > MAX_LINES:
        faults.append(f"{len(lines)} lines; the limit is {MAX_LINES}")
    relative = path.relative_to(ROOT).as_posix()
    if relative.startswith("include/"):
        if re.search(r"#include\s*<(torch|tvm)", text):
            faults.append("include/ must not depend on torch or tvm-ffi")
        if re.search(r"\basm\b", text) and not relative.startswith("include/mpfa/ptx/"):
            faults.append("inline asm belongs in include/mpfa/ptx/")
    return faults


def document_faults(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    faults = []
    for target in LINK.findall(text):
        if "://" not in target and not (path.parent / target).exists():
            faults.append(f"link to {target}, which does not exist")
    for target in CODE_PATH.findall(text):
        if not (ROOT / target).exists() and not (path.parent / target).exists():
            faults.append(f"names {target}, which does not exist")
    return faults


def main() -> int:
    count = 0
    for path in tracked_files():
        if path.suffix in SOURCES:
            faults = source_faults(path)
        elif path.suffix == ".md":
            faults = document_faults(path)
        else:
            continue
        for fault in faults:
            print(f"{path.relative_to(ROOT)}: {fault}")
        count += len(faults)
    print(f"structure lint: {count} faults")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
