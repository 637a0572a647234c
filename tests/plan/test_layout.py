# SPDX-License-Identifier: Apache-2.0
"""Workspace layout, upload, views and the printed summary."""

from __future__ import annotations

import pytest
import torch

from mpfa.planner import (
    ITEM_FIELDS,
    METADATA_SECTIONS,
    SCRATCH_SECTIONS,
    SECTION_ALIGNMENT,
    make_plan,
)

SECTIONS = (("quantized_q", 1000), ("empty", 0), ("stats", 3))


@pytest.fixture
def plan(request_of):
    return make_plan(
        request_of(
            [3, 1], [1500, 300], page_size=16, partition_tokens=1024, head_dim=8,
            sections=SECTIONS, causal=True,
        )
    )  # fmt: skip


def test_sections_are_ordered_aligned_and_disjoint(plan):
    scratch = (*SCRATCH_SECTIONS, "quantized_q", "empty", "stats")
    assert list(plan.offsets) == [*METADATA_SECTIONS, *scratch]
    regions = {METADATA_SECTIONS: plan.metadata_bytes, scratch: plan.scratch_bytes}
    for names, region_bytes in regions.items():
        end = 0
        for name in names:
            offset = plan.offsets[name]
            assert offset % SECTION_ALIGNMENT == 0 and 0 <= offset - end < SECTION_ALIGNMENT
            end = offset + plan.sizes[name]
        assert end <= region_bytes < end + SECTION_ALIGNMENT


def test_sizes_are_exact(plan):
    rows = 3 * 2  # request 0: 3 query tokens x 2 partitions of 1500 keys
    assert plan.num_partial_rows == rows
    assert plan.sizes == {
        "header": 256,
        "qo_indptr": 12,
        "kv_indptr": 12,
        "kv_len": 8,
        "v_block_indptr": 12,
        "kv_indices": 4 * (94 + 19),
        "items": 32 * 3,
        "worker_indptr": 4 * 5,
        "merge_indptr": 4 * 5,
        "partial_o": rows * 4 * 8 * 4,
        "partial_lse": rows * 4 * 4,
        "quantized_q": 1000,
        "empty": 0,
        "stats": 3,
    }


def test_upload_and_views(plan):
    metadata = torch.full((plan.metadata_bytes + 5,), 7, dtype=torch.uint8)
    plan.upload(metadata)
    assert metadata[plan.metadata_bytes :].tolist() == [7] * 5
    names = ("items", "worker_indptr", "merge_indptr", "qo_indptr", "kv_indptr", "kv_len")
    for name in (*names, "v_block_indptr"):
        host = getattr(plan, name)
        assert torch.equal(plan.metadata_view(metadata, name).view(host.shape), host)
    ids = plan.metadata_view(metadata, "kv_indices")
    assert torch.equal(ids, plan.request.kv_indices) and torch.equal(ids, plan.kv_indices)
    header = plan.metadata_view(metadata, "header")[:19].tolist()
    # version, mode, batch, nnz_qo, items, workers, rows, Hq, Hkv, D, page, causal, window, q tile,
    # heads per group, head groups, kv block, partition, largest page id
    assert header == [2, 0, 2, 4, 3, 4, 6, 4, 1, 8, 16, 1, -1, 16, 4, 1, 128, 1024, 113]


@pytest.mark.parametrize("kv_lens", [[], [0], [1, 31, 32, 33, 0, 64, 1500]])
def test_v_block_rows_of_ragged_requests(request_of, kv_lens):
    """First row of every request when each has ceil(len / 32) rows of MXFP8 V scales."""
    want = [0]
    for length in kv_lens:
        want.append(want[-1] + (length + 31) // 32)
    plan = make_plan(request_of([1] * len(kv_lens), kv_lens))
    assert plan.v_block_indptr.tolist() == want
    # In pages these rows are the pages' own.
    pages = make_plan(request_of([1] * len(kv_lens), kv_lens, page_size=32))
    assert pages.v_block_indptr.tolist() == [0] * len(want)


def test_v_block_rows_of_a_graph(request_of):
    graph = {
        "use_cuda_graph": True,
        "max_batch_size": 5,
        "max_total_qo_len": 9,
        "max_num_pages": 400,
    }
    plan = make_plan(request_of([1, 2], [33, 300], **graph))
    metadata = torch.zeros(plan.metadata_bytes, dtype=torch.uint8)
    plan.upload(metadata)
    assert plan.metadata_view(metadata, "v_block_indptr").tolist() == [0, 2, 12, 12, 12, 12]


def test_workers_per_sm(request_of):
    one = make_plan(request_of([1] * 8, [300] * 8))
    two = make_plan(request_of([1] * 8, [300] * 8, workers_per_sm=2))
    assert (one.num_workers, two.num_workers) == (4, 8)
    assert "8 workers per KV head (num_sm 4 x 2)" in two.summary()
    assert "4 workers per KV head (num_sm 4)" in one.summary()


def test_scratch_views(plan):
    workspace = torch.zeros(plan.scratch_bytes, dtype=torch.uint8)
    plan.scratch(workspace, "partial_o", torch.float32).fill_(1.0)
    assert plan.scratch(workspace, "partial_o", torch.float32).shape == (6 * 4 * 8,)
    assert workspace.view(torch.float32).sum() == 6 * 4 * 8
    assert plan.scratch(workspace, "stats", torch.float32).shape == (0,)
    assert plan.scratch(workspace, "stats", torch.uint8).shape == (3,)


def test_copies_do_not_follow_the_caller(request_of):
    request = request_of([1], [40], page_size=16)
    plan = make_plan(request)
    request.kv_indices.fill_(-1)
    request.kv_indptr.fill_(-1)
    assert plan.kv_indices.tolist() == [3, 2, 1] and plan.kv_indptr.tolist() == [0, 3]


def test_view_errors(plan):
    workspace = torch.zeros(plan.scratch_bytes, dtype=torch.uint8)
    metadata = torch.zeros(plan.metadata_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="section = 'nope': this region has header, qo_indptr"):
        plan.metadata_view(metadata, "nope")
    with pytest.raises(ValueError, match="section = 'items': this region has partial_o"):
        plan.scratch(workspace, "items", torch.int32)
    with pytest.raises(
        ValueError, match=rf"metadata has \d+ bytes: this plan needs {len(metadata)}"
    ):
        plan.upload(metadata[:-1])
    with pytest.raises(ValueError, match=rf"has \d+ bytes: this plan needs {len(workspace)}"):
        plan.scratch(workspace[:-1], "stats", torch.uint8)
    with pytest.raises(ValueError, match="must be contiguous 1-D torch.uint8"):
        plan.scratch(workspace.view(-1, 2), "stats", torch.uint8)
    with pytest.raises(ValueError, match="must be contiguous 1-D torch.uint8"):
        plan.metadata_view(metadata.float(), "header")


def test_summary(plan, request_of):
    text = plan.summary()
    assert "prefill plan: 2 requests, 4 query tokens, 1800 KV tokens (pages of 16)" in text
    assert "3 items on 4 workers per KV head (num_sm 4), 6 partial rows" in text
    assert "largest item 10" in text  # 1024 / 128 + 2
    assert f"metadata {plan.metadata_bytes} bytes, scratch {plan.scratch_bytes} bytes" in text
    for name in (*ITEM_FIELDS, *plan.offsets):
        assert name in text
    assert "empty" in make_plan(request_of([], [], sections=SECTIONS)).summary()
    assert "... 92 more" in make_plan(request_of([1] * 100, [9] * 100)).summary()
