# SPDX-License-Identifier: Apache-2.0
"""Checks of the statistics and combine kernels against the reference; each returns a list of faults.

exp2 and log2 differ between libraries by an ulp or two, so the merge is held to a tolerance and, run
twice, to equal bits. Cases are (name, function) pairs; needs torch and mpfa, no pytest.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mpfa.merge import merge_base2
from mpfa.stats import SmoothingStats

Check = Callable[[torch.device, object], list[str]]


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.cpu().contiguous().view(torch.int32 if t.dtype.itemsize == 4 else torch.int16)


def check_means(
    lengths: list[int], heads: int, dim: int, dtype: torch.dtype, device: torch.device, backend
) -> list[str]:
    gen = torch.Generator().manual_seed(sum(lengths) + heads)
    x = torch.randn(sum(lengths), heads, dim, generator=gen) + 3.0
    x[:, :, 1] -= 3.0  # cancels
    x = x.to(dtype)
    bounds = [0]
    for n in lengths:
        bounds.append(bounds[-1] + n)
    indptr = torch.tensor(bounds, dtype=torch.int32)
    want = SmoothingStats.from_tensors(x, x, indptr).k_mean
    wide = torch.cat([x, x], dim=2)[..., :dim].to(device)  # any token stride
    got = backend.segment_mean(wide, indptr.to(device))
    again = backend.segment_mean(wide, indptr.to(device))
    faults = []
    if not torch.equal(_bits(got), _bits(again)):
        faults.append("means: two runs differ")
    got = got.cpu()
    ulp = torch.finfo(torch.float32).eps * want.abs()
    scale = x.float().abs().mean()
    bad = ((got.double() - want.double()).abs() > ulp + 2.0**-40 * scale).nonzero()
    if len(bad):
        at = tuple(bad[0].tolist())
        faults.append(
            f"means: {len(bad)} off, first at {at}: {float(got[at])!r} {float(want[at])!r}"
        )
    exact = float((_bits(got) == _bits(want)).float().mean())
    if exact < 0.999:
        faults.append(f"means: only {exact:.4%} are the reference's bits")
    return faults


def check_skewed_means(device: torch.device, backend) -> list[str]:
    """One long request among empty ones is a single slice, whose rounding errors all have one sign:
    without folding the sum is off by 24."""
    tokens, requests = 1 << 16, 400
    x = torch.full((tokens, 1, 8), 0.5 + 2.0**-11)
    x[0] = 2.0**24
    x[1, 0, 4:] = 0.25
    indptr = torch.tensor([0, *[tokens] * requests], dtype=torch.int32)
    assert backend.num_slices(tokens, requests) == 1
    want = SmoothingStats.from_tensors(x, x, indptr).k_mean
    got = backend.segment_mean(x.to(device), indptr.to(device)).cpu()
    if torch.equal(_bits(got), _bits(want)):
        return []
    return [f"skewed means: {got[0].tolist()}, expected {want[0].tolist()}"]


def _states(rows: int, heads: int, dim: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    v = torch.randn(rows, heads, dim, generator=gen)
    lse = torch.randn(rows, heads, generator=gen) * 12.0
    empty = torch.rand(rows, heads, generator=gen) < 0.2
    lse[empty] = -torch.inf
    v[empty] = torch.nan  # a state without keys may hold anything
    return v, lse


def _compare(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> list[str]:
    got, want = got.cpu().float(), want.float()
    special = ~torch.isfinite(want)
    if not torch.equal(got[special].nan_to_num(7.0), want[special].nan_to_num(7.0)):
        return [f"{name}: infinities differ"]
    off = (got - want).abs() > tolerance * (1.0 + want.abs())
    off |= ~torch.isfinite(got) & ~special
    bad = off.nonzero()
    if len(bad) == 0:
        return []
    at = tuple(bad[0].tolist())
    return [
        f"{name}: {len(bad)} off, first at {at}: {float(got[at])!r}, expected {float(want[at])!r}"
    ]


def check_merge(
    n: int, tokens: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device, backend
) -> list[str]:
    v, lse = _states(n * tokens, heads, dim, n)
    v, lse = v.to(dtype).view(n, tokens, heads, dim), lse.view(n, tokens, heads)
    want, want_lse = merge_base2(v.float(), lse)
    first = backend.merge_base2(v.to(device), lse.to(device))
    second = backend.merge_base2(v.to(device), lse.to(device))
    faults = [] if torch.equal(_bits(first[0]), _bits(second[0])) else ["merge: two runs differ"]
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}[dtype]
    faults += _compare("merge v", first[0], want, tolerance)
    return faults + _compare("merge lse", first[1], want_lse, 2e-6)


def check_combine(
    counts: list[int], states: int, heads: int, dim: int, dtype: torch.dtype, finish: bool,
    device: torch.device, backend,
) -> list[str]:  # fmt: skip
    """A merge index with any number of partitions per token, optional row term and sinks."""
    begins = [0]
    for count in counts:
        begins.append(begins[-1] + count)
    rows = begins[-1] * states
    v, lse = _states(max(rows, 1), heads, dim, rows + heads)
    gen = torch.Generator().manual_seed(5)
    row_term = torch.randn(len(counts), heads, generator=gen) * 50 if finish else None
    sinks = torch.randn(heads, generator=gen) * 3 if finish else None
    out = torch.full((len(counts), heads, dim), 77.0, dtype=dtype)
    out_lse = torch.full((len(counts), heads), 77.0)
    want, want_lse = out.float().clone(), out_lse.clone()
    for t, count in enumerate(counts):
        if count == 0:
            continue
        part = slice(begins[t] * states, begins[t + 1] * states)
        o, merged = merge_base2(v[part], lse[part])
        if finish:
            merged = merged + 0.25 * row_term[t]
            both = torch.logaddexp2(merged, sinks * math.log2(math.e))
            keep = torch.where(merged == -torch.inf, 0.0, torch.exp2(merged - both))
            o, merged = o * keep[:, None], both
        want[t], want_lse[t] = o, merged
    got, got_lse = out.to(device), out_lse.to(device)

    def move(t):
        return None if t is None else t.to(device)

    backend.combine(
        move(v), move(lse), torch.tensor(begins, dtype=torch.int32, device=device), got, got_lse,
        states_per_partition=states, row_term=move(row_term), row_scale=0.25, sinks=move(sinks),
    )  # fmt: skip
    tolerance = {torch.float32: 4e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}[dtype]
    return _compare("combine o", got, want, tolerance) + _compare(
        "combine lse", got_lse, want_lse, 4e-6
    )


def checks(small: bool = False) -> list[tuple[str, Check]]:
    found: list[tuple[str, Check]] = []

    def add(name: str, function, *args) -> None:
        found.append((name, lambda device, backend: function(*args, device, backend)))

    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for i, dtype in enumerate(dtypes):
        lengths = [[1], [0, 3, 0, 70], [257, 5, 0, 300]][i]
        add(f"means-{lengths}-{dtype}", check_means, lengths, 2 + i, (64, 128, 256)[i], dtype)
        add(f"merge-{i}", check_merge, (1, 2, 9)[i], 3, 5, (64, 128, 256)[i], dtype)
        for finish in (False, True):
            add(f"combine-{i}-{finish}", check_combine, [3, 0, 1, 8, 17], 1 + i, 3,
                (256, 64, 128)[i], dtype, finish)  # fmt: skip
    add("means-skewed", check_skewed_means)
    add("combine-many", check_combine, [300, 2, 0, 600], 1, 2, 64, torch.float32, False)
    add("combine-4-states", check_combine, [2, 3, 70], 4, 2, 128, torch.bfloat16, True)
    if not small:
        for dtype in dtypes:
            add(f"means-long-{dtype}", check_means, [5000, 1, 12000, 0, 700], 8, 128, dtype)
        add("combine-wide", check_combine, [i % 40 for i in range(500)], 4, 32, 128,
            torch.bfloat16, False)  # fmt: skip
        add("merge-wide", check_merge, 33, 300, 32, 128, torch.float16)
    return found
