"""Methods at their quickest, and odd networks, for the tests of `Model`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import doxa

QUICK = {"steps": 5, "progress": False}


METHODS = {
    "map": doxa.MAP(),
    "mean-field": doxa.MeanField(),
    "mc-dropout": doxa.MCDropout(insert="all"),
    "laplace": doxa.Laplace(structure="diagonal"),
    "hmc": doxa.HMC(draws=2, burn_in=2, leapfrog=2),
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seeded(build: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return build()


class Tied(nn.Module):
    """One matrix used twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Bare(nn.Module):
    """A parameter that no layer owns."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.full((1,), 0.5))
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) + self.offset
