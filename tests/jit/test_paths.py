# SPDX-License-Identifier: Apache-2.0
"""Source and cache folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpfa.jit import paths


def test_cache_root_order(monkeypatch):
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("MPFA_CACHE_DIR", "~/own")
    assert paths.cache_root() == Path("/home/user/own")
    monkeypatch.setenv("MPFA_CACHE_DIR", "")
    assert paths.cache_root() == Path("/xdg/mpfa")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert paths.cache_root() == Path("/home/user/.cache/mpfa")


def make_sources(root: Path) -> None:
    (root / "csrc").mkdir(parents=True)
    (root / "include/mpfa/plan").mkdir(parents=True)
    (root / "include/mpfa/plan/plan.h").touch()


@pytest.mark.parametrize("place", ["", "mpfa/data"])
def test_source_root(tmp_path, monkeypatch, place):
    monkeypatch.setattr(paths, "__file__", str(tmp_path / "mpfa" / "jit" / "paths.py"))
    with pytest.raises(FileNotFoundError, match=r"plan\.h under .* and .*data\. Reinstall"):
        paths.source_root()
    make_sources(tmp_path / place)
    assert paths.source_root() == tmp_path / place


def test_source_root_of_this_checkout():
    root = paths.source_root()
    assert (root / "csrc" / "planner.cpp").is_file()
