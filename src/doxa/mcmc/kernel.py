"""Shared by all samplers with an acceptance test: the target, the stages and the posterior.

The target is exp(log_joint/T), where log_joint is that of a model or a plain log density. Burn-in
is one stage, so that it is recorded or compiled only once. Changes at the ends of its windows are
made between steps.

The leapfrog integrator is one reversible, volume-preserving step of Hamiltonian dynamics:

    H(θ, p) = −log π(θ) + ½ |p|²,      θ = F φ,   F Fᵀ = M⁻¹
    p ← p + ½ε Fᵀ∇log π(θ);   θ ← θ + ε F p;   p ← p + ½ε Fᵀ∇log π(θ)

The momentum is stored in coordinates in which it is standard normal. In textbooks (Neal, 2011) the
momentum r has the covariance M. Here p = Fᵀ r, and the velocity is M⁻¹ r = F p. The integrator is
the same, and neither the kinetic energy nor the test for a U-turn uses the mass. F is the `metric`:
one standard deviation per parameter, [M, P], or a lower triangular matrix per chain, [M, P, P]. If
a row of F is zero, its parameter is fixed. The energy error of a trajectory of given length falls
as ε².
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from doxa.data import Batch
from doxa.engine.execute import Recorded
from doxa.mcmc.convergence import chain_status, concerns
from doxa.method import Clock, Hooks, Info, Method, Run, Stage, State, log_joint, optimise
from doxa.method.trace import Trajectory
from doxa.posterior import Posterior, SamplePosterior

DIVERGENT = 1000.0  # energy error above which a transition is divergent, as in Stan

ValueAndGrad = Callable[[Tensor], tuple[Tensor, Tensor]]  # θ [M, P] to log π [M] and its gradient


class Point(NamedTuple):
    """A point of a trajectory: position, momentum, and log π with its gradient at the position."""

    theta: Tensor  # [M, P]
    momentum: Tensor  # [M, P], standard normal at rest
    log_density: Tensor  # [M]
    grad: Tensor  # [M, P]

    @property
    def energy(self) -> Tensor:
        """H, [M]. It is infinite if its value is NaN."""
        energy = 0.5 * self.momentum.square().sum(1) - self.log_density
        return torch.nan_to_num(energy, nan=torch.inf, posinf=torch.inf, neginf=torch.inf)


def leapfrog(
    density: ValueAndGrad, point: Point, metric: Tensor, step: Tensor, steps: int = 1,
    path: list[Point] | None = None,
) -> Point:  # fmt: skip
    """Integrate the Hamiltonian dynamics.

    Parameters
    ----------
    density : callable
        log π and its gradient, as a function of θ [M, P].
    point : Point
        The start.
    metric : Tensor
        F, [M, P] or [M, P, P].
    step : Tensor of shape [M, 1]
        The step size ε. A negative one integrates backwards in time.
    steps : int
        The number of steps.
    path : list of Point, optional
        The points after each step are appended to it.

    Returns
    -------
    Point
        The end.
    """
    theta, momentum, value, grad = point
    momentum = momentum + 0.5 * step * pull(metric, grad)
    for i in range(steps):
        theta = theta + step * push(metric, momentum)
        value, grad = density(theta)
        if path is not None:
            path.append(Point(theta, momentum + 0.5 * step * pull(metric, grad), value, grad))
        momentum = momentum + (0.5 if i == steps - 1 else 1.0) * step * pull(metric, grad)
    return Point(theta, momentum, value, grad)


def trajectory_of(path: Sequence[Point], step: Tensor) -> Trajectory:
    """The record of a trajectory: its points from the start on, and its step size [M, 1]."""
    return Trajectory(
        torch.stack([point.theta for point in path]),
        torch.stack([point.momentum for point in path]),
        torch.stack([point.energy for point in path]), step.squeeze(1),
    )  # fmt: skip


def push(metric: Tensor, momentum: Tensor) -> Tensor:
    """The velocity F p of a momentum p, [M, P]."""
    if metric.ndim == 2:
        return metric * momentum
    return torch.bmm(metric, momentum.unsqueeze(2)).squeeze(2)


def pull(metric: Tensor, grad: Tensor) -> Tensor:
    """The force Fᵀ∇log π on the momentum, from the gradient ∇log π, [M, P]."""
    if metric.ndim == 2:
        return metric * grad
    return torch.bmm(grad.unsqueeze(1), metric).squeeze(1)


def free(metric: Tensor) -> Tensor:
    """1 for a parameter that moves, 0 for a fixed one: [M, P]."""
    scale = metric if metric.ndim == 2 else metric.diagonal(dim1=1, dim2=2)
    return (scale > 0).to(metric.dtype)


Move = Callable[[State, Batch, Clock], tuple[State, Info]]


class Kernel(Method):
    """Base of Metropolis, MALA, HMC and NUTS. Subclasses are frozen dataclasses that have these
    fields and others."""

    draws: int
    burn_in: int
    thin: int
    temperature: float
    controls: ClassVar[tuple[str, ...]] = ("step_size", "temperature", "mass")
    shares: ClassVar[str] = "both"
    uses_rate: ClassVar[bool] = False  # only for the maximum of weights that are point estimates
    tallied: ClassVar[tuple[str, ...]] = (
        "accept",
    )  # entries of Info that are summed over the transitions of the sampling stage

    @abstractmethod
    def transition(self, run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        """One transition of every chain: the new state, and statistics as tensors [M]. They always
        include "accept", and "energy" and "divergent" if the kernel has them."""

    @property
    def kept_draws(self) -> int:
        return self.draws

    def captures(self, run: Run) -> bool:
        """Whether a transition is executed as one fixed sequence of tensor operations."""
        return True

    @property
    def transitions(self) -> int:
        """The number of transitions, including burn-in."""
        return self.burn_in + self.draws * self.thin

    def move(self, run: Run) -> tuple[Move, Recorded | None]:
        """The function that makes a transition, and how its parts are recorded or compiled if it is
        not captured as a whole."""
        return partial(self.transition, run), None

    @abstractmethod
    def own_state(self, run: Run, unfixed: Tensor) -> State:
        """The entries of the state that this kernel adds. `unfixed` [M, P] is 1 for parameters that
        move, and 0 for fixed ones."""

    @abstractmethod
    def adapt(self, run: Run, state: State, info: Info) -> State:
        """The state after the adaptation that follows each transition of burn-in."""

    @abstractmethod
    def settle(self, run: Run, state: State) -> State:
        """The state at the end of burn-in."""

    def begin(self, run: Run, state: State) -> State:
        """The state at the start of burn-in."""
        return state

    def hooks(self) -> Hooks:
        """The changes of the state between transitions of burn-in, by number of the transition."""
        return {}

    def report(self, state: State) -> dict[str, Any]:
        """The diagnostics of this kernel."""
        return {}

    def init(self, run: Run) -> State:
        run.say_frozen(self.name)
        state = run.init_network()
        theta = state["theta"]
        zero = theta.new_zeros(len(theta))
        moving = torch.ones_like(theta) if run.free is None else run.free
        counts = ("transitions", *(f"sum.{name}" for name in self.tallied), *_ENERGY)
        return {
            **state, "grad": torch.zeros_like(theta), "log_density": zero - torch.inf,
            **{name: zero.clone() for name in counts},
            **self.own_state(run, moving.expand_as(theta)),
        }  # fmt: skip

    def stages(self, run: Run) -> Iterable[Stage]:
        if run.problem.partial:
            yield optimise(log_joint, run.steps, name="maximum")  # of points
        move, recorded = self.move(run)
        if self.burn_in:
            burn_in = self._stage("burn-in", self.burn_in, move, adapting=True)
            burn_in.hooks, burn_in.capturable = self.hooks(), self.captures(run)
            burn_in.recorded = recorded
            burn_in.enter = lambda run, state: self.begin(run, self._arrive(run, state))
            yield burn_in
        sample = self._stage("sample", self.draws * self.thin, move, adapting=False)
        sample.keep, sample.capturable = self.thin, self.captures(run)
        sample.recorded, sample.enter = recorded, self._enter_sampling
        yield sample

    def _stage(self, name: str, steps: int, move: Move, adapting: bool) -> Stage:
        def step(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
            new, info = move(state, batch, clock)
            new = self.adapt(run, new, info) if adapting else self._tally(new, info)
            return new, {**info, "log_density": new["log_density"]}

        return Stage(name, step, steps, "all")

    def _enter_sampling(self, run: Run, state: State) -> State:
        state = self._arrive(run, state)
        return self.settle(run, state) if self.burn_in else state

    def with_step(self, state: State, step: Tensor) -> State:
        """The state with another step size [M], from which burn-in adapts it anew."""
        return {**state, "step": step}

    def change(self, run: Run, state: State, name: str, value: Tensor) -> tuple[Run, State]:
        """A mass m is one for all parameters: M = m I."""
        if name == "step_size":
            return run, self.with_step(state, value)
        if name == "mass":
            metric = state["metric"]
            scale = free(metric) * value.rsqrt().unsqueeze(1)
            return run, {**state, "metric": scale if metric.ndim == 2 else scale.diag_embed()}
        run, state = super().change(run, state, name, value)
        return run, self._arrive(run, state)

    def restart(self, run: Run, state: State, theta: Tensor) -> State:
        return self._arrive(run, super().restart(run, state, theta))

    def density(self, run: Run, state: State, batch: Batch) -> ValueAndGrad:
        """log π(θ) = log_joint/T and its gradient, as a function of θ [M, P]."""
        if self.temperature == 1.0 and "temperature" not in run.hyper:
            return lambda theta: run.joint(theta, batch, state)
        heat = run.field(self, "temperature")

        def tempered(theta: Tensor) -> tuple[Tensor, Tensor]:
            value, grad = run.joint(theta, batch, state)
            return value / heat, grad / heat.unsqueeze(1)

        return tempered

    def _arrive(self, run: Run, state: State) -> State:
        """The state after the density and its gradient are computed at its position."""
        value, grad = self.density(run, state, run.all_rows())(state["theta"])
        return {**state, "log_density": value, "grad": grad}

    def _tally(self, state: State, info: Info) -> State:
        """The state after a transition is added to the sums over the sampling stage, and to the
        statistics for E-BFMI."""
        count = state["transitions"] + 1
        sums = {f"sum.{name}": state[f"sum.{name}"] + info[name] for name in self.tallied}
        new = {**state, **sums, "transitions": count}
        return {**new, **_energies(state, info["energy"], count)} if "energy" in info else new

    def share(self, state: State, name: str) -> Tensor:
        """The mean of a tallied quantity over transitions, [M]."""
        return state[f"sum.{name}"] / state["transitions"].clamp(min=1)

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        last = state["theta"].unsqueeze(1)  # [K, 1, P]: without kept draws
        samples = last if kept is None else kept.transpose(0, 1).contiguous()
        posterior = SamplePosterior(samples=samples, **run.common(self), **run.shared(state))
        accept = self.share(state, "accept")
        posterior.record.diagnostics |= {"accept": accept.tolist(), **self.report(state)}
        chain_status(posterior, run, float(accept.min()), concerns(posterior.diagnostics))
        return posterior


def acceptance(change: Tensor) -> Tensor:
    """The acceptance probability min(1, exp(change)) for a change of the log density or of −H. It
    is 0 if the change is NaN."""
    return torch.nan_to_num(change.clamp(max=0.0).exp(), nan=0.0)


_ENERGY = ("energy.last", "energy.mean", "energy.square", "energy.jumps")


def _energies(state: State, energy: Tensor, count: Tensor) -> State:
    """Update the statistics for E-BFMI: the running mean of the energy, its sum of squares, and the
    sum of squared differences between successive transitions."""
    away = energy - state["energy.mean"]
    mean = state["energy.mean"] + away / count
    jump = torch.where(count > 1, energy - state["energy.last"], torch.zeros_like(energy))
    return {
        "energy.last": energy, "energy.mean": mean,
        "energy.square": state["energy.square"] + away * (energy - mean),
        "energy.jumps": state["energy.jumps"] + jump.square(),
    }  # fmt: skip
