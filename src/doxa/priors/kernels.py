"""Kernels, each a function of one product of matrices, for all members at once.

    rbf        exp(−½ r²),  r² = Σ_d (x_d − x'_d)²/ℓ_d²        linear      xᵀx'
    matern12   exp(−r)                                         polynomial2 (xᵀx' + c)²
    matern32   (1 + √3 r) exp(−√3 r)                           polynomial3 (xᵀx' + c)³
    matern52   (1 + √5 r + 5r²/3) exp(−√5 r)                   constant    1
    rq         (1 + r²/2α)^−α
    periodic   exp(−2 Σ_d sin²(π(x_d − x'_d)/p_d)/ℓ_d²)
    cosine     the mean over d of cos(2π(x_d − x'_d)/p_d)

    relu1, relu2, relu3   of an infinitely wide network with so many hidden layers: K ← 2E[φφ'] by
               the closed form below, from K₀ = 1 + Σ_d x_d x'_d/ℓ_d² (Cho & Saul, 2009)

"matern" is matern52. Rasmussen & Williams (2006), ch. 4. Their gradients are such products, too.
Gaussian processes compose them (`doxa/function/composed.py`), and priors over functions have one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Squared distances below this share of the largest squared length are of equal rows.
_SAME = {torch.float64: 1e-14}
_SAME_SINGLE = 1e-6


class Place(NamedTuple):
    """Rows on both sides: a [..., N, D], b [..., N', D]; `diag` pairs them off."""

    a: Tensor
    b: Tensor
    diag: bool

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(-1) if self.diag else a @ b.mT

    def squared(self, scale: Tensor, exact: float = 0.0) -> Tensor:
        """r² = Σ_d (a_d − b_d)²/scale_d²: by a product, about a centre that keeps its digits."""
        if self.diag:
            return ((self.a - self.b) / scale).square().sum(-1)
        centre = self.b.mean(-2, keepdim=True)
        a, b = (self.a - centre) / scale, (self.b - centre) / scale
        own, other = a.square().sum(-1, keepdim=True), b.square().sum(-1, keepdim=True)
        a = torch.cat([-2.0 * a, own, torch.ones_like(own)], -1)
        b = torch.cat([b, torch.ones_like(other), other], -1)
        squared = a @ b.mT
        return squared - exact * other.detach().amax(-2, keepdim=True) if exact else squared

    def distance(self, scale: Tensor) -> Tensor:
        """r, which is zero, with a gradient of zero, where rows are equal but for rounding."""
        squared = self.squared(scale, _SAME.get(self.a.dtype, _SAME_SINGLE))
        equal = squared <= 0
        return squared.masked_fill(equal, 1.0).sqrt().masked_fill(equal, 0.0)

    def waves(self, period: Tensor, weight: Tensor) -> Tensor:
        """Σ_d weight_d cos(2π(a_d − b_d)/period)."""
        a, b = (2 * math.pi * side / period for side in (self.a, self.b))
        left = torch.cat([weight * a.cos(), weight * a.sin()], -1)
        return self.dot(left, torch.cat([b.cos(), b.sin()], -1))


Values = dict[str, Tensor]  # each [..., 1, columns]


def _each(value: Tensor, place: Place) -> Tensor:
    """A value for each column: [..., 1, D]."""
    return value.expand(*value.shape[:-1], place.a.shape[-1])


def scalar(value: Tensor, place: Place) -> Tensor:
    return value.squeeze(-1) if place.diag else value


def _matern(place: Place, scale: Tensor, terms: int) -> Tensor:
    r = math.sqrt(2 * terms + 1) * place.distance(scale)
    front = (torch.ones_like(r), 1 + r, 1 + r + r.square() / 3)[terms]
    return front * (-r).exp()


def _rq(place: Place, v: Values) -> Tensor:
    alpha = scalar(v["alpha"], place)
    return (
        -alpha * torch.log1p(place.squared(v["lengthscale"]).clamp_min(0.0) / (2 * alpha))
    ).exp()


def _periodic(place: Place, v: Values) -> Tensor:
    weight = _each(v["lengthscale"].square().reciprocal(), place)  # −2 sin²(u/2) = cos u − 1
    return (place.waves(v["period"], weight) - scalar(weight.sum(-1, keepdim=True), place)).exp()


def _cosine(place: Place, v: Values) -> Tensor:
    weight = _each(torch.ones_like(v["period"]), place) / place.a.shape[-1]
    return place.waves(v["period"], weight)


def _polynomial(place: Place, v: Values, degree: int) -> Tensor:
    return (place.dot(place.a, place.b) + scalar(v["offset"], place)) ** degree


def rectified(c: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """E[φ(a)φ(b)] and E[φ'(a)φ'(b)] of φ = max(·, 0), for normal a, b with variances v, w and
    covariance c: (√(vw − c²) + (π − θ)c)/2π and (π − θ)/2π, θ the angle between them."""
    # Where rows coincide θ is 0, which rounding would make 1e-8, and a square root of 0 has no
    # derivative.
    kind = torch.finfo(c.dtype)
    across = (v * w * (1.0 - 16 * kind.eps) - c * c).clamp_min(kind.tiny).sqrt()
    rest = math.pi - torch.atan2(across, c)
    return (across + rest * c) / (2 * math.pi), rest / (2 * math.pi)


def _relu(place: Place, scale: Tensor, layers: int) -> Tensor:
    """2E[φφ'] leaves variances as they are, so that they are those of the input in every layer."""
    a, b = place.a / scale, place.b / scale
    v, w = (1 + side.square().sum(-1) for side in (a, b))
    if not place.diag:
        v, w = v.unsqueeze(-1), w.unsqueeze(-2)
    c = 1 + place.dot(a, b)
    for _ in range(layers):
        c = 2 * rectified(c, v, w)[0]
    return c


class Kind(NamedTuple):
    """A kernel: the names of its parameters, and its values."""

    parameters: tuple[str, ...]
    of: Callable[[Place, Values], Tensor]


KINDS = {
    "rbf": Kind(("lengthscale",), lambda p, v: (-0.5 * p.squared(v["lengthscale"])).exp()),
    "matern": Kind(("lengthscale",), lambda p, v: _matern(p, v["lengthscale"], 2)),
    "matern12": Kind(("lengthscale",), lambda p, v: _matern(p, v["lengthscale"], 0)),
    "matern32": Kind(("lengthscale",), lambda p, v: _matern(p, v["lengthscale"], 1)),
    "matern52": Kind(("lengthscale",), lambda p, v: _matern(p, v["lengthscale"], 2)),
    "rq": Kind(("lengthscale", "alpha"), _rq),
    "periodic": Kind(("lengthscale", "period"), _periodic),
    "cosine": Kind(("period",), _cosine),
    "linear": Kind((), lambda p, v: p.dot(p.a, p.b)),
    "polynomial2": Kind(("offset",), lambda p, v: _polynomial(p, v, 2)),
    "polynomial3": Kind(("offset",), lambda p, v: _polynomial(p, v, 3)),
    "relu1": Kind(("lengthscale",), lambda p, v: _relu(p, v["lengthscale"], 1)),
    "relu2": Kind(("lengthscale",), lambda p, v: _relu(p, v["lengthscale"], 2)),
    "relu3": Kind(("lengthscale",), lambda p, v: _relu(p, v["lengthscale"], 3)),
    "constant": Kind((), lambda p, v: torch.ones_like(p.dot(p.a, p.b))),
}
