# SPDX-License-Identifier: Apache-2.0
"""python -m mpfa accuracy --tasks: the paper's Table 2 on any model, row by row.

The first row is the model with its own attention and cache; the others run the same examples with
attn_implementation="mpfa". Results are written after every task, so a long run can be resumed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mpfa import doctor
from mpfa.accuracy import models, tasks_report, text
from mpfa.accuracy.outputs import check_file, check_seed
from mpfa.accuracy.rows import BASELINE, DIRECT, REFERENCE, RowSpec, parse_rows
from mpfa.accuracy.tasks_options import with_defaults
from mpfa.accuracy.tasks_specs import TaskSpec, select_tasks
from mpfa.stats import SmoothingStats
from mpfa.support import supports

DEFAULT_KEYS = (
    REFERENCE,
    BASELINE,
    "mxfp8",
    DIRECT,
    "mean:request",
    "mean",
    "channels16+4/6",
    "mean+channels15+4/6",
)
CALIBRATION_TOKENS = 1024
VERSIONS = ("mpfa", "torch", "transformers", "lm_eval")
INSTALL = "pip install 'lm_eval[ruler]' accelerate transformers"
# Settings that must agree for an earlier file's results to be kept.
_SAME = ("model", "dtype", "device", "baseline", "limit", "chat", "seed", "settings", "versions")


def main(arguments: argparse.Namespace) -> int:
    """Run the tasks and print the table.

    Raises:
        ValueError: a bad argument.
        ModelUnavailableError: lm_eval or transformers is not installed.
    """
    arguments = with_defaults(arguments)
    specs = select_tasks(arguments.tasks, arguments.shots, arguments.ruler_length)
    rows = [_check_row(row) for row in parse_rows(arguments.formats, DEFAULT_KEYS)]
    _check_options(arguments)
    for name in ("limit", "batch_size", "max_length", "calibration_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}: must be >= 1, got {value}")
    check_seed(arguments.seed)
    if arguments.resume and arguments.json is None:
        raise ValueError("resume: needs --json PATH, the file to go on with")
    # why before the work: hours later is too late.
    check_file("json", arguments.json, replaced=True)
    check_file("markdown", arguments.markdown)
    missing = [name for name in ("lm_eval", "transformers") if not _installed(name)]
    if missing:
        raise models.ModelUnavailableError(f"--tasks needs {' and '.join(missing)}; run: {INSTALL}")
    evaluation = Evaluation(arguments, specs, rows)
    evaluation.run()
    document = evaluation.document
    report = tasks_report.table(document, arguments.seed)
    report += "\n\n" + "\n".join(tasks_report.notes(document)) + "\n"
    print("\n" + report)
    if arguments.markdown is not None:
        Path(arguments.markdown).write_text(report, encoding="utf-8")
    return 0


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuses what the accuracy command takes and --tasks would ignore."""
    for name in ("text", "tokens", "window", "error_tokens", "plots", "store", "quick", "full"):
        value = getattr(arguments, name, None)
        if value is not None and value is not False:
            raise ValueError(f"{name}: not used with --tasks, got {value!r}")


def _check_row(row: RowSpec) -> RowSpec:
    """The row, if a cache of the transformers integration (or the FP8 baseline) can be it."""
    own_means_and_channels = row.takes_own_means and row.channels > 0
    study = row.is_eigen or not row.centre_q or row.centred_choice or row.stats == "first"
    if study or own_means_and_channels:
        raise ValueError(
            f"formats: {row.key!r} is not available with --tasks; use bf16, fp8, mxfp8, none, mean, "
            "mean:request, channelsC or mean+channelsC, with +4/6 where wanted"
        )
    return row


class Evaluation:
    """The model, its tasks and the results so far.

    ``document`` is what --json holds: settings, tasks, and per row and task the metric of every
    example, so that intervals can be computed again later.
    """

    def __init__(
        self, arguments: argparse.Namespace, specs: list[TaskSpec], rows: list[RowSpec]
    ) -> None:
        # why here: lm_eval and transformers are extras; the latter's module registers "mpfa".
        from mpfa.accuracy.tasks_fp8 import Fp8Cache
        from mpfa.accuracy.tasks_lm import CachedModel, TaskRunner
        from mpfa.integrations.transformers import MpfaCache, calibrate_model

        self._calibrate_model, self._caches = calibrate_model, (MpfaCache, Fp8Cache)
        self._arguments, self._specs, self._rows = arguments, specs, rows
        self._device = _device(arguments.device)
        default = "bfloat16" if self._device.type == "cuda" else "float32"
        dtype = arguments.dtype or default
        self._model, self._tokenizer = load(
            arguments.model, self._device, getattr(torch, dtype), arguments.config_json
        )
        self._lm = CachedModel(
            self._model, self._tokenizer, arguments.batch_size, arguments.max_length
        )
        self._runner = TaskRunner(
            specs,
            tokenizer_name=self._tokenizer.name_or_path,
            ruler_length=arguments.ruler_length,
            tasks_path=arguments.tasks_path,
            limit=arguments.limit,
            chat=arguments.chat,
            seed=arguments.seed,
        )
        self._stats: dict[tuple[int, bool], list[SmoothingStats]] = {}
        self._calibration_tokens = arguments.calibration_tokens or CALIBRATION_TOKENS
        self.document = {
            "model": str(arguments.model),
            "dtype": dtype,
            "device": _device_name(self._device),
            "baseline": arguments.baseline,
            "direct": DIRECT,
            "limit": arguments.limit,
            "chat": arguments.chat,
            "seed": arguments.seed,
            "settings": {
                "backend": arguments.backend,
                "page_size": arguments.page_size,
                "batch_size": arguments.batch_size,
                "max_length": self._lm.max_length,
                "config": arguments.config_json,
                "calibration": arguments.calibration or text.CALIBRATION.name,
                "calibration_tokens": self._calibration_tokens,
            },
            "versions": {name: doctor.package_version(name) for name in VERSIONS},
            "tasks": [
                {
                    "name": spec.name,
                    "shots": self._runner.shots(spec),
                    "metric": self._runner.metric(spec),
                    "filter": spec.filter,
                    "source": spec.source,
                }
                for spec in specs
            ],
            "rows": [],
            "skipped": [],
        }
        self._earlier: dict[str, dict[str, dict]] = {}
        if arguments.resume and Path(arguments.json).exists():
            self._resume(Path(arguments.json))

    def run(self) -> None:
        baseline = self.document["baseline"]
        self._run_row(baseline, None, lambda: None)
        for row in self._rows:
            reason = None if row.is_baseline else self._refusal(row)
            if reason is not None:
                self.document["skipped"].append({"key": row.key, "reason": reason})
                print(f"{row.key}: not run: {reason}", flush=True)
                continue
            self._run_row(row.key, row, lambda row=row: self._make_cache(row))
        run = [row["key"] for row in self.document["rows"]]
        for key, results in self._earlier.items():
            if key not in run:
                self.document["rows"].append({"key": key, "results": results})
        self._save()

    def _run_row(
        self, key: str, row: RowSpec | None, make_cache: Callable[[], object | None]
    ) -> None:
        earlier = self._earlier.get(key, {})
        wanted = [spec.name for spec in self._specs]
        results = {name: result for name, result in earlier.items() if name not in wanted}
        self.document["rows"].append({"key": key, "results": results})
        baseline = self.document["rows"][0]["results"]
        for spec in self._specs:
            kept = earlier.get(spec.name)
            if kept is None:
                if row is None:
                    self._model.set_attn_implementation(self.document["baseline"])
                    self._lm.make_cache = None
                else:
                    self._model.set_attn_implementation("mpfa")
                    self._lm.make_cache = make_cache
                started = time.monotonic()
                outcome = self._runner.evaluate(self._lm, spec)
                kept = {
                    "values": outcome.values,
                    "digest": outcome.digest,
                    "others": outcome.others,
                    "seconds": round(time.monotonic() - started, 1),
                }
            results[spec.name] = kept
            if kept["digest"] != baseline[spec.name]["digest"]:
                raise RuntimeError(f"{spec.name}: row {key} saw other prompts than the baseline")
            mean = sum(kept["values"]) / len(kept["values"])
            print(
                f"{key:<22} {spec.name:<12} {mean:.4f}  n={len(kept['values'])}  "
                f"{kept['seconds']:.0f} s",
                flush=True,
            )
            self._save()

    def _make_cache(self, row: RowSpec) -> object:
        low_bit, fp8 = self._caches
        if row.is_baseline:
            return fp8(self._model.config)
        return low_bit(
            self._model.config,
            **row.cache_format,
            page_size=self._arguments.page_size,
            stats=self._static_stats(row),
            backend=self._arguments.backend,
        )

    def _static_stats(self, row: RowSpec) -> list[SmoothingStats] | None:
        if not row.needs_calibration:
            return None
        key = (row.channels, row.uses_mean)
        if key not in self._stats:
            name = self._arguments.calibration
            path = text.CALIBRATION if name is None else Path(name)
            ids = text.tokens_of(
                self._tokenizer, path, self._calibration_tokens, name="calibration"
            )
            self._stats[key] = self._calibrate_model(
                self._model, ids, channels=row.channels, center=row.uses_mean
            )
        return self._stats[key]

    def _refusal(self, row: RowSpec) -> str | None:
        """Why no backend serves this row here; None when one does."""
        arguments = self._arguments
        decoder = self._model.config.get_text_config(decoder=True)
        heads = decoder.num_attention_heads
        asked = self._device if arguments.backend == "auto" else arguments.backend
        fields = {k: v for k, v in row.cache_format.items() if k != "four_over_six"}
        for operation in ("append", "prefill", "decode"):
            ok, reasons = supports(
                asked,
                operation=operation,
                head_dim=getattr(decoder, "head_dim", None) or decoder.hidden_size // heads,
                page_size=arguments.page_size,
                num_qo_heads=heads,
                num_kv_heads=getattr(decoder, "num_key_value_heads", None) or heads,
                **fields,
            )
            if not ok:
                return f"{operation}: {'; '.join(reasons)}"
        return None

    def _resume(self, path: Path) -> None:
        """Takes over an earlier file's results, also of rows and tasks that are not asked for now.

        Raises:
            ValueError: it was made with other settings.
        """
        earlier = json.loads(path.read_text(encoding="utf-8"))
        for name in _SAME:
            if earlier.get(name) != self.document[name]:
                raise ValueError(
                    f"resume: {path} was made with {name} {earlier.get(name)!r}, this run has "
                    f"{self.document[name]!r}"
                )
        now = {task["name"]: task for task in self.document["tasks"]}
        for task in earlier["tasks"]:
            if now.setdefault(task["name"], task) != task:
                raise ValueError(
                    f"resume: {path} has task {task['name']} as {task}, this run has "
                    f"{now[task['name']]}"
                )
        self.document["tasks"] = list(now.values())
        self._earlier = {row["key"]: row["results"] for row in earlier["rows"]}

    def _save(self) -> None:
        if self._arguments.json is None:
            return
        path = Path(self._arguments.json)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def load(
    name: str, device: torch.device, dtype: torch.dtype, config_json: str | None = None
) -> tuple[torch.nn.Module, object]:
    """(model in eval mode, tokenizer) of a packaged model, a directory or a Hugging Face id.

    Raises:
        ValueError: no such model, or config_json is not a JSON object of fields of its
            configuration.
    """
    if name in models.PACKAGED:
        loaded = models.load(name)
        return loaded.model.to(device, dtype), loaded.tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    fields = _config_fields(config_json)
    try:
        config = AutoConfig.from_pretrained(name)
        for field, value in fields.items():
            if not hasattr(config, field):
                raise ValueError(f"config_json: {type(config).__name__} has no field {field!r}")
            setattr(config, field, value)
        model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise ValueError(f"model: {name!r} cannot be loaded: {error}") from error
    return model.to(device).eval(), tokenizer


def _device(name: str | None) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: torch sees no GPU, got {name!r}")
    return device


def _config_fields(config_json: str | None) -> dict[str, object]:
    try:
        fields = json.loads(config_json or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"config_json: not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"config_json: must be a JSON object, got {config_json!r}")
    return fields


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
