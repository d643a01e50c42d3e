"""Student-t likelihood: regression that outliers cannot drag.

log p = lgamma((v+1)/2) - lgamma(v/2) - log(v pi)/2 - log s - (v+1)/2 log(1 + z^2/v),
z = (y - f) / s
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Generator, Tensor

from doxa.errors import ModelError
from doxa.likelihoods.base import (
    Likelihood,
    Shape,
    Theta,
    check_match,
    diagonal,
    log_constant,
    per_row,
    positive,
    sum_event,
    uniform,
)
from doxa.likelihoods.targets import check_finite


@dataclass(frozen=True)
class StudentT(Likelihood):
    """Student-t noise around f.

    Parameters
    ----------
    df
        Degrees of freedom v >= 1. Learned when None, as v = 2 + 4 exp(theta["log_df"]): the
        variance then always exists, and the prior log_df ~ N(0, 1) has its median at v = 6 and
        95 % of its mass in 2.6 to 30. A given df of 2 or less has infinite variance.
    scale
        The scale s in units of y, one number or one for each output; theta["log_scale"],
        learned, when None.
    """

    name: ClassVar[str] = "student-t"
    scales_targets: ClassVar[bool] = True

    df: float | None = None
    scale: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", positive("scale", self.scale))
        if self.df is not None and not 1.0 <= self.df < math.inf:
            raise ModelError(f"df must be at least 1 and finite, got {self.df}")

    def event(self, output: Shape) -> Shape:
        return tuple(output)

    def _check(self, y: Tensor, output: Shape) -> Tensor:
        return check_finite(y)

    def parameters(self, output: Shape) -> dict[str, Tensor]:
        learned = {} if self.scale is not None else {"log_scale": torch.zeros(())}
        return learned if self.df is not None else {**learned, "log_df": torch.zeros(())}

    def constants(self, output: Shape, scale: Tensor | None = None) -> dict[str, Tensor]:
        if self.scale is None:
            return {}
        return {"log_scale": log_constant("scale", self.scale, tuple(output), scale)}

    def log_prob(self, f: Tensor, y: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        check_match(f, y, lead)
        log_scale, df = self._log_scale(f, theta, lead), self._df(f, theta, lead)
        half = 0.5 * (df + 1.0)
        norm = torch.lgamma(half) - torch.lgamma(0.5 * df) - 0.5 * (df * math.pi).log() - log_scale
        z = (y - f) * (-log_scale).exp()
        return sum_event(norm - half * torch.log1p(z.square() / df), lead)

    def mean(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        """f, the centre (which at df = 1 is no mean)."""
        return f

    def variance(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        df, log_scale = self._df(f, theta, lead), self._log_scale(f, theta, lead)
        finite = (2.0 * log_scale).exp() * df / (df - 2.0)
        return torch.where(df > 2.0, finite, math.inf).expand(f.shape)

    def entropy(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        df, log_scale = self._df(f, theta, lead), self._log_scale(f, theta, lead)
        half, rest = 0.5 * (df + 1.0), 0.5 * df
        log_beta = torch.lgamma(rest) + math.lgamma(0.5) - torch.lgamma(half)
        spread = half * (torch.digamma(half) - torch.digamma(rest))
        return (spread + 0.5 * df.log() + log_beta + log_scale).expand(f.shape)

    def cdf(self, y: Tensor, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        z = (y - f) * (-self._log_scale(f, theta, lead)).exp()
        upper = _upper_tail(z.double().abs(), self._df(f, theta, lead).double())
        return torch.where(z > 0, 1.0 - upper, upper).to(z.dtype)

    def sample(self, f: Tensor, theta: Theta, generator: Generator, lead: int = 0) -> Tensor:
        # Bailey (1994): sqrt(v (U^(-2/v) - 1)) cos(2 pi V) is Student-t for uniform U and V.
        df, scale = self._df(f, theta, lead), self._log_scale(f, theta, lead).exp()
        shape = tuple(f.shape)
        radius = (df * torch.expm1(-2.0 / df * uniform(f, shape, generator).log())).sqrt()
        return f + scale * radius * torch.cos(2.0 * math.pi * uniform(f, shape, generator))

    def curvature(self, f: Tensor, theta: Theta, lead: int = 0, y: Tensor | None = None) -> Tensor:
        df, log_scale = self._df(f, theta, lead), self._log_scale(f, theta, lead)
        fisher = (df + 1.0) / (df + 3.0) * (-2.0 * log_scale).exp()
        return diagonal(fisher.expand(f.shape), lead)

    def _log_scale(self, f: Tensor, theta: Theta, lead: int) -> Tensor:
        own = 0 if self.scale is None else f.ndim - lead - 1
        return per_row(theta["log_scale"], own, f, lead)

    def _df(self, f: Tensor, theta: Theta, lead: int) -> Tensor:
        if self.df is not None:
            return torch.full((), self.df, dtype=f.dtype, device=f.device)
        return 2.0 + 4.0 * per_row(theta["log_df"], 0, f, lead).exp()


def _upper_tail(t: Tensor, df: Tensor) -> Tensor:
    """P(T > t) for t >= 0, float64: with t = sqrt(v) cot(a) it is the ratio of
    integral_0^a sin^(v-1) to twice the same integral up to pi/2."""
    angle = torch.atan2(df.sqrt(), t)
    return 0.5 * _sine_integral(angle, df) / _sine_integral(torch.full_like(df, math.pi / 2), df)


def _sine_integral(angle: Tensor, df: Tensor) -> Tensor:
    """integral of sin^(v-1) from 0 to angle, by Gauss-Legendre quadrature. Squaring the nodes
    smooths the end at 0; below the cut the integrand is under e^-45 of its value at angle."""
    width = torch.minimum(angle, 9.5 / (df - 1.0).clamp_min(1e-3).sqrt())
    total = torch.zeros_like(width)
    for node, weight in _legendre():
        sine = torch.sin(angle - width * (1.0 - node * node))
        total = total + 2.0 * node * weight * sine.clamp_min(0.0) ** (df - 1.0)
    return total * width


@cache
def _legendre() -> tuple[tuple[float, float], ...]:
    """24 nodes and weights on (0, 1): within 3e-10 for every v >= 1."""
    import numpy

    nodes, weights = numpy.polynomial.legendre.leggauss(24)
    return tuple(zip(((nodes + 1) / 2).tolist(), (weights / 2).tolist(), strict=True))
