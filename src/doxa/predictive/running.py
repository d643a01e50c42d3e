"""Weighted means and variances of values that come in chunks.

With accumulated weight W and mean m, a chunk of weight w and mean m' is merged by
(Chan, Golub and LeVeque, 1979), a = w / (W + w):

    m <- (1 - a) m + a m',    v <- (1 - a) v + a v' + a (1 - a) (m' - m)^2
"""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.predictive.form import mix


class Average:
    """The weighted mean of values that come in chunks [c, ...]."""

    def __init__(self) -> None:
        self.weight: Tensor | None = None
        self.mean: Tensor

    def update(self, values: Tensor, weights: Tensor) -> None:
        total, mean = weights.sum(), _average(values, weights)
        if self.weight is None:
            self.weight, self.mean = total, mean
            return
        share = _share(total, self.weight).to(mean.dtype)
        self.mean = (1.0 - share) * self.mean + share * mean
        self.weight = self.weight + total


class Spread(Average):
    """The weighted mean and variance of values that come in chunks [c, ...]."""

    variance: Tensor

    def update(self, values: Tensor, weights: Tensor) -> None:
        mean = _average(values, weights)
        variance = _average((values - mean).square(), weights)
        if self.weight is None:
            self.variance = variance
        else:
            share = _share(weights.sum(), self.weight).to(mean.dtype)
            between = (mean - self.mean).square()
            self.variance = (1.0 - share) * (self.variance + share * between) + share * variance
        super().update(values, weights)


def _share(new: Tensor, old: Tensor) -> Tensor:
    return new / (old + new).clamp_min(torch.finfo(new.dtype).tiny)


def _average(values: Tensor, weights: Tensor) -> Tensor:
    total = weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)  # a chunk may weigh nothing
    return mix(values, (weights / total).to(values.dtype))
