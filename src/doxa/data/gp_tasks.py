"""Tasks drawn from Gaussian processes: what neural processes are compared on.

    x ~ U(−2, 2),   y ~ N(0, s² k(x/ℓ) + 0.02² I),   ℓ ~ U(0.1, 0.6),   s ~ U(0.1, 1)

with 3 to 46 points in the context and 3 or more targets, 49 at most in all: the protocol of Nguyen
& Grover (2022), who took it from Kim et al. (2019). Sizes are drawn for each task.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "rbf": lambda d: (-0.5 * d.square()).exp(),
    "matern": lambda d: (1 + math.sqrt(5) * d + 5 / 3 * d.square()) * (-math.sqrt(5) * d).exp(),
}


def gp_tasks(
    kernel: str = "rbf", points: int = 50, noise: float = 0.02
) -> Callable[[torch.Generator, int], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """What `doxa.data.TaskSampler` draws with: x [T, N, 1], y [T, N, 1] and the masks of the
    context and the targets. kernel: "rbf" or "matern" (ν = 5/2). points: N, one more than a task
    has."""
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
