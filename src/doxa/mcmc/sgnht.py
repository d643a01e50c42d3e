"""Stochastic gradient Nosé–Hoover thermostat: friction that adapts to the noise of mini-batches.

    v ← (1 − α) v − η∇Û(θ) + √(2aηT) ε,    θ ← θ + v,    α ← α + κ (vᵀv / dηT − 1)

Ding, Fang, Babbush, Chen, Skeel & Neven (2014), in the variables v = h p, η = h², α = h ξ; d is the
number of weights that are sampled. The friction α is part of the state of the chain. It grows if
the mean of v² is above ηT, because of the noise of mini-batches, and shrinks if it is below, so
that the mean of v² becomes ηT. With the same constant friction, SGHMC would have too large a
variance. α starts at a, the friction whose noise is added. The rest of α balances the noise of the
gradients. In the paper κ = ηT, so that with a small step size α would need about 1/ηT steps to
adapt. Here κ, the inverse mass of the thermostat, is a setting. It does not change the stationary
distribution of θ. In this distribution, α has a variance of about κ/d.

All weights of a chain share one α. This is right if the noise of the gradients has the same
variance for all weights. On a quadratic potential of curvature λ, with d large and independent
batches whose noise has the variance C for all weights, the variance of θ is

    (1 − α/2)  times  T/λ,    α (2 − α − ηλ/2) = 2a + ηC/T

so that a bias of order α remains, which depends on the noise only through α. The draws of weights
with more noise than the average are too wide, and those of the others too narrow. Batches are drawn
independently, because the noise of shuffled batches is correlated with that of the batches before.
Use the method instead of `SGHMC` if batches are small and the added friction is small too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from doxa import store
from doxa.mcmc.stochastic import StochasticGradient, step_size
from doxa.method import Clock, Run, State
from doxa.method.method import between, positive, whole


@store.register("sgnht")
@dataclass(frozen=True)
class SGNHT(StochasticGradient):
    """Langevin dynamics with momentum and a thermostat, on mini-batches.

    Parameters
    ----------
    draws : int
        The number of draws kept from each chain, `thin` steps apart, after `burn_in` steps.
    burn_in : int
        Steps before the first draw.
    thin : int
        Steps between draws.
    step_size : float or None
        η, which multiplies the gradient of the full-data potential. None: the rate of `fit` over n.
    friction : float
        a in (0, 1], the first value of α, and the friction whose noise is added.
    coupling : float
        κ, by which α changes at each step, relative to the excess of the kinetic energy.
    temperature : float
        T.
    """

    name: ClassVar[str] = "sgnht"

    draws: int = whole(100, least=1)
    burn_in: int = whole(1000, least=0)
    thin: int = whole(10, least=1)
    step_size: float | None = positive(None, per_run=True)
    friction: float = between(0.1, 0, 1, "(]", per_run=True)
    coupling: float = positive(0.01, per_run=True)
    temperature: float = positive(1.0, per_run=True)

    @property
    def rows(self) -> str:
        """The source of a step's rows: independent batches, because the thermostat assumes noise
        that is independent between steps."""
        return "independent"

    def memory(self, run: Run, theta: Tensor) -> State:
        heat = step_size(run, self) * run.setting(self, "temperature")
        v = heat**0.5 * run.noise("velocity").normal(tuple(theta.shape[1:]))
        return {"velocity": sampled(run, v), "friction": run.field(self, "friction").unsqueeze(1)}

    def move(self, run: Run, state: State, grad: Tensor, clock: Clock) -> State:
        theta, v, alpha = state["theta"], state["velocity"], state["friction"]  # [M, P], [M, 1]
        heat = step_size(run, self) * run.setting(self, "temperature")  # ηT
        noise = (2.0 * run.setting(self, "friction") * heat) ** 0.5 * clock.noise(*theta.shape[1:])
        v = sampled(run, (1.0 - alpha) * v + step_size(run, self) * grad + noise)
        size = theta.shape[1] if run.free is None else run.free.sum()  # d
        excess = v.square().sum(1, keepdim=True) / (size * heat) - 1.0
        alpha = alpha + run.setting(self, "coupling") * excess
        return {"theta": theta + v, "velocity": v, "friction": alpha}


def sampled(run: Run, v: Tensor) -> Tensor:
    """The velocities, set to zero for weights that are not sampled."""
    return v if run.free is None else v * run.free
