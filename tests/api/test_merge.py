# SPDX-License-Identifier: Apache-2.0
"""merge_states: any split equals the unsplit attention, in both bases."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import assert_lse_close, dense_attention, make_batch
from hypothesis import given
from hypothesis import strategies as st

import mpfa

BASES = {"log2": math.log2(math.e), "ln": 1.0}


def split_states(q, k, v, cuts, base, sinks=None):
    """States of the key ranges between cuts; a sink belongs to the first range only."""
    bounds = [0, *cuts, k.shape[0]]
    outs, lses = [], []
    for n, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        part_sinks = sinks if n == 0 else None
        out, lse = dense_attention(q, k[begin:end], v[begin:end], sinks=part_sinks)
        outs.append(out.float())
        lses.append((lse * BASES[base]).float())
    return torch.stack(outs), torch.stack(lses)


@given(
    num_keys=st.integers(0, 40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    base=st.sampled_from(sorted(BASES)),
    with_sinks=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 8.0]),
    seed=st.integers(0, 1000),
)
def test_any_split_equals_the_unsplit(num_keys, cuts, base, with_sinks, scale, seed) -> None:
    batch = make_batch([3], [num_keys], 4, 2, 64, seed=seed, scale=scale)
    q, k, v = batch.q[0], batch.k[0], batch.v[0]
    sinks = torch.linspace(-3, 3, 4) if with_sinks else None
    cuts = sorted(min(c, num_keys) for c in cuts)
    states, lses = split_states(q, k, v, cuts, base, sinks)
    out, lse = mpfa.merge_states(states, lses, lse_base=base)
    want, want_lse = dense_attention(q, k, v, sinks=sinks)
    assert out.dtype == torch.float32 and lse.dtype == torch.float32
    top = want_lse[~torch.isneginf(want_lse)].abs().max().item() if num_keys or with_sinks else 0
    # An LSE is stored in fp32, so weights carry its absolute rounding.
    unit = 2.0**-23 * max(1.0, top * 1.5)
    assert (out.double() - want).abs().max().item() <= 8 * unit * 4
    assert_lse_close(lse, want_lse * BASES[base], 8 * unit * 1.5)


def test_default_base_is_log2() -> None:
    """Two states of equal value: the weights tell the base (FlashInfer issue 4485)."""
    v = torch.zeros(2, 1, 1, 64)
    v[1] = 1.0
    lse = torch.tensor([0.0, 1.0]).view(2, 1, 1)
    out, merged = mpfa.merge_states(v, lse)
    torch.testing.assert_close(out, torch.full((1, 1, 64), 2 / 3))
    torch.testing.assert_close(merged, torch.full((1, 1), math.log2(3.0)))
    out, merged = mpfa.merge_states(v, lse, "ln")
    torch.testing.assert_close(out, torch.full((1, 1, 64), math.e / (1 + math.e)))
    torch.testing.assert_close(merged, torch.full((1, 1), math.log(1 + math.e)))


@pytest.mark.parametrize("base", sorted(BASES))
def test_one_state_comes_back_unchanged(base: str) -> None:
    v = torch.randn(1, 5, 2, 64)
    lse = torch.randn(1, 5, 2) * 50
    out, merged = mpfa.merge_states(v, lse, base)
    assert torch.equal(out, v[0])
    torch.testing.assert_close(merged, lse[0], rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize("base", sorted(BASES))
@pytest.mark.parametrize("n", [1, 3])
def test_empty_states(base: str, n: int) -> None:
    v = torch.zeros(n, 2, 2, 64)
    lse = torch.full((n, 2, 2), -math.inf)
    out, merged = mpfa.merge_states(v, lse, base)
    assert (out == 0).all() and (merged == -math.inf).all()
    # Rows of a state without keys may hold anything; it has no weight.
    v = torch.full((n, 2, 2, 64), math.nan)
    lse[n - 1, 0] = -7.25
    v[n - 1, 0] = 3.0
    out, merged = mpfa.merge_states(v, lse, base)
    assert (out[0] == 3).all()
    torch.testing.assert_close(merged[0], torch.full((2,), -7.25))
    assert (out[1] == 0).all() and (merged[1] == -math.inf).all()


@pytest.mark.parametrize("base", sorted(BASES))
def test_nan_is_not_an_empty_state(base: str) -> None:
    v, lse = torch.ones(2, 3, 1, 64), torch.zeros(2, 3, 1)
    lse[0, 0] = math.nan
    v[1, 1] = math.nan
    out, merged = mpfa.merge_states(v, lse, base)
    assert out[:2].isnan().all() and (out[2] == 1).all()
    assert merged[:, 0].isnan().tolist() == [True, False, False]


def test_order_of_magnitude_of_lse_does_not_matter() -> None:
    for offset in (-1e4, 0.0, 1e4):
        v = torch.stack([torch.zeros(1, 1, 64), torch.ones(1, 1, 64)])
        lse = torch.tensor([offset, offset]).view(2, 1, 1)
        out, merged = mpfa.merge_states(v, lse)
        assert (out == 0.5).all() and merged.item() == offset + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_result_has_the_dtype_of_v_and_inputs_stay(dtype: torch.dtype) -> None:
    v, lse = torch.randn(3, 4, 2, 64).to(dtype), torch.randn(3, 4, 2)
    before = v.clone(), lse.clone()
    out, merged = mpfa.merge_states(v, lse)
    assert out.dtype == dtype and merged.dtype == torch.float32
    assert torch.equal(v, before[0]) and torch.equal(lse, before[1])
    w = torch.softmax(lse.double() * math.log(2.0), dim=0)
    want = (w[..., None] * v.double()).sum(0)
    eps = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 1e-6}[dtype]
    torch.testing.assert_close(out.double(), want, rtol=eps, atol=1e-6)


def test_no_rows() -> None:
    out, merged = mpfa.merge_states(torch.zeros(2, 0, 2, 64), torch.zeros(2, 0, 2))
    assert out.shape == (0, 2, 64) and merged.shape == (0, 2)


@pytest.mark.parametrize(
    "v,lse,base,match",
    [
        (torch.zeros(0, 2, 2, 64), torch.zeros(0, 2, 2), "log2", r"v: .*n=0"),
        (torch.zeros(2, 2, 64), torch.zeros(2, 2), "log2", r"v: shape must be \[n, S, H, D\]"),
        (torch.zeros(2, 3, 2, 64), torch.zeros(2, 3, 1), "log2", r"lse: shape must be \[2, 3, 2\]"),
        (
            torch.zeros(2, 3, 2, 64),
            torch.zeros(2, 3, 2).double(),
            "log2",
            "lse: dtype must be float32",
        ),
        (
            torch.zeros(2, 3, 2, 64).double(),
            torch.zeros(2, 3, 2),
            "log2",
            "v: dtype must be bfloat16",
        ),
        (
            torch.zeros(2, 3, 2, 64),
            torch.zeros(2, 3, 2),
            "log10",
            "lse_base: must be one of 'log2', 'ln'",
        ),
        (
            torch.zeros(2, 3, 2, 64),
            torch.zeros(2, 3, 2, device="meta"),
            "log2",
            "lse: must be on device cpu",
        ),
    ],
)
def test_bad_arguments(v, lse, base, match) -> None:
    with pytest.raises(ValueError, match=match):
        mpfa.merge_states(v, lse, base)


@pytest.mark.parametrize("value", [None, [1.0]])
def test_not_a_tensor(value: object) -> None:
    with pytest.raises(TypeError, match="lse: expected a torch.Tensor"):
        mpfa.merge_states(torch.zeros(1, 1, 1, 64), value)


@pytest.mark.parametrize("base", sorted(BASES))
@pytest.mark.parametrize("use_sinks", [False, True])
def test_merging_wrapper_results_over_disjoint_pages(base: str, use_sinks: bool) -> None:
    """Cascade: prefix and suffix of a cache run on their own; sinks join only one of them."""
    from attention_cases import Paged, config_for, int32, paged, run_prefill

    batch = make_batch([4, 2], [256, 384], 4, 2, 64, seed=3)
    config = config_for(batch, "bf16", page_size=64)
    pages = paged(batch, config)
    sinks = torch.tensor([0.0, 2.0, -1.0, 5.0]) if use_sinks else None
    opts = {"config": config}

    def run(kv, sinks):
        buffers = {"out": torch.empty(6, 4, 64), "sinks": sinks, "lse_base": base}
        return run_prefill(batch, pages.cache, table=kv, run=buffers, **opts)

    whole = run(pages.table, sinks)
    p = pages.indices
    first = Paged(pages.cache, int32([0, 1, 3]), p[[0, 4, 5]], int32([64, 64])).table
    rest = Paged(pages.cache, int32([0, 3, 7]), p[[1, 2, 3, 6, 7, 8, 9]], int32([64, 64])).table
    a, b = run(first, sinks), run(rest, None)
    out, lse = mpfa.merge_states(torch.stack([a[0], b[0]]), torch.stack([a[1], b[1]]), base)
    torch.testing.assert_close(out, whole[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, whole[1], rtol=0, atol=4e-6)
