# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness over a transformers model whose attention and cache are chosen per row."""

from __future__ import annotations

import hashlib
import inspect
import logging
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from mpfa.accuracy.tasks_specs import TaskSpec

# lm-evaluation-harness' own default of the few-shot seed.
FEWSHOT_SEED = 1234
GREEDY = {"do_sample": False, "temperature": 0.0}


class CachedModel(HFLM):
    """lm_eval's Hugging Face model, with a fresh cache of ``make_cache`` for every batch.

    ``make_cache`` None runs the model with its own attention and cache.
    """

    def __init__(
        self, model: torch.nn.Module, tokenizer: object, batch_size: int, max_length: int | None
    ) -> None:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        super().__init__(
            pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length
        )
        self.make_cache: Callable[[], object] | None = None
        parameters = inspect.signature(type(model).forward).parameters
        # transformers renamed the argument.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters

    def _model_generate(self, context, max_length, stop, **generation_kwargs):
        if self.make_cache is not None:
            generation_kwargs[self._cache_argument] = self.make_cache()
        return super()._model_generate(context, max_length, stop, **generation_kwargs)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, override_bs=None):
        """(log probability of the continuation, whether it is the greedy one) per request.

        why not lm_eval's own: it pads without a mask, so that padding would enter a cache and the
        means of a request. Requests with the same input tokens share one row, as they do there.
        """
        rows: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            tokens = (context + continuation)[-(self.max_length + 1) :]
            rows[tuple(tokens[:-1])].append(index)
        order = sorted(rows, key=len, reverse=True)
        size = override_bs or int(self.batch_size)
        results: list[tuple[float, bool] | None] = [None] * len(requests)
        for begin in range(0, len(order), size):
            batch = order[begin : begin + size]
            longest = [max(len(requests[i][2]) for i in rows[row]) for row in batch]
            first = min(len(row) - n for row, n in zip(batch, longest, strict=True))
            logits = self._masked_logits(batch, first)
            for row, row_logits in zip(batch, logits, strict=True):
                for index in rows[row]:
                    target = torch.tensor(requests[index][2], device=row_logits.device)
                    end = len(row) - first
                    scores = row_logits[end - len(target) : end].float().log_softmax(-1)
                    picked = scores.gather(1, target[:, None]).sum()
                    if bool(picked.isnan()):
                        # why: a NaN would count as a wrong answer and nobody would see it.
                        raise RuntimeError("the model's log probabilities are NaN")
                    greedy = bool((scores.argmax(-1) == target).all())
                    results[index] = (float(picked), greedy)
                    key = requests[index][0]
                    if key is not None:  # None: a window of loglikelihood_rolling
                        self.cache_hook.add_partial("loglikelihood", key, results[index])
        return results

    def _masked_logits(self, batch: list[tuple[int, ...]], first: int) -> torch.Tensor:
        """Logits [B, width - first, V] of right-padded rows, from position ``first`` on."""
        width = len(batch[0])
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for r, row in enumerate(batch):
            ids[r, : len(row)] = torch.tensor(row)
            mask[r, : len(row)] = 1
        arguments: dict[str, object] = {"use_cache": False}
        if self.make_cache is not None:
            arguments = {self._cache_argument: self.make_cache()}
        if self._keeps_logits:
            # why: a long context times a large vocabulary would not fit beside the model.
            arguments["logits_to_keep"] = width - first
        with torch.inference_mode():
            logits = self.model(
                ids.to(self.device), attention_mask=mask.to(self.device), **arguments
            )
        return logits.logits[:, first - width :]


@dataclass(frozen=True)
class Outcome:
    """One task over one row.

    Attributes:
        values: the metric per example, in the order of the harness.
        digest: of all prompts and documents; equal digests mean the same examples and shots.
        others: means of the other numeric metrics, by "metric,filter".
    """

    values: list[float]
    digest: str
    others: dict[str, float]


class TaskRunner:
    """Loads tasks once and evaluates them any number of times over the same prompts."""

    def __init__(
        self,
        specs: list[TaskSpec],
        *,
        tokenizer_name: str,
        ruler_length: int,
        tasks_path: str | None = None,
        limit: int | None = None,
        chat: bool = False,
        seed: int = 0,
    ) -> None:
        self._limit, self._chat, self._seed = limit, chat, seed
        metadata = {"tokenizer": tokenizer_name, "max_seq_lengths": [ruler_length]}
        manager = _task_manager([m for spec in specs for m in spec.members], tasks_path, metadata)
        self.tasks: dict[str, dict[str, Task]] = {}
        for spec in specs:
            # why: RULER draws its distractors from the global generator.
            self._seed_all()
            self.tasks[spec.name] = manager.load(list(spec.members))["tasks"]
            for task in self.tasks[spec.name].values():
                if spec.shots is not None:
                    task.set_config(key="num_fewshot", value=spec.shots)
                if task.get_config("output_type") == "generate_until":
                    task.set_config(key="generation_kwargs", value=GREEDY, update=True)

    def shots(self, spec: TaskSpec) -> int:
        """Few-shot examples that the first task of ``spec`` runs with."""
        return next(iter(self.tasks[spec.name].values())).get_config("num_fewshot") or 0

    def metric(self, spec: TaskSpec) -> str:
        if spec.metric is not None:
            return spec.metric
        return next(iter(self.tasks[spec.name].values())).get_config("metric_list")[0]["metric"]

    def evaluate(self, lm: CachedModel, spec: TaskSpec) -> Outcome:
        """Raises ValueError when the task does not have the metric that the spec names."""
        tasks = self.tasks[spec.name]
        self._seed_all()
        for task in tasks.values():
            # why: the sampler of few-shot examples goes on where the last evaluation left it.
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        results = evaluate(
            lm,
            {"tasks": tasks},
            limit=self._limit,
            bootstrap_iters=0,
            apply_chat_template=self._chat,
            fewshot_as_multiturn=self._chat,
        )
        metric = self.metric(spec)
        values, others, digest = [], defaultdict(list), hashlib.sha256()
        for name, samples in results["samples"].items():
            chosen = spec.filter or samples[0]["filter"]
            for sample in samples:
                for key in sample["metrics"]:
                    if isinstance(sample[key], (int, float, np.number)):
                        others[f"{key},{sample['filter']}"].append(float(sample[key]))
                if sample["filter"] != chosen:
                    continue
                if metric not in sample or not isinstance(sample[metric], (int, float, np.number)):
                    raise ValueError(
                        f"tasks: {name} has no per-example number {metric!r}, it has "
                        f"{', '.join(sample['metrics'])}"
                    )
                values.append(float(sample[metric]))
                digest.update(
                    f"{name} {sample['doc_hash']} {sample['prompt_hash']}\n".encode(),
                )
        others.pop(f"{metric},{spec.filter or 'none'}", None)
        means = {key: sum(v) / len(v) for key, v in others.items() if min(v) >= 0}
        return Outcome(values, digest.hexdigest()[:16], means)

    def _seed_all(self) -> None:
        random.seed(self._seed)
        np.random.seed(self._seed)
        torch.manual_seed(self._seed)


def _task_manager(
    names: list[str], tasks_path: str | None, metadata: dict[str, object]
) -> TaskManager:
    """A manager that knows all names, of the user's folder alone where that is enough.

    Raises:
        ValueError: a name that no task, group or tag has.
    """
    if tasks_path is not None:
        # why: reading the thousands of task files that lm_eval ships takes half a minute.
        own = TaskManager(include_path=tasks_path, include_defaults=False, metadata=metadata)
        if set(names) <= set(own.task_index):
            return own
    manager = TaskManager(include_path=tasks_path, metadata=metadata)
    for name in names:
        if name not in manager.task_index:
            raise ValueError(f"tasks: lm-evaluation-harness has no task {name!r}")
    return manager
