# SPDX-License-Identifier: Apache-2.0
"""The rows of a table: cache format x compensation x where the statistics come from."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mpfa.config import MAX_CHANNELS, KVCacheConfig

if TYPE_CHECKING:
    from mpfa.accuracy.models import Geometry

REFERENCE = "bf16"
DIRECT = "none"
BASELINE = "fp8"
GRAMMAR = (
    "bf16, fp8, mxfp8, or none, mean, kmean, channelsC, mean+channelsC, kmean+channelsC, eigenC, "
    "mean+eigenC with C slots (1..16, with a mean 1..15), then +4/6 for four-over-six scales, then "
    ":request, :firstN or :centred"
)


@dataclass(frozen=True)
class RowSpec:
    """One row.

    Attributes:
        key: name on the command line and in the JSON.
        format: KVCacheConfig.format, or "fp8" for the baseline that is no cache format of mpfa.
        compensation, channels, four_over_six: as in KVCacheConfig; for studies compensation may also
            be "eigen" or "mean+eigen", with ``channels`` directions instead of channels.
        stats: "none", "static" (calibration text), "request" (means of the request's first step) or
            "first" (means of its first ``first_tokens`` tokens). Channels are always static.
        centre_q: False leaves Q uncentred, so that Delta is 0 (a study).
        centred_choice: channels are chosen by the moments of centred values although the row does
            not centre (a study).
        note: shown after the table.
    """

    key: str
    format: str
    compensation: str = "none"
    channels: int = 0
    four_over_six: bool = False
    stats: str = "none"
    first_tokens: int = 0
    centre_q: bool = True
    centred_choice: bool = False
    note: str = ""

    @property
    def label(self) -> str:
        """Compensation as a table shows it."""
        text = self.compensation if self.centre_q else self.compensation.replace("mean", "K mean")
        if self.channels:
            text += f"({self.channels})"
        if self.four_over_six:
            text += " + 4/6"
        if self.stats == "first":
            text += f", first {self.first_tokens}"
        elif self.stats != "none":
            text += f", {self.stats}"
        if self.centred_choice:
            text += ", centred choice"
        return text

    @property
    def is_baseline(self) -> bool:
        return self.format == "fp8"

    @property
    def is_eigen(self) -> bool:
        return "eigen" in self.compensation

    @property
    def uses_mean(self) -> bool:
        return "mean" in self.compensation

    @property
    def takes_own_means(self) -> bool:
        return self.stats in ("request", "first") and self.uses_mean

    @property
    def needs_calibration(self) -> bool:
        return self.stats == "static" or (self.channels > 0 and not self.is_eigen)

    @property
    def cache_format(self) -> dict[str, object] | None:
        """Keywords of KVCacheConfig and MpfaCache; None where no cache of mpfa has this format."""
        if self.is_baseline or self.is_eigen:
            return None
        return {
            "format": self.format,
            "compensation": self.compensation,
            "channels": self.channels,
            "four_over_six": self.four_over_six,
        }

    def cache_config(self, geometry: Geometry, page_size: int = 128) -> KVCacheConfig:
        fields = self.cache_format
        if fields is None:
            raise ValueError(f"row {self.key!r}: no cache format of mpfa")
        return KVCacheConfig(
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            page_size=page_size,
            num_qo_heads=geometry.num_qo_heads,
            **fields,
        )

    def bytes_per_token_head(self, geometry: Geometry) -> float:
        """Stored bytes per token and KV head; an eigenbasis fills slots as channels do."""
        if self.is_baseline:
            # K and V, one byte a channel; the scales are one number per layer.
            return 2.0 * geometry.head_dim
        stored = replace(self, compensation=self.compensation.replace("eigen", "channels"))
        return stored.cache_config(geometry).bytes_per_token / geometry.num_kv_heads


_ROW = re.compile(
    r"(?P<comp>none|k?mean|(?:k?mean\+)?channels(?P<c>\d+)|(?:mean\+)?eigen(?P<e>\d+))"
    r"(?P<fos>\+4/6)?(?::(?P<stats>static|request|centred|first(?P<n>\d+)))?"
)
_PLAIN_ROWS = {
    REFERENCE: RowSpec(REFERENCE, "bf16"),
    BASELINE: RowSpec(
        BASELINE, "fp8", note="per-tensor e4m3, a baseline and not a cache format of mpfa"
    ),
    "mxfp8": RowSpec("mxfp8", "mxfp8"),
}
_NOTES = {
    "request": "means of each request's own prompt: a cached prefix cannot be shared",
    "first": "means of each request's first tokens, as chunked prefill freezes them",
    "eigen": "a study: directions instead of channels for a lower residual energy, no cache format of "
    "mpfa and no upper bound",
    "k": "a study: only K is centred",
    "centred": "a study: channels chosen as for mean+channels, but nothing is centred",
}


def parse_row(key: str) -> RowSpec:
    """The row that a key names.

    Raises:
        ValueError: not a key, or slots that the format does not have.
    """
    if key in _PLAIN_ROWS:
        return _PLAIN_ROWS[key]
    match = _ROW.fullmatch(key)
    if match is None:
        raise ValueError(f"formats: must be {GRAMMAR}; got {key!r}")
    slots = int(match["c"] or match["e"] or 0)
    centre_q = not match["comp"].startswith("k")
    compensation = match["comp"].rstrip("0123456789").removeprefix("k")
    has_slots = match["c"] is not None or match["e"] is not None
    most = MAX_CHANNELS[compensation.replace("eigen", "channels")]
    if has_slots and not 1 <= slots <= most:
        raise ValueError(f"formats: {key!r} must have 1..{most} slots, got {slots}")
    stats = "none" if compensation == "none" else (match["stats"] or "static")
    first = int(match["n"] or 0)
    if stats.startswith("first"):
        stats = "first"
        if first < 1:
            raise ValueError(
                f"formats: {key!r} must keep the means of 1 token or more, got {first}"
            )
    centred_choice = stats == "centred"
    if match["stats"] == "centred" and compensation != "channels":
        raise ValueError(f"formats: ':centred' is for channelsC only, got {key!r}")
    own = stats in ("request", "first")
    if (own and ("mean" not in compensation or not centre_q)) or (
        match["stats"] and compensation == "none"
    ):
        raise ValueError(
            f"formats: {match['stats']!r} is for rows that centre Q and K, got {key!r}"
        )
    kind = (
        "eigen" if match["e"] else "k" if not centre_q else "centred" if centred_choice else stats
    )
    return RowSpec(
        key,
        "qk4pv8",
        compensation,
        slots,
        four_over_six=match["fos"] is not None,
        stats="static" if centred_choice else stats,
        first_tokens=first,
        centre_q=centre_q,
        centred_choice=centred_choice,
        note=_NOTES.get(kind, ""),
    )


DEFAULT_KEYS = (
    REFERENCE,
    BASELINE,
    "mxfp8",
    DIRECT,
    "mean",
    "mean:request",
    "channels16+4/6",
    "mean+channels15",
    "mean+channels15+4/6",
    "mean+eigen15",
)
QUICK_KEYS = (REFERENCE, BASELINE, DIRECT, "mean", "channels16+4/6", "mean+channels15+4/6")
_SLOTS = (3, 7, 12, 15)
FULL_KEYS = (
    REFERENCE,
    BASELINE,
    "mxfp8",
    DIRECT,
    "none+4/6",
    "kmean",
    "mean",
    "mean+4/6",
    "mean:request",
    "mean+4/6:request",
    *(f"channels{c}{s}" for c in (*_SLOTS, 16) for s in ("", "+4/6")),
    "channels16:centred",
    *(f"mean+channels{c}{s}" for c in _SLOTS for s in ("", "+4/6")),
    "mean+channels15+4/6:request",
    "eigen16",
    "eigen16+4/6",
    "mean+eigen15",
    "mean+eigen15+4/6",
    "mean+eigen15:request",
)


def parse_rows(keys: str | None, default: tuple[str, ...] = DEFAULT_KEYS) -> list[RowSpec]:
    """Rows of a comma-separated list, bf16 first because the others are measured against it.

    Raises:
        ValueError: as parse_row(); two keys of the same row.
    """
    wanted = list(default) if keys is None else [key.strip() for key in keys.split(",")]
    rows = [parse_row(key) for key in wanted]
    unique = list(dict.fromkeys(row for row in rows if row.key != REFERENCE))
    first: dict[RowSpec, str] = {}
    for row in unique:
        other = first.setdefault(replace(row, key="", note=""), row.key)
        if other != row.key:
            raise ValueError(f"formats: {other!r} and {row.key!r} are the same row")
    return [_PLAIN_ROWS[REFERENCE], *unique]
