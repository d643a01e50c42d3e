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


def one_column_of_eleven(n: int = 150, others: int = 1000) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, y, and others of both: ten columns do nothing, one is y but for noise of 1. A
    row costs ½ log 2πe = 1.42 nats by what is true, 1.77 by a constant."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(n + others, 11, generator=g)
    y = x[:, :1] + torch.randn(n + others, 1, generator=g)
    return x[:n], y[:n], x[n:], y[n:]
