# SPDX-License-Identifier: Apache-2.0
"""Builds other projects' attention kernels for benchmarks/sass_model.py. No GPU is needed.

    python benchmarks/sass/baselines.py [NAME ...] [--folder DIR] [--list]

Each one is compiled from the installed package by the compiler that the package uses; only cubins are
kept, in <cache>/benchmarks/baselines. What a package lacks is skipped with the reason. Packages:

    FlashInfer   flashinfer-python, which mpfa needs anyway; the FP8 kernel also nvidia-cutlass-dsl
    cuDNN        nvidia-cudnn-frontend >= 1.32, nvidia-cutlass-dsl
    FA4          pip install --no-deps flash_attn_4 quack-kernels; nvidia-cutlass-dsl

The DSL kernels compile on fake tensors; what would ask a GPU for its SM count gets a B200's.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# In place of this folder, whose module names are too plain to be on the path of other packages.
sys.path[0] = str(ROOT)

from mpfa.jit.paths import cache_root  # noqa: E402
from mpfa.jit.toolkit import find_toolkit, missing_text  # noqa: E402


@dataclass(frozen=True)
class Baseline:
    """One kernel.

    Attributes:
        case: file name up to the implementation: "<kernel>-d<head_dim>-<target>".
        impl: implementation, as the tables call it.
        how: "fa4", "flashinfer_fp8", "cudnn_mxfp8" (DSL) or "nvcc".
        image: part of the name of the cubin to keep.
        source: translation unit of "nvcc".
    """

    case: str
    impl: str
    how: str
    image: str = ""
    source: str = ""
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.case}-{self.impl}"

    @property
    def head_dim(self) -> int:
        return int(self.case.split("-d")[1].split("-")[0])

    @property
    def target(self) -> str:
        return self.case.rsplit("-", 1)[1]


_FA2 = """
#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/variants.cuh>
namespace flashinfer {
using P = BatchPrefillRaggedParams<nv_bfloat16, nv_bfloat16, nv_bfloat16, int32_t>;
using V = DefaultAttention<false, false, false, false>;
template cudaError_t BatchPrefillWithRaggedKVCacheDispatched<
    128, BASELINE_D, BASELINE_D, PosEncodingMode::kNone, false, MaskMode::kNone, V, P>(
    P, nv_bfloat16*, float*, bool, cudaStream_t);
}
"""
_NVFP4 = """
#include <cutlass/numeric_types.h>
#include <flashinfer/attention/sm120/nvfp4_attention_sm120/api/launcher.h>
namespace nvfp4_attention {
using T = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
template void run_flash_fwd<
    Flash_fwd_kernel_traits<BASELINE_D, 128, 128, 3, 1, false, T, cutlass::bfloat16_t, float>, false,
    false>(Flash_fwd_params&, cudaStream_t);
}
"""
_NVFP4_FLAGS = (
    "-DQBLKSIZE=128", "-DKBLKSIZE=128", "-DCTA256", "-DDQINRMEM", "-DPINGPONG_MATH_ORDER",
    "-DPINGPONG_EARLY_RELEASE_K", "-DCAUSAL_DISABLE_QK_ORDER",
)  # fmt: skip


def _all() -> list[Baseline]:
    found = []
    for target in ("sm_100a", "sm_103a"):
        for kind in ("bf16", "fp8"):
            found.append(Baseline(f"sm100_prefill-d128-{target}", f"FA4_{kind}_causal", "fa4"))
    for kind in ("bf16", "fp8"):
        # The other cubin of a split call is the combine kernel.
        found.append(
            Baseline("sm100_decode-d128-sm_100a", f"FA4_{kind}_split", "fa4", "flash_fwd_sm100")
        )
    for d in (64, 128):
        case = f"sm120-d{d}-sm_120a"
        found.append(Baseline(case, "FlashInfer_fp8", "flashinfer_fp8"))
        found.append(Baseline(case, "cuDNN_mxfp8", "cudnn_mxfp8"))
        found.append(Baseline(case, "FlashInfer_fa2_bf16", "nvcc", source=_FA2))
        found.append(Baseline(case, "FlashInfer_nvfp4", "nvcc", source=_NVFP4, flags=_NVFP4_FLAGS))
    return found


BASELINES = _all()


# --- FlashAttention-4 ----------------------------------------------------------------------------


class _B200:
    """In place of cutlass.utils.HardwareInfo, which asks the driver."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def get_max_active_clusters(self, cluster_size: int = 1, *_: object, **__: object) -> int:
        return 148 // cluster_size

    def get_device_multiprocessor_count(self, *_: object, **__: object) -> int:
        return 148

    def get_l2_cache_size_in_bytes(self, *_: object, **__: object) -> int:
        return 50 << 20


def _folder_of(package: str, pip: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"no package {package}: pip install --no-deps {pip}")
    return list(spec.submodule_search_locations)[0]


def build_fa4(item: Baseline) -> None:
    # why a bare package: quack's __init__ imports kernels that need Triton and a GPU.
    quack = types.ModuleType("quack")
    quack.__path__ = [_folder_of("quack", "quack-kernels")]
    _folder_of("flash_attn", "flash_attn_4")
    sys.modules["quack"] = quack
    sys.modules["torch_c_dlpack_ext"] = types.ModuleType("torch_c_dlpack_ext")

    import cutlass.cute as cute
    import cutlass.utils
    import cutlass.utils.hardware_info
    import torch
    from cutlass import const_expr
    from torch._subclasses.fake_tensor import FakeTensorMode

    cutlass.utils.HardwareInfo = cutlass.utils.hardware_info.HardwareInfo = _B200
    import quack.copy_utils

    def cvt_copy(tiled_copy, src, dst, *, pred=None, retile=False, loc=None, ip=None, **kwargs):
        # why: quack's calls a conversion that CuTe DSL 4.8 does not have.
        if const_expr(src.element_type != dst.element_type):
            converted = cute.make_rmem_tensor(src.layout, dst.element_type)
            converted.store(src.load().to(dst.element_type))
            src = converted
        if const_expr(retile):
            src = tiled_copy.retile(src)
        cute.copy(tiled_copy, src, dst, pred=pred, loc=loc, ip=ip, **kwargs)

    quack.copy_utils.cvt_copy = cvt_copy
    from flash_attn.cute.interface import _flash_attn_fwd

    dtype = torch.float8_e4m3fn if "fp8" in item.impl else torch.bfloat16
    decode = "split" in item.impl
    with FakeTensorMode():
        queries = 1 if decode else 4096
        q = torch.empty(2, queries, 32, item.head_dim, dtype=dtype, device="cuda")
        k, v = (
            torch.empty(2, 4096, 8, item.head_dim, dtype=dtype, device="cuda") for _ in range(2)
        )
        options = {"num_splits": 8, "pack_gqa": True} if decode else {}
        _flash_attn_fwd(q, k, v, causal=True, **options)


# --- kernels for sm_120 written in CuTe DSL -----------------------------------------------------


def build_flashinfer_fp8(item: Baseline) -> None:
    import torch
    from flashinfer.cute_dsl.attention.fmha.sm120 import compile as compiler

    compiler._compile_sm120_fmha_fp8_ragged_kernel(
        torch.float8_e4m3fn, torch.bfloat16, 32, 8, item.head_dim, False, 128, 128,
        torch.device("cpu"),
    )  # fmt: skip


def build_cudnn_mxfp8(item: Baseline) -> None:
    import cudnn.frost.compiled_cache as compiled_cache
    import cudnn.sdpa.fwd.kernels.sm120 as package
    import cutlass.cute as cute
    from cudnn.frost.tile_dsl.constants import DTYPE_BF16, DTYPE_E4M3
    from cudnn.sdpa.fwd import config_sm120

    # why: its cache of compiled kernels is keyed by the GPU.
    compiled_cache.compile_cached = lambda fn, *args, cache_key=None, symbol=None, **kwargs: (
        cute.compile(fn, *args, **kwargs)
    )
    compiled_cache.template_key = lambda *_, **__: None
    path = Path(package.__file__).parent / "prefill_mxfp8.py"
    spec = importlib.util.spec_from_file_location("cudnn_mxfp8_template", path)
    template = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = template
    template.FROST_TEMPLATE_PARAMS = config_sm120.TemplateParams(
        dtype_qkv=DTYPE_E4M3, dtype_o=DTYPE_BF16
    )
    spec.loader.exec_module(template)
    d = item.head_dim
    template.compile((12, 0), 1, 32, 8, 4096, 4096, d, d, has_amax=False)


BUILDERS = {
    "fa4": build_fa4, "flashinfer_fp8": build_flashinfer_fp8, "cudnn_mxfp8": build_cudnn_mxfp8,
}  # fmt: skip


# --- driver ---------------------------------------------------------------------------------------


def _nvcc(item: Baseline, folder: Path) -> list[str]:
    toolkit = find_toolkit()
    if toolkit is None:
        raise FileNotFoundError(missing_text())
    data = Path(_folder_of("flashinfer", "flashinfer-python")) / "data"
    source = folder / "baseline.cu"
    source.write_text(item.source)
    number = item.target.removeprefix("sm_")
    includes = ["include", "csrc", "cccl/libcudacxx/include", "cccl/cub", "cccl/thrust"]
    includes += ["cutlass/include", "cutlass/tools/util/include", "spdlog/include"]
    line = [str(toolkit.nvcc), "-std=c++17", "-O3", "-cubin", "-DNDEBUG", "-use_fast_math"]
    line += [f"-gencode=arch=compute_{number},code=sm_{number}", f"-DBASELINE_D={item.head_dim}"]
    line += ["-DFLASHINFER_ENABLE_F16", "-DFLASHINFER_ENABLE_BF16", *item.flags]
    line += ["-DFLASHINFER_ENABLE_FP8_E4M3", "-DFLASHINFER_ENABLE_FP8_E5M2"]
    line += ["--expt-relaxed-constexpr", "--expt-extended-lambda"]
    line += [f"-I{data / i}" for i in includes]
    return [*line, str(source), "-o", str(folder / "baseline.cubin")]


def build(item: Baseline, target: Path) -> str | None:
    """Builds ``item`` to ``target``; the reason when it cannot be."""
    with tempfile.TemporaryDirectory(prefix="mpfa-baseline-") as name:
        folder = Path(name)
        env = dict(os.environ)
        if item.how == "nvcc":
            try:
                command = _nvcc(item, folder)
            except (ImportError, FileNotFoundError) as error:
                return str(error)
        else:
            arch = item.target.removesuffix("a")
            env |= {
                "CUTE_DSL_ARCH": item.target, "CUTE_DSL_KEEP_CUBIN": "1",
                "CUTE_DSL_DUMP_DIR": str(folder), "FLASH_ATTENTION_ARCH": arch,
                "FLASH_ATTENTION_NUM_SMS": "148",
            }  # fmt: skip
            command = [sys.executable, str(Path(__file__).resolve()), "--inside", item.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        images = [c for c in folder.glob("*.cubin") if item.image in c.name]
        if done.returncode or len(images) != 1:
            last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
            return f"exit {done.returncode}, {len(images)} cubins; {' '.join(last)[:300]}"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(images[0], target)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", help="parts of names; default: all")
    parser.add_argument("--folder", type=Path, default=cache_root() / "benchmarks" / "baselines")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        item = next(b for b in BASELINES if b.name == args.inside)
        BUILDERS[item.how](item)
        return 0
    chosen = [b for b in BASELINES if not args.names or any(n in b.name for n in args.names)]
    if not chosen:
        parser.error(f"names: {args.names} match none of {', '.join(b.name for b in BASELINES)}")
    failed = 0
    for item in chosen:
        if args.list:
            print(item.name)
            continue
        target = args.folder / f"{item.name}.cubin"
        reason = build(item, target)
        failed += reason is not None
        print(f"{item.name}: {target if reason is None else 'left out: ' + reason}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
