# SPDX-License-Identifier: Apache-2.0
"""The evaluation on tiny models: right targets, right windows, stored rows, sliding layers."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from mpfa.accuracy import text
from mpfa.accuracy.attention import CollectingRunner, forward
from mpfa.accuracy.evaluate import AccuracySettings, Evaluation
from mpfa.accuracy.models import LanguageModel
from mpfa.accuracy.rows import parse_rows

KEYS = "fp8,mxfp8,none,mean,mean:request,mean:first4,channels16+4/6,mean+channels15:request,mean+eigen15"


def settings(letters, **fields) -> AccuracySettings:
    scored, calibration = letters
    defaults = {"tokens": 160, "window": 80, "calibration_tokens": 128, "error_tokens": 48}
    return AccuracySettings(text=scored, calibration=calibration, **{**defaults, **fields})


def own_logits(language: LanguageModel, ids: torch.Tensor) -> torch.Tensor:
    """transformers' own fp32 attention and logits of one window."""
    language.model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        return language.model(input_ids=ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize("fixture", ["tiny", "tiny_sliding"])
def test_bf16_scores_are_those_of_transformers_own_run(fixture, letters, request):
    language = request.getfixturevalue(fixture)
    evaluation = Evaluation(language, settings(letters), parse_rows("bf16"))
    (result,) = evaluation.run()
    got = result.scores.nll.view(2, 80)
    for window, nll in zip(evaluation.windows, got, strict=True):
        assert window.shape == (81,)
        logits = own_logits(language, window[:-1])
        own = torch.nn.functional.cross_entropy(logits, window[1:], reduction="none")
        # Rounding of q, k, v and of the output to bf16.
        assert (nll - own).abs().max() < 0.02
        assert own.std() > 0.1
    assert float(result.errors.rel_l2_by_head().max()) < 0.003


def test_a_sliding_layer_is_no_full_one(tiny_sliding, letters):
    """The runner, the fp32 collection and the float64 truth all see the window of layer 0."""
    evaluation = Evaluation(tiny_sliding, settings(letters), parse_rows("none"))
    evaluation.run()
    assert evaluation.samples.options[0].window_left == 15
    assert evaluation.samples.options[1].window_left == -1
    assert evaluation.samples.options[0].sm_scale == pytest.approx(1 / 8)
    runner = CollectingRunner(range(2))
    window = evaluation.windows[0][:-1]
    (hidden,) = forward(tiny_sliding, runner, [window])
    logits = tiny_sliding.logits(hidden)
    assert (logits - own_logits(tiny_sliding, window)).abs().max() < 0.05


def test_every_kind_of_row_runs_and_moves_away_from_bf16(tiny, letters):
    evaluation = Evaluation(tiny, settings(letters), parse_rows(KEYS))
    results = {m.row.key: m for m in evaluation.run()}
    assert list(results) == ["bf16", *KEYS.split(",")]
    for key, measured in results.items():
        assert measured.scores.kl.shape == (160,)
        assert torch.isfinite(measured.scores.kl).all() and (measured.scores.kl > -1e-6).all()
        errors = measured.errors.rel_l2_by_head()
        assert errors.shape == (2, 4) and torch.isfinite(errors).all()
        assert measured.errors.counts.tolist() == [48, 48]
        if key != "bf16":
            assert float(measured.scores.kl.mean()) > 1e-7
            assert float(errors.mean()) > 3 * float(results["bf16"].errors.rel_l2_by_head().mean())
    mean = {key: float(m.errors.rel_l2_by_head().mean()) for key, m in results.items()}
    assert mean["mean"] < mean["none"] and mean["mean:request"] < mean["none"]
    # Means of four tokens are no means of the whole request.
    assert mean["mean:first4"] != mean["mean:request"]
    assert mean["mean+channels15:request"] < mean["mean:request"]


def test_each_window_is_measured_against_its_own_reference(tiny, letters):
    evaluation = Evaluation(tiny, settings(letters), parse_rows("none"))
    row = evaluation.rows[1]
    measured = evaluation.run()[1]
    for i, window in enumerate(evaluation.windows):
        runner = evaluation.statistics.runner(row, tiny, [80])
        (hidden,) = forward(tiny, runner, [window[:-1]])
        own, reference = (
            tiny.logits(h).log_softmax(-1) for h in (hidden, evaluation.reference.hidden[i])
        )
        kl = torch.nn.functional.kl_div(own, reference, log_target=True, reduction="none").sum(-1)
        got = measured.scores.kl.view(2, 80)[i]
        assert torch.allclose(got.float(), kl, rtol=1e-3, atol=1e-6)
        assert float(kl.max()) > 1e-5


def test_static_statistics_come_from_the_other_text(tiny, letters):
    scored, calibration = letters
    third = calibration.with_name("third.txt")
    third.write_text("sphinx of black quartz, judge my vow! " * 8)
    same = Evaluation(tiny, settings((scored, third)), parse_rows("mean"))
    other = Evaluation(tiny, settings(letters), parse_rows("mean"))
    means = []
    for evaluation in (same, other):
        evaluation.run()
        means.append(evaluation.statistics.smoothing(evaluation.rows[1])[1].k_mean)
    assert not torch.equal(*means)
    collected = CollectingRunner([1])
    forward(tiny, collected, [text.tokens_of(tiny.tokenizer, calibration, 128)])
    assert torch.equal(means[1], collected.collected[1][1].double().mean(dim=0).float())


def test_finished_rows_are_taken_from_the_store(tiny, letters, tmp_path, monkeypatch):
    store = tmp_path / "store"
    first = Evaluation(tiny, settings(letters), parse_rows("mean"), store=store).run()
    again = Evaluation(tiny, settings(letters), parse_rows("mean"), store=store)
    monkeypatch.setattr(again, "_measure", None)
    for a, b in zip(first, again.run(), strict=True):
        assert a.row == b.row and a.seconds == b.seconds
        assert torch.equal(a.scores.kl, b.scores.kl)
        assert torch.equal(a.errors.error, b.errors.error)
    # A new row is measured against the stored reference, which is not run again.
    measured = []
    more = Evaluation(tiny, settings(letters), parse_rows("mean,none"), store=store)
    measure = more._measure
    monkeypatch.setattr(more, "_measure", lambda row: measured.append(row.key) or measure(row))
    resumed = more.run()[-1]
    assert measured == ["none"]
    (fresh,) = Evaluation(tiny, settings(letters), parse_rows("none")).run()[1:]
    assert torch.equal(resumed.scores.kl, fresh.scores.kl)
    assert torch.equal(resumed.errors.error, fresh.errors.error)


@pytest.mark.parametrize(
    "fields", [{"tokens": 80}, {"error_tokens": 32}, {"calibration_tokens": 64}, {"seed": 1}]
)
def test_the_store_tells_different_measurements_apart(tiny, letters, tmp_path, fields):
    rows = parse_rows("mean")
    one = Evaluation(tiny, settings(letters), rows, store=tmp_path)
    two = Evaluation(tiny, settings(letters, **fields), rows, store=tmp_path)
    assert one.store._path(rows[1]) != two.store._path(rows[1])
    noted = dataclasses.replace(rows[1], note="another note")
    assert one.store._path(rows[1]) == one.store._path(noted)


def test_the_store_tells_models_of_one_name_apart(tiny, letters, tmp_path):
    """Weights, configuration and files; not the attention that happens to be set."""
    (row,) = parse_rows("bf16")

    def place(language: LanguageModel):
        return Evaluation(language, settings(letters), [row], store=tmp_path).store._path(row)

    own = place(tiny)
    tiny.model.set_attn_implementation("sdpa")
    assert place(tiny) == own
    other = copy.deepcopy(tiny)
    assert place(other) == own
    with torch.no_grad():
        other.model.model.layers[1].mlp.up_proj.weight[0, 0] += 1.0
    assert place(other) != own
    other = copy.deepcopy(tiny)
    other.model.config.rms_norm_eps *= 2
    assert place(other) != own
    places = []
    for name in ("a", "b"):
        folder = tmp_path / name / "llama"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
        places.append(place(dataclasses.replace(tiny, folder=folder)))
    assert len({own, *places}) == 3
    (folder / "model.safetensors").write_bytes(b"longer weights")
    assert place(dataclasses.replace(tiny, folder=folder)) != places[1]


def test_windows_start_with_the_start_token_where_the_tokenizer_sets_one(tiny_sliding, letters):
    windows = text.scored_windows(tiny_sliding.tokenizer, 2, 10, letters[0])
    assert windows.shape == (2, 11)
    assert windows[:, 0].tolist() == [1, 1]
    plain = text.token_ids(tiny_sliding.tokenizer, letters[0])
    assert windows[0, 1:].tolist() == plain[1:11]
    assert windows[1, 1:].tolist() == plain[11:21]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": 1}, "tokens: must be >= 2, got 1"),
        ({"window": 1}, "window: must be >= 2, got 1"),
        ({"calibration_tokens": 0}, "calibration_tokens: must be >= 1, got 0"),
        ({"error_tokens": 0}, "error_tokens: must be >= 1, got 0"),
        ({"seed": -1}, "seed: must be 0..4294967295, got -1"),
    ],
)
def test_settings_refuse_what_cannot_run(fields, message):
    with pytest.raises(ValueError, match=message):
        AccuracySettings(**fields)


def test_short_and_unreadable_texts_are_named(tiny, letters, tmp_path):
    with pytest.raises(ValueError, match=r"scored\.txt has 540 tokens, 2001 were asked for"):
        Evaluation(tiny, settings(letters, tokens=2000, window=2000), parse_rows("bf16"))
    with pytest.raises(ValueError, match=r"calibration\.txt has"):
        Evaluation(tiny, settings(letters, calibration_tokens=9999), parse_rows("bf16"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent", tmp_path / "binary"):
        with pytest.raises(ValueError, match=f"text: cannot read .*{path.name}"):
            text.token_ids(tiny.tokenizer, path)
