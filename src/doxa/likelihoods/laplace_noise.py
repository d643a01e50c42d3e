"""Laplace (double-exponential) likelihood; the network output is the median, and the mean.

    log p(y | f) = −|y − f|/b − log(2b),    E[y] = f,    Var[y] = 2b²

Its maximum is a regression of least absolute deviations: a row far from f has an influence on f
that does not grow with its distance. The tails are heavier than normal ones and lighter than those
of `StudentT`.

The density has a corner at y = f, and −log p has no curvature elsewhere. The curvature that Laplace
approximations use is the Fisher information E[(d log p/df)²] = 1/b² of Kotz, Kozubowski & Podgórski
(2001), section 2.6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Generator, Tensor

from doxa.likelihoods.base import (
    Likelihood,
    Shape,
    Theta,
    check_finite,
    check_match,
    diagonal,
    log_constant,
    per_row,
    positive,
    sum_event,
    uniform,
)

LOG_2 = math.log(2.0)


@dataclass(frozen=True)
class LaplaceNoise(Likelihood):
    """Laplace noise around f.

    Parameters
    ----------
    scale
        The scale b in units of y, one number or one for each output; the standard deviation is
        √2 b. Learned as theta["log_scale"], one number for all outputs, when None.
    """

    name: ClassVar[str] = "laplace-noise"
    link: ClassVar[str | None] = "mean"
    heavy_tailed: ClassVar[bool] = True
    log_scales: ClassVar[tuple[str, ...]] = ("log_scale",)
    scales_targets: ClassVar[bool] = True
    # b = Σ|e|/(m − 1) of m errors: the mean of |e| on a new row, for a flat prior of log b.
    degrees_of_freedom_correction: ClassVar[float] = 1.0

    scale: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", positive("scale", self.scale))

    def event(self, output: Shape) -> Shape:
        return tuple(output)

    def _check(self, y: Tensor, output: Shape) -> Tensor:
        return check_finite(y)

    def parameters(self, output: Shape) -> dict[str, Tensor]:
        return {} if self.scale is not None else {"log_scale": torch.zeros(())}

    def constants(self, output: Shape, scale: Tensor | None = None) -> dict[str, Tensor]:
        if self.scale is None:
            return {}
        return {"log_scale": log_constant("scale", self.scale, tuple(output), scale)}

    def log_prob(self, f: Tensor, y: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        check_match(f, y, lead)
        log_scale = self._log_scale(f, theta, lead)
        return sum_event(-(y - f).abs() * (-log_scale).exp() - log_scale - LOG_2, lead)

    def mean(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return f

    def variance(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return (2.0 * (2.0 * self._log_scale(f, theta, lead)).exp()).expand(f.shape)

    def constant(self, seen: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        seen, y = (t.double().reshape(len(t), -1) for t in (seen, y))
        each = torch.ones_like(seen[:, 0]) if weight is None else weight.to(seen)
        f, scale = _best_constant(seen, each)
        return (-(y - f).abs() / scale - scale.log() - LOG_2).sum(1)

    def constant_prediction(self, seen: Any, output: Shape) -> tuple[Likelihood, Tensor]:
        column = torch.as_tensor(np.asarray(seen)).double().reshape(-1, 1)
        f, scale = _best_constant(column, torch.ones_like(column[:, 0]))
        return LaplaceNoise(scale=float(scale[0])), f[0]

    def entropy(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return (1.0 + LOG_2 + self._log_scale(f, theta, lead)).expand(f.shape)

    def cdf(self, y: Tensor, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        z = (y - f) * (-self._log_scale(f, theta, lead)).exp()
        tail = 0.5 * (-z.abs()).exp()
        return torch.where(z > 0, 1.0 - tail, tail)

    def sample(self, f: Tensor, theta: Theta, generator: Generator, lead: int = 0) -> Tensor:
        # The difference of two exponentials; finite for any uniforms in (0, 1).
        shape = tuple(f.shape)
        ratio = uniform(f, shape, generator).log() - uniform(f, shape, generator).log()
        return f + self._log_scale(f, theta, lead).exp() * ratio

    def curvature(self, f: Tensor, theta: Theta, lead: int = 0, y: Tensor | None = None) -> Tensor:
        return diagonal(self.curvature_diagonal(f, theta, lead), lead)

    def curvature_diagonal(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return (-2.0 * self._log_scale(f, theta, lead)).exp().expand(f.shape)

    def _log_scale(self, f: Tensor, theta: Theta, lead: int) -> Tensor:
        own = 0 if self.scale is None else f.ndim - lead - 1
        return per_row(theta["log_scale"], own, f, lead)


def _best_constant(seen: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted median of each column of [N, D], and the mean distance from it: [D], [D]."""
    ordered, order = seen.sort(0)
    below = weight[order].cumsum(0)  # [N, D]
    half = 0.5 * weight.sum()
    median = ordered.gather(0, (below < half).sum(0, keepdim=True))[0]
    scale = (weight @ (seen - median).abs()) / weight.sum()
    return median, scale.clamp_min(torch.finfo(torch.float32).eps)
