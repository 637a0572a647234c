# SPDX-License-Identifier: Apache-2.0
"""The attention seam on two real layers: against transformers' own, and decode against prefill."""

from __future__ import annotations

import pytest
import torch

import mpfa
from mpfa.accuracy import text
from mpfa.accuracy.attention import CapturingRunner, CollectingRunner, PagedRunner, forward
from mpfa.accuracy.baselines import Fp8Runner
from mpfa.accuracy.models import LanguageModel
from mpfa.accuracy.rows import RowSpec
from mpfa.demo.rows import ROWS
from mpfa.reference import exact_attention

TOKENS = 150
LOW_BIT_ROWS = [row for row in ROWS if row.key not in ("bf16", "fp8")]


@pytest.fixture(scope="module")
def tokens(two_layers: LanguageModel) -> torch.Tensor:
    return text.tokens_of(two_layers.tokenizer, text.SCORED, TOKENS)


@pytest.fixture(scope="module")
def calibration(two_layers: LanguageModel) -> dict[int, tuple[torch.Tensor, ...]]:
    runner = CollectingRunner(range(2))
    forward(two_layers, runner, [text.tokens_of(two_layers.tokenizer, text.CALIBRATION, 256)])
    return runner.collected


def make_runner(
    demo: LanguageModel, row: RowSpec, capacity: list[int], calibration, page_size: int = 32
) -> PagedRunner:
    stats = None
    if row.stats == "static":
        center = "mean" in row.compensation
        stats = {
            layer: mpfa.calibrate([(q, k)], channels=row.channels, center=center)
            for layer, (q, k, _) in calibration.items()
        }
    return PagedRunner(demo, row, capacity, stats=stats, page_size=page_size, seed=3)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def own_hidden(demo: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    """Final hidden states with transformers' own fp32 attention."""
    demo.model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        return demo.model.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]


def test_bf16_cache_equals_transformers_own_attention(two_layers, tokens):
    own = own_hidden(two_layers, tokens)
    runner = make_runner(two_layers, ROWS[0], [TOKENS], None)
    (prompt,) = forward(two_layers, runner, [tokens[:-10]])
    steps = [
        forward(two_layers, runner, [tokens[t : t + 1]])[0] for t in range(TOKENS - 10, TOKENS)
    ]
    assert runner.kv_lens == [TOKENS]
    # The difference is the bf16 rounding of q, k, v and of the output: 2^-9 each, four of them.
    assert relative(torch.cat([prompt, *steps]), own) < 4 * 2.0**-9


def test_calibration_pass_equals_transformers_own_attention(two_layers, tokens):
    runner = CollectingRunner([1])
    (hidden,) = forward(two_layers, runner, [tokens])
    assert relative(hidden, own_hidden(two_layers, tokens)) < 4 * 2.0**-9
    assert list(runner.collected) == [1]
    q, k, v = runner.collected[1]
    assert q.shape == (TOKENS, 9, 64) and k.shape == v.shape == (TOKENS, 3, 64)
    with pytest.raises(ValueError, match="one request in one step"):
        runner.begin([1])


@pytest.mark.parametrize("row", [ROWS[0], *LOW_BIT_ROWS], ids=lambda row: row.key)
def test_decode_equals_prefill(two_layers, tokens, calibration, row):
    """Feeding the last tokens one by one gives what one prefill gives, over the same format."""
    decoded = 6
    whole = make_runner(two_layers, row, [TOKENS], calibration)
    (expected,) = forward(two_layers, whole, [tokens])
    runner = make_runner(two_layers, row, [TOKENS], calibration)
    (prompt,) = forward(two_layers, runner, [tokens[:-decoded]])
    steps = [
        forward(two_layers, runner, [tokens[t : t + 1]])[0] for t in range(TOKENS - decoded, TOKENS)
    ]
    got = torch.cat([prompt, *steps])
    # Per-request means are those of the prompt, so the two runs centre by slightly different ones,
    # and MXFP8 scales 32 tokens of V together, so that an open block is coded otherwise than a full
    # one. Elsewhere only a sum order differs, which can turn a rounding here and there.
    tolerance = {"qk4pv8-mean-request": 0.05, "mxfp8": 0.02}.get(row.key, 0.005)
    assert relative(got, expected) < tolerance


@pytest.mark.parametrize("row", [ROWS[0], *LOW_BIT_ROWS], ids=lambda row: row.key)
def test_batch_of_two_equals_each_request_alone(two_layers, tokens, calibration, row):
    first, second = tokens[:70], tokens[70:]
    both = make_runner(two_layers, row, [75, 85], calibration)
    together = forward(two_layers, both, [first, second])
    together_step = forward(two_layers, both, [tokens[:1], tokens[1:2]])
    for i, (own, step) in enumerate(((first, tokens[:1]), (second, tokens[1:2]))):
        alone = make_runner(two_layers, row, [90], calibration)
        assert relative(together[i], forward(two_layers, alone, [own])[0]) < 0.005
        assert relative(together_step[i], forward(two_layers, alone, [step])[0]) < 0.005


def test_low_bit_rows_differ_from_bf16_and_direct_nvfp4_is_the_worst(
    two_layers, tokens, calibration
):
    """The rows really use their formats, and the order of their errors is the expected one."""
    q, k, v = calibration[1]
    exact, _ = exact_attention(q, k, v, causal=True)
    errors = {}
    for row in ROWS:
        size = [len(q)]
        runner = (
            Fp8Runner(1) if row.is_baseline else make_runner(two_layers, row, size, calibration)
        )
        runner.begin([len(q)])
        errors[row.key] = relative(runner.attend(1, q, k, v), exact)
    assert errors["bf16"] < 0.003
    assert max(errors, key=errors.get) == "qk4pv8"
    assert errors["qk4pv8-mean"] < 0.8 * errors["qk4pv8"]
    assert errors["qk4pv8-channels"] < errors["qk4pv8-mean"]
    assert errors["qk4pv8-mean-channels"] < 0.97 * errors["qk4pv8-mean-channels-plain"]
    assert all(error > 0.01 for key, error in errors.items() if key != "bf16")


def test_pages_are_shuffled_and_only_the_needed_ones_are_written(two_layers, calibration):
    q, k, v = (x[:70] for x in calibration[0])
    runner = make_runner(two_layers, ROWS[0], [96, 96], None)
    runner.begin([70, 0])
    runner.attend(0, q, k, v)
    written = [p for p in range(6) if bool(runner.caches[0].k[p].float().abs().sum() > 0)]
    assert len(written) == 3
    assert runner.caches[0].num_pages == 6
    assert written != [0, 1, 2]


def test_runner_refuses_more_tokens_than_its_pages(two_layers):
    runner = make_runner(two_layers, ROWS[0], [4], None)
    with pytest.raises(ValueError, match="request 0 grows to 5 tokens, room is 4"):
        runner.begin([5])


def test_capturing_runner_keeps_the_first_step_only(two_layers, tokens):
    runner = CapturingRunner(make_runner(two_layers, ROWS[0], [TOKENS], None), [0])
    forward(two_layers, runner, [tokens[:20]])
    forward(two_layers, runner, [tokens[20:21]])
    assert list(runner.captured) == [0]
    assert runner.captured[0][0].shape == (20, 9, 64)


def test_fp8_baseline_scales_are_those_of_the_first_step():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(9, 2, 64, generator=generator).bfloat16()
    k, v = (torch.randn(9, 1, 64, generator=generator).bfloat16() for _ in range(2))
    runner = Fp8Runner(1)
    runner.begin([8])
    runner.attend(0, q[:8], k[:8], v[:8])
    runner.begin([1])
    huge = v[8:] * 1000
    out = runner.attend(0, q[8:], k[8:], huge)
    # The last value saturates at the largest |v| of the prompt instead of changing the scale.
    assert float(out.float().abs().max()) <= float(v[:8].float().abs().max()) * 1.01
    assert runner.kv_lens == [9]


def test_padding_mask_is_refused(two_layers, tokens):
    from mpfa.accuracy.attention import _attention

    x = torch.zeros(1, 1, 1, 64)
    with pytest.raises(ValueError, match="attention_mask"):
        _attention(two_layers.model, x, x, x, torch.ones(1, 1), mpfa_runner=Fp8Runner(1))
