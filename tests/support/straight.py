"""Rows on a plane, with noise, in double precision."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


def lines(n: int = 40, outputs: int = 1) -> tuple[Tensor, Tensor]:
    x = normal(n, 2)
    return x, 0.3 * x @ normal(2, outputs, seed=1) + 0.4 + 0.3 * normal(n, outputs, seed=2)
