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
        return "too long for it" if length == 80 else None

    def prefill(self, prompts: torch.Tensor, output_tokens: int) -> torch.Tensor:
        self.calls.append((*prompts.shape, output_tokens))
        return prompts[:, 0]

    def step(self) -> torch.Tensor:
        self.calls.append(("step",))
        return torch.zeros(self.calls[-2][0], dtype=torch.int64)

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
        "--output-tokens", "2", "--runs", "2", "--baselines", "sdpa,eager",
        "--engine", "serving_plugin:engines",
        "--json", str(out), "--commit", "abc",
    ]  # fmt: skip
    assert serving.main(arguments) == 0
    found = rows.load(out)  # validates the schema
    cases = [
        f"tiny with random weights, fp32, prompt={n} concurrency=2 output=2 prefill-tokens=131072"
        for n in (64, 80)
    ]
    impls = ["sdpa fp32", "eager fp32", "mpfa bf16", "mpfa mean:request"]
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
    assert counting.calls == [(1, 20, 2), ("step",), ("release",), *3 * run]
    printed = capsys.readouterr().out
    assert "counting: skipped: too long for it" in printed
    for name in ("eager fp32", "mpfa bf16", "mpfa mean:request"):
        assert f"{name}: logits at relative L2" in printed
    assert "counting: the form of its tokens is right; its logits are not compared" in printed
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
    case = serving.Case(64, 2, 10, "m", 99)
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
    monkeypatch.setattr(serving, "find_gpu", lambda: rows.Gpu("NVIDIA B200", "1", (10, 0)))
    arguments = serving.parse([])
    assert (arguments.contexts, arguments.concurrency) == (serving.CONTEXTS, (1, 8, 16))
    assert (arguments.output_tokens, arguments.shape) == (1024, "llama-3.1-8b")


@pytest.mark.parametrize(
    "key",
    ["fp8", "mean+channels15:request", "mean+channels15+4/6:first32", "channels16:centred", "kmean",
     "kmean+channels15", "mean:first256", "eigen16", "nonsense"],
)  # fmt: skip
def test_keys_that_no_engine_holds(key, monkeypatch, capsys) -> None:
    """One line before any model is loaded; else their rows would carry a name that is not theirs."""
    monkeypatch.setattr(serving_models, "load", lambda *args: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as stop:
        serving.main(["--formats", f"mean,{key}", "--shape", "tiny"])
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and "error: formats: " in message and repr(key) in message


def test_keys_that_engines_hold() -> None:
    keys = "mxfp8,none,none+4/6,mean,mean:request,mean+4/6:request,channels3,mean+channels15+4/6"
    assert [row.key for row in serving.cache_rows(keys)] == ["bf16", *keys.split(",")]
    assert [row.key for row in serving.cache_rows(None)] == list(serving.DEFAULT_KEYS)


def test_baselines_and_engines_are_checked_first(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(serving_models, "load", lambda *args: pytest.fail("a model was loaded"))
    for names in ("sdpa,spda", "sdpa,sdpa"):
        with pytest.raises(SystemExit):
            serving.parse(["--baselines", names])
        assert "baselines: must be different names of sdpa, eager" in capsys.readouterr().err
    plugin = types.ModuleType("serving_plugin")
    plugin.engines = lambda arguments: [types.SimpleNamespace(name="half", step=print)]
    monkeypatch.setitem(sys.modules, "serving_plugin", plugin)
    for target, message in (
        ("serving_plugin:engines", "engine: SimpleNamespace lacks refusal, prefill, cache_bytes"),
        ("serving_plugin:none", "engine: must be MODULE:FUNCTION, got 'serving_plugin:none'"),
        ("no_such_plugin:engines", "engine: must be MODULE:FUNCTION"),
        ("serving_plugin", "engine: must be MODULE:FUNCTION"),
    ):
        assert serving.main(["--engine", target]) == 2
        assert message in capsys.readouterr().err
    engine = CountingEngine()
    serving.check_tokens(engine, torch.zeros(2, 8, dtype=torch.int64))
    engine.step = lambda: torch.zeros(2)
    with pytest.raises(RuntimeError, match=r"counting: step\(\) must give int64 \[2\] on the host"):
        serving.check_tokens(engine, torch.zeros(2, 8, dtype=torch.int64))
    assert engine.calls[-1] == ("release",)
    common = rows.context("measured", rows.Gpu("NVIDIA B200", "1", (10, 0)), "abc")
    rows.save(tmp_path / "b200.json", [rows.make_row("b", "c", "i", "m", 1.0, "us", common)])
    monkeypatch.setattr(serving, "find_gpu", lambda: rows.Gpu("NVIDIA H200", "1", (9, 0)))
    with pytest.raises(SystemExit):
        serving.parse(["--json", str(tmp_path / "b200.json")])
    assert (
        "b200.json: holds rows measured on NVIDIA B200 and NVIDIA H200" in capsys.readouterr().err
    )


def test_models_do_not_replace_each_others_rows(tmp_path) -> None:
    """Nor do dtypes and chunk sizes: all are in the case's name."""
    out = tmp_path / "b200.json"
    common = rows.context("measured", rows.Gpu("NVIDIA B200", "1", (10, 0)), "abc")
    m = serving.Measurement([1.0], [0.1], [2.0], 10)
    for model, tokens in (("a, bf16", 64), ("b, bf16", 64), ("a, fp16", 64), ("a, bf16", 32)):
        case = serving.Case(8192, 1, 1024, model, tokens)
        rows.save(out, serving.rows_of(case, {"sdpa": m}, "sdpa", common, None))
    assert len(rows.load(out)) == 40


def test_what_a_model_is_called(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert serving_models.load(None, "tiny")[1] == "tiny with random weights, fp32"
    model.save_pretrained(tmp_path / "own")
    called = serving_models.load(str(tmp_path / "own"), None)[1]
    assert called == "own (1M parameters), fp32"


def test_refusals(model, engines, monkeypatch, capsys) -> None:
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
        case = serving.Case(length, 1, 8, "m", 99)
        rows.save(out, serving.rows_of(case, {"sdpa bf16": m}, "sdpa bf16", common, None))
    assert len(json.loads(out.read_text())) == 20
