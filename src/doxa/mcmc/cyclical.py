"""Cyclical stochastic gradient MCMC: a cyclical step size that visits several modes.

    η_k = η₀/2 · [ cos(π k/K) + 1 ],   k = 0 … K − 1 within each of the cycles

Zhang, Li, Zhang, Chen & Wilson (2020). In the first part of a cycle (`exploration`), the chain
descends without noise at a large step size. In the rest it samples with noise, while the step size
falls to zero. Then the step size returns to η₀, and the chain can move to another mode. The steps
are those of SGLD or SGHMC. Use the method if the posterior has many modes and one chain must visit
several. Modes are not weighted by their probability: every cycle has the same weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from doxa import store
from doxa.mcmc.stochastic import StochasticGradient, rates
from doxa.method import Clock, Run, Stage, State
from doxa.method.method import between, one_of, positive, whole


@store.register("cyclical")
@dataclass(frozen=True)
class CyclicalSGMCMC(StochasticGradient):
    """SGLD or SGHMC under a cyclical step size.

    Parameters
    ----------
    inner : str
        "sgld" or "sghmc".
    cycles : int
        The number of cycles of the step size.
    draws, thin : int
        Draws kept from each chain in each cycle, `thin` steps apart.
    exploration : float
        The share of a cycle, in [0, 1), that is without noise. It comes before the draws, and a
        cycle has draws · thin / (1 − exploration) steps.
    step_size : float or None
        η₀, the step size at the start of each cycle. None: the learning rate of `fit` over n.
    friction : float
        α of SGHMC.
    temperature : float
        T.
    """

    name: ClassVar[str] = "cyclical"
    streams: ClassVar[Literal["batches", "passes"] | None] = "batches"
    renamed: ClassVar[Mapping[str, str]] = {"step": "step_size"}
    default_rate: ClassVar[float] = 1e-2
    columnwise: ClassVar[bool] = True

    inner: str = one_of("sgld", "sghmc")
    cycles: int = whole(4, least=1)
    draws: int = whole(25, least=1)
    thin: int = whole(10, least=1)
    exploration: float = between(0.8, 0, 1, "[)")
    step_size: float | None = positive(None, per_run=True)
    friction: float = between(0.1, 0, 1, "(]")
    temperature: float = positive(1.0, per_run=True)

    @property
    def explored(self) -> int:
        """The number of steps of a cycle without noise."""
        return round(self.draws * self.thin * self.exploration / (1.0 - self.exploration))

    @property
    def length(self) -> int:
        """The number of steps of a cycle."""
        return self.explored + self.draws * self.thin

    def memory(self, run: Run, theta: Tensor) -> State:
        return {"velocity": torch.zeros_like(theta)} if self.inner == "sghmc" else {}

    def stages(self, run: Run) -> Iterable[Stage]:
        yield from self.maximum(run)
        sampled, first = self.draws * self.thin, self.explored
        at = torch.arange(self.length, dtype=torch.float64) / self.length
        size = rates(run, self, 0.5 * (1.0 + torch.cos(math.pi * at)))  # η_k
        explore, sample = self.step_of(run, self._descend), self.step_of(run)
        for i in range(1, self.cycles + 1):
            if first:
                yield Stage(f"explore {i}", explore, first, self.rows, rates=size[:first])
            yield Stage(
                f"sample {i}", sample, sampled, self.rows, keep=self.thin, rates=size[first:]
            )

    @property
    def _damping(self) -> float:
        return 1.0 if self.inner == "sgld" else self.friction

    def _descend(self, run: Run, state: State, grad: Tensor, clock: Clock) -> State:
        return self._pushed(state, clock.rate * grad)

    def move(self, run: Run, state: State, grad: Tensor, clock: Clock) -> State:
        eta, t = clock.rate, run.setting(self, "temperature")
        heat = 2.0 * self._damping * t * eta
        return self._pushed(state, eta * grad + heat**0.5 * clock.noise(*grad.shape[1:]))

    def _pushed(self, state: State, push: Tensor) -> State:
        if self.inner == "sgld":
            return {"theta": state["theta"] + push}
        velocity = (1.0 - self._damping) * state["velocity"] + push
        return {"theta": state["theta"] + velocity, "velocity": velocity}
