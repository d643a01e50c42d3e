"""Kullback–Leibler divergences KL(q ‖ p) = E_q[log q − log p], in nats.

In closed form for discrete distributions and for Gaussians (factorised, or with any `Structure` of
`doxa.linalg` as covariance); by Monte Carlo, with its standard error, for everything else, such as
mixtures. All are *summed* over the variables of the distribution, never averaged: a mean over
weights is not a divergence, and an ELBO that subtracts it is not a bound.

Gradients of an expectation under a Gaussian, by draws: G = ∇_{μ,σ} E_{N(μ, σ²)} f(θ).

    pathwise        θ = μ + σε:   ∂_μ = f′(θ),              ∂_σ = f′(θ) ε
    score function  ∂_μ = f(θ) (θ − μ)/σ²,   ∂_σ = f(θ) ((θ − μ)² − σ²)/σ³

Both are unbiased. The first has less variance, so all methods here use it. The second needs no
derivative of f, so that f may be discrete; a baseline that does not depend on the draw (the mean of
f over the others) removes most of its variance. Kingma & Welling (2014); Williams (1992); Mohamed
et al. (2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from doxa.errors import DataError, MethodError, ShapeError
from doxa.linalg import Structure


class Estimate(NamedTuple):
    """A Monte Carlo mean and its standard error."""

    value: Tensor
    error: Tensor


def discrete(q: Tensor, p: Tensor) -> Tensor:
    """Σ_k q_k log(q_k / p_k) over the last axis; infinite where q has mass and p has none."""
    if q.shape[-1] != p.shape[-1]:
        raise ShapeError(f"q has {q.shape[-1]} outcomes and p has {p.shape[-1]}")
    for name, probs in (("q", q), ("p", p)):
        off = (probs.sum(-1) - 1).abs().max() > 1e-4
        if bool((probs < 0).any()) or bool(off):
            raise DataError(f"{name} holds no probabilities: they must be ≥ 0 and add up to 1")
    return (torch.xlogy(q, q) - torch.xlogy(q, p)).sum(-1)


def gaussian(
    mean: Tensor, std: Tensor, prior_mean: Tensor | float, prior_std: Tensor | float
) -> Tensor:
    """KL of N(mean, std²) to N(prior_mean, prior_std²), summed over the last axis. The numbers are
    independent, and each has log(s/σ) + (σ² + (μ − m)²)/2s² − ½."""
    prior_std = torch.as_tensor(prior_std, dtype=std.dtype, device=std.device)
    ratio = (std / prior_std).square()
    away = ((mean - prior_mean) / prior_std).square()
    return 0.5 * (ratio + away - 1 - ratio.log()).sum(-1)


def multivariate(
    mean: Tensor, covariance: Structure, prior_mean: Tensor | float, prior_std: Tensor | float
) -> Tensor:
    """KL of K Gaussians N(mean_k, Σ_k), means [K, P], to independent ones: [K]. Only the variances
    and the determinant of Σ are needed: ½ (Σ_i (Σ_ii + (μ_i − m_i)²)/s_i² − P + Σ log s_i² −
    log|Σ|)."""
    scale = torch.as_tensor(prior_std, dtype=mean.dtype, device=mean.device).expand_as(mean)
    away = (covariance.diagonal() + (mean - prior_mean).square()) / scale.square()
    return 0.5 * (away.sum(-1) - mean.shape[-1] + 2 * scale.log().sum(-1) - covariance.logdet())


def monte_carlo(
    draws: Tensor, log_q: Callable[[Tensor], Tensor], log_p: Callable[[Tensor], Tensor]
) -> Estimate:
    """KL from draws of q, [S, ...], and both log densities, [S]: for mixtures, flows, and any
    sampler with a known density. The error is that of the mean over draws."""
    gaps = log_q(draws) - log_p(draws)
    return mean_of(gaps)


def mean_of(values: Tensor) -> Estimate:
    """The mean over the first axis, of independent values."""
    if len(values) < 2:
        raise DataError("a standard error needs two draws at least")
    return Estimate(values.mean(0), values.std(0) / math.sqrt(len(values)))


Function = Callable[[Tensor], Tensor]


class Gradient(NamedTuple):
    """One estimate per draw, [S, ...] each; their mean and variance are of interest."""

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
