"""Quantiles: roots of a cumulative distribution function, of all elements at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Cdf = Callable[[Tensor], Tensor]
_MOST_STEPS = 2100  # float64 has no more halvings than this between its largest and smallest


def normal_quantile(level: float) -> float:
    return float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)))


def solve(cdf: Cdf, level: float | Tensor, low: Tensor, high: Tensor) -> Tensor:
    """y with cdf(y) = level to rounding, given cdf(low) <= level <= cdf(high); one level for all,
    or one for each element.

    Chandrupatla's method (1997): an inverse quadratic step through the last three points where
    they look like a smooth curve, else bisection; about 10 evaluations instead of 50.
    """
    tolerance = 2.0 * torch.finfo(low.dtype).eps * torch.maximum(low.abs(), high.abs())
    a, b, c = high, low, low  # the newest point, one across the root, the one before
    fa, fb = cdf(a) - level, cdf(b) - level
    fc, step = fb, torch.full_like(low, 0.5)
    for _ in range(_MOST_STEPS):
        best = torch.where(fa.abs() < fb.abs(), a, b)
        width = (b - a).abs()
        # Undefined elements count as done, or the search would never end.
        if bool(((width <= tolerance) | (fa == 0) | (fb == 0) | ~torch.isfinite(width)).all()):
            break
        new = a + step * (b - a)
        f_new = cdf(new) - level
        same_side = torch.sign(f_new) == torch.sign(fa)
        c, fc = torch.where(same_side, a, b), torch.where(same_side, fa, fb)
        b, fb = torch.where(same_side, b, a), torch.where(same_side, fb, fa)
        a, fa = new, f_new
        xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
        smooth = (phi.square() < xi) & ((1.0 - phi).square() < 1.0 - xi)
        quadratic = fa / (fb - fa) * fc / (fb - fc)
        quadratic = quadratic + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        least = (0.5 * tolerance / (b - a).abs()).nan_to_num(0.5).clamp_max(0.5)
        step = torch.where(smooth & torch.isfinite(quadratic), quadratic, 0.5)
        step = torch.minimum(torch.maximum(step, least), 1.0 - least)
    return best


def bisect_whole(cdf: Cdf, level: float, low: Tensor, high: Tensor) -> Tensor:
    """The smallest whole y with cdf(y) >= level, given cdf(low) < level <= cdf(high)."""
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
