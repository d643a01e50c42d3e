"""Scores of numbers: errors of the mean, intervals, quantiles. Means over rows and elements.

    pinball_q(y)    = max(q (y - z_q), (q - 1) (y - z_q))               z_q the q-quantile
    interval_a(y)   = (u - l) + 2/a [(l - y)^+ + (y - u)^+]              a = 1 - level

Both are proper: the true quantiles minimise them (Gneiting and Raftery, 2007, who give the
interval score after Winkler, 1972). Coverage and width are read together: any coverage can be
had by intervals wide enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from doxa.evaluate.paired import check_levels, check_numeric, check_predicted, predicted_mean
from doxa.predictive import Predictive

LEVELS = tuple(k / 20 for k in range(1, 20))  # 0.05, 0.10, ... 0.95


def rmse(p: Predictive, y: Any) -> float:
    """The root of the mean squared error of `p.mean`."""
    mean, target = predicted_mean(p, y)
    return float((target - mean).square().mean().sqrt())


def mae(p: Predictive, y: Any) -> float:
    """The mean absolute error of `p.mean` (of the mean, not of the median)."""
    mean, target = predicted_mean(p, y)
    return float((target - mean).abs().mean())


def coverage(p: Predictive, y: Any, level: float = 0.95) -> float:
    """The share of y inside the central interval, its ends included; `level` is right. For
    counts the interval holds at least `level`, so that a little more is right."""
    low, high, target = interval_and_target(p, y, level)
    return float(((low <= target) & (target <= high)).double().mean())


def width(p: Predictive, level: float = 0.95) -> float:
    """The mean width of the central interval, in units of y."""
    low, high = _interval(p, level)
    return float((high - low).mean())


def interval_score(p: Predictive, y: Any, level: float = 0.95) -> float:
    """The mean interval (Winkler) score of the central interval; lower is better."""
    low, high, target = interval_and_target(p, y, level)
    miss = (low - target).clamp_min(0.0) + (target - high).clamp_min(0.0)
    return float((high - low + 2.0 / (1.0 - level) * miss).mean())


@dataclass(frozen=True)
class CoverageCurve:
    """What central intervals of several levels hold, and how wide they are; all [K]."""

    level: Tensor
    coverage: Tensor
    width: Tensor


def coverage_curve(p: Predictive, y: Any, levels: Sequence[float] = LEVELS) -> CoverageCurve:
    """Coverage and width at each level."""
    each = check_levels(levels)
    held, wide = [], []
    for level in each:
        low, high, target = interval_and_target(p, y, level)
        held.append(((low <= target) & (target <= high)).double().mean())
        wide.append((high - low).mean())
    at = torch.tensor(each, dtype=torch.float64, device=held[0].device)
    return CoverageCurve(at, torch.stack(held), torch.stack(wide))


def pinball(p: Predictive, y: Any, levels: Sequence[float] = LEVELS) -> float:
    """The mean pinball (quantile) loss over the levels; lower is better. Over all levels from 0
    to 1 its mean is half the CRPS."""
    return float(pinball_each(p, y, levels).mean())


def pinball_each(p: Predictive, y: Any, levels: Sequence[float] = LEVELS) -> Tensor:
    """[N, *event]: the pinball loss of each element, averaged over the levels."""
    _, target = predicted_mean(p, y)
    each = check_levels(levels)
    total = torch.zeros_like(target)
    for level in each:
        gap = target - check_predicted(p.quantile(level), "quantile", finite=False).double()
        total += torch.maximum(level * gap, (level - 1.0) * gap)
    return total / len(each)


def interval_and_target(p: Predictive, y: Any, level: float) -> tuple[Tensor, Tensor, Tensor]:
    """(low, high, y), each [N, *event] float64."""
    _, target = predicted_mean(p, y)
    return *_interval(p, level), target


def _interval(p: Predictive, level: float) -> tuple[Tensor, Tensor]:
    check_numeric(p)
    low, high = p.interval(level)
    return (
        check_predicted(low, "interval's end", finite=False).double(),
        check_predicted(high, "interval's end", finite=False).double(),
    )
