"""Stochastic gradient Langevin dynamics.

    θ ← θ − η_t ∇Û(θ) + √(2 η_t T) ε,   ε ~ N(0, I)
    η_t = a (b + t)^−γ,   ½ < γ ≤ 1,   so that Σ η_t = ∞ and Σ η_t² < ∞

Welling & Teh (2011). The step size must fall slowly enough that the chain can reach every point
(Σ η = ∞). It must fall fast enough that the missing Metropolis step and the noise of mini-batches
no longer matter (Σ η² < ∞). With a constant η (`decay=0`) there is a bias. On a quadratic potential
of curvature λ with gradient noise of variance C, the variance is

    (1 + rηC / 2T) / (1 − ηλ/2)   times   T/λ,

where r = 1 for independent batches. Here batches of B rows come from shuffled epochs, for which r
is smaller. With x = ηλn/B, r = 1 − 2/x + 2(1 − e⁻ˣ)/x². This is about x/3 if an epoch is short
compared with the memory of the chain.

Use the method as the simplest sampler for large data. It mixes slowly if curvatures differ widely;
`PSGLD` and `SGHMC` are then better. All draws have the same weight, also with a falling step size.
The paper instead weights them by η_t.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from doxa import store
from doxa.mcmc.stochastic import StochasticGradient, rates
from doxa.method import Clock, Run, State
from doxa.method.method import between, positive, whole


@store.register("sgld")
@dataclass(frozen=True)
class SGLD(StochasticGradient):
    """Langevin dynamics on mini-batches.

    Parameters
    ----------
    draws, thin, burn_in : int
        Draws kept from each chain, `thin` steps apart, after `burn_in` steps.
    step_size : float or None
        η₀ = a b^−γ, which multiplies the gradient of the full-data potential. None: the learning
        rate of `fit` over n.
    decay : float
        γ in (½, 1], or 0 for a constant step size.
    delay : float
        b, the number of steps after which the step size has fallen to 2^−γ of η₀.
    temperature : float
        T.
    """

    name: ClassVar[str] = "sgld"
    streams: ClassVar[Literal["batches", "passes"] | None] = "batches"
    renamed: ClassVar[Mapping[str, str]] = {"step": "step_size"}
    default_rate: ClassVar[float] = 1e-2
    columnwise: ClassVar[bool] = True
    state_copies: ClassVar[float | None] = 0.0
    large_copies: ClassVar[tuple[float, float] | None] = (2.0, 1.0)  # θ, the last good θ; ∇

    draws: int = whole(100, least=1)
    burn_in: int = whole(1000, least=0)
    thin: int = whole(10, least=1)
    step_size: float | None = positive(None, per_run=True)
    decay: float = between(
        0.55, 0.5, 1, "(]", also=(0,),
        because="a falling step η_t = a (b + t)^−decay needs Σ η_t = ∞ and Σ η_t² < ∞, "
        "and 0 keeps it constant",
    )  # fmt: skip
    delay: float = positive(1000.0)
    temperature: float = positive(1.0, per_run=True)

    def sizes(self, run: Run, steps: int) -> Tensor:
        at = torch.arange(steps, dtype=torch.float64)
        return rates(run, self, (1.0 + at / self.delay) ** -self.decay)  # η_t

    def move(self, run: Run, state: State, grad: Tensor, clock: Clock) -> State:
        theta, eta, t = state["theta"], clock.rate, run.setting(self, "temperature")
        return {
            "theta": theta + eta * grad + (2.0 * t * eta) ** 0.5 * clock.noise(*theta.shape[1:])
        }
