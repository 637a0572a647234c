# SPDX-License-Identifier: Apache-2.0
"""supports() says what really happens; backends and devices without a kernel are refused."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch
from attention_cases import make_batch, offsets, paged, static_stats, workspace_for

import mpfa
from mpfa import support
from mpfa.backends import kernels

AVAILABLE = support.available_backends()
# A backend that serves one operation and not the other.
WITHOUT_KERNEL = [
    (backend, operation)
    for backend in kernels.BACKENDS
    for operation in kernels.OPERATIONS
    if not any(
        k.ready and (k.backend, k.operation) == (backend, operation) for k in kernels.KERNELS
    )
]


def attempt(feature: dict[str, object]) -> str | None:
    """Do on CPU tensors what ``feature`` describes; the error text, or None."""
    f = dict(feature)
    operation, q_len = f["operation"], f["q_len_per_request"]
    paged_plan = f["page_size"] is not None
    try:
        config = mpfa.KVCacheConfig(
            f["format"],
            f["num_kv_heads"],
            f["head_dim"],
            f["page_size"] or 128,
            f["num_qo_heads"],
            f["compensation"],
            f["channels"],
        )
        q_lens = [q_len] * 2
        shape = (f["num_qo_heads"], f["num_kv_heads"], f["head_dim"])
        batch = make_batch(q_lens, [9, 40], *shape, dtype=f["dtype"])
        stats = static_stats(batch, config.compensation, config.channels)
        if paged_plan:
            pages = paged(batch, config, stats=stats)
        elif operation != "prefill":
            raise ValueError("page_size None")
        if operation == "append":
            return None
        options = {
            **batch.heads,
            "causal": f["causal"],
            "window_left": f["window_left"],
            "logits_soft_cap": f["logits_soft_cap"],
            "config": config,
        }
        if operation == "decode":
            wrapper = mpfa.BatchDecodeWrapper(
                workspace_for(*pages.table, q_len_per_request=q_len, **options)
            )
            wrapper.plan(*pages.table, q_len_per_request=q_len, **options)
        else:
            args = (offsets(q_lens), *(pages.table if paged_plan else (offsets([9, 40]),)))
            wrapper = mpfa.BatchPrefillWrapper(workspace_for(*args, **options))
            wrapper.plan(*args, **options)
        sinks = torch.zeros(f["num_qo_heads"]) if f["sinks"] else None
        kv = pages.cache if paged_plan else batch.kv
        run = {"sinks": sinks, "return_lse": f["return_lse"]}
        wrapper.run(batch.query, kv, stats=None if paged_plan else stats, **run)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


AXES = {
    "operation": ["prefill", "decode", "append"],
    "format": ["qk4pv8", "mxfp8", "bf16", "nvfp4"],
    "head_dim": [64, 128, 80],
    "page_size": [None, 1, 16, 32, 48, 64, 128],
    "num_qo_heads": [4, 6, 7],
    "num_kv_heads": [2, 1],
    "compensation": ["none", "none", "mean", "channels", "mean+channels"],
    "channels": [0, 0, 4, 15, 16, 17],
    "causal": [False, True],
    "window_left": [-1, 5, -2],
    "logits_soft_cap": [0.0, 30.0, -1.0],
    "sinks": [False, True],
    "return_lse": [False, True],
    "dtype": [torch.bfloat16, torch.float16, torch.float32],
    "q_len_per_request": [1, 3],
}


def features(count: int) -> list[dict[str, object]]:
    """Random combinations, biased to few bad values so that about a third is supported."""
    rng = random.Random(5)
    good = {
        "format": "qk4pv8",
        "head_dim": 64,
        "page_size": 64,
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "compensation": "none",
        "channels": 0,
        "window_left": -1,
        "logits_soft_cap": 0.0,
        "dtype": torch.bfloat16,
    }
    result = []
    for _ in range(count):
        feature = {name: rng.choice(values) for name, values in AXES.items()}
        for name, value in good.items():
            if rng.random() < 0.55:
                feature[name] = value
        result.append(feature)
    return result


def test_supports_agrees_with_what_happens() -> None:
    outcomes = []
    for feature in features(150):
        ok, reasons = mpfa.supports("cpu", **feature)
        assert ok == (not reasons) and all(isinstance(r, str) for r in reasons)
        error = attempt(feature)
        outcomes.append(ok)
        if feature["operation"] == "append" and ok is False and error is None:
            # An append has no mask options; supports() may still refuse a meaningless value.
            assert all(r.startswith(("window_left", "logits_soft_cap")) for r in reasons), reasons
            continue
        assert ok == (error is None), (feature, reasons, error)
    assert 20 < sum(outcomes) < 130


@pytest.mark.parametrize(
    "name,value,reason",
    [
        ("format", "nvfp4", "format 'nvfp4': allowed are qk4pv8, mxfp8, bf16"),
        ("head_dim", 96, "head_dim 96: allowed are 64, 128, 256"),
        ("page_size", 8, "page_size 8: .* allows 1, 16, 32, 64, 128"),
        ("num_qo_heads", 0, "num_qo_heads 0"),
        ("num_kv_heads", 3, "num_qo_heads 1: must be a positive multiple of num_kv_heads=3"),
        ("num_kv_heads", 0, "num_qo_heads 1: .*num_kv_heads=0"),
        ("compensation", "rank1", "compensation 'rank1'"),
        ("channels", 1, "channels 1: compensation 'none' allows 0"),
        ("window_left", -2, "window_left -2"),
        ("logits_soft_cap", -0.5, "logits_soft_cap -0.5: must be >= 0"),
        ("logits_soft_cap", 1e-46, "logits_soft_cap 1e-46: .*in 1.18e-38..1.7e.38"),
        ("logits_soft_cap", 3e38, "logits_soft_cap 3e.38: .*in 1.18e-38..1.7e.38"),
        ("dtype", torch.float32, "dtype float32: q, k, v must be bfloat16 or float16"),
        ("q_len_per_request", 0, "q_len_per_request 0"),
    ],
)
def test_one_reason_per_bad_feature(name, value, reason) -> None:
    ok, reasons = mpfa.supports("reference", **{name: value})
    assert not ok and len(reasons) == 1 and re.match(reason, reasons[0]), reasons


def test_no_soft_cap_may_be_none_as_in_plan() -> None:
    assert mpfa.supports("cpu", logits_soft_cap=None) == (True, [])


def test_small_mxfp8_pages_say_why() -> None:
    for page_size in (1, 16):
        ok, reasons = mpfa.supports("cpu", format="mxfp8", page_size=page_size)
        assert not ok and "32-token V block must fit" in reasons[0] and "32, 64, 128" in reasons[0]


def test_decode_and_append_need_pages() -> None:
    for operation in ("decode", "append"):
        ok, reasons = mpfa.supports("cpu", operation=operation)
        assert not ok and operation in reasons[0]
        assert mpfa.supports("cpu", operation=operation, page_size=16) == (True, [])


def test_reference_serves_every_listed_combination() -> None:
    pairs = itertools.product(("qk4pv8", "mxfp8", "bf16"), (64, 128, 256), range(1, 17))
    for format, head_dim, group in pairs:
        assert mpfa.supports("cpu", format=format, head_dim=head_dim, num_qo_heads=group) == (
            True,
            [],
        )


def test_hopper_has_decode_only() -> None:
    assert WITHOUT_KERNEL == [("sm90", "prefill")]


@pytest.mark.parametrize("backend,operation", WITHOUT_KERNEL)
def test_backends_without_a_kernel_of_the_operation(backend: str, operation: str) -> None:
    ok, reasons = mpfa.supports(backend, operation=operation, page_size=64)
    assert not ok and len(reasons) == 1
    assert backend in reasons[0] and operation in reasons[0]
    cls = {"prefill": mpfa.BatchPrefillWrapper, "decode": mpfa.BatchDecodeWrapper}[operation]
    with pytest.raises(ValueError, match=rf"^backend: '{backend}' .*{operation}"):
        cls(torch.empty(16, dtype=torch.uint8), backend=backend)
    if operation == "prefill":
        q = torch.zeros(1, 1, 64).bfloat16()
        with pytest.raises(ValueError, match=f"^backend: '{backend}'"):
            mpfa.single_prefill(q, q, q, backend=backend)


@pytest.mark.parametrize("backend", ["fa2", "", "SM100", None, 3])
def test_unknown_backends(backend: object) -> None:
    listed = ", ".join(repr(name) for name in ("auto", *AVAILABLE))
    with pytest.raises(ValueError, match=f"backend: must be one of {listed}, got"):
        mpfa.BatchPrefillWrapper(torch.empty(16, dtype=torch.uint8), backend=backend)


def test_unknown_devices_and_operations() -> None:
    with pytest.raises(ValueError, match="backend_or_device: expected a backend .*'fa2'"):
        mpfa.supports("fa2")
    with pytest.raises(ValueError, match="operation: must be one of .*'train'"):
        mpfa.supports("cpu", operation="train")
    with pytest.raises(TypeError, match="backend_or_device"):
        mpfa.supports(3.5)


@pytest.mark.parametrize("device", ["cuda:0", torch.device("cuda", 1), "meta", "xpu:0"])
def test_devices_without_a_kernel(device) -> None:
    ok, reasons = mpfa.supports(device)
    assert (
        not ok and str(torch.device(device)) in reasons[0] and 'backend="reference"' in reasons[0]
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without CUDA")
@pytest.mark.parametrize("operation", support.OPERATIONS)
def test_a_cuda_device_that_torch_does_not_see(operation: str) -> None:
    ok, reasons = mpfa.supports("cuda:0", operation=operation, page_size=64)
    assert not ok and len(reasons) == 1, reasons
    assert reasons[0].startswith("device cuda:0: torch sees no CUDA device")


KERNELS = [(k.backend, k.operation, k.format) for k in kernels.KERNELS if k.ready]


@pytest.mark.parametrize("backend,operation,format", KERNELS)
def test_kv_heads_are_a_grid_dimension(backend, operation, format) -> None:
    shape = {"operation": operation, "format": format, "head_dim": 64, "page_size": 64}
    # "sim" plays the first kernel that reads the format.
    first = kernels.find_kernel(operation, format=format).backend
    for name, owner in ((backend, backend), ("sim", first)):
        for heads, allowed in ((65535, True), (65536, False)):
            ok, reasons = mpfa.supports(name, num_kv_heads=heads, num_qo_heads=heads, **shape)
            assert ok == allowed, reasons
        text = f"num_kv_heads 65536: {owner} {operation} allows 1..65535 (KV heads are a grid"
        assert len(reasons) == 1 and reasons[0].startswith(text), reasons
    assert mpfa.supports("cpu", num_kv_heads=65536, num_qo_heads=65536, **shape) == (True, [])


def test_plan_refuses_the_kv_heads_that_supports_refuses() -> None:
    config = mpfa.KVCacheConfig("mxfp8", 65536, 64, 64, 65536)
    wrapper = mpfa.BatchPrefillWrapper(torch.empty(16, dtype=torch.uint8), backend="sim")
    heads = {"num_qo_heads": 65536, "num_kv_heads": 65536, "head_dim": 64}
    with pytest.raises(ValueError, match="num_kv_heads 65536: .*allows 1..65535"):
        wrapper.plan(offsets([1]), offsets([1]), **heads, config=config)


def test_architecture_error_of_each_entry_point() -> None:
    """The meta device stands in for a GPU: it has no kernel, and no data to read by accident."""
    meta = torch.device("meta")
    config = mpfa.KVCacheConfig("qk4pv8", 2, 64, 64, 4)
    q = torch.zeros(2, 4, 64, dtype=torch.bfloat16, device=meta)
    k = torch.zeros(2, 2, 64, dtype=torch.bfloat16, device=meta)
    slots = torch.zeros(2, dtype=torch.int64, device=meta)
    cache = mpfa.PagedKVCache.allocate(config, 2, meta)
    indptr = torch.zeros(2, dtype=torch.int32, device=meta)
    calls = {
        "prefill": lambda: mpfa.BatchPrefillWrapper(
            torch.empty(16, dtype=torch.uint8, device=meta)
        ),
        "decode": lambda: mpfa.BatchDecodeWrapper(torch.empty(16, dtype=torch.uint8, device=meta)),
        "append_paged_kv_cache": lambda: mpfa.append_paged_kv_cache(k, k, cache, slots),
        "quantize_query": lambda: mpfa.quantize_query(q, config),
        "quantize_kv": lambda: mpfa.quantize_kv(k, k, config, indptr),
    }
    for operation, call in calls.items():
        with pytest.raises(mpfa.GPUArchitectureError) as caught:
            call()
        text = str(caught.value)
        assert text.startswith(operation) and "meta" in text
        assert "supports() says" in text and 'backend="reference"' in text
    with pytest.raises(mpfa.GPUArchitectureError):
        mpfa.single_prefill(q, k, k)
    assert issubclass(mpfa.GPUArchitectureError, RuntimeError)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (11, 0)])
def test_a_gpu_is_named_with_its_capability(monkeypatch, capability) -> None:
    """A CUDA device that torch only pretends to have, of a generation without the kernel asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    ok, reasons = mpfa.supports("cuda:0")
    named = f"compute capability {capability[0]}.{capability[1]}"
    assert not ok and named in reasons[0]
    for operation in ("prefill", "decode"):
        if (capability, operation) == ((9, 0), "decode"):
            assert support.resolve_backend("auto", torch.device("cuda:0"), operation) == "sm90"
            continue
        with pytest.raises(
            mpfa.GPUArchitectureError, match=f"{operation}: no kernel for device cuda:0 .*{named}"
        ):
            support.resolve_backend("auto", torch.device("cuda:0"), operation)


def test_auto_on_cpu_is_the_reference() -> None:
    wrapper = mpfa.BatchDecodeWrapper(torch.empty(16, dtype=torch.uint8))
    assert wrapper.backend == "reference"
    wrapper = mpfa.BatchDecodeWrapper(torch.empty(16, dtype=torch.uint8), backend="reference")
    assert wrapper.backend == "reference"


def test_supports_can_be_asked_before_a_config_exists() -> None:
    """Several reasons at once, no exception."""
    ok, reasons = mpfa.supports(
        "sm100", format="mxfp8", head_dim=80, page_size=1, compensation="mean"
    )
    assert not ok and len(reasons) == 4
