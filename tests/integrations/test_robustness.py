# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="mpfa" as it is met outside of the happy path: right, or a clear error."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_models import (  # noqa: E402
    CACHE,
    COMMON,
    forward,
    generate,
    make_model,
    padded,
    prompts,
    relative,
)
from transformers import masking_utils  # noqa: E402

from mpfa import planner  # noqa: E402
from mpfa.integrations.transformers import MpfaCache, calibrate_model  # noqa: E402
from mpfa.integrations.transformers_mask import (  # noqa: E402
    causal_mask,
    is_causal_mask,
    padding_of,
    window_of,
)


@pytest.fixture(scope="module")
def llama():
    model = make_model("llama")
    model.set_attn_implementation("mpfa")
    return model


def bf16_cache(model, **options) -> MpfaCache:
    return MpfaCache(model.config, format="bf16", page_size=16, **options)


class TestRight:
    def test_two_turns_and_a_branch(self, llama) -> None:
        """generate(), more text, generate() again on the same cache; and on a copy of it."""
        first, more, other = prompts([9, 6, 4])

        def conversation(cache) -> list[torch.Tensor]:
            inputs = {"input_ids": first[None]}
            turn = torch.cat([inputs["input_ids"], generate(llama, inputs, 5, cache)], 1)
            branch = copy.deepcopy(cache)
            turns = [turn]
            for text, held in ((other, branch), (more, cache)):
                inputs = {"input_ids": torch.cat([turn, text[None]], 1)}
                turns.append(generate(llama, inputs, 5, held))
            return turns

        found = conversation(bf16_cache(llama))
        llama.set_attn_implementation("rounded_eager")
        expected = conversation(transformers.DynamicCache(config=llama.config))
        llama.set_attn_implementation("mpfa")
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    def test_sampling_of_several_sequences(self, llama) -> None:
        inputs, draws = {"input_ids": prompts([8])[0][None]}, []
        for implementation in ("rounded_eager", "mpfa"):
            llama.set_attn_implementation(implementation)
            cache = bf16_cache(llama) if implementation == "mpfa" else None
            torch.manual_seed(5)
            draws.append(generate(llama, inputs, 5, cache, do_sample=True, num_return_sequences=3))
        assert torch.equal(*draws)
        assert len({tuple(row) for row in draws[0].tolist()}) == 3

    def test_chunked_prefill_and_logits_to_keep(self, llama) -> None:
        inputs = {"input_ids": prompts([11])[0][None]}
        whole = generate(llama, inputs, 3, bf16_cache(llama))
        assert torch.equal(
            generate(llama, inputs, 3, bf16_cache(llama), prefill_chunk_size=4), whole
        )
        last = forward(llama, bf16_cache(llama), inputs["input_ids"], logits_to_keep=1)
        assert last.shape[1] == 1 and int(last.argmax()) == int(whole[0, 0])

    def test_rows_of_padding_only(self, llama) -> None:
        inputs = padded(prompts([6, 9]))
        inputs["attention_mask"][0] = 0
        with torch.no_grad():
            found = forward(llama, bf16_cache(llama), **inputs)
            alone = forward(llama, bf16_cache(llama), inputs["input_ids"][1:])
        assert torch.isfinite(found).all()
        # fp32 products depend on the batch in the last bits, which turns a bf16 rounding now and then.
        assert relative(found[1], alone[0]) < 0.004

    @pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
    def test_windows_and_left_padding(self, kind: str) -> None:
        """Windows count tokens, so the padding before a request moves none of them."""
        model = make_model(kind).double()
        model.set_attn_implementation("mpfa")
        parts = prompts([20, 31])
        inputs = padded(parts)
        position = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            found = forward(model, bf16_cache(model), **inputs, position_ids=position)
            for row, part in zip(found, parts, strict=True):
                alone = forward(model, bf16_cache(model), part[None])[0]
                assert relative(row[-part.numel() :], alone) < 1e-9

    def test_means_of_a_request_that_begins_later(self) -> None:
        """Chunks of a left-padded batch: the short request has no token in the first chunk."""
        model = make_model("llama").double()
        model.set_attn_implementation("mpfa")
        parts = prompts([7, 24])
        inputs = padded(parts)
        position = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)

        def cache() -> MpfaCache:
            return MpfaCache(model.config, compensation="mean")

        with torch.no_grad():
            held = cache()
            for begin, end in ((0, 16), (16, 24)):
                found = forward(
                    model,
                    held,
                    inputs["input_ids"][:, begin:end],
                    attention_mask=inputs["attention_mask"][:, :end],
                    position_ids=position[:, begin:end],
                )
            alone = forward(model, cache(), parts[0][None])[0]
        assert relative(found[0, -7:], alone) < 1e-9

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_models(self, dtype: torch.dtype) -> None:
        exact = make_model("llama")
        model = make_model("llama").to(dtype)
        ids = prompts([30])[0][None]
        with torch.no_grad():
            expected = exact(ids).logits
            eager = relative(model(ids).logits.float(), expected)
            model.set_attn_implementation("mpfa")
            found = relative(forward(model, bf16_cache(model), ids).float(), expected)
        # K and V are stored in bf16 whatever the model's dtype.
        assert found < 1.2 * eager + 0.005

    def test_inference_mode_once(self, llama) -> None:
        cache, ids = MpfaCache(llama.config, format="bf16", page_size=1), prompts([6])[0][None]
        with torch.inference_mode():
            forward(llama, cache, ids[:, :4])
        with torch.no_grad():
            found = forward(llama, cache, ids[:, 4:])
            whole = forward(llama, bf16_cache(llama), ids)[:, 4:]
        assert relative(found, whole) < 1e-3

    def test_a_pass_that_failed_changes_nothing(self, llama) -> None:
        cache, ids = bf16_cache(llama), prompts([9])[0][None]
        with torch.no_grad():
            with pytest.raises(ValueError, match="only padding masks"):
                forward(llama, cache, ids[:, :5], attention_mask=torch.zeros(1, 1, 5, 5))
            again = forward(llama, cache, ids)
            clean = forward(llama, bf16_cache(llama), ids)
        assert torch.equal(again, clean)

    def test_memory_goes_with_the_cache(self, llama) -> None:
        """Without waiting for the collector of cycles: pages may be most of a GPU."""
        gc.disable()
        try:
            cache = bf16_cache(llama)
            with torch.no_grad():
                forward(llama, cache, prompts([4])[0][None])
            pages = weakref.ref(cache.layers[0].cache)
            del cache
            assert pages() is None
        finally:
            gc.enable()


@pytest.mark.parametrize(("kind", "plans"), [("llama", 1), ("gemma2", 2)])
def test_one_planner_call_per_step_and_kind_of_layer(kind: str, plans: int, monkeypatch) -> None:
    calls = []
    run = planner._run
    monkeypatch.setattr(planner, "_run", lambda *a, **k: (calls.append(a), run(*a, **k))[1])
    model = make_model(kind)
    model.set_attn_implementation("mpfa")
    cache = MpfaCache(model.config, page_size=16)
    with torch.no_grad():
        # The third step needs a larger workspace than the first.
        for step, tokens in enumerate(prompts([5, 1, 20, 1])):
            forward(model, cache, tokens[None])
            assert len(calls) == plans * (step + 1)


def test_calibration_sees_soft_caps_and_sinks(monkeypatch) -> None:
    """sdpa knows neither; the statistics of later layers would be those of another model."""
    ids = prompts([40])[0]
    for kind in ("gemma2", "gpt_oss"):
        model = make_model(kind)
        seen = {}
        module = __import__(type(model).__module__, fromlist=["eager_attention_forward"])
        eager = module.eager_attention_forward

        def spy(layer, query, key, *args, eager=eager, seen=seen, **kwargs):
            seen[layer.layer_idx] = key[0].transpose(0, 1).bfloat16().float().mean(0)
            return eager(layer, query, key, *args, **kwargs)

        with torch.no_grad(), monkeypatch.context() as patched:
            patched.setattr(module, "eager_attention_forward", spy)
            model(ids[None], use_cache=False)
        expected = dict(seen)
        for index, stats in enumerate(calibrate_model(model, ids)):
            assert relative(stats.k_mean, expected[index]) < 1e-5, (kind, index)


class TestErrors:
    ids = prompts([8])[0][None]

    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    def test_another_attention(self, implementation: str) -> None:
        model = make_model("llama")
        model.set_attn_implementation(implementation)
        with pytest.raises(RuntimeError, match="layer 0 did not call attention function 'mpfa'"):
            forward(model, bf16_cache(model), self.ids)

    def test_a_model_with_its_own_attention(self) -> None:
        config = transformers.BloomConfig(vocab_size=97, hidden_size=128, n_layer=2, n_head=2)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with pytest.raises(RuntimeError, match="did not call attention function 'mpfa'"):
            forward(model.eval(), MpfaCache(config, format="bf16"), self.ids)

    def test_layers_that_run_twice(self, llama) -> None:
        inner = llama.model.layers
        try:
            llama.model.layers = torch.nn.ModuleList([*inner, *inner])
            llama.config.num_hidden_layers = 6
            with pytest.raises(ValueError, match="runs a layer twice"):
                forward(llama, bf16_cache(llama), self.ids)
        finally:
            llama.model.layers, llama.config.num_hidden_layers = inner, 3

    def test_a_pass_that_ended_half_way(self, llama) -> None:
        cache = bf16_cache(llama)
        forward(llama, cache, self.ids)
        bad = llama.model.layers[1].self_attn.v_proj
        bad.register_forward_hook(lambda *_: torch.full((1, 8, 128), torch.nan))
        try:
            with pytest.raises(ValueError, match="v: value nan"):
                forward(llama, cache, self.ids)
        finally:
            bad._forward_hooks.clear()
        with pytest.raises(RuntimeError, match=r"a forward pass did not reach all layers: reset"):
            forward(llama, cache, self.ids)
        cache.reset()
        forward(llama, cache, self.ids)

    def test_padding_that_the_next_mask_denies(self, llama) -> None:
        cache = bf16_cache(llama)
        forward(llama, cache, **padded(prompts([4, 8])))
        for mask in (None, torch.ones(2, 9, dtype=torch.int64)):
            with pytest.raises(ValueError, match=r"earlier steps had \[4, 8\] tokens per request"):
                forward(llama, cache, torch.ones(2, 1, dtype=torch.int64), attention_mask=mask)

    @pytest.mark.parametrize("width", [5, 9])
    def test_mask_of_another_length(self, llama, width: int) -> None:
        with pytest.raises(ValueError, match=r"attention_mask: must be \[1, 8\]"):
            forward(llama, bf16_cache(llama), self.ids, attention_mask=torch.ones(1, width))

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"num_beams": 2}, NotImplementedError, "beam search is not supported"),
            ({"prompt_lookup_num_tokens": 3}, ValueError, "cache that can be cropped"),
            ({"cache_implementation": "static"}, ValueError, "cache_implementation"),
            ({"use_cache": False}, ValueError, "use_cache: False with a cache passed"),
            (
                {"output_attentions": True, "return_dict_in_generate": True},
                ValueError,
                "output_attentions: attention function 'mpfa' does not take it",
            ),
        ],
        ids=lambda o: next(iter(o)) if isinstance(o, dict) else "",
    )
    def test_generate(self, llama, options, error, message) -> None:
        with pytest.raises(error, match=message):
            generate(llama, {"input_ids": self.ids}, 4, bf16_cache(llama), **options)

    def test_static_cache(self, llama) -> None:
        with pytest.raises(ValueError, match="pass past_key_values=mpfa"):
            generate(llama, {"input_ids": self.ids}, 4, cache_implementation="static")

    def test_backward(self, llama) -> None:
        out = llama(self.ids, labels=self.ids, **{CACHE: bf16_cache(llama)})
        with pytest.raises(RuntimeError, match="for inference and has no backward pass"):
            out.loss.backward()

    def test_crop_and_selection(self, llama) -> None:
        cache = bf16_cache(llama)
        cache.batch_repeat_interleave(2)
        forward(llama, cache, self.ids)
        assert not cache.is_croppable
        for call in (
            lambda: cache.crop(-1),
            lambda: cache.batch_repeat_interleave(2),
            lambda: cache.batch_select_indices(torch.tensor([0])),
            lambda: cache.offload(0),
        ):
            with pytest.raises(NotImplementedError, match="MpfaCache: "):
                call()

    def test_encoder_decoder(self) -> None:
        config = transformers.BartConfig(d_model=128, encoder_layers=1, decoder_layers=1)
        with pytest.raises(ValueError, match="encoder-decoder models are not supported"):
            MpfaCache(config)

    def test_bidirectional_attention(self) -> None:
        config = transformers.Gemma3TextConfig(**COMMON, use_bidirectional_attention=True)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="mpfa")
        with pytest.raises(ValueError, match=r"another mask than causal \(bidirectional"):
            forward(model.eval(), bf16_cache(model), self.ids)


class TestMask:
    """The functions that transformers builds masks from."""

    def make(self, function, window=None, **options):
        sizes = {"batch_size": 2, "q_length": 6, "kv_length": 10, "q_offset": 4}
        return causal_mask(
            **{**sizes, **options}, mask_function=function, local_size=window, device="cpu"
        )

    def test_causal_and_windows(self) -> None:
        mask = self.make(masking_utils.causal_mask_function)
        assert mask.shape == (2, 10) and padding_of(mask) is None
        assert window_of(mask, 7) is None and is_causal_mask(mask, False)
        for window in (1, 3, 10, 4096):
            function = masking_utils.sliding_window_causal_mask_function(window)
            mask = self.make(function, window)
            assert window_of(mask, None) == window
            # A copy on another device has lost what was noted and says the same.
            copied = mask.clone()
            assert window_of(copied, None) == window and is_causal_mask(copied, False)
            assert padding_of(copied) is None

    def test_padding(self) -> None:
        given = torch.ones(2, 10, dtype=torch.bool)
        given[1, :3] = False
        mask = self.make(masking_utils.causal_mask_function, attention_mask=given)
        for m in (mask, mask.clone()):
            assert torch.equal(padding_of(m), given)
            assert window_of(m, 7) is None

    def test_masks_of_the_caller(self) -> None:
        """A model that builds no mask: its own window counts, and its own causality."""
        for own in (torch.ones(2, 10), torch.ones(2, 10, dtype=torch.bool), None):
            assert window_of(own, 7) == 7 and not is_causal_mask(own, False)

    def test_everything_else_is_refused(self) -> None:
        causal = masking_utils.causal_mask_function
        blocks = torch.full((2, 10), -1)
        blocks[1, 6:8] = 0
        packed = torch.tensor([[0] * 10, [0] * 5 + [1] * 5])
        window = masking_utils.sliding_window_causal_mask_function
        others = [
            (masking_utils.bidirectional_mask_function, None, {}),
            (masking_utils.chunked_causal_mask_function(4, torch.zeros(2).long()), 4, {}),
            (masking_utils.or_masks(causal, masking_utils.blockwise_overlay(blocks)), None, {}),
            (
                masking_utils.and_masks(
                    causal, masking_utils.packed_sequence_mask_function(packed)
                ),
                None,
                {},
            ),
            (window(3), 4, {}),
            (window(3), None, {}),
            (causal, 3, {}),
            # Given by the model or its caller, evaluated index by index.
            (masking_utils.or_masks(causal, lambda b, h, q, k: k < 6), None, {"use_vmap": True}),
        ]
        for function, size, options in others:
            with pytest.raises(ValueError, match="asks for another mask than"):
                self.make(masking_utils.and_masks(function), size, **options)
        plain = masking_utils.and_masks(causal, lambda b, h, q, k: k >= 0)
        assert padding_of(self.make(plain, use_vmap=True)) is None
