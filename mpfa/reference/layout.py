# SPDX-License-Identifier: Apache-2.0
"""Scale atoms: the 512-byte order in which 128-token pages store NVFP4 scales.

One atom holds the scales of 128 rows and 64 channels (four 16-channel blocks) in the order that
tcgen05.cp copies to tensor memory: 32 lanes of 16 bytes, and in a lane four bytes for each of the
rows lane, lane+32, lane+64 and lane+96.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

ATOM_ROWS = 128
ATOM_BLOCKS = 4
ATOM_BYTES = 512

IndexT = TypeVar("IndexT", int, Tensor)


def scale_atom_offset(row: IndexT, k16: IndexT) -> tuple[IndexT, IndexT]:
    """(atom, byte in the atom) of the scale of ``row`` (0..127) and channel block ``k16``.

    Works on ints and, elementwise, on integer tensors.
    """
    return k16 // 4, (row % 32) * 16 + (row // 32) * 4 + k16 % 4


def pack_scale_atoms(scale: Tensor) -> Tensor:
    """Linear scales ``[..., 128, D/16]`` to atoms ``[..., D/64, 512]``, bytes in atom order."""
    if scale.dim() < 2 or scale.shape[-2] != ATOM_ROWS or scale.shape[-1] % ATOM_BLOCKS:
        raise ValueError(
            f"scale: shape {tuple(scale.shape)}, it must end in (128, a multiple of 4)"
        )
    rows = scale.unflatten(-1, (-1, ATOM_BLOCKS)).unflatten(-3, (4, 32))
    return torch.movedim(rows, (-2, -3, -4), (-4, -3, -2)).contiguous().flatten(-3)


def unpack_scale_atoms(atoms: Tensor) -> Tensor:
    """Inverse of :func:`pack_scale_atoms`: ``[..., D/64, 512]`` to ``[..., 128, D/16]``."""
    if atoms.dim() < 2 or atoms.shape[-1] != ATOM_BYTES:
        raise ValueError(f"atoms: shape {tuple(atoms.shape)}, the last dimension must be 512")
    lanes = atoms.unflatten(-1, (32, 4, ATOM_BLOCKS))
    linear = torch.movedim(lanes, (-4, -3, -2), (-2, -3, -4)).contiguous()
    return linear.flatten(-2).flatten(-3, -2)
