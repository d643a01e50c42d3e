"""Whole functions drawn from a sparse layer: cheap at any number of rows, and one row at a time.

    f(x) = a(x)ᵀ(m + Rε) + r(x),   r(x) = ψ(x)ᵀw · (√(k(x, x) − |a(x)|²)/|ψ(x)|),   ε, w ~ N(0, I)
    ψ(x) = φ(x) − Φ(Z)ᵀL⁻ᵀa(x)

After Wilson et al. (2020): what the inducing points do not know of f is drawn from a prior in
random features φ (Rahimi & Recht, 2007), with its part at the inducing points taken away. The last
factor makes the variance of every row exact; between rows the correlation of r is that of the
features. Each feature z has E z(x)z(x') = k(x, x'): a wave √2 cos(ωᵀx + b) of a random frequency,
a random projection of x; sums of kernels add features, products multiply them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.function.features import features
from doxa.function.inducing import Layer, factor
from doxa.noise import Noise


def draw(layer: Layer, x: Tensor, noise: Noise, call: int, prior: bool = False) -> Tensor:
    """Functions of one member's layer at rows x [1 or S, N, D], one for each of the noise's S keys:
    [S, N, O]; `prior`: before the data."""
    copies, rows, inputs = x.shape
    flat = x.reshape(1, -1, inputs)  # so that the points are factored once
    phi = features(layer.kernel, layer.hyper, flat)  # [1, S·N, F]
    own = layer.kernel(layer.hyper, flat, flat, True)  # [1, S·N]
    outputs, points = layer.mean.shape[1:]
    weights = noise.normal((phi.shape[2], outputs), 0, 3 * call)  # [S, F, O]
    if prior:
        phi = _with_norm(phi, own)
        return phi.reshape(copies, rows, -1) @ weights
    root = factor(layer.kernel, layer.hyper, layer.points)
    cross = layer.kernel(layer.hyper, layer.points, flat)
    at_points = features(layer.kernel, layer.hyper, layer.points)
    solved = torch.linalg.solve_triangular(root, torch.cat([cross, at_points], 2), upper=False)
    a, known = solved.split([cross.shape[2], at_points.shape[2]], 2)  # [1, Z, S·N], [1, Z, F]
    psi = _with_norm(phi - a.mT @ known, (own - a.square().sum(1)).clamp_min(0.0))
    eps = noise.normal((outputs, points, 1), 0, 3 * call + 1)  # [S, O, Z, 1]
    v = layer.mean + (layer.root @ eps).squeeze(-1)  # [S, O, Z]
    a = a[0].reshape(points, copies, rows).movedim(1, 0)  # [1 or S, Z, N]
    return (v @ a).mT + psi.reshape(copies, rows, -1) @ weights


def _with_norm(phi: Tensor, square: Tensor) -> Tensor:
    """Rows [1, N, F] of these squared lengths [1, N]."""
    return phi * (square / phi.square().sum(2).clamp_min(1e-300)).sqrt().unsqueeze(2)
