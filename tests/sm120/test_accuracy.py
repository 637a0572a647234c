# SPDX-License-Identifier: Apache-2.0
"""How far the kernel's outputs are from float64 attention on the unquantised inputs, beside BF16
attention and per-tensor FP8."""

from __future__ import annotations

import math

import pytest
import torch
from sm120_cases import (
    Case,
    built,
    launch,
    merged,
    model_values,
    random_values,
    replay,
    sm_scale,
    worst_rel_l2,
)

from mpfa.reference.exact import exact_attention
from mpfa.reference.fp8 import dequantize_fp8, quantize_fp8
from mpfa.reference.replay import KVOperands, QueryOperands, Scheme, attend_request


def raw_values(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The one request's bf16 inputs, as sm120_cases quantises them."""
    if case.data == "model":
        (values,) = model_values(case)
    else:
        (values,) = random_values(case, torch.Generator().manual_seed(1000 + case.seed))
    return values


def distance(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """(cosine, rel L2) over everything."""
    a, b = got.double().flatten(), want.double().flatten()
    cosine = float(a @ b / (a.norm() * b.norm()))
    return cosine, float((a - b).norm() / b.norm())


def per_tensor_fp8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
    """The same walk with one fp32 scale per tensor and P at a fixed 2^8."""
    q, k, v = (dequantize_fp8(*quantize_fp8(x)) for x in (q, k, v))
    scheme = Scheme(128 if case.head_dim == 64 else 64, "fixed256")
    o, _ = attend_request(QueryOperands(q), KVOperands(k, v), causal=case.causal, scheme=scheme)
    return o


ACCURACY = [
    (Case(128, (96,), (1024,), 1, 1, seed=1), 0.06),
    (Case(64, (96,), (1024,), 1, 1, seed=2), 0.06),
    (Case(128, (512,), (512,), 1, 1, causal=True, seed=3), 0.06),
    (Case(128, (96,), (512,), 1, 2, data="biased", causal=True, seed=4), 0.3),
    (Case(64, (96,), (512,), 1, 2, data="biased", causal=True, seed=5), 0.3),
    (Case(128, (96,), (1024,), 1, 1, data="sink", seed=6), 0.12),
]
REAL = Case(64, (500,), (500,), 3, 3, causal=True, data="model")


def compare(case: Case, bound: float, modules, simulator, capsys) -> None:
    q, k, v = raw_values(case)
    exact, _ = exact_attention(q, k, v, causal=case.causal, sm_scale=sm_scale(case))
    inputs = built(case)
    got = merged(inputs, launch(inputs, modules[case.head_dim], simulator))
    assert worst_rel_l2(case, got.out, replay(inputs).out) <= 2e-3
    bf16 = torch.nn.functional.scaled_dot_product_attention(
        *(x.bfloat16().transpose(0, 1) for x in (q, k, v)),
        attn_mask=causal_mask(*q.shape[:1], *k.shape[:1]) if case.causal else None,
        enable_gqa=True,
    ).transpose(0, 1)
    rows = {
        "mxfp8 kernel": got.out,
        "per-tensor fp8": per_tensor_fp8(q, k, v, case),
        "bf16": bf16,
    }
    with capsys.disabled():
        for name, out in rows.items():
            cosine, error = distance(out, exact)
            print(f"\n{case.name:40} {name:15} cos {cosine:.6f}  rel L2 {error:.4f}", end="")
    cosine, error = distance(got.out, exact)
    assert error <= bound
    assert cosine >= 1 - bound**2
    assert math.isfinite(error)


def causal_mask(lq: int, lk: int) -> torch.Tensor:
    return torch.ones(lq, lk, dtype=torch.bool).tril(lk - lq)


@pytest.mark.parametrize(("case", "bound"), ACCURACY, ids=lambda x: getattr(x, "name", ""))
def test_distance_to_exact_attention(case, bound, modules, simulator, capsys) -> None:
    with simulator.options(watch="none", mode="random"):
        compare(case, bound, modules, simulator, capsys)


@pytest.mark.slow
def test_real_model(modules, simulator, capsys) -> None:
    with simulator.options(watch="none", mode="random"):
        compare(REAL, 0.3, modules, simulator, capsys)
