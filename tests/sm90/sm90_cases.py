# SPDX-License-Identifier: Apache-2.0
"""Cases of the SM90 decode kernel: the SM100 decode kernel's cases with a bf16 query or its codes, and
the replay 'dequant'. Needs torch and mpfa, no pytest."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import decode_cases
import torch
from decode_cases import Case, Inputs
from kernel_job import Call, Job

from mpfa.backends import reference
from mpfa.planner import Plan
from mpfa.reference.replay import dequant_scheme

# The arguments of `run` in csrc/sm90_decode.cu.
ARGUMENTS = (
    "q", "q_scale", "a_comp", "row_term", "q_mean", "k_mean", "channel_index", "k", "k_scale", "v",
    "aux_delta", "aux_channels", "header", "qo_indptr", "kv_indptr", "kv_len", "kv_indices",
    "items", "worker_indptr", "v_block_indptr", "partial_o", "partial_lse", "out", "lse", "sinks",
    "sm_scale", "logits_soft_cap", "window_left", "causal", "num_workers", "tile_rows",
)  # fmt: skip


@dataclass(frozen=True)
class QueryCase:
    """A decode case and how its query arrives: "bfloat16", "float16" or "codes"."""

    case: Case
    query: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.query}-{self.case.name}"


def raw_query(inputs: Inputs, query: str) -> torch.Tensor:
    return inputs.batch.query.to(getattr(torch, query))


def tile_rows(plan: Plan) -> int:
    return plan.request.q_tile_tokens * plan.request.heads_per_group


class Launcher(decode_cases.Launcher):
    """The two modules of a planned run. ``query``: as QueryCase has it, or a tensor."""

    def __init__(
        self, decode, combine, inputs, spec, plan, dtype=torch.float32, query="bfloat16", rows=None
    ):
        super().__init__(decode, combine, inputs, spec, plan, dtype)
        if query != "codes" and not isinstance(query, torch.Tensor):
            query = raw_query(inputs, query)
        self.query, self.rows = query, rows

    def calls(self, decode: str = "decode") -> tuple[Call, Call]:
        attention, combine = super().calls(decode)
        values = dict(attention.arguments)
        stats, config = self.inputs.stats, self.inputs.config
        values |= dict.fromkeys(("q_mean", "k_mean", "channel_index"))
        if isinstance(self.query, torch.Tensor):
            values |= dict.fromkeys(("q_scale", "a_comp", "row_term")) | {"q": self.query}
            if config.uses_mean:
                values |= {"q_mean": stats.q_mean, "k_mean": stats.k_mean}
            if config.uses_channels:
                values["channel_index"] = stats.channel_index
        values["tile_rows"] = tile_rows(self.plan) if self.rows is None else self.rows
        attention = Call(decode, {name: values[name] for name in ARGUMENTS})
        # The kernel has added the row term to the partial rows.
        return attention, Call(combine.module, dict(combine.arguments) | {"row_term": None})


def run(
    decode, combine, inputs: Inputs, query="bfloat16", dtype=torch.float32, num_sm=None, rows=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of one launch."""
    spec, plan = inputs.plan(*(() if num_sm is None else (num_sm,)))
    launcher = Launcher(decode, combine, inputs, spec, plan, dtype, query, rows)
    launcher.launch()
    return launcher.out, launcher.lse


def replay(inputs: Inputs, query="bfloat16") -> tuple[torch.Tensor, torch.Tensor]:
    """The replay 'dequant' of the same plan, without the final rounding to bf16."""
    spec, plan = inputs.plan()
    metadata = torch.zeros(plan.metadata_bytes, dtype=torch.uint8)
    plan.upload(metadata)
    scratch = torch.zeros(max(plan.scratch_bytes, 1), dtype=torch.uint8)
    tokens, heads, dim = inputs.batch.query.shape
    out, lse = torch.empty(tokens, heads, dim), torch.empty(tokens, heads)
    if query == "codes":
        query = inputs.query
    elif not isinstance(query, torch.Tensor):
        query = raw_query(inputs, query)
    reference.run(
        spec, plan, metadata, scratch,
        SimpleNamespace(
            config=inputs.config, stats=inputs.stats, q=query, kv=inputs.pages.cache,
            sinks=inputs.sinks, out=out, lse=lse,
        ),
        dequant_scheme(tile_rows(plan)),
    )  # fmt: skip
    return out, lse


def job(case: QueryCase) -> Job:
    """One launch for any device, held to the replay."""
    inputs = decode_cases.build(case.case)
    spec, plan = inputs.plan()
    launcher = Launcher(None, None, inputs, spec, plan, query=case.query)
    calls = launcher.calls(str(case.case.head_dim))
    names = ("out", "lse", "partial_o", "partial_lse")
    outputs = {name: calls[0].arguments[name] for name in names}
    return Job(
        case.name, calls, outputs,
        lambda got: decode_cases.faults((got["out"], got["lse"]), replay(inputs, case.query)),
    )  # fmt: skip
