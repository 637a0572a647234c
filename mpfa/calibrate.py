# SPDX-License-Identifier: Apache-2.0
"""Static smoothing statistics from sample activations, and their safetensors file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mpfa.errors import check_int, check_tensor
from mpfa.stats import SmoothingStats

_FIELDS = ("q_mean", "k_mean", "channel_index")


def calibrate(
    samples: Iterable[tuple[torch.Tensor, torch.Tensor]],
    *,
    channels: int = 0,
    center: bool = True,
) -> SmoothingStats:
    """Static statistics of one layer (paper equation 7 over all sample tokens).

    Args:
        samples: pairs (q [T, Hq, D], k [T', Hkv, D]) of post-RoPE activations, bf16/fp16/fp32; any
            number of pairs with the same head counts. Streamed: each pair is visited once.
        channels: outlier channels to choose per KV head, 0..16 (at most 15 for "mean+channels"): those
            with the largest E[Q^2] E[K^2], Q summed over the group's heads; ties go to the lower
            channel. The index lists them in ascending order.
        center: also take q_mean and k_mean; the second moments are then those of centred values.

    Returns:
        SmoothingStats with static fp32 means (None if not center) and int32 channel_index (None if 0).

    Raises:
        ValueError: no token at all, heads that do not divide or differ between pairs, NaN/Inf, or
            nothing asked for (channels=0 and center=False).
    """
    check_int("channels", channels, 0, 16)
    if channels == 0 and not center:
        raise ValueError("channels: must be >= 1 when center=False, got 0")
    q_sums, k_sums = _Moments("q"), _Moments("k")
    for index, sample in enumerate(samples):
        # why the class check: a single pair (q, k) is iterable too, and so is a tensor.
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise TypeError(
                f"samples: expected pairs (q, k), got {type(sample).__name__} at index {index}; pass "
                "[(q, k)] for one pair"
            )
        q, k = sample
        q_sums.add(q)
        k_sums.add(k)
    q_mean, q_second = q_sums.finish(center)
    k_mean, k_second = k_sums.finish(center)
    if q_mean.shape[1] != k_mean.shape[1] or q_mean.shape[0] % k_mean.shape[0] != 0:
        raise ValueError(
            f"samples: q must be [T, Hq, D] and k [T, Hkv, D] with Hq a multiple of Hkv, got heads and "
            f"head_dim {list(q_mean.shape)} and {list(k_mean.shape)}"
        )
    index = None
    if channels:
        check_int("channels", channels, 0, q_mean.shape[1])
        num_kv_heads, head_dim = k_mean.shape
        grouped = q_second.view(num_kv_heads, -1, head_dim).sum(dim=1)
        order = torch.argsort(grouped * k_second, dim=1, descending=True, stable=True)
        index = order[:, :channels].sort(dim=1).values.to(torch.int32)
    if not center:
        return SmoothingStats(channel_index=index)
    return SmoothingStats(q_mean.float(), k_mean.float(), index)


class _Moments:
    """First and second moments per head and channel, accumulated in fp64."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.first: torch.Tensor | None = None
        self.second: torch.Tensor | None = None

    def add(self, x: torch.Tensor) -> None:
        floats = (torch.bfloat16, torch.float16, torch.float32)
        shape = ("T", "H", "D") if self.first is None else ("T", *self.first.shape)
        check_tensor(f"samples {self.name}", x, shape=shape, dtype=floats)
        if not bool(torch.isfinite(x).all()):
            raise ValueError(f"samples {self.name}: must be finite, found NaN or Inf")
        wide = x.detach().double()
        first, second = wide.sum(dim=0), wide.square().sum(dim=0)
        if self.first is None:
            self.first, self.second = first, second
        else:
            self.first, self.second = self.first + first, self.second + second
        self.count += x.shape[0]

    def finish(self, center: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if self.count == 0:
            raise ValueError(f"samples: need at least one token of {self.name}, got none")
        mean = self.first / self.count
        second = self.second / self.count
        if center:
            second = (second - mean.square()).clamp_min(0.0)
        return mean, second


def save_stats(path: str | os.PathLike[str], stats: Mapping[str | int, SmoothingStats]) -> None:
    """Save the static statistics of several layers as one safetensors file.

    Args:
        path: file to write; an existing one is replaced.
        stats: SmoothingStats by layer name or number; the name is the key in the file.

    Raises:
        ValueError: a key with a "/" in it, two keys of the same name, or per-request statistics.
    """
    tensors: dict[str, torch.Tensor] = {}
    for key, entry in stats.items():
        if "/" in str(key):
            raise ValueError(f"stats: a layer name must not contain '/', got {key!r}")
        if not entry.is_static:
            raise ValueError(f"stats[{key!r}]: only static statistics can be saved")
        if any(f"{key}/{field}" in tensors for field in _FIELDS):
            raise ValueError(f"stats: two layers are named {str(key)!r}, got {key!r} again")
        for field in _FIELDS:
            tensor = getattr(entry, field)
            if tensor is not None:
                # why: layers may share a tensor, safetensors refuses shared memory.
                tensors[f"{key}/{field}"] = tensor.detach().cpu().contiguous().clone()
    save_file(tensors, os.fspath(path), metadata={"format": "mpfa-stats-1"})


def load_stats(
    path: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> dict[str, SmoothingStats]:
    """Load what save_stats() wrote.

    Args:
        path: file that save_stats() wrote.
        device: where the tensors go.

    Returns:
        SmoothingStats by layer name; numbers come back as strings.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a file of this kind.
    """
    entries: dict[str, dict[str, torch.Tensor]] = {}
    refusal = f"path: {os.fspath(path)} is not an mpfa statistics file"
    try:
        opened = safe_open(os.fspath(path), framework="pt", device=str(device))
    except SafetensorError as error:
        raise ValueError(f"{refusal} ({error})") from error
    with opened as file:
        if (file.metadata() or {}).get("format") != "mpfa-stats-1":
            raise ValueError(refusal)
        for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
            layer, _, field = name.rpartition("/")
            entries.setdefault(layer, {})[field] = file.get_tensor(name)
    return {layer: SmoothingStats(**fields) for layer, fields in entries.items()}
