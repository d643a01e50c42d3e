"""Evidence of a Gaussian at the maximum, and type-II maximum likelihood on it (MacKay, 1992).

    log p(D) ≈ log p(D | θ*) + log p(θ*) + (p/2) log 2π − ½ log |H|,    H = Σ_g G_g / r_g + τ Λ

r_g scales the noise variance of a group of outputs, τ the prior's precision Λ, with a factor τ_k
for each group k of weights. At the maximum

    r_g = χ²_g / (n_g − γ_g),                     γ_g = tr(H⁻¹ G_g / r_g)
    τ_k = γ_k / [(θ* − m)ᵀ Λ (θ* − m)]_k,         γ_k = p_k − tr[H⁻¹ τΛ]_kk

with γ, by outputs or by weights, the number of well-determined parameters and χ²_g the sum of
squared residuals in units of the noise. Learned noise lies outside the Hessian.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BOUNDS = (1e-8, 1e8)  # of factors on the noise's variance and the prior's precision
_TINY = 1e-2  # n − γ stays above this share of n: with more weights than rows, noise is not zero


def reestimate(
    effective: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    rounds: int,
    chi: Tensor,
    count: Tensor,
    quad: Tensor,
    *,
    noise: bool,
    scale: bool,
) -> tuple[Tensor, Tensor]:
    """r [M, g] and τ [M, K] at the fixed point, for given θ*.

    Parameters
    ----------
    effective: γ of outputs [M, g] and of weights [M, K], by r and τ. rounds: of it, at most.
    chi, count: χ² and n, [M, g]. quad: (θ* − m)ᵀ Λ (θ* − m), [M, K].
    noise, scale: whether r and τ are free; what is not stays 1.
    """
    ratio, tau = torch.ones_like(chi), torch.ones_like(quad)
    for _ in range(rounds):
        gamma, by_weights = effective(ratio, tau)
        new_ratio, new_tau = ratio, tau
        if noise:
            free = torch.maximum(count - gamma, _TINY * count)
            new_ratio = (chi / free).clamp(*BOUNDS)
        if scale:
            new_tau = (by_weights / quad.clamp_min(1e-300)).clamp(*BOUNDS)
        moved = max(float((new_ratio / ratio).log().abs().max()),
                    float((new_tau / tau).log().abs().max()))  # fmt: skip
        ratio, tau = new_ratio, new_tau
        if moved < 1e-13:
            break
    return ratio, tau
