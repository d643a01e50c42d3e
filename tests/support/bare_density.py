"""Chains on a bare log density, without a network or data, through the library's own driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from doxa import likelihoods
from doxa.data import NoData
from doxa.driver import Driver
from doxa.engine import Engine
from doxa.linalg.layout import Entry, Layout
from doxa.method import Clock, Run, State
from doxa.model.model import LogDensity
from doxa.priors import bind


class Chains(NamedTuple):
    draws: Tensor  # [M, T, P]
    state: State
    run: Run
    told: dict[str, Tensor]  # {info: [M, T]}


def bare_run(density: Callable[[Tensor], Tensor], start: Tensor, seed: int = 0) -> Run:
    """A run of one chain a row of `start` [M, P]."""
    size = len(start)
    return Run(
        LogDensity(density, Layout((Entry("theta", (start.shape[1],)),))),
        likelihoods.likelihood("gaussian"), NoData(start.device, start.dtype),
        Engine("stack", "eager"), members=list(range(size)), run_of=[0] * size,
        split_of=[0] * size, seeds=[seed] * size,
        n=start.new_ones(size), prior=bind(None, Layout(())), initial=start,
    )  # fmt: skip


def sample(
    density: Callable[[Tensor], Tensor], start: Tensor, method: Any, seed: int = 0
) -> Chains:
    run = bare_run(density, start, seed)
    done = Driver(run, method).drive()
    told = {name: torch.stack(values, 1) for name, values in done.stats.items()}
    draws = done.draws(slice(None))
    assert draws is not None
    return Chains(draws.transpose(0, 1), done.state, run, told)


def clocks(run: Run, steps: int) -> Iterator[Clock]:
    """One clock a step, as a stage would hand them over."""
    source = run.noise("test")
    for tick in torch.arange(steps, dtype=torch.int32, device=run.device):
        yield Clock(tick, torch.tensor(0.0), steps, source)


def gaussian(covariance: Tensor, mean: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """log N(θ; mean, covariance) up to its constant."""
    precision = torch.linalg.inv(covariance)
    centre = torch.zeros_like(covariance[0]) if mean is None else mean

    def log_density(theta: Tensor) -> Tensor:
        away = theta - centre
        return -0.5 * ((away @ precision) * away).sum(-1)

    return log_density
