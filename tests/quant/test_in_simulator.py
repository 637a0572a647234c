# SPDX-License-Identifier: Apache-2.0
"""The shipped PTX of the quantise, statistics and combine kernels, executed by the simulator, against
mpfa.reference: every byte of every output. tests/gpu runs the same list on a GPU."""

import pytest
import quant_cases
import state_cases
import torch

from mpfa.backends import cuda

HOST = torch.device("cpu")
SMALL = quant_cases.small_cases()
SMALL_NAMES = {case.name for case in SMALL}
LARGE = [case for case in quant_cases.cases() if case.name not in SMALL_NAMES]
CHECKS = state_cases.checks(small=True)


def run_case(case, simulator) -> None:
    assert quant_cases.check(case, HOST, cuda) == []
    kernels = [launch["kernel"] for launch in simulator.launches()]
    name = "quant_mxfp8" if case.format == "mxfp8" else "quant_qk4pv8"
    assert len(kernels) == case.splits, kernels  # one launch does it all
    assert all(name in kernel for kernel in kernels), kernels


@pytest.mark.parametrize("case", SMALL, ids=[case.name for case in SMALL])
def test_small_cases(case, target):
    run_case(case, target)


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=[case.name for case in LARGE])
def test_large_cases(case, target):
    run_case(case, target)


@pytest.mark.parametrize("check", [c for _, c in CHECKS], ids=[name for name, _ in CHECKS])
def test_means_and_merges(check, target):
    assert check(HOST, cuda) == []


@pytest.mark.parametrize("seed", range(4))
def test_order_of_thread_blocks_does_not_matter(simulated, seed):
    """v_tail is read by one warp and written by one warp of the same launch."""
    case = quant_cases.Case("append", "mxfp8", 150, 128, slots="sequence", splits=3, seed=40 + seed)
    with simulated.options(device="10.0", mode="random", seed=seed):
        assert quant_cases.check(case, HOST, cuda) == []


def test_a_slot_past_the_last_page_is_skipped(target):
    case = quant_cases.Case("append", "qk4pv8", 6, 16, "mean", seed=50)
    inputs = quant_cases.build(case)
    pages = inputs.pages["v"].shape[0]
    valid = inputs.slots.clone()
    inputs.slots[2], inputs.slots[4] = pages * 16, 2**31 - 1
    valid[2] = valid[4] = -1
    got = quant_cases.run(case, inputs, HOST, cuda)
    inputs.slots = valid
    want = quant_cases.run(case, inputs, HOST, quant_cases.reference)
    assert quant_cases.differences(got, want) == []


def test_no_tokens(target):
    for kind, fmt in (
        ("append", "qk4pv8"),
        ("append", "mxfp8"),
        ("kv", "mxfp8"),
        ("query", "mxfp8"),
    ):
        case = quant_cases.Case(kind, fmt, 0, 32, with_q=kind == "append", seed=51)
        assert quant_cases.check(case, HOST, cuda) == []
    assert target.launches() == []
