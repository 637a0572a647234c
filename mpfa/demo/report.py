# SPDX-License-Identifier: Apache-2.0
"""The printed table, its one-line reading and the JSON form; every statement is computed."""

from __future__ import annotations

from mpfa.accuracy.metrics import (
    MIN_BLOCKS,
    block_sums,
    bootstrap_interval,
    too_few_blocks,
    whole_blocks,
)
from mpfa.demo.rows import BASELINE_KEY, DIRECT_KEY, REFERENCE_KEY
from mpfa.demo.run import DemoSettings, RowResult

HEADER = ("format", "compensation", "bytes", "ratio", "ppl", "KL to bf16 (95%)", "top-1", "rel L2")


def format_table(results: list[RowResult]) -> str:
    lines = [HEADER]
    for r in results:
        is_reference = r.row.key == REFERENCE_KEY
        kl = f"{r.kl:.4f}"
        if r.kl_interval is not None:
            kl += " ({:.4f}..{:.4f})".format(*r.kl_interval)
        lines.append(
            (
                r.row.format + ("*" if r.row.note else ""),
                r.row.label,
                f"{r.bytes_per_token_head:.0f}",
                f"{r.ratio_to_bf16:.2f}x",
                f"{r.perplexity:.3f}",
                "0" if is_reference else kl,
                "100%" if is_reference else f"{100 * r.top1:.1f}%",
                f"{r.rel_l2:.4f}",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    left_aligned = 2
    text = []
    for line in lines:
        cells = [
            cell.ljust(width) if i < left_aligned else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    text.insert(1, "  ".join("-" * width for width in widths))
    text += [f"* {r.row.format} {r.row.label}: {r.row.note}" for r in results if r.row.note]
    return "\n".join(text)


def best_low_bit(results: list[RowResult]) -> RowResult | None:
    """The qk4pv8 row with the smallest KL."""
    rows = [r for r in results if r.row.format == "qk4pv8"]
    return min(rows, key=lambda r: r.kl, default=None)


def reading(results: list[RowResult], seed: int) -> str:
    """What the numbers say, in one sentence per fact that they can support."""
    by_key = {r.row.key: r for r in results}
    if any(r.kl != r.kl for r in results):
        return "Reading: a row produced NaN; the table says nothing."
    ranked = sorted(
        (r for r in results if r.row.key != REFERENCE_KEY), key=lambda r: r.kl, reverse=True
    )
    if not ranked:
        return "Reading: only the bf16 reference was run."
    blocks = whole_blocks(block_sums(results[0].scores.kl[None]).counts)
    if blocks < MIN_BLOCKS:
        return f"Reading: none; {too_few_blocks(blocks)}. More --tokens give one."
    parts = ["KL, worst first: " + ", ".join(f"{r.row.key} {r.kl:.4f}" for r in ranked)]
    best, direct, fp8 = best_low_bit(results), by_key.get(DIRECT_KEY), by_key.get(BASELINE_KEY)
    if best is not None and direct is not None and best is not direct and direct.kl > 0:
        removed = 100 * (1 - best.kl / direct.kl)
        parts.append(f"{best.row.key} removes {removed:.0f}% of direct NVFP4's KL")
    if best is not None and fp8 is not None:
        low, high = bootstrap_interval(best.scores.kl - fp8.scores.kl, seed)
        verdict = "lower" if high < 0 else "higher" if low > 0 else "not separable"
        parts.append(
            f"next to fp8 per tensor its KL is {verdict} ({best.kl / fp8.kl:.2f}x; paired 95% "
            f"interval of the difference {low:+.4f}..{high:+.4f}) at "
            f"{best.bytes_per_token_head:.0f} against {fp8.bytes_per_token_head:.0f} bytes"
        )
    return "Reading: " + "; ".join(parts) + "."


def as_json(
    settings: DemoSettings,
    versions: dict[str, str],
    results: list[RowResult],
    answers: dict[str, str],
    seconds: float,
) -> dict[str, object]:
    decode = settings.decode_tokens
    rows = []
    for r in results:
        kl = r.scores.kl.view(settings.num_requests, -1)
        prompt, rest = kl[:, : kl.shape[1] - decode], kl[:, kl.shape[1] - decode :]
        rows.append(
            {
                "key": r.row.key,
                "format": r.row.format,
                "compensation": r.row.compensation,
                "channels": r.row.channels,
                "four_over_six": r.row.four_over_six,
                "stats": r.row.stats,
                "bytes_per_token_and_kv_head": r.bytes_per_token_head,
                "ratio_to_bf16": r.ratio_to_bf16,
                "perplexity": r.perplexity,
                "kl": r.kl,
                "kl_low": None if r.kl_interval is None else r.kl_interval[0],
                "kl_high": None if r.kl_interval is None else r.kl_interval[1],
                "kl_prefill": float(prompt.mean()),
                "kl_decode": float(rest.mean()) if decode else None,
                "top1": r.top1,
                "rel_l2": r.rel_l2,
                "rel_l2_max": r.rel_l2_max,
                "seconds": round(r.seconds, 2),
            }
        )
    return {
        "versions": versions,
        "scored_tokens": settings.num_requests * settings.window_tokens,
        "requests": settings.num_requests,
        "decode_tokens_per_request": decode,
        "calibration_tokens": settings.calibration_tokens,
        "page_size": settings.page_size,
        "seed": settings.seed,
        "rows": rows,
        "prompt": settings.prompt,
        "answers": answers,
        "seconds": round(seconds, 1),
    }
