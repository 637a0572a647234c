# SPDX-License-Identifier: Apache-2.0
"""python -m mpfa doctor on healthy and on bare machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mpfa import doctor


def run_doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, **environment}
    env.pop("FLASHINFER_CUDA_ARCH_LIST", None)
    env.pop("CXX", None)
    env.update(environment)
    return subprocess.run(
        [sys.executable, "-m", "mpfa", "doctor", *arguments],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
        check=False,
    )


def test_report_in_this_process_names_everything():
    checks = doctor.examine()
    found = {(c.section, c.name) for c in checks}
    assert {("machine", "GPU"), ("machine", "driver"), ("toolchain", "nvcc")} <= found
    assert {("versions", "nvidia-cutlass"), ("versions", "apache-tvm-ffi")} <= found
    assert {("cache", "folder"), ("planner", "module")} <= found
    assert {("backends", name) for name in ("reference", "sim", "sm100", "sm120")} <= found
    texts = {c.name: c.value for c in checks if c.section == "backends"}
    assert "prefill of mxfp8" in texts["sm120"] and "compute capability 12.x" in texts["sm120"]
    assert doctor.reference_works(checks)
    report = doctor.format_report(checks)
    for check in checks:
        assert check.value in report


def test_bare_path_still_gives_a_whole_report(tmp_path):
    """No compiler, no nvcc and no nvidia-smi on PATH: findings, not tracebacks."""
    done = run_doctor("--json", PATH=str(tmp_path))
    assert "Traceback" not in done.stdout + done.stderr
    document = json.loads(done.stdout)
    by_name = {c["name"]: c for c in document["checks"]}
    assert by_name["C++ compiler"]["ok"] is False
    assert "apt install g++" in by_name["C++ compiler"]["value"]
    # The planner compiled by earlier runs is used, so the reference backend still works.
    assert done.returncode == (0 if document["ok"] else 1)


def test_without_compiler_and_without_compiled_planner_it_exits_1(tmp_path):
    done = run_doctor("--json", PATH=str(tmp_path), MPFA_CACHE_DIR=str(tmp_path / "cache"))
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode == 1
    document = json.loads(done.stdout)
    by_name = {c["name"]: c for c in document["checks"]}
    assert document["ok"] is False
    assert by_name["reference run"]["ok"] is False
    assert "CompilerNotFoundError" in by_name["module"]["value"]
    assert "the reference backend does not work" in done.stderr
    assert not (tmp_path / "cache" / "models").exists()


def test_arch_list_and_cache_folder_come_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "10.0a 12.0a")
    monkeypatch.setenv("MPFA_CACHE_DIR", str(tmp_path / "new" / "folder"))
    values = {c.name: c for c in [*doctor._toolchain(), doctor._cache_folder()]}
    assert values["FLASHINFER_CUDA_ARCH_LIST"].value == "10.0a 12.0a"
    assert values["folder"].ok
    assert values["folder"].value.endswith("folder (will be created)")
    assert not (tmp_path / "new").exists()


def test_cache_folder_that_cannot_be_written_is_a_finding(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MPFA_CACHE_DIR", str(tmp_path))

    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    check = doctor._cache_folder()
    assert check.ok is False
    assert "Permission denied" in check.value and "MPFA_CACHE_DIR" in check.hint


def test_missing_optional_package_is_reported(monkeypatch):
    real = doctor.importlib.metadata.version

    def version(name: str) -> str:
        if name in ("transformers", "flashinfer-python"):
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    assert doctor.package_version("transformers") == "not installed"
    assert doctor.package_version("flashinfer-python") == "not installed"
    assert doctor.package_version("torch") == real("torch")


@pytest.mark.parametrize("ok", [True, False])
def test_exit_status_follows_the_reference_backend(monkeypatch, capsys, ok):
    checks = [doctor.Check("backends", "reference run", "text", ok, "hint")]
    monkeypatch.setattr(doctor, "examine", lambda: checks)
    assert doctor.main(print_json=True) == (0 if ok else 1)
    assert json.loads(capsys.readouterr().out)["ok"] is ok
