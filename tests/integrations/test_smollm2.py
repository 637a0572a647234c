# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 through attn_implementation="mpfa": 64 greedy tokens, batches and the low-bit formats."""

from __future__ import annotations

import pytest
import torch

from mpfa.demo.model import load_model, missing_packages

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_packages()), reason="; ".join(missing_packages())),
]
QUESTIONS = (
    "What is the capital of France?",
    "List three uses of copper.",
    "Explain in two sentences why the sky is blue.",
)


@pytest.fixture(scope="module")
def demo():
    return load_model(verbose=False)


def chat(demo, question: str) -> torch.Tensor:
    text = demo.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return torch.tensor(demo.tokenizer(text).input_ids)


def generate(demo, inputs: dict[str, torch.Tensor], tokens: int, cache=None):
    """(new tokens [B, tokens], their logits [B, tokens, vocabulary])."""
    out = demo.model.generate(
        **inputs,
        past_key_values=cache,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=demo.tokenizer.eos_token_id,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits, 1)


def test_bf16_is_token_identical_to_eager(demo) -> None:
    """64 greedy tokens. Eager runs in fp32 and mpfa rounds q, k, v and the output to bf16, so two
    candidates that are closer than this rounding (about 0.2 in a logit) may change places."""
    from mpfa.integrations.transformers import MpfaCache

    identical = 0
    for question in QUESTIONS:
        inputs = {"input_ids": chat(demo, question)[None]}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        demo.model.set_attn_implementation("eager")
        expected, logits = generate(demo, inputs, 64)
        demo.model.set_attn_implementation("mpfa")
        cache = MpfaCache(demo.model.config, format="bf16")
        got, ours = generate(demo, inputs, 64, cache)
        if torch.equal(got, expected):
            print(f"{question} 64 of 64 tokens as eager attention")
            identical += 1
            continue
        first = int((got != expected)[0].nonzero()[0])
        error = float((ours - logits)[0, : first + 1].abs().max())
        best, second = logits[0, first].topk(2).values.tolist()
        print(
            f"{question} {first} tokens as eager attention, then a near tie: its two best logits are "
            f"{best - second:.3f} apart, roundings moved logits by up to {error:.3f}"
        )
        assert error < 0.3 and best - second < error, f"{question} step {first}"
    assert identical >= 2


def test_batch_of_three_equals_single_runs(demo) -> None:
    from mpfa.integrations.transformers import MpfaCache

    demo.model.set_attn_implementation("mpfa")
    parts = [chat(demo, question) for question in QUESTIONS]
    width = max(p.numel() for p in parts)
    ids = torch.full((3, width), demo.tokenizer.eos_token_id)
    mask = torch.zeros_like(ids)
    for row, part in enumerate(parts):
        ids[row, width - part.numel() :] = part
        mask[row, width - part.numel() :] = 1
    options = {"compensation": "mean"}
    # why float64: in fp32, matrix products outside of the attention depend on the batch in the last
    # bits, and now and then a 4-bit rounding of q or k turns with them.
    demo.model.double()
    try:
        batch, _ = generate(
            demo,
            {"input_ids": ids, "attention_mask": mask},
            24,
            MpfaCache(demo.model.config, **options),
        )
        for row, part in enumerate(parts):
            inputs = {"input_ids": part[None], "attention_mask": torch.ones_like(part)[None]}
            alone, _ = generate(demo, inputs, 24, MpfaCache(demo.model.config, **options))
            assert torch.equal(batch[row], alone[0]), QUESTIONS[row]
            print(f"{QUESTIONS[row]} in the batch: the 24 tokens of a single run")
    finally:
        demo.model.float()


def test_low_bit_formats_stay_within_their_kl(demo) -> None:
    """Next-token KL to the bf16 cache over a text; bounds are twice docs/demo.md's table."""
    from mpfa.demo import text
    from mpfa.integrations.transformers import MpfaCache, calibrate_model

    config = demo.model.config
    scored = text.scored_windows(demo.tokenizer, 1, 256)[:, :-1]
    sample = text.tokens_of(demo.tokenizer, text.CALIBRATION, 1024)
    stats = calibrate_model(demo.model, sample, channels=16, center=False)
    demo.model.set_attn_implementation("mpfa")

    def log_probs(**options) -> torch.Tensor:
        cache = MpfaCache(config, **options)
        with torch.no_grad():
            first = demo.model(scored[:, :192], past_key_values=cache).logits
            rest = demo.model(scored[:, 192:], past_key_values=cache).logits
        return torch.cat([first, rest], 1)[0].log_softmax(-1)

    exact = log_probs(format="bf16")

    def kl(**options) -> float:
        other = log_probs(**options)
        return float((exact.exp() * (exact - other)).sum(-1).mean())

    direct = kl(format="qk4pv8")
    mean = kl(format="qk4pv8", compensation="mean")
    channels = kl(
        format="qk4pv8", compensation="channels", channels=16, four_over_six=True, stats=stats
    )
    mx = kl(format="mxfp8")
    print(f"KL: direct {direct:.4f}, mean {mean:.4f}, channels {channels:.4f}, mxfp8 {mx:.4f}")
    assert direct < 0.21
    assert mean < 0.065
    assert channels < 0.0152
    assert mx < 0.0226
    assert channels < mean < direct
