# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="mpfa": small random models against transformers' own eager attention."""

from __future__ import annotations

import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")

from mpfa.integrations.transformers import MpfaCache, calibrate_model  # noqa: E402
from mpfa.stats import SmoothingStats  # noqa: E402

# The argument for the cache was renamed in transformers 5.
CACHE = (
    "cache"
    if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
    else "past_key_values"
)
COMMON = {
    "vocab_size": 97,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


def make_model(kind: str) -> torch.nn.Module:
    """A model with random weights, large enough logits that greedy choices are no ties."""
    torch.manual_seed(7)
    if kind == "llama":
        config = transformers.LlamaConfig(**COMMON)
    elif kind == "gemma2":  # sliding layers, soft cap
        config = transformers.Gemma2Config(
            **COMMON, sliding_window=12, query_pre_attn_scalar=64, attn_logit_softcapping=3.0
        )
    elif kind == "gpt_oss":  # sliding layers, sinks
        config = transformers.GptOssConfig(
            **COMMON, sliding_window=12, num_local_experts=2, num_experts_per_tok=1
        )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name and weight.dim() == 2:
                weight.mul_(4.0)
            if name.endswith("sinks"):
                weight.copy_(torch.linspace(-1.0, 2.0, weight.numel()))
    return model.eval()


def prompts(lens: list[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (n,), generator=generator) for n in lens]


def padded(parts: list[torch.Tensor], left: bool = True) -> dict[str, torch.Tensor]:
    width = max(p.numel() for p in parts)
    ids = torch.zeros(len(parts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, part in enumerate(parts):
        where = slice(width - part.numel(), width) if left else slice(0, part.numel())
        ids[row, where], mask[row, where] = part, 1
    return {"input_ids": ids, "attention_mask": mask}


def forward(model, cache: MpfaCache | None, *args, **kwargs) -> torch.Tensor:
    """The model's logits."""
    return model(*args, **kwargs, **{CACHE: cache}).logits


def generate(model, inputs, tokens: int, cache=None, **options) -> torch.Tensor:
    out = model.generate(
        **inputs,
        **{CACHE: cache},
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=options.pop("do_sample", False),
        pad_token_id=0,
        **options,
    )
    return out[:, inputs["input_ids"].shape[1] :]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_bf16_equals_eager(kind: str) -> None:
    """Prefill of 40 tokens and 5 decode steps; both see 12-token windows in the sliding models."""
    model = make_model(kind)
    tokens = prompts([45])[0][None]
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        model.set_attn_implementation("mpfa")
        cache = MpfaCache(model.config, format="bf16", page_size=16)
        parts = [forward(model, cache, tokens[:, :40])]
        parts += [forward(model, cache, tokens[:, t : t + 1]) for t in range(40, 45)]
    # bf16 roundings of q, k, v and of the output: 2^-9 each; a wrong mask gives 0.1 and more.
    assert relative(torch.cat(parts, 1), expected) < 0.02
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

    def test_layer_types(self) -> None:
        config = transformers.LlamaConfig(**COMMON)
        config.layer_types = ["full_attention", "linear_attention", "full_attention"]
        with pytest.raises(ValueError, match="layer 1 is 'linear_attention'"):
            MpfaCache(config)
