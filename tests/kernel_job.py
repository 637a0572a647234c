# SPDX-License-Identifier: Apache-2.0
"""One kernel case as data: what to call, what it writes, how to judge that. Needs torch, no pytest.

The tests of the simulator and of a GPU run the same jobs (tests/kernel_runner.py): a case list builds
jobs of CPU tensors, a runner places them on its device.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# The arguments of `run` in csrc/attention_args.h and csrc/combine.cu.
ATTENTION = (
    "q", "q_scale", "a_comp", "row_term", "k", "k_scale", "v", "v_scale", "aux_delta",
    "aux_channels", "header", "qo_indptr", "kv_indptr", "kv_len", "kv_indices", "items",
    "worker_indptr", "v_block_indptr", "partial_o", "partial_lse", "out", "lse", "sinks",
    "sm_scale", "logits_soft_cap", "window_left", "causal", "num_workers",
)  # fmt: skip
COMBINE = (
    "partial_o", "partial_lse", "header", "merge_indptr", "row_term", "out", "lse", "sinks",
    "sm_scale", "logits_soft_cap", "pdl",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """``module.run`` of the module that a family calls ``module``, with named arguments in order."""

    module: str
    arguments: Mapping[str, Any]

    @staticmethod
    def attention(module: str, *arguments: Any) -> Call:
        return Call(module, dict(zip(ATTENTION, arguments, strict=True)))

    @staticmethod
    def combine(module: str, *arguments: Any) -> Call:
        return Call(module, dict(zip(COMBINE, arguments, strict=True)))


@dataclass(frozen=True)
class Job:
    """A case ready to run.

    Attributes:
        name: of the case.
        calls: made one after the other on one stream.
        outputs: tensors among the arguments that the calls may write; their bytes, and those around
            them in the same storage, are poison. Every other argument must stay as it is.
        faults: judges host copies of ``outputs``; [] when they are right.
    """

    name: str
    calls: tuple[Call, ...]
    outputs: Mapping[str, Tensor]
    faults: Callable[[dict[str, Tensor]], list[str]]


def as_faults(check: Callable[..., None], *arguments: Any) -> list[str]:
    """What ``check`` asserts, as a list of faults."""
    try:
        check(*arguments)
    except AssertionError as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())
        return [f"{line.line}{': ' + text if text else ''}"[:600]]
    return []
