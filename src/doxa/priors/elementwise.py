"""Heavy-tailed priors and mixtures, elementwise: each density with its prior below it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from doxa.errors import ModelError
from doxa.priors.base import HALF_LOG_2PI, Family, Prior, Values, normal, uniform


class LaplaceFamily(Family):
    """log p = -|x| / s - log 2s. The score at 0 is 0; the curvature is 0 everywhere else.

    E|x + std ε| = |x| erf z + std √(2/π) exp(-z^2) with z = |x| / (√2 std).
    """

    widens = True

    def derive(self, *, scale: Tensor) -> Values:  # type: ignore[override]
        return {"scale": scale, "rate": 1.0 / scale, "norm": -(2.0 * scale).log().sum(-1)}

    def log_prob(self, x: Tensor) -> Tensor:
        return self.at["norm"] - (x.abs() * self.at["rate"]).sum(-1)

    def score(self, x: Tensor) -> Tensor:
        return -x.sign() * self.at["rate"]

    def curvature(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def sample(self, n: int, generator: Generator) -> Tensor:
        # The sign and the size of one uniform on (-1, 1) are independent.
        u = 2.0 * uniform(n, self.at["scale"], generator) - 1.0
        return -self.at["scale"] * u.sign() * torch.log1p(-u.abs())

    def widening(self, x: Tensor, std: Tensor) -> Tensor:
        size, z = x.abs(), self._ratio(x, std)
        lost = std * math.sqrt(2.0 / math.pi) * (-z.square()).exp() - size * torch.erfc(z)
        return -(lost * self.at["rate"]).sum(-1)

    def widening_score(self, x: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        z, rate = self._ratio(x, std), self.at["rate"]
        by_std = -math.sqrt(2.0 / math.pi) * (-z.square()).exp() * rate
        return x.sign() * torch.erfc(z) * rate, by_std

    def _ratio(self, x: Tensor, std: Tensor) -> Tensor:
        return x.abs() / std.clamp_min(torch.finfo(std.dtype).tiny) * math.sqrt(0.5)


@dataclass(frozen=True)
class LaplacePrior(Prior):
    """Density exp(-|w - centre| / scale) / (2 scale)."""

    name = "laplace-prior"
    family = LaplaceFamily

    scale: float = 1.0


class StudentTFamily(Family):
    """log p = -(v+1)/2 log(1 + x^2 / (v s^2)) + constants"""

    def derive(self, *, scale: Tensor, df: Tensor) -> Values:  # type: ignore[override]
        half = 0.5 * (df + 1.0)
        norm = torch.lgamma(half) - torch.lgamma(0.5 * df) - 0.5 * (df * math.pi).log()
        return {
            "scale": scale,
            "df": df,
            "half": half,
            "width": df * scale.square(),
            "norm": (norm - scale.log()).sum(-1),
        }

    def log_prob(self, x: Tensor) -> Tensor:
        decay = self.at["half"] * torch.log1p(x.square() / self.at["width"])
        return self.at["norm"] - decay.sum(-1)

    def score(self, x: Tensor) -> Tensor:
        return -2.0 * self.at["half"] * x / (self.at["width"] + x.square())

    def curvature(self, x: Tensor) -> Tensor:
        square, width = x.square(), self.at["width"]
        return 2.0 * self.at["half"] * (width - square) / (width + square).square()

    def sample(self, n: int, generator: Generator) -> Tensor:
        # Bailey (1994): sqrt(v (U^(-2/v) - 1)) cos(2 pi V) is Student-t for uniform U and V.
        df, scale = self.at["df"], self.at["scale"]
        radius = (df * torch.expm1(-2.0 / df * uniform(n, df, generator).log())).sqrt()
        return scale * radius * torch.cos(2.0 * math.pi * uniform(n, df, generator))


@dataclass(frozen=True)
class StudentTPrior(Prior):
    """Student-t with df degrees of freedom: most weights small, a few large."""

    name = "student-t-prior"
    family = StudentTFamily

    df: float = 3.0
    scale: float = 1.0


class ScaleMixtureFamily(Family):
    """log p = log(w N(x; 0, s1^2) + (1 - w) N(x; 0, s2^2)); r is the share of the first term."""

    def derive(self, *, weight: Tensor, std1: Tensor, std2: Tensor) -> Values:  # type: ignore[override]
        return {
            "weight": weight,
            "std1": std1,
            "std2": std2,
            "precision1": std1**-2,
            "precision2": std2**-2,
            "log1": weight.log() - std1.log() - HALF_LOG_2PI,
            "log2": (1.0 - weight).log() - std2.log() - HALF_LOG_2PI,
        }

    def _logs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        half = 0.5 * x.square()
        first = self.at["log1"] - half * self.at["precision1"]
        return first, self.at["log2"] - half * self.at["precision2"]

    def _mixed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """r, and the precision averaged over r."""
        first, second = self._logs(x)
        share = torch.sigmoid(first - second)
        return share, torch.lerp(self.at["precision2"], self.at["precision1"], share)

    def log_prob(self, x: Tensor) -> Tensor:
        return torch.logaddexp(*self._logs(x)).sum(-1)

    def score(self, x: Tensor) -> Tensor:
        return -x * self._mixed(x)[1]

    def curvature(self, x: Tensor) -> Tensor:
        share, precision = self._mixed(x)
        gap = x * (self.at["precision1"] - self.at["precision2"])
        return precision - share * (1.0 - share) * gap.square()

    def sample(self, n: int, generator: Generator) -> Tensor:
        first = uniform(n, self.at["weight"], generator) < self.at["weight"]
        std = torch.where(first, self.at["std1"], self.at["std2"])
        return std * normal(n, self.at["weight"], generator)


@dataclass(frozen=True)
class ScaleMixture(Prior):
    """weight N(0, std1^2) + (1 - weight) N(0, std2^2), of Blundell et al. (2015)."""

    name = "scale-mixture"
    family = ScaleMixtureFamily

    weight: float = 0.5
    std1: float = 1.0
    std2: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight >= 1.0:
            raise ModelError(f"ScaleMixture: weight must lie between 0 and 1, got {self.weight}")


class FlowFamily(Family):
    """An elementwise flow of standard normals, in closed form (Johnson, 1949: "SU"):

        w = (s/t) sinh(t ε),  ε ~ N(0, 1);    ε = asinh(r)/t with r = t w/s

        log p(w) = −ε²/2 − log s − log(2π)/2 − log(1 + r²)/2

    t → 0 is N(0, s²). The larger t, the heavier the tails: most weights are small, and a few are
    large.
    """

    def derive(self, *, scale: Tensor, tail: Tensor) -> Values:  # type: ignore[override]
        norm = -(scale.log() + HALF_LOG_2PI).sum(-1)
        return {"scale": scale, "tail": tail, "slope": tail / scale, "norm": norm}

    def _back(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ε, r and 1/(1 + r²)."""
        r = x * self.at["slope"]
        return torch.asinh(r) / self.at["tail"], r, 1.0 / (1.0 + r.square())

    def log_prob(self, x: Tensor) -> Tensor:
        eps, r, _ = self._back(x)
        return self.at["norm"] - 0.5 * (eps.square() + torch.log1p(r.square())).sum(-1)

    def score(self, x: Tensor) -> Tensor:
        eps, r, share = self._back(x)
        return -(eps * share.sqrt() + self.at["tail"] * r * share) / self.at["scale"]

    def curvature(self, x: Tensor) -> Tensor:
        eps, r, share = self._back(x)
        tail = self.at["tail"]
        turned = 1.0 - eps * tail * r * share.sqrt() + tail.square() * (1.0 - r.square()) * share
        return turned * share / self.at["scale"].square()

    def sample(self, n: int, generator: Generator) -> Tensor:
        scale, tail = self.at["scale"], self.at["tail"]
        return scale * torch.sinh(tail * normal(n, scale, generator)) / tail


@dataclass(frozen=True)
class FlowPrior(Prior):
    """(scale/tail) sinh(tail ε) of a standard normal ε for every element, the flow of Johnson
    (1949).

    For `tail` near 0 it is N(0, scale²). The larger `tail`, the heavier the tails.
    """

    name = "flow-prior"
    family = FlowFamily

    scale: float = 1.0
    tail: float = 0.5
