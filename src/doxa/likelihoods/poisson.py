"""Poisson likelihood of counts; the network output is the log rate.

log p = y f - exp(f) - log y!
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Generator, Tensor

from doxa.likelihoods.base import (
    Likelihood,
    Shape,
    Theta,
    check_match,
    check_whole,
    diagonal,
    require,
    sum_event,
)

_LARGE_RATE = 64.0
_TERMS = 160  # 12 standard deviations above the mean at _LARGE_RATE


@dataclass(frozen=True)
class Poisson(Likelihood):
    """Counts 0, 1, 2, ... with rate exp(f)."""

    name: ClassVar[str] = "poisson"
    link: ClassVar[str | None] = "log"
    discrete: ClassVar[bool] = True
    counts: ClassVar[bool] = True

    def event(self, output: Shape) -> Shape:
        return tuple(output)

    def _check(self, y: Tensor, output: Shape) -> Tensor:
        y = check_whole(y)
        require(y, y >= 0, "is negative: a Poisson target is a count")
        return y.to(torch.get_default_dtype()) if y.dtype != torch.float64 else y

    def log_prob(self, f: Tensor, y: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        check_match(f, y, lead)
        return sum_event(y * f - f.exp() - torch.lgamma(y + 1.0), lead)

    def mean(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return f.exp()

    def variance(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return f.exp()

    def constant_prediction(self, seen: Any, output: Shape) -> tuple[Likelihood, Tensor]:
        return self, torch.tensor(math.log(max(float(np.asarray(seen).mean()), 1e-3)))

    def entropy(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        """-sum p log p term by term for rates up to 64, the asymptotic series above (1e-8)."""
        small = f.clamp(-80.0, math.log(_LARGE_RATE))
        rate = small.exp()
        exact = torch.zeros_like(f)
        for count in range(_TERMS):
            log_p = count * small - rate - math.lgamma(count + 1.0)
            exact = exact - log_p.exp() * log_p
        large = f.clamp_min(math.log(_LARGE_RATE))
        inverse = (-large).exp()
        series = inverse * (1 / 12 + inverse * (1 / 24 + inverse * 19 / 360))
        asymptotic = 0.5 * (math.log(2.0 * math.pi * math.e) + large) - series
        return torch.where(f <= math.log(_LARGE_RATE), exact, asymptotic)

    def cdf(self, y: Tensor, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        y = y.to(f.dtype)
        inside = torch.special.gammaincc(y.floor().clamp_min(0.0) + 1.0, f.exp())
        return torch.where(y < 0, 0.0, inside)

    def sample(self, f: Tensor, theta: Theta, generator: Generator, lead: int = 0) -> Tensor:
        rate = f.detach().exp().to(generator.device)
        return torch.poisson(rate, generator=generator).to(f.device)

    def curvature(self, f: Tensor, theta: Theta, lead: int = 0, y: Tensor | None = None) -> Tensor:
        return diagonal(self.curvature_diagonal(f, theta, lead), lead)

    def curvature_diagonal(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return f.exp()
