"""Burn-in as Stan does it: a fast start, slow windows that double, a fast end.

In all of them dual averaging moves the step size towards a mean acceptance of `target`,

    log ε_t = μ − √t/γ · Σ(δ − α)/(t + t₀),   log ε̄ = Σ t^{−κ}-weighted average,   μ = log 10ε₀,

γ = 0.05, t₀ = 10, κ = 0.75 (Hoffman & Gelman, 2014); each slow window ends with a new mass matrix
(`doxa.mcmc.mass`), from which a step size is sought afresh: it is doubled or halved until the
acceptance of a single step crosses 0.8. Fast start and end are 75 and 50 transitions, the first
slow window 25; of a burn-in below 150 the start is 15 % and the end a third, 20 at most (Stan's is
10 %, too few for dual averaging to come down from 10ε₀); below 20 only the step size is adapted.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from doxa.mcmc.leapfrog import Point, ValueAndGrad, free, leapfrog
from doxa.method import State
from doxa.noise import Noise

_START, _END, _FIRST = 75, 50, 25
_CROSSING = math.log(0.8)


def windows(burn_in: int) -> list[int]:
    """Where slow windows begin and end: [start, end, end, …], or nothing to learn a mass from."""
    if burn_in < 20:
        return []
    start, end, size = _START, _END, _FIRST
    if burn_in < start + end + size:
        start, end = int(0.15 * burn_in), min(20, burn_in // 3)
        size = burn_in - start - end
    bounds, stop = [start], burn_in - end
    while bounds[-1] < stop:
        after = bounds[-1] + size
        bounds.append(stop if after + 2 * size > stop else after)  # no room for the next: one long
        size *= 2
    return bounds


def start_dual(step: Tensor) -> State:
    """Dual averaging from this step size [M]."""
    return {
        "step": step, "dual.error": torch.zeros_like(step), "dual.count": torch.zeros_like(step),
        "dual.log_step": step.log(), "dual.centre": (10 * step).log(),
    }  # fmt: skip


def average(state: State, accept: Tensor, target: Tensor) -> State:
    """One update of the step size from a transition's mean acceptance [M]."""
    count = state["dual.count"] + 1
    weight = 1 / (count + 10)
    error = (1 - weight) * state["dual.error"] + weight * (target - accept)
    log_step = state["dual.centre"] - count.sqrt() / 0.05 * error
    power = count**-0.75
    averaged = power * log_step + (1 - power) * state["dual.log_step"]
    return {
        "step": log_step.exp(), "dual.error": error, "dual.count": count,
        "dual.log_step": averaged, "dual.centre": state["dual.centre"],
    }  # fmt: skip


def seek_step(density: ValueAndGrad, state: State, noise: Noise) -> Tensor:
    """A step size at which a single leapfrog is accepted with a probability near 0.8: [M]."""
    theta, metric = state["theta"], state["metric"]
    moving = free(metric)

    def fine(step: Tensor, trial: int) -> Tensor:
        momentum = noise.normal((theta.shape[1],), trial) * moving
        point = Point(theta, momentum, state["log_density"], state["grad"])
        after = leapfrog(density, point, metric, step.unsqueeze(1))
        return point.energy - after.energy > _CROSSING

    step = state["step"]
    growing = fine(step, 0)
    seeking = torch.isfinite(state["log_density"])
    factor = torch.where(growing, 2.0, 0.5).to(step)
    for trial in range(1, 60):
        if not bool(seeking.any()):
            break
        step = torch.where(seeking, step * factor, step)
        seeking = seeking & (fine(step, trial) == growing)
    return step
