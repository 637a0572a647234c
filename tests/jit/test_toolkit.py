# SPDX-License-Identifier: Apache-2.0
"""Finding the CUDA toolkit, with scripts in place of nvcc."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mpfa.jit import toolkit


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def fake_nvcc(home: Path, version: str = "13.0.88", dry_run: bool = True) -> Path:
    """Answers --version, and --dryrun with TOP seen from its own folder, as nvcc does."""
    top = f'echo "#\\$ TOP={home}/bin/.." >&2' if dry_run else "exit 1"
    return script(
        home / "bin" / "nvcc",
        f'case "$1" in --version) echo "release 13.0, V{version}";; --dryrun) {top};; esac\n',
    )


@pytest.fixture(autouse=True)
def nothing(tmp_path, monkeypatch):
    """No toolkit: an empty PATH apart from the shell, no CUDA_HOME, no wheels."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])


def test_none(monkeypatch):
    assert toolkit.find_toolkit() is None
    text = toolkit.missing_text()
    assert "CUDA_HOME is not set" in text and "pip install nvidia-cuda-nvcc" in text
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert toolkit.find_toolkit() is None
    assert "CUDA_HOME = /nowhere has no usable bin/nvcc" in toolkit.missing_text()


def test_order(tmp_path, monkeypatch):
    fake_nvcc(tmp_path / "site/nvidia/cu13", "13.2.1")
    found = toolkit.find_toolkit()
    assert (found.home, found.version) == (tmp_path / "site/nvidia/cu13", "13.2.1")
    assert found.how == "nvidia-cuda-nvcc wheel"
    fake_nvcc(tmp_path, "13.1.1")
    found = toolkit.find_toolkit()
    assert (found.home, found.version) == (tmp_path, "13.1.1")
    assert found.how.startswith("nvcc on PATH")
    fake_nvcc(tmp_path / "own", "13.0.1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "own"))
    found = toolkit.find_toolkit()
    assert (found.nvcc, found.version) == (tmp_path / "own/bin/nvcc", "13.0.1")
    assert str(found) == f"13.0.1 in {tmp_path / 'own'} (CUDA_HOME)"


def test_newest_wheel_wins(tmp_path):
    for folder in ("cu12", "cu13", "cuda_nvcc"):
        fake_nvcc(tmp_path / "site/nvidia" / folder)
    assert toolkit.find_toolkit().home == tmp_path / "site/nvidia/cu13"


def test_wrapper_script_leads_to_the_real_toolkit(tmp_path):
    real = fake_nvcc(tmp_path / "cuda")
    script(tmp_path / "bin/nvcc", f'exec {real} "$@"\n')
    found = toolkit.find_toolkit()
    assert (found.home, found.nvcc) == (tmp_path / "cuda", real)


def test_link_without_dry_run(tmp_path):
    real = fake_nvcc(tmp_path / "cuda", dry_run=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").symlink_to(real)
    assert toolkit.find_toolkit().home == tmp_path / "cuda"


def test_broken_cuda_home_is_named(tmp_path, monkeypatch):
    fake_nvcc(tmp_path)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert "CUDA_HOME = /nowhere has no usable bin/nvcc" in toolkit.find_toolkit().how


def test_failing_nvcc_is_not_taken(tmp_path):
    script(tmp_path / "bin/nvcc", "exit 1\n")
    assert toolkit.find_toolkit() is None


def test_unknown_version(tmp_path):
    home = tmp_path
    script(home / "bin/nvcc", f'[ "$1" = --dryrun ] && echo "#\\$ TOP={home}/bin/.."\nexit 0\n')
    assert toolkit.find_toolkit().version == "unknown"
