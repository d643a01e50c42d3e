"""Conformal intervals from held-out rows: split and quantile (CQR).

    split    s = |y - m(x)|                          [m - t, m + t]
    scaled   s = |y - m(x)| / σ(x)                   [m - t σ, m + t σ]
    cqr      s = max(l(x) - y, y - u(x))             [l - t, u + t]

with t the ⌈(n + 1) level⌉-th smallest score, m and σ the predictive mean and standard deviation,
l and u its quantiles at (1 ∓ level) / 2. Split: Papadopoulos et al. (2002), Lei et al. (2018).
CQR: Romano, Patterson and Candès (2019); where t is negative and the bounds would cross, both are
their midpoint. With several outputs each has its own t, and the level holds for each by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa import store
from doxa.errors import DataError
from doxa.evaluate.conformal.mondrian import ByGroup, Groups
from doxa.evaluate.conformal.threshold import threshold, thresholds_by
from doxa.predictive import Predictive
from doxa.predictive.conformal import ConformalInterval
from doxa.predictive.form import Form


@store.register("conformal.interval")
@dataclass(frozen=True, eq=False)
class Interval(ByGroup):
    """`thresholds` [G, *event], one for each group (one group where there are none)."""

    level: float
    score: str  # "absolute", "scaled" or "quantile"
    thresholds: Tensor
    groups: Groups | None = None

    def _with(self, p: Predictive, t: Tensor) -> Predictive:
        form = p._form

        def bounds() -> tuple[Tensor, Tensor]:
            low, high, unit = centre(form, self.score, self.level)
            return spread_out(low, high, t.to(low) * unit, form.mean.dtype)

        return p.of_form(ConformalInterval(form, self.level, bounds))


def fit_interval(
    p: Predictive, x: Any, y: Any, level: float, score: str, by: Any, allow_infinite: bool
) -> Interval:
    scores = interval_scores(p, y, score, level)
    if by is None:
        t = threshold(scores, level, allow_infinite=allow_infinite).unsqueeze(0)
        return Interval(level, score, t)
    groups = Groups.of(by, x)
    index = groups.index(x, scores.device)
    t = thresholds_by(scores, index, groups.names, level, allow_infinite=allow_infinite)
    return Interval(level, score, t, groups)


def interval_scores(p: Predictive, y: Any, score: str, level: float) -> Tensor:
    """[N, *event] in float64."""
    target = p._form.targets(y).double()
    low, high, unit = centre(p._form, score, level)
    if not bool((unit > 0).all()):
        raise DataError(
            "a predicted standard deviation is 0 or not a number; use kind='split' unscaled"
        )
    return torch.maximum(low - target, target - high) / unit


def centre(form: Form, score: str, level: float) -> tuple[Tensor, Tensor, Tensor]:
    """What an interval starts from, (low, high), and the unit it grows by; float64."""
    if score == "quantile":
        low, high = (form.quantile(0.5 * (1.0 + s * level)).double() for s in (-1.0, 1.0))
        return low, high, torch.ones_like(low)
    mean = form.mean.double()
    return mean, mean, form.std.double() if score == "scaled" else torch.ones_like(mean)


def spread_out(low: Tensor, high: Tensor, by: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(low - by, high + by), rounded outwards: a calibration row on the edge stays inside."""
    size = torch.maximum(low.abs(), high.abs()) + by.abs()
    slack = 2.0 * torch.finfo(dtype).eps * torch.where(torch.isinf(size), 0.0, size)
    crossed, middle = low - by > high + by, 0.5 * (low + high)
    low, high = (torch.where(crossed, middle, t) for t in (low - by, high + by))
    return (low - slack).to(dtype), (high + slack).to(dtype)


def check_numbers(p: Predictive) -> None:
    """Finite means, so that an error can name the row."""
    mean = p.mean
    bad = ~torch.isfinite(mean).reshape(len(mean), math.prod(mean.shape[1:])).all(1)
    if bool(bad.any()):
        raise DataError(f"the prediction at calibration row {int(bad.nonzero()[0])} is not finite")
