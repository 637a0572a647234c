# SPDX-License-Identifier: Apache-2.0
"""The demo: one real model, one real text, every row of the table over its own paged cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mpfa.accuracy import text
from mpfa.accuracy.attention import (
    AttentionRunner,
    CapturingRunner,
    CollectingRunner,
    forward,
)
from mpfa.accuracy.metrics import (
    MIN_BLOCKS,
    TokenScores,
    block_sums,
    bootstrap_interval,
    whole_blocks,
)
from mpfa.accuracy.models import LanguageModel
from mpfa.accuracy.outputs import check_seed
from mpfa.accuracy.progress import ProgressBar
from mpfa.accuracy.rows import RowSpec
from mpfa.accuracy.samples import AttentionSamples
from mpfa.accuracy.scoring import score
from mpfa.accuracy.statistics import Statistics
from mpfa.demo.rows import REFERENCE_KEY

# Cost of one decode step in prefill tokens, for the progress bar only.
DECODE_STEP_UNITS = 16.0


@dataclass(frozen=True)
class DemoSettings:
    """What to run.

    Attributes:
        tokens: scored tokens over all requests; rounded up to a multiple of num_requests.
        num_requests: windows of the text that share the paged cache as one batch.
        decode_tokens: last tokens of each window, fed one by one through the decode wrapper.
        calibration_tokens: tokens of the other novel that static statistics come from.
        error_layers: layers whose attention output is compared with float64.
        page_size: tokens per page.
        prompt, answer_tokens: the generated answer; 0 tokens leaves it out.
        seed: page order and bootstrap.
    """

    tokens: int = 2048
    num_requests: int = 2
    decode_tokens: int = 32
    calibration_tokens: int = 1024
    error_layers: int = 5
    page_size: int = 128
    prompt: str = "What is the capital of France?"
    answer_tokens: int = 24
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise ValueError(f"num_requests: must be >= 1, got {self.num_requests}")
        if self.tokens < 2 * self.num_requests:
            raise ValueError(f"tokens: must be >= {2 * self.num_requests}, got {self.tokens}")
        if not 0 <= self.decode_tokens < self.window_tokens:
            raise ValueError(
                f"decode_tokens: must be 0..{self.window_tokens - 1}, got {self.decode_tokens}"
            )
        check_seed(self.seed)

    @property
    def window_tokens(self) -> int:
        return -(-self.tokens // self.num_requests)


@dataclass(frozen=True)
class RowResult:
    """One line of the table; KL in nats per token, bytes per token and KV head of one layer."""

    row: RowSpec
    bytes_per_token_head: float
    ratio_to_bf16: float
    scores: TokenScores
    kl_interval: tuple[float, float] | None  # None: too few blocks
    rel_l2: float
    rel_l2_max: float
    seconds: float

    @property
    def kl(self) -> float:
        return float(self.scores.kl.mean())

    @property
    def perplexity(self) -> float:
        return self.scores.perplexity

    @property
    def top1(self) -> float:
        return float(self.scores.top1.double().mean())


class Demo:
    """Runs rows on one model; the first row run must be the bf16 reference."""

    def __init__(
        self, model: LanguageModel, settings: DemoSettings, rows: list[RowSpec], stream=None
    ) -> None:
        self.model, self.settings, self.rows = model, settings, rows
        self.windows = text.scored_windows(
            model.tokenizer, settings.num_requests, settings.window_tokens
        )
        layers, count = model.num_layers, min(settings.error_layers, model.num_layers)
        self._error_layers = [round(i * (layers - 1) / max(count - 1, 1)) for i in range(count)]
        self._statistics = Statistics({})
        self._reference: torch.Tensor | None = None
        self._samples: AttentionSamples | None = None
        self._progress = ProgressBar(self._total_units(), stream)

    def run(self) -> list[RowResult]:
        """Calibrate, then every row in order."""
        self._calibrate()
        results = []
        for row in self.rows:
            self._progress.stage(f"{row.format} {row.label}")
            results.append(self._run_row(row))
        return results

    def answer(self, row: RowSpec) -> str:
        """Greedy answer to the prompt over a cache of this row's format."""
        self._progress.stage(f"answer {row.format} {row.label}")
        settings, tokenizer = self.settings, self.model.tokenizer
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": settings.prompt}],
            add_generation_prompt=True,
            tokenize=False,
        )
        step = torch.tensor(tokenizer(chat).input_ids, dtype=torch.int64)
        runner = self._runner(row, [step.numel() + settings.answer_tokens])
        answer: list[int] = []
        for _ in range(settings.answer_tokens):
            (hidden,) = forward(self.model, runner, [step])
            with torch.inference_mode():
                token = int(self.model.logits(hidden[-1:]).argmax())
            self._progress.advance(DECODE_STEP_UNITS)
            if token == tokenizer.eos_token_id:
                break
            answer.append(token)
            step = torch.tensor([token])
        return tokenizer.decode(answer).strip()

    def pause(self) -> None:
        """Clear the progress bar, so that something else can be printed."""
        self._progress.clear()

    def _total_units(self) -> float:
        s = self.settings
        prompt = s.num_requests * (s.window_tokens - s.decode_tokens)
        per_row = prompt + s.decode_tokens * DECODE_STEP_UNITS
        answers = 2 * s.answer_tokens * DECODE_STEP_UNITS
        return s.calibration_tokens + len(self.rows) * per_row + answers

    def _ticker(self, units: float) -> Callable[[], None]:
        return lambda: self._progress.advance(units / self.model.num_layers)

    def _calibrate(self) -> None:
        """Static statistics from the calibration text: one pass of the unmodified model."""
        if not any(row.needs_calibration for row in self.rows):
            return
        self._progress.stage("calibration")
        count = self.settings.calibration_tokens
        tokens = text.tokens_of(self.model.tokenizer, text.CALIBRATION, count)
        runner = CollectingRunner(range(self.model.num_layers))
        forward(self.model, runner, [tokens], self._ticker(count))
        self._statistics = Statistics(runner.collected)

    def _runner(
        self, row: RowSpec, capacity: list[int], layers: list[int] | None = None
    ) -> AttentionRunner:
        s = self.settings
        return self._statistics.runner(
            row, self.model, capacity, layers=layers, page_size=s.page_size, seed=s.seed
        )

    def _run_row(self, row: RowSpec) -> RowResult:
        started = time.monotonic()
        s = self.settings
        runner = self._runner(row, [s.window_tokens] * s.num_requests)
        is_reference = row.key == REFERENCE_KEY
        if is_reference:
            runner = capture = CapturingRunner(runner, self._error_layers)
        hidden = self._teacher_forced(runner)
        hidden = hidden.flatten(0, 1)
        if is_reference:
            self._samples = self._split_samples(capture)
        scores = score(self.model, hidden, self.windows[:, 1:].flatten(), self._reference)
        if is_reference:
            self._reference = hidden
        errors = self._samples.errors(
            lambda length: self._runner(row, [length], self._error_layers)
        ).rel_l2_by_head()
        per_head = row.bytes_per_token_head(self.model)
        interval = None
        if whole_blocks(block_sums(scores.kl[None]).counts) >= MIN_BLOCKS:
            interval = bootstrap_interval(scores.kl, s.seed)
        return RowResult(
            row=row,
            bytes_per_token_head=per_head,
            ratio_to_bf16=4 * self.model.head_dim / per_head,
            scores=scores,
            kl_interval=interval,
            rel_l2=float(errors.mean()),
            rel_l2_max=float(errors.max()),
            seconds=time.monotonic() - started,
        )

    def _split_samples(self, capture: CapturingRunner) -> AttentionSamples:
        """The prompts' q, k, v of the error layers, one window per request."""
        s = self.settings
        lens = [s.window_tokens - s.decode_tokens] * s.num_requests
        windows: list[dict] = [{} for _ in lens]
        for layer, tensors in capture.captured.items():
            for window, *parts in zip(windows, *(x.split(lens) for x in tensors), strict=True):
                window[layer] = tuple(parts)
        return AttentionSamples(windows, capture.options)

    def _teacher_forced(self, runner: AttentionRunner) -> torch.Tensor:
        """Prefill most of each window, decode the rest token by token: fp32 [B, n, hidden]."""
        s = self.settings
        prompt = s.window_tokens - s.decode_tokens
        inputs = self.windows[:, :-1]
        ticker = self._ticker(prompt * s.num_requests)
        parts = [torch.stack(forward(self.model, runner, list(inputs[:, :prompt]), ticker))]
        for t in range(prompt, s.window_tokens):
            step = forward(self.model, runner, list(inputs[:, t : t + 1]))
            parts.append(torch.stack(step))
            self._progress.advance(DECODE_STEP_UNITS)
        return torch.cat(parts, dim=1)
