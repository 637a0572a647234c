# SPDX-License-Identifier: Apache-2.0
"""PagedKVCache: the page tensors of one attention layer, in the layouts of docs/formats.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mpfa.config import MX_BLOCK, NVFP4_BLOCK, KVCacheConfig, check_is_config
from mpfa.errors import Layout, check_distinct, check_int, check_layout, check_tensor
from mpfa.stats import SmoothingStats, refuse_unused

NATIVE_PAGE = 128
SCALE_ATOM_CHANNELS = 64
SCALE_ATOM_BYTES = 512


def page_layout(config: KVCacheConfig, num_pages: int) -> Layout:
    """Shape and dtype of every page tensor, None for those that ``config`` does not use."""
    p, h, ps, d = num_pages, config.num_kv_heads, config.page_size, config.head_dim
    e4m3, e8m0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
    layout: Layout = dict.fromkeys(
        ("k", "k_scale", "v", "v_scale", "aux_delta", "aux_channels", "v_tail")
    )
    if config.format == "bf16":
        layout["k"] = layout["v"] = ((p, h, ps, d), torch.bfloat16)
    elif config.format == "mxfp8":
        layout["k"] = layout["v"] = ((p, h, ps, d), e4m3)
        layout["k_scale"] = ((p, h, ps, d // MX_BLOCK), e8m0)
        layout["v_scale"] = ((p, h, ps // MX_BLOCK, d), e8m0)
        layout["v_tail"] = ((p, h, MX_BLOCK, d), torch.bfloat16)
    else:
        layout["k"] = ((p, h, ps, d // 2), torch.uint8)
        # why: at the native page size the scales are stored in the order that tcgen05.cp copies.
        scale = (
            (d // SCALE_ATOM_CHANNELS, SCALE_ATOM_BYTES)
            if ps == NATIVE_PAGE
            else (ps, d // NVFP4_BLOCK)
        )
        layout["k_scale"] = ((p, h, *scale), torch.uint8)
        layout["v"] = ((p, h, ps, d), e4m3)
        if config.uses_mean:
            layout["aux_delta"] = ((p, h, config.group_size, ps), torch.bfloat16)
        if config.uses_channels:
            layout["aux_channels"] = ((p, h, ps, config.channels), torch.bfloat16)
    return layout


@dataclass(frozen=True, eq=False)
class PagedKVCache:
    """Pages of one layer's K and V; P pages, ps tokens per page, head-major.

    Attributes (None when the format does not use them; any strides, last dimension contiguous):
        k: qk4pv8 uint8 [P, Hkv, ps, D/2]; mxfp8 e4m3 [P, Hkv, ps, D]; bf16 bfloat16 [P, Hkv, ps, D].
        k_scale: qk4pv8 uint8 [P, Hkv, D/64, 512] atoms for ps=128, else [P, Hkv, ps, D/16];
            mxfp8 ue8m0 [P, Hkv, ps, D/32].
        v: e4m3 (qk4pv8, mxfp8) or bfloat16 [P, Hkv, ps, D].
        v_scale: mxfp8 ue8m0 [P, Hkv, ps/32, D].
        aux_delta: bf16 [P, Hkv, G, ps], Delta_S of the G query heads (paper equation 9).
        aux_channels: bf16 [P, Hkv, ps, c], outlier channels of K.
        v_tail: mxfp8 bf16 [P, Hkv, 32, D], the exact values of the page's open V block.
        stats: static SmoothingStats bound to the cache; append and run then take no other.

    Build one with allocate(), or from an engine's own tensors with the constructor, which checks
    every shape, dtype, device and stride (ValueError).
    """

    config: KVCacheConfig
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    aux_delta: torch.Tensor | None = None
    aux_channels: torch.Tensor | None = None
    v_tail: torch.Tensor | None = None
    stats: SmoothingStats | None = None

    def __post_init__(self) -> None:
        check_is_config(self.config)
        check_tensor("cache.k", self.k)
        if self.k.dim() != 4:
            raise ValueError(f"cache.k: must be [P, Hkv, ps, D], got {list(self.k.shape)}")
        layout = page_layout(self.config, self.k.shape[0])
        check_layout("cache", self, layout, device=self.k.device)
        for name, tensor in self.tensors.items():
            check_distinct(f"cache.{name}", tensor)
        if self.stats is not None:
            _check_bound_stats(self.stats, self.config, self.k.device)

    @staticmethod
    def allocate(
        config: KVCacheConfig,
        num_pages: int,
        device: torch.device | str = "cpu",
        stats: SmoothingStats | None = None,
    ) -> PagedKVCache:
        """Allocate zeroed pages.

        Args:
            config: format of the cache.
            num_pages: pages, >= 0.
            device: where the tensors live.
            stats: static statistics to bind; per-request ones are passed to append and run instead.

        Returns:
            PagedKVCache whose tensors are dense and aligned for every kernel.

        Raises:
            ValueError: num_pages negative, or stats that are per-request or do not fit config.
        """
        check_is_config(config)
        check_int("num_pages", num_pages, 0)
        try:
            tensors = {
                name: torch.zeros(want[0], dtype=want[1], device=device)
                for name, want in page_layout(config, num_pages).items()
                if want is not None
            }
        except AssertionError as error:  # what a torch without CUDA says of device="cuda"
            raise ValueError(f"device: cannot allocate on {device}: {error}") from error
        return PagedKVCache(config=config, stats=stats, **tensors)

    @property
    def num_pages(self) -> int:
        """P; page ids are 0..P-1."""
        return self.k.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of every page tensor."""
        return self.k.device

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The page tensors in use, by name: what an engine has to move with a page."""
        names = page_layout(self.config, 0)
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all page tensors, v_tail included."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def bytes_per_token(self) -> int:
        """Stored bytes per token over all KV heads of this layer (v_tail not counted)."""
        return self.config.bytes_per_token


def _check_bound_stats(stats: SmoothingStats, config: KVCacheConfig, device: torch.device) -> None:
    if not isinstance(stats, SmoothingStats):
        raise TypeError(f"stats: expected SmoothingStats, got {type(stats).__name__}")
    refuse_unused(config, stats)
    if not stats.is_static:
        raise ValueError(
            f"stats: only static statistics can be bound to a cache, got per-request statistics of "
            f"{stats.batch_size} requests; pass those to append_paged_kv_cache() and run()"
        )
    stats.check_against(config, device=device)
