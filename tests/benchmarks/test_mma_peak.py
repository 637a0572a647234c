# SPDX-License-Identifier: Apache-2.0
"""The tensor-rate microbenchmark: exact in the simulator, able to fail, and timing what it says."""

import pytest

from benchmarks import mma_peak
from benchmarks.sass import tools
from mpfa.jit.toolkit import find_toolkit, missing_text


@pytest.fixture(scope="module")
def program():
    if find_toolkit() is None:
        pytest.skip(missing_text())
    return mma_peak.build("12.0a", "shared")


def test_every_element_is_exact(program):
    cases = mma_peak.simulate(program, "12.0", "--ilp", "8")
    assert [c["kind"] for c in cases] == [row.kind for row in mma_peak.ROWS]
    # 32 lanes x 8 accumulators x 4 elements, two iteration counts
    assert all((c["wrong"], c["checked"]) == (0, 2 * 32 * 8 * 4) for c in cases), cases


def test_sixteen_accumulators(program):
    (case,) = mma_peak.simulate(program, "12.0", "--ilp", "16", "--kind", "mxf8_f32")
    assert (case["k"], case["wrong"], case["checked"]) == (32, 0, 2 * 32 * 16 * 4)


def test_one_spoiled_input_is_noticed(program):
    for kind, off in (("mxf8_f32", 4), ("f16_f16", 2), ("nvf4_f32", 8)):
        (case,) = mma_peak.simulate(program, "12.0", "--corrupt", "--ilp", "8", "--kind", kind)
        # One register of row g + 8 of lane 5: the lane's four columns pairs of that row.
        assert case["wrong"] == 2 * 8 * 8, case
        assert case["first_wrong"] == case["k"] - off


def test_no_such_case(program):
    with pytest.raises(RuntimeError, match="no case of kind 'fp64'"):
        mma_peak.simulate(program, "12.0", "--kind", "fp64")
    with pytest.raises(RuntimeError, match="--loops: 5000 is not in"):
        mma_peak.simulate(program, "12.0", "--loops", "1", "5000")


def test_the_timed_loop_holds_one_mma_per_accumulator(program):
    try:
        code = mma_peak.loop_code(program, "12.0a")
    except tools.ToolError as error:
        pytest.skip(str(error))
    expected = {
        "f16_f16": "HMMA.16816.F16",
        "f16_f32": "HMMA.16816.F32",
        "bf16_f32": "HMMA.16816.F32.BF16",
        "e4m3_f32": "QMMA.16832.F32.E4M3.E4M3",
        "e4m3_f16": "QMMA.16832.F16.E4M3.E4M3",
        "mxf8_f32": "QMMA.SF.16832.F32.E4M3.E4M3.E8",
        "nvf4_f32": "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X",
    }
    for row in mma_peak.ROWS:
        for ilp in mma_peak.ILP:
            loop = code[row.kernel, ilp]
            assert dict(loop.mma) == {expected[row.kind]: ilp}
            assert set(loop.other) <= {"NOP", "BRA", "UIADD3", "UISETP", "IADD3", "ISETP"}
