"""The leapfrog: one reversible, volume-preserving step of Hamiltonian dynamics.

    H(θ, p) = −log π(θ) + ½ |p|²,      θ = F φ,   F Fᵀ = M⁻¹
    p ← p + ½ε Fᵀ∇log π(θ);   θ ← θ + ε F p;   p ← p + ½ε Fᵀ∇log π(θ)

Momentum is kept in the coordinates in which it is standard normal: p here is Fᵀ times the momentum
of mass M of the textbooks (Neal, 2011), and F p is their velocity M⁻¹p. It is the same integrator,
and neither the kinetic energy nor a U-turn needs the mass again. F is the `metric`: a standard
deviation a parameter, [M, P], or a lower triangle, [M, P, P]. A row of zeros holds its parameter
fixed. The energy error of a trajectory of given length falls as ε².
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

DIVERGENT = 1000.0  # an energy error from which no trajectory recovers (Stan's)

ValueAndGrad = Callable[[Tensor], tuple[Tensor, Tensor]]  # θ [M, P] to log π [M] and its gradient


class Point(NamedTuple):
    """Where a particle is: position, momentum, and log π with its gradient at the position."""

    theta: Tensor  # [M, P]
    momentum: Tensor  # [M, P], standard normal at rest
    log_density: Tensor  # [M]
    grad: Tensor  # [M, P]

    @property
    def energy(self) -> Tensor:
        """H, and infinite where it is not a number: [M]."""
        energy = 0.5 * self.momentum.square().sum(1) - self.log_density
        return torch.nan_to_num(energy, nan=torch.inf, posinf=torch.inf, neginf=torch.inf)


def leapfrog(
    density: ValueAndGrad, point: Point, metric: Tensor, step: Tensor, steps: int = 1
) -> Point:
    """`steps` steps of size `step` [M, 1], which may be negative: back in time."""
    theta, momentum, value, grad = point
    momentum = momentum + 0.5 * step * pull(metric, grad)
    for i in range(steps):
        theta = theta + step * push(metric, momentum)
        value, grad = density(theta)
        momentum = momentum + (0.5 if i == steps - 1 else 1.0) * step * pull(metric, grad)
    return Point(theta, momentum, value, grad)


def push(metric: Tensor, momentum: Tensor) -> Tensor:
    """F p: from momentum to velocity, [M, P]."""
    if metric.ndim == 2:
        return metric * momentum
    return torch.bmm(metric, momentum.unsqueeze(2)).squeeze(2)


def pull(metric: Tensor, grad: Tensor) -> Tensor:
    """Fᵀ∇: from the gradient to the force on the momentum, [M, P]."""
    if metric.ndim == 2:
        return metric * grad
    return torch.bmm(grad.unsqueeze(1), metric).squeeze(1)


def free(metric: Tensor) -> Tensor:
    """1 where a parameter moves, 0 where it is held fixed: [M, P]."""
    scale = metric if metric.ndim == 2 else metric.diagonal(dim1=1, dim2=2)
    return (scale > 0).to(metric.dtype)
