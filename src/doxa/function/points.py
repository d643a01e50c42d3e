"""Where inducing points start, among the rows, and how large y is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from doxa.errors import DataError
from doxa.function.glance import glance
from doxa.function.inducing import spread_out
from doxa.method import Run

MOST_POINTS = 100
_SEEN = 2000  # rows that points are chosen from
_ROUNDING = 1e-12  # a deviation below this share of the size of y is the mean's rounding error


def starts(run: Run, inducing: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of each member, from some of its rows: points [M, Z, D], the mean square of y and its
    standard deviation, [M], both 1 of classes and counts. Rows of weight 0 are none.

    Targets that vary by less than rounding have no deviation: their size stands in for it, so that
    the noise starts at the scale of y, whatever its units."""
    seen = glance(run, max(_SEEN, 4 * (inducing or MOST_POINTS)))
    x = seen.x.double().flatten(2) if seen.x.ndim > 2 else seen.x.double().unsqueeze(2)
    weight = torch.ones_like(x[..., 0]) if seen.weight is None else seen.weight
    count = _count(int((weight > 0).sum(1).min()), inducing)
    ways = run.noise("inducing").normal((math.prod(run.rows.x.shape[1:]),)).double()
    points, one = spread_out(x, count, ways, weight), x.new_ones(run.size)
    if not run.likelihood.scales_targets:
        return points, one, one
    y = seen.y.double().reshape(*x.shape[:2], -1)
    share = (weight / weight.sum(1, keepdim=True)).unsqueeze(2)
    away = y - (share * y).sum(1, keepdim=True)
    power, spread = ((share * part.square()).sum(1).mean(1) for part in (y, away))  # [M]
    power = torch.where(power > 0, power, one)
    return points, power, torch.where(spread > _ROUNDING**2 * power, spread, power).sqrt()


def _count(fewest: int, inducing: int | None) -> int:
    if inducing is not None and inducing > fewest:
        raise DataError(
            f"inducing={inducing} points are more than the {fewest} rows that are fitted: give at "
            "most as many, or leave it out"
        )
    return min(inducing or MOST_POINTS, fewest)
