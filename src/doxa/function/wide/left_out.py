"""Trained networks at rows that are left out, and the noise that they show.

The residual of row i under a network trained on all others is [P(y − f_0)]_i/P_ii, with
P = (Θ + σ²W⁻¹)⁻¹, as for every linear smoother (Rasmussen & Williams 2006, eq. 5.12). Over starts
f_0 ~ GP(0, K) it has

    mean r_i = [Py]_i/P_ii,   variance v_i = [PKP]_ii/P_ii²

σ² holds weights near their start; an ensemble's spread v says little of what all its members have
wrong, so that σ² + v is too small for y. The noise of y is the rest of what rows left out show:
τ² = mean(r_i² − v_i), and at least σ².
"""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.function.evidence import Solved


def residuals(solved: Solved, among: Tensor) -> tuple[Tensor, Tensor]:
    """r [K, L, N, O/L] and v [K, L, N], given K of the rows, [K, N, N]."""
    _, root, factor, solution = solved
    precision = torch.cholesky_inverse(factor) * root.unsqueeze(-1) * root.unsqueeze(-2)
    own = precision.diagonal(0, -2, -1).clamp_min(torch.finfo(root.dtype).tiny)
    spread = (precision @ among.unsqueeze(1) * precision).sum(-1) / own.square()
    return root.unsqueeze(-1) * solution / own.unsqueeze(-1), spread


def noise_of(solved: Solved, among: Tensor, levels: Tensor) -> Tensor:
    """log τ [K, L], for log σ [K, L]; rows count by their weights."""
    left, spread = residuals(solved, among)
    weight = solved.root.square() * (2 * levels).exp().unsqueeze(-1)  # [K, L, N]
    each = (left.square().mean(-1) - spread) * weight
    shown = torch.where(weight > 0, each, torch.zeros_like(each)).sum(-1) / weight.sum(-1)
    return 0.5 * torch.maximum(shown, (2 * levels).exp()).log()
