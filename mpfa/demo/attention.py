# SPDX-License-Identifier: Apache-2.0
"""How the model's attention is replaced, and the runners that stand in for it.

A runner owns all K and V: the model runs without a cache of its own. Tokens of several requests are
given to the model as one ragged row with explicit positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

import mpfa
from mpfa.demo.model import DemoModel
from mpfa.demo.rows import RowSpec

ATTENTION_NAME = "mpfa_demo"
# Plans on the CPU are made for a B200's 148 multiprocessors; results do not depend on it.
NUM_SM = 148


class AttentionRunner(Protocol):
    """Attention of every layer over requests that grow."""

    kv_lens: list[int]

    def begin(self, new_lens: list[int]) -> None:
        """Announce a step of new_lens[b] tokens for request b; attend() follows, once per layer."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention of this step's tokens; q bf16 [T, Hq, D], k and v bf16 [T, Hkv, D]."""


def forward(
    demo: DemoModel,
    runner: AttentionRunner,
    new_tokens: list[torch.Tensor],
    on_layer: Callable[[], None] | None = None,
) -> list[torch.Tensor]:
    """Run the model on each request's next tokens with ``runner`` as its attention.

    Args:
        new_tokens: int64 [n_b] per request.
        on_layer: called after each attention layer.

    Returns:
        fp32 [n_b, hidden] per request: final hidden states, before the output projection.
    """
    _register()
    lens = [t.numel() for t in new_tokens]
    starts = list(runner.kv_lens)
    runner.begin(lens)
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lens, strict=True)])
    decoder = demo.model.model
    if demo.model.config._attn_implementation != ATTENTION_NAME:
        demo.model.set_attn_implementation(ATTENTION_NAME)
    with torch.inference_mode():
        hidden = decoder(
            input_ids=torch.cat(new_tokens)[None],
            position_ids=positions[None],
            use_cache=False,
            mpfa_runner=runner,
            mpfa_on_layer=on_layer,
        ).last_hidden_state[0]
    return list(hidden.split(lens))


def _register() -> None:
    from transformers import AttentionInterface

    # why: no mask function is registered under this name, so layers get no mask; the runners apply
    # causality per request themselves, which a mask for one row could not express.
    AttentionInterface.register(ATTENTION_NAME, _attention)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    mpfa_runner: AttentionRunner,
    mpfa_on_layer: Callable[[], None] | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: [1, H, T, D] in, [1, T, Hq, D] out."""
    if attention_mask is not None:
        raise ValueError("attention_mask: the demo's runners take none; pass whole requests")
    q, k, v = (x[0].transpose(0, 1).to(torch.bfloat16).contiguous() for x in (query, key, value))
    out = mpfa_runner.attend(module.layer_idx, q, k, v)
    if mpfa_on_layer is not None:
        mpfa_on_layer()
    return out[None].to(query.dtype), None


class CollectingRunner:
    """Plain fp32 attention over one request in one step; keeps q, k, v of chosen layers."""

    def __init__(self, layers: range | list[int]) -> None:
        self.kv_lens = [0]
        self.collected: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._layers = frozenset(layers)

    def begin(self, new_lens: list[int]) -> None:
        if self.kv_lens != [0] or len(new_lens) != 1:
            raise ValueError("CollectingRunner: takes one request in one step")
        self.kv_lens = list(new_lens)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if layer in self._layers:
            self.collected[layer] = (q, k, v)
        heads_first = (x.float().transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)


class CapturingRunner:
    """Passes everything to another runner and keeps the first step's q, k, v of chosen layers."""

    def __init__(self, inner: AttentionRunner, layers: list[int]) -> None:
        self.captured: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._inner, self._layers = inner, frozenset(layers)

    @property
    def kv_lens(self) -> list[int]:
        return self._inner.kv_lens

    def begin(self, new_lens: list[int]) -> None:
        self._inner.begin(new_lens)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if layer in self._layers and layer not in self.captured:
            self.captured[layer] = (q, k, v)
        return self._inner.attend(layer, q, k, v)


class PagedRunner:
    """The layers' attention through mpfa: one PagedKVCache per layer, one page table for all.

    Tokens are appended first and then attended to, as in a server. A step of one token per request
    goes through BatchDecodeWrapper, any other through BatchPrefillWrapper; each is planned once per
    step and run once per layer.

    Args:
        row: format and compensation.
        capacity: most tokens each request will hold, one entry per request.
        layers: layer numbers that will be attended to.
        stats: static statistics per layer where row.stats is "static".
        seed: pages are handed out in a shuffled order, so that no two neighbours need to touch.
    """

    def __init__(
        self,
        demo: DemoModel,
        row: RowSpec,
        capacity: list[int],
        *,
        layers: range | list[int] | None = None,
        stats: dict[int, mpfa.SmoothingStats] | None = None,
        page_size: int = 128,
        seed: int = 0,
    ) -> None:
        self.config = mpfa.KVCacheConfig(
            format=row.format,
            num_kv_heads=demo.num_kv_heads,
            head_dim=demo.head_dim,
            page_size=page_size,
            num_qo_heads=demo.num_qo_heads,
            compensation=row.compensation,
            channels=row.channels,
            four_over_six=row.four_over_six,
        )
        self.kv_lens = [0] * len(capacity)
        self._row = row
        counts = [-(-n // page_size) for n in capacity]
        shuffled = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed))
        self._pages = list(shuffled.to(torch.int32).split(counts))
        layers = range(demo.num_layers) if layers is None else layers
        static = row.stats == "static"
        self._stats = {layer: stats[layer] for layer in layers} if static else {}
        self.caches = {
            layer: mpfa.PagedKVCache.allocate(
                self.config, sum(counts), torch.device("cpu"), stats=self._stats.get(layer)
            )
            for layer in layers
        }
        self._capacity = capacity
        self._plan_arguments = {
            "num_qo_heads": demo.num_qo_heads,
            "num_kv_heads": demo.num_kv_heads,
            "head_dim": demo.head_dim,
            "page_size": page_size,
            "config": self.config,
        }
        table = self._page_table(capacity)
        sizes = (
            mpfa.workspace_size(
                _indptr(capacity), *table, causal=True, num_sm=NUM_SM, **self._plan_arguments
            ),
            mpfa.workspace_size(*table, num_sm=NUM_SM, **self._plan_arguments),
        )
        # The two wrappers never run at the same time, so they share one workspace.
        workspace = torch.empty(max(sizes), dtype=torch.uint8)
        self._prefill = mpfa.BatchPrefillWrapper(workspace)
        self._decode = mpfa.BatchDecodeWrapper(workspace)

    def _page_table(self, lens: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """FlashInfer's CSR form: indptr in pages, page ids, tokens in each last page."""
        ps = self.config.page_size
        used = [-(-n // ps) for n in lens]
        return (
            _indptr(used),
            torch.cat([pages[:n] for pages, n in zip(self._pages, used, strict=True)]),
            torch.tensor([(n - 1) % ps + 1 for n in lens], dtype=torch.int32),
        )

    def begin(self, new_lens: list[int]) -> None:
        ps = self.config.page_size
        ends = [old + new for old, new in zip(self.kv_lens, new_lens, strict=True)]
        for request, (end, most) in enumerate(zip(ends, self._capacity, strict=True)):
            if end > most:
                raise ValueError(
                    f"new_lens: request {request} grows to {end} tokens, room is {most}"
                )
        slots = []
        for pages, old, end in zip(self._pages, self.kv_lens, ends, strict=True):
            token = torch.arange(old, end)
            slots.append(pages[token // ps].long() * ps + token % ps)
        self._slots = torch.cat(slots)
        self._batch_indices = torch.repeat_interleave(
            torch.arange(len(new_lens), dtype=torch.int32), torch.tensor(new_lens)
        )
        self._qo_indptr = _indptr(new_lens)
        table = self._page_table(ends)
        if all(n == 1 for n in new_lens):
            self._decode.plan(*table, **self._plan_arguments)
            self._wrapper = self._decode
        else:
            self._prefill.plan(self._qo_indptr, *table, causal=True, **self._plan_arguments)
            self._wrapper = self._prefill
        self.kv_lens = ends

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache = self.caches[layer]
        if self._row.stats == "request" and layer not in self._stats:
            self._stats[layer] = mpfa.SmoothingStats.from_tensors(q, k, self._qo_indptr)
        stats = self._stats.get(layer)
        quantized = mpfa.append_paged_kv_cache(
            k,
            v,
            cache,
            self._slots,
            stats=stats,
            batch_indices=self._batch_indices if self._row.stats == "request" else None,
            q=None if self.config.format == "bf16" else q,
        )
        return self._wrapper.run(q if quantized is None else quantized, cache, stats=stats)


def _indptr(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
