# SPDX-License-Identifier: Apache-2.0
"""Requests that grow over pages: slots, page table and refusals on small integers."""

from __future__ import annotations

import pytest
import torch

from mpfa.page_table import RequestPages, indptr_of


def test_two_requests_grow_over_pages_in_the_order_of_need():
    pages = RequestPages(2, 4)
    first = pages.step([0, 0], [5, 2])
    # Request 0 takes pages 0 and 1, request 1 page 2.
    assert first.slots.tolist() == [0, 1, 2, 3, 4, 8, 9]
    assert first.batch_indices.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert first.qo_indptr.tolist() == [0, 5, 7]
    assert first.kv_indptr.tolist() == [0, 2, 3]
    assert first.kv_indices.tolist() == [0, 1, 2]
    assert first.last_page_len.tolist() == [1, 2]
    assert not first.is_decode and pages.num_taken == 3
    second = pages.step([5, 2], [1, 3])
    assert second.slots.tolist() == [5, 10, 11, 12]
    assert second.kv_indices.tolist() == [0, 1, 2, 3]
    assert second.last_page_len.tolist() == [2, 1]
    assert pages.step([6, 5], [1, 1]).is_decode


def test_pages_are_handed_out_in_the_given_order():
    step = RequestPages(1, 2, iter([7, 3])).step([0], [3])
    assert step.slots.tolist() == [14, 15, 6]
    assert step.kv_indices.tolist() == [7, 3]


def test_empty_requests_and_an_empty_batch_have_no_pages():
    step = RequestPages(2, 16).step([0, 0], [0, 1])
    assert step.slots.tolist() == [0] and step.slots.dtype == torch.int64
    assert step.kv_indptr.tolist() == [0, 0, 1]
    assert step.last_page_len.tolist() == [0, 1]
    nothing = RequestPages(0, 16).step([], [])
    assert nothing.slots.numel() == 0 and nothing.kv_indptr.tolist() == [0]
    dtypes = {nothing.kv_indptr.dtype, nothing.kv_indices.dtype, nothing.last_page_len.dtype}
    assert dtypes == {torch.int32}


def test_refusals_name_what_is_wrong():
    pages = RequestPages(1, 4, iter([5]))
    with pytest.raises(ValueError, match="one length for each of the 1 requests, got 2 old and 1"):
        pages.step([0, 0], [1])
    with pytest.raises(ValueError, match="request 0 needs page 2 of 2, none is left after 1"):
        pages.step([0], [5])
    with pytest.raises(ValueError, match="page_size"):
        RequestPages(1, 0)


def test_indptr_of_lengths():
    assert indptr_of([3, 0, 2]).tolist() == [0, 3, 3, 5]
    assert indptr_of([]).tolist() == [0]
