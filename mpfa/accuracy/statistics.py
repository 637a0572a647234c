# SPDX-License-Identifier: Apache-2.0
"""Static statistics of every layer from calibration activations, and the runner of a row."""

from __future__ import annotations

from dataclasses import replace

import torch

import mpfa
from mpfa.accuracy.attention import AttentionRunner, PagedRunner
from mpfa.accuracy.baselines import Fp8Runner
from mpfa.accuracy.eigen import EigenBasis, EigenRunner
from mpfa.accuracy.models import Geometry
from mpfa.accuracy.rows import RowSpec


class Statistics:
    """What rows need from the calibration text; each kind is computed once.

    Args:
        collected: q bf16 [T, Hq, D] and k [T, Hkv, D] per layer (a third tensor is ignored).
    """

    def __init__(self, collected: dict[int, tuple[torch.Tensor, ...]]) -> None:
        self._collected = collected
        self._smoothing: dict[tuple, dict[int, mpfa.SmoothingStats]] = {}
        self._bases: dict[tuple, dict[int, EigenBasis]] = {}

    def smoothing(self, row: RowSpec) -> dict[int, mpfa.SmoothingStats] | None:
        """SmoothingStats per layer as the row wants them; None for one that needs no calibration."""
        if not row.needs_calibration or row.is_eigen:
            return None
        centre = row.uses_mean or row.centred_choice
        key = (row.channels, centre, row.centre_q, row.centred_choice)
        if key not in self._smoothing:
            made = {
                layer: mpfa.calibrate([(q, k)], channels=row.channels, center=centre)
                for layer, (q, k, *_) in self._collected.items()
            }
            if row.centred_choice:
                made = {
                    n: mpfa.SmoothingStats(channel_index=s.channel_index) for n, s in made.items()
                }
            if not row.centre_q:
                made = {n: replace(s, q_mean=torch.zeros_like(s.q_mean)) for n, s in made.items()}
            self._smoothing[key] = made
        return self._smoothing[key]

    def bases(self, row: RowSpec) -> dict[int, EigenBasis] | None:
        """Eigenbases per layer; None for a row that takes them from its own tokens."""
        if row.stats != "static":
            return None
        key = (row.channels, row.uses_mean)
        if key not in self._bases:
            self._bases[key] = {
                layer: EigenBasis(q, k, *key) for layer, (q, k, *_) in self._collected.items()
            }
        return self._bases[key]

    def runner(
        self,
        row: RowSpec,
        geometry: Geometry,
        capacity: list[int],
        *,
        layers: range | list[int] | None = None,
        page_size: int = 128,
        seed: int = 0,
    ) -> AttentionRunner:
        """Attention of a row over requests of at most ``capacity`` tokens."""
        if row.is_baseline:
            return Fp8Runner(len(capacity))
        if row.is_eigen:
            return EigenRunner(row, self.bases(row))
        return PagedRunner(
            geometry,
            row,
            capacity,
            layers=layers,
            stats=self.smoothing(row),
            page_size=page_size,
            seed=seed,
        )
