"""Tasks and networks for the tests of neural processes."""

from __future__ import annotations

from typing import Any

import torch
from short import short
from torch import Tensor


def task(points: int = 9, seen: int = 5, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Two tasks of one input, their first points the context, and y at all points."""
    g = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(2, points, 1, generator=g, dtype=torch.float64) - 1
    y = torch.randn(2, points, 1, generator=g, dtype=torch.float64)
    context = (torch.arange(points) < seen).double().expand(2, -1)
    given = {"context_x": x * context[..., None], "context_y": y * context[..., None],
             "context": context, "target_x": x, "targets": 1 - context}  # fmt: skip
    return given, y


def network(name: str, **settings: Any) -> Any:
    method = short(name)
    method = type(method)(**{**method.settings(), **settings})
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return method, method.network(1, 1).double()
