"""Evidence of a Gaussian at the maximum, and type-II maximum likelihood on it (MacKay, 1992).

    log p(D) ≈ log p(D | θ*) + log p(θ*) + (p/2) log 2π − ½ log |H|,    H = Σ_g G_g / r_g + τ Λ

r_g scales the noise variance of a group of outputs, τ the prior's precision Λ. At the maximum

    γ_g = tr(H⁻¹ G_g / r_g),    r_g = χ²_g / (n_g − γ_g),    τ = Σ γ_g / (θ* − m)ᵀ Λ (θ* − m)

with γ the number of well-determined parameters and χ²_g the sum of squared residuals in units of
the noise. Learned noise lies outside the Hessian.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from doxa.linalg import Dense, Diagonal, Structure

_TINY = 1e-2  # n − γ stays above this share of n: with more weights than rows, noise is not zero


def covariance(curvature: Tensor, ratio: Tensor, prior: Tensor) -> Structure:
    """H⁻¹ from groups of curvature [M, g, p, p] (or [M, g, p]), r [M, g] and τΛ [M, p]."""
    if curvature.ndim == 3:
        return Diagonal(1.0 / ((curvature / ratio[..., None]).sum(1) + prior))
    return Dense.from_precision(_precision(curvature, ratio, prior))


def _precision(curvature: Tensor, ratio: Tensor, prior: Tensor) -> Tensor:
    total = (curvature / ratio[..., None, None]).sum(1) + torch.diag_embed(prior)
    return (total + total.mT) / 2


def reestimate(
    curvature: Tensor,
    chi: Tensor,
    count: Tensor,
    prior: Tensor,
    quad: Tensor,
    *,
    noise: bool,
    scale: bool,
    gaussian: bool,
) -> tuple[Tensor, Tensor]:
    """r [M, g] and τ [M] at the fixed point, for given θ*.

    Parameters
    ----------
    curvature: [M, g, p, p], or [M, g, p] for a diagonal. chi, count: χ² and n, [M, g].
    prior: Λ [M, p]. quad: (θ* − m)ᵀ Λ (θ* − m), [M].
    noise, scale: whether r and τ are free; what is not stays 1.
    gaussian: the prior is, so that Λ is positive.
    """
    ratio, tau = torch.ones_like(chi), torch.ones_like(quad)
    if not noise and not scale:
        return ratio, tau
    effective, rounds = _effective(curvature, prior, gaussian)
    for _ in range(rounds):
        gamma = effective(ratio, tau)  # [M, g]
        new_ratio, new_tau = ratio, tau
        if noise:
            free = torch.maximum(count - gamma, _TINY * count)
            new_ratio = (chi / free).clamp(1e-8, 1e8)
        if scale:
            new_tau = (gamma.sum(1) / quad.clamp_min(1e-300)).clamp(1e-8, 1e8)
        moved = max(float((new_ratio / ratio).log().abs().max()),
                    float((new_tau / tau).log().abs().max()))  # fmt: skip
        ratio, tau = new_ratio, new_tau
        if moved < 1e-13:
            break
    return ratio, tau


def _effective(
    curvature: Tensor, prior: Tensor, gaussian: bool
) -> tuple[Callable[[Tensor, Tensor], Tensor], int]:
    """γ as a function of r and τ, and how many rounds it is worth."""
    if curvature.ndim == 4 and (curvature.shape[1] > 1 or not gaussian):

        def dense(ratio: Tensor, tau: Tensor) -> Tensor:
            h = _precision(curvature, ratio, tau[:, None] * prior)
            inverse = torch.linalg.inv(h)
            return (inverse.unsqueeze(1) * curvature).sum((-2, -1)) / ratio

        return dense, 100
    values, floor = curvature, prior
    if curvature.ndim == 4:  # in the basis where Λ is 1 and G diagonal, a round costs nothing
        root = prior.rsqrt()
        whitened = root[:, :, None] * curvature[:, 0] * root[:, None, :]
        values = torch.linalg.eigvalsh((whitened + whitened.mT) / 2).clamp_min(0.0)[:, None]
        floor = torch.ones_like(prior)

    def diagonal(ratio: Tensor, tau: Tensor) -> Tensor:
        each = values / ratio[..., None]  # [M, g, p]
        return (each / (each.sum(1, keepdim=True) + (tau[:, None] * floor)[:, None])).sum(-1)

    return diagonal, 2000
