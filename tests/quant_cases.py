# SPDX-License-Identifier: Apache-2.0
"""Cases of the quantise, cache-write, statistics and combine kernels, and the comparison with the
reference, byte for byte over every output tensor (untouched bytes included).

One list for the GPU (tests/gpu), for the simulator and for the plain script; needs torch and mpfa,
no pytest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from mpfa.backends import reference
from mpfa.cache import PagedKVCache, page_layout
from mpfa.config import KVCacheConfig
from mpfa.reference.mxfp8 import encode_scaled
from mpfa.stats import SmoothingStats

COMPENSATIONS = (("none", 0), ("mean", 0), ("channels", 16), ("mean+channels", 15))
TOKENS = (1, 2, 17, 31, 33, 64, 127, 129, 257, 640, 1023)
GROUPS = (1, 3, 4, 5, 8)
DIMS = (128, 64, 256)
VIEWS = ("dense", "fused", "odd")


@dataclass(frozen=True)
class Case:
    """One call (or, with splits, a chain of appends)."""

    kind: str  # "append", "kv" or "query"
    format: str
    tokens: int
    page_size: int = 16
    compensation: str = "none"
    channels: int = 0
    four_over_six: bool = False
    head_dim: int = 128
    num_kv_heads: int = 2
    group_size: int = 4
    dtype: torch.dtype = torch.bfloat16
    slot_dtype: torch.dtype = torch.int32
    per_request: bool = False
    with_q: bool = False
    view: str = "dense"  # how inputs and pages lie in memory: contiguous, aligned strides, odd ones
    slots: str = "random"  # "random", "sequence", "skip", "corner"
    splits: int = 1  # calls that the tokens are cut into
    seed: int = 0

    @property
    def name(self) -> str:
        parts = [self.kind, self.format, self.compensation, f"c{self.channels}"]
        parts += ["46"] if self.four_over_six else []
        parts += [
            f"ps{self.page_size}",
            f"d{self.head_dim}",
            f"h{self.num_kv_heads}x{self.group_size}",
        ]
        parts += [f"t{self.tokens}", str(self.dtype).removeprefix("torch."), self.view, self.slots]
        parts += ["rows"] if self.per_request else []
        parts += ["q"] if self.with_q else []
        parts += ["i64"] if self.slot_dtype == torch.int64 else []
        parts += [f"split{self.splits}"] if self.splits > 1 else []
        return "-".join(parts)

    @property
    def config(self) -> KVCacheConfig:
        return KVCacheConfig(
            format=self.format,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            num_qo_heads=self.num_kv_heads * self.group_size,
            compensation=self.compensation,
            channels=self.channels,
            four_over_six=self.four_over_six,
        )


def cases() -> list[Case]:
    """The committed list; every factor level occurs with every compensation, and named corners."""
    found = [*_append_qk4pv8(), *_append_mxfp8(), *_ragged(), *_corners()]
    return [replace(case, seed=i) for i, case in enumerate(found)]


def small_cases() -> list[Case]:
    """Those a slow executor can run: few tokens, every code path of the writers."""
    return [c for c in cases() if c.tokens * c.num_kv_heads * c.head_dim <= 1 << 14]


def _cycle(i: int) -> dict[str, object]:
    return {
        "head_dim": DIMS[i % 3],
        "group_size": GROUPS[i % 5],
        "num_kv_heads": (2, 1, 3, 8)[i // 2 % 4],
        "dtype": (torch.bfloat16, torch.float16)[i // 3 % 2],
        "view": VIEWS[(i + i // 3) % 3],
        "tokens": TOKENS[i % 11],
        "per_request": i % 2 == 1,
    }


def _append_qk4pv8() -> Iterator[Case]:
    i = 0
    for compensation, channels in COMPENSATIONS:
        for four_over_six in (False, True):
            for page_size in (1, 16, 32, 64, 128):
                yield Case(
                    "append", "qk4pv8", page_size=page_size, compensation=compensation,
                    channels=max(channels - (i % 7 if channels else 0), 0),
                    four_over_six=four_over_six,
                    slot_dtype=(torch.int32, torch.int64)[i // 2 % 2],
                    with_q=i % 3 != 0, slots=("random", "sequence", "skip")[i // 4 % 3],
                    **_cycle(i),
                )  # fmt: skip
                i += 1


def _append_mxfp8() -> Iterator[Case]:
    for i in range(24):
        yield Case(
            "append", "mxfp8", page_size=(32, 64, 128)[i % 3],
            slot_dtype=(torch.int32, torch.int64)[i // 2 % 2], with_q=i % 2 == 0,
            slots=("random", "sequence", "skip")[i // 3 % 3], splits=(1, 1, 2, 5)[i % 4],
            **{**_cycle(i + i // 3), "per_request": False},
        )  # fmt: skip


def _ragged() -> Iterator[Case]:
    i = 3
    for kind in ("kv", "query"):
        for compensation, channels in COMPENSATIONS:
            for four_over_six in (False, True):
                yield Case(kind, "qk4pv8", compensation=compensation, channels=channels,
                           four_over_six=four_over_six, **_cycle(i))  # fmt: skip
                i += 1
        for _ in range(6):
            yield Case(kind, "mxfp8", page_size=32, **{**_cycle(i), "per_request": False})
            i += 1


def _corners() -> Iterator[Case]:
    both = {"compensation": "mean+channels", "channels": 15, "four_over_six": True}
    yield Case("append", "qk4pv8", 4097, 128, **both, num_kv_heads=8, with_q=True)
    yield Case("append", "qk4pv8", 4097, 16, head_dim=64, group_size=8, slots="skip")
    yield Case("append", "qk4pv8", 4096, 1, **both, head_dim=256, group_size=1)
    yield Case("append", "qk4pv8", 5, 128, **both, slots="corner", with_q=True)
    yield Case("append", "qk4pv8", 3, 64, slots="corner", slot_dtype=torch.int64)
    yield Case("append", "qk4pv8", 40, 16, "channels", 1, group_size=16, head_dim=64)
    yield Case("append", "qk4pv8", 40, 16, "mean", group_size=16, head_dim=64, with_q=True)
    yield Case("append", "qk4pv8", 40, 32, "mean", group_size=12, head_dim=128)
    yield Case("append", "mxfp8", 4097, 128, num_kv_heads=4, with_q=True)
    yield Case("append", "mxfp8", 4096, 64, slots="sequence", head_dim=256)
    yield Case("append", "mxfp8", 97, 128, slots="sequence", splits=97, num_kv_heads=1)
    yield Case("append", "mxfp8", 300, 64, slots="random", splits=40, head_dim=64)
    yield Case("append", "mxfp8", 3, 32, slots="corner")
    yield Case("append", "mxfp8", 64, 32, slots="decode", num_kv_heads=8)
    yield Case("append", "mxfp8", 9000, 128, slots="sequence", num_kv_heads=8)


# ---- inputs ----


@dataclass
class Inputs:
    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor | None
    slots: torch.Tensor | None
    rows: torch.Tensor | None
    bounds: list[int] | None
    stats: SmoothingStats | None
    pages: dict[str, torch.Tensor]  # initial cache tensors, by name


def activations(case: Case, heads: int, gen: torch.Generator) -> torch.Tensor:
    """Random, channel-biased, tie-heavy, tiny and zero rows side by side."""
    t, d = case.tokens, case.head_dim
    x = torch.randn(t, heads, d, generator=gen)
    x *= torch.exp2(torch.randint(-6, 4, (t, heads, 1), generator=gen).float())
    x[:, :, 3 % d] += 30.0
    x[:, :, d // 2] -= 80.0
    grid = torch.randint(-24, 25, (t, heads, d), generator=gen) / 4.0
    x[2::5] = grid[2::5]
    x[4::11] *= 2.0**-12
    x[6::13] = 0.0
    x[7::13, :, ::2] = -0.0
    return x.to(case.dtype)


def _place(x: torch.Tensor, view: str, gen: torch.Generator) -> torch.Tensor:
    """x as a view of a larger buffer: last dimension contiguous, other strides wider."""
    if view == "dense":
        return x.clone()
    pad = {"fused": 16, "odd": 3}[view] if x.dtype.itemsize > 1 else {"fused": 16, "odd": 5}[view]
    wide = torch.empty((*x.shape[:-1], x.shape[-1] + pad), dtype=x.dtype)
    _fill(wide, gen)
    out = wide[..., pad - 1 if view == "odd" else 0 :][..., : x.shape[-1]]
    _copy(out, x)
    return out


def _copy(out: torch.Tensor, x: torch.Tensor) -> None:
    if x.dtype.itemsize == 1:
        out.view(torch.uint8).copy_(x.view(torch.uint8))
    else:
        out.copy_(x)


def _fill(t: torch.Tensor, gen: torch.Generator) -> None:
    """Random bytes (8-bit types) or values: a byte that should stay is seen when it does not."""
    if t.dtype.itemsize == 1:
        t.view(torch.uint8).copy_(torch.randint(0, 256, t.shape, generator=gen, dtype=torch.uint8))
    else:
        t.copy_(torch.randn(t.shape, generator=gen))


def _slots(case: Case, num_pages: int, gen: torch.Generator) -> torch.Tensor:
    total, ps = num_pages * case.page_size, case.page_size
    if case.slots == "corner":  # the last slot of the last page, and the first slot
        slots = torch.full((case.tokens,), -1, dtype=torch.int64)
        if case.format == "mxfp8":
            slots[: case.tokens] = torch.arange(total - case.tokens, total)
        else:
            slots[-1], slots[0] = total - 1, 0
    elif case.slots == "sequence":
        start = ps // 2 + 3 if num_pages * ps > case.tokens + ps else 0
        slots = torch.arange(start, start + case.tokens)
    elif case.format == "mxfp8":
        slots = _interleaved_runs(case, num_pages, gen)
    else:
        slots = torch.randperm(total, generator=gen)[: case.tokens]
    if case.slots == "skip":
        keep = torch.rand(case.tokens, generator=gen) > 0.3
        slots = torch.where(keep, slots, -1 - slots) if case.format != "mxfp8" else slots
    return slots.to(case.slot_dtype)


def _interleaved_runs(case: Case, num_pages: int, gen: torch.Generator) -> torch.Tensor:
    """Runs inside pages, in order in each page, mixed with one another and with skipped tokens."""
    ps = case.page_size
    runs, left = [], case.tokens
    for page in torch.randperm(num_pages, generator=gen).tolist():
        if left == 0:
            break
        begin = int(torch.randint(0, ps, (1,), generator=gen))
        length = 1 if case.slots == "decode" else min(left, ps - begin)
        if case.slots == "skip" and length > 3:
            length -= 2
        runs.append(list(range(page * ps + begin, page * ps + begin + length)))
        left -= length
    runs.append([-1 - i for i in range(left)])
    owner = torch.cat([torch.full((len(r),), i) for i, r in enumerate(runs)])
    if case.slots == "random":
        owner = owner[torch.randperm(len(owner), generator=gen)]
    cursors = [iter(r) for r in runs]
    return torch.tensor([next(cursors[i]) for i in owner.tolist()], dtype=torch.int64)


def _agree_with_tail(pages: dict[str, torch.Tensor]) -> None:
    """Every block of V becomes what v_tail gives under random scales, so that an append may start in
    the middle of any block."""
    byte = pages["v_scale"].view(torch.uint8)
    byte.remainder_(24).add_(116)
    tail = pages["v_tail"].float()
    for block in range(byte.shape[2]):
        codes = encode_scaled(tail, byte[:, :, block, None])
        rows = slice(32 * block, 32 * block + 32)
        pages["v"].view(torch.uint8)[:, :, rows] = codes.view(torch.uint8)


def _stats(case: Case, rows: int, gen: torch.Generator) -> SmoothingStats | None:
    config = case.config
    if not config.needs_stats:
        return None
    lead = (rows,) if case.per_request and config.uses_mean else ()
    q_mean = k_mean = index = None
    if config.uses_mean:
        q_mean = torch.randn(*lead, config.num_qo_heads, case.head_dim, generator=gen)
        k_mean = torch.randn(*lead, config.num_kv_heads, case.head_dim, generator=gen) * 12
    if config.uses_channels:
        order = torch.rand(config.num_kv_heads, case.head_dim, generator=gen).argsort(dim=1)
        index = order[:, : case.channels].to(torch.int32).contiguous()
    return SmoothingStats(q_mean, k_mean, index)


def build(case: Case) -> Inputs:
    gen = torch.Generator().manual_seed(1000 + case.seed)
    config, t = case.config, case.tokens
    num_pages = t // case.page_size + 3 if case.slots == "sequence" else 2 * t // case.page_size + 3
    if case.format == "mxfp8" and case.slots != "sequence":
        num_pages = t if case.slots == "decode" else 2 * t // case.page_size + 4
    k = _place(activations(case, case.num_kv_heads, gen), case.view, gen)
    v = _place(activations(case, case.num_kv_heads, gen), case.view, gen)
    q = None
    if case.with_q or case.kind == "query":
        q = _place(activations(case, config.num_qo_heads, gen), case.view, gen)
    pages, slots, bounds = {}, None, None
    requests = 1
    if case.kind == "append":
        slots = _slots(case, num_pages, gen)
        for name, want in page_layout(config, num_pages).items():
            if want is not None:
                pages[name] = torch.empty(want[0], dtype=want[1])
                _fill(pages[name], gen)
        if case.format == "mxfp8":
            _agree_with_tail(pages)
        pages = {name: _place(t, case.view, gen) for name, t in pages.items()}
    if case.kind != "append" or case.per_request:
        requests = min(5, t + 1)
        cuts = torch.randint(0, t + 1, (requests - 1,), generator=gen).sort().values.tolist()
        bounds = [0, *cuts, t]
    rows = None
    if case.per_request and config.uses_mean and case.kind != "kv":
        counts = torch.tensor([e - b for b, e in zip(bounds, bounds[1:], strict=False)])
        rows = torch.repeat_interleave(torch.arange(requests), counts).to(torch.int32)
    if slots is not None:  # a skipped token may hold anything and belongs to no request
        padding = slots < 0
        k[padding], v[padding] = torch.nan, torch.inf
        if q is not None:
            q[padding, :, ::3] = torch.nan
        if rows is not None:
            rows[padding] = -1
    return Inputs(k, v, q, slots, rows, bounds, _stats(case, requests, gen), pages)


# ---- running and comparing ----


def _to(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on ``device`` with the same strides."""
    if t.device == device:
        base = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    else:
        base = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    if t.storage_offset() % 16 and t.dim() > 1:  # keep the misalignment of the "odd" views
        size = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        flat = torch.empty(size + 16, dtype=t.dtype, device=device)
        base = flat.as_strided(t.shape, t.stride(), t.storage_offset() % 16)
    _copy(base, t)
    return base


def _pieces(case: Case) -> list[slice]:
    edges = [case.tokens * i // case.splits for i in range(case.splits + 1)]
    return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]


def _query_outputs(query, prefix: str = "query.") -> dict[str, torch.Tensor]:
    fields = ("q", "q_scale", "a_comp", "row_term")
    return {prefix + f: getattr(query, f) for f in fields if getattr(query, f) is not None}


def _reference_query(case: Case, q: torch.Tensor, part: tuple):
    """The query of an append; a skipped token's is quantised with row 0 and zeros for NaN."""
    _, _, _, slots, stats, rows = part
    padding = slots < 0
    rows = None if rows is None else rows.masked_fill(padding, 0)
    q = q.masked_fill(padding[:, None, None] & ~torch.isfinite(q), 0.0)
    return reference.quantize_query(q, case.config, stats, rows)


def run(case: Case, inputs: Inputs, device: torch.device, backend) -> dict[str, torch.Tensor]:
    """Outputs by name. ``backend`` is mpfa.backends.reference or mpfa.backends.cuda."""
    config = case.config

    def move(t):
        return None if t is None else _to(t, device)

    stats = inputs.stats
    if stats is not None and device.type != "cpu":
        stats = stats.to(device)
    if case.kind == "query":
        rows = move(inputs.rows)
        return _query_outputs(backend.quantize_query(move(inputs.q), config, stats, rows))
    if case.kind == "kv":
        indptr = torch.tensor(inputs.bounds, dtype=torch.int32)
        args = (move(inputs.k), move(inputs.v), config, indptr, inputs.bounds, stats)
        if backend is reference:
            rows = None
            if stats is not None and not stats.is_static:
                rows = torch.repeat_interleave(torch.arange(len(indptr) - 1), indptr.diff())
            kv = backend.quantize_kv(*args, rows)
        else:
            kv = backend.quantize_kv(*args)
        fields = ("k", "k_scale", "v", "v_scale", "aux_delta", "aux_channels")
        return {f: getattr(kv, f) for f in fields if getattr(kv, f) is not None}
    pages = {name: move(t) for name, t in inputs.pages.items()}
    cache = PagedKVCache(config=config, **pages)
    k, v, q, slots, rows = map(move, (inputs.k, inputs.v, inputs.q, inputs.slots, inputs.rows))
    outputs = dict(pages)
    for i, piece in enumerate(_pieces(case)):
        part = (
            k[piece],
            v[piece],
            cache,
            slots[piece],
            stats,
            None if rows is None else rows[piece],
        )
        if backend is reference:
            backend.append(*part)
            query = None if q is None else _reference_query(case, q[piece], part)
        else:
            query = backend.append(*part, None if q is None else q[piece])
        if query is not None:
            outputs |= _query_outputs(query, f"query{i}.")
    return outputs


def raw(t: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, on the CPU."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return t.detach().cpu().contiguous().view(kinds[t.dtype.itemsize])


def differences(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    """One line per output that differs, with its first bad index; [] when all bytes are equal."""
    lines = [f"{name}: missing" for name in want.keys() - got.keys()]
    for name, expected in want.items():
        if name not in got:
            continue
        a, b = raw(got[name]), raw(expected)
        if a.shape != b.shape:
            lines.append(f"{name}: shape {list(a.shape)}, expected {list(b.shape)}")
        elif not torch.equal(a, b):
            bad = (a != b).nonzero()
            at = tuple(bad[0].tolist())
            lines.append(
                f"{name}: {len(bad)} of {a.numel()} differ, first at {at}: "
                f"{int(a[at]):#x}, expected {int(b[at]):#x}"
            )
    return lines


def check(case: Case, device: torch.device, backend) -> list[str]:
    """Differences between ``backend`` on ``device`` and the reference on the CPU."""
    inputs = build(case)
    want = run(case, inputs, torch.device("cpu"), reference)
    return differences(run(case, inputs, device, backend), want)
