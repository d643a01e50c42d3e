"""Gaussian and Student-t likelihoods, with one noise level or one that depends on the input.

y = f(x) + sigma e,  e ~ N(0, 1):   log p = -(y - f)^2 / (2 sigma^2) - log sigma - log(2 pi)/2

Where the user does not choose a likelihood, Gaussian noise may be wrong: errors of very different
sizes have heavier tails, and a few large errors widen every interval. So Student-t noise replaces
it where held-out rows are clearly more likely under Student-t noise: twice the log likelihood ratio
must exceed 6.63. With Gaussian noise this happens in one fit out of two hundred (half of
chi-squared with one degree of freedom). The scale is estimated as if there were two rows fewer,
like the Gaussian noise level (`method/stage.py`).

Student-t likelihood, for regression that is robust to outliers:

log p = lgamma((v+1)/2) - lgamma(v/2) - log(v pi)/2 - log s - (v+1)/2 log(1 + z^2/v),
z = (y - f) / s
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import torch
from torch import Generator, Tensor
from torch.nn.functional import softplus

from doxa.errors import ModelError
from doxa.likelihoods.base import (
    CalibratedLikelihood,
    Likelihood,
    Shape,
    Theta,
    check_finite,
    check_match,
    diagonal,
    log_constant,
    log_mean_prob,
    map_estimate,
    normal,
    per_row,
    positive,
    sum_event,
    uniform,
)


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
    link: ClassVar[str | None] = "mean"
    heavy_tailed: ClassVar[bool] = True
    log_scales: ClassVar[tuple[str, ...]] = ("log_scale",)
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
        """f, the centre (at df = 1 the mean does not exist)."""
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
        return diagonal(self.curvature_diagonal(f, theta, lead), lead)

    def curvature_diagonal(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        df, log_scale = self._df(f, theta, lead), self._log_scale(f, theta, lead)
        return ((df + 1.0) / (df + 3.0) * (-2.0 * log_scale).exp()).expand(f.shape)

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


_DEGREES = (3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0)  # with finite variance
_MOST, _SPREAD = 2.0, 5.0  # log(scale / fitted noise level): largest size, prior deviation
_CLEAR = 6.63  # twice the log likelihood ratio

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


def standard_normal_cdf(z: Tensor) -> Tensor:
    below: Tensor = torch.special.ndtr(z)
    return below


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """Gaussian noise of one standard deviation everywhere.

    Parameters
    ----------
    noise
        The standard deviation in units of y, one number or one for each output. Learned as
        theta["log_noise"] when None.
    per_output
        Learn one standard deviation for each output instead of one for all.
    assumed
        The likelihood was inferred, not given: held-out rows may replace it by Student-t noise.
    """

    name: ClassVar[str] = "gaussian"
    link: ClassVar[str | None] = "mean"
    constants_per_run: ClassVar[bool] = True
    log_scales: ClassVar[tuple[str, ...]] = ("log_noise",)
    scales_targets: ClassVar[bool] = True
    degrees_of_freedom_correction: ClassVar[float] = 2.0  # σ² = Σ e²/(m − 2) of m errors

    noise: float | Sequence[float] | None = None
    per_output: bool = False
    assumed: bool = field(default=False, kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.noise is None:
            return
        object.__setattr__(self, "noise", positive("noise", self.noise))
        if self.per_output:
            raise ModelError("per_output learns the noise; give noise one number for each output")

    @property
    def is_normal(self) -> bool:
        return True

    @property
    def integrates_normal(self) -> bool:
        return True

    @property
    def learns_noise(self) -> bool:
        return self.noise is None

    @property
    def calibrates_on_held_out(self) -> bool:
        return self.assumed and self.noise is None and not self.per_output

    def calibrate_held_out(
        self, f: Tensor, y: Tensor, theta: Theta, weight: Tensor, stopped: int = 1,
        clear: float = _CLEAR,
    ) -> CalibratedLikelihood | None:  # fmt: skip
        """Student-t noise with its degrees of freedom and scale, where held-out rows are clearly
        more likely under it: twice the log likelihood ratio exceeds `clear`."""

        def score(u: float, df: float | None = None) -> Tensor:
            if df is None:
                return log_mean_prob(self.log_prob(f, y, {"log_noise": theta["log_noise"] + u}, 1))
            scale = {"log_scale": theta["log_noise"] + u}
            return log_mean_prob(StudentT(df=df).log_prob(f, y, scale, 1))

        def best(df: float | None) -> tuple[float, float]:
            fewer = self.degrees_of_freedom_correction
            u = map_estimate(lambda u: score(u, df), weight, _MOST, _SPREAD, fewer)
            return float((weight * score(u, df)).sum()), u

        found = {df: best(df) for df in _DEGREES}
        df = max(_DEGREES, key=lambda df: found[df])
        gained = found[df][0] - best(None)[0]
        if not 2.0 * gained > clear:
            return None
        message = f"student-t with {df:g} degrees of freedom"
        moved = {"log_scale": found[df][1]}
        return CalibratedLikelihood(StudentT(df=df), message, moved, gained / float(weight.sum()))

    def event(self, output: Shape) -> Shape:
        return tuple(output)

    def _check(self, y: Tensor, output: Shape) -> Tensor:
        return check_finite(y)

    def parameters(self, output: Shape) -> dict[str, Tensor]:
        if self.noise is not None:
            return {}
        return {"log_noise": torch.zeros(tuple(output) if self.per_output else ())}

    def constants(self, output: Shape, scale: Tensor | None = None) -> dict[str, Tensor]:
        if self.noise is None:
            return {}
        return {"log_noise": log_constant("noise", self.noise, tuple(output), scale)}

    def log_prob(self, f: Tensor, y: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        check_match(f, y, lead)
        squares = (y - f).square()
        size = math.prod(f.shape[lead + 1 :])
        if self._own(f, lead) == 0 or size == 1:  # one noise level: sum first, then scale
            log_noise = theta["log_noise"].to(f.dtype)
            if log_noise.ndim:
                lead_shape = log_noise.shape[: max(log_noise.ndim - self._own(f, lead), 0)]
                log_noise = log_noise.reshape((*lead_shape, 1))  # [*lead, 1]
            norm = -size * (log_noise + HALF_LOG_2PI)
            return torch.addcmul(
                norm, sum_event(squares, lead), (-2.0 * log_noise).exp(), value=-0.5
            )
        log_noise = self._log_noise(f, theta, lead)
        scaled = sum_event(squares * (-2.0 * log_noise).exp(), lead)
        norm = sum_event(log_noise.expand((*f.shape[:lead], 1, *f.shape[lead + 1 :])), lead)
        return -0.5 * scaled - norm - size * HALF_LOG_2PI

    def mean(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return f

    def variance(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return (2.0 * self._log_noise(f, theta, lead)).exp().expand(f.shape)

    def entropy(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return (self._log_noise(f, theta, lead) + (HALF_LOG_2PI + 0.5)).expand(f.shape)

    def cdf(self, y: Tensor, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        z = (y - f) * (-self._log_noise(f, theta, lead)).exp()
        return standard_normal_cdf(z)

    def sample(self, f: Tensor, theta: Theta, generator: Generator, lead: int = 0) -> Tensor:
        noise = self._log_noise(f, theta, lead).exp()
        return f + noise * normal(f, tuple(f.shape), generator)

    def curvature(self, f: Tensor, theta: Theta, lead: int = 0, y: Tensor | None = None) -> Tensor:
        return diagonal(self.curvature_diagonal(f, theta, lead), lead)

    def curvature_diagonal(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return (-2.0 * self._log_noise(f, theta, lead)).exp().expand(f.shape)

    def _own(self, f: Tensor, lead: int) -> int:
        """The number of axes of the noise level, besides `lead`."""
        return f.ndim - lead - 1 if self.per_output or self.noise is not None else 0

    def _log_noise(self, f: Tensor, theta: Theta, lead: int) -> Tensor:
        return per_row(theta["log_noise"], self._own(f, lead), f, lead)


@dataclass(frozen=True)
class HeteroscedasticGaussian(Likelihood):
    """Gaussian noise whose standard deviation the network predicts.

    The first output axis has 2D entries: D means, then D values s with

        sigma = softplus(s) + floor

    The floor, in fitted units, keeps the density bounded where the network fits a point
    exactly; 1e-3 is the 1e-6 on the variance of Lakshminarayanan et al. (2017). Give a smaller
    one, or standardise, if the noise itself may be as small.
    """

    name: ClassVar[str] = "heteroscedastic"
    link: ClassVar[str | None] = "mean"
    predicts_noise: ClassVar[bool] = True
    scales_targets: ClassVar[bool] = True

    floor: float = 1e-3

    def __post_init__(self) -> None:
        object.__setattr__(self, "floor", positive("floor", self.floor))

    @property
    def is_normal(self) -> bool:
        return True

    def event(self, output: Shape) -> Shape:
        if not output or output[0] % 2 or output[0] == 0:
            raise ModelError(
                "a heteroscedastic likelihood needs two network outputs for each target (a mean "
                f"and a scale) on the first axis, got outputs of shape {tuple(output)}"
            )
        return (output[0] // 2, *output[1:])

    def outputs(self, y: Tensor) -> Shape:
        first, *rest = tuple(y.shape[1:]) or (1,)
        return (2 * first, *rest)

    def _check(self, y: Tensor, output: Shape) -> Tensor:
        return check_finite(y)

    def log_prob(self, f: Tensor, y: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        mean, std = self._split(f, lead)
        check_match(mean, y, lead)
        each = -0.5 * ((y - mean) / std).square() - std.log()
        return sum_event(each, lead) - math.prod(mean.shape[lead + 1 :]) * HALF_LOG_2PI

    def location(self, f: Tensor, lead: int = 0) -> Tensor:
        return f.narrow(lead + 1, 0, f.shape[lead + 1] // 2)

    def location_variance(self, variance: Tensor, lead: int = 0) -> Tensor:
        return self.location(variance, lead)

    def mean(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return self.location(f, lead)

    def variance(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return self._split(f, lead)[1].square()

    def entropy(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return self._split(f, lead)[1].log() + (HALF_LOG_2PI + 0.5)

    def cdf(self, y: Tensor, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        mean, std = self._split(f, lead)
        return standard_normal_cdf((y - mean) / std)

    def sample(self, f: Tensor, theta: Theta, generator: Generator, lead: int = 0) -> Tensor:
        mean, std = self._split(f, lead)
        return mean + std * normal(f, tuple(mean.shape), generator)

    def curvature(self, f: Tensor, theta: Theta, lead: int = 0, y: Tensor | None = None) -> Tensor:
        return diagonal(self.curvature_diagonal(f, theta, lead), lead)

    def curvature_diagonal(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        mean, std = self._split(f, lead)
        slope = torch.sigmoid(f.narrow(lead + 1, mean.shape[lead + 1], mean.shape[lead + 1]))
        # Fisher information of (mean, sigma) is diag(1, 2) / sigma^2; the chain rule gives s.
        return torch.cat([std**-2, 2.0 * (slope / std).square()], dim=lead + 1)

    def _split(self, f: Tensor, lead: int) -> tuple[Tensor, Tensor]:
        mean, raw = f.chunk(2, dim=lead + 1)
        return mean, softplus(raw) + self.floor
