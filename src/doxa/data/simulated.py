"""Simulated data for the demo, examples and tests: seeded, without files or network access.

`gp_tasks` draws tasks from Gaussian processes, a common benchmark of neural processes:

    x ~ U(−2, 2),   y ~ N(0, s² k(x/ℓ) + 0.02² I),   ℓ ~ U(0.1, 0.6),   s ~ U(0.1, 1)

with 3 to 46 points in the context and at least 3 targets, at most 49 points in total. This is the
protocol of Nguyen & Grover (2022), from Kim et al. (2019). Sizes are drawn for each task.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["Points", "gap_function", "gap_regression", "gp_tasks", "two_moons"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)


Array = np.ndarray[Any, np.dtype[Any]]

GAP = (-1.2, 1.6)  # the interval in which `gap_regression` has no observations
GAP_NOISE = 0.15


class Points(NamedTuple):
    """Inputs [N, D] and targets [N]."""

    x: Array
    y: Array


def gap_function(x: Array) -> Array:
    """The noise-free curve of `gap_regression`."""
    return np.sin(1.2 * x) + 0.35 * x


def gap_regression(n: int = 80, seed: int = 0, inside: bool = False) -> Points:
    """y = sin(1.2 x) + 0.35 x + ε, ε ~ N(0, 0.15²), with no x between −1.2 and 1.6.

    `inside=True` returns points from the gap only.
    """
    rng = np.random.default_rng([seed, int(inside)])
    if inside:
        x = rng.uniform(*GAP, n)
    else:
        left = rng.uniform(-4.0, GAP[0], n // 2)
        x = np.concatenate([left, rng.uniform(GAP[1], 4.0, n - n // 2)])
    y = gap_function(x) + GAP_NOISE * rng.normal(size=n)
    return Points(x[:, None], y)


def two_moons(n: int = 200, noise: float = 0.15, seed: int = 0) -> Points:
    """Two interleaved half circles, classes 0 and 1."""
    rng = np.random.default_rng(seed)
    half = n // 2
    upper = rng.uniform(0.0, np.pi, half)
    lower = rng.uniform(0.0, np.pi, n - half)
    x = np.concatenate(
        [
            np.stack([np.cos(upper), np.sin(upper)], axis=1),
            np.stack([1.0 - np.cos(lower), 0.5 - np.sin(lower)], axis=1),
        ]
    )
    y = np.repeat([0, 1], [half, n - half])
    return Points(x + noise * rng.normal(size=x.shape), y)


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "rbf": lambda d: (-0.5 * d.square()).exp(),
    "matern": lambda d: (1 + math.sqrt(5) * d + 5 / 3 * d.square()) * (-math.sqrt(5) * d).exp(),
}


def gp_tasks(
    kernel: str = "rbf", points: int = 50, noise: float = 0.02
) -> Callable[[torch.Generator, int], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """A function for `doxa.data.TaskSampler`: it draws x [T, N, 1], y [T, N, 1] and the masks of
    context and targets.

    Parameters
    ----------
    kernel : {"rbf", "matern"}
        The kernel; "matern" has ν = 5/2.
    points : int
        N, one more than the largest number of points of a task.
    """
    k = KERNELS[kernel]

    def draw(g: torch.Generator, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        options: dict[str, Any] = {"generator": g, "device": g.device, "dtype": torch.float64}
        uniform: Callable[..., Tensor] = lambda *shape: torch.rand(*shape, **options)  # noqa: E731
        x = 4 * uniform(count, points) - 2
        length, scale = 0.1 + 0.5 * uniform(count, 1, 1), 0.1 + 0.9 * uniform(count, 1, 1)
        covariance = scale.square() * k((x.unsqueeze(2) - x.unsqueeze(1)).abs() / length)
        covariance.diagonal(dim1=1, dim2=2).add_(noise**2)
        root, _ = torch.linalg.cholesky_ex(covariance)
        y = root @ torch.randn(count, points, 1, **options)
        seen = 3 + (uniform(count, 1) * (points - 6)).floor()  # 3 … N − 4
        asked = 3 + (uniform(count, 1) * (points - seen - 3)).floor()  # 3 … N − 1 − seen
        place = torch.arange(points, device=g.device)
        context = place < seen
        targets = (place >= seen) & (place < seen + asked)
        return x.unsqueeze(2), y, context.double(), targets.double()

    return draw
