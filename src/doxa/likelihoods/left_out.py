"""One number of a likelihood by rows that a fit left out, and whether they ask for it clearly."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_CUTS = 18  # to 2e-4 of where the search began


def mixed(each: Tensor) -> Tensor:
    """log of the mean over S functions of what each gives to a row: [S, N] to [N], in float64."""
    return torch.logsumexp(each.double(), 0) - math.log(len(each))


def likeliest(
    score: Callable[[float], Tensor], weight: Tensor, most: float, spread: float, slope: float = 0.0
) -> float:
    """argmax_u Σ_i w_i score(u)_i + slope u − u²/(2 spread²), in [−most, most], by golden
    section."""

    def value(u: float) -> float:
        return float((weight * score(u)).sum()) + slope * u - 0.5 * (u / spread) ** 2

    low, high = -most, most
    cut = [high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)]
    at = [value(u) for u in cut]
    for _ in range(_CUTS):
        if at[0] >= at[1]:
            high, cut[1], at[1] = cut[1], cut[0], at[0]
            cut[0] = high - _GOLDEN * (high - low)
            at[0] = value(cut[0])
        else:
            low, cut[0], at[0] = cut[0], cut[1], at[1]
            cut[1] = low + _GOLDEN * (high - low)
            at[1] = value(cut[1])
    return 0.5 * (low + high)


def clear(gain: Tensor, weight: Tensor, errors: float) -> bool:
    """Whether the sum of gains [N] is above zero by so many of its standard errors. Near the best
    of one number, a gain of k standard errors is a number of 2k of its own from no gain at all."""
    mean = (weight * gain).sum() / weight.sum()
    error = (weight * (gain - mean)).square().sum().sqrt()
    return bool((weight * gain).sum() > errors * error)
