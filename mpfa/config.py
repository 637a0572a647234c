# SPDX-License-Identifier: Apache-2.0
"""KVCacheConfig: what a cache stores, in numbers that every layer of mpfa agrees on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mpfa.errors import check_choice, check_int

FORMATS = ("qk4pv8", "mxfp8", "bf16")
COMPENSATIONS = ("none", "mean", "channels", "mean+channels")
HEAD_DIMS = (64, 128, 256)
# A 32-token MXFP8 V block must fit in a page, so 1 and 16 are not possible there.
PAGE_SIZES = {
    "qk4pv8": (1, 16, 32, 64, 128),
    "mxfp8": (32, 64, 128),
    "bf16": (1, 16, 32, 64, 128),
}
# A plan and the operands of its runs agree on these.
HEAD_FIELDS = ("num_qo_heads", "num_kv_heads", "head_dim")
FORMAT_FIELDS = ("format", "compensation", "channels")
MX_BLOCK = 32
NVFP4_BLOCK = 16
# Slots of one BF16 MMA step (K=16); "mean" takes one of them for Delta.
COMPENSATION_SLOTS = 16
MAX_CHANNELS = {"none": 0, "mean": 0, "channels": 16, "mean+channels": 15}


@dataclass(frozen=True)
class KVCacheConfig:
    """Format of a paged KV cache (and of ragged quantised K/V) for one attention layer.

    Args:
        format: "qk4pv8" (NVFP4 K, e4m3 V), "mxfp8" (e4m3 K and V with ue8m0 scales per 32) or "bf16".
        num_kv_heads: KV heads on this rank.
        head_dim: 64, 128 or 256 (the same for Q/K and V).
        page_size: tokens per page; 1, 16, 32, 64, 128 (mxfp8: 32, 64, 128).
        num_qo_heads: query heads on this rank, a multiple of num_kv_heads.
        compensation: qk4pv8 only; which part of the 4-bit error the BF16 MMA repairs
            ("mean": paper equations 7-11; "channels": outlier channels kept in BF16).
        channels: outlier channels per KV head, 1..16 for "channels", 1..15 for "mean+channels", else 0.
        four_over_six: qk4pv8 only; the writer keeps the better of the block scales amax/6 and amax/4.

    Raises:
        ValueError: any value outside what is listed above, naming the field.
    """

    format: str
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_qo_heads: int
    compensation: str = "none"
    channels: int = 0
    four_over_six: bool = False

    def __post_init__(self) -> None:
        check_choice("format", self.format, FORMATS)
        check_heads(self)
        check_page_size(self.format, self.page_size)
        check_choice("compensation", self.compensation, COMPENSATIONS)
        check_int("channels", self.channels, 0)
        if self.format != "qk4pv8":
            if self.compensation != "none":
                raise ValueError(
                    f"compensation: format {self.format!r} takes only 'none', got {self.compensation!r}"
                )
            if self.four_over_six:
                raise ValueError(f"four_over_six: only for format 'qk4pv8', got {self.format!r}")
        most = MAX_CHANNELS[self.compensation]
        least = 1 if self.uses_channels else 0
        if not least <= self.channels <= most:
            allowed = "0" if most == 0 else f"{least}..{most}"
            raise ValueError(
                f"channels: must be {allowed} with compensation {self.compensation!r}, "
                f"got {self.channels}"
            )

    @property
    def group_size(self) -> int:
        """Query heads per KV head (G)."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def uses_mean(self) -> bool:
        """Whether Q and K are centred, so that aux_delta exists."""
        return self.compensation in ("mean", "mean+channels")

    @property
    def uses_channels(self) -> bool:
        """Whether outlier channels are kept in BF16, so that aux_channels exists."""
        return self.compensation in ("channels", "mean+channels")

    @property
    def needs_stats(self) -> bool:
        """Whether append, quantise and run need SmoothingStats."""
        return self.compensation != "none"

    @property
    def comp_slots(self) -> int:
        """R, the width of a_comp: 1 slot for Delta if centred plus the channels, rounded up to 16."""
        return comp_slots(self.compensation, self.channels)

    @property
    def bytes_per_token(self) -> int:
        """Stored bytes per token over all KV heads of one layer.

        K + V + scales + compensation side data, design table: at D=128, G=4 per KV head 200 (none),
        208 (mean), 232 (channels 16), 238 (mean+channels 15), 264 (mxfp8), 512 (bf16). MXFP8's v_tail
        (a fixed 64*D bytes per page and head while a block is open) is not counted here.
        """
        d = self.head_dim
        if self.format == "bf16":
            per_head = 4 * d
        elif self.format == "mxfp8":
            per_head = 2 * (d + d // MX_BLOCK)
        else:
            per_head = d // 2 + d // NVFP4_BLOCK + d + 2 * self.channels
            if self.uses_mean:
                per_head += 2 * self.group_size
        return per_head * self.num_kv_heads


def comp_slots(compensation: str, channels: int) -> int:
    """KVCacheConfig.comp_slots, for numerics that have no config."""
    used = int("mean" in compensation) + channels
    return -(-used // COMPENSATION_SLOTS) * COMPENSATION_SLOTS


def check_is_config(config: object) -> KVCacheConfig:
    if not isinstance(config, KVCacheConfig):
        raise TypeError(f"config: expected KVCacheConfig, got {type(config).__name__}")
    return config


def check_heads(owner: object) -> None:
    """Check HEAD_FIELDS of an object that has them."""
    check_int("num_qo_heads", owner.num_qo_heads, 1)
    check_int("num_kv_heads", owner.num_kv_heads, 1)
    if owner.num_qo_heads % owner.num_kv_heads != 0:
        raise ValueError(
            f"num_qo_heads: must be a multiple of num_kv_heads={owner.num_kv_heads}, got "
            f"{owner.num_qo_heads}"
        )
    check_int("head_dim", owner.head_dim, 1)
    check_choice("head_dim", owner.head_dim, HEAD_DIMS)


def first_difference(
    a: object, b: object, fields: Iterable[str]
) -> tuple[str, object, object] | None:
    """(field, a's value, b's value) of the first of ``fields`` in which a and b differ, else None."""
    pairs = ((field, getattr(a, field), getattr(b, field)) for field in fields)
    return next((pair for pair in pairs if pair[1] != pair[2]), None)


def check_page_size(format: str, page_size: int) -> None:
    check_int("page_size", page_size, 1)
    if page_size not in PAGE_SIZES[format]:
        allowed = ", ".join(str(p) for p in PAGE_SIZES[format])
        why = " (a 32-token V block must fit in a page)" if format == "mxfp8" else ""
        raise ValueError(f"page_size: format {format!r} allows {allowed}{why}, got {page_size}")
