# SPDX-License-Identifier: Apache-2.0
"""Builders of the attention tests: distinct data, poisoned paged caches, dense truth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

import mpfa

LOG2E = math.log2(math.e)
POISON_BYTE = 0xFF  # NaN as e4m3, ue8m0 and bf16; code -6 as e2m1 and NaN as its e4m3 scale
FORMATS = [
    ("bf16", "none", 0),
    ("qk4pv8", "none", 0),
    ("qk4pv8", "mean", 0),
    ("qk4pv8", "channels", 16),
    ("qk4pv8", "mean+channels", 15),
    ("mxfp8", "none", 0),
]
FORMAT_IDS = [f"{f}-{c}" for f, c, _ in FORMATS]


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def offsets(lengths: Sequence[int]) -> torch.Tensor:
    """int32 [B+1] from lengths."""
    total, result = 0, [0]
    for n in lengths:
        total += n
        result.append(total)
    return int32(result)


@dataclass
class Batch:
    """One list entry per request; q [Lq, Hq, D], k and v [Lk, Hkv, D]."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    shape: tuple[int, int, int]  # Hq, Hkv, D: known without any request
    dtype: torch.dtype = torch.bfloat16

    @property
    def size(self) -> int:
        return len(self.q)

    @property
    def qo_lens(self) -> list[int]:
        return [t.shape[0] for t in self.q]

    @property
    def kv_lens(self) -> list[int]:
        return [t.shape[0] for t in self.k]

    @property
    def heads(self) -> dict[str, int]:
        return dict(zip(("num_qo_heads", "num_kv_heads", "head_dim"), self.shape, strict=True))

    @property
    def query(self) -> torch.Tensor:
        """All queries, [nnz_qo, Hq, D]."""
        return torch.cat([torch.empty(0, self.shape[0], self.shape[2], dtype=self.dtype), *self.q])

    @property
    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, each [nnz_kv, Hkv, D]."""
        none = torch.empty(0, *self.shape[1:], dtype=self.dtype)
        return torch.cat([none, *self.k]), torch.cat([none, *self.v])

    def select(self, requests: Sequence[int]) -> Batch:
        parts = ([t[i] for i in requests] for t in (self.q, self.k, self.v))
        return Batch(*parts, self.shape, self.dtype)

    def kv_as(self, dtype: torch.dtype) -> Batch:
        """The batch as a cache of ``dtype`` holds it."""
        rounded = ([t.to(dtype) for t in side] for side in (self.k, self.v))
        return Batch(self.q, *rounded, self.shape, self.dtype)


def make_batch(
    qo_lens: Sequence[int],
    kv_lens: Sequence[int],
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    k_bias: float = 0.0,
    q_bias: float = 0.0,
    outliers: float = 0.0,
    scale: float = 1.0,
) -> Batch:
    """Normal data, different in every request and head.

    k_bias, q_bias: rms of a constant per (head, channel), the same in all requests (what centring
    removes). outliers: factor on four channels of each KV head, spread over the NVFP4 blocks.
    """
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen)

    k_mean = normal(num_kv_heads, head_dim) * k_bias
    q_mean = normal(num_qo_heads, head_dim) * q_bias
    gain = torch.ones(num_kv_heads, head_dim)
    if outliers:
        for h in range(num_kv_heads):
            gain[h, torch.randperm(head_dim, generator=gen)[:4]] = outliers
    batch = Batch([], [], [], (num_qo_heads, num_kv_heads, head_dim), dtype)
    for lq, lk in zip(qo_lens, kv_lens, strict=True):
        batch.q.append((normal(lq, num_qo_heads, head_dim) * scale + q_mean).to(dtype))
        batch.k.append((normal(lk, num_kv_heads, head_dim) * gain * scale + k_mean).to(dtype))
        batch.v.append(normal(lk, num_kv_heads, head_dim).to(dtype))
    return batch


def static_stats(batch: Batch, compensation: str, channels: int) -> mpfa.SmoothingStats | None:
    if compensation == "none":
        return None
    return mpfa.calibrate(
        [(q, k) for q, k in zip(batch.q, batch.k, strict=True)],
        channels=channels,
        center="mean" in compensation,
    )


def config_for(
    batch: Batch, format: str, compensation: str = "none", channels: int = 0, page_size: int = 128
) -> mpfa.KVCacheConfig:
    return mpfa.KVCacheConfig(
        format=format,
        page_size=page_size,
        compensation=compensation,
        channels=channels,
        **batch.heads,
    )


@dataclass
class Paged:
    """A filled cache with its page table; unused pages and bytes hold poison."""

    cache: mpfa.PagedKVCache
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    slots: list[torch.Tensor] = field(default_factory=list)

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.indptr, self.indices, self.last_page_len


def poison(cache: mpfa.PagedKVCache) -> mpfa.PagedKVCache:
    for tensor in cache.tensors.values():
        tensor.view(torch.uint8).fill_(POISON_BYTE)
    return cache


def page_table(
    kv_lens: Sequence[int], page_size: int, num_pages: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Shuffled pages: (indptr, indices, last_page_len, slots of every request)."""
    counts = [-(-n // page_size) for n in kv_lens]
    gen = torch.Generator().manual_seed(seed)
    pages = torch.randperm(num_pages, generator=gen)[: sum(counts)].to(torch.int32)
    indptr = offsets(counts)
    # A request without pages may carry any last_page_len; 0 and garbage are both legal there.
    last = int32([(n - 1) % page_size + 1 if n else 0 for n in kv_lens])
    slots = []
    for b, n in enumerate(kv_lens):
        position = torch.arange(n)
        mine = pages[indptr[b] : indptr[b + 1]].long()
        slots.append(mine[position // page_size] * page_size + position % page_size)
    return indptr, pages, last, slots


def paged(
    batch: Batch,
    config: mpfa.KVCacheConfig,
    *,
    stats: mpfa.SmoothingStats | None = None,
    seed: int = 0,
    spare_pages: int = 3,
    bind: bool = True,
) -> Paged:
    """Append every request of the batch to a poisoned cache over shuffled pages."""
    ps = config.page_size
    total = sum(-(-n // ps) for n in batch.kv_lens) + spare_pages
    indptr, pages, last, slots = page_table(batch.kv_lens, ps, total, seed)
    static = stats is not None and stats.is_static
    cache = mpfa.PagedKVCache.allocate(config, total, "cpu", stats if static and bind else None)
    poison(cache)
    for b in range(batch.size):
        rows = None
        if stats is not None and not static:
            rows = torch.full((batch.kv_lens[b],), b, dtype=torch.int32)
        mpfa.append_paged_kv_cache(
            batch.k[b],
            batch.v[b],
            cache,
            slots[b],
            stats=None if stats is None or (static and bind) else stats,
            batch_indices=rows,
        )
    return Paged(cache, indptr, pages, last, slots)


def workspace_for(*plan_args: torch.Tensor | None, **options: object) -> torch.Tensor:
    """A workspace of exactly the size that workspace_size() tells, full of poison."""
    size = mpfa.workspace_size(*plan_args, num_sm=148, **options)
    return torch.full((size,), POISON_BYTE, dtype=torch.uint8)


def run_prefill(
    batch: Batch,
    kv: object,
    *,
    table: tuple[torch.Tensor, ...] | None = None,
    q: object = None,
    run: dict[str, object] | None = None,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of one plan() and run(); ragged unless table is given."""
    args = (offsets(batch.qo_lens), *(table or (offsets(batch.kv_lens),)))
    options = {**batch.heads, **options}
    wrapper = mpfa.BatchPrefillWrapper(workspace_for(*args, **options))
    wrapper.plan(*args, **options)
    query = batch.query if q is None else q
    return wrapper.run(query, kv, return_lse=True, **(run or {}))


def run_decode(
    batch: Batch,
    pages: Paged,
    *,
    q: object = None,
    run: dict[str, object] | None = None,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    options = {**batch.heads, "page_size": pages.cache.config.page_size, **options}
    wrapper = mpfa.BatchDecodeWrapper(workspace_for(*pages.table, **options))
    wrapper.plan(*pages.table, **options)
    query = batch.query if q is None else q
    return wrapper.run(query, pages.cache, return_lse=True, **(run or {}))


def visible(lq: int, lk: int, causal: bool, window_left: int, device: str = "cpu") -> torch.Tensor:
    """bool [Lq, Lk], written as the definition: position of query i is i + Lk - Lq."""
    mask = torch.zeros(lq, lk, dtype=torch.bool, device=device)
    for i in range(lq):
        position = i + lk - lq
        for j in (0, lk - 1) if lk and not causal and window_left < 0 else range(lk):
            ok = (not causal or j <= position) and (window_left < 0 or j >= position - window_left)
            mask[i, j] = ok
        if lk and not causal and window_left < 0:
            mask[i] = True
    return mask


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [Lq, Hq, D], lse [Lq, Hq] natural log): torch SDPA with an explicit mask.

    Independent of mpfa.reference. A sink is a zero key with value 0 whose mask entry is the sink;
    under a soft cap, which SDPA has not, softmax and matmul are written out.
    """
    (lq, hq, d), (lk, hkv, _) = q.shape, k.shape
    scale = d**-0.5 if sm_scale is None else sm_scale
    mask = visible(lq, lk, causal, window_left)
    qh = q.to(dtype).permute(1, 0, 2)
    kh = k.to(dtype).permute(1, 0, 2).repeat_interleave(hq // hkv, dim=0)
    vh = v.to(dtype).permute(1, 0, 2).repeat_interleave(hq // hkv, dim=0)
    bias = torch.zeros(hq, lq, lk, dtype=dtype).masked_fill(~mask, -math.inf)
    logits = torch.einsum("hid,hjd->hij", qh, kh) * scale
    if logits_soft_cap > 0:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    logits = logits + bias
    if sinks is not None:
        column = sinks.to(dtype)[:, None, None].expand(hq, lq, 1)
        kh = torch.cat([kh, torch.zeros(hq, 1, d, dtype=dtype)], dim=1)
        vh = torch.cat([vh, torch.zeros(hq, 1, d, dtype=dtype)], dim=1)
        bias = torch.cat([bias, column], dim=2)
        logits = torch.cat([logits, column], dim=2)
    if logits.shape[2] == 0:
        return torch.zeros(lq, hq, d, dtype=dtype), torch.full((lq, hq), -math.inf, dtype=dtype)
    if logits_soft_cap > 0:
        out = torch.softmax(logits, dim=-1) @ vh
    else:
        out = torch.nn.functional.scaled_dot_product_attention(
            qh[None], kh[None], vh[None], attn_mask=bias[None], scale=scale
        )[0]
    empty = logits.amax(dim=-1) == -math.inf
    out = torch.where(empty[..., None], 0.0, out)
    lse = torch.logsumexp(logits, dim=-1)
    return out.permute(1, 0, 2), lse.permute(1, 0)


def dense_batch(batch: Batch, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    hq, _, d = batch.shape
    outs, lses = [torch.empty(0, hq, d)], [torch.empty(0, hq)]
    for q, k, v in zip(batch.q, batch.k, batch.v, strict=True):
        out, lse = dense_attention(q, k, v, **options)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def rel_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    norm = want.double().norm().item()
    diff = (got.double() - want.double()).norm().item()
    return diff if norm == 0.0 else diff / norm


def head_rel_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest rel L2 over the heads of [rows, H, D]."""
    return max(rel_l2(got[:, h], want[:, h]) for h in range(want.shape[1]))


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    a, b = got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
    if not torch.equal(a, b):
        diff = (got.double() - want.double()).abs()
        count = int((got != want).sum())
        raise AssertionError(f"{count} of {got.numel()} values differ, by up to {diff.max()}")


def assert_lse_close(got: torch.Tensor, want: torch.Tensor, atol: float) -> None:
    """-inf must be in the same places; elsewhere the difference is bounded."""
    assert not got.isnan().any(), "lse holds NaN"
    hole = want == -math.inf
    assert torch.equal(got == -math.inf, hole), "lse: other rows without keys"
    if (~hole).any():
        worst = (got.double() - want.double())[~hole].abs().max().item()
        assert worst <= atol, f"lse off by {worst:.3g}, allowed {atol:.3g}"
