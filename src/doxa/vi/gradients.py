"""Gradients of an expectation under a Gaussian, by draws: G = ∇_{μ,σ} E_{N(μ, σ²)} f(θ).

    pathwise        θ = μ + σε:   ∂_μ = f′(θ),              ∂_σ = f′(θ) ε
    score function  ∂_μ = f(θ) (θ − μ)/σ²,   ∂_σ = f(θ) ((θ − μ)² − σ²)/σ³

Both are unbiased; they differ in variance, which is why every method here takes the first. The
second needs no derivative of f, so that f may be discrete; a baseline that does not depend on the
draw (the mean of f over the others) takes out most of its variance. Kingma & Welling (2014);
Williams (1992); Mohamed et al. (2020).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from doxa.errors import MethodError

Function = Callable[[Tensor], Tensor]


class Gradient(NamedTuple):
    """One estimate a draw, [S, ...] each: average them, and look at their variance."""

    mean: Tensor
    std: Tensor


def pathwise(f: Function, mean: Tensor, std: Tensor, eps: Tensor) -> Gradient:
    """From standard normals eps, [S, ...]; f is differentiable, [S, ...] to [S]."""
    theta = (mean + std * eps).detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(f(theta).sum(), theta)
    return Gradient(slope, slope * eps)


def score_function(
    f: Function, mean: Tensor, std: Tensor, eps: Tensor, baseline: str = "others"
) -> Gradient:
    """The same from the values of f alone. baseline: "others", the mean of f over the other draws
    (unbiased, Kool et al. 2019), or "none"."""
    if baseline not in ("others", "none"):
        raise MethodError(f"baseline must be 'others' or 'none', not {baseline!r}")
    values = f(mean + std * eps)
    if baseline == "others":
        if len(values) < 2:
            raise MethodError("a baseline from the other draws needs two at least")
        values = values - (values.sum(0) - values) / (len(values) - 1)
    values = values.reshape(-1, *(1,) * (eps.ndim - 1))
    return Gradient(values * eps / std, values * (eps.square() - 1) / std)
