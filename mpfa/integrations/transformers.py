# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: attention function "mpfa" and the cache that belongs to it.

Importing this module registers the attention function::

    from mpfa.integrations.transformers import MpfaCache

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="mpfa")
    cache = MpfaCache(model.config, format="qk4pv8", compensation="mean")
    model.generate(**inputs, past_key_values=cache)

MpfaCache holds the tokens of every layer in a PagedKVCache. Padding never reaches it: a batch of
prompts of different lengths gives each request the result that it has alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import flash_attention_mask

from mpfa.append import append_paged_kv_cache
from mpfa.cache import PagedKVCache
from mpfa.calibrate import calibrate
from mpfa.config import KVCacheConfig
from mpfa.decode import BatchDecodeWrapper
from mpfa.errors import HALF_DTYPES
from mpfa.prefill import BatchPrefillWrapper
from mpfa.stats import SmoothingStats
from mpfa.workspace import workspace_size
from mpfa.wrapper import num_sm_for

ATTENTION_NAME = "mpfa"
_CALIBRATION_NAME = "mpfa_calibrate"
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Arguments by which models ask their attention function for something that the kernels don't do.
_REFUSED = ("position_bias", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k")
_USAGE = (
    'attn_implementation="mpfa" keeps K and V in its own cache: pass '
    "past_key_values=mpfa.integrations.transformers.MpfaCache(model.config, ...) to forward() or "
    "generate()"
)


@dataclass(frozen=True)
class _Step:
    """The new tokens of one forward pass, padding removed; the same for all layers."""

    old_lens: tuple[int, ...]
    new_lens: tuple[int, ...]
    rows: torch.Tensor | None  # rows of the [B * q_len] grid that hold tokens; None = all
    slots: torch.Tensor
    batch_indices: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor


class MpfaLayer(CacheLayerMixin):
    """One layer of MpfaCache. update() only hands the new tokens on: the attention function stores
    them, because it knows which of them are padding."""

    is_sliding = False

    def __init__(self, owner: MpfaCache, index: int) -> None:
        super().__init__()
        self.owner, self.index = owner, index
        self.seen = 0  # tokens of the padded sequence
        self.lens: list[int] = []  # tokens of each request
        self.cache: PagedKVCache | None = None
        self.stats: SmoothingStats | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.lens = [0] * key_states.shape[0]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != len(self.lens):
            raise ValueError(
                f"MpfaCache: made for a batch of {len(self.lens)}, got {key_states.shape[0]} sequences"
            )
        self.seen += key_states.shape[2]
        # why a new object: the attribute tells the attention function which layer this is, and a
        # tensor that the model keeps for itself must not carry it.
        key_states = key_states.view_as(key_states)
        key_states.mpfa_layer = self
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.seen, self.lens, self.is_initialized = 0, [], False
        self.cache = None
        if self.owner.stats is None:
            self.stats = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("MpfaCache: beam search is not supported")

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("MpfaCache: tokens cannot be removed (assisted generation)")

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.seen:
            raise NotImplementedError("MpfaCache: a filled cache cannot be repeated")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise NotImplementedError("MpfaCache: requests cannot be selected from a filled cache")


class MpfaCache(Cache):
    """KV cache of a decoder-only model in one of mpfa's formats.

    Grows as needed. Sliding-window layers keep all tokens and mask them.

    Args:
        model_config: the model's configuration; only full and sliding attention layers.
        format, compensation, channels, four_over_six, page_size: as in KVCacheConfig.
        stats: static SmoothingStats per layer (see calibrate_model). None with compensation "mean":
            each request's means over its first forward pass (paper equation 7), then frozen.
        backend: as in BatchPrefillWrapper.

    Raises:
        ValueError: a layer type, format or compensation that is not supported; missing stats.
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
        _check_layer_types(text)
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
        self.stats = None if stats is None else {i: stats[i] for i in range(num_layers)}
        self.backend = backend
        self._num_pages = 0
        self._request_pages: list[list[int]] = []
        self._step: _Step | None = None
        self._step_masks: list[torch.Tensor | None] = []
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[tuple, tuple[object, _Step]] = {}
        layers = [MpfaLayer(self, i) for i in range(num_layers)]
        for layer in layers:
            layer.stats = None if self.stats is None else self.stats[layer.index]
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for K, V, scales and compensation, all layers."""
        return sum(layer.cache.nbytes for layer in self.layers if layer.cache is not None)

    def reset(self) -> None:
        super().reset()
        self._num_pages, self._request_pages, self._step = 0, [], None

    def _begin(self, layer: MpfaLayer, q_len: int, mask: torch.Tensor | None) -> _Step:
        """The step that ``layer`` is in; made by the first layer that gets there."""
        step = self._step
        current = step is not None and list(step.old_lens) == layer.lens
        if current and any(known is mask for known in self._step_masks):
            return step
        rows = None
        new = [q_len] * len(layer.lens)
        if mask is not None:
            old, valid = _split_mask(mask, q_len, layer.seen, layer.lens)
            new = valid.sum(1).tolist()
            rows = valid.flatten().nonzero().flatten()
            if old.sum(1).tolist() != layer.lens:
                raise ValueError(
                    f"attention_mask: earlier steps had {layer.lens} tokens per request, this mask "
                    f"has {old.sum(1).tolist()} in their place"
                )
        # Models with sliding windows hand each kind of layer a mask object of its own.
        if current and rows is not None and step.rows is not None and torch.equal(step.rows, rows):
            self._step_masks.append(mask)
            return step
        self._step, self._step_masks = self._plan_tokens(layer.lens, new, rows), [mask]
        return self._step

    def _plan_tokens(self, old: list[int], new: list[int], rows: torch.Tensor | None) -> _Step:
        ps = self.config.page_size
        if not self._request_pages:
            self._request_pages = [[] for _ in old]
        ends = [a + b for a, b in zip(old, new, strict=True)]
        for pages, end in zip(self._request_pages, ends, strict=True):
            while len(pages) * ps < end:
                pages.append(self._num_pages)
                self._num_pages += 1
        slots = []
        for pages, begin, end in zip(self._request_pages, old, ends, strict=True):
            token = torch.arange(begin, end)
            slots.append(torch.tensor(pages, dtype=torch.int64)[token // ps] * ps + token % ps)
        used = [-(-end // ps) for end in ends]
        flat = [p for pages, n in zip(self._request_pages, used, strict=True) for p in pages[:n]]
        return _Step(
            old_lens=tuple(old),
            new_lens=tuple(new),
            rows=rows,
            slots=torch.cat(slots),
            batch_indices=torch.repeat_interleave(
                torch.arange(len(new), dtype=torch.int32), torch.tensor(new)
            ),
            qo_indptr=_indptr(new),
            kv_indptr=_indptr(used),
            kv_indices=torch.tensor(flat, dtype=torch.int32),
            last_page_len=torch.tensor([(n - 1) % ps + 1 if n else 0 for n in ends]).int(),
        )

    def _storage(self, layer: MpfaLayer, device: torch.device) -> PagedKVCache:
        """The layer's pages, enlarged by half or more when the page table has outgrown them."""
        old = layer.cache
        if old is not None and old.num_pages >= self._num_pages:
            return old
        count = self._num_pages if old is None else max(self._num_pages, old.num_pages * 3 // 2)
        # why: per-request statistics belong to a plan's rows, so only static ones are bound.
        bound = layer.stats if self.stats is not None else None
        layer.cache = PagedKVCache.allocate(self.config, count, device, stats=bound)
        if old is not None:
            for name in ("k", "k_scale", "v", "v_scale", "aux_delta", "aux_channels", "v_tail"):
                tensor = getattr(old, name)
                if tensor is not None:
                    getattr(layer.cache, name)[: old.num_pages].view(torch.uint8).copy_(
                        tensor.view(torch.uint8)
                    )
        return layer.cache

    def _wrapper(
        self, step: _Step, device: torch.device, options: dict[str, object]
    ) -> BatchPrefillWrapper | BatchDecodeWrapper:
        """A wrapper planned for the step; one per set of options, so one plan per step and kind."""
        decode = set(step.new_lens) == {1}
        key = (decode, *options.values())
        wrapper, planned = self._wrappers.get(key, (None, None))
        if wrapper is not None and planned is step:
            return wrapper
        arguments = {
            "num_qo_heads": self.config.num_qo_heads,
            "num_kv_heads": self.config.num_kv_heads,
            "head_dim": self.config.head_dim,
            "page_size": self.config.page_size,
            "config": self.config,
            **options,
        }
        table = (step.kv_indptr, step.kv_indices, step.last_page_len)
        positional = table if decode else (step.qo_indptr, *table)
        size = workspace_size(*positional, num_sm=num_sm_for(self.backend, device), **arguments)
        if self._workspace is None or self._workspace.numel() < size:
            self._workspace = torch.empty(size * 3 // 2, dtype=torch.uint8, device=device)
            self._wrappers.clear()
            wrapper = None
        if wrapper is None:
            kind = BatchDecodeWrapper if decode else BatchPrefillWrapper
            wrapper = kind(self._workspace, backend=self.backend)
        wrapper.plan(*positional, **arguments)
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
            q: bf16/fp16 [B, q_len, Hq, D]; k, v: [B, q_len, Hkv, D], the new tokens.
            mask: bool or 0/1 [B, tokens so far]; None = no padding.
            sinks: fp32 [Hq] or None.
            options: causal, sm_scale, window_left and logits_soft_cap of plan().

        Returns:
            [B, q_len, Hq, D] in q's dtype; rows of padding are 0.
        """
        step = self._begin(layer, q.shape[1], mask)
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        if step.rows is not None:
            flat = [x.index_select(0, step.rows.to(x.device)) for x in flat]
        q_rows, k_rows, v_rows = flat
        device = q.device
        per_request = self.config.needs_stats and self.stats is None
        if per_request and layer.stats is None:
            layer.stats = SmoothingStats.from_tensors(q_rows, k_rows, step.qo_indptr.to(device))
        storage = self._storage(layer, device)
        quantized = append_paged_kv_cache(
            k_rows,
            v_rows,
            storage,
            step.slots.to(device),
            stats=layer.stats if per_request else None,
            batch_indices=step.batch_indices.to(device) if per_request else None,
            q=None if self.config.format == "bf16" else q_rows,
        )
        layer.lens = [a + b for a, b in zip(step.old_lens, step.new_lens, strict=True)]
        wrapper = self._wrapper(step, device, options)
        out = wrapper.run(
            q_rows if quantized is None else quantized,
            storage,
            stats=layer.stats if per_request else None,
            sinks=sinks,
        )
        if step.rows is None:
            return out.view(q.shape)
        full = out.new_zeros(q.shape[0] * q.shape[1], *q.shape[2:])
        full.index_copy_(0, step.rows.to(device), out)
        return full.view(q.shape)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [B, Hq, q, D], key and value [B, Hkv, q, D].

    fp32 inputs are rounded to bf16 and the result converted back.

    Raises:
        ValueError: no MpfaCache, dropout, a mask that is not a padding mask, or an argument that
            the kernels do not serve.
    """
    layer = getattr(key, "mpfa_layer", None)
    if layer is None:
        raise ValueError(_USAGE)
    if dropout:
        raise ValueError(f"dropout: mpfa is for inference, got {dropout}; call model.eval()")
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: attention function {ATTENTION_NAME!r} does not take it")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            "attention_mask: only padding masks [batch, tokens] are supported, got shape "
            f"{list(attention_mask.shape)}"
        )
    dtype = query.dtype if query.dtype in HALF_DTYPES else torch.bfloat16
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (query, key, value))
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    out = layer.owner.attend(
        layer,
        q,
        k,
        v,
        attention_mask,
        None if s_aux is None else s_aux.detach().float(),
        causal=bool(causal),
        sm_scale=scaling,
        # transformers counts the query's own position, window_left does not.
        window_left=-1 if sliding_window is None else sliding_window - 1,
        logits_soft_cap=softcap or 0.0,
    )
    return out.to(query.dtype), None


@torch.no_grad()
def calibrate_model(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    *,
    channels: int = 0,
    center: bool = True,
) -> list[SmoothingStats]:
    """Static statistics of every layer from one forward pass over sample text.

    Args:
        model: a decoder-only transformers model with any attention implementation; it is restored.
        input_ids: int64 [1, T] or [T], without padding.
        channels, center: as in mpfa.calibrate.

    Returns:
        one SmoothingStats per layer, as MpfaCache takes them.

    Raises:
        ValueError: more than one sequence.
    """
    ids = input_ids[None] if input_ids.dim() == 1 else input_ids
    if ids.dim() != 2 or ids.shape[0] != 1:
        raise ValueError(f"input_ids: expected one sequence, got shape {list(input_ids.shape)}")
    collected: dict[int, SmoothingStats] = {}

    def collect(module, query, key, value, attention_mask, **kwargs):
        q, k = (x[0].transpose(0, 1) for x in (query, key))
        q, k = (x if x.dtype in HALF_DTYPES else x.bfloat16() for x in (q, k))
        collected[module.layer_idx] = calibrate([(q, k)], channels=channels, center=center)
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(_CALIBRATION_NAME, collect)
    AttentionMaskInterface.register(_CALIBRATION_NAME, AttentionMaskInterface()["sdpa"])
    with _attention_implementation(model, _CALIBRATION_NAME):
        model(input_ids=ids.to(model.device), use_cache=False)
    return [collected[i] for i in range(len(collected))]


@contextmanager
def _attention_implementation(model: torch.nn.Module, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _check_layer_types(text: object) -> None:
    for index, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind not in _LAYER_TYPES:
            raise ValueError(
                f"model_config: layer {index} is {kind!r}, supported are {', '.join(_LAYER_TYPES)}"
            )
    if getattr(text, "num_kv_shared_layers", 0):
        raise ValueError("model_config: layers that share K and V are not supported")


def _split_mask(
    mask: torch.Tensor, q_len: int, seen: int, lens: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(part of earlier steps, part of the new tokens), bool on the host."""
    if tuple(mask.shape) != (len(lens), seen):
        raise ValueError(
            f"attention_mask: must be [{len(lens)}, {seen}] (batch, tokens so far), got "
            f"{list(mask.shape)}"
        )
    host = mask.cpu().bool()
    return host[:, : seen - q_len], host[:, seen - q_len :]


def _indptr(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


AttentionInterface.register(ATTENTION_NAME, attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, flash_attention_mask)
