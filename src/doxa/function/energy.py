"""The α-energy of functions that are linear in normal weights a: each row's term, and the KL.

    (1/α) log E_q[p(y | f)^α],   f = m + Σ_s a_s φ_s,   a ~ N(b, LLᵀ)

which is E_q log p as α → 0 and the log predictive density at α = 1 (Li & Gal, 2017; Ma, Li &
Hernández-Lobato, 2019).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from doxa.data import Batch
from doxa.likelihoods import Gaussian
from doxa.method import Run, State
from doxa.model import likelihood_parameters


class Believed(NamedTuple):
    """f at rows under q(a): its mean [M, B, O], and H [M, S, B, O] with covariance Σ_s H_s H_sᵀ."""

    mean: Tensor
    half: Tensor

    def variance(self) -> Tensor:
        return self.half.square().sum(1)


def energies(
    run: Run, q: State, f: Believed, batch: Batch, alpha: float, eps: Tensor | None
) -> Tensor:
    """(1/α) log E_q[p(y | f)^α] of each row, [M, B]; E_q log p at α = 0. Gaussian noise: in closed
    form. Otherwise over the draws of a that ε [M, T, S] makes."""
    theta = q["mean"]
    if isinstance(run.likelihood, Gaussian):
        given = likelihood_parameters(run.layout.unflatten(theta)) | run.constants
        own = shaped(run, f.mean)
        noise = run.likelihood.variance(own, given, lead=1).reshape(f.mean.shape)
        if alpha == 0:
            lost = 0.5 * (f.variance() / noise).sum(-1)
            return run.log_likelihoods_of(own, theta, batch) - lost
        y = batch.y.reshape(*batch.y.shape[: 2 - batch.shared], -1)
        return gaussian_energy(y - f.mean, f.half, noise, alpha)
    assert eps is not None
    count = eps.shape[1]
    drawn = f.mean.unsqueeze(1) + torch.einsum("msbo,mts->mtbo", f.half, eps)
    many = run.times(count)
    each = many.log_likelihoods_of(
        shaped(run, drawn.flatten(0, 1)), theta.repeat_interleave(count, 0), batch.times(count)
    ).unflatten(0, (-1, count))
    if alpha == 0:
        return each.mean(1)
    return (torch.logsumexp(alpha * each, 1) - math.log(count)) / alpha


def gaussian_energy(left: Tensor, half: Tensor, noise: Tensor, alpha: float) -> Tensor:
    """From p^α = (2πσ²)^((1−α)/2) α^(−½) N(y; f, σ²/α) for each output: [M, B]."""
    covariance = torch.einsum("msbo,msbp->mbop", half, half) + torch.diag_embed(noise / alpha)
    factor = torch.linalg.cholesky_ex(covariance).L
    white = torch.linalg.solve_triangular(factor, left.unsqueeze(-1), upper=False)
    logs = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    two_pi = math.log(2 * math.pi)
    density = -0.5 * white.square().sum((-2, -1)) - logs - 0.5 * left.shape[-1] * two_pi
    more = 0.5 * ((1 - alpha) * (noise.log() + two_pi) - math.log(alpha)).sum(-1)
    return (density + more) / alpha


def root_of(free: Tensor) -> Tensor:
    """L, lower triangular, from what is trained: its diagonal in logarithms."""
    return free.tril(-1) + torch.diag_embed(free.diagonal(dim1=-2, dim2=-1).exp())


def divergence(q: State) -> Tensor:
    """KL(q(a) ‖ N(0, I)), [M]."""
    root = root_of(q["a_root"])
    logs = q["a_root"].diagonal(dim1=-2, dim2=-1).sum(-1)
    away = q["a_mean"].square().sum(-1) + root.square().sum((-2, -1)) - root.shape[-1]
    return 0.5 * away - logs


def shaped(run: Run, f: Tensor) -> Tensor:
    """f [M, B, O] with the outputs' own axes."""
    return f.reshape(*f.shape[:2], *run.net.output)
