# SPDX-License-Identifier: Apache-2.0
"""The eigenbasis: exact where nothing is left over, and at least as good as channels."""

from __future__ import annotations

import pytest
import torch

import mpfa
from mpfa.accuracy import synthetic
from mpfa.accuracy.eigen import (
    EigenBasis,
    EigenRunner,
    best_basis,
    residual_energy,
    second_moment,
)
from mpfa.accuracy.metrics import relative_l2
from mpfa.accuracy.rows import parse_row
from mpfa.accuracy.statistics import Statistics
from mpfa.reference import exact_attention


def low_rank(tokens: int, heads: int, directions: torch.Tensor, seed: int) -> torch.Tensor:
    """Integer combinations of the rows of ``directions`` [r, D], bf16-exact."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randint(-3, 4, (tokens, heads, len(directions)), generator=generator)
    return (factors.float() @ directions).bfloat16()


def test_activations_of_few_directions_leave_nothing_for_four_bits():
    """Q and K in a space of 5 axes that no channel is alone in: the slots carry all of the scores."""
    # Hadamard rows: orthogonal, every channel takes part.
    h = torch.ones(1, 1)
    while h.shape[0] < 64:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    q, k = low_rank(40, 4, h[3:8] / 8, seed=0), low_rank(40, 2, h[3:8] / 8, seed=1)
    v = torch.eye(64)[:40, None].expand(-1, 2, -1).bfloat16()
    exact, _ = exact_attention(q, k, v, causal=True)
    error = {}
    for rank, is_enough in ((5, True), (4, False)):
        rest, _ = EigenBasis(q, k, rank, center=False).split(k.float())
        assert (float(rest.abs().max()) < 1e-5) == is_enough
    for key in ("eigen5", "none"):
        runner = Statistics({0: (q, k)}).runner(
            parse_row(key), synthetic.Geometry(1, 4, 2, 64), [40]
        )
        runner.begin([40])
        error[key] = float(relative_l2(runner.attend(0, q, k, v), exact).max())
    # What is left of eigen5 are the bf16 projections and P in e4m3.
    assert error["eigen5"] < 0.03
    assert error["none"] > 2 * error["eigen5"]


def test_basis_is_orthonormal_and_beats_every_choice_of_channels():
    q, k, _ = synthetic.activations(256, seed=0)[2]
    q_moment, k_moment = second_moment(q, 2), second_moment(k, 2)
    basis = best_basis(q_moment, k_moment, 12)
    eye = torch.eye(12, dtype=torch.float64).expand(2, -1, -1)
    assert torch.allclose(basis.mT @ basis, eye, atol=1e-9)
    index = mpfa.calibrate([(q, k)], channels=12, center=False).channel_index.long()
    channels = torch.nn.functional.one_hot(index, 128).double().mT
    best, picked = (
        torch.stack(residual_energy(q_moment, k_moment, b)).prod(dim=0) for b in (basis, channels)
    )
    assert (best < picked).all()
    assert (picked < torch.stack(residual_energy(q_moment, k_moment, basis[..., :0])).prod(0)).all()


def test_basis_of_one_axis_is_that_axis():
    moment = torch.zeros(1, 16, 16, dtype=torch.float64)
    moment[0, 5, 5] = 4.0
    moment[0, 9, 9] = 1.0
    basis = best_basis(moment, moment, 1)
    assert basis[0, :, 0].abs().tolist() == pytest.approx([float(i == 5) for i in range(16)])


def test_second_moment_sums_the_heads_of_a_group():
    x = torch.zeros(2, 4, 16)
    x[0, 0, 0], x[1, 1, 0], x[0, 2, 3] = 1.0, 3.0, 2.0
    moment = second_moment(x, 2)
    assert float(moment[0, 0, 0]) == (1 + 9) / 2
    assert float(moment[1, 3, 3]) == 4 / 2
    assert float(moment[0, 3, 3]) == 0


def test_split_gives_residual_and_projection():
    q, k, _ = synthetic.activations(64, seed=0)[1]
    basis = EigenBasis(q, k, rank=8, center=True)
    x = q.float() - basis.q_mean
    rest, values = basis.split(x)
    own = basis.basis.repeat_interleave(4, dim=0)
    back = rest + torch.einsum("thr,hdr->thd", values.float(), own)
    assert float((back - x).norm() / x.norm()) < 2.0**-8
    assert float(torch.einsum("thd,hdr->thr", rest, own).abs().max()) < 1e-4


def test_static_and_own_bases_are_about_as_good_as_channels():
    """Here the outliers are channels, so a basis can do little better than they do."""
    q, k, v = synthetic.activations(96, seed=1)[1]
    static = Statistics(synthetic.activations(96, seed=0))
    exact, _ = exact_attention(q, k, v, causal=True)
    outs, error = {}, {}
    for key in ("mean+eigen15", "mean+eigen15:request", "mean+channels15", "mean"):
        runner = static.runner(parse_row(key), synthetic.GEOMETRY, [96])
        runner.begin([96])
        outs[key] = runner.attend(1, q, k, v)
        error[key] = float(relative_l2(outs[key], exact).mean())
    assert not torch.equal(outs["mean+eigen15"], outs["mean+eigen15:request"])
    for key in ("mean+eigen15", "mean+eigen15:request"):
        assert error[key] < 1.05 * error["mean+channels15"] < 1.05 * error["mean"]


def test_runner_takes_one_request_in_one_step():
    runner = EigenRunner(parse_row("eigen4"), None)
    with pytest.raises(ValueError, match="one request in one step"):
        runner.begin([3, 4])
