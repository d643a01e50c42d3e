"""The pictures of the image tables: doubt against shift, and the three panels of segmentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from doxa.app.bench.scenes import Array, Panel
from doxa.errors import MissingExtra

INK = "#22303c"
# Of the methods that are drawn: a line for each of twenty would show none.
COLOURS = {
    "map": "#8a949c", "deep-ensemble": "#0b4f8a", "mean-field": "#3f8f6b", "mc-dropout": "#c8553d",
    "laplace": "#8a5fa8", "hmc": "#d19a2a", "multiswag": "#2fa4a8", "ivon": "#7a9a1f",
    "rank1": "#b0417a",
}  # fmt: skip
FIELDS = {
    "accuracy": "accuracy",
    "log_likelihood": "log-likelihood",
    "entropy": "entropy (nats)",
    "mutual_information": "mutual information (nats)",
}
# CamVid's classes in their customary colours, in the order of their numbers.
PALETTE = np.array(
    [
        (128, 128, 128), (128, 0, 0), (192, 192, 128), (128, 64, 128), (60, 40, 222), (128, 128, 0),
        (192, 128, 128), (64, 64, 128), (64, 0, 128), (64, 64, 0), (0, 128, 192), (0, 0, 0),
    ],
    dtype=np.uint8,
)  # fmt: skip

Sweep = Sequence[Mapping[str, float]]


def rotation_figure(rows: Mapping[str, Sweep], path: Path) -> Path:
    """A line a method against the angle."""
    return _lines(rows, path, "degrees", "MNIST digits turned")


def corruption_figure(rows: Mapping[str, Mapping[str, Sweep]], path: Path) -> Path:
    """A line a method against severity, the mean of all kinds of corruption."""
    means = {method: mean_over_shifts(kinds) for method, kinds in rows.items()}
    return _lines(means, path, "severity", "CIFAR-10 corrupted")


def mean_over_shifts(kinds: Mapping[str, Sweep]) -> list[dict[str, float]]:
    """The mean row at each severity, whose number is then the level."""
    table = []
    for severity, rows in enumerate(zip(*kinds.values(), strict=True)):
        means = {field: float(np.mean([row[field] for row in rows])) for field in FIELDS}
        table.append({"level": severity, **means})
    return table


def scene_figure(images: Tensor, panels: Sequence[Panel], path: Path) -> Path:
    """Input, prediction, epistemic uncertainty: a row a frame, one scale for all maps."""
    figure = _figure((9.6, 2.15 * len(panels) + 0.3))
    axes = figure.subplots(len(panels), 3, squeeze=False)
    top = max(float(np.quantile(panel.epistemic, 0.995)) for panel in panels)
    titles = ("input", "prediction", "epistemic uncertainty")
    for row, image, panel in zip(axes, images, panels, strict=True):
        row[0].imshow(image.permute(1, 2, 0).cpu().numpy())
        row[1].imshow(coloured(panel.predicted))
        drawn = row[2].imshow(panel.epistemic, cmap="inferno", vmin=0.0, vmax=top)
        for ax in row:
            ax.set_axis_off()
    for ax, title in zip(axes[0], titles, strict=True):
        ax.set_title(title, fontsize=12, color=INK)
    bar = figure.colorbar(drawn, ax=axes[:, 2], shrink=0.7, label="mutual information (nats)")
    bar.outline.set_visible(False)
    figure.savefig(path, dpi=130, facecolor="white")
    return path


def coloured(labels: Array) -> Array:
    """Classes [H, W] as colours [H, W, 3]."""
    return PALETTE[labels.astype(int)]


def _lines(rows: Mapping[str, Sweep], path: Path, axis: str, title: str) -> Path:
    figure = _figure((13.0, 3.4))
    axes = figure.subplots(1, len(FIELDS))
    for ax, (field, name) in zip(axes, FIELDS.items(), strict=True):
        for method, own in rows.items():
            level, value = [row["level"] for row in own], [row[field] for row in own]
            ax.plot(level, value, "o-", ms=3, lw=1.6, color=COLOURS.get(method, INK), label=method)
        ax.set_title(name, fontsize=11, color=INK, loc="left")
        ax.set_xlabel(axis)
        ax.grid(color="#e3e8ec")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(0.0, 1.0)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(title, fontsize=12, fontweight="bold", color=INK, x=0.01, ha="left")
    figure.savefig(path, dpi=130, facecolor="white")
    return path


def _figure(size: tuple[float, float]) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("figures need matplotlib: pip install 'doxa[plots]'") from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
