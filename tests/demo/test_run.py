# SPDX-License-Identifier: Apache-2.0
"""Scoring on two real layers: the right targets, the right inputs, the right averages."""

from __future__ import annotations

import pytest
import torch

from mpfa.accuracy.metrics import relative_l2
from mpfa.accuracy.models import LanguageModel
from mpfa.accuracy.samples import AttentionSamples
from mpfa.demo.rows import select_rows
from mpfa.demo.run import Demo, DemoSettings
from mpfa.reference import exact_attention

SETTINGS = DemoSettings(tokens=96, decode_tokens=5, calibration_tokens=64, answer_tokens=3)


@pytest.fixture(scope="module")
def results(two_layers: LanguageModel):
    demo = Demo(two_layers, SETTINGS, select_rows(["fp8", "qk4pv8-mean-request"]))
    return demo, {r.row.key: r for r in demo.run()}


def test_bf16_scores_are_those_of_transformers_own_run(results, two_layers):
    demo, by_key = results
    two_layers.model.set_attn_implementation("sdpa")
    windows = demo.windows
    with torch.inference_mode():
        logits = two_layers.model(input_ids=windows[:, :-1], use_cache=False).logits
    nll = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none"
    )
    got = by_key["bf16"].scores.nll.view(2, 48)
    # Shifted targets or a repeated input would change tokens by whole nats.
    assert (got - nll.view(2, 48)).abs().max() < 0.1
    assert windows.shape == (2, 49)


def test_decoded_tokens_are_scored_like_prefilled_ones(results, two_layers):
    _, by_key = results
    whole = DemoSettings(tokens=96, decode_tokens=0, calibration_tokens=64)
    demo = Demo(two_layers, whole, select_rows(["fp8"]))
    prefilled = {r.row.key: r for r in demo.run()}
    # fp8 scales Q by the largest value of a step, so single tokens are rounded otherwise.
    for key, tolerance in (("bf16", 0.02), ("fp8", 0.5)):
        difference = by_key[key].scores.nll - prefilled[key].scores.nll
        assert difference.abs().max() < tolerance


def test_sampled_attention_is_exact_per_request(results):
    demo, _ = results
    samples: AttentionSamples = demo._samples
    assert samples.lens == [43, 43]
    assert samples.layers == [0, 1]
    q, k, v = samples.windows[1][1]
    assert q.shape == (43, 9, 64)
    alone, _ = exact_attention(q, k, v, causal=True)
    assert torch.equal(samples._exact[1][1], alone)
    # The windows are different requests.
    assert float(relative_l2(samples.windows[0][1][0], q).max()) > 0.5


def test_row_results_are_means_over_what_was_scored(results):
    _, by_key = results
    for result in by_key.values():
        assert result.scores.kl.numel() == 96
        assert result.kl == pytest.approx(float(result.scores.kl.mean()))
        assert result.perplexity == pytest.approx(float(result.scores.nll.mean().exp()))
        assert 0 < result.rel_l2 <= result.rel_l2_max
    assert by_key["bf16"].kl == 0
    assert by_key["bf16"].rel_l2 < by_key["fp8"].rel_l2 < by_key["qk4pv8-mean-request"].rel_l2


def test_answer_is_greedy_over_the_cache(results, two_layers):
    demo, _ = results
    row = demo.rows[0]
    two_layers.model.set_attn_implementation("sdpa")
    tokenizer = two_layers.tokenizer
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": SETTINGS.prompt}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(chat).input_ids
    answer = []
    with torch.inference_mode():
        for _ in range(3):
            logits = two_layers.model(input_ids=torch.tensor([ids]), use_cache=False).logits
            answer.append(int(logits[0, -1].argmax()))
            ids.append(answer[-1])
    assert tokenizer.eos_token_id not in answer
    assert demo.answer(row) == tokenizer.decode(answer).strip()
