# SPDX-License-Identifier: Apache-2.0
"""Where the C++ sources are, and where compiled modules are kept."""

from __future__ import annotations

import os
from pathlib import Path

_MARKER = Path("include") / "mpfa" / "plan" / "plan.h"


def source_root() -> Path:
    """Folder that holds ``include/`` and ``csrc/``.

    The repository root when mpfa is imported from a checkout (editable installs included), else
    ``mpfa/data`` of the installed wheel. Never written to.

    Raises:
        FileNotFoundError: neither holds the sources.
    """
    package = Path(__file__).resolve().parent.parent
    candidates = (package.parent, package / "data")
    for root in candidates:
        if (root / _MARKER).is_file() and (root / "csrc").is_dir():
            return root
    raise FileNotFoundError(
        f"mpfa's C++ sources are missing: looked for {_MARKER} under "
        f"{' and '.join(str(c) for c in candidates)}. Reinstall mpfa."
    )


def cache_root() -> Path:
    """``$MPFA_CACHE_DIR``, else ``$XDG_CACHE_HOME/mpfa``, else ``~/.cache/mpfa``.

    Not created here.
    """
    own = os.environ.get("MPFA_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared:
        return Path(shared).expanduser() / "mpfa"
    return Path.home() / ".cache" / "mpfa"
