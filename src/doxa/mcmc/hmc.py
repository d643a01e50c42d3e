"""Hamiltonian Monte Carlo with a fixed number of leapfrog steps.

    H(θ, p) = −log p(θ, D)/T + ½ pᵀ M⁻¹ p
    p ← p + ½ε∇log p(θ, D)/T;   θ ← θ + ε M⁻¹ p;   p ← p + ½ε∇log p(θ, D)/T
    accept with probability min(1, exp(H(θ, p) − H(θ', p')))

Neal (2011). All chains advance together. Burn-in adapts the step size and the mass, which is
diagonal or dense (`doxa.mcmc.hamiltonian`). A trajectory of fixed length may return to its start or
to the mirror image of it, and the energy of the chain then hardly changes. So the length of each
trajectory is drawn uniformly between `jitter` · ε · leapfrog and ε · leapfrog. This is done by
scaling the step size, and needs no additional gradient. The draws are exact up to Monte Carlo
error. The cost is draws × leapfrog gradients over all data. `NUTS` chooses the length itself.
Dropout is off and BatchNorm is frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch
from doxa.engine.execute import Recorded
from doxa.mcmc.hamiltonian import KINDS, Hamiltonian
from doxa.mcmc.kernel import DIVERGENT, Move, Point, acceptance, leapfrog, trajectory_of
from doxa.method import Clock, Info, Run, State
from doxa.method.method import between, one_of, positive, whole
from doxa.method.trace import Proposal

Integrator = Callable[[Point, Tensor], Point]  # (start, step size [M, 1]) to the end point


@store.register("hmc")
@dataclass(frozen=True)
class HMC(Hamiltonian):
    """Static Hamiltonian Monte Carlo.

    Parameters
    ----------
    draws, burn_in : int
        Transitions that are kept from each chain (after `thin`), and transitions before them.
    leapfrog : int
        Gradient steps in one transition.
    target_accept : float
        The acceptance rate to which the step size is adapted.
    thin : int
        Keep every `thin`-th draw.
    temperature : float
        T.
    mass : str
        "diagonal" (one scale per parameter) or "full" (a covariance matrix, for at most a few
        hundred parameters).
    jitter : float
        The length of the shortest trajectory, as a fraction of the longest. 1 is a fixed length.
    """

    name: ClassVar[str] = "hmc"
    renamed_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {"mass": {"dense": "full"}}
    default_members: ClassVar[int] = 4

    draws: int = whole(500, least=1)
    burn_in: int = whole(500, least=0)
    leapfrog: int = whole(20, least=1)
    target_accept: float = between(0.8, 0, 1, "()", per_run=True)
    thin: int = whole(1, least=1)
    temperature: float = positive(1.0, per_run=True)
    mass: str = one_of(*KINDS)
    jitter: float = between(0.3, 0, 1, "(]")

    @property
    def gradients(self) -> tuple[int, int]:
        return (self.transitions * self.leapfrog,) * 2

    def captures(self, run: Run) -> bool:
        """On a GPU, a whole transition is captured as one graph. On the CPU, each leapfrog step is
        recorded or compiled."""
        return run.device.type != "cpu"

    def move(self, run: Run) -> tuple[Move, Recorded | None]:
        if self.captures(run):
            return super().move(run)

        def inner(state: State, batch: Batch, values: State) -> State:
            point = Point(*(values[name] for name in Point._fields))
            density = self.density(run, state, batch)
            there = leapfrog(density, point, values["metric"], values["step"])
            return {**values, **there._asdict()}

        recorded = Recorded(run, inner, self.transitions * self.leapfrog)

        def move(state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
            path: list[Point] = []

            def trajectory(point: Point, step: Tensor) -> Point:
                values = {**point._asdict(), "metric": state["metric"], "step": step}
                for _ in range(self.leapfrog):
                    values = recorded(state, batch, clock, values)
                    if clock.trace is not None:  # a recording overwrites its values
                        path.append(Point(*(values[name].clone() for name in Point._fields)))
                return Point(*(values[name] for name in Point._fields))

            found = self._transition(state, clock, trajectory, path)
            recorded.end_transition()
            return found

        return move, recorded

    def transition(self, run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        density = self.density(run, state, batch)
        path: list[Point] = []
        trajectory = lambda point, step: leapfrog(  # noqa: E731
            density, point, state["metric"], step, self.leapfrog,
            None if clock.trace is None else path,
        )  # fmt: skip
        return self._transition(state, clock, trajectory, path)

    def _transition(
        self, state: State, clock: Clock, trajectory: Integrator, path: Sequence[Point] = ()
    ) -> tuple[State, Info]:
        start = self.depart(state, clock)
        share = self.jitter + (1 - self.jitter) * clock.uniform(1)  # [M, 1]
        step = state["step"].unsqueeze(1) * share
        end = trajectory(start, step)
        error = end.energy - start.energy  # [M]; NaN if both energies are infinite
        rate = acceptance(-error)
        accept = clock.uniform(1).squeeze(1) < rate
        take = accept.unsqueeze(1)
        if clock.trace is not None:
            clock.trace.append(trajectory_of([start, *path], step))
            clock.trace.append(Proposal(start.theta, end.theta, -error, rate, accept))
        new = {
            **state,
            "theta": torch.where(take, end.theta, start.theta),
            "grad": torch.where(take, end.grad, start.grad),
            "log_density": torch.where(accept, end.log_density, start.log_density),
        }
        info = {
            "accept": rate,
            "energy": torch.where(accept, end.energy, start.energy),
            "divergent": (~(error < DIVERGENT)).to(rate.dtype),
            "leapfrogs": torch.full_like(rate, self.leapfrog),
            "step_size": state["step"],
        }
        return new, info
