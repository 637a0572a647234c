# SPDX-License-Identifier: Apache-2.0
"""SmoothingStats: the means and outlier channels that centring and compensation use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mpfa.config import KVCacheConfig
from mpfa.errors import check_indptr, check_tensor


@dataclass(frozen=True, eq=False)
class SmoothingStats:
    """Statistics of one attention layer (paper equation 7), static or one row per request.

    Attributes:
        q_mean: fp32 [Hq, D] (static) or [B, Hq, D] (row b = request b of the plan), or None.
        k_mean: fp32 [Hkv, D] or [B, Hkv, D], or None. Static exactly when q_mean is.
        channel_index: int32 [Hkv, c] distinct channels, always static, or None.

    Static statistics keep prefix caching valid: a cached K does not depend on the request that wrote
    it. Per-request means do not, because another request would read K centred by a foreign mean.
    Two stats objects are equal only if they are the same object.

    Raises:
        ValueError: wrong dtype, rank or device, means of different batch sizes, repeated channels.
    """

    q_mean: torch.Tensor | None = None
    k_mean: torch.Tensor | None = None
    channel_index: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.q_mean is None) != (self.k_mean is None):
            missing = "q_mean" if self.q_mean is None else "k_mean"
            raise ValueError(f"{missing}: q_mean and k_mean must be given together")
        if self.q_mean is None and self.channel_index is None:
            raise ValueError("q_mean: give the means, channel_index or both; all are None")
        if self.q_mean is not None:
            q = check_tensor("q_mean", self.q_mean, dtype=torch.float32)
            k = check_tensor("k_mean", self.k_mean, dtype=torch.float32, device=q.device)
            if q.dim() not in (2, 3) or k.dim() != q.dim():
                raise ValueError(
                    "q_mean: must be [Hq, D] with k_mean [Hkv, D], or [B, Hq, D] with [B, Hkv, D]; "
                    f"got {list(q.shape)} and {list(k.shape)}"
                )
            if q.shape[-1] != k.shape[-1] or (q.dim() == 3 and q.shape[0] != k.shape[0]):
                raise ValueError(
                    f"k_mean: head_dim (and batch) must match q_mean {list(q.shape)}, "
                    f"got {list(k.shape)}"
                )
            _require_finite_means(q, k)
        if self.channel_index is not None:
            index = check_tensor("channel_index", self.channel_index, dtype=torch.int32)
            if index.dim() != 2:
                raise ValueError(f"channel_index: must be [Hkv, c], got {list(index.shape)}")
            if self.k_mean is not None and index.device != self.k_mean.device:
                raise ValueError(
                    f"channel_index: must be on {self.k_mean.device}, got {index.device}"
                )
            _check_channels(index)

    @property
    def is_static(self) -> bool:
        """Whether no tensor has a row per request; channel_index alone is static."""
        return self.q_mean is None or self.q_mean.dim() == 2

    @property
    def batch_size(self) -> int | None:
        """Requests of per-request statistics; None when static."""
        return None if self.is_static else self.q_mean.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the means and of channel_index."""
        return (self.q_mean if self.q_mean is not None else self.channel_index).device

    @staticmethod
    def from_tensors(
        q: torch.Tensor,
        k: torch.Tensor,
        indptr: torch.Tensor,
        *,
        kv_indptr: torch.Tensor | None = None,
        channel_index: torch.Tensor | None = None,
    ) -> SmoothingStats:
        """Per-request means over ragged tokens (paper equation 7).

        Args:
            q: bf16/fp16/fp32 [nnz_qo, Hq, D].
            k: bf16/fp16/fp32 [nnz_kv, Hkv, D].
            indptr: int32 [B+1], token offsets of the requests in q (and in k unless kv_indptr).
            kv_indptr: int32 [B+1], token offsets in k where they differ from q's.
            channel_index: int32 [Hkv, c] static outlier channels to carry along.

        Returns:
            SmoothingStats with q_mean [B, Hq, D] and k_mean [B, Hkv, D]; the sum runs in fp64 and is
            rounded once to fp32. A request without tokens has mean 0.

        Raises:
            ValueError: wrong shape, dtype, device or indptr, or indptr and kv_indptr of different B.
            GPUArchitectureError: a CUDA GPU below compute capability 8.0.
        """
        floats = (torch.bfloat16, torch.float16, torch.float32)
        q = check_tensor("q", q, shape=("nnz_qo", "Hq", "D"), dtype=floats)
        k = check_tensor("k", k, shape=("nnz_kv", "Hkv", q.shape[2]), dtype=floats, device=q.device)
        q_mean = _segment_mean("indptr", q, indptr)
        k_name = "indptr" if kv_indptr is None else "kv_indptr"
        k_mean = _segment_mean(k_name, k, indptr if kv_indptr is None else kv_indptr)
        if q_mean.shape[0] != k_mean.shape[0]:
            raise ValueError(
                f"kv_indptr: must describe {q_mean.shape[0]} requests like indptr, "
                f"got {k_mean.shape[0]}"
            )
        return SmoothingStats(q_mean, k_mean, channel_index)

    def to(self, device: torch.device | str) -> SmoothingStats:
        """A copy on another device.

        Args:
            device: where the tensors go.

        Returns:
            SmoothingStats, always another object, so not the one that a cache was filled with.
        """

        def move(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if t is None else t.to(device)

        return SmoothingStats(move(self.q_mean), move(self.k_mean), move(self.channel_index))

    def check_against(
        self, config: KVCacheConfig, *, device: torch.device, batch_size: int | None = None
    ) -> None:
        """Check that these statistics serve a cache format.

        Args:
            config: format that they are to be used with.
            device: where they have to be.
            batch_size: requests of the plan; None = do not compare.

        Raises:
            ValueError: another device, a part that config needs is missing, shapes that do not fit,
                a channel beyond head_dim (looked at on the CPU only).
        """
        if self.device != device:
            raise ValueError(f"stats: must be on device {device}, got {self.device}")
        if config.uses_mean:
            if self.q_mean is None:
                raise ValueError(
                    f"stats.q_mean: compensation {config.compensation!r} needs q_mean and k_mean"
                )
            want_q = (config.num_qo_heads, config.head_dim)
            want_k = (config.num_kv_heads, config.head_dim)
            if self.q_mean.shape[-2:] != want_q or self.k_mean.shape[-2:] != want_k:
                raise ValueError(
                    f"stats: q_mean/k_mean must end in {list(want_q)}/{list(want_k)}, got "
                    f"{list(self.q_mean.shape)}/{list(self.k_mean.shape)}"
                )
            if batch_size is not None and self.batch_size not in (None, batch_size):
                raise ValueError(
                    f"stats: per-request statistics must have one row per request of the plan "
                    f"({batch_size}), got {self.batch_size}"
                )
        if config.uses_channels:
            if self.channel_index is None:
                raise ValueError(
                    f"stats.channel_index: compensation {config.compensation!r} needs it"
                )
            want = (config.num_kv_heads, config.channels)
            if tuple(self.channel_index.shape) != want:
                raise ValueError(
                    f"stats.channel_index: must be {list(want)}, got {list(self.channel_index.shape)}"
                )
            if self.channel_index.device.type == "cpu" and self.channel_index.numel():
                top = int(self.channel_index.max())
                if top >= config.head_dim:
                    raise ValueError(
                        f"stats.channel_index: channels must be 0..{config.head_dim - 1}, got {top}"
                    )

    def means_for(
        self, config: KVCacheConfig, batch_indices: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Means in the shape that the numerics use.

        Args:
            config: whether it centres decides.
            batch_indices: int32 [T], row of each token; used by per-request statistics only.

        Returns:
            (q_mean, k_mean) fp32: None each if config does not centre, [H, D] if static, else the
            rows of each token [T, H, D]. Nothing is checked here; check_against() does that.
        """
        if not config.uses_mean:
            return None, None
        if self.is_static:
            return self.q_mean, self.k_mean
        rows = batch_indices.long()
        return self.q_mean[rows], self.k_mean[rows]


def _require_finite_means(q: torch.Tensor, k: torch.Tensor) -> None:
    # why: only host tensors are inspected; a device tensor would force a synchronisation.
    for name, mean in (("q_mean", q), ("k_mean", k)):
        if mean.device.type == "cpu" and not bool(torch.isfinite(mean).all()):
            raise ValueError(f"{name}: must be finite, found NaN or Inf")


def _check_channels(index: torch.Tensor) -> None:
    if index.device.type != "cpu" or index.numel() == 0:
        return
    if int(index.min()) < 0:
        raise ValueError(f"channel_index: must be >= 0, got {int(index.min())}")
    for head, row in enumerate(index.tolist()):
        if len(set(row)) != len(row):
            raise ValueError(f"channel_index: KV head {head} repeats a channel: {row}")


def _segment_mean(name: str, x: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    bounds = check_indptr(name, indptr, x.shape[0])
    if x.device.type == "cuda":
        from mpfa.backends import cuda

        cuda.require_capability("SmoothingStats.from_tensors", x.device)
        return cuda.segment_mean(x.detach(), indptr.to(x.device))
    mean = torch.zeros((len(bounds) - 1, *x.shape[1:]), dtype=torch.float32, device=x.device)
    for b, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if end > begin:
            mean[b] = x[begin:end].detach().double().mean(dim=0).float()
    return mean


def request_rows(bounds: Sequence[int]) -> torch.Tensor:
    """int32 [nnz] on the CPU: the request of each ragged token, that is, its row of statistics."""
    counts = torch.tensor(
        [end - begin for begin, end in zip(bounds, bounds[1:], strict=False)],
        dtype=torch.int64,
        device="cpu",
    )
    return torch.arange(len(counts), dtype=torch.int32, device="cpu").repeat_interleave(counts)


def check_is_stats(stats: object) -> SmoothingStats:
    if not isinstance(stats, SmoothingStats):
        raise TypeError(f"stats: expected SmoothingStats, got {type(stats).__name__}")
    return stats


def refuse_unused(config: KVCacheConfig, stats: SmoothingStats | None) -> None:
    """ValueError for statistics that ``config`` does not use: the caller expects a compensation."""
    if stats is not None and not config.needs_stats:
        check_is_stats(stats)
        raise ValueError(
            f"stats: compensation {config.compensation!r} uses no statistics; pass None, or set "
            "compensation in the KVCacheConfig"
        )


def resolve_stats(
    config: KVCacheConfig,
    stats: SmoothingStats | None,
    batch_indices: torch.Tensor | None,
    num_tokens: int,
    device: torch.device,
) -> tuple[SmoothingStats | None, torch.Tensor | None]:
    """The stats that ``config`` uses and the row of each token; ValueError when something is missing
    or given without need."""
    refuse_unused(config, stats)
    if not config.needs_stats:
        return None, None
    if stats is None:
        raise ValueError(
            f"stats: compensation {config.compensation!r} needs SmoothingStats, got None"
        )
    check_is_stats(stats)
    stats.check_against(config, device=device)
    if stats.is_static or not config.uses_mean:
        return stats, None
    if batch_indices is None:
        raise ValueError(
            f"batch_indices: required with per-request stats ({stats.batch_size} rows), got None"
        )
    check_tensor(
        "batch_indices", batch_indices, shape=(num_tokens,), dtype=torch.int32, device=device
    )
    if stats.batch_size == 0 and num_tokens:
        raise ValueError(
            f"stats: per-request statistics must have at least one row for {num_tokens} tokens, got 0"
        )
    if device.type == "cpu" and num_tokens:
        low, high = int(batch_indices.min()), int(batch_indices.max())
        if low < 0 or high >= stats.batch_size:
            bad = low if low < 0 else high
            raise ValueError(
                f"batch_indices: must be 0..{stats.batch_size - 1} (rows of stats), got {bad}"
            )
    return stats, batch_indices
