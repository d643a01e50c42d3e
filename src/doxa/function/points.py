"""Where inducing points start, among the rows, and how large y is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from doxa.errors import DataError
from doxa.function.glance import glance
from doxa.function.inducing import spread_out
from doxa.method import Run

_MOST_POINTS = 100
_SEEN = 2000  # rows that points are chosen from


def starts(run: Run, inducing: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of each member, from some of its rows: points [M, Z, D], the mean square of y and its
    standard deviation, [M], both 1 of classes and counts. Rows of weight 0 are none."""
    seen = glance(run, max(_SEEN, 4 * (inducing or _MOST_POINTS)))
    x = seen.x.double().flatten(2) if seen.x.ndim > 2 else seen.x.double().unsqueeze(2)
    weight = torch.ones_like(x[..., 0]) if seen.weight is None else seen.weight
    count = _count(int((weight > 0).sum(1).min()), inducing)
    ways = run.noise("inducing").normal((math.prod(run.rows.x.shape[1:]),)).double()
    points, one = spread_out(x, count, ways, weight), x.new_ones(run.size)
    if not run.likelihood.scales_targets:
        return points, one, one
    y = seen.y.double().reshape(*x.shape[:2], -1)
    share = (weight / weight.sum(1, keepdim=True)).unsqueeze(2)
    squares, middle = (share * y.square()).sum(1), (share * y).sum(1)  # [M, O]
    spread = (squares - middle.square()).clamp_min(0.0).mean(1).sqrt()
    power = squares.mean(1)
    return points, torch.where(power > 1e-8, power, one), torch.where(spread > 1e-8, spread, one)


def _count(fewest: int, inducing: int | None) -> int:
    if inducing is not None and inducing > fewest:
        raise DataError(
            f"inducing={inducing} points are more than the {fewest} rows that are fitted: give at "
            "most as many, or leave it out"
        )
    return min(inducing or _MOST_POINTS, fewest)
