"""Lines through input space along which functions can be drawn.

One column runs over its range while the others rest at their middle: the median of the rows at
hand, or the training mean where there are none. Categories rest at the commonest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from doxa.app.report.subject import Array, Input, Subject

POINTS = 81


@dataclass(frozen=True)
class Slice:
    """x [G, D], and the values [G] of the column that runs."""

    column: Input
    grid: Array
    x: Array
    alone: bool  # the column is the only input


def slices(subject: Subject) -> list[Slice]:
    """One for each numeric column that is no flag; none where x is no table of numbers."""
    found = _ranges(subject)
    if found is None:
        return []
    middle, low, high = found
    numeric = [c for c in subject.inputs if c.categories is None and not c.flag]
    lines = []
    for column in numeric:
        at = column.at[0]
        if not (np.isfinite([low[at], high[at]]).all() and high[at] > low[at]):
            continue
        grid = np.linspace(low[at], high[at], POINTS)
        x = np.repeat(middle[None], POINTS, axis=0)
        x[:, at] = grid
        lines.append(Slice(column, grid, x, len(middle) == 1))
    return lines


def _ranges(subject: Subject) -> tuple[Array, Array, Array] | None:
    """(middle, low, high) of every number of x: [D] each."""
    rows = subject.train or subject.test
    table = None if rows is None else rows.table
    width = sum(len(column.at) for column in subject.inputs)
    if not width:
        return None
    if table is not None and table.shape[1] == width:
        middle = np.median(table, axis=0)
        share = table.mean(axis=0)
        low, high = np.quantile(table, [0.01, 0.99], axis=0)
        if width == 1:
            low, high = table.min(axis=0), table.max(axis=0)
    else:
        scales = subject.posterior.scales
        loc, scale = _flat(scales.x_loc), _flat(scales.x_scale)
        if loc is None or scale is None or loc.size != width:
            return None
        middle, share, low, high = loc.copy(), loc, loc - 2 * scale, loc + 2 * scale
    margin = 0.2 * (high - low) if width == 1 else 0.0 * high
    for column in subject.inputs:
        if column.categories is not None:
            places = list(column.at)
            middle[places] = 0.0
            middle[places[int(np.argmax(share[places]))]] = 1.0
    return middle, low - margin, high + margin


def _flat(value: Any) -> Array | None:
    if value is None or not hasattr(value, "detach"):
        return None
    return value.detach().cpu().double().numpy().reshape(-1)
