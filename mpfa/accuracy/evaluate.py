# SPDX-License-Identifier: Apache-2.0
"""One model, one text, every row: scores of tokens, and the attention error of every layer."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path

import torch

from mpfa.accuracy import synthetic
from mpfa.accuracy import text as prose
from mpfa.accuracy.attention import CapturingRunner, CollectingRunner, LayerOptions, forward
from mpfa.accuracy.metrics import AttentionErrors, TokenScores, concatenate
from mpfa.accuracy.models import Geometry, LanguageModel
from mpfa.accuracy.outputs import check_seed
from mpfa.accuracy.progress import ProgressBar
from mpfa.accuracy.rows import REFERENCE, RowSpec
from mpfa.accuracy.samples import AttentionSamples, Tensors
from mpfa.accuracy.scoring import score
from mpfa.accuracy.statistics import Statistics

# Of a row's time, roughly: the attention of the error samples against a forward pass per token.
_ERROR_UNITS = 0.3


@dataclass(frozen=True)
class AccuracySettings:
    """What to measure on.

    Attributes:
        tokens: scored tokens over all windows; rounded up to whole windows.
        window: tokens of each window, a request of its own. Windows are consecutive.
        calibration_tokens: tokens of the other text that static statistics come from.
        error_tokens: first tokens of each window on which every layer's attention error is taken.
        text, calibration: text files.
        seed: page order and bootstrap.
    """

    tokens: int = 2048
    window: int = 1024
    calibration_tokens: int = 1024
    error_tokens: int = 512
    text: Path = prose.SCORED
    calibration: Path = prose.CALIBRATION
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("tokens", 2), ("window", 2), ("calibration_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: must be >= {least}, got {getattr(self, name)}")
        if not self.error_tokens >= 1:
            raise ValueError(f"error_tokens: must be >= 1, got {self.error_tokens}")
        check_seed(self.seed)

    @property
    def num_windows(self) -> int:
        return -(-self.tokens // self.window)


@dataclass(frozen=True)
class RowMeasurement:
    """Raw results of one row. ``scores`` are [windows * window], None without a language model."""

    row: RowSpec
    scores: TokenScores | None
    errors: AttentionErrors
    seconds: float


@dataclass
class Reference:
    """What the other rows need of the bf16 pass.

    Attributes:
        hidden: per window final hidden states fp32 [window, hidden].
        inputs: per window q, k, v of every layer, the first error_tokens tokens.
        options: of every layer.
    """

    hidden: list[torch.Tensor] = field(default_factory=list)
    inputs: list[dict[int, Tensors]] = field(default_factory=list)
    options: dict[int, LayerOptions] = field(default_factory=dict)


@dataclass
class RowStore:
    """Finished rows in a folder, so that a run that was cut short goes on where it stopped.

    The key holds what was measured (the model's name and content, texts, lengths, row), not
    the version of the code.
    """

    folder: Path | None
    identity: dict[str, object] = field(default_factory=dict)

    def _path(self, row: RowSpec | None) -> Path:
        """The file of a row, or of what the reference pass leaves for the others."""
        what = None if row is None else asdict(replace(row, note=""))
        key = json.dumps([self.identity, what], sort_keys=True)
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.pt"

    def _load(self, path: Path) -> dict | None:
        return torch.load(path, weights_only=True) if path.is_file() else None

    def _save(self, path: Path, content: dict) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        private = path.with_suffix(".part")
        torch.save(content, private)
        private.replace(path)

    def load(self, row: RowSpec) -> RowMeasurement | None:
        kept = None if self.folder is None else self._load(self._path(row))
        if kept is None:
            return None
        return RowMeasurement(
            row,
            TokenScores(**kept["scores"]),
            AttentionErrors(**kept["errors"]),
            kept["seconds"],
        )

    def save(self, measured: RowMeasurement) -> None:
        if self.folder is not None:
            content = {
                "scores": vars(measured.scores),
                "errors": vars(measured.errors),
                "seconds": measured.seconds,
            }
            self._save(self._path(measured.row), content)

    def load_reference(self) -> Reference | None:
        kept = None if self.folder is None else self._load(self._path(None))
        if kept is None:
            return None
        options = {n: LayerOptions(*fields) for n, fields in kept["options"].items()}
        return Reference(kept["hidden"], kept["inputs"], options)

    def save_reference(self, reference: Reference) -> None:
        if self.folder is not None:
            options = {n: astuple(o) for n, o in reference.options.items()}
            self._save(self._path(None), {**vars(reference), "options": options})


class Evaluation:
    """Rows on a language model. The first row run must be the bf16 reference."""

    def __init__(
        self,
        language: LanguageModel,
        settings: AccuracySettings,
        rows: list[RowSpec],
        *,
        store: Path | None = None,
        stream=None,
    ) -> None:
        self.language, self.settings, self.rows = language, settings, rows
        s = settings
        self.windows = prose.scored_windows(language.tokenizer, s.num_windows, s.window, s.text)
        self.calibration = prose.tokens_of(
            language.tokenizer, s.calibration, s.calibration_tokens, name="calibration"
        )
        prose.require_disjoint(self.windows, self.calibration, s.text, s.calibration)
        self.store = RowStore(store, {} if store is None else self._identity())
        self.statistics: Statistics | None = None
        self.samples: AttentionSamples | None = None
        self.reference = Reference()
        self._row_units = s.num_windows * (s.window + _ERROR_UNITS * min(s.error_tokens, s.window))
        self.progress = ProgressBar(s.calibration_tokens + len(rows) * self._row_units, stream)

    @property
    def geometry(self) -> Geometry:
        return self.language

    @property
    def layer_names(self) -> list[str]:
        return [str(i) for i in range(self.geometry.num_layers)]

    def run(self) -> list[RowMeasurement]:
        """Calibrate, then every row in order; rows that the store has are not run again."""
        known = {row.key: self.store.load(row) for row in self.rows}
        kept = self.store.load_reference()
        if any(measured is None for measured in known.values()):
            self._calibrate()
            if kept is None:
                known[REFERENCE] = None
            else:
                self.reference = kept
                self.samples = AttentionSamples(kept.inputs, kept.options)
        results = []
        for row in self.rows:
            if known[row.key] is not None:
                self.progress.advance(self._row_units)
            results.append(known[row.key] or self._measure(row))
        self.progress.clear()
        return results

    def _identity(self) -> dict[str, object]:
        s = self.settings
        return {
            "model": self.language.name,
            "content": self.language.fingerprint(),
            "layers": self.language.num_layers,
            "scored": hashlib.sha256(self.windows.numpy().tobytes()).hexdigest(),
            "shape": list(self.windows.shape),
            "calibration": hashlib.sha256(self.calibration.numpy().tobytes()).hexdigest(),
            "error_tokens": s.error_tokens,
            "seed": s.seed,
        }

    def collect(self) -> dict[int, tuple[torch.Tensor, ...]]:
        """q, k, v of every layer over the calibration text, from one pass in fp32."""
        count = self.language.num_layers
        runner = CollectingRunner(range(count))
        units = self.settings.calibration_tokens / count
        forward(self.language, runner, [self.calibration], lambda: self.progress.advance(units))
        return runner.collected

    def _calibrate(self) -> None:
        self.progress.stage("calibration")
        self.statistics = Statistics(self.collect())

    def _runner(self, row: RowSpec, length: int):
        seed = self.settings.seed
        return self.statistics.runner(row, self.geometry, [length], seed=seed)

    def _measure(self, row: RowSpec) -> RowMeasurement:
        self.progress.stage(row.key)
        started = time.monotonic()
        s, layers, reference = self.settings, self.language.num_layers, self.reference
        is_reference = row.key == REFERENCE
        if is_reference:
            self.reference = reference = Reference()
        error_tokens = min(s.error_tokens, s.window)
        units = s.window / layers
        scores = []
        for i, window in enumerate(self.windows):
            runner = self._runner(row, s.window)
            if is_reference:
                runner = CapturingRunner(runner, range(layers))
            (hidden,) = forward(
                self.language, runner, [window[:-1]], lambda: self.progress.advance(units)
            )
            theirs = None if is_reference else reference.hidden[i]
            scores.append(score(self.language, hidden, window[1:], theirs))
            if is_reference:
                reference.hidden.append(hidden)
                # why clone: a slice would keep, and store, the whole window.
                reference.inputs.append(
                    {
                        layer: tuple(x[:error_tokens].clone() for x in qkv)
                        for layer, qkv in runner.captured.items()
                    }
                )
                reference.options = runner.options
        if is_reference:
            self.samples = AttentionSamples(reference.inputs, reference.options)
            self.store.save_reference(reference)
        errors = self.samples.errors(lambda length: self._runner(row, length))
        self.progress.advance(_ERROR_UNITS * error_tokens * s.num_windows)
        measured = RowMeasurement(row, concatenate(scores), errors, time.monotonic() - started)
        self.store.save(measured)
        return measured


class SyntheticEvaluation:
    """Attention errors of rows on the synthetic cases; there is no language model and no text."""

    geometry = synthetic.GEOMETRY
    layer_names = synthetic.case_names()

    def __init__(self, settings: AccuracySettings, rows: list[RowSpec], *, stream=None) -> None:
        self.settings, self.rows = settings, rows
        self.progress = ProgressBar(len(rows), stream)

    def collect(self) -> dict[int, tuple[torch.Tensor, ...]]:
        return synthetic.activations(self.settings.calibration_tokens, seed=0)

    def run(self) -> list[RowMeasurement]:
        s = self.settings
        statistics = Statistics(self.collect())
        windows = [synthetic.activations(s.window, seed=1 + i) for i in range(s.num_windows)]
        samples = AttentionSamples(windows, synthetic.options())
        results = []
        for row in self.rows:
            self.progress.stage(row.key)
            started = time.monotonic()
            errors = samples.errors(
                lambda n, row=row: statistics.runner(row, self.geometry, [n], seed=s.seed)
            )
            results.append(RowMeasurement(row, None, errors, time.monotonic() - started))
            self.progress.advance()
        self.progress.clear()
        return results
