# SPDX-License-Identifier: Apache-2.0
"""PNG plots: channel ridges of |Q| and |K| (as the paper's Figure 4), and the error by layer."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch

import mpfa
from mpfa.accuracy.report import RowReport

INSTALL = "pip install matplotlib"
# The paper shows the first 256 tokens.
_RIDGE_TOKENS = 256
# (channels, centred first): what mean+channels15 and channels16 take out.
_CHOICES = ((15, True), (16, False))


class PlotsUnavailableError(RuntimeError):
    """matplotlib is not installed; the message holds the pip command."""


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotsUnavailableError(f"plots: not installed: matplotlib; run: {INSTALL}")


def _figure(width: float, height: float, rows: int, columns: int):
    # why not pyplot: it keeps figures in global state and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def plot_ridges(
    q: torch.Tensor, k: torch.Tensor, path: Path, *, title: str, kv_head: int = 0
) -> Path:
    """|Q| and |K| of one KV head and its first query head over tokens and channels.

    Below each map: mean |x| of every channel, |mean| of the channel, and the channels that calibrate()
    would take out, with and without centring.

    Args:
        q, k: bf16 [T, Hq, D] and [T, Hkv, D] of one layer.
    """
    require_matplotlib()
    group = q.shape[1] // k.shape[1]
    chosen = {
        (count, center): mpfa.calibrate([(q, k)], channels=count, center=center).channel_index
        for count, center in _CHOICES
    }
    figure, axes = _figure(11, 6, 2, 2)
    for column, (name, x) in enumerate((("Q", q[:, kv_head * group]), ("K", k[:, kv_head]))):
        x = x.float()
        image, profile = axes[0][column], axes[1][column]
        drawn = image.imshow(
            x[:_RIDGE_TOKENS].abs().numpy(), aspect="auto", origin="lower", cmap="viridis"
        )
        figure.colorbar(drawn, ax=image)
        image.set(title=f"|{name}|", xlabel="channel", ylabel="token")
        profile.plot(x.abs().mean(dim=0).numpy(), label=f"mean |{name}|")
        profile.plot(x.mean(dim=0).abs().numpy(), label=f"|mean {name}|")
        top = float(x.abs().mean(dim=0).max())
        for i, ((count, center), index) in enumerate(chosen.items()):
            label = f"{count} channels chosen {'after' if center else 'without'} centring"
            height = [-(0.05 + 0.06 * i) * top] * count
            profile.plot(index[kv_head].tolist(), height, "^v"[i], label=label, markersize=4)
        profile.set(xlabel="channel")
        profile.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    return path


def plot_errors(
    reports: Sequence[RowReport], layer_names: Sequence[str], path: Path, *, title: str
) -> Path:
    """Relative L2 error of the attention output by layer, one line per row."""
    require_matplotlib()
    figure, axes = _figure(9, 5.5, 1, 1)
    axis = axes[0][0]
    for i, r in enumerate(reports):
        style = ("-", "--", ":")[i // 10 % 3]
        axis.plot(r.rel_l2_by_layer, style, marker=".", label=r.row.key)
    axis.set_yscale("log")
    axis.set(xlabel="layer", ylabel="relative L2 error to float64", title=title)
    step = max(1, len(layer_names) // 10)
    axis.set_xticks(range(0, len(layer_names), step), layer_names[::step])
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=110)
    return path


def write_all(
    folder: Path,
    reports: Sequence[RowReport],
    layer_names: Sequence[str],
    activations: dict[int, tuple[torch.Tensor, ...]],
    *,
    model: str,
) -> list[Path]:
    """ridges-layerN.png of the layer whose K has the strongest channel mean, and errors.png."""
    folder.mkdir(parents=True, exist_ok=True)

    def offset(layer: int) -> float:
        k = activations[layer][1].float()
        return float(k.mean(dim=0).square().sum() / k.square().mean(dim=0).sum())

    layer = max(activations, key=offset)
    q, k = activations[layer][:2]
    name = layer_names[layer]
    return [
        plot_ridges(q, k, folder / f"ridges-layer{layer}.png", title=f"{model}, layer {name}"),
        plot_errors(reports, layer_names, folder / "errors.png", title=model),
    ]
