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


def nan_states(where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Four states per head: head 0 is sound, the others hold NaN in one state, in all of them, and in
    one beside states without keys."""
    gen = torch.Generator().manual_seed(8)
    o, lse = torch.randn(4, HEADS, 64, generator=gen), torch.randn(4, HEADS, generator=gen)
    lse[1:, 3] = -torch.inf
    if where == "lse":
        lse[2, 1] = lse[0, 3] = torch.nan
        lse[:, 2] = torch.nan
    else:
        o[2, 1, 5] = o[0, 3, 63] = torch.nan
        o[:, 2] = torch.nan
        o[1, 3] = torch.nan  # a state of weight 0, which is not looked at
    return o, lse


def with_sinks(value, merged, sinks):
    both = torch.logaddexp2(merged, sinks * math.log2(math.e))
    return value * torch.exp2(merged - both)[..., None], both


def assert_same_nan(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=4e-6, atol=4e-6, equal_nan=True)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("where", ["lse", "o"])
def test_a_nan_partial_reaches_the_output(where, sinks, target):
    o, lse = nan_states(where)
    value, merged = merge_base2(o, lse)
    assert value.isnan().any() and not value[0].isnan().any()
    assert merged.isnan().any() == (where == "lse")
    out, out_lse = torch.zeros(1, HEADS, 64), torch.zeros(1, HEADS)
    quant.combine().merge_states(o[:, None], lse[:, None], out, out_lse, False)
    assert_same_nan(out[0], value)
    assert_same_nan(out_lse[0], merged)
    sink = torch.tensor([0.5, -1.0, 3.0, -math.inf]) if sinks else None
    if sinks:
        value, merged = with_sinks(value, merged, sink)
    indptr = torch.tensor([0, 4], dtype=torch.int32)
    out, out_lse = torch.zeros(1, HEADS, 64), torch.zeros(1, HEADS)
    quant.combine().combine_partials(o, lse, indptr, 1, out, out_lse, None, 0.0, sink, False)
    assert_same_nan(out[0], value)
    assert_same_nan(out_lse[0], merged)
    plan = plan_of([1000], 1, 64)
    metadata = torch.zeros(plan.metadata_bytes, dtype=torch.uint8)
    plan.upload(metadata)
    assert plan.merge_indptr.tolist() == [0, 4]
    out, out_lse = torch.zeros(1, HEADS, 64), torch.zeros(1, HEADS)
    quant.combine().run(
        o, lse, plan.metadata_view(metadata, "header"), plan.merge_indptr, None, out, out_lse, sink,
        1.0, 0.0, True,
    )  # fmt: skip
    assert_same_nan(out[0], value)
    assert_same_nan(out_lse[0], merged)
    target.check()


def test_a_nan_sink_reaches_the_output(target):
    """Also where no state has keys."""
    o, lse = torch.randn(2, HEADS, 64), torch.randn(2, HEADS)
    lse[:, 1] = -torch.inf
    sinks = torch.tensor([math.nan, math.nan, 0.0, -math.inf])
    out, out_lse = torch.zeros(1, HEADS, 64), torch.zeros(1, HEADS)
    indptr = torch.tensor([0, 2], dtype=torch.int32)
    quant.combine().combine_partials(o, lse, indptr, 1, out, out_lse, None, 0.0, sinks, False)
    target.check()
    value, merged = with_sinks(*merge_base2(o, lse), sinks)
    assert out[0, :2].isnan().all()
    assert out_lse[0, :2].isnan().all()
    assert_same_nan(out[0, 2:], value[2:])
    assert_same_nan(out_lse[0, 2:], merged[2:])


def test_operands_of_any_stride(target):
    """Whatever an unsplit run accepts as a view: row term, output and LSE."""
    tokens = 3
    o, lse = _states(5, HEADS, 64, 9)
    indptr = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    row_term, sinks = torch.randn(tokens, HEADS) * 20, torch.randn(HEADS)

    def combine(o, lse, row_term, out, out_lse):
        quant.combine().combine_partials(
            o, lse, indptr, 1, out, out_lse, row_term, 0.25, sinks, False
        )
        target.check()
        return out.clone(), out_lse.clone()

    want = combine(
        o, lse, row_term, torch.full((tokens, HEADS, 64), 7.0), torch.full((tokens, HEADS), 7.0)
    )
    rows = torch.full((tokens, HEADS + 3), math.nan)
    rows[:, 1:-2] = row_term
    for term in (rows[:, 1:-2], row_term.t().contiguous().t()):
        out = torch.full((HEADS, tokens, 67), 7.0).transpose(0, 1)[..., 1:65]
        got = combine(o, lse, term, out, torch.full((HEADS, tokens), 7.0).t())
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
    with pytest.raises(ValueError, match=r"row_term: must be of shape \[tokens, heads\]"):
        combine(o, lse, row_term[:2], torch.zeros(tokens, HEADS, 64), torch.zeros(tokens, HEADS))
