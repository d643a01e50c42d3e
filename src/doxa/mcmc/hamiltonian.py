"""Shared by HMC, NUTS and MALA: a burn-in that adapts the step size and the mass, and the momentum.

The methods differ in the length of a trajectory and in the point that is taken from it.

**Burn-in** follows Stan: a fast phase, slow windows that double in length, and a last fast phase.
In all phases, dual averaging adapts the step size to a mean acceptance of `target`,

    log ε_t = μ − √t/γ · Σ(δ − α)/(t + t₀),   log ε̄ = Σ t^{−κ}-weighted average,   μ = log 10ε₀,

with γ = 0.05, t₀ = 10, κ = 0.75 (Hoffman & Gelman, 2014). At the end of each slow window, a new
mass matrix is estimated (below), and a new initial step size is found: it is doubled or halved
until the acceptance of a single step crosses 0.8. The first fast phase has 75 transitions, the last
fast phase 50, and the first slow window 25. If the burn-in is shorter than 150, the first fast
phase is 15 % of it, and the last one is a third of it, but at most 20 transitions. (Stan's 10 % is
too few for dual averaging to come down from 10ε₀.) If the burn-in is shorter than 20, only the step
size is adapted.

**The mass matrix** is estimated from the draws of a window:

    M⁻¹ = n/(n+5) · [(1−λ) Σ̂ + λ diag Σ̂] + 10⁻³ · 5/(n+5) · diag Σ̂

Σ̂ contains the variances, or the whole covariance, of the window's n draws of each chain (Welford's
update). Each chain has its own matrix. There are two differences from Stan. First, Stan adds the
identity in place of the last diag Σ̂. The identity is much larger than the variance of parameters
that are small in their units, and than the narrow directions of correlated parameters. Second, Stan
has no λ. Correlations that are estimated from fewer draws than parameters are mostly noise, and
trajectories would follow this noise. λ is the fraction of the correlations that noise explains
(Schäfer & Strimmer, 2005), reduced if there are more draws,

    λ = (1 − n/P)₊ · min(1, Σ_{i<j} (1 − r_ij²)²/(n−1)  /  Σ_{i<j} r_ij²).

It is 0 for a few parameters, so that their correlations are kept, and near 1 for the weights of a
network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from doxa.mcmc.kernel import Kernel, Point, ValueAndGrad, free, leapfrog
from doxa.method import Clock, Hook, Hooks, Info, Run, State
from doxa.noise import Noise

_START, _END, _FIRST = 75, 50, 25
_CROSSING = math.log(0.8)


def windows(burn_in: int) -> list[int]:
    """The transitions at which slow windows begin and end, [start, end, end, …]. Each window begins
    where the one before ends. Empty if no mass is estimated."""
    if burn_in < 20:
        return []
    start, end, size = _START, _END, _FIRST
    if burn_in < start + end + size:
        start, end = int(0.15 * burn_in), min(20, burn_in // 3)
        size = burn_in - start - end
    bounds, stop = [start], burn_in - end
    while bounds[-1] < stop:
        after = bounds[-1] + size
        bounds.append(stop if after + 2 * size > stop else after)  # the last window is longer
        size *= 2
    return bounds


def start_dual(step: Tensor) -> State:
    """The initial state of dual averaging at a step size [M]."""
    return {
        "step": step, "dual.error": torch.zeros_like(step), "dual.count": torch.zeros_like(step),
        "dual.log_step": step.log(), "dual.centre": (10 * step).log(),
    }  # fmt: skip


def average(state: State, accept: Tensor, target: Tensor, gamma: float = 0.05) -> State:
    """One update of dual averaging, from the mean acceptance [M] of a transition."""
    count = state["dual.count"] + 1
    weight = 1 / (count + 10)
    error = (1 - weight) * state["dual.error"] + weight * (target - accept)
    log_step = state["dual.centre"] - count.sqrt() / gamma * error
    power = count**-0.75
    averaged = power * log_step + (1 - power) * state["dual.log_step"]
    return {
        "step": log_step.exp(), "dual.error": error, "dual.count": count,
        "dual.log_step": averaged, "dual.centre": state["dual.centre"],
    }  # fmt: skip


def seek_step(density: ValueAndGrad, state: State, noise: Noise) -> Tensor:
    """A step size at which one leapfrog step is accepted with a probability near 0.8, [M]."""
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


KINDS = ("diagonal", "full")


def start_mass(unfixed: Tensor, kind: str) -> State:
    """The initial state of the mass: 1 for all parameters that move, before any draw.

    Parameters
    ----------
    unfixed : Tensor of shape [M, P]
        1 for parameters that move, 0 for fixed ones.
    kind : str
        "diagonal" or "full".
    """
    metric = unfixed if kind == "diagonal" else torch.diag_embed(unfixed)
    return {"metric": metric.clone(), **_fresh(unfixed, metric)}


def _fresh(theta: Tensor, metric: Tensor) -> State:
    zero = torch.zeros_like(theta)
    return {
        "welford.count": zero[:, 0].clone(), "welford.mean": zero,
        "welford.square": torch.zeros_like(metric),
    }  # fmt: skip


def observe(state: State) -> State:
    """Add the current draw to the running mean and the sum of squares (or of outer products)."""
    count = state["welford.count"] + 1
    away = state["theta"] - state["welford.mean"]
    mean = state["welford.mean"] + away / count.unsqueeze(1)
    rest = state["theta"] - mean
    square = state["welford.square"]
    square = square + away * rest if square.ndim == 2 else torch.baddbmm(
        square, away.unsqueeze(2), rest.unsqueeze(1)
    )  # fmt: skip
    return {"welford.count": count, "welford.mean": mean, "welford.square": square}


def forget(state: State) -> State:
    """Begin a window: forget the draws of the previous window."""
    return {**state, **_fresh(state["theta"], state["metric"])}


def window_hooks(burn_in: int, end: Callable[[int], Hook]) -> Hooks:
    """The hooks of a burn-in: `forget` runs at the start of the first slow window, and `end(t)` at
    the end t of each window."""
    bounds = windows(burn_in)
    if not bounds:
        return {}
    start, *ends = bounds
    return {start: lambda run, state: forget(state), **{t: end(t) for t in ends}}


def learn_mass(state: State) -> State:
    """End a window: estimate the metric from its draws, and begin a new window. If a parameter of a
    chain never moved in the window, the metric of this chain does not change."""
    moving, square = free(state["metric"]), state["welford.square"]
    n = state["welford.count"].reshape(-1, *(1,) * (square.ndim - 1))
    spread = square / (n - 1).clamp(min=1)
    each = spread if square.ndim == 2 else spread.diagonal(dim1=1, dim2=2)  # variances, [M, P]
    shrunk, ridge = spread * (n / (n + 5)), 1e-3 * 5 / (n + 5)
    if square.ndim == 2:
        metric = (shrunk + ridge * each).sqrt() * moving
    else:
        fixed = (1 - moving).diag_embed()  # a matrix with zero diagonal entries has no factor
        weight = _estimation_error(spread, each, n)
        alone = shrunk.diagonal(dim1=1, dim2=2).diag_embed()
        whole = shrunk + weight * (alone - shrunk) + ridge * each.diag_embed() + fixed
        factor, failed = torch.linalg.cholesky_ex(whole)
        scales = whole.diagonal(dim1=1, dim2=2).sqrt().diag_embed()
        broken = (failed > 0) | ~torch.isfinite(factor).all(2).all(1)
        metric = torch.where(broken[:, None, None], scales, factor) * moving.unsqueeze(2)
    moved = ((each > 0) | (moving == 0)).all(1)
    fine = torch.isfinite(metric).flatten(1).all(1) & moved
    fine = fine.reshape(-1, *(1,) * (metric.ndim - 1))
    return forget({**state, "metric": torch.where(fine, metric, state["metric"])})


def _estimation_error(spread: Tensor, variances: Tensor, n: Tensor) -> Tensor:
    """λ, the fraction of the correlations that the noise of n draws explains, [M, 1, 1]."""
    scale = torch.where(variances > 0, variances.rsqrt(), 0.0)  # [M, P]
    squares = (spread * scale.unsqueeze(1) * scale.unsqueeze(2)).square().triu(1)
    pairs = ((scale.unsqueeze(1) * scale.unsqueeze(2)) > 0).triu(1)
    draws = n[:, 0, 0]
    noise = torch.where(pairs, (1 - squares).square(), 0.0).sum((1, 2)) / (draws - 1)
    share = (noise / squares.sum((1, 2))).nan_to_num(nan=1.0).clamp(max=1.0)
    few = (1 - draws / (scale > 0).sum(1).clamp(min=1)).clamp(min=0.0)
    return (few * share)[:, None, None]


class Hamiltonian(Kernel):
    """Base of HMC, NUTS and MALA."""

    tallied: ClassVar[tuple[str, ...]] = ("accept", "divergent", "leapfrogs")
    gamma: ClassVar[float] = 0.05  # of dual averaging
    copies: ClassVar[float] = 36.0
    state_copies: ClassVar[float | None] = 1.0

    target_accept: float
    mass: str

    def own_state(self, run: Run, unfixed: Tensor) -> State:
        moving = unfixed.sum(1).clamp(min=1)
        step = 0.1 * moving**-0.25
        early = torch.full_like(step, float(bool(windows(self.burn_in))))
        own = {**start_mass(unfixed, self.mass), **start_dual(step)}
        return {**own, "early": early}  # 1 until burn-in has estimated the first mass

    def adapt(self, run: Run, state: State, info: Info) -> State:
        target = run.field(self, "target_accept")
        new = average(state, info["accept"], target, self.gamma)
        return {**state, **new, **observe(state)}

    def hooks(self) -> Hooks:
        return window_hooks(self.burn_in, self._window_end)

    def _window_end(self, t: int) -> Hook:
        def mark(run: Run, state: State) -> State:
            learned = {**learn_mass(state), "early": torch.zeros_like(state["early"])}
            return self._seek(run, learned, t)

        return mark

    def begin(self, run: Run, state: State) -> State:
        return self._seek(run, state, 0)

    def _seek(self, run: Run, state: State, t: int) -> State:
        density = self.density(run, state, run.all_rows())
        return {**state, **start_dual(seek_step(density, state, run.noise(f"step size/{t}")))}

    def settle(self, run: Run, state: State) -> State:
        """Use the averaged step size. After only a few updates, it is limited to the initial step
        size."""
        averaged, sought = state["dual.log_step"].exp(), state["dual.centre"].exp() / 10
        few = state["dual.count"] < 10
        return {**state, "step": torch.where(few, torch.minimum(sought, averaged), averaged)}

    def with_step(self, state: State, step: Tensor) -> State:
        return {**state, **start_dual(step)}

    def depart(self, state: State, clock: Clock) -> Point:
        """The current draw with a new momentum."""
        theta = state["theta"]
        momentum = clock.noise(theta.shape[1]) * free(state["metric"])
        return Point(theta, momentum, state["log_density"], state["grad"])

    def report(self, state: State) -> dict[str, Any]:
        spread = state["energy.square"]
        ratio = torch.where(spread > 0, state["energy.jumps"] / spread, torch.nan)
        counted = [name for name in ("leapfrogs",) if name in self.tallied]
        return {
            "step_size": state["step"].tolist(),
            "divergences": int(state["sum.divergent"].sum()),
            "divergent_share": float(self.share(state, "divergent").mean()),
            **{name: self.share(state, name).tolist() for name in counted},
            "ebfmi": ratio.tolist(),
            "transitions": int(state["transitions"].max()),
        }
