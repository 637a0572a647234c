# SPDX-License-Identifier: Apache-2.0
"""What the launcher refuses, with the argument's name, before anything runs."""

from __future__ import annotations

import pytest
import torch
from sm120_cases import Case, built, launch

CASE = Case(128, (4,), (70,), 2, 2, 64, seed=3)


def replaced(name: str, change) -> dict[str, torch.Tensor]:
    inputs = built(CASE)
    found = {
        "out": torch.empty(4, 4, 128),
        "lse": torch.empty(4, 4),
        "sinks": torch.zeros(4),
        "partial_o": torch.empty(0, 4, 128),
        "partial_lse": torch.empty(0, 4),
    }
    return {name: change(found[name] if name in found else getattr(inputs, name))}


def wide(t: torch.Tensor, extra: int) -> torch.Tensor:
    """The same shape with rows `extra` bytes further apart."""
    return t.new_empty(*t.shape[:-1], t.shape[-1] + extra)[..., : t.shape[-1]]


def shifted(t: torch.Tensor, by: int) -> torch.Tensor:
    return t.new_empty(t.numel() + by)[by:].view(t.shape)


BAD = {
    "q of head_dim 96": ("q", lambda t: t[..., :96]),
    "q rank": ("q", lambda t: t[0]),
    "q dtype": ("q", lambda t: t.float()),
    "q every other byte": ("q", lambda t: wide(t, t.shape[-1])[..., ::1].repeat(1, 1, 2)[..., ::2]),
    "q alignment": ("q", lambda t: wide(t, 2)),
    "q_scale width": ("q_scale", lambda t: t[..., :3]),
    "q_scale alignment": ("q_scale", lambda t: wide(t, 2)),
    "k head_dim": ("k", lambda t: t[..., :96]),
    "k pages": ("k", lambda t: t[:-1]),
    "k rank": ("k", lambda t: t[0]),
    "k row stride": ("k", lambda t: wide(t, 8)),
    "k address": ("k", lambda t: shifted(t, 4)),
    "k_scale page_size": ("k_scale", lambda t: t[:, :, :32]),
    "k_scale width": ("k_scale", lambda t: t[..., :2]),
    "k_scale stride": ("k_scale", lambda t: wide(t, 2)),
    "v heads": ("v", lambda t: t[:, :1]),
    "v head_dim": ("v", lambda t: t[..., :64]),
    "v page_size": ("v", lambda t: t[:, :, :48]),
    "v row stride": ("v", lambda t: wide(t, 8)),
    "v_scale missing": ("v_scale", lambda t: None),
    "v_scale blocks": ("v_scale", lambda t: t[:, :, :1]),
    "v_scale stride": ("v_scale", lambda t: wide(t, 2)),
    "out dtype": ("out", lambda t: t.double()),
    "out shape": ("out", lambda t: t[:, :2]),
    "out alignment": ("out", lambda t: wide(t, 1)),
    "lse shape": ("lse", lambda t: t[:2]),
    "lse dtype": ("lse", lambda t: t.half()),
    "sinks shape": ("sinks", lambda t: t[:3]),
    "sinks dtype": ("sinks", lambda t: t.bfloat16()),
    "partial_o shape": ("partial_o", lambda t: t[:, :2]),
    "partial_lse dtype": ("partial_lse", lambda t: t.double()),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_tensor(what, modules, simulator) -> None:
    name, change = BAD[what]
    # V's shape says how many heads, pages and tokens the others must have.
    named = {"v heads": "k", "v page_size": "page_size"}.get(what, name)
    with pytest.raises(ValueError, match=f"^{named}"):
        launch(built(CASE), modules[128], simulator, **replaced(name, change))
    assert simulator.launches() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sm_scale", 0.0),
        ("sm_scale", float("nan")),
        ("logits_soft_cap", -1.0),
        ("logits_soft_cap", float("inf")),
        ("window_left", -2),
        ("num_workers", 0),
        ("a_comp", torch.zeros(4, 4, 16, dtype=torch.bfloat16)),
        ("row_term", torch.zeros(4, 4)),
    ],
)
def test_bad_value(name, value, modules, simulator) -> None:
    with pytest.raises(ValueError, match=name):
        launch(built(CASE), modules[128], simulator, **{name: value})
    assert simulator.launches() == []


@pytest.mark.parametrize("device", ["9.0", "10.0"])
def test_other_architecture(device, modules, simulator) -> None:
    with (
        simulator.options(device=device),
        pytest.raises(RuntimeError, match=f"12.x, found {device}"),
    ):
        launch(built(CASE), modules[128], simulator)
    assert simulator.launches() == []


def test_module_of_the_other_head_dim(modules, simulator) -> None:
    with pytest.raises(ValueError, match="head_dim 64"):
        launch(built(CASE), modules[64], simulator)
