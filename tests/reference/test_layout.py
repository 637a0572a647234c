# SPDX-License-Identifier: Apache-2.0
"""Scale atoms: every byte against the formula of the format."""

import pytest
import torch

from mpfa.reference.layout import pack_scale_atoms, scale_atom_offset, unpack_scale_atoms


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_byte_is_where_the_formula_says(head_dim):
    blocks = head_dim // 16
    row = torch.arange(128)[:, None].expand(128, blocks).to(torch.uint8)
    k16 = torch.arange(blocks).expand(128, blocks).to(torch.uint8)
    rows, ks = pack_scale_atoms(torch.stack([row, k16]))
    assert rows.shape == (head_dim // 64, 512)
    seen = set()
    for r in range(128):
        for k in range(blocks):
            atom, byte = k * 16 // 64, (r % 32) * 16 + (r // 32) * 4 + (k * 16 % 64) // 16
            assert int(rows[atom, byte]) == r and int(ks[atom, byte]) == k
            assert scale_atom_offset(r, k) == (atom, byte)
            seen.add((atom, byte))
    assert len(seen) == 128 * blocks


def test_known_bytes():
    assert scale_atom_offset(0, 0) == (0, 0)
    assert scale_atom_offset(1, 0) == (0, 16)
    assert scale_atom_offset(32, 0) == (0, 4)
    assert scale_atom_offset(0, 3) == (0, 3)
    assert scale_atom_offset(127, 7) == (1, 511)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (0, 2)])
def test_pack_unpack_inverse(head_dim, lead):
    g = torch.Generator().manual_seed(head_dim)
    scale = torch.randint(0, 256, (*lead, 128, head_dim // 16), generator=g, dtype=torch.uint8)
    atoms = pack_scale_atoms(scale)
    assert atoms.shape == (*lead, head_dim // 64, 512) and atoms.is_contiguous()
    assert torch.equal(unpack_scale_atoms(atoms), scale)
    assert torch.equal(pack_scale_atoms(unpack_scale_atoms(atoms)), atoms)


def test_offset_of_tensors():
    row, k16 = torch.arange(128)[:, None], torch.arange(8)
    atom, byte = scale_atom_offset(row, k16)
    scale = torch.randint(0, 256, (128, 8), dtype=torch.uint8)
    assert torch.equal(pack_scale_atoms(scale)[atom.expand(128, 8), byte], scale)


def test_bad_shapes():
    with pytest.raises(ValueError, match="scale: shape"):
        pack_scale_atoms(torch.zeros(64, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="scale: shape"):
        pack_scale_atoms(torch.zeros(128, 6, dtype=torch.uint8))
    with pytest.raises(ValueError, match="atoms: shape"):
        unpack_scale_atoms(torch.zeros(2, 256, dtype=torch.uint8))
