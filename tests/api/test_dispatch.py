# SPDX-License-Identifier: Apache-2.0
"""From a wrapper to a kernel: which one is picked, what it is given, what is refused. No kernel runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import make_batch, offsets, paged, static_stats

import mpfa
from mpfa import support
from mpfa.backends import kernels, launch
from mpfa.config import HEAD_DIMS, PAGE_SIZES
from mpfa.jit import attention, paths
from mpfa.operands import Inputs
from mpfa.planner import make_plan
from mpfa.planning import decode_request, prefill_request
from mpfa.wrapper import _Captured

CUDA = torch.device("cuda:0")
READY = {kernel.backend for kernel in kernels.KERNELS if kernel.ready}


def only_ready(monkeypatch, *backends: str) -> None:
    """As if exactly these backends' kernels were part of this version."""
    table = tuple(dataclasses.replace(k, ready=k.backend in backends) for k in kernels.KERNELS)
    monkeypatch.setattr(kernels, "KERNELS", table)


def pretend_gpu(monkeypatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


# ---- which backend -----------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["prefill", "decode"])
@pytest.mark.parametrize(
    "capability,backend",
    [((10, 0), "sm100"), ((10, 3), "sm100"), ((12, 0), "sm120"), ((12, 1), "sm120")],
)
def test_auto_follows_the_gpu(monkeypatch, capability, backend, operation) -> None:
    pretend_gpu(monkeypatch, capability)
    only_ready(monkeypatch, "sm100", "sm120")
    assert support.resolve_backend("auto", CUDA, operation) == backend
    assert support.resolve_backend(backend, CUDA, operation) == backend
    other = "sm120" if backend == "sm100" else "sm100"
    got = f"{capability[0]}.{capability[1]}"
    named = rf"{operation}: backend '{other}' needs compute capability 1[02].x, got .*{got}"
    with pytest.raises(mpfa.GPUArchitectureError, match=named) as caught:
        support.resolve_backend(other, CUDA, operation)
    assert 'backend="reference"' in str(caught.value)
    format = kernels.find_kernel(operation, backend=backend).format
    asked = {"operation": operation, "format": format, "page_size": 64}
    assert mpfa.supports(CUDA, **asked) == mpfa.supports(backend, **asked) == (True, [])


@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (9, 0), (11, 0)])
@pytest.mark.parametrize("operation", ["prefill", "decode"])
def test_other_gpus_have_no_attention_kernel(monkeypatch, capability, operation) -> None:
    pretend_gpu(monkeypatch, capability)
    only_ready(monkeypatch, "sm100", "sm120")
    named = f"compute capability {capability[0]}.{capability[1]}"
    for backend in ("auto", "sm100", "sm120"):
        with pytest.raises(mpfa.GPUArchitectureError) as caught:
            support.resolve_backend(backend, CUDA, operation)
        text = str(caught.value)
        assert text.startswith(operation) and named in text and 'backend="reference"' in text
    ok, reasons = mpfa.supports(CUDA, operation=operation, page_size=64)
    assert not ok and named in reasons[0] and f"no {operation} kernel" in reasons[0]


def test_a_gpu_whose_kernels_are_not_ready(monkeypatch) -> None:
    pretend_gpu(monkeypatch, (10, 0))
    only_ready(monkeypatch, "sm120")
    with pytest.raises(
        mpfa.GPUArchitectureError, match=r"decode: no kernel for device cuda:0 \(compute cap"
    ):
        support.resolve_backend("auto", CUDA, "decode")
    with pytest.raises(ValueError, match="backend: 'sm100' .* not part of this version"):
        support.resolve_backend("sm100", CUDA, "decode")
    ok, reasons = mpfa.supports("sm100", page_size=64)
    assert not ok and "not part of this version" in reasons[0]


def test_the_simulator_takes_cpu_tensors(monkeypatch) -> None:
    only_ready(monkeypatch, "sm120")
    assert support.resolve_backend("sim", torch.device("cpu"), "prefill") == "sim"
    with pytest.raises(ValueError, match="backend: 'sim' runs kernels on CPU tensors, .* cuda:0"):
        support.resolve_backend("sim", CUDA, "prefill")
    with pytest.raises(mpfa.GPUArchitectureError, match="'sm120' needs .* got device cpu"):
        support.resolve_backend("sm120", torch.device("cpu"), "prefill")
    only_ready(monkeypatch)
    with pytest.raises(ValueError, match="backend: 'sim' .*not part of this version"):
        support.resolve_backend("sim", torch.device("cpu"), "prefill")


def test_auto_never_picks_the_simulator(monkeypatch) -> None:
    only_ready(monkeypatch, "sm100", "sm120")
    assert support.resolve_backend("auto", torch.device("cpu"), "decode") == "reference"


# ---- what a backend serves ---------------------------------------------------------------------


def test_table_names_what_the_formats_allow() -> None:
    for kernel in kernels.KERNELS:
        assert set(kernel.tilings) <= set(HEAD_DIMS)
        assert set(kernel.page_sizes) <= set(PAGE_SIZES[kernel.format])
        for head_dim in set(HEAD_DIMS) - set(kernel.tilings):
            assert f"head_dim {head_dim}" in kernel.refusals
        for page_size in set(PAGE_SIZES[kernel.format]) - set(kernel.page_sizes):
            assert f"page_size {page_size}" in kernel.refusals
        for tiling in kernel.tilings.values():
            # Partitions are multiples of 128 tokens and have to be whole steps.
            assert 128 % tiling.kv_block == 0 and tiling.rows >= tiling.max_tokens


@pytest.mark.parametrize("backend", ["sm90", "sm100", "sm120", "sim"])
def test_supports_per_kernel(monkeypatch, backend) -> None:
    only_ready(monkeypatch, "sm90", "sm100", "sm120")
    for kernel in kernels.KERNELS:
        served = kernels.find_kernel(kernel.operation, backend=backend, format=kernel.format)
        if served not in (None, kernel):
            continue  # another kernel reads this format here
        if served is None:
            other = mpfa.supports(
                backend, operation=kernel.operation, format=kernel.format, page_size=64
            )
            known = any(
                k.backend == backend and k.operation == kernel.operation for k in kernels.KERNELS
            )
            why = f"format '{kernel.format}'" if known else f"backend '{backend}'"
            assert not other[0] and why in other[1][0]
            continue
        for head_dim in HEAD_DIMS:
            for page_size in PAGE_SIZES[kernel.format]:
                ok, reasons = mpfa.supports(
                    backend, operation=kernel.operation, format=kernel.format, head_dim=head_dim,
                    page_size=page_size, num_qo_heads=5,
                )  # fmt: skip
                assert ok == (head_dim in kernel.tilings and page_size in kernel.page_sizes)
                assert all(kernel.backend in reason and "(" in reason for reason in reasons)
        ok, reasons = mpfa.supports(
            backend, operation=kernel.operation, format="bf16", page_size=64
        )
        assert not ok and "format 'bf16'" in reasons[0] and kernel.format in reasons[0]


@pytest.mark.parametrize("head_dim", [80, 96, 112, 512])
def test_head_dims_without_a_format(monkeypatch, head_dim) -> None:
    only_ready(monkeypatch, "sm100", "sm120")
    for backend in ("sim", "sm120", "sm100"):
        format = "mxfp8" if backend == "sm120" else "qk4pv8"
        ok, reasons = mpfa.supports(backend, format=format, head_dim=head_dim)
        assert not ok and reasons == [f"head_dim {head_dim}: allowed are 64, 128, 256"]


def wrapper_for(backend: str, cls=mpfa.BatchPrefillWrapper, **options: object):
    return cls(torch.zeros(1 << 20, dtype=torch.uint8), backend=backend, **options)


def plan_on(
    backend: str, format: str, head_dim: int, page_size: int = 64, **change: object
) -> None:
    config = mpfa.KVCacheConfig(format, 1, head_dim, page_size, 2)
    table = (offsets([1]), torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    options = {
        "num_qo_heads": 2,
        "num_kv_heads": 1,
        "head_dim": head_dim,
        "config": config,
        **change,
    }
    wrapper_for(backend).plan(offsets([1]), *table, **options)


def test_plan_refuses_what_the_kernel_does_not_serve(monkeypatch) -> None:
    only_ready(monkeypatch, "sm100", "sm120")
    with pytest.raises(ValueError, match=r"head_dim: must be one of 64, 128, 256, got 96"):
        plan_on("sim", "mxfp8", 96)
    for format, backend in (("mxfp8", "sm120"), ("qk4pv8", "sm100")):
        with pytest.raises(ValueError, match=rf"head_dim 256: {backend} prefill allows 64, 128 \("):
            plan_on("sim", format, 256)
    with pytest.raises(
        ValueError, match=r"format 'bf16': prefill on 'sim' reads mxfp8, qk4pv8.*reference"
    ):
        plan_on("sim", "bf16", 64)
    for page_size in (1, 16):
        with pytest.raises(ValueError, match="page_size: format 'mxfp8' allows 32, 64, 128"):
            plan_on("sim", "mxfp8", 64, page_size)
    plan_on("sim", "mxfp8", 64)


def test_a_kernel_that_is_not_ready_is_refused_by_plan(monkeypatch) -> None:
    only_ready(monkeypatch, "sm120")
    with pytest.raises(ValueError, match="format 'qk4pv8': prefill on 'sim' reads mxfp8"):
        plan_on("sim", "qk4pv8", 64)


def test_without_a_config_run_tells_the_format(monkeypatch) -> None:
    """plan() without a config is cut for the default format; another one needs config."""
    only_ready(monkeypatch, "sm100", "sm120")
    batch = make_batch([3], [40], 2, 1, 64)
    config = mpfa.KVCacheConfig("mxfp8", 1, 64, 32, 2)
    pages = paged(batch, config)
    wrapper = wrapper_for("sim")
    wrapper.plan(offsets([3]), *pages.table, page_size=32, **batch.heads)
    with pytest.raises(
        ValueError, match="config: plan.. without a config was cut for 'qk4pv8', run.. got 'mxfp8'"
    ):
        wrapper.run(batch.query, pages.cache)


def test_modules_of_the_table() -> None:
    """One module per kernel family and head dimension, built for its own generation."""
    specs = {spec.name: spec for spec in attention.all_specs()}
    for kernel in kernels.KERNELS:
        for head_dim in kernel.tilings:
            spec = specs[f"mpfa_{kernel.module.removeprefix('mpfa_')}_d{head_dim}"]
            assert spec.majors == (kernel.major,) and kernel.backend in spec.name
            assert spec.flags == (f"-DMPFA_HEAD_DIM={head_dim}",)
            [source] = spec.sources
            assert kernel.entry in source.removesuffix(".cu")
            assert (paths.source_root() / "csrc" / source).is_file()
            assert attention.attention_spec(kernel, head_dim) == spec
        with pytest.raises(ValueError, match="head_dim: .* is built for 64, 128, got 96"):
            attention.attention_spec(kernel, 96)
    assert len({spec.flags + spec.sources for spec in specs.values()}) == len(specs)


# ---- tiles -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", kernels.KERNELS, ids=lambda k: f"{k.backend}-{k.operation}")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 5, 16, 40])
@pytest.mark.parametrize("q_len", [1, 7, 8, 9, 300])
def test_tiles_fit_the_kernel(kernel, head_dim, group, q_len) -> None:
    tiling = kernel.tilings[head_dim]
    config = mpfa.KVCacheConfig(kernel.format, 1, head_dim, 64, group)
    options = {
        "num_qo_heads": group,
        "num_kv_heads": 1,
        "head_dim": head_dim,
        "config": config,
        "num_sm": 4,
    }
    table = (offsets([4]), torch.arange(4, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    if kernel.operation == "decode":
        _, request = decode_request(*table, q_len_per_request=q_len, **options)
    else:
        _, request = prefill_request(offsets([q_len]), *table, **options)
    assert request.q_tile_tokens * request.heads_per_group <= tiling.rows
    assert request.q_tile_tokens <= tiling.max_tokens and request.heads_per_group <= group
    assert request.kv_block == tiling.kv_block
    assert request.workers_per_sm == tiling.workers_per_sm
    plan = make_plan(request)
    assert int(plan.items[:, 2].max()) <= request.q_tile_tokens
    covered = {(int(i[1]) + t, int(i[3])) for i in plan.items for t in range(int(i[2]))}
    groups = -(-group // request.heads_per_group)
    assert covered == {(t, g) for t in range(q_len) for g in range(groups)}
    # Packing is worth it: no tile could take another head of the same tokens.
    if request.heads_per_group < group and q_len <= tiling.max_tokens:
        assert (request.heads_per_group + 1) * min(q_len, tiling.max_tokens) > tiling.rows


def test_packed_heads_leave_room_for_the_channels() -> None:
    """A centred SM100 prefill tile has one Delta slot per head beside the channels, 16 in all."""
    for compensation, channels, most in (
        ("none", 0, 8),
        ("mean", 0, 8),
        ("mean+channels", 12, 4),
        ("mean+channels", 15, 1),
        ("channels", 16, 8),
    ):
        config = mpfa.KVCacheConfig("qk4pv8", 1, 64, 64, 8, compensation, channels)
        options = {
            "num_qo_heads": 8,
            "num_kv_heads": 1,
            "head_dim": 64,
            "config": config,
            "num_sm": 4,
        }
        _, request = prefill_request(offsets([4]), offsets([90]), **options)
        assert request.heads_per_group == most, compensation
        _, request = prefill_request(offsets([4]), offsets([90]), **{**options, "config": None})
        assert request.heads_per_group == 1


def test_a_graph_keeps_its_layout_when_lengths_change() -> None:
    graph = {
        "use_cuda_graph": True,
        "max_batch_size": 4,
        "max_total_qo_len": 16,
        "max_num_pages": 40,
    }
    config = mpfa.KVCacheConfig("qk4pv8", 1, 64, 64, 4)
    options = {"num_qo_heads": 4, "num_kv_heads": 1, "head_dim": 64, "config": config, "num_sm": 4}
    layouts = set()
    for q_len, batch in ((1, 4), (4, 4), (2, 1), (3, 2)):
        table = (
            offsets([3] * batch),
            torch.arange(3 * batch, dtype=torch.int32),
            torch.ones(batch, dtype=torch.int32),
        )
        _, request = decode_request(*table, q_len_per_request=q_len, **options, **graph)
        plan = make_plan(request)
        layouts.add((tuple(plan.offsets.items()), tuple(plan.sizes.items()), request.q_tile_tokens))
    assert len(layouts) == 1


# ---- what the kernel is given -------------------------------------------------------------------

ABI = (
    "q", "q_scale", "a_comp", "row_term", "k", "k_scale", "v", "v_scale", "aux_delta", "aux_channels",
    "header", "qo_indptr", "kv_indptr", "kv_len", "kv_indices", "items", "worker_indptr",
    "v_block_indptr", "partial_o", "partial_lse", "out", "lse", "sinks", "sm_scale",
    "logits_soft_cap", "window_left", "causal", "num_workers",
)  # fmt: skip


class Recorder:
    """Stands in for a module: keeps the arguments of run(), by the names of the launch ABI."""

    def __init__(self) -> None:
        self.calls: list[dict[str, object]] = []

    def run(self, *args: object) -> None:
        self.calls.append(dict(zip(ABI, args, strict=True)))


@pytest.fixture
def recorded(monkeypatch):
    module, combined = Recorder(), []
    monkeypatch.setattr(launch.attention, "load", lambda spec: module)
    monkeypatch.setattr(launch.cuda, "combine_plan", lambda *args, **_: combined.append(args))
    return module, combined


def launch_args(
    recorded, format, compensation="none", channels=0, *, decode=False, q_tokens=None, **plan
):
    """Run a quantised paged batch on a Launcher; (arguments, combine arguments, inputs, plan)."""
    q_lens, kv_lens = ([2, 2], [300, 1400]) if decode else ([5, 9], [300, 40])
    batch = make_batch(q_lens, kv_lens, 6, 2, 64, seed=2)
    stats = static_stats(batch, compensation, channels)
    config = mpfa.KVCacheConfig(format, 2, 64, 64, 6, compensation, channels)
    pages = paged(batch, config, stats=stats)
    options = {**batch.heads, "config": config, "num_sm": 4, **plan}
    if decode:
        spec, request = decode_request(*pages.table, q_len_per_request=2, **options)
    else:
        spec, request = prefill_request(offsets(q_lens), *pages.table, **options)
    made = make_plan(request)
    metadata = torch.zeros(made.metadata_bytes, dtype=torch.uint8)
    made.upload(metadata)
    workspace = torch.zeros(made.scratch_bytes, dtype=torch.uint8)
    q = batch.query
    if q_tokens is not None:
        q = torch.cat([q, q.new_zeros(q_tokens - q.shape[0], *q.shape[1:])])
    query = mpfa.quantize_query(q, config, stats)
    out, lse = torch.empty(q.shape), torch.empty(q.shape[:2])
    inputs = Inputs(query, pages.cache, config, stats, torch.zeros(6), out, lse)
    backend = {"mxfp8": "sm120", "qk4pv8": "sm100"}[config.format]
    launcher = launch.launcher(backend, config.format, spec, made, metadata, workspace)
    launcher.run(inputs)
    return recorded[0].calls[-1], recorded[1], inputs, made, workspace


def test_launch_arguments_of_mxfp8(recorded) -> None:
    got, combined, inputs, plan, _ = launch_args(recorded, "mxfp8")
    for name in ("q", "q_scale", "k", "k_scale", "v", "v_scale"):
        assert got[name].dtype == torch.uint8, name
    assert got["q"].data_ptr() == inputs.q.q.data_ptr()
    cache = inputs.kv
    for name in ("k", "k_scale", "v", "v_scale"):
        assert got[name].data_ptr() == getattr(cache, name).data_ptr(), name
        assert got[name].shape == getattr(cache, name).shape
    assert all(got[name] is None for name in ("a_comp", "row_term", "aux_delta", "aux_channels"))
    for name in (
        "header",
        "qo_indptr",
        "kv_indptr",
        "kv_len",
        "kv_indices",
        "items",
        "worker_indptr",
    ):
        assert got[name].dtype == torch.int32 and got[name].numel() == plan.sizes[name] // 4, name
    assert got["items"].view(-1, 8).equal(plan.items)
    assert got["partial_o"].shape == (0, 6, 64) and got["partial_lse"].shape == (0, 6)
    assert got["sm_scale"] == 0.125 and got["window_left"] == -1 and got["causal"] is False
    assert got["num_workers"] == plan.num_workers and got["sinks"] is inputs.sinks
    assert combined == [], "a plan without partial rows needs no combine"


def test_launch_arguments_of_compensated_decode(recorded) -> None:
    got, combined, inputs, plan, workspace = launch_args(
        recorded, "qk4pv8", "mean+channels", 5, decode=True, logits_soft_cap=20.0, window_left=700
    )
    assert got["a_comp"].dtype == torch.bfloat16 and got["a_comp"].shape == (4, 6, 16)
    assert got["row_term"].dtype == torch.float32 and got["row_term"].shape == (4, 6)
    assert got["aux_delta"] is inputs.kv.aux_delta and got["aux_channels"].shape[-1] == 5
    assert got["v_scale"] is None
    assert (got["logits_soft_cap"], got["window_left"], got["causal"]) == (20.0, 700, True)
    rows = plan.num_partial_rows
    assert rows > 0 and got["partial_o"].shape == (rows, 6, 64)
    lo, hi = workspace.data_ptr(), workspace.data_ptr() + workspace.numel()
    for name in ("partial_o", "partial_lse"):
        assert lo <= got[name].data_ptr() and got[name].data_ptr() + got[name].numel() * 4 <= hi
    [args] = combined
    assert args[0] is got["partial_o"] and args[2] is got["header"] and args[4] is got["row_term"]
    assert args[5] is inputs.out and args[6] is inputs.lse and args[7] is inputs.sinks
    assert args[8:] == (0.125, 20.0)


def test_a_graph_always_combines_and_may_have_more_rows(recorded) -> None:
    graph = {
        "use_cuda_graph": True,
        "max_batch_size": 3,
        "max_total_qo_len": 20,
        "max_num_pages": 64,
    }
    got, combined, *_ = launch_args(recorded, "qk4pv8", q_tokens=20, fixed_split_pages=32, **graph)
    assert got["q"].shape[0] == got["out"].shape[0] == 20
    assert got["qo_indptr"].numel() == 4 and got["partial_lse"].shape[0] > 0
    assert len(combined) == 1, "no row is split now, but a later plan of the same graph may do it"


@pytest.mark.parametrize("field,value", [("causal", True), ("window_left", 5), ("sm_scale", 0.25)])
def test_a_captured_run_fixes_the_options(field, value) -> None:
    options = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 64, "num_sm": 4}
    spec, request = prefill_request(offsets([3]), offsets([40]), **options)
    out = torch.empty(3, 2, 64)
    inputs = Inputs(out, (torch.empty(40, 1, 64),) * 2, None, None, None, out, out)
    captured = _Captured.of(spec, inputs, None)
    captured.check(spec, make_plan(request))
    other, _ = prefill_request(offsets([3]), offsets([40]), **{**options, field: value})
    with pytest.raises(ValueError, match=f"{field}: run.. was captured with"):
        captured.check(other, make_plan(request))


def test_a_captured_run_bounds_later_plans() -> None:
    """The launches of a graph hold tensors of one size: what does not fit would be read outside."""
    options = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 64, "num_sm": 4}
    spec, _ = prefill_request(offsets([3]), offsets([40]), **options)
    out = torch.empty(3, 2, 64)
    inputs = Inputs(out, (torch.empty(40, 1, 64),) * 2, None, None, None, out, out)
    captured = _Captured.of(spec, inputs, None)
    for q_lens, kv_lens, match in (
        ([4], [40], "qo_indptr: query tokens: this plan needs 4, .* tensors of 3"),
        ([3], [41], "kv_indptr: KV tokens: this plan needs 41, .* tensors of 40"),
    ):
        _, request = prefill_request(offsets(q_lens), offsets(kv_lens), **options)
        with pytest.raises(ValueError, match=match):
            captured.check(spec, make_plan(request))
    smaller = dataclasses.replace(inputs, out=out[:2], kv=(torch.empty(30, 1, 64),) * 2)
    both = _Captured.of(spec, smaller, captured)
    assert (both.tokens, both.kv_tokens) == (2, 30), "the smallest capture decides"
