# SPDX-License-Identifier: Apache-2.0
"""The transformers engines of serving.py: the model's own attention, and mpfa per cache format."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Sequence

import torch

from benchmarks.serving_models import SHORT, preallocated_cache
from mpfa.accuracy.models import Geometry
from mpfa.accuracy.rows import RowSpec
from mpfa.integrations.transformers import MpfaCache, calibrate_model
from mpfa.support import supports

CALIBRATION_TOKENS = 1024
# Of the logits, relative L2 to the model's own attention. Measured on the CPU, shape tiny: bf16 0.04,
# mxfp8 0.12, none 0.23; a cache of other tokens, or of the same in another order, 1.1 and above.
CHECK_LIMIT = 0.5


class TransformersEngine:
    """A transformers model with one attention implementation and one kind of cache.

    Args:
        attention: "sdpa", "eager", "flash_attention_2" or "mpfa".
        make_cache: called with (batch, tokens) for every batch.
        row: the cache's format; None = the model's own attention.
        prefill_tokens: tokens of one forward pass at most, over the whole batch.
    """

    def __init__(
        self, name: str, model: torch.nn.Module, attention: str,
        make_cache: Callable[[int, int], object], row: RowSpec | None, prefill_tokens: int,
    ) -> None:  # fmt: skip
        self.name, self._model, self._attention = name, model, attention
        self._make_cache, self._row, self._prefill_tokens = make_cache, row, prefill_tokens
        parameters = inspect.signature(type(model).forward).parameters
        # transformers renamed the argument.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._cache: object | None = None
        self._tokens: torch.Tensor | None = None

    def refusal(self, length: int, concurrency: int, output_tokens: int) -> str | None:
        if self._row is not None:
            reason = backend_refusal(self._model, self._row)
            if reason is not None:
                return reason
        device = self._model.device
        if device.type != "cuda":
            return None
        needed = self._bytes_needed(length, concurrency, output_tokens)
        free = torch.cuda.mem_get_info(device)[0]
        if needed > free:
            return (
                f"needs about {needed / 1e9:.0f} GB beside the weights, {free / 1e9:.0f} are free"
            )
        return None

    def _bytes_needed(self, length: int, concurrency: int, output_tokens: int) -> float:
        config = self._model.config.get_text_config(decoder=True)
        shape = geometry(self._model)
        stored = concurrency * (length + output_tokens) * shape.num_layers * shape.num_kv_heads
        # MpfaCache grows by half when a page is missing; the model's own cache has its final size.
        cache = 4.0 * shape.head_dim if self._row is None else (
            1.5 * self._row.bytes_per_token_head(shape)
        )  # fmt: skip
        chunk = min(self._prefill_tokens, concurrency * length)
        # bf16 gate, up and their product, plus a few hidden states and q, k, v.
        activations = 2.0 * chunk * (3 * config.intermediate_size + 8 * config.hidden_size)
        scores = 0.0
        if self._attention == "eager":
            # Scores in bf16 and their softmax in fp32.
            scores = 6.0 * shape.num_qo_heads * chunk * (length + output_tokens)
        return cache * stored + activations + scores

    def prefill(self, prompts: torch.Tensor, output_tokens: int) -> torch.Tensor:
        batch, length = prompts.shape
        self._model.set_attn_implementation(self._attention)
        self._cache = self._make_cache(batch, length + output_tokens)
        chunk = max(1, self._prefill_tokens // batch)
        for begin in range(0, length, chunk):
            logits = self.logits(prompts[:, begin : begin + chunk])
        self._tokens = logits.argmax(-1)
        return self._tokens.cpu()

    def step(self) -> torch.Tensor:
        self._tokens = self.logits(self._tokens[:, None]).argmax(-1)
        return self._tokens.cpu()

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, V] after the last of the new tokens [B, n]."""
        with torch.inference_mode():
            out = self._model(
                ids.to(self._model.device), logits_to_keep=1, **{self._cache_argument: self._cache}
            )
        return out.logits[:, -1]

    def cache_bytes(self) -> int:
        return self._cache.nbytes

    def release(self) -> None:
        self._cache = self._tokens = None
        gc.collect()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()


def backend_refusal(model: torch.nn.Module, row: RowSpec) -> str | None:
    shape = geometry(model)
    fields = {k: v for k, v in row.cache_format.items() if k != "four_over_six"}
    for operation in ("append", "prefill", "decode"):
        ok, reasons = supports(
            model.device, operation=operation, head_dim=shape.head_dim, page_size=128,
            num_qo_heads=shape.num_qo_heads, num_kv_heads=shape.num_kv_heads, **fields,
        )  # fmt: skip
        if not ok:
            return f"{operation}: {'; '.join(reasons)}"
    return None


def geometry(model: torch.nn.Module) -> Geometry:
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    return Geometry(
        num_layers=config.num_hidden_layers,
        num_qo_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def make_engines(
    model: torch.nn.Module, rows: Sequence[RowSpec], baselines: Sequence[str], prefill_tokens: int
) -> list[TransformersEngine]:
    """The model's own attentions first, then one engine per row."""
    engines = [
        TransformersEngine(
            f"{name} {SHORT[model.dtype]}", model, name,
            lambda batch, tokens: preallocated_cache(model, batch, tokens), None, prefill_tokens,
        )
        for name in baselines
    ]  # fmt: skip
    sample = random_prompts(model, 1, CALIBRATION_TOKENS, seed=17)
    for row in rows:
        stats = None
        if row.needs_calibration and backend_refusal(model, row) is None:
            stats = calibrate_model(model, sample, channels=row.channels, center=row.uses_mean)

        def make_cache(
            batch: int, tokens: int, row: RowSpec = row, stats: object = stats
        ) -> object:
            return MpfaCache(model.config, **row.cache_format, stats=stats)

        engines.append(
            TransformersEngine(f"mpfa {row.key}", model, "mpfa", make_cache, row, prefill_tokens)
        )
    return engines


def random_prompts(model: torch.nn.Module, batch: int, length: int, seed: int) -> torch.Tensor:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (batch, length), generator=generator)


def check(engine: TransformersEngine, baseline: TransformersEngine, prompts: torch.Tensor) -> float:
    """Relative L2 distance of the logits to the baseline's, after a prefill and one decode step.

    Raises:
        RuntimeError: it is above CHECK_LIMIT or NaN; nothing has been timed then.
    """
    found = []
    for one in (baseline, engine):
        one.prefill(prompts[:, :-1], 1)
        found.append(one.logits(prompts[:, -1:]).double())
        one.release()
    error = float((found[1] - found[0]).norm() / found[0].norm())
    if not error <= CHECK_LIMIT:
        raise RuntimeError(
            f"{engine.name}: logits are at relative L2 {error:.3g} to {baseline.name}, at most "
            f"{CHECK_LIMIT} allowed; nothing was timed"
        )
    return error
