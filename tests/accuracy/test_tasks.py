# SPDX-License-Identifier: Apache-2.0
"""--tasks without lm_eval: the paper's table, paired statistics, the FP8 row, refusals."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from mpfa import __main__ as command_line
from mpfa.accuracy import tasks, tasks_report
from mpfa.accuracy.baselines import SCHEME
from mpfa.accuracy.rows import parse_rows
from mpfa.accuracy.tasks_report import score
from mpfa.accuracy.tasks_specs import PAPER_TASKS, select_tasks
from mpfa.reference import dequantize_fp8, quantize_fp8
from mpfa.reference.replay import KVOperands, QueryOperands, attend_request


def test_shots_are_the_papers() -> None:
    assert {t.name: t.shots for t in PAPER_TASKS} == {
        "mmlu": 5, "hellaswag": 20, "winogrande": 0, "gsm8k": 5, "ruler_qa": 0,
    }  # fmt: skip


def test_select_tasks() -> None:
    specs = select_tasks("gsm8k, mytask,ruler_qa", "gsm8k=3", 32768)
    assert [s.name for s in specs] == ["gsm8k", "mytask", "ruler_qa"]
    assert (specs[0].shots, specs[0].metric, specs[0].filter) == (3, "exact_match", "strict-match")
    assert (specs[1].members, specs[1].shots, specs[1].metric) == (("mytask",), None, None)
    assert specs[2].metric == "32768" and specs[2].members == ("ruler_qa_squad", "ruler_qa_hotpot")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((" , ", None, 65536), "tasks: expected different names"),
        (("mmlu,mmlu", None, 65536), "tasks: expected different names"),
        (("ruler_qa", None, 5000), "ruler_length: must be one of 4096, .*, got 5000"),
        (("mmlu", "mmlu=five", 65536), "shots: expected TASK=N .* got 'mmlu=five'"),
        (("mmlu", "gsm8k=5", 65536), "shots: expected TASK=N .* got 'gsm8k=5'"),
    ],
)
def test_select_tasks_refuses(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        select_tasks(*arguments)


def test_rows_that_a_cache_can_be() -> None:
    keys = "fp8,mxfp8,none,mean,mean:request,channels16+4/6,mean+channels15+4/6"
    for row in (*parse_rows(keys), *parse_rows(None, tasks.DEFAULT_KEYS)):
        assert tasks._check_row(row) is row
    for key in ("eigen4", "kmean", "mean:first256", "mean+channels15:request", "channels4:centred"):
        with pytest.raises(ValueError, match=re.escape(f"{key!r} is not available")):
            tasks._check_row(parse_rows(key)[1])


def test_the_papers_rec() -> None:
    """Llama-3.1-8B on GSM8K, Table 2: 0.761, 0.653, 0.736 of 1319 examples is Rec. 77 %."""
    n = 1319

    def right(count: int) -> list[float]:
        return [1.0] * count + [0.0] * (n - count)

    baseline, direct, mpfa = (right(round(x * n)) for x in (0.761, 0.653, 0.736))
    s = score(mpfa, baseline, direct)
    assert round(s.mean, 3) == 0.736 and round(s.loss, 3) == 0.025
    assert round(100 * s.recovered) == 77
    assert s.interval[0] < s.recovered < s.interval[1]
    assert s.error == pytest.approx(math.sqrt(0.736 * 0.264 / n), rel=2e-3)


def test_few_examples_have_no_interval() -> None:
    baseline, direct, own = [1.0] * 8, [0.0] * 8, [1.0] * 6 + [0.0] * 2
    assert score(own, baseline, direct).interval is not None
    few = score(own[1:], baseline[1:], direct[1:])
    assert few.interval is None and few.recovered == pytest.approx(5 / 7)
    assert tasks_report._recovered_text(few, False, 7) == "71% (no interval: n < 8)"


def test_errors_are_paired() -> None:
    """Two rows that differ in 4 of 400 examples: the difference is known far better than each."""
    generator = np.random.default_rng(0)
    baseline = generator.integers(0, 2, 400).astype(float)
    row = baseline.copy()
    row[np.flatnonzero(baseline)[:4]] = 0.0
    s = score(list(row), list(baseline))
    assert s.loss == pytest.approx(0.01)
    assert s.loss_error == pytest.approx(math.sqrt(0.01 * 0.99 / 399)) and s.error > 0.02
    assert s.recovered is None and s.interval is None


def test_rec_of_no_loss() -> None:
    values = [1.0, 0.0, 1.0, 1.0]
    assert score(values, values, values).recovered is None
    better = [1.0, 1.0, 1.0, 1.0]
    assert score(values, values, better).recovered is None
    # One lost example of 4: 32 % of the resamples have none, so that no interval exists.
    worse = [0.0, 0.0, 1.0, 1.0]
    s = score(values, values, worse)
    assert s.recovered == 1.0 and s.interval is None
    with pytest.raises(ValueError, match=r"the same examples, got \[3, 4\]"):
        score(values, values[:3])


def document(**rows: list[float]) -> dict:
    task = {"name": "t", "shots": 5, "metric": "acc"}
    return {
        "model": "m", "dtype": "float32", "device": "cpu", "baseline": "sdpa", "direct": "none",
        "limit": 2, "tasks": [task], "skipped": [{"key": "mxfp8", "reason": "no kernel"}],
        "rows": [{"key": k.replace("_", ":"), "results": {"t": {"values": v}}}
                 for k, v in rows.items()],
    }  # fmt: skip


def test_table() -> None:
    half = [1.0, 0.0] * 50
    d = document(sdpa=[1.0] * 100, none=half, mean_request=[1.0] * 75 + [0.0] * 25, fp8=[1.0] * 100)
    lines = tasks_report.table(d).splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    assert len({len(line) for line in lines}) == 1
    assert cells[2] == ["t (5-shot, acc), n=100", "sdpa", "1.000 ± 0.000", "", ""]
    assert cells[3][1:] == ["none", "0.500 ± 0.050", "+0.500 ± 0.050", "0% by definition"]
    assert cells[4][1:4] == ["mean:request", "0.750 ± 0.044", "+0.250 ± 0.044"]
    assert cells[4][4].startswith("50% (")
    assert cells[5][4] == "100% (100..100)"
    assert cells[6] == ["mean of 1 tasks", "mean:request", "", "", "50%"]
    notes = "\n".join(tasks_report.notes(d))
    assert "mxfp8: not run: no kernel" in notes and "first 2 examples" in notes


def test_without_lm_eval(monkeypatch, capsys) -> None:
    monkeypatch.setattr(tasks, "_installed", lambda name: name != "lm_eval")
    assert command_line.main(["accuracy", "--tasks", "mmlu"]) == 1
    refusal = "--tasks needs lm_eval; run: pip install 'lm_eval[ruler]' accelerate transformers"
    assert refusal in capsys.readouterr().err


@pytest.mark.parametrize("options", [{}, {"window_left": 40}, {"logits_soft_cap": 5.0}])
@pytest.mark.parametrize("num_new", [140, 1, 20])
def test_fp8_row_is_the_baselines(num_new: int, options: dict) -> None:
    """As the accuracy command's FP8 row; P's exponent alone may differ (final for running max)."""
    pytest.importorskip("transformers")
    from mpfa.accuracy.tasks_fp8 import _Stored, fp8_attention

    generator = torch.Generator().manual_seed(num_new)
    k, v = (torch.randn(140, 1, 64, generator=generator).bfloat16() for _ in range(2))
    q = torch.randn(num_new, 2, 64, generator=generator).bfloat16() * 3
    stored = _Stored()
    stored.append(k, v)
    got = fp8_attention(q, stored, causal=True, **options)
    operands = [dequantize_fp8(*quantize_fp8(x)) for x in (q, k, v)]
    expected, _ = attend_request(
        QueryOperands(operands[0]),
        KVOperands(*operands[1:]),
        causal=True,
        scheme=SCHEME,
        sm_scale=0.125,
        **options,
    )
    error = (got - expected).norm() / expected.norm()
    exact, _ = attend_request(
        QueryOperands(q.float()), KVOperands(k.float(), v.float()), causal=True, scheme=SCHEME
    )
    assert error < 0.02
    if not options:
        # The formats themselves cost more than that.
        assert (expected - exact).norm() / exact.norm() > 0.03


def test_fp8_scales_are_the_first_steps() -> None:
    pytest.importorskip("transformers")
    from mpfa.accuracy.tasks_fp8 import _Stored

    stored = _Stored()
    first = torch.full((2, 1, 4), 2.0)
    stored.append(first, first)
    stored.append(torch.full((1, 1, 4), 1.0), torch.full((1, 1, 4), 5.0))
    assert stored.k.shape == (3, 1, 4)
    assert (stored.k[2].float() * stored.k_scale).flatten().tolist() == [1.0] * 4
    assert (stored.v[2].float() * stored.v_scale).flatten().tolist() == [2.0] * 4  # saturated


def test_fp8_sinks() -> None:
    pytest.importorskip("transformers")
    from mpfa.accuracy.tasks_fp8 import _Stored, fp8_attention

    stored = _Stored()
    stored.append(torch.ones(1, 2, 64), torch.ones(1, 2, 64))
    q = torch.ones(1, 4, 64)
    # One key with score 8 beside sinks of 8 (half the weight) and of -inf (none).
    sinks = torch.tensor([8.0, -torch.inf, 8.0, -torch.inf])
    out = fp8_attention(q, stored, causal=True, sinks=sinks)
    assert torch.allclose(out[0, :, 0], torch.tensor([0.5, 1.0, 0.5, 1.0]), atol=1e-6)
