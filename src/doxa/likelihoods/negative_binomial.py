"""Negative binomial likelihood of overdispersed counts; the network output is the log mean.

With mean μ = exp(f) and concentration r > 0, y is Poisson with a Gamma(r, r/μ) rate:

    log p = lgamma(y + r) − lgamma(r) − lgamma(y + 1) + y log(μ/(r + μ)) + r log(r/(r + μ))
    E[y] = μ,    Var[y] = μ + μ²/r

This is the parametrisation "NB2" of Cameron & Trivedi (1986), with 1/r their dispersion α; it is
scipy's nbinom(n=r, p=r/(r + μ)). r → ∞ is Poisson noise.

The entropy follows from Malmstén's integral for log Γ and the probability generating function
G(t) = E exp(−t y) = (1 + (μ/r)(1 − exp(−t)))^(−r):

    H = r log(1 + μ/r) + μ log(1 + r/μ) − ∫₀^∞ (e^(−t) − e^(−rt)) (1 − G(t)) / (1 − e^(−t)) dt/t

`Counts` is Poisson noise in training, whose estimate of the mean is right for overdispersed counts,
too (Gourieroux, Monfort & Trognon, 1984). Held-out rows then choose: negative binomial with their
r, if twice the log of the likelihood ratio to Poisson noise exceeds 5.41, else Poisson. On the
boundary r → ∞ the ratio follows ½χ²₀ + ½χ²₁ (Self & Liang, 1987): the test has the size 0.01.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn.functional import logsigmoid, softplus

from doxa.likelihoods.base import (
    CalibratedLikelihood,
    Likelihood,
    Shape,
    Theta,
    check_match,
    check_whole,
    diagonal,
    log_constant,
    log_mean_prob,
    map_estimate,
    per_row,
    positive,
    require,
    sum_event,
)
from doxa.likelihoods.poisson import Poisson

_LARGE = 16.0  # concentrations from which Stirling's series replaces lgamma
_NODES = 192  # of the trapezoidal rule for the entropy
_NORMAL = 1e6  # mean and concentration from which the entropy is that of a normal
_ITERATIONS = 20_000  # of the continued fraction, at most; it needs about √(y + r)
_LOG_R = 10.0  # largest |log r| of a constant prediction


@dataclass(frozen=True)
class NegativeBinomial(Likelihood):
    """Counts 0, 1, 2, ... with mean exp(f) and variance μ + μ²/r.

    Parameters
    ----------
    concentration
        r, one number or one for each output. The smaller, the more the counts vary beyond a
        Poisson. Learned as theta["log_concentration"], one number for all outputs, when None: the
        prior log r ~ N(0, 1) has its median at r = 1 and 95 % of its mass in 0.14 to 7.1.
    """

    name: ClassVar[str] = "negative-binomial"
    link: ClassVar[str | None] = "log"
    discrete: ClassVar[bool] = True
    counts: ClassVar[bool] = True

    concentration: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "concentration", positive("concentration", self.concentration))

    def event(self, output: Shape) -> Shape:
        return tuple(output)

    def _check(self, y: Tensor, output: Shape) -> Tensor:
        y = check_whole(y)
        require(y, y >= 0, "is negative: a negative binomial target is a count")
        return y.to(torch.get_default_dtype()) if y.dtype != torch.float64 else y

    def parameters(self, output: Shape) -> dict[str, Tensor]:
        return {} if self.concentration is not None else {"log_concentration": torch.zeros(())}

    def constants(self, output: Shape, scale: Tensor | None = None) -> dict[str, Tensor]:
        if self.concentration is None:
            return {}
        given = log_constant("concentration", self.concentration, tuple(output), None)
        return {"log_concentration": given}

    def log_prob(self, f: Tensor, y: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        check_match(f, y, lead)
        log_r = self._log_r(f, theta, lead)
        r = log_r.exp()
        # (r + y) log(1 + μ/r) joins the powers of r + μ; y log r is part of `_rising`.
        each = _rising(y, r) - (r + y) * softplus(f - log_r) + y * f - torch.lgamma(y + 1.0)
        return sum_event(each, lead)

    def mean(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return f.exp()

    def variance(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        return f.exp() + (2.0 * f - self._log_r(f, theta, lead)).exp()

    def constant(self, seen: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        seen, y = (t.double().reshape(len(t), -1) for t in (seen, y))
        each = torch.ones_like(seen[:, 0]) if weight is None else weight.to(seen)
        likelihood, f = self._best_constant(seen, each)
        return likelihood.log_prob(f.expand_as(y), y, likelihood.constants(tuple(f.shape)))

    def constant_prediction(self, seen: Any, output: Shape) -> tuple[Likelihood, Tensor]:
        column = torch.as_tensor(np.asarray(seen)).double().reshape(-1, 1)
        likelihood, f = self._best_constant(column, torch.ones_like(column[:, 0]))
        return likelihood, f[0]

    def _best_constant(self, seen: Tensor, weight: Tensor) -> tuple[NegativeBinomial, Tensor]:
        """The maximum-likelihood constant of counts [N, D]: f [D] is the log of the mean for any
        r, and one r for all columns is found by golden section."""
        f = (weight @ seen / weight.sum()).clamp_min(1e-3).log()
        if self.concentration is not None:
            return self, f

        def score(log_r: float) -> Tensor:
            theta = {"log_concentration": torch.tensor(log_r).to(seen)}
            return self.log_prob(f.expand_as(seen), seen, theta)

        log_r = map_estimate(score, weight, _LOG_R, math.inf)
        return NegativeBinomial(concentration=math.exp(log_r)), f

    def entropy(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        """By the trapezoidal rule in log t, within 1e-8; within 1e-6 where both the mean and r are
        above 10⁶, by a normal of the same variance."""
        log_r = self._log_r(f, theta, lead).double().expand(f.shape)
        log_mean = f.double()
        normal = torch.minimum(log_r, log_mean) > math.log(_NORMAL)
        variance = log_mean + softplus(log_mean - log_r)  # its logarithm
        by_normal = 0.5 * (math.log(2.0 * math.pi * math.e) + variance)
        log_r = torch.where(normal, 0.0, log_r).clamp(-30.0, 80.0)
        log_mean = torch.where(normal, 0.0, log_mean).clamp(-80.0, 80.0)
        r, mean = log_r.exp(), log_mean.exp()
        low = -30.0 - log_r.clamp_min(0.0) - log_mean.clamp_min(0.0)
        high = math.log(45.0) - log_r.clamp_max(0.0)
        step = (high - low) / (_NODES - 1)
        total = torch.zeros_like(r)
        for k in range(_NODES):
            t = (low + k * step).exp()
            one = -torch.expm1(-t)  # 1 − e^(−t)
            missing = -torch.expm1(-r * torch.log1p(mean / r * one))  # 1 − G(t)
            total = total + (-one - torch.expm1(-r * t)) * missing / one
        start = r * softplus(log_mean - log_r) + mean * softplus(log_r - log_mean)
        return torch.where(normal, by_normal, start - step * total).to(f.dtype)

    def cdf(self, y: Tensor, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        """The regularised incomplete beta function I_p(r, ⌊y⌋ + 1) at p = r/(r + μ)."""
        log_r = self._log_r(f, theta, lead).double()
        y = y.double().floor()
        inside = _incomplete_beta(log_r.exp(), y.clamp_min(0.0) + 1.0, log_r - f.double())
        return torch.where(y < 0, 0.0, inside).to(f.dtype)

    def sample(self, f: Tensor, theta: Theta, generator: Generator, lead: int = 0) -> Tensor:
        log_r = self._log_r(f, theta, lead).expand(f.shape)
        shape = log_r.detach().double().exp().to(generator.device)
        gamma = torch._standard_gamma(shape, generator=generator)
        rate = gamma * (f - log_r).detach().double().exp().to(generator.device)
        return torch.poisson(rate, generator=generator).to(f)

    def curvature(self, f: Tensor, theta: Theta, lead: int = 0, y: Tensor | None = None) -> Tensor:
        return diagonal(self.curvature_diagonal(f, theta, lead), lead)

    def curvature_diagonal(self, f: Tensor, theta: Theta, lead: int = 0) -> Tensor:
        """μ r/(μ + r)."""
        return (f - softplus(f - self._log_r(f, theta, lead))).exp()

    def _log_r(self, f: Tensor, theta: Theta, lead: int) -> Tensor:
        own = 0 if self.concentration is None else f.ndim - lead - 1
        return per_row(theta["log_concentration"], own, f, lead)


_CLEAR = 5.41  # twice the log likelihood ratio at the level 0.01 of ½χ²₀ + ½χ²₁


@dataclass(frozen=True)
class Counts(Poisson):
    """Counts 0, 1, 2, ... that held-out rows make Poisson or negative binomial.

    Training is that of `Poisson`. Without held-out rows it stays Poisson.
    """

    name: ClassVar[str] = "counts"

    @property
    def calibrates_on_held_out(self) -> bool:
        return True

    def calibrate_held_out(
        self, f: Tensor, y: Tensor, theta: Theta, weight: Tensor, stopped: int = 1
    ) -> CalibratedLikelihood:
        """Negative binomial noise with r from held-out rows where they are overdispersed, else
        Poisson noise."""
        f, y = f.double(), y.double()

        def score(log_r: float) -> Tensor:
            at = {"log_concentration": torch.tensor(log_r).to(f)}
            return log_mean_prob(NegativeBinomial().log_prob(f, y, at, 1))

        log_r = map_estimate(score, weight, _LOG_R, math.inf)
        poisson = log_mean_prob(self.log_prob(f, y, {}, 1))
        if not 2.0 * float((weight * (score(log_r) - poisson)).sum()) > _CLEAR:
            return CalibratedLikelihood(Poisson(), "poisson")
        r = float(f"{math.exp(log_r):.3g}")
        return CalibratedLikelihood(
            NegativeBinomial(concentration=r), f"negative binomial with concentration {r:g}"
        )


def _rising(y: Tensor, r: Tensor) -> Tensor:
    """lgamma(y + r) − lgamma(r) − y log r.

    For large r the difference would cancel; Stirling's series gives it without large terms:
    (r + y − ½) log(1 + y/r) − y + s(y + r) − s(r).
    """
    small, large = r.clamp_max(_LARGE), r.clamp_min(_LARGE)
    direct = torch.lgamma(y + small) - torch.lgamma(small) - y * small.log()
    series = (large + y - 0.5) * torch.log1p(y / large) - y
    series = series + _stirling(y + large) - _stirling(large)
    return torch.where(r < _LARGE, direct, series)


def _stirling(x: Tensor) -> Tensor:
    """lgamma(x) − ((x − ½) log x − x + ½ log 2π), within 1e-14 for x ≥ 16."""
    inverse = 1.0 / x
    square = inverse * inverse
    tail = 1 / 1260 - square * (1 / 1680 - square / 1188)
    return inverse * (1 / 12 - square * (1 / 360 - square * tail))


def _incomplete_beta(a: Tensor, b: Tensor, log_odds: Tensor) -> Tensor:
    """I_x(a, b) at x = σ(log_odds), float64, by its continued fraction (Lentz's method; Press et
    al., Numerical Recipes, 6.4), which converges fast below (a + 1)/(a + b + 2)."""
    a, b, log_odds = torch.broadcast_tensors(a, b, log_odds)
    upper = torch.sigmoid(log_odds) > (a + 1.0) / (a + b + 2.0)  # then 1 − I_(1 − x)(b, a)
    a, b = torch.where(upper, b, a), torch.where(upper, a, b)
    log_odds = torch.where(upper, -log_odds, log_odds)
    x, tiny = torch.sigmoid(log_odds), 1e-300
    power = a * logsigmoid(log_odds) + b * logsigmoid(-log_odds)
    front = (power + torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)).exp() / a

    def bounded(value: Tensor) -> Tensor:
        return torch.where(value.abs() < tiny, tiny, value)

    c, d = torch.ones_like(x), 1.0 / bounded(1.0 - (a + b) * x / (a + 1.0))
    total = d
    for m in range(1, _ITERATIONS):
        even = m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0))
        change = torch.ones_like(x)
        for term in (even, odd):
            d, c = 1.0 / bounded(1.0 + term * d), bounded(1.0 + term / c)
            change = change * d * c
        total = total * change
        if not bool(((change - 1.0).abs() > 1e-14).any()):
            break
    found = front * total
    return torch.where(upper, 1.0 - found, found).clamp(0.0, 1.0)
