"""The figures of the demo: predictive distributions on a line and in the plane. And pictures as
PNG, written with the standard library (`encode`).

PNG (W3C, third edition): a signature, then chunks of length, type, data and CRC-32. Each row of
pixels begins with its filter (0: none), and all rows are compressed together.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from doxa.errors import ShapeError
from doxa.plot.style import FAINT, INK, MEAN, bands, curves, import_matplotlib, plain
from doxa.tables.files import Array

GAP, TROUBLE = "#f5f1e8", "#b3261e"
CLASS_COLOURS = ("#c8553d", "#2a6f97")


@dataclass(frozen=True)
class Panel:
    """The predictive of one method on a line: [G] each, variances in squared units; draws [S, G].

    trouble: the status, if it is not "ok".
    """

    title: str
    note: str
    mean: Array
    aleatoric: Array
    epistemic: Array
    draws: Array
    trouble: str = ""


def import_pyplot() -> Any:
    matplotlib = import_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def subplots(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
        # A figure of its own, not pyplot's: no global state, and no display is needed.
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        return figure, figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)

    return matplotlib, subplots


def regression_figure(
    path: Path, grid: Array, truth: Array, x: Array, y: Array, panels: Sequence[Panel], shade: Any
) -> Any:
    """One panel per method: mean, bands of two standard deviations, function draws and the data."""
    _, subplots = import_pyplot()
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = subplots(rows, columns, (3.6 * columns, 3.1 * rows + 0.8))
    for ax, panel in zip(axes.flat, panels, strict=False):
        plain(ax)
        ax.tick_params(labelbottom=True)  # in every row
        ax.axvspan(*shade, color=GAP, lw=0, zorder=0, label="gap without data")
        bands(ax, grid, panel.mean, panel.aleatoric, panel.epistemic)
        curves(ax, grid, panel.draws)
        ax.plot(grid, truth, color=INK, lw=1.0, ls=(0, (4, 3)), label="the true curve", zorder=4)
        ax.plot(grid, panel.mean, color=MEAN, lw=2.0, label="mean", zorder=5)
        ax.plot(x, y, ".", color=INK, ms=3.5, alpha=0.75, label="data", zorder=6)
        ax.set_title(panel.title, loc="left", fontsize=12, fontweight="bold", color=INK)
        ax.set_title(panel.note, loc="right", fontsize=9, color=FAINT)
        if panel.trouble:
            _mark(ax, panel.trouble)
    for ax in list(axes.flat)[len(panels) :]:
        ax.set_visible(False)
    span = float(np.ptp(np.concatenate([truth, y])))
    middle = float(np.mean([truth.min(), truth.max()]))
    axes.flat[0].set_ylim(middle - 0.8 * span, middle + 0.8 * span)
    axes.flat[0].set_xlim(grid[0], grid[-1])
    for ax in axes[:, 0]:
        ax.set_ylabel("y", color=FAINT)
    for ax in axes[-1]:
        ax.set_xlabel("x", color=FAINT)
    handles, _ = axes.flat[0].get_legend_handles_labels()
    if any(panel.trouble for panel in panels):
        handles.append(_frame("the fit is not reliable: its status"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(4, columns + 1), frameon=False,
        fontsize=10,
    )  # fmt: skip
    figure.savefig(path, dpi=160, facecolor="white")
    return figure


def _frame(label: str) -> Any:
    """The red frame, for the legend."""
    from matplotlib.patches import Patch

    return Patch(facecolor="none", edgecolor=TROUBLE, linewidth=1.6, label=label)


def _mark(ax: Any, trouble: str) -> None:
    """Mark a panel whose fit is not reliable: a red frame, and the status as text."""
    for spine in ax.spines.values():
        spine.set_visible(True)
        spine.set(color=TROUBLE, linewidth=1.6)
    box = {"boxstyle": "round,pad=0.3", "facecolor": TROUBLE, "edgecolor": "none"}
    ax.text(
        0.03, 0.95, trouble, transform=ax.transAxes, ha="left", va="top", fontsize=9,
        fontweight="bold", color="white", bbox=box, zorder=7,
    )  # fmt: skip


def moons_figure(
    path: Path, xs: Array, ys: Array, fields: Sequence[tuple[str, Array, str]], points: Any
) -> None:
    """Maps over the plane: (title, values [H, W], "probability" or "information") each."""
    _, subplots = import_pyplot()
    figure, axes = subplots(1, len(fields), (4.6 * len(fields), 4.0))
    for ax, (title, values, kind) in zip(axes.flat, fields, strict=True):
        plain(ax)
        ax.grid(visible=False)
        if kind == "probability":
            style: dict[str, Any] = {"levels": np.linspace(0.0, 1.0, 21), "cmap": "RdBu"}
        else:
            style = {"levels": 21, "cmap": "magma"}
        drawn = ax.contourf(xs, ys, values, **style)
        if kind == "probability":
            ax.contour(xs, ys, values, levels=[0.5], colors=INK, linewidths=1.4)
        bar = figure.colorbar(
            drawn,
            ax=ax,
            shrink=0.9,
            pad=0.02,
            label="P(class 1)" if kind == "probability" else "mutual information (nats)",
            ticks=[0.0, 0.25, 0.5, 0.75, 1.0] if kind == "probability" else None,
        )
        bar.outline.set_visible(False)
        for k, colour in enumerate(CLASS_COLOURS):
            own = points.x[points.y == k]
            ax.plot(own[:, 0], own[:, 1], "o", ms=4, mfc=colour, mec="white", mew=0.6)
        ax.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
        ax.set_aspect("equal")
    figure.savefig(path, dpi=160, facecolor="white")


_COLOUR_TYPE = {1: 0, 3: 2}  # by channels: grey, RGB


def encode(pixels: np.ndarray[Any, np.dtype[Any]]) -> bytes:
    """The bytes of a PNG file.

    Parameters
    ----------
    pixels : array
        [H, W] or [H, W, 3]. Integers are levels from 0 to 255; floats are shares from 0 to 1, of
        which what lies outside is clipped and NaN is black.
    """
    table = pixels[:, :, None] if pixels.ndim == 2 else pixels
    if table.ndim != 3 or table.shape[2] not in _COLOUR_TYPE:
        raise ShapeError(f"a picture is [H, W] or [H, W, 3], not {list(pixels.shape)}")
    if np.issubdtype(table.dtype, np.floating):
        table = (np.nan_to_num(np.clip(table, 0.0, 1.0)) * 255.0).round()
    height, width, channels = table.shape
    rows = table.reshape(height, -1).astype(np.uint8)
    filtered = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPE[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(filtered, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
