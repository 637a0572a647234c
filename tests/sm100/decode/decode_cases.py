# SPDX-License-Identifier: Apache-2.0
"""Cases of the SM100 decode kernel: inputs, one launch through the modules, and the replay that runs the
same plan in torch. Needs torch and mpfa, no pytest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import attention_cases
import torch
from kernel_job import Call, Job

import mpfa
from mpfa.backends import reference
from mpfa.backends.kernels import Tiling
from mpfa.decode import decode_request
from mpfa.planner import Plan, make_plan

NUM_SM = 3  # few workers, so that each walks several items
COMPENSATIONS = (("none", 0), ("mean", 0), ("channels", 16), ("mean+channels", 15))


@dataclass(frozen=True)
class Case:
    """One decode launch. group: query heads per KV head."""

    kv_lens: tuple[int, ...]
    group: int = 4
    head_dim: int = 128
    page_size: int = 128
    compensation: str = "none"
    channels: int = 0
    q_len: int = 1
    num_kv_heads: int = 1
    causal: bool = True
    window_left: int = -1
    soft_cap: float = 0.0
    sinks: bool = False
    split_tokens: int | None = None
    k_bias: float = 0.0
    q_bias: float = 0.0
    outliers: float = 0.0
    scale: float = 1.0
    seed: int = 0

    @property
    def name(self) -> str:
        text = [
            f"{self.compensation}{self.channels or ''}",
            f"g{self.group}x{self.num_kv_heads}-d{self.head_dim}-p{self.page_size}-q{self.q_len}",
            "kv" + ".".join(str(n) for n in self.kv_lens),
        ]
        for key, default in (
            ("window_left", -1), ("soft_cap", 0.0), ("sinks", False), ("causal", True),
            ("split_tokens", None), ("seed", 0),
        ):  # fmt: skip
            if getattr(self, key) != default:
                text.append(f"{key}={getattr(self, key)}")
        return "-".join(text)


@dataclass
class Inputs:
    case: Case
    batch: attention_cases.Batch
    config: mpfa.KVCacheConfig
    stats: mpfa.SmoothingStats | None
    pages: attention_cases.Paged
    query: mpfa.QuantizedQuery
    sinks: torch.Tensor | None
    options: dict[str, object] = field(default_factory=dict)
    tile_rows: int | None = None  # another kernel's tiles

    def plan(self, num_sm: int = NUM_SM, **limits: object) -> tuple[object, Plan]:
        spec, request = decode_request(*self.pages.table, num_sm=num_sm, **self.options, **limits)
        if self.tile_rows is not None:
            tokens, heads = Tiling(self.tile_rows, 8, 128).cut(
                self.case.q_len, self.case.group, self.config
            )
            request = replace(request, q_tile_tokens=tokens, heads_per_group=heads)
        return spec, make_plan(request)


def build(case: Case, pages: attention_cases.Paged | None = None) -> Inputs:
    heads = case.group * case.num_kv_heads
    batch = attention_cases.make_batch(
        [case.q_len] * len(case.kv_lens),
        case.kv_lens,
        heads,
        case.num_kv_heads,
        case.head_dim,
        seed=case.seed,
        k_bias=case.k_bias,
        q_bias=case.q_bias,
        outliers=case.outliers,
        scale=case.scale,
    )
    config = attention_cases.config_for(
        batch, "qk4pv8", case.compensation, case.channels, case.page_size
    )
    stats = None
    if case.compensation != "none":
        sample = batch
        if sum(case.kv_lens) == 0:
            sample = attention_cases.make_batch([2], [8], heads, case.num_kv_heads, case.head_dim)
        stats = attention_cases.static_stats(sample, case.compensation, case.channels)
    if pages is None:
        pages = attention_cases.paged(batch, config, stats=stats, seed=case.seed)
    query = reference.quantize_query(batch.query, config, stats, None)
    gen = torch.Generator().manual_seed(case.seed + 99)
    sinks = torch.randn(heads, generator=gen) * 2.0 if case.sinks else None
    options = {
        **batch.heads,
        "page_size": case.page_size,
        "q_len_per_request": case.q_len,
        "causal": case.causal,
        "window_left": case.window_left,
        "logits_soft_cap": case.soft_cap,
        "config": config,
        "fixed_split_pages": (
            None if case.split_tokens is None else case.split_tokens // case.page_size
        ),
    }
    return Inputs(case, batch, config, stats, pages, query, sinks, options)


def _bytes(t: torch.Tensor | None) -> torch.Tensor | None:
    return t if t is None or t.dtype == torch.uint8 else t.view(torch.uint8)


class Launcher:
    """The two modules of a planned decode run, on buffers that stay where they are."""

    def __init__(self, decode, combine, inputs: Inputs, spec, plan: Plan, dtype=torch.float32):
        self.modules, self.inputs, self.spec = (decode, combine), inputs, spec
        nan = attention_cases.POISON_BYTE
        self.metadata = torch.full((plan.metadata_bytes,), nan, dtype=torch.uint8)
        self.scratch = torch.full((max(plan.scratch_bytes, 1),), nan, dtype=torch.uint8)
        tokens, heads, dim = inputs.batch.query.shape
        self.out = torch.full((tokens, heads, dim), math.nan, dtype=dtype)
        self.lse = torch.full((tokens, heads), math.nan)
        self.bind(plan)

    def bind(self, plan: Plan) -> None:
        """Upload a plan of the same layout."""
        self.plan = plan
        plan.upload(self.metadata)

    def calls(self, decode: str = "decode") -> tuple[Call, Call]:
        """The launch of the module that a family calls ``decode``, and the combine of its partials."""
        i, plan, spec = self.inputs, self.plan, self.spec
        meta = {n: plan.metadata_view(self.metadata, n) for n in (
            "header", "qo_indptr", "kv_indptr", "kv_len", "kv_indices", "items", "worker_indptr",
            "merge_indptr", "v_block_indptr",
        )}  # fmt: skip
        heads, dim = spec.num_qo_heads, spec.head_dim
        partial_lse = plan.scratch(self.scratch, "partial_lse", torch.float32)
        rows = partial_lse.numel() // heads
        partial_lse = partial_lse[: rows * heads].view(rows, heads)
        partial_o = plan.scratch(self.scratch, "partial_o", torch.float32)
        partial_o = partial_o[: rows * heads * dim].view(rows, heads, dim)
        cache, q = i.pages.cache, i.query
        first = Call.attention(
            decode, q.q, q.q_scale, q.a_comp, q.row_term, cache.k, cache.k_scale,
            _bytes(cache.v), None, cache.aux_delta, cache.aux_channels, meta["header"],
            meta["qo_indptr"], meta["kv_indptr"], meta["kv_len"], meta["kv_indices"],
            meta["items"], meta["worker_indptr"], meta["v_block_indptr"], partial_o, partial_lse,
            self.out, self.lse, i.sinks, spec.sm_scale, spec.logits_soft_cap, spec.window_left,
            spec.causal, plan.num_workers,
        )  # fmt: skip
        second = Call.combine(
            "combine", partial_o, partial_lse, meta["header"], meta["merge_indptr"], q.row_term,
            self.out, self.lse, i.sinks, spec.sm_scale, spec.logits_soft_cap, True,
        )  # fmt: skip
        return first, second

    def launch(self) -> None:
        for module, call in zip(self.modules, self.calls(), strict=True):
            module.run(*call.arguments.values())


def run(
    decode, combine, inputs: Inputs, dtype=torch.float32, num_sm: int = NUM_SM
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of one launch."""
    spec, plan = inputs.plan(num_sm)
    launcher = Launcher(decode, combine, inputs, spec, plan, dtype)
    launcher.launch()
    return launcher.out, launcher.lse


def replay(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's walk over the same plan, without the final rounding to bf16."""
    spec, plan = inputs.plan()
    metadata = torch.zeros(plan.metadata_bytes, dtype=torch.uint8)
    plan.upload(metadata)
    scratch = torch.zeros(max(plan.scratch_bytes, 1), dtype=torch.uint8)
    tokens, heads, dim = inputs.batch.query.shape
    out, lse = torch.empty(tokens, heads, dim), torch.empty(tokens, heads)
    reference.run(
        spec, plan, metadata, scratch,
        SimpleNamespace(
            config=inputs.config, stats=inputs.stats, q=inputs.query, kv=inputs.pages.cache,
            sinks=inputs.sinks, out=out, lse=lse,
        ),
    )  # fmt: skip
    return out, lse


def gate(case: Case) -> float:
    """Relative L2 per (token, head). Under a soft cap the last bits of tanh, which libraries do not
    share, may move a P across a boundary of e4m3: one row in all the cases here, 3.8e-3."""
    return 2e-3 if case.soft_cap == 0.0 else 1e-2


def job(inputs: Inputs, module: str, replay_of=replay, rel: float | None = None) -> Job:
    """One launch of ``module`` for any device, held to ``replay_of``."""
    spec, plan = inputs.plan()
    launcher = Launcher(None, None, inputs, spec, plan)
    calls = launcher.calls(module)
    names = ("out", "lse", "partial_o", "partial_lse")
    outputs = {name: calls[0].arguments[name] for name in names}
    limit = gate(inputs.case) if rel is None else rel
    return Job(
        inputs.case.name, calls, outputs,
        lambda got: faults((got["out"], got["lse"]), replay_of(inputs), rel=limit),
    )  # fmt: skip


def faults(got, want, rel: float = 2e-3, lse_tolerance: float = 1e-4) -> list[str]:
    """Gates of a kernel against the replay: relative L2 per (token, head) and the LSE, which is -inf
    exactly where the replay's is (rows without keys)."""
    (out, lse), (want_out, want_lse) = got, want
    found = []
    if not torch.isfinite(out.float()).all():
        at = tuple((~torch.isfinite(out.float())).nonzero()[0].tolist())
        found.append(f"out: not finite, first at {at}")
    error = (out.double() - want_out.double()).norm(dim=-1)
    limit = rel * want_out.double().norm(dim=-1)
    bad = (error > limit).nonzero()
    if len(bad):
        t, h = bad[0].tolist()
        found.append(
            f"out: {len(bad)} of {error.numel()} rows off, first (token {t}, head {h}): relative L2 "
            f"{float(error[t, h] / want_out[t, h].double().norm()):.3g}"
        )
    near = (lse - want_lse).abs() <= lse_tolerance * (1 + want_lse.abs())
    # why: beside -inf the tolerance is infinite, and any value would be near.
    same = torch.where(want_lse == -math.inf, lse == want_lse, near)
    if not same.all():
        t, h = (~same).nonzero()[0].tolist()
        found.append(f"lse: first (token {t}, head {h}): {lse[t, h]}, expected {want_lse[t, h]}")
    return found


def poison_left_pages(inputs: Inputs) -> None:
    """Garbage, NaN among it, in every page that the window of a request's first token has left."""
    case = inputs.case
    for b, n in enumerate(case.kv_lens):
        begin = int(inputs.pages.indptr[b])
        left = (n - case.q_len - case.window_left) // case.page_size
        dead = inputs.pages.indices[begin : begin + left].long()
        for t in inputs.pages.cache.tensors.values():
            if t is not None:
                t.view(torch.uint8)[dead] = attention_cases.POISON_BYTE
