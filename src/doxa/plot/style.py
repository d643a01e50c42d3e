"""The style of all pictures, and the axes that they are drawn on."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from doxa.errors import MissingExtra

Array = np.ndarray[Any, np.dtype[Any]]

INK, GRID, FAINT = "#22303c", "#e3e8ec", "#5b6b78"
MEAN, EPISTEMIC, ALEATORIC = "#0b4f8a", "#3d8fd1", "#a9d0ee"
SERIES = ("#1f5f8b", "#b0512a", "#2f7560", "#74559c")  # as in the report
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
MOST_ROWS = 200  # of a picture with one mark for each row


def import_matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtra("figures need matplotlib: pip install 'doxa[plots]'") from error
    return matplotlib


def plain(ax: Any) -> None:
    """The style of all axes: a light grid, and no frame at the top and the right."""
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color("#9aa7b1")
    ax.tick_params(colors=FAINT, labelsize=9, length=3)
    ax.grid(color=GRID, lw=0.6)
    ax.set_axisbelow(True)


def axes(ax: Any, title: str, x: str, y: str, size: tuple[float, float] = (5.2, 3.9)) -> Any:
    """The axes to draw on, with their style and labels."""
    import_matplotlib()
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=size, layout="constrained")
    plain(ax)
    ax.set_title(title, loc="left", fontsize=11, color=INK)
    ax.set_xlabel(x, color=FAINT)
    ax.set_ylabel(y, color=FAINT)
    return ax


def legend(ax: Any, **options: Any) -> None:
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=9, **options)


def flat(values: Any) -> Array:
    found = values.detach().cpu().double().numpy() if isinstance(values, Tensor) else values
    return np.asarray(found, dtype=np.float64).reshape(-1)


def cells(ax: Any, count: int, columns: int) -> list[Any]:
    """Axes inside of `ax`, one for each of several small pictures; `ax` itself for one."""
    if count == 1:
        return [ax]
    ax.axis("off")
    rows = -(-count // columns)
    made = []
    for k in range(count):
        row, column = divmod(k, columns)
        wide, tall = 1 / columns, 1 / rows
        place = (column * wide + 0.02, 1 - (row + 1) * tall + 0.05 * tall, 0.86 * wide, 0.72 * tall)
        small = ax.inset_axes(place)
        plain(small)
        made.append(small)
    return made


def bands(ax: Any, grid: Array, mean: Array, aleatoric: Array, epistemic: Array) -> None:
    """Two bands of two standard deviations around a mean on a line: the function's uncertainty, and
    with the noise. Variances [G]."""
    half = 2.0 * np.sqrt(np.maximum(epistemic, 0.0))
    total = 2.0 * np.sqrt(np.maximum(epistemic, 0.0) + aleatoric)
    named = (
        (
            total,
            ALEATORIC,
            0.65,
            "epistemic uncertainty and noise: where new data should lie (±2σ)",
        ),
        (half, EPISTEMIC, 0.55, "epistemic uncertainty: of the curve alone (±2σ)"),
    )
    for layer, (width, colour, alpha, label) in enumerate(named, 1):
        ax.fill_between(
            grid, mean - width, mean + width, color=colour, lw=0, alpha=alpha, label=label,
            zorder=layer,
        )  # fmt: skip


def curves(ax: Any, grid: Array, draws: Array) -> None:
    """Function draws [S, G] on a line."""
    for k, draw in enumerate(draws):
        once = "curves drawn from the posterior" if k == 0 else None
        ax.plot(grid, draw, color=MEAN, lw=0.6, alpha=0.35, zorder=3, label=once)
