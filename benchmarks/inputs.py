# SPDX-License-Identifier: Apache-2.0
"""Operands of the attention benchmarks: Q, K, V with channel bias, page tables, caches, truth."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from benchmarks.harness import Check, relative_l2
from mpfa.append import append_paged_kv_cache
from mpfa.cache import PagedKVCache
from mpfa.config import KVCacheConfig
from mpfa.reference.cache_write import gather_mxfp8, gather_qk4pv8
from mpfa.stats import SmoothingStats

HEAD_DIM = 128
KV_HEADS = 8
CHANNELS = {"none": 0, "mean": 0, "channels": 16, "mean+channels": 15}
# The "direct" kernel of the paper is "none"; it is in every table.
MODES = tuple(CHANNELS)
# The one mode of SM120, whose kernels read mxfp8 caches.
MXFP8 = "mxfp8"
OUTLIERS = 8
# Tokens appended at a time; bounds the temporary memory.
APPEND_TOKENS = 1 << 18


@dataclass(frozen=True)
class Shape:
    """A batch of requests of one length. Prefill: ``context`` query tokens each, causal."""

    batch: int
    context: int
    num_qo_heads: int
    num_kv_heads: int = KV_HEADS

    @property
    def group(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def name(self) -> str:
        length = f"{self.context >> 10}K" if self.context % 1024 == 0 else str(self.context)
        return f"{self.batch} x {length}, GQA {self.num_qo_heads}:{self.num_kv_heads}"


@dataclass
class Tensors:
    """q [B, Hq, D] (decode: the last token of each request), k and v [B, L, Hkv, D], bf16."""

    shape: Shape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    stats: dict[str, SmoothingStats | None]


def make_tensors(shape: Shape, device: torch.device, seed: int = 0) -> Tensors:
    """Normal values around a mean per head and channel, so that centring has something to remove."""
    random = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=random, device=device, dtype=torch.bfloat16)

    hkv, d = shape.num_kv_heads, HEAD_DIM
    q_mean, k_mean = (normal(h, d).float() for h in (shape.num_qo_heads, hkv))
    # Paper figure 4: a few channels stand far above the others in all tokens of a head.
    k_mean[:, :OUTLIERS] *= 4.0
    q_mean.view(hkv, -1, d)[:, :, :OUTLIERS] *= 2.0
    q = (normal(shape.batch, shape.num_qo_heads, d).float() + q_mean).bfloat16()
    k = normal(shape.batch, shape.context, hkv, d)
    # why not over the batch at once: an fp32 copy of the largest K would take tens of GB.
    for row in k:
        row += k_mean.bfloat16()
    v = normal(shape.batch, shape.context, hkv, d)
    order = k_mean.abs().argsort(dim=-1, descending=True)
    stats: dict[str, SmoothingStats | None] = {}
    for mode, c in CHANNELS.items():
        means = (q_mean, k_mean) if "mean" in mode else (None, None)
        index = order[:, :c].sort(dim=-1).values.int().contiguous() if c else None
        stats[mode] = None if mode == "none" else SmoothingStats(*means, index)
    return Tensors(shape, q, k, v, stats)


@dataclass
class PageTable:
    """CSR page table with the pages of all requests in a random order."""

    page_size: int
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor

    @property
    def num_pages(self) -> int:
        return self.indices.numel()

    def pages_of(self, request: int) -> torch.Tensor:
        count = self.num_pages // (self.indptr.numel() - 1)
        return self.indices[request * count : (request + 1) * count]

    def slots(self) -> torch.Tensor:
        """int32 [tokens]: the slot of every token, requests in order."""
        inside = torch.arange(self.page_size, device=self.indices.device, dtype=torch.int32)
        return (self.indices[:, None] * self.page_size + inside).flatten()


def make_table(shape: Shape, page_size: int, device: torch.device) -> PageTable:
    if shape.context % page_size:
        raise ValueError(
            f"context: must be a multiple of page_size={page_size}, got {shape.context}"
        )
    per_request = shape.context // page_size
    pages = shape.batch * per_request
    random = torch.Generator().manual_seed(1)
    indptr = torch.arange(shape.batch + 1, dtype=torch.int32) * per_request
    indices = torch.randperm(pages, generator=random).int()
    last = torch.full((shape.batch,), page_size, dtype=torch.int32)
    return PageTable(page_size, indptr.to(device), indices.to(device), last.to(device))


def paged(x: torch.Tensor, table: PageTable) -> torch.Tensor:
    """[B, L, H, D] -> pages [P, H, ps, D] in the order of the table."""
    b, length, h, d = x.shape
    pages = x.reshape(b * length // table.page_size, table.page_size, h, d).transpose(1, 2)
    out = torch.empty(pages.shape, dtype=x.dtype, device=x.device)
    out[table.indices.long()] = pages
    return out


def config_of(shape: Shape, page_size: int, mode: str) -> KVCacheConfig:
    if mode == MXFP8:
        return KVCacheConfig(MXFP8, shape.num_kv_heads, HEAD_DIM, page_size, shape.num_qo_heads)
    return KVCacheConfig(
        "qk4pv8", shape.num_kv_heads, HEAD_DIM, page_size, shape.num_qo_heads, mode, CHANNELS[mode]
    )


def fill_cache(
    k: torch.Tensor, v: torch.Tensor, config: KVCacheConfig, table: PageTable,
    stats: SmoothingStats | None,
) -> PagedKVCache:  # fmt: skip
    """A cache that holds k and v [B, L, Hkv, D]."""
    cache = PagedKVCache.allocate(config, table.num_pages, k.device, stats=stats)
    k, v, slots = k.flatten(0, 1), v.flatten(0, 1), table.slots()
    for begin in range(0, slots.numel(), APPEND_TOKENS):
        part = slice(begin, begin + APPEND_TOKENS)
        append_paged_kv_cache(k[part], v[part], cache, slots[part])
    return cache


def attention64(
    scores: torch.Tensor, v: torch.Tensor, sm_scale: float = 1.0 / math.sqrt(HEAD_DIM)
) -> torch.Tensor:
    """softmax(sm_scale * scores) v in float64: scores [G, L], v [L, D] -> [G, D]."""
    return torch.softmax(scores.double() * sm_scale, dim=-1) @ v.double()


def exact_head(tensors: Tensors, request: int, head: int) -> torch.Tensor:
    """float64 attention of one request and KV head from unquantised values: [G, D]."""
    g = tensors.shape.group
    q = tensors.q[request, head * g : (head + 1) * g].double()
    return attention64(q @ tensors.k[request, :, head].double().T, tensors.v[request, :, head])


def cached_head(
    cache: PagedKVCache, table: PageTable, request: int, head: int, q: torch.Tensor,
    q_channels: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """float64 attention of one request and KV head over what a cache holds: [G, D].

    Args:
        q: [G, D], centred, without its outlier channels, as the product with the codes of K sees it.
        q_channels: [G, c], what meets the cache's outlier channels of K.
    """

    def one(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t[:, head : head + 1]

    pages = table.pages_of(request)
    length = pages.numel() * table.page_size
    if cache.config.format == MXFP8:
        k, v = gather_mxfp8(
            one(cache.k), one(cache.k_scale), one(cache.v), one(cache.v_scale), pages, length
        )
        return attention64(q.double() @ k[:, 0].double().T, v[:, 0])
    k, v, delta, channels = gather_qk4pv8(
        one(cache.k), one(cache.k_scale), one(cache.v), one(cache.aux_delta),
        one(cache.aux_channels), pages, length,
    )  # fmt: skip
    scores = q.double() @ k[:, 0].double().T
    if delta is not None:
        scores += delta.double().T
    if channels is not None:
        scores += q_channels.double() @ channels[:, 0].double().T
    return attention64(scores, v[:, 0])


def check_slice(
    out: torch.Tensor, truth: torch.Tensor, tensors: Tensors, request: int, head: int, limit: float
) -> Check:
    """Compares out [B, Hq, D] in one request and KV head with truth [G, D] and the original values."""
    g = truth.shape[0]
    got = out[request, head * g : (head + 1) * g]
    original = relative_l2(got, exact_head(tensors, request, head))
    return Check(relative_l2(got, truth), limit, "float64 of its cache", original)
