# SPDX-License-Identifier: Apache-2.0
"""The last step of a planned run: partial rows to outputs, executed by the simulator."""

from __future__ import annotations

import math

import pytest
import torch
from state_cases import _compare, _states

from mpfa.jit import quant
from mpfa.merge import merge_base2
from mpfa.planner import PlanRequest, make_plan

HEADS, GROUP = 4, 2


def plan_of(kv_lens: list[int], q_len: int, dim: int):
    pages = [-(-n // 64) for n in kv_lens]
    offsets = torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=torch.int32)
    return make_plan(
        PlanRequest(
            mode="decode",
            qo_indptr=torch.arange(len(kv_lens) + 1, dtype=torch.int32) * q_len,
            kv_indptr=offsets,
            kv_indices=torch.arange(int(offsets[-1]), dtype=torch.int32),
            last_page_len=torch.tensor(
                [(n - 1) % 64 + 1 if n else 0 for n in kv_lens], dtype=torch.int32
            ),
            num_qo_heads=HEADS, num_kv_heads=HEADS // GROUP, head_dim=dim, page_size=64,
            causal=True, window_left=-1, q_tile_tokens=q_len, heads_per_group=GROUP, kv_block=128,
            partition_tokens=256, num_sm=4,
        )
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("soft_cap", [0.0, 20.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_of_a_plan(with_sinks, soft_cap, dtype, target):
    """Split rows are finished; rows of one partition, and rows beyond the plan, are left alone."""
    dim, q_len = 128, 2
    plan = plan_of([1000, 100, 0, 513], q_len, dim)
    metadata = torch.zeros(plan.metadata_bytes, dtype=torch.uint8)
    plan.upload(metadata)
    tokens = plan.nnz_qo + 3  # a captured launch keeps the rows that it had
    merge = torch.full((tokens + 5,), 10**6, dtype=torch.int32)  # stale behind the plan's own
    merge[: plan.nnz_qo + 1] = plan.merge_indptr
    o, lse = _states(plan.num_partial_rows, HEADS, dim, 3)
    gen = torch.Generator().manual_seed(4)
    row_term = torch.randn(tokens, HEADS, generator=gen) * 40
    sinks = torch.randn(HEADS, generator=gen) * 3 if with_sinks else None
    out, out_lse = (
        torch.full((tokens, HEADS, dim), 77.0, dtype=dtype),
        torch.full((tokens, HEADS), 77.0),
    )
    want, want_lse = out.float().clone(), out_lse.clone()
    begins = plan.merge_indptr.tolist()
    scale = 0.125
    for t, (begin, end) in enumerate(zip(begins, begins[1:], strict=False)):
        if end == begin:
            continue
        value, merged = merge_base2(o[begin:end], lse[begin:end])
        if soft_cap == 0.0:
            merged = merged + scale * math.log2(math.e) * row_term[t]
        if with_sinks:
            both = torch.logaddexp2(merged, sinks * math.log2(math.e))
            value = (
                value * torch.where(merged == -torch.inf, 0.0, torch.exp2(merged - both))[:, None]
            )
            merged = both
        want[t], want_lse[t] = value, merged
    steps = plan.merge_indptr.diff()
    assert (steps > 1).sum() == 2 * q_len and (steps == 0).sum() == 2 * q_len
    quant.combine().run(
        o, lse, plan.metadata_view(metadata, "header"), merge, row_term, out, out_lse, sinks, scale,
        soft_cap, True,
    )  # fmt: skip
    target.check()
    tolerance = {torch.float32: 4e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}[dtype]
    assert _compare("out", out, want, tolerance) == []
    assert _compare("lse", out_lse, want_lse, 4e-6) == []
    assert len(target.launches()) == 1


def test_a_plan_that_never_splits_launches_nothing(target):
    plan = plan_of([100, 30], 1, 64)
    metadata = torch.zeros(plan.metadata_bytes, dtype=torch.uint8)
    plan.upload(metadata)
    out, lse = torch.full((2, HEADS, 64), 5.0), torch.full((2, HEADS), 5.0)
    quant.combine().run(
        torch.empty(0, HEADS, 64), torch.empty(0, HEADS), plan.metadata_view(metadata, "header"),
        plan.merge_indptr, None, out, lse, None, 1.0, 0.0, True,
    )  # fmt: skip
    assert target.launches() == []
    assert (out == 5.0).all()
    assert (lse == 5.0).all()


def test_refusals(target):
    header = torch.zeros(64, dtype=torch.int32)
    o, lse = torch.zeros(2, HEADS, 64), torch.zeros(2, HEADS)
    out, out_lse = torch.zeros(3, HEADS, 64), torch.zeros(3, HEADS)
    merge = torch.zeros(4, dtype=torch.int32)
    run = quant.combine().run
    with pytest.raises(ValueError, match="merge_indptr: must be of one entry more"):
        run(o, lse, header, merge[:3], None, out, out_lse, None, 1.0, 0.0, True)
    with pytest.raises(ValueError, match="header: must be int32, a whole plan header"):
        run(o, lse, header[:10], merge, None, out, out_lse, None, 1.0, 0.0, True)
    with pytest.raises(ValueError, match="lse"):
        run(o, lse[:, :2], header, merge, None, out, out_lse, None, 1.0, 0.0, True)
