"""Named kernels of all members at once, as functions of a flat row of logarithms, in plain torch.

    rbf      k = v exp(−r²/2)
    matern   k = v (1 + √5 r + 5r²/3) exp(−√5 r)          (ν = 5/2)
    linear   k = v xᵀx'                                   with r² = Σ_d (x_d − x'_d)²/ℓ_d²

Rasmussen & Williams (2006), ch. 4: the kernels of these names in `kernels.py`, there one member at
a time. A row of hyper-parameters is (log v, log ℓ…).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAMES = ("rbf", "matern", "linear")


@dataclass(frozen=True)
class Covariance:
    """k(a, b) of `inputs` columns; with `ard` a lengthscale for each of them."""

    kind: str
    inputs: int
    ard: bool = True

    @property
    def lengths(self) -> int:
        """How many lengthscales there are."""
        if self.kind == "linear":
            return 0
        return self.inputs if self.ard else 1

    def start(self, variance: Tensor, lengthscale: Tensor) -> Tensor:
        """Logarithms [M, H] of first values [M]; of a linear kernel v is a variance a column."""
        length = lengthscale.log().unsqueeze(1).expand(-1, self.lengths)
        return torch.cat([variance.log().unsqueeze(1), length], 1)

    def __call__(self, hyper: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """hyper [M, H], a [M, N, D], b [M, N', D] to [M, N, N']."""
        variance = hyper[:, 0].exp()[:, None, None]
        if self.kind == "linear":
            return variance * (a @ b.mT)
        shrink = (-hyper[:, None, 1:]).exp()
        a, b = a * shrink, b * shrink
        squares = a.square().sum(2)[:, :, None] + b.square().sum(2)[:, None, :]
        squares = torch.baddbmm(squares, a, b.mT, alpha=-2.0)
        if self.kind == "rbf":
            return variance * (-0.5 * squares.clamp_min(0.0)).exp()
        reach = (5.0 * squares).clamp_min(1e-15).sqrt()  # whose slope at 0 would be infinite
        return variance * (1.0 + reach + reach.square() / 3.0) * (-reach).exp()

    def diagonal(self, hyper: Tensor, a: Tensor) -> Tensor:
        """k(a_i, a_i): [M, N]."""
        variance = hyper[:, :1].exp()
        if self.kind == "linear":
            return variance * a.square().sum(2)
        return variance.expand(a.shape[:2])

    def named(self, hyper: Tensor) -> dict[str, Any]:
        """For people: [M, H]."""
        found = {"variance": hyper[:, 0].exp().tolist()}
        return found | ({"lengthscale": hyper[:, 1:].exp().tolist()} if self.lengths else {})


def median_distance(points: Tensor) -> Tensor:
    """The median distance between points [M, Z, D], [M]; 1 where they coincide."""
    count = points.shape[1]
    if count < 2:
        return points.new_ones(len(points))
    above = torch.triu_indices(count, count, 1, device=points.device)
    away = torch.cdist(points, points)[:, above[0], above[1]].median(1).values
    return torch.where(away > 0, away, 1.0)
