"""Quantiles of a distribution by bisection on its cumulative distribution function, all
elements at once. Floating point ends the search: when no number lies between the bounds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Cdf = Callable[[Tensor], Tensor]
_MOST_STEPS = 2100  # float64 has no more halvings than this between its largest and smallest


def normal_quantile(level: float) -> float:
    return float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)))


def bisect(cdf: Cdf, level: float, low: Tensor, high: Tensor) -> Tensor:
    """The smallest y with cdf(y) >= level, given cdf(low) <= level <= cdf(high)."""
    for _ in range(_MOST_STEPS):
        middle = low + 0.5 * (high - low)
        if bool(((middle <= low) | (middle >= high) | middle.isnan()).all()):
            break
        reached = cdf(middle) >= level
        high = torch.where(reached, middle, high)
        low = torch.where(reached, low, middle)
    return high


def bisect_whole(cdf: Cdf, level: float, low: Tensor, high: Tensor) -> Tensor:
    """The same over whole numbers, given cdf(low) < level <= cdf(high)."""
    for _ in range(_MOST_STEPS):
        if not bool((high - low > 1.0).any()):
            break
        middle = (0.5 * (low + high)).floor()
        reached = cdf(middle) >= level
        high = torch.where(reached, middle, high)
        low = torch.where(reached, low, middle)
    return high


def widen(
    cdf: Cdf, level: float, low: Tensor, high: Tensor, width: Tensor
) -> tuple[Tensor, Tensor]:
    """Move the bounds outwards, twice as far each time, until they hold the quantile."""
    step = width
    for _ in range(_MOST_STEPS):
        too_high, too_low = cdf(low) > level, cdf(high) < level
        if not bool((too_high | too_low).any()):
            break
        low = torch.where(too_high, low - step, low)
        high = torch.where(too_low, high + step, high)
        step = 2.0 * step
    return low, high
