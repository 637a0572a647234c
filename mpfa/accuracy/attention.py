# SPDX-License-Identifier: Apache-2.0
"""How the model's attention is replaced, and the runners that stand in for it.

A runner owns all K and V: the model runs without a cache of its own. Tokens of several requests are
given to the model as one ragged row with explicit positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

import mpfa
from mpfa.accuracy.models import Geometry, LanguageModel
from mpfa.accuracy.rows import RowSpec
from mpfa.page_table import PagedStep, RequestPages, indptr_of
from mpfa.reference.replay import KVOperands, QueryOperands, Scheme, attend_request
from mpfa.wrapper import REFERENCE_NUM_SM

ATTENTION_NAME = "mpfa_accuracy"
# Arguments by which models ask their attention function for something that is not measured here.
_REFUSED = ("s_aux", "position_bias", "head_mask")


@dataclass(frozen=True)
class LayerOptions:
    """What a layer's attention is besides causal; as in plan()."""

    sm_scale: float | None = None
    window_left: int = -1
    logits_soft_cap: float = 0.0


PLAIN = LayerOptions()
FP32 = Scheme(kv_block=128, p_mode="none")


class AttentionRunner(Protocol):
    """Attention of every layer over requests that grow."""

    kv_lens: list[int]

    def begin(self, new_lens: list[int]) -> None:
        """Announce a step of new_lens[b] tokens for request b; attend() follows, once per layer."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: LayerOptions = PLAIN,
    ) -> torch.Tensor:
        """Causal attention of this step's tokens; q bf16 [T, Hq, D], k and v bf16 [T, Hkv, D]."""


def forward(
    language: LanguageModel,
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
    if language.model.config._attn_implementation != ATTENTION_NAME:
        language.model.set_attn_implementation(ATTENTION_NAME)
    with torch.inference_mode():
        hidden = language.model.get_decoder()(
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
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: [1, H, T, D] in, [1, T, Hq, D] out."""
    if attention_mask is not None:
        raise ValueError("attention_mask: the runners take none; pass whole requests")
    for name in _REFUSED:
        if others.get(name) is not None:
            raise ValueError(f"{name}: attention with it is not measured")
    # transformers counts the query's own position, window_left does not.
    window_left = -1 if sliding_window is None else sliding_window - 1
    options = LayerOptions(scaling, window_left, softcap or 0.0)
    q, k, v = (x[0].transpose(0, 1).to(torch.bfloat16).contiguous() for x in (query, key, value))
    out = mpfa_runner.attend(module.layer_idx, q, k, v, options)
    if mpfa_on_layer is not None:
        mpfa_on_layer()
    return out[None].to(query.dtype), None


class OneStepRunner:
    """What the runners share that take one request in one step."""

    def __init__(self) -> None:
        self.kv_lens = [0]

    def begin(self, new_lens: list[int]) -> None:
        if self.kv_lens != [0] or len(new_lens) != 1:
            raise ValueError(f"{type(self).__name__}: takes one request in one step")
        self.kv_lens = list(new_lens)


class CollectingRunner(OneStepRunner):
    """Plain fp32 attention over one request in one step; keeps q, k, v of chosen layers."""

    def __init__(self, layers: range | list[int]) -> None:
        super().__init__()
        self.collected: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._layers = frozenset(layers)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: LayerOptions = PLAIN,
    ) -> torch.Tensor:
        if layer in self._layers:
            self.collected[layer] = (q, k, v)
        if options.logits_soft_cap:
            operands = QueryOperands(q.float()), KVOperands(k.float(), v.float())
            return attend_request(*operands, causal=True, scheme=FP32, **vars(options))[0]
        heads_first = (x.float().transpose(0, 1)[None] for x in (q, k, v))
        is_long = 0 <= options.window_left < len(q) - 1
        out = F.scaled_dot_product_attention(
            *heads_first,
            attn_mask=_window_mask(len(q), options.window_left) if is_long else None,
            is_causal=not is_long,
            scale=options.sm_scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


def _window_mask(tokens: int, window_left: int) -> torch.Tensor:
    """bool [T, T], True where row i sees key j: i - window_left <= j <= i."""
    row, key = torch.arange(tokens)[:, None], torch.arange(tokens)
    return (key <= row) & (key >= row - window_left)


class CapturingRunner:
    """Passes everything to another runner and keeps the first step's q, k, v of chosen layers."""

    def __init__(self, inner: AttentionRunner, layers: range | list[int]) -> None:
        self.captured: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.options: dict[int, LayerOptions] = {}
        self._inner, self._layers = inner, frozenset(layers)

    @property
    def kv_lens(self) -> list[int]:
        return self._inner.kv_lens

    def begin(self, new_lens: list[int]) -> None:
        self._inner.begin(new_lens)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: LayerOptions = PLAIN,
    ) -> torch.Tensor:
        if layer in self._layers and layer not in self.captured:
            self.captured[layer], self.options[layer] = (q, k, v), options
        return self._inner.attend(layer, q, k, v, options)


class PagedRunner:
    """The layers' attention through mpfa: one PagedKVCache per layer, one page table for all.

    Tokens are appended first and then attended to, as in a server. A step of one token per request
    goes through BatchDecodeWrapper, any other through BatchPrefillWrapper; each is planned once per
    step and kind of layer and run once per layer.

    Args:
        row: format, compensation and where its statistics come from. Means of the requests' own
            tokens ("request", "first") are those of the first step and then frozen.
        capacity: most tokens each request will hold, one entry per request.
        layers: layer numbers that will be attended to.
        stats: statistics per layer where the row needs static means or channels.
        seed: pages are handed out in a shuffled order, so that no two neighbours need to touch.
    """

    def __init__(
        self,
        geometry: Geometry,
        row: RowSpec,
        capacity: list[int],
        *,
        layers: range | list[int] | None = None,
        stats: dict[int, mpfa.SmoothingStats] | None = None,
        page_size: int = 128,
        seed: int = 0,
    ) -> None:
        self.config = row.cache_config(geometry, page_size)
        self.kv_lens = [0] * len(capacity)
        self._row = row
        self._given = stats or {}
        count = sum(-(-n // page_size) for n in capacity)
        shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        self._pages = RequestPages(len(capacity), page_size, iter(shuffled.tolist()))
        layers = range(geometry.num_layers) if layers is None else layers
        static = row.stats == "static"
        self._stats = {layer: self._given[layer] for layer in layers} if static else {}
        self.caches = {
            layer: mpfa.PagedKVCache.allocate(
                self.config, count, torch.device("cpu"), stats=self._stats.get(layer)
            )
            for layer in layers
        }
        self._capacity = capacity
        self._plan_arguments = {
            "num_qo_heads": geometry.num_qo_heads,
            "num_kv_heads": geometry.num_kv_heads,
            "head_dim": geometry.head_dim,
            "page_size": page_size,
            "config": self.config,
        }
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._planned: dict[LayerOptions, object] = {}

    def begin(self, new_lens: list[int]) -> None:
        ends = [old + new for old, new in zip(self.kv_lens, new_lens, strict=True)]
        for request, (end, most) in enumerate(zip(ends, self._capacity, strict=True)):
            if end > most:
                raise ValueError(
                    f"new_lens: request {request} grows to {end} tokens, room is {most}"
                )
        self._step = self._pages.step(self.kv_lens, new_lens)
        self._planned = {}
        self.kv_lens = ends

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: LayerOptions = PLAIN,
    ) -> torch.Tensor:
        cache, step = self.caches[layer], self._step
        if self._row.takes_own_means and layer not in self._stats:
            self._stats[layer] = own_means(self._row, q, k, step, self._given.get(layer))
        stats = self._stats.get(layer)
        quantized = mpfa.append_paged_kv_cache(
            k,
            v,
            cache,
            step.slots,
            stats=stats,
            batch_indices=step.batch_indices if self._row.takes_own_means else None,
            q=None if self.config.format == "bf16" else q,
        )
        wrapper = self._wrapper(options)
        return wrapper.run(q if quantized is None else quantized, cache, stats=stats)

    def _wrapper(self, options: LayerOptions) -> mpfa.BatchPrefillWrapper | mpfa.BatchDecodeWrapper:
        """A wrapper planned for this step and this kind of layer."""
        if options in self._planned:
            return self._planned[options]
        step = self._step
        table = (step.kv_indptr, step.kv_indices, step.last_page_len)
        arguments = {**self._plan_arguments, **vars(options)}
        if step.is_decode:
            kind, positional = mpfa.BatchDecodeWrapper, table
        else:
            kind, positional = mpfa.BatchPrefillWrapper, (step.qo_indptr, *table)
            arguments["causal"] = True
        size = mpfa.workspace_size(*positional, num_sm=REFERENCE_NUM_SM, **arguments)
        if self._workspace.numel() < size:
            self._workspace = torch.empty(size, dtype=torch.uint8)
        # Wrappers of one runner never run at the same time, so they share a workspace.
        wrapper = kind(self._workspace)
        wrapper.plan(*positional, **arguments)
        self._planned[options] = wrapper
        return wrapper


def own_means(
    row: RowSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    step: PagedStep,
    static: mpfa.SmoothingStats | None,
) -> mpfa.SmoothingStats:
    """Means over each request's tokens of this step, or over the first ``row.first_tokens`` of them."""
    index = None if static is None else static.channel_index
    if not row.first_tokens:
        return mpfa.SmoothingStats.from_tensors(q, k, step.qo_indptr, channel_index=index)
    begins = step.qo_indptr[:-1].tolist()
    lens = [min(n, row.first_tokens) for n in step.new_lens]
    spans = [torch.arange(b, b + n) for b, n in zip(begins, lens, strict=True)]
    kept = torch.cat(spans)
    return mpfa.SmoothingStats.from_tensors(q[kept], k[kept], indptr_of(lens), channel_index=index)
