# SPDX-License-Identifier: Apache-2.0
"""MpfaCache: transformers' Cache over one PagedKVCache per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from mpfa.append import append_paged_kv_cache
from mpfa.cache import PagedKVCache
from mpfa.config import KVCacheConfig
from mpfa.decode import BatchDecodeWrapper
from mpfa.errors import INT32_MAX
from mpfa.integrations.transformers_mask import padding_of
from mpfa.page_table import PagedStep, RequestPages
from mpfa.prefill import BatchPrefillWrapper
from mpfa.stats import SmoothingStats, check_is_stats

_LAYER_TYPES = ("full_attention", "sliding_attention")


class _DeviceStep(NamedTuple):
    """The tensors of a step that its layers read, on their device."""

    rows: torch.Tensor | None
    slots: torch.Tensor
    batch_indices: torch.Tensor
    qo_indptr: torch.Tensor


@dataclass
class _Step:
    """The new tokens of one forward pass, padding removed; the same for all layers."""

    paged: PagedStep
    q_len: int
    rows: torch.Tensor | None  # rows of the [B * q_len] grid that hold tokens; None = all
    masks: list[torch.Tensor | None]  # the mask objects that say so
    _copies: dict[torch.device, _DeviceStep] = field(default_factory=dict)

    def on(self, device: torch.device) -> _DeviceStep:
        if device not in self._copies:
            paged = self.paged
            tensors = (self.rows, paged.slots, paged.batch_indices, paged.qo_indptr)
            self._copies[device] = _DeviceStep(*(t if t is None else t.to(device) for t in tensors))
        return self._copies[device]


class _Workspaces:
    """One workspace per device for all wrappers of a cache, which never run at the same time."""

    def __init__(self) -> None:
        self._tensors: dict[torch.device, torch.Tensor] = {}

    def get(self, device: torch.device, nbytes: int) -> torch.Tensor:
        held = self._tensors.get(device)
        if held is None or held.numel() < nbytes:
            with torch.inference_mode(False):
                held = torch.empty(nbytes * 3 // 2, dtype=torch.uint8, device=device)
            self._tensors[device] = held
        return held


class _GrowingWorkspace:
    """Gives a wrapper the workspace that each plan turns out to need."""

    def __init__(self, workspaces: _Workspaces, device: torch.device, backend: str) -> None:
        self._workspaces = workspaces
        super().__init__(workspaces.get(device, 256), backend=backend)

    def _room_for(self, nbytes: int) -> torch.Tensor:
        return self._workspaces.get(self.device, nbytes)


class _Prefill(_GrowingWorkspace, BatchPrefillWrapper):
    pass


class _Decode(_GrowingWorkspace, BatchDecodeWrapper):
    pass


class MpfaLayer(CacheLayerMixin):
    """One layer of MpfaCache: its pages and how many tokens they hold."""

    is_sliding = False
    is_croppable = False

    def __init__(self, index: int, stats: SmoothingStats | None) -> None:
        super().__init__()
        self.index = index
        self.seen = 0  # tokens of the padded sequence
        self.lens: list[int] = []  # tokens of each request
        self.cache: PagedKVCache | None = None
        self.stats = stats

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.lens = [0] * key_states.shape[0]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("MpfaLayer: tokens are added through MpfaCache.update()")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # why here: the first that a model asks; without a token it fails later in a reshape.
        if query_length < 1:
            raise ValueError(
                f"input_ids: no new token after the {self.seen} that this MpfaCache holds; a prompt "
                "has to go on from them (the whole text so far and more), else reset() the cache"
            )
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.seen, self.lens, self.is_initialized = 0, [], False
        self.cache = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("MpfaCache: beam search is not supported")

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("MpfaCache: tokens cannot be removed (assisted generation)")

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.seen:
            raise NotImplementedError("MpfaCache: a filled cache cannot be repeated")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise NotImplementedError("MpfaCache: requests cannot be selected from a filled cache")

    def offload(self) -> None:
        raise NotImplementedError("MpfaCache: layers cannot be moved to another device")

    prefetch = offload


class MpfaCache(Cache):
    """KV cache of a decoder-only model in one of mpfa's formats.

    Grows as needed. Sliding-window layers keep all tokens and mask them. copy.deepcopy() gives a
    cache of its own that goes on from the same tokens. The cache knows how many tokens it holds, not
    which: generate() leaves out as many at the start of a prompt, whatever they are, so reset() before
    an unrelated one.

    Args:
        model_config: the model's configuration; only full and sliding attention layers.
        format, compensation, channels, four_over_six, page_size: as in KVCacheConfig.
        stats: static SmoothingStats per layer (see calibrate_model). None with compensation "mean":
            each request's means over its first forward pass (paper equation 7), then frozen.
        backend: as in BatchPrefillWrapper.

    Raises:
        ValueError: an encoder-decoder model, a layer type, format or compensation that is not
            supported; stats that are missing or do not fit.
    """

    def __init__(
        self,
        model_config: object,
        format: str = "qk4pv8",
        *,
        compensation: str = "none",
        channels: int = 0,
        four_over_six: bool = False,
        page_size: int = 128,
        stats: Mapping[int, SmoothingStats] | Sequence[SmoothingStats] | None = None,
        backend: str = "auto",
    ) -> None:
        text = model_config.get_text_config(decoder=True)
        num_layers = text.num_hidden_layers
        _check_model(model_config, text)
        heads = text.num_attention_heads
        self.config = KVCacheConfig(
            format=format,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            page_size=page_size,
            num_qo_heads=heads,
            compensation=compensation,
            channels=channels,
            four_over_six=four_over_six,
        )
        if stats is not None and not self.config.needs_stats:
            raise ValueError(f"stats: compensation {compensation!r} takes none")
        if stats is None and self.config.uses_channels:
            raise ValueError(
                f"stats: compensation {compensation!r} needs one SmoothingStats per layer "
                "(mpfa.integrations.transformers.calibrate_model)"
            )
        if stats is not None and len(stats) != num_layers:
            raise ValueError(f"stats: the model has {num_layers} layers, got {len(stats)}")
        if stats is not None:
            _check_stats(stats, self.config)
        self.has_static_stats = stats is not None
        self.backend = backend
        self._pending: MpfaLayer | None = None
        self._pages: RequestPages | None = None
        self._forget_plans()
        super().__init__(
            layers=[
                MpfaLayer(i, stats[i] if self.has_static_stats else None) for i in range(num_layers)
            ]
        )

    @property
    def nbytes(self) -> int:
        """Bytes allocated for K, V, scales and compensation, all layers."""
        return sum(layer.cache.nbytes for layer in self.layers if layer.cache is not None)

    def _forget_plans(self) -> None:
        self._step: _Step | None = None
        self._workspaces = _Workspaces()
        self._wrappers: dict[tuple, tuple[_Prefill | _Decode, _Step]] = {}

    def __getstate__(self) -> dict[str, object]:
        # why: modules and plans belong to the process and to the addresses of one cache.
        state = self.__dict__.copy()
        for name in ("_step", "_workspaces", "_wrappers"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._forget_plans()

    def reset(self) -> None:
        super().reset()
        self._pages = self._step = self._pending = None
        if not self.has_static_stats:
            for layer in self.layers:
                layer.stats = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Only hands the new tokens on: the attention function stores them, because it knows which
        of them are padding."""
        if self._pending is not None:
            raise RuntimeError(
                f"MpfaCache: layer {self._pending.index} did not call attention function 'mpfa'; load "
                'the model with attn_implementation="mpfa" (a model with an attention of its own is '
                "not supported), and reset() the cache"
            )
        layer = self.layers[layer_idx]
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != len(layer.lens):
            raise ValueError(
                f"MpfaCache: made for a batch of {len(layer.lens)}, got {key_states.shape[0]} "
                "sequences"
            )
        # why a new object: the attribute tells the attention function where the keys belong, and a
        # tensor that the model keeps for itself must not carry it.
        key_states = key_states.view_as(key_states)
        key_states.mpfa_layer = (self, layer)
        self._pending = layer
        return key_states, value_states

    def arrived(self, layer: MpfaLayer) -> None:
        """The attention function was called with what update() returned for ``layer``."""
        if self._pending is layer:
            self._pending = None

    def _begin(self, layer: MpfaLayer, q_len: int, mask: torch.Tensor | None) -> _Step:
        """The step that ``layer`` is in; made by the first layer that gets there."""
        step = self._step
        current = (
            step is not None and list(step.paged.old_lens) == layer.lens and step.q_len == q_len
        )
        if current and any(known is mask for known in step.masks):
            return step
        batch, total = len(layer.lens), layer.seen + q_len
        if mask is not None and tuple(mask.shape) != (batch, total):
            raise ValueError(
                f"attention_mask: must be [{batch}, {total}] (batch, tokens so far), got "
                f"{list(mask.shape)}; a model that runs a layer twice in one pass is not supported"
            )
        valid = None if mask is None else padding_of(mask)
        old, new, rows = [layer.seen] * batch, [q_len] * batch, None
        if valid is not None:
            old = valid[:, : layer.seen].sum(1).tolist()
            rows = valid[:, layer.seen :].flatten().nonzero().flatten()
            new = valid[:, layer.seen :].sum(1).tolist()
            rows = None if new == [q_len] * batch else rows
        if old != layer.lens:
            raise ValueError(
                f"attention_mask: earlier steps had {layer.lens} tokens per request, this mask has "
                f"{old} in their place"
            )
        # Models with sliding windows hand each kind of layer a mask object of its own.
        if current and _same_rows(step.rows, rows):
            step.masks.append(mask)
            return step
        for other in self.layers:
            if (other.lens or [0] * batch) != layer.lens:
                raise RuntimeError(
                    f"MpfaCache: layer {layer.index} holds {layer.lens} tokens per request, layer "
                    f"{other.index} {other.lens or 0}; a forward pass did not reach all layers: "
                    "reset() the cache"
                )
        if self._pages is None:
            # why not itertools.count: it cannot be copied from Python 3.14 on.
            self._pages = RequestPages(batch, self.config.page_size, iter(range(INT32_MAX)))
        self._step = _Step(self._pages.step(layer.lens, new), q_len, rows, [mask])
        return self._step

    def _storage(self, layer: MpfaLayer, device: torch.device) -> PagedKVCache:
        """The layer's pages, enlarged by half or more when the page table has outgrown them."""
        old, needed = layer.cache, self._pages.num_taken
        if old is not None and old.num_pages >= needed:
            return old
        count = needed if old is None else max(needed, old.num_pages * 3 // 2)
        # why: per-request statistics belong to a plan's rows, so only static ones are bound.
        bound = layer.stats if self.has_static_stats else None
        # why: pages made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            layer.cache = PagedKVCache.allocate(self.config, count, device, stats=bound)
        if old is not None:
            for name, tensor in old.tensors.items():
                getattr(layer.cache, name)[: old.num_pages].view(torch.uint8).copy_(
                    tensor.view(torch.uint8)
                )
        return layer.cache

    def _request_stats(
        self,
        layer: MpfaLayer,
        step: PagedStep,
        q: torch.Tensor,
        k: torch.Tensor,
        indptr: torch.Tensor,
    ) -> SmoothingStats:
        """Each request's means over the first pass that brought it tokens."""
        begins = [
            new > 0 and old == 0 for old, new in zip(step.old_lens, step.new_lens, strict=True)
        ]
        if layer.stats is None:
            layer.stats = SmoothingStats.from_tensors(q, k, indptr)
        elif any(begins):
            fresh, kept = SmoothingStats.from_tensors(q, k, indptr), layer.stats
            first = torch.tensor(begins, device=q.device)[:, None, None]
            layer.stats = SmoothingStats(
                torch.where(first, fresh.q_mean, kept.q_mean),
                torch.where(first, fresh.k_mean, kept.k_mean),
            )
        return layer.stats

    def _wrapper(
        self, step: _Step, device: torch.device, options: dict[str, object]
    ) -> _Prefill | _Decode:
        """A wrapper planned for the step; one per set of options, so one plan per step and kind."""
        paged = step.paged
        key = (device, paged.is_decode, *options.values())
        wrapper, planned = self._wrappers.get(key, (None, None))
        if planned is step:
            return wrapper
        if wrapper is None:
            kind = _Decode if paged.is_decode else _Prefill
            wrapper = kind(self._workspaces, device, self.backend)
        table = (paged.kv_indptr, paged.kv_indices, paged.last_page_len)
        wrapper.plan(
            *(table if paged.is_decode else (paged.qo_indptr, *table)),
            num_qo_heads=self.config.num_qo_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            page_size=self.config.page_size,
            config=self.config,
            **options,
        )
        self._wrappers[key] = (wrapper, step)
        return wrapper

    def attend(
        self,
        layer: MpfaLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        **options: object,
    ) -> torch.Tensor:
        """Stores the new tokens of one layer and returns their attention.

        Args:
            layer: one of ``layers``, which update() has seen.
            q: bf16/fp16 [B, q_len, Hq, D]; k, v: [B, q_len, Hkv, D], the new tokens.
            mask: [B, tokens so far], 0 or False = padding; None = no padding.
            sinks: fp32 [Hq] or None.
            options: causal, sm_scale, window_left and logits_soft_cap of plan().

        Returns:
            [B, q_len, Hq, D] in q's dtype; rows of padding are 0.
        """
        device, per_request = q.device, self.config.needs_stats and not self.has_static_stats
        step = self._begin(layer, q.shape[1], mask)
        here = step.on(device)
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        if here.rows is not None:
            flat = [x.index_select(0, here.rows) for x in flat]
        q_rows, k_rows, v_rows = flat
        stats = None
        if per_request:
            stats = self._request_stats(layer, step.paged, q_rows, k_rows, here.qo_indptr)
        # why before the append: a plan that is refused leaves the cache as it was.
        wrapper = self._wrapper(step, device, options)
        storage = self._storage(layer, device)
        quantized = append_paged_kv_cache(
            k_rows,
            v_rows,
            storage,
            here.slots,
            stats=stats,
            batch_indices=here.batch_indices if per_request else None,
            q=None if self.config.format == "bf16" else q_rows,
        )
        out = wrapper.run(
            q_rows if quantized is None else quantized, storage, stats=stats, sinks=sinks
        )
        layer.lens = [a + b for a, b in zip(step.paged.old_lens, step.paged.new_lens, strict=True)]
        layer.seen += q.shape[1]
        if here.rows is None:
            return out.view(q.shape)
        full = out.new_zeros(q.shape[0] * q.shape[1], *q.shape[2:])
        full.index_copy_(0, here.rows, out)
        return full.view(q.shape)


def _same_rows(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def _check_stats(
    stats: Mapping[int, SmoothingStats] | Sequence[SmoothingStats], config: KVCacheConfig
) -> None:
    """Refuses statistics that the first forward pass would refuse, with the layer that has them."""
    for index in range(len(stats)):
        if isinstance(stats, Mapping) and index not in stats:
            raise ValueError(f"stats: layer {index} has none, got layers {sorted(stats)}")
        own = check_is_stats(stats[index])
        try:
            if not own.is_static:
                raise ValueError("stats: must be static, got statistics per request")
            own.check_against(config, device=own.device)
        except ValueError as error:
            raise ValueError(f"{error} (layer {index})") from None


def _check_model(config: object, text: object) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError("model_config: encoder-decoder models are not supported")
    for index, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind not in _LAYER_TYPES:
            raise ValueError(
                f"model_config: layer {index} is {kind!r}, supported are {', '.join(_LAYER_TYPES)}"
            )
    if getattr(text, "num_kv_shared_layers", 0):
        raise ValueError("model_config: layers that share K and V are not supported")
