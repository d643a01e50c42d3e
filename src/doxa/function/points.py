"""Where inducing points start, among the rows, and how large y is."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from doxa.errors import DataError
from doxa.function.inducing import spread_out
from doxa.method import Run

_MOST_POINTS = 100
_SEEN = 2000  # rows that points are chosen from


def starts(run: Run, inducing: int | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each member, from some of its rows: points [Z, D], the mean square of y and its standard
    deviation, both 1 of classes and counts. Rows of weight 0 are none."""
    ways = run.noise("inducing").normal((math.prod(run.rows.x.shape[1:]),)).double()
    shares = [_weighted(run, m) for m in range(run.size)]
    count = _count(min(len(rows) for rows, _ in shares), inducing)
    for m, (rows, weight) in enumerate(shares):
        size = min(len(rows), max(_SEEN, 4 * count))
        some = torch.linspace(0, len(rows) - 1, size, dtype=torch.float64).round().long()
        x, y = run.rows.take(rows[some], torch.tensor(run.rows.run_of(run.split_of[m])))
        x, weight = x.double().reshape(size, -1), weight[some].to(x.device)
        points, one = spread_out(x, count, ways[m], weight), x.new_ones(())
        if not run.likelihood.scales_targets:
            yield points, one, one
            continue
        y, share = y.double().reshape(size, -1), (weight / weight.sum()).unsqueeze(1)
        power, middle = (share * y.square()).sum(0), (share * y).sum(0)
        spread = (power - middle.square()).clamp_min(0.0).mean().sqrt()
        power = power.mean()
        yield points, torch.where(power > 1e-8, power, one), torch.where(spread > 1e-8, spread, one)


def _weighted(run: Run, m: int) -> tuple[Tensor, Tensor]:
    """The rows of a member that count, and how much."""
    rows, weight = run.rows.rows[run.split_of[m]], run.rows.weight
    if weight is None:
        return rows, torch.ones(len(rows), dtype=torch.float64)
    own = (weight if weight.ndim == 1 else weight[m]).cpu().double()[rows]
    return rows[own > 0], own[own > 0]


def _count(fewest: int, inducing: int | None) -> int:
    if inducing is not None and inducing > fewest:
        raise DataError(
            f"inducing={inducing} points are more than the {fewest} rows that are fitted: give at "
            "most as many, or leave it out"
        )
    return min(inducing or _MOST_POINTS, fewest)
