# SPDX-License-Identifier: Apache-2.0
"""Requests that grow over the pages of a cache: slots for their new tokens, the table of their pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mpfa.errors import check_int
from mpfa.stats import request_rows


@dataclass(frozen=True)
class PagedStep:
    """The new tokens of one forward pass, T in all, and where they and their past are stored.

    Attributes:
        old_lens, new_lens: tokens of each request before the step, and those that it adds.
        slots: int64 [T], slot_mapping of append_paged_kv_cache().
        batch_indices: int32 [T], the request of each new token.
        qo_indptr: int32 [B+1], offsets of the requests in the new tokens.
        kv_indptr, kv_indices, last_page_len: int32, the page table after the step, as plan() takes it.
    """

    old_lens: tuple[int, ...]
    new_lens: tuple[int, ...]
    slots: torch.Tensor
    batch_indices: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor

    @property
    def is_decode(self) -> bool:
        """Every request gets exactly one token."""
        return all(n == 1 for n in self.new_lens)


class RequestPages:
    """Pages of B requests, taken one by one from ``pages`` as the requests grow.

    Args:
        num_requests: B.
        page_size: tokens per page.
        pages: ids to hand out, each once; by default 0, 1, 2, ...

    Raises:
        ValueError: page_size below 1.
    """

    def __init__(
        self, num_requests: int, page_size: int, pages: Iterator[int] | None = None
    ) -> None:
        check_int("num_requests", num_requests, 0)
        check_int("page_size", page_size, 1)
        self.page_size = page_size
        self.num_taken = 0
        self._source = itertools.count() if pages is None else iter(pages)
        self._pages: list[list[int]] = [[] for _ in range(num_requests)]

    def step(self, old_lens: Sequence[int], new_lens: Sequence[int]) -> PagedStep:
        """Room for new_lens[b] tokens behind the old_lens[b] that request b has.

        Raises:
            ValueError: not one length per request, or ``pages`` has no page left.
        """
        if not len(old_lens) == len(new_lens) == len(self._pages):
            raise ValueError(
                f"new_lens: must hold one length for each of the {len(self._pages)} requests, got "
                f"{len(old_lens)} old and {len(new_lens)} new ones"
            )
        size = self.page_size
        ends = [old + new for old, new in zip(old_lens, new_lens, strict=True)]
        used = [-(-end // size) for end in ends]
        slots = [torch.empty(0, dtype=torch.int64)]
        for request, (old, end, count) in enumerate(zip(old_lens, ends, used, strict=True)):
            self._take(request, count)
            token = torch.arange(old, end)
            held = torch.tensor(self._pages[request], dtype=torch.int64)
            slots.append(held[token // size] * size + token % size)
        table = zip(self._pages, used, strict=True)
        qo_indptr = indptr_of(new_lens)
        return PagedStep(
            old_lens=tuple(old_lens),
            new_lens=tuple(new_lens),
            slots=torch.cat(slots),
            batch_indices=request_rows(qo_indptr.tolist()),
            qo_indptr=qo_indptr,
            kv_indptr=indptr_of(used),
            kv_indices=torch.tensor([p for held, n in table for p in held[:n]], dtype=torch.int32),
            last_page_len=torch.tensor(
                [(end - 1) % size + 1 if end else 0 for end in ends], dtype=torch.int32
            ),
        )

    def _take(self, request: int, count: int) -> None:
        held = self._pages[request]
        while len(held) < count:
            page = next(self._source, None)
            if page is None:
                raise ValueError(
                    f"pages: request {request} needs page {len(held) + 1} of {count}, none is left "
                    f"after {self.num_taken}"
                )
            held.append(int(page))
            self.num_taken += 1


def indptr_of(lens: Sequence[int]) -> torch.Tensor:
    """int32 [B+1] offsets of parts of these lengths."""
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
