"""Stochastic gradient Nosé–Hoover thermostat: friction that adapts to the noise of mini-batches.

    v ← (1 − α) v − η∇Û(θ) + √(2aηT) ε,    θ ← θ + v,    α ← α + κ (vᵀv / dηT − 1)

Ding, Fang, Babbush, Chen, Skeel & Neven (2014), in the variables v = h p, η = h², α = h ξ; d is the
number of weights that are sampled. The friction α is a state of the chain. It grows where the
velocities are hotter than the temperature, as mini-batch noise makes them, and shrinks where they
are colder, so that the mean of v² is ηT. SGHMC with the same constant friction stays too hot. α
starts at a, whose noise is added; the rest of it balances the noise of the gradients. The
paper has κ = ηT, so that the friction of a small step would need about 1/ηT steps to adapt. Here κ,
the inverse mass of the thermostat, is a setting. It leaves the stationary distribution of θ as it
is; α has a variance of about κ/d in it.

One α serves all weights of a chain. This is right if the gradients' noise has one variance for all
of them. On a quadratic potential of curvature λ, with d large and independent batches whose noise
has the variance C for all weights, the variance of θ is

    (1 − α/2)  times  T/λ,    α (2 − α − ηλ/2) = 2a + ηC/T

so that a bias of order α remains, which depends on the noise through α only. Weights with more
noise than the average are too wide, the others too narrow. Batches are drawn independently, because
the noise of shuffled ones remembers the batches before. Use it instead of `SGHMC` where batches are
small and the added friction is small, too.
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
        """The thermostat stands for noise that does not depend on that of earlier steps."""
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
    """Velocities of the weights that are sampled; the others rest."""
    return v if run.free is None else v * run.free
