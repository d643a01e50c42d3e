"""Whole functions drawn from a sparse layer: cheap at any number of rows, and one row at a time.

    f(x) = a(x)ᵀ(m + Rε) + r(x),   r(x) = ψ(x)ᵀw · (√(k(x, x) − |a(x)|²)/|ψ(x)|),   ε, w ~ N(0, I)
    ψ(x) = φ(x) − Φ(Z)ᵀL⁻ᵀa(x)

After Wilson et al. (2020): what the inducing points do not know of f is drawn from a prior in
Fourier features φ (Rahimi & Recht, 2007), with its part at the inducing points taken away. The last
factor makes the variance of every row exact; between rows the correlation of r is that of the
features. A linear kernel has exact features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from doxa.function.covariances import Covariance
from doxa.function.inducing import Layer, factor
from doxa.noise import Noise

FEATURES = 512


def draw(layer: Layer, x: Tensor, noise: Noise, call: int, prior: bool = False) -> Tensor:
    """Functions of one member's layer at rows x [1 or S, N, D], one for each of the noise's S keys:
    [S, N, O]; `prior`: before the data."""
    copies, rows, inputs = x.shape
    flat = x.reshape(1, -1, inputs)  # so that the points are factored once
    phi = features(layer.kernel, layer.hyper, flat)  # [1, S·N, F]
    outputs, points = layer.mean.shape[1:]
    weights = noise.normal((phi.shape[2], outputs), 0, 3 * call)  # [S, F, O]
    if prior:
        return phi.reshape(copies, rows, -1) @ weights
    root = factor(layer.kernel, layer.hyper, layer.points)
    cross = layer.kernel(layer.hyper, layer.points, flat)
    at_points = features(layer.kernel, layer.hyper, layer.points)
    solved = torch.linalg.solve_triangular(root, torch.cat([cross, at_points], 2), upper=False)
    a, known = solved.split([cross.shape[2], at_points.shape[2]], 2)  # [1, Z, S·N], [1, Z, F]
    psi = phi - a.mT @ known
    left = (layer.kernel.diagonal(layer.hyper, flat) - a.square().sum(1)).clamp_min(0.0)
    psi = psi * (left / psi.square().sum(2).clamp_min(1e-300)).sqrt().unsqueeze(2)
    eps = noise.normal((outputs, points, 1), 0, 3 * call + 1)  # [S, O, Z, 1]
    v = layer.mean + (layer.root @ eps).squeeze(-1)  # [S, O, Z]
    a = a[0].reshape(points, copies, rows).movedim(1, 0)  # [1 or S, Z, N]
    return (v @ a).mT + psi.reshape(copies, rows, -1) @ weights


def features(kernel: Covariance, hyper: Tensor, x: Tensor) -> Tensor:
    """φ(x) [1, N, F] with E φ(x)ᵀφ(x') = k(x, x') and |φ(x)|² = k(x, x)."""
    scale = (0.5 * hyper[:, 0]).exp()[:, None, None]
    if kernel.kind == "linear":
        return scale * x
    noise = Noise(0, "frequencies", [0], x.device, x.dtype)
    waves = noise.normal((x.shape[2], FEATURES // 2))  # [1, D, F/2]
    if kernel.kind == "matern":  # Student-t frequencies, with 2ν = 5 degrees of freedom
        waves = waves * (5.0 / noise.normal((5, FEATURES // 2), 0, 1).square().sum(1)).sqrt()
    angle = (x * (-hyper[:, None, 1:]).exp()) @ waves
    both = torch.cat([angle.cos(), angle.sin()], 2)
    return scale * both * (2.0 / FEATURES) ** 0.5
