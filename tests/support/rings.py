"""A classifier that is trained already, for Laplace to be put on."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from straight import normal
from torch import Tensor, nn

import doxa


def rings(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three classes, by distance from the middle."""
    x = normal(n, 2, seed=seed)
    return x, (x.norm(dim=1) > 0.8).long() + (x.norm(dim=1) > 1.5).long()


@cache
def trained() -> nn.Module:
    """A network that knows the rings, trained without a prior."""
    x, y = rings(300, seed=0)
    torch.manual_seed(0)
    net = doxa.nets.mlp(2, 3, (12, 12), activation="tanh").double()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def post_hoc(method: doxa.Laplace, **options: Any) -> Any:
    options = {"likelihood": "categorical", "init": "given"} | options
    return doxa.fit(trained(), rings(300, seed=0), method, **options)


def loss(posterior: Any) -> float:
    """Of new rows, in nats."""
    x, y = rings(400, seed=2)
    return -float(posterior.predict(x).log_prob(y).mean())


def loss_of_the_weights() -> float:
    x, y = rings(400, seed=2)
    return float(nn.functional.cross_entropy(trained()(x), y).detach())
