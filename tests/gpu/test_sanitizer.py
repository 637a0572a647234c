# SPDX-License-Identifier: Apache-2.0
"""A sample of every matrix under compute-sanitizer: make test-gpu SANITIZE=1."""

import sys
from pathlib import Path

import pytest
import sanitizer
import summary
import torch

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from families import families  # noqa: E402

FOLDER = Path(__file__).parent
WRITERS = "quantise, append and combine"
TARGETS = [WRITERS, *families()]
TIMEOUT = 1800.0


@pytest.fixture(scope="session")
def tools(request) -> list[str]:
    chosen = request.config.getoption("--sanitize", default=None)
    if chosen is None:
        pytest.skip("not asked for: make test-gpu SANITIZE=1, or --sanitize=memcheck,racecheck")
    names = chosen.split(",")
    bad = [n for n in names if n not in sanitizer.TOOLS]
    if bad:
        pytest.fail(f"--sanitize: must be of {', '.join(sanitizer.TOOLS)}, got {', '.join(bad)}")
    return names


def command_of(target: str) -> list[str]:
    if target == WRITERS:
        return [sys.executable, str(FOLDER / "run_quant.py"), "--small"]
    indices = map(str, families()[target].sampled())
    return [
        sys.executable, str(FOLDER / "matrix_worker.py"), "--family", target, "--repeats", "1",
        "--replays", "0", "--guard-bytes", "0", "--index", *indices,
    ]  # fmt: skip


@pytest.mark.parametrize("tool", sanitizer.TOOLS)
@pytest.mark.parametrize("target", TARGETS)
def test_sanitizer(target, tool, tools, matrix, record_property) -> None:
    if tool not in tools:
        pytest.skip(f"not asked for: --sanitize={','.join(tools)}")
    if target != WRITERS:
        refusal = families()[target].refusal(torch.cuda.get_device_capability())
        if refusal:
            pytest.skip(refusal)
        # Compiles outside the sanitizer.
        reply = matrix.run(target, families()[target].sampled()[0])
        assert "error" not in reply, reply["error"]
    program = sanitizer.find()
    if program is None:
        pytest.skip("compute-sanitizer not run: not on PATH and not in the CUDA toolkit")
    verdict, output, status = sanitizer.check(program, tool, command_of(target), TIMEOUT)
    text = verdict.text if status == 0 or not verdict.clean else f"{verdict.text}, results wrong"
    record_property(summary.SANITIZER, {"tool": tool, "kernel": target, "text": text})
    if verdict.count is None and status is not None:
        pytest.skip(f"compute-sanitizer {tool} {verdict.text}")
    assert verdict.clean, f"{text}\n{output[-4000:]}"
    assert status == 0, output[-4000:]
