# SPDX-License-Identifier: Apache-2.0
"""The quantise, statistics and combine cases on a GPU: make test-gpu."""

import pytest
import quant_cases
import state_cases
import summary
import torch

from mpfa.backends import cuda

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
CASES = quant_cases.cases()
CHECKS = state_cases.checks()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_bytes_of_the_reference(case, record_property):
    faults = quant_cases.check(case, DEVICE, cuda)
    record_property(
        summary.MATRIX, summary.entry("quantise, append", len(CASES), {"faults": faults})
    )
    assert faults == []


@pytest.mark.parametrize("check", [c for _, c in CHECKS], ids=[name for name, _ in CHECKS])
def test_states(check, record_property):
    faults = check(DEVICE, cuda)
    kernel = "statistics, combine, merge"
    record_property(summary.MATRIX, summary.entry(kernel, len(CHECKS), {"faults": faults}))
    assert faults == []


def test_pdl_chain_gives_the_bytes_of_separate_launches():
    """Appends with programmatic dependent launch, each into what the one before it wrote: v_tail and
    the open block of mxfp8 would differ if a launch read before its predecessor had finished."""
    for case in (
        quant_cases.Case("append", "mxfp8", 96, 128, slots="sequence", seed=21),
        quant_cases.Case("append", "qk4pv8", 96, 128, "mean+channels", 15, True, seed=22),
    ):
        inputs = quant_cases.build(case)
        stats = None if inputs.stats is None else inputs.stats.to(DEVICE)
        k, v, slots = (t.to(DEVICE) for t in (inputs.k, inputs.v, inputs.slots))
        caches = []
        for pdl in (False, True):
            pages = {name: t.to(DEVICE).clone() for name, t in inputs.pages.items()}
            cache = quant_cases.PagedKVCache(config=case.config, **pages)
            for _ in range(5):
                for begin in range(0, case.tokens, 3):
                    part = slice(begin, begin + 3)
                    cuda.append(k[part], v[part], cache, slots[part], stats, None, pdl=pdl)
            caches.append(cache.tensors)
        assert quant_cases.differences(*caches) == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_work_goes_to_the_device_of_the_tensors():
    """The current device stays what it was, and the other device's cache gets the bytes."""
    other = torch.device("cuda", 1)
    for case in (
        quant_cases.Case("append", "qk4pv8", 33, 16, "mean", with_q=True, seed=23),
        quant_cases.Case("append", "mxfp8", 33, 32, seed=24),
        quant_cases.Case("kv", "qk4pv8", 40, seed=25),
    ):
        with torch.cuda.device(0):
            assert quant_cases.check(case, other, cuda) == []
            assert torch.cuda.current_device() == 0
    with torch.cuda.device(0):
        for _, check in state_cases.checks(small=True):
            assert check(other, cuda) == []
