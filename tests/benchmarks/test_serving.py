# SPDX-License-Identifier: Apache-2.0
"""benchmarks/serving.py: a tiny model on the CPU, an engine of another kind, and what is refused."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import rows, serving, serving_engine, serving_models
from mpfa.accuracy.rows import parse_rows


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return serving_models.load(None, "tiny")[0]


@pytest.fixture(scope="module")
def engines(model) -> list[serving_engine.TransformersEngine]:
    return serving_engine.make_engines(model, parse_rows("mean"), ["sdpa", "eager"], 4096)


def generate(engine, prompts: torch.Tensor, count: int) -> torch.Tensor:
    tokens = [engine.prefill(prompts, count)]
    tokens += [engine.step() for _ in range(count - 1)]
    engine.release()
    return torch.stack(tokens, 1)


def test_the_engine_generates_what_the_model_does(model, engines) -> None:
    """Preallocated cache, chunks and batches give the tokens of transformers' own generate()."""
    prompts = serving_engine.random_prompts(model, 3, 40, seed=1)
    model.set_attn_implementation("eager")
    expected = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=6, min_new_tokens=6,
        do_sample=False, pad_token_id=0,
    )[:, 40:]  # fmt: skip
    for engine in engines[:2]:
        assert torch.equal(generate(engine, prompts, 6), expected)
    chunked = serving_engine.make_engines(model, parse_rows("bf16"), ["sdpa"], 3 * 16)[0]
    assert torch.equal(generate(chunked, prompts, 6), expected)


def test_check_passes_and_can_fail(model, engines) -> None:
    sdpa, _, bf16, mean = engines
    assert (sdpa.name, bf16.name, mean.name) == ("sdpa fp32", "mpfa bf16", "mpfa mean")
    prompts = serving_engine.random_prompts(model, 1, 70, seed=3)
    assert 0 < serving_engine.check(bf16, sdpa, prompts) < 0.08
    assert 0.08 < serving_engine.check(mean, sdpa, prompts) < 0.4

    class OtherTokens(serving_engine.TransformersEngine):
        def prefill(self, prompts, output_tokens):
            return super().prefill(prompts.flip(1), output_tokens)

    wrong = OtherTokens("wrong", model, "mpfa", mean._make_cache, mean._row, 4096)
    with pytest.raises(RuntimeError, match="wrong: logits are at .* nothing was timed"):
        serving_engine.check(wrong, sdpa, prompts)


class CountingEngine:
    """Costs no time; counts what it is asked for."""

    name = "counting"

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def refusal(self, length: int, concurrency: int, output_tokens: int) -> str | None:
        return "too long for it" if length > 70 else None

    def prefill(self, prompts: torch.Tensor, output_tokens: int) -> torch.Tensor:
        self.calls.append((*prompts.shape, output_tokens))
        return prompts[:, 0]

    def step(self) -> torch.Tensor:
        self.calls.append(("step",))
        return torch.zeros(1)

    def cache_bytes(self) -> int:
        return 1 << 20

    def release(self) -> None:
        self.calls.append(("release",))


def test_command(tmp_path, capsys, monkeypatch) -> None:
    """Toy sizes: rows of the schema, skips with reasons, an engine from elsewhere."""
    counting = CountingEngine()
    plugin = types.ModuleType("serving_plugin")
    plugin.engines = lambda arguments: [counting]
    monkeypatch.setitem(sys.modules, "serving_plugin", plugin)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(serving, "CHECK_TOKENS", 20)
    out = tmp_path / "cpu.json"
    arguments = [
        "--formats", "mean:request", "--contexts", "64,80", "--concurrency", "2",
        "--output-tokens", "2", "--runs", "2", "--engine", "serving_plugin:engines",
        "--json", str(out), "--commit", "abc",
    ]  # fmt: skip
    assert serving.main(arguments) == 0
    found = rows.load(out)  # validates the schema
    cases = ["prompt=64 concurrency=2 output=2", "prompt=80 concurrency=2 output=2"]
    impls = ["sdpa fp32", "mpfa bf16", "mpfa mean:request"]
    assert {(r["case"], r["impl"]) for r in found} == {
        *((c, i) for c in cases for i in impls), (cases[0], "counting"),
    }  # fmt: skip
    metrics = [r["metric"] for r in found if (r["case"], r["impl"]) == (cases[0], "mpfa bf16")]
    assert metrics == [
        "TTFT", "TTFT, mean of 2", "TTFT, spread", "TPOT", "TPOT, mean of 2", "TPOT, spread",
        "output tokens/s", "output tokens/s, mean of 2", "output tokens/s, spread", "KV cache",
    ]  # fmt: skip
    # A warm-up of one prefill and one step, and two runs of the same.
    run = [(2, 64, 2), ("step",), ("release",)]
    assert counting.calls == 3 * run
    printed = capsys.readouterr().out
    assert "counting: skipped: too long for it" in printed
    assert "mpfa mean:request: logits at relative L2" in printed
    by_key = {(r["impl"], r["metric"]): r for r in found if r["case"] == cases[0]}
    # K and V fp32 of 2 layers, 2 requests, 2 heads, 66 tokens.
    assert by_key["sdpa fp32", "KV cache"]["value"] == pytest.approx(
        2 * 2 * 2 * 2 * 66 * 64 * 4 / 2**20, abs=1e-4
    )
    # One page of 128 tokens per request: 100 + 2 * 2 bytes per token and head at D = 64, G = 2.
    assert by_key["mpfa mean:request", "KV cache"]["value"] == pytest.approx(
        2 * 2 * 2 * 128 * 104 / 2**20, abs=1e-4
    )


def test_figures() -> None:
    """Medians, spread and ratios of known times; a ratio above 1 is better than the baseline."""
    base = serving.Measurement([2.0, 4.0, 3.0], [0.2, 0.2, 0.2], [10.0, 10.0, 10.0], 1 << 21)
    ours = serving.Measurement([1.0, 1.5, 3.0], [0.1, 0.05, 0.1], [5.0, 5.0, 4.0], 1 << 20)
    common = rows.context("measured", "a test", "abc")
    case = serving.Case(64, 2, 10)
    found = serving.rows_of(case, {"base": base, "ours": ours}, "base", common, None)
    values = {(r["impl"], r["metric"]): (r["value"], r["ratio_to"]) for r in found}
    assert values["base", "TTFT"] == (3000.0, None)
    assert values["base", "TTFT, spread"] == (66.6667, None)
    assert values["ours", "TTFT"] == (1500.0, {"base": 2.0})
    assert values["ours", "TTFT, mean of 3"] == (1833.3333, None)
    assert values["ours", "TPOT"] == (100.0, {"base": 2.0})
    assert values["ours", "output tokens/s"] == (4.0, {"base": 2.0})
    assert values["base", "KV cache"] == (2.0, None)


def test_without_a_gpu_the_papers_sizes_are_skipped(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = serving.parse([])
    assert (arguments.contexts, arguments.shape) == (serving.CPU_CONTEXTS, "tiny")
    assert "4096, 8192, 16384, 32768, 65536, 131072 are skipped" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = serving.parse([])
    assert (arguments.contexts, arguments.concurrency) == (serving.CONTEXTS, (1, 8, 16))
    assert (arguments.output_tokens, arguments.shape) == (1024, "llama-3.1-8b")


def test_refusals(model, engines, monkeypatch, capsys) -> None:
    with pytest.raises(ValueError, match="formats: no cache of mpfa has fp8"):
        serving.main(["--formats", "fp8", "--shape", "tiny"])
    with pytest.raises(SystemExit):
        serving.parse(["--output-tokens", "1"])
    assert "--output-tokens: must be >= 2" in capsys.readouterr().err
    # What a GPU without the kernels, or without the memory, would say.
    monkeypatch.setattr(serving_engine, "supports", lambda *a, **k: (False, ["no such kernel"]))
    assert engines[3].refusal(64, 1, 8) == "append: no such kernel"
    assert engines[0].refusal(64, 1, 8) is None
    monkeypatch.undo()
    fake = types.SimpleNamespace(device=torch.device("cuda"), config=model.config)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**7, 10**8))
    for name, expected in (("eager", "needs about"), ("sdpa", None)):
        engine = serving_engine.TransformersEngine(name, model, name, None, None, 4096)
        engine._model = fake
        assert (engine.refusal(1024, 1, 8) or "").startswith(expected or "")
        assert (engine.refusal(1024, 1, 8) is None) == (expected is None)


def test_shapes_are_the_papers() -> None:
    shapes = {
        name: (c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.num_hidden_layers)
        for name, c in serving_models.SHAPES.items()
    }
    assert shapes["llama-3.1-8b"] == (32, 8, 128, 32) and shapes["qwen3-14b"] == (40, 8, 128, 40)


def test_results_are_merged(tmp_path) -> None:
    out = tmp_path / "cpu.json"
    common = rows.context("measured", "a test", "abc")
    m = serving.Measurement([1.0], [0.1], [2.0], 1 << 20)
    for length in (64, 128, 64):
        case = serving.Case(length, 1, 8)
        rows.save(out, serving.rows_of(case, {"sdpa bf16": m}, "sdpa bf16", common, None))
    assert len(json.loads(out.read_text())) == 20
