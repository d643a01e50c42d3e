"""Jackknife+: conformal intervals without held-out rows, from fits that each left rows out.

    r_i = |y_i - m_{-i}(x_i)|
    low(x)  = the ⌊(n + 1) α⌋-th smallest of m_{-i}(x) - r_i
    high(x) = the ⌈(n + 1) (1 - α)⌉-th smallest of m_{-i}(x) + r_i

with m_{-i} the mean prediction of the runs that did not see row i, α = 1 - level. Barber, Candès,
Ramdas and Tibshirani (2021): coverage is at least 1 - 2α with one row left out at a time, and
1 - 2α - √(2/n) with K folds (CV+), 1 - α in practice. With bootstrapped rows it is the
jackknife+-after-bootstrap of Kim, Xu and Barber (2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa import store
from doxa.driver.runs import Sweep
from doxa.errors import DataError, MethodError
from doxa.evaluate.conformal.interval import spread_out
from doxa.evaluate.conformal.threshold import threshold
from doxa.posterior import MixturePosterior, PredictiveTransform, TransformedPosterior
from doxa.predictive import Predictive
from doxa.predictive.blend import Blend
from doxa.predictive.conformal import ConformalInterval

_CHUNK_ELEMENTS = 1 << 22


@store.register("conformal.jackknife+")
@dataclass(frozen=True, eq=False)
class JackknifePlus(PredictiveTransform):
    """Rows that were left out by the same runs share a pattern."""

    level: float
    residuals: Tensor  # [n, *event]
    pattern: Tensor  # [n], the number of each row's pattern
    left_out: Tensor  # [patterns, R] of bool: the runs that did not see such rows
    allow_infinite: bool = False

    def __call__(self, p: Predictive) -> Predictive:
        form = p._form
        if not isinstance(form, Blend) or len(form.parts) != self.left_out.shape[1]:
            raise MethodError(f"jackknife+ needs the mixture of its {self.left_out.shape[1]} runs")

        def bounds() -> tuple[Tensor, Tensor]:
            each = torch.stack([part.mean.double() for part in form.parts])  # [R, N, *event]
            means = leave_out_means(each, self.left_out.to(each.device))
            rows = max(1, _CHUNK_ELEMENTS // max(1, self.residuals.numel()))
            blocks = [self._bounds(block) for block in means.split(rows, 1)]
            low, high = (torch.cat(side) for side in zip(*blocks, strict=True))
            return spread_out(low, high, torch.zeros_like(low), form.mean.dtype)

        return p.of_form(ConformalInterval(form, self.level, bounds))

    def _bounds(self, means: Tensor) -> tuple[Tensor, Tensor]:
        """[patterns, N, *event] to (low, high) [N, *event]."""
        centre = means[self.pattern.to(means.device)]  # [n, N, *event]
        spread = self.residuals.to(means).unsqueeze(1)
        low = -threshold(spread - centre, self.level, allow_infinite=self.allow_infinite)
        return low, threshold(centre + spread, self.level, allow_infinite=self.allow_infinite)


def leave_out_means(each: Tensor, left_out: Tensor) -> Tensor:
    """Means over the runs [R, ...] of each pattern: [patterns, ...]."""
    weights = left_out.to(each.dtype)
    weights = weights / weights.sum(1, keepdim=True)
    return (weights @ each.reshape(len(each), -1)).reshape(len(weights), *each.shape[1:])


def fit_jackknife(
    sweep: Sweep, x: Any, y: Any, level: float, allow_infinite: bool
) -> TransformedPosterior:
    base = MixturePosterior(list(sweep), [1.0] * len(sweep))
    form = base.predict(x)._form
    if not isinstance(form, Blend):
        raise MethodError("jackknife+ is for posteriors with one head")
    target = form.targets(y).double()
    left_out, pattern = _patterns(sweep, len(target))
    each = torch.stack([part.mean.double() for part in form.parts])
    if not bool(torch.isfinite(each).all()):
        raise DataError("a run's predictions at its training rows are not finite")
    own = leave_out_means(each, left_out.to(each.device))
    rows = torch.arange(len(target), device=own.device)
    residuals = (target - own[pattern.to(own.device), rows]).abs()
    threshold(residuals, level, allow_infinite=allow_infinite)  # enough rows, or an error now
    transform = JackknifePlus(level, residuals, pattern, left_out, allow_infinite)
    return TransformedPosterior(base, transform)


def _patterns(sweep: Sweep, n: int) -> tuple[Tensor, Tensor]:
    """(left_out [patterns, R], pattern [n]) from the rows that each run was fitted to."""
    unseen = torch.ones(n, len(sweep), dtype=torch.bool)
    for r, spec in enumerate(sweep.specs):
        if spec.rows is None:
            unseen[:, r] = False
            continue
        numbers = spec.rows.cpu()
        if len(numbers) and int(numbers.max()) >= n:
            raise DataError(
                f"run {r} was fitted to row {int(numbers.max())}, but there are {n} rows: give "
                "jackknife+ the data that the runs were fitted to"
            )
        unseen[numbers, r] = False
    always = (~unseen.any(1)).nonzero().flatten()
    if len(always):
        raise DataError(
            f"{len(always)} of {n} rows (the first is row {int(always[0])}) were seen by every "
            "run, so that nothing predicts them from outside; fit with "
            "runs=Runs(rows=folds), where each row is left out at least once"
        )
    left_out, pattern = unseen.unique(dim=0, return_inverse=True)
    return left_out, pattern
