# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="mpfa": small random models against transformers' own eager attention."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_models import (  # noqa: E402
    COMMON,
    forward,
    generate,
    make_model,
    padded,
    prompts,
    relative,
)

from mpfa.integrations.transformers import MpfaCache, calibrate_model  # noqa: E402
from mpfa.stats import SmoothingStats  # noqa: E402

KINDS = ["llama", "gemma2", "gemma3", "mistral", "phimoe", "gpt_oss"]


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_equals_eager(kind: str) -> None:
    """Prefill of 25 tokens, 15 more, then 5 decode steps; all see 12-token windows where the model
    has them. Against eager attention, and against eager attention with the same roundings."""
    model = make_model(kind)
    tokens = prompts([45])[0][None]
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        model.set_attn_implementation("rounded_eager")
        rounded = model(tokens, use_cache=False).logits
        model.set_attn_implementation("mpfa")
        cache = MpfaCache(model.config, format="bf16", page_size=16)
        parts = [forward(model, cache, tokens[:, :25]), forward(model, cache, tokens[:, 25:40])]
        parts += [forward(model, cache, tokens[:, t : t + 1]) for t in range(40, 45)]
    found = torch.cat(parts, 1)
    # bf16 roundings of q, k, v and of the output: 2^-9 each; a wrong mask gives 0.1 and more.
    assert relative(found, expected) < 0.02
    # What is left: outputs that lie between two bf16 numbers and are rounded the other way.
    assert relative(found, rounded) < 0.004
    assert cache.get_seq_length() == 45
    assert [layer.lens for layer in cache.layers] == [[45]] * 3


@pytest.mark.parametrize("format", ["bf16", "qk4pv8", "mxfp8"])
def test_batch_equals_single(format: str) -> None:
    """Left-padded prompts of three lengths, prefill and decode, give each request its own result."""
    model = make_model("llama").double()
    model.set_attn_implementation("mpfa")
    parts = prompts([5, 33, 18])

    def run(inputs, new):
        cache = MpfaCache(model.config, format=format, page_size=32)
        mask = inputs["attention_mask"]
        position = (mask.cumsum(1) - 1).clamp(min=0)
        longer = torch.cat([mask, torch.ones(len(mask), 1, dtype=mask.dtype)], 1)
        with torch.no_grad():
            first = forward(model, cache, **inputs, position_ids=position)
            second = forward(
                model, cache, new, attention_mask=longer, position_ids=position[:, -1:] + 1
            )
        return first[:, -1], second[:, -1], cache

    new = torch.tensor([[11], [12], [13]])
    first, second, cache = run(padded(parts), new)
    assert [layer.lens for layer in cache.layers] == [[6, 34, 19]] * 3
    for i, part in enumerate(parts):
        alone = run(padded([part]), new[i : i + 1])
        # why float64: outside of the attention, matrix products depend on the batch in the last
        # bits, which in fp32 would now and then turn a rounding of q, k or v.
        assert relative(first[i], alone[0][0]) < 1e-9
        assert relative(second[i], alone[1][0]) < 1e-9


def test_right_padding_and_chunks() -> None:
    model = make_model("llama")
    parts = prompts([9, 21])
    with torch.no_grad():
        expected = [model(p[None], use_cache=False).logits[0] for p in parts]
        model.set_attn_implementation("mpfa")
        inputs = padded(parts, left=False)
        cache = MpfaCache(model.config, format="bf16", page_size=1)
        logits = []
        for begin, end in ((0, 6), (6, 15), (15, 21)):
            logits.append(
                forward(
                    model,
                    cache,
                    inputs["input_ids"][:, begin:end],
                    attention_mask=inputs["attention_mask"][:, :end],
                )
            )
    logits = torch.cat(logits, 1)
    for i, part in enumerate(parts):
        assert relative(logits[i, : part.numel()], expected[i]) < 0.02


def test_generate_greedy_and_sampling() -> None:
    model = make_model("llama")
    inputs = padded(prompts([17, 30]))
    expected = generate(model, inputs, 12)
    model.set_attn_implementation("mpfa")
    got = generate(model, inputs, 12, MpfaCache(model.config, format="bf16"))
    assert torch.equal(got, expected)
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        cache = MpfaCache(model.config, compensation="mean")
        draws.append(generate(model, inputs, 12, cache, do_sample=True, temperature=0.8))
    assert torch.equal(*draws)


def test_compensation_reduces_the_error() -> None:
    """K with large channel means: per-request means, static means and channels all help."""
    model = make_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias = torch.nn.Parameter(torch.zeros(128))
            # why these channels: rotary embedding turns the low-frequency ones little.
            layer.self_attn.k_proj.bias[29:32] = 25.0
            layer.self_attn.k_proj.bias[93:96] = -25.0
    tokens = prompts([64])[0][None]
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        stats = {
            "channels": calibrate_model(model, prompts([80], 1)[0], channels=8, center=False),
            "mean": calibrate_model(model, prompts([80], 1)[0]),
            "none": None,
            "request": None,
        }
        assert model.config._attn_implementation == "eager"
        model.set_attn_implementation("mpfa")
        errors = {}
        for name, static in stats.items():
            cache = MpfaCache(
                model.config,
                compensation="mean" if name == "request" else name,
                channels=8 if name == "channels" else 0,
                stats=static,
            )
            errors[name] = relative(forward(model, cache, tokens), expected)
    for name in ("channels", "mean", "request"):
        assert errors[name] < 0.6 * errors["none"], errors


def test_growth_keeps_the_tokens() -> None:
    model = make_model("llama").double()
    model.set_attn_implementation("mpfa")
    tokens = prompts([40])[0][None]
    cache = MpfaCache(model.config, page_size=1)
    with torch.no_grad():
        for t in range(40):
            stepwise = forward(model, cache, tokens[:, t : t + 1])
        whole = forward(model, MpfaCache(model.config, page_size=1), tokens)[:, -1:]
    # One tile of 128 keys holds them all, so that decode quantises P as prefill's last row does.
    assert relative(stepwise, whole) < 1e-9
    assert cache.nbytes >= 3 * 40 * cache.layers[0].cache.bytes_per_token


def test_reset() -> None:
    model = make_model("llama")
    model.set_attn_implementation("mpfa")
    cache = MpfaCache(model.config, compensation="mean")
    tokens = prompts([20])[0][None]
    with torch.no_grad():
        first = forward(model, cache, tokens)
        cache.reset()
        assert cache.get_seq_length() == 0
        other = forward(model, cache, prompts([31], 5)[0][None])
        cache.reset()
        again = forward(model, cache, tokens)
    assert torch.equal(first, again)
    assert other.shape[1] == 31


class TestErrors:
    def setup_method(self) -> None:
        self.model = make_model("llama")
        self.model.set_attn_implementation("mpfa")
        self.tokens = prompts([8])[0][None]

    def test_without_its_cache(self) -> None:
        with pytest.raises(ValueError, match="past_key_values=mpfa.integrations"):
            self.model(self.tokens)

    def test_dropout(self) -> None:
        self.model.train()
        for layer in self.model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        with pytest.raises(ValueError, match="dropout: mpfa is for inference, got 0.1"):
            forward(self.model, MpfaCache(self.model.config), self.tokens)

    def test_4d_mask(self) -> None:
        mask = torch.zeros(1, 1, 8, 8)
        with pytest.raises(ValueError, match="only padding masks"):
            forward(self.model, MpfaCache(self.model.config), self.tokens, attention_mask=mask)

    def test_batch_changes(self) -> None:
        cache = MpfaCache(self.model.config)
        forward(self.model, cache, self.tokens)
        with pytest.raises(ValueError, match="made for a batch of 1, got 2"):
            forward(self.model, cache, self.tokens.expand(2, -1))

    def test_padding_changes(self) -> None:
        inputs = padded(prompts([4, 8]))
        cache = MpfaCache(self.model.config)
        forward(self.model, cache, **inputs)
        with pytest.raises(ValueError, match=r"earlier steps had \[4, 8\] tokens per request"):
            forward(
                self.model,
                cache,
                torch.ones(2, 1, dtype=torch.int64),
                attention_mask=torch.cat([torch.ones(2, 7), torch.zeros(2, 2)], 1).long(),
            )

    def test_beam_search(self) -> None:
        with pytest.raises(NotImplementedError, match="beam search"):
            generate(
                self.model,
                {"input_ids": self.tokens},
                3,
                MpfaCache(self.model.config),
                num_beams=2,
            )

    def test_stats(self) -> None:
        config = self.model.config
        stats = SmoothingStats(torch.zeros(6, 64), torch.zeros(2, 64), None)
        with pytest.raises(ValueError, match="takes none"):
            MpfaCache(config, stats=[stats] * 3)
        with pytest.raises(ValueError, match="the model has 3 layers, got 2"):
            MpfaCache(config, compensation="mean", stats=[stats] * 2)
        with pytest.raises(ValueError, match="needs one SmoothingStats per layer"):
            MpfaCache(config, compensation="channels", channels=4)

    def test_stats_of_other_shapes(self) -> None:
        config = self.model.config
        index = torch.arange(4, dtype=torch.int32).repeat(2, 1)
        four = SmoothingStats(channel_index=index)
        eight = SmoothingStats(channel_index=torch.arange(8, dtype=torch.int32).repeat(2, 1))
        options = {"compensation": "channels", "channels": 8}
        MpfaCache(config, **options, stats=[eight] * 3)
        with pytest.raises(ValueError, match=r"must be \[2, 8\], got \[2, 4\] \(layer 1\)"):
            MpfaCache(config, **options, stats=[eight, four, eight])
        with pytest.raises(ValueError, match=r"layer 2 has none, got layers \[0, 1, 3\]"):
            MpfaCache(config, **options, stats={0: eight, 1: eight, 3: eight})
        per_request = SmoothingStats(torch.zeros(2, 6, 64), torch.zeros(2, 2, 64))
        with pytest.raises(ValueError, match=r"must be static, .* \(layer 0\)"):
            MpfaCache(config, compensation="mean", stats=[per_request] * 3)

    def test_shorter_prompt_than_the_cache(self) -> None:
        cache = MpfaCache(self.model.config)
        generate(self.model, {"input_ids": self.tokens[:1]}, 3, cache)
        held = cache.get_seq_length()
        with pytest.raises(ValueError, match=f"no new token after the {held} that this MpfaCache"):
            generate(self.model, {"input_ids": self.tokens[:1, :4]}, 3, cache)
        cache.reset()
        generate(self.model, {"input_ids": self.tokens[:1, :4]}, 3, cache)

    def test_layer_types(self) -> None:
        config = transformers.LlamaConfig(**COMMON)
        config.layer_types = ["full_attention", "linear_attention", "full_attention"]
        with pytest.raises(ValueError, match="layer 1 is 'linear_attention'"):
            MpfaCache(config)
