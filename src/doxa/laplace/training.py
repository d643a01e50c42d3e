"""Training under a prior, and a noise level, that follow the evidence.

    θ ← an optimiser's steps on log p(D | θ, σ) + log p(θ | τ)
    τ, σ ← now and then, up log p(D | θ, σ) + log p(θ | τ) + (p/2) log 2π − ½ log |H(θ, τ, σ)|

Immer, Bauer, Fortuin, Rätsch & Khan (2021). Curvature is that of all rows at the weights of the
moment, and (τ, σ) go a few rounds of MacKay's fixed point, not to its end, also once training is
over: the weights have yet to follow. Between, σ stays where the evidence put it: on rows that are
fitted, noise looks small.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from doxa.data import Batch
from doxa.laplace.scales import Scales
from doxa.laplace.statistics import NOISE, Sums
from doxa.method import Clock, Known, Run, Stage, State, optimise

ROUNDS = 3


def stage(run: Run, sums: Sums, tunes: bool, count: int) -> Stage:
    """The stage of training, with so many re-estimations, evenly over its steps."""
    objective = Objective(sums.learns_noise(run))
    ascent = optimise(objective, run.steps)
    times = {max(1, round(run.steps * k / (count + 1))) for k in range(1, count + 1)}

    def mark(run: Run, state: State) -> State:
        return reestimated(run, state, sums, tunes)

    return replace(ascent, marks=dict.fromkeys(sorted(times), mark))


def reestimated(run: Run, state: State, sums: Sums, tunes: bool) -> State:
    """Learned noise, and the prior's scale where that is free, by the evidence at these weights."""
    rows = run.passes()
    local = state | sums.empty(run)
    for t in range(rows.count):
        local = sums.add(run, local, rows.batch(t))
    settled = sums.settle(run, local, tunes, most=ROUNDS)
    return {**state, "theta": settled["theta"], "tau": settled["tau"]}


class Objective:
    """log p(D | θ) + log p(θ | τ) in training, with τ of the state; `fixed` noise does not move."""

    def __init__(self, fixed: bool) -> None:
        self.fixed = fixed

    def __call__(self, run: Run, params: State, batch: Batch, clock: Clock) -> Any:
        fit = run.train(params["theta"], params, batch, clock)
        at = params["theta"].detach()
        tau = _of_all(run, params).to(at.dtype)
        pull = run.prior.score(at)
        # a Gaussian's log-density, less that under τ = 1
        more = 0.5 * (tau.log() + (tau - 1) * pull * (at - run.prior.mean)).sum(1)
        value = run.prior.log_prob(at) + more

        def add(grad: Tensor) -> Tensor:
            grad = torch.addcmul(grad, tau, pull)
            if self.fixed:
                grad[:, run.layout.slices[NOISE]] = 0.0
            return grad

        return fit.value, fit.changed, Known(value, {"theta": add})


def _of_all(run: Run, params: State) -> Tensor:
    """τ of every weight, [M, P]: 1 for those that are points, and for learned noise."""
    every = torch.ones_like(params["theta"], dtype=torch.float64)
    each = Scales.of(run, params).each(params["tau"])
    return every.index_copy(1, run.subset_index, each.expand(-1, len(run.subset_index)))
