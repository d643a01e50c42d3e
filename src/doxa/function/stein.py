"""The score of a distribution that is known by its draws alone: the spectral Stein estimator.

    ∇ log q(f) ≈ Σ_{j ≤ J} β_j ψ_j(f),   β_j = −E_q ∇ψ_j,   by Stein's identity
    ψ_j(f) = (√S/λ_j) Σ_s u_js k(f, f_s),   K u_j = λ_j u_j,   K the draws' Gram matrix

Shi, Sun & Zhu (2018), equations 9 to 13: ψ_j are Nyström's eigenfunctions of the kernel under q,
here of exp(−‖f − f'‖²/2ℓ²) with ℓ the median distance between draws. At the draws themselves it is
−(U Λ⁻¹ Uᵀ)_J G with G_t = Σ_s ∇_{f_s} k(f_s, f_t). J is the least number of eigenvalues that make
up a `share` of their sum; the others are masked, so that shapes do not depend on values.

In many dimensions the leading eigenfunctions hold less and less of a score, and the estimate
shrinks: along 40 values of a smooth function from 100 draws it is some eight tenths of the score.
A q that follows it comes out somewhat narrow.
"""

from __future__ import annotations

import torch
from torch import Tensor


def stein_score(draws: Tensor, at: Tensor | None = None, share: float = 0.99) -> Tensor:
    """∇ log q at the draws [M, S, K] themselves, or at other points [M, S', K].

    Parameters
    ----------
    draws: S draws of K numbers from each of M distributions.
    share: of the sum of the eigenvalues: those that make it up are kept.
    """
    squares = _squares(draws, draws)
    width = _median(squares)  # ℓ², [M, 1, 1]
    gram = (-0.5 * squares / width).exp()  # [M, S, S]
    # Σ_s ∇_{f_s} k(f_s, f_t) = −(1/ℓ²) Σ_s k_st (f_s − f_t)
    pull = (gram.sum(-1, keepdim=True) * draws - gram @ draws) / width  # [M, S, K]
    # ascending; of draws that are no numbers, which stay so, the decomposition would raise
    values, vectors = torch.linalg.eigh(gram.nan_to_num())
    values = values.clamp_min(torch.finfo(gram.dtype).eps * gram.shape[-1])
    kept = values.cumsum(-1) > (1 - share) * values.sum(-1, keepdim=True)
    inverse = torch.where(kept, 1 / values, 0.0).unsqueeze(-1)  # [M, S, 1]
    weights = vectors.mT @ pull * inverse  # −√S β_j, [M, S, K]
    if at is None:
        return -vectors @ weights
    across = (-0.5 * _squares(at, draws) / width).exp()  # [M, S', S]
    return -(across @ vectors * inverse.mT) @ weights


def _squares(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances, [M, S, S']."""
    centre = b.mean(1, keepdim=True)
    a, b = a - centre, b - centre
    both = a.square().sum(-1).unsqueeze(2) + b.square().sum(-1).unsqueeze(1)
    return (both - 2 * a @ b.mT).clamp_min(0.0)


def _median(squares: Tensor) -> Tensor:
    """Of the squared distances between different draws, [M, 1, 1]."""
    count = squares.shape[-1]
    upper = torch.triu_indices(count, count, 1, device=squares.device)
    own = squares[:, upper[0], upper[1]]
    return own.median(-1).values.clamp_min(torch.finfo(squares.dtype).tiny)[:, None, None]
