# SPDX-License-Identifier: Apache-2.0
"""The kernel matrices of make test-gpu: each kernel's committed case list, the one that its simulator
tests run, and how to run one of the cases on an executor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
for folder in ("", "gpu", "sm120", "sm100/decode", "sm100/prefill", "sm90"):
    if str(TESTS / folder) not in sys.path:
        sys.path.insert(0, str(TESTS / folder))

from kernel_job import Job  # noqa: E402
from kernel_runner import Executor, Outcome, Settings, run_job  # noqa: E402

from mpfa.backends import kernels  # noqa: E402
from mpfa.jit import attention, quant  # noqa: E402
from mpfa.jit.spec import CudaSpec  # noqa: E402

Run = Callable[[Any, Executor, Settings], Outcome]


@dataclass(frozen=True)
class Family:
    """One kernel's matrix.

    Attributes:
        name: for the summary.
        major: compute capability major that the kernel is built for.
        specs: its modules by the key that the calls of its jobs use.
        cases: the committed list; every case has a ``name``.
        run: one case on an executor.
        sample: every how many-th case a sanitizer runs.
    """

    name: str
    major: int
    specs: Callable[[], dict[str, CudaSpec]]
    cases: Callable[[], Sequence[Any]]
    run: Run
    sample: int = 8

    def refusal(self, capability: tuple[int, int] | None) -> str | None:
        """Why a GPU cannot run the matrix, None when it can."""
        if capability is None:
            return f"{self.name} needs a GPU of compute capability {self.major}.x, none is visible"
        if capability[0] != self.major:
            return (
                f"{self.name} needs a GPU of compute capability {self.major}.x, this one has "
                f"{capability[0]}.{capability[1]}"
            )
        return None

    def sampled(self) -> list[int]:
        """Positions of the cases for a sanitizer."""
        return list(range(0, len(self.cases()), self.sample))


def of_jobs(job: Callable[[Any], Job]) -> Run:
    return lambda case, executor, settings: run_job(job(case), executor, settings)


def attention_specs(backend: str, operation: str) -> dict[str, CudaSpec]:
    kernel = kernels.find_kernel(operation, backend=backend)
    return {str(d): attention.attention_spec(kernel, d) for d in kernel.tilings}


# ---- SM120: prefill and, in its decode mode, q_len 1..8 -----------------------------------------


@lru_cache(maxsize=1)
def _sm120_cases() -> tuple[Any, ...]:
    from case_list import RANDOM_SEEDS, all_cases, random_case
    from sm120_exact import one_key_cases

    return (*one_key_cases(), *all_cases(), *(random_case(seed) for seed in RANDOM_SEEDS))


def _sm120_job(case: Any) -> Job:
    import sm120_cases
    import sm120_exact

    if isinstance(case, sm120_exact.OneKeyCase):
        return sm120_exact.one_key_job(case)
    return sm120_cases.job(sm120_cases.build(case))


# ---- SM100 prefill ------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _prefill_cases() -> Sequence[Any]:
    from prefill_exact import exact_cases
    from prefill_list import all_cases

    return (*exact_cases(), *all_cases())


def _prefill_job(case: Any) -> Job:
    import prefill_cases
    import prefill_exact

    if isinstance(case, prefill_exact.ExactCase):
        return prefill_exact.job(case)
    return prefill_cases.job(prefill_cases.operands(case))


# ---- SM100 decode, and the paper's replicated rows ----------------------------------------------


@lru_cache(maxsize=1)
def _decode_cases() -> tuple[Any, ...]:
    from decode_exact import exact_cases
    from decode_list import fast_cases, slow_cases

    return (*exact_cases(), *fast_cases(), *slow_cases())


def _decode_job(case: Any) -> Job:
    import decode_cases
    import decode_exact

    if isinstance(case, decode_exact.ExactCase):
        return decode_exact.job(case)
    return decode_cases.job(decode_cases.build(case), str(case.head_dim))


def _decode_specs() -> dict[str, CudaSpec]:
    return {**attention_specs("sm100", "decode"), "combine": quant.COMBINE}


def _rows_cases() -> Sequence[Any]:
    from decode_list import rows_cases

    return rows_cases()


def _rows_job(case: Any) -> Job:
    import rows_replay

    return rows_replay.job(case)


def _rows_specs() -> dict[str, CudaSpec]:
    import rows_replay

    return {"rows": rows_replay.SPEC, "combine": quant.COMBINE}


# ---- SM90 decode --------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _sm90_cases() -> tuple[Any, ...]:
    from sm90_list import all_cases

    return tuple(all_cases())


def _sm90_job(case: Any) -> Job:
    import sm90_cases

    return sm90_cases.job(case)


def _sm90_specs() -> dict[str, CudaSpec]:
    return {**attention_specs("sm90", "decode"), "combine": quant.COMBINE}


# ---- the public wrappers ------------------------------------------------------------------------


def _wrapper_family(kernel: kernels.AttentionKernel) -> Family:
    import wrapper_runs

    def specs() -> dict[str, CudaSpec]:
        made = attention_specs(kernel.backend, kernel.operation)
        writers = [quant.MXFP8] if kernel.format == "mxfp8" else list(quant.QK4PV8.values())
        others = [quant.COMBINE, quant.STATS, *writers]
        return made | {spec.name: spec for spec in others}

    return Family(
        f"{kernel.backend} {kernel.operation} through the wrappers",
        kernel.major,
        specs,
        lru_cache(lambda: wrapper_runs.cases(kernel)),
        wrapper_runs.run,
    )


@lru_cache(maxsize=1)
def families() -> dict[str, Family]:
    """Every matrix by its name."""
    found = [
        Family(
            "sm120 prefill",
            12,
            lambda: attention_specs("sm120", "prefill"),
            _sm120_cases,
            of_jobs(_sm120_job),
        ),
        Family(
            "sm100 prefill",
            10,
            lambda: attention_specs("sm100", "prefill"),
            _prefill_cases,
            of_jobs(_prefill_job),
        ),
        Family("sm100 decode", 10, _decode_specs, _decode_cases, of_jobs(_decode_job), 20),
        Family("sm100 decode rows", 10, _rows_specs, _rows_cases, of_jobs(_rows_job)),
        Family("sm90 decode", 9, _sm90_specs, _sm90_cases, of_jobs(_sm90_job), 20),
    ]
    found += [_wrapper_family(kernel) for kernel in kernels.KERNELS if kernel.ready]
    return {family.name: family for family in found}
