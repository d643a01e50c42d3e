"""Stochastic gradient Hamiltonian Monte Carlo: momentum SGD with the right amount of noise.

    v ← (1 − α) v − η ∇Û(θ) + √(2 (α − β̂) η T) ε,    θ ← θ + v

Chen, Fox & Guestrin (2014), eq. 15. It is the Euler discretisation of a damped mass in the
potential U. With time step dt, mass m and damping β,

    p ← (1 − dt β/m) p − dt ∇Û + noise,   W ← W + (dt/m) p      gives   η = dt²/m,  α = dt β/m,

and without the noise it is momentum SGD (`momentum_sgd`). On a quadratic potential of curvature λ
with independent gradient noise of variance C, the variance of θ is

    (1 + (ηC/2T − β̂)/α) / (1 − ηλ / (4 − 2α))   times   T/λ.

Friction alone causes no bias. With small friction, the noise of mini-batches increases the
variance. With β̂ = 0, batches are those of shuffled epochs, whose noise increases it less. With
β̂ > 0, batches are drawn independently, because the noise of shuffled batches depends on λ, and no
β̂ would be right for all weights. Use the method instead of `SGLD` if curvatures differ: with
momentum, the chain moves along flat directions √(1/ηλ) times faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from doxa import store
from doxa.errors import MethodError
from doxa.mcmc.stochastic import StochasticGradient, step_size
from doxa.method import Clock, Run, State
from doxa.method.method import between, positive, whole


@store.register("sghmc")
@dataclass(frozen=True)
class SGHMC(StochasticGradient):
    """Langevin dynamics with momentum, on mini-batches.

    Parameters
    ----------
    draws, thin, burn_in : int
        Draws kept from each chain, `thin` steps apart, after `burn_in` steps.
    step_size : float or None
        η, which multiplies the gradient of the full-data potential. None: the learning rate of
        `fit` over n.
    friction : float
        α in (0, 1], one minus the momentum of SGD.
    gradient_noise : float
        β̂ in [0, α), the part of the friction whose noise already comes from the mini-batches. For
        gradient noise of variance C, β̂ = ηC/2T. With β̂ > 0, batches are drawn independently. With
        0, all of the noise is added.
    temperature : float
        T.
    """

    name: ClassVar[str] = "sghmc"
    streams: ClassVar[Literal["batches", "passes"] | None] = "batches"
    renamed: ClassVar[Mapping[str, str]] = {"step": "step_size"}
    controls: ClassVar[tuple[str, ...]] = ("step_size", "temperature", "friction")
    columnwise: ClassVar[bool] = True
    state_copies: ClassVar[float | None] = 1.0
    large_copies: ClassVar[tuple[float, float] | None] = (4.0, 1.0)  # θ, v, the last good ones; ∇

    draws: int = whole(100, least=1)
    burn_in: int = whole(1000, least=0)
    thin: int = whole(10, least=1)
    step_size: float | None = positive(None, per_run=True)
    friction: float = between(0.1, 0, 1, "(]", per_run=True)
    gradient_noise: float = between(0.0, 0, 1, "[)")
    temperature: float = positive(1.0, per_run=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradient_noise >= self.friction:
            raise MethodError(
                f"gradient_noise={self.gradient_noise!r} must lie in [0, friction): noise is added "
                "for the rest of the friction"
            )

    @property
    def rows(self) -> str:
        """The source of a step's rows. With β̂ > 0, batches are independent; in shuffled epochs the
        noise is smaller, and β̂ would be too large."""
        return "independent" if self.gradient_noise else "mini"

    def memory(self, run: Run, theta: Tensor) -> State:
        return {"velocity": torch.zeros_like(theta)}

    def move(self, run: Run, state: State, grad: Tensor, clock: Clock) -> State:
        theta, v = state["theta"], state["velocity"]  # [M, P]
        eta, alpha = step_size(run, self), run.setting(self, "friction")
        heat = 2.0 * (alpha - self.gradient_noise) * eta * run.setting(self, "temperature")
        v = (1.0 - alpha) * v + eta * grad + heat**0.5 * clock.noise(*theta.shape[1:])
        return {"theta": theta + v, "velocity": v}


def momentum_sgd(
    rate: float, momentum: float, n: float = 1.0, averaged: bool = False
) -> tuple[float, float]:
    """The settings of SGHMC that is momentum SGD if its noise is removed.

    Heavy-ball SGD on the mean loss L = U/n is u ← μu + ∇L, θ ← θ − rate · u. With v = −rate · u
    this is v ← μv − (rate/n) ∇U, θ ← θ + v. So friction = 1 − μ and step = rate/n.

    Parameters
    ----------
    rate : float
        The learning rate of SGD.
    momentum : float
        μ, the momentum of SGD.
    n : float
        The number of rows if `rate` is for the mean loss; 1 if it is for U.
    averaged : bool
        Whether SGD averages gradients, u ← μu + (1 − μ) ∇L. Then step = rate (1 − μ)/n.

    Returns
    -------
    tuple of float
        (step, friction) of SGHMC.

    Examples
    --------
    >>> step, friction = momentum_sgd(rate=0.1, momentum=0.75, n=100)
    >>> step, friction
    (0.001, 0.25)
    """
    friction = 1.0 - momentum
    return rate * (friction if averaged else 1.0) / n, friction


def as_momentum_sgd(
    step: float, friction: float, n: float = 1.0, averaged: bool = False
) -> tuple[float, float]:
    """(rate, momentum) of SGD, from the settings of SGHMC: the inverse of `momentum_sgd`."""
    return step * n / (friction if averaged else 1.0), 1.0 - friction
