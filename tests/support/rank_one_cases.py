"""A small convolutional network, and one component of a rank-one method as an explicit network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def images(n: int = 12) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, 6, 6, generator=g, dtype=torch.float64)
    return x, (x.mean((1, 2, 3)) > 0).long()


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5),
        nn.Tanh(), nn.Linear(5, 2),
    ).double()  # fmt: skip


def explicit(posterior: Any, weights: Tensor, net: nn.Module, m: int, k: int) -> nn.Module:
    """The network W ∘ (r sᵀ) of component k of member m, from its shared weights [P]."""
    w = posterior.layout.unflatten(weights)
    own = posterior.network.layers.unflatten(posterior.layers[m, k])
    with torch.no_grad():
        for name, p in net.named_parameters():
            path, value = name.rpartition(".")[0], w[name]
            if name.endswith("weight") and f"{path}.r" in own:
                outer = torch.outer(own[f"{path}.r"], own[f"{path}.s"])
                value = value * outer.reshape(*outer.shape, *(1,) * (value.ndim - 2))
            p.copy_(value)
        for name, b in net.named_buffers():
            b.copy_(posterior.buffers[name][m, k])
    return net.eval()
