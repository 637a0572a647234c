# SPDX-License-Identifier: Apache-2.0
"""plan(): every kind of bad input is refused with argument, request, value and what is allowed."""

from __future__ import annotations

import pytest
import torch
from attention_cases import int32

import mpfa
from mpfa import planning

# Two requests: 40 and 17 tokens over pages of 16.
PREFILL = {
    "qo_indptr": int32([0, 3, 5]),
    "kv_indptr": int32([0, 3, 5]),
    "paged_kv_indices": int32([4, 0, 7, 2, 9]),
    "paged_kv_last_page_len": int32([8, 1]),
    "num_qo_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 64,
    "page_size": 16,
}
DECODE = {n: v for n, v in PREFILL.items() if n != "qo_indptr"}
RAGGED = {
    "qo_indptr": int32([0, 3, 5]),
    "kv_indptr": int32([0, 40, 57]),
    "num_qo_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 64,
}
CONFIG = mpfa.KVCacheConfig("qk4pv8", 2, 64, 16, 8)


def plan(kind: str, **change: object) -> mpfa.BatchPrefillWrapper | mpfa.BatchDecodeWrapper:
    base = {"prefill": PREFILL, "decode": DECODE, "ragged": RAGGED}[kind]
    cls = mpfa.BatchDecodeWrapper if kind == "decode" else mpfa.BatchPrefillWrapper
    wrapper = cls(torch.empty(1 << 22, dtype=torch.uint8))
    wrapper.plan(**{**base, **change})
    return wrapper


def refuse(kind: str, match: str, error: type = ValueError, **change: object) -> None:
    with pytest.raises(error, match=match):
        plan(kind, **change)
    # workspace_size() is the same code: same refusal.
    base = {"prefill": PREFILL, "decode": DECODE, "ragged": RAGGED}[kind]
    with pytest.raises(error, match=match):
        mpfa.workspace_size(num_sm=148, **{**base, **change})


@pytest.mark.parametrize("kind", ["prefill", "decode", "ragged"])
def test_the_base_arguments_are_good(kind: str) -> None:
    plan(kind)
    plan(kind, config=CONFIG)


PAGED = ["prefill", "decode"]
WITH_QO = ["prefill", "ragged"]
ALL = ["prefill", "decode", "ragged"]


@pytest.mark.parametrize(
    "kinds,change,match",
    [
        # qo_indptr
        (WITH_QO, {"qo_indptr": int32([0, 5, 3])}, r"qo_indptr.*1.*(5|3)"),
        (WITH_QO, {"qo_indptr": int32([0, -1, 5])}, r"qo_indptr.*-1"),
        (WITH_QO, {"qo_indptr": int32([1, 3, 5])}, r"qo_indptr.*1"),
        (WITH_QO, {"qo_indptr": int32([0, 3])}, r"kv_indptr.*|qo_indptr.*"),
        (WITH_QO, {"qo_indptr": int32([])}, r"qo_indptr"),
        (
            WITH_QO,
            {"qo_indptr": torch.tensor([0, 3, 5])},
            r"qo_indptr: dtype must be int32, got int64",
        ),
        (WITH_QO, {"qo_indptr": int32([0, 3, 5]).view(1, 3)}, r"qo_indptr: must be 1-D"),
        # kv_indptr
        (PAGED, {"kv_indptr": int32([0, 5, 3])}, r"kv_indptr.*"),
        (ALL, {"kv_indptr": int32([2, 3, 5])}, r"kv_indptr.*2"),
        (ALL, {"kv_indptr": int32([0, -3, 5])}, r"kv_indptr.*-3"),
        (
            ALL,
            {"kv_indptr": torch.tensor([0.0, 3.0, 5.0])},
            r"kv_indptr: dtype must be int32, got float32",
        ),
        (ALL, {"kv_indptr": int32([])}, r"(kv|qo)_indptr"),
        # page ids
        (PAGED, {"paged_kv_indices": int32([4, 0, 7, -2, 9])}, r"paged_kv_indices.*-2.*request 1"),
        (
            PAGED,
            {"paged_kv_indices": int32([4, 0, 7])},
            r"paged_kv_indices.*3.*5|paged_kv_indices.*5.*3",
        ),
        (
            PAGED,
            {"paged_kv_indices": torch.tensor([4, 0, 7, 2, 9])},
            r"paged_kv_indices: dtype must be int32",
        ),
        # last_page_len
        (PAGED, {"paged_kv_last_page_len": int32([8, 0])}, r"paged_kv_last_page_len.*1.*0.*1.*16"),
        (PAGED, {"paged_kv_last_page_len": int32([17, 1])}, r"paged_kv_last_page_len.*0.*17.*16"),
        (PAGED, {"paged_kv_last_page_len": int32([-1, 1])}, r"paged_kv_last_page_len.*0.*-1"),
        (PAGED, {"paged_kv_last_page_len": int32([8])}, r"paged_kv_last_page_len.*1.*2"),
        (PAGED, {"paged_kv_last_page_len": int32([8, 1, 1])}, r"paged_kv_last_page_len.*3.*2"),
        (PAGED, {"paged_kv_last_page_len": torch.tensor([8, 1])}, r"paged_kv_last_page_len: dtype"),
        # heads and sizes
        (ALL, {"num_qo_heads": 7}, r"num_qo_heads: must be a multiple of num_kv_heads=2, got 7"),
        (ALL, {"num_qo_heads": 0}, r"num_qo_heads: must be >= 1, got 0"),
        (ALL, {"num_kv_heads": 0}, r"num_kv_heads: must be >= 1, got 0"),
        (ALL, {"num_kv_heads": -2}, r"num_kv_heads"),
        (ALL, {"head_dim": 80}, r"head_dim: must be one of 64, 128, 256, got 80"),
        (ALL, {"head_dim": 512}, r"head_dim"),
        (PAGED, {"page_size": 48}, r"page_size: must be one of 1, 16, 32, 64, 128, got 48"),
        (PAGED, {"page_size": 0}, r"page_size"),
        (PAGED, {"page_size": 256}, r"page_size"),
        # options
        (ALL, {"window_left": -2}, r"window_left: must be >= -1, got -2"),
        (ALL, {"logits_soft_cap": -1.0}, r"logits_soft_cap: must be finite and >= 0.*-1"),
        (ALL, {"logits_soft_cap": float("nan")}, r"logits_soft_cap"),
        (ALL, {"logits_soft_cap": float("inf")}, r"logits_soft_cap"),
        (ALL, {"sm_scale": 0.0}, r"sm_scale: must be finite and > 0"),
        (ALL, {"sm_scale": -0.1}, r"sm_scale"),
        (ALL, {"sm_scale": float("nan")}, r"sm_scale"),
        # Values that float32, or its product with log2(e), cannot hold.
        (ALL, {"sm_scale": 1e39}, r"sm_scale: .*in 8.15e-39..2.36e\+38.*1e\+39"),
        (ALL, {"sm_scale": 2.5e38}, r"sm_scale: .*in 8.15e-39..2.36e\+38.*2.5e\+38"),
        (ALL, {"sm_scale": 1e-46}, r"sm_scale: .*in 8.15e-39..2.36e\+38.*1e-46"),
        (ALL, {"sm_scale": 8e-39}, r"sm_scale: .*in 8.15e-39..2.36e\+38.*8e-39"),
        (
            ALL,
            {"logits_soft_cap": 1e39},
            r"logits_soft_cap: .*in 1.18e-38..1.7e\+38 with sm_scale 0.125.*1e\+39",
        ),
        (ALL, {"logits_soft_cap": 2.5e38}, r"logits_soft_cap: .*in 1.18e-38..1.7e\+38.*2.5e\+38"),
        (ALL, {"logits_soft_cap": 1e-46}, r"logits_soft_cap: .*in 1.18e-38.*1e-46"),
        (ALL, {"logits_soft_cap": 1e-50}, r"logits_soft_cap: .*in 1.18e-38.*1e-50"),
        # 2 log2(e) sm_scale / cap: too large, too small.
        (
            ALL,
            {"logits_soft_cap": 1e-35, "sm_scale": 2000.0},
            r"logits_soft_cap: .*in 1.7e-35..1.7e\+38 with sm_scale 2000.*1e-35",
        ),
        (
            ALL,
            {"logits_soft_cap": 1e10, "sm_scale": 1e-36},
            r"logits_soft_cap: .*in 1.18e-38..7.14e\+08 with sm_scale 1e-36.*10000000000",
        ),
        (ALL, {"fixed_split_pages": 0}, r"fixed_split_pages: must be >= 1, got 0"),
        (PAGED, {"fixed_split_pages": 7}, r"fixed_split_pages: .*128.*7 pages x 16 = 112"),
        # config disagrees
        (
            ALL,
            {"config": mpfa.KVCacheConfig("qk4pv8", 2, 128, 16, 8)},
            r"head_dim: plan says 64, config says 128",
        ),
        (
            ALL,
            {"config": mpfa.KVCacheConfig("qk4pv8", 4, 64, 16, 8)},
            r"num_kv_heads: plan says 2, config says 4",
        ),
        (
            ALL,
            {"config": mpfa.KVCacheConfig("qk4pv8", 2, 64, 16, 4)},
            r"num_qo_heads: plan says 8, config says 4",
        ),
        (
            PAGED,
            {"config": mpfa.KVCacheConfig("qk4pv8", 2, 64, 32, 8)},
            r"page_size: plan says 16, config says 32",
        ),
        # numbers that no int32 holds
        (ALL, {"window_left": 2**31}, r"window_left: must be <= 2147483647, got 2147483648"),
        (ALL, {"window_left": 2**70}, r"window_left: must be <= 2147483647"),
        (ALL, {"fixed_split_pages": 2**62}, r"fixed_split_pages: must be <= 2147483647"),
        (ALL, {"fixed_split_pages": 2**28}, r"fixed_split_pages: .*at most 2147483647 tokens"),
        (["decode"], {"q_len_per_request": 2**40}, r"q_len_per_request: must be <= 2147483647"),
        (["decode"], {"q_len_per_request": 2**30}, r"q_len_per_request: .*2 requests x 1073741824"),
        (["decode"], {"q_len_per_request": 0}, r"q_len_per_request: must be >= 1, got 0"),
        (["prefill"], {"paged_kv_last_page_len": None}, r"paged_kv_last_page_len: required"),
        (["ragged"], {"paged_kv_last_page_len": int32([1, 1])}, r"paged_kv_indices: required"),
        (PAGED, {"page_size": None}, r"page_size: required"),
    ],
)
def test_bad_value(kinds, change, match) -> None:
    for kind in kinds:
        refuse(kind, match, **change)


@pytest.mark.parametrize(
    "kinds,change,match",
    [
        (WITH_QO, {"qo_indptr": [0, 3, 5]}, "qo_indptr: expected a torch.Tensor, got list"),
        (ALL, {"kv_indptr": None}, "kv_indptr: expected a torch.Tensor"),
        (["decode"], {"paged_kv_indices": None}, "paged_kv_indices: expected a torch.Tensor"),
        (
            ["decode"],
            {"paged_kv_last_page_len": None},
            "paged_kv_last_page_len: expected a torch.Tensor",
        ),
        (ALL, {"num_qo_heads": 8.0}, "num_qo_heads: expected an int, got float"),
        (ALL, {"num_kv_heads": "2"}, "num_kv_heads: expected an int"),
        (ALL, {"head_dim": None}, "head_dim"),
        (ALL, {"head_dim": 64.0}, "head_dim: expected an int"),
        (PAGED, {"page_size": 16.0}, "page_size: expected an int"),
        (ALL, {"window_left": 1.5}, "window_left: expected an int"),
        (ALL, {"causal": 1}, "causal: expected a bool, got int"),
        (ALL, {"config": "qk4pv8"}, "config: expected KVCacheConfig, got str"),
        (ALL, {"sm_scale": "0.1"}, "sm_scale"),
        (ALL, {"logits_soft_cap": "30"}, "logits_soft_cap"),
        (PAGED, {"fixed_split_pages": 8.0}, "fixed_split_pages: expected an int"),
        (["decode"], {"q_len_per_request": 1.0}, "q_len_per_request: expected an int"),
    ],
)
def test_bad_type(kinds, change, match) -> None:
    for kind in kinds:
        refuse(kind, match, error=(TypeError, ValueError), **change)


@pytest.mark.parametrize("kind", ALL)
def test_the_request_that_is_wrong_is_named(kind: str) -> None:
    """Request 5 of 9."""
    lengths = [2] * 9
    ip = [0]
    for n in lengths:
        ip.append(ip[-1] + n)
    good = {
        "kv_indptr": int32(ip),
        "paged_kv_indices": torch.arange(18, dtype=torch.int32),
        "paged_kv_last_page_len": int32([3] * 9),
    }
    if kind == "ragged":
        good = {"kv_indptr": int32(ip)}
    if kind != "decode":
        good["qo_indptr"] = int32(ip)
    plan(kind, **good)
    bad_ip = list(ip)
    bad_ip[6] = 7  # request 5 would go from 10 to 7
    refuse(kind, r"kv_indptr.*\b5\b", **{**good, "kv_indptr": int32(bad_ip)})
    if kind != "decode":
        refuse(kind, r"qo_indptr.*\b5\b", **{**good, "qo_indptr": int32(bad_ip)})
    if kind != "ragged":
        last = int32([3] * 5 + [20] + [3] * 3)
        refuse(
            kind, r"paged_kv_last_page_len.*\b5\b.*20", **{**good, "paged_kv_last_page_len": last}
        )
        pages = torch.arange(18, dtype=torch.int32)
        pages[11] = -7
        refuse(
            kind,
            r"paged_kv_indices.*\b5\b.*-7|paged_kv_indices.*-7.*\b5\b",
            **{**good, "paged_kv_indices": pages},
        )


@pytest.mark.parametrize("kind", PAGED)
def test_a_request_without_pages_may_carry_any_last_page_len(kind: str) -> None:
    for last in (0, 1, 16):
        change = {"kv_indptr": int32([0, 3, 3]), "paged_kv_last_page_len": int32([8, last])}
        assert plan(kind, **change).work_list.shape[1] == 8


@pytest.mark.parametrize("kind", ALL)
def test_a_failed_plan_leaves_the_old_one(kind: str) -> None:
    wrapper = plan(kind)
    before, text = wrapper.work_list.clone(), wrapper.plan_summary()
    base = {"prefill": PREFILL, "decode": DECODE, "ragged": RAGGED}[kind]
    with pytest.raises(ValueError):
        wrapper.plan(**{**base, "kv_indptr": int32([0, -3, 5])})
    assert torch.equal(wrapper.work_list, before) and wrapper.plan_summary() == text


@pytest.mark.parametrize("kind", ALL)
def test_index_tensors_may_be_strided_and_are_copied(kind: str) -> None:
    base = {"prefill": PREFILL, "decode": DECODE, "ragged": RAGGED}[kind]
    tensors = {n: v for n, v in base.items() if isinstance(v, torch.Tensor)}
    strided = {n: torch.stack([t, t + 100], dim=1)[:, 0] for n, t in tensors.items()}
    assert not any(t.is_contiguous() for t in strided.values())
    want = plan(kind)
    got = plan(kind, **strided)
    assert torch.equal(want.work_list, got.work_list)
    own = {n: t.clone() for n, t in tensors.items()}
    wrapper = plan(kind, **own)
    for t in own.values():
        t.fill_(-1)
    assert torch.equal(wrapper.work_list, want.work_list)
    assert wrapper.plan_summary() == want.plan_summary()


@pytest.mark.parametrize("kind", ALL)
def test_empty_batches_plan(kind: str) -> None:
    none = int32([0])
    change: dict[str, object] = {"kv_indptr": none}
    if kind != "ragged":
        change |= {"paged_kv_indices": int32([]), "paged_kv_last_page_len": int32([])}
    if kind != "decode":
        change["qo_indptr"] = none
    assert "0 requests" in plan(kind, **change).plan_summary()


def test_the_ends_of_the_float32_ranges_plan() -> None:
    """What is refused just beyond is a float32 here, finite and not 0."""
    low, high = planning.SM_SCALE_RANGE
    for scale in (low, high):
        planned = torch.tensor(scale * planning.LOG2E, dtype=torch.float32)
        assert planned.isfinite() and planned >= torch.finfo(torch.float32).tiny
        plan("ragged", sm_scale=scale)
    for scale in (low, 0.125, 1e30):
        for cap in planning.soft_cap_range(scale):
            ratio = torch.tensor(2 * planning.LOG2E * scale / cap, dtype=torch.float32)
            assert ratio.isfinite() and ratio > 0
            plan("ragged", sm_scale=scale, logits_soft_cap=cap)


def test_none_means_the_default() -> None:
    """sm_scale=None is 1/sqrt(head_dim); logits_soft_cap=None is off (FlashInfer accepts both)."""
    for kind in PAGED:
        plan(kind, sm_scale=None, logits_soft_cap=None, page_size=None, config=CONFIG)
