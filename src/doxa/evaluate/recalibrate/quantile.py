"""Quantile recalibration: what was said to happen with probability u happened with R(u).

    R(u) = P(F_n(y_n) <= u),    F'(y) = R(F(y))

Kuleshov, Fenner and Ermon (2018). R passes through the empirical quantiles of the calibration rows'
F_n(y_n) and is linear between them: at the levels k/K, K = ⌈√n⌉, and in the tails also where 1, 2,
4, 8, … rows lie outside. With `knots` given it is K = knots and nothing else (n + 1 is the paper's
curve, through every row, whose density is rough). Each output has an R of its own. Points that
coincide are drawn apart by a share of 1e-9, so that all slopes are positive and finite.

A predictive that is far too narrow puts most F_n(y_n) so close to 0 or 1 that numbers cannot tell
them apart; rescale it first with kind="variance".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa import checks, store
from doxa.errors import DataError
from doxa.posterior import PredictiveTransform
from doxa.predictive import Predictive
from doxa.predictive.warped import PiecewiseLinear, Warped

_APART = 1e-9


@store.register("recalibrate.quantile")
@dataclass(frozen=True, eq=False)
class Quantile(PredictiveTransform):
    """R of each output, as points."""

    said: Tensor  # [E, K]
    happened: Tensor  # [E, K]

    def __call__(self, p: Predictive) -> Predictive:
        place = p._form.mean.device
        curve = PiecewiseLinear(self.said.to(place), self.happened.to(place))
        return p.of_form(Warped(p._form, curve))


def fit_quantile(p: Predictive, y: Any, *, knots: int | None = None) -> Quantile:
    u = p.cdf(y).double().flatten(1) if p.mean.ndim > 1 else p.cdf(y).double().unsqueeze(1)
    bad = ~torch.isfinite(u).all(1)
    if bool(bad.any()):
        raise DataError(f"the prediction at calibration row {int(bad.nonzero()[0])} is not finite")
    n = len(u)
    levels = _levels(n, knots).to(u)
    # The i-th of n ordered values stands at level i / (n + 1); 0 and 1 stand at their own.
    ordered = torch.cat([torch.zeros_like(u[:1]), u.sort(0)[0], torch.ones_like(u[:1])])
    place = levels * (n + 1)
    below = place.long().clamp_max(n)
    share = (place - below).unsqueeze(1)
    said = ((1.0 - share) * ordered[below] + share * ordered[below + 1]).t()  # [E, K]
    happened = levels.expand_as(said)
    return Quantile(((1.0 - _APART) * said + _APART * happened).contiguous(), happened.clone())


def _levels(n: int, knots: int | None) -> Tensor:
    """From 0 to 1, increasing."""
    pieces = math.ceil(math.sqrt(n)) if knots is None else checks.whole("knots", knots)
    levels = torch.arange(pieces + 1, dtype=torch.float64) / pieces
    if knots is not None:
        return levels
    outside = 2.0 ** torch.arange(math.ceil(math.log2(n + 1)), dtype=torch.float64) / (n + 1)
    outside = outside[outside < 0.9 / pieces]
    return torch.cat([levels, outside, 1.0 - outside]).unique()
