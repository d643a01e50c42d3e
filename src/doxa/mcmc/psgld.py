"""Preconditioned stochastic gradient Langevin dynamics.

    V ← αV + (1 − α) ḡ²,   ḡ = ∇Û/n,   G = 1 / (λ + √V)
    θ ← θ − η (G ∇Û − TΓ) + √(2ηTG) ε,    Γ_i = ∂G_i/∂θ_i

Li, Chen, Carlson & Carin (2016). Each weight has the step size of RMSprop, and the noise that
belongs to this step size. The posterior is the stationary distribution only with Γ, the drift of
the preconditioner. The paper drops Γ in practice, because it is of order 1 − α:

    Γ_i = −(1 − α) G_i² ḡ_i h_i / √V_i,    h_i = ∂ḡ_i/∂θ_i.

`correction` selects how Γ is treated:

"freeze" adapts V in burn-in only, so that Γ = 0 exactly afterwards. The method is then SGLD with a
diagonal preconditioner, and its only bias is that of the step size η.
"none" is the practical algorithm of the paper.
"gamma" adds Γ, with h from one Hutchinson probe z ∈ {±1},
h ≈ z ⊙ (ḡ(θ + δz) − ḡ(θ − δz)) / 2δ, which takes two more gradients per step. The derivative of G
is valid only locally. Within the noise √(2ηTG), G may change by more than itself, for example at a
mode, if V contains gradients at the mode only. So Γ is limited to |Γ| ≤ G/√(2ηTG), and moves θ by
at most half the noise. Small steps never reach this limit.

V is a running average, and not a function of θ alone. So "none" and "gamma" have a bias, which
grows as the step size falls: if the chain moves more slowly than V forgets, V follows θ. On a
Gaussian of curvature c with full batches, "none" has, besides the bias of SGLD, the variance

    1 + κ/(1 + 2x)  times  T/c,    x = ηGc/(1 − α),   κ = E|ḡ| / (λ + E|ḡ|),   E|ḡ| = √(2cT/π)/n,

because E[G(θ²c/T − 1)] = 0, and the covariance of V/E[V] with θ²c/T is 2/(1 + 2x). This is first
order in the fluctuations of V, and its error is up to a fifth of the excess over 1. It is exact as
x → 0, where the chain samples p/G and the variance is up to twice too large. Γ subtracts (1 − α)κ
from it. The bias is smaller if the noise of mini-batches dominates V.

Use the method if weights have very different scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch
from doxa.errors import MethodError
from doxa.mcmc.stochastic import (
    StochasticGradient,
    held,
    report,
    step_size,
    stochastic_gradient,
    trace_gradient,
)
from doxa.method import Clock, Info, Run, State, Step
from doxa.method.method import between, one_of, positive, whole


@store.register("psgld")
@dataclass(frozen=True)
class PSGLD(StochasticGradient):
    """Langevin dynamics with RMSprop's preconditioner.

    Parameters
    ----------
    draws, thin, burn_in : int
        Draws kept from each chain, `thin` steps apart, after `burn_in` steps.
    step_size : float or None
        η, which multiplies the preconditioned gradient of the full-data potential. None: the
        learning rate of `fit` over n. That rate then has the same meaning as for RMSprop.
    beta2 : float
        α, the decay rate of the running average of squared gradients.
    eps : float
        λ, above 0.
    correction : str
        "freeze", "none" or "gamma", as above.
    temperature : float
        T.
    """

    name: ClassVar[str] = "psgld"
    streams: ClassVar[Literal["batches", "passes"] | None] = "batches"
    renamed: ClassVar[Mapping[str, str]] = {
        "step": "step_size",
        "smoothing": "beta2",
        "floor": "eps",
    }

    draws: int = whole(100, least=1)
    burn_in: int = whole(1000, least=0)
    thin: int = whole(10, least=1)
    step_size: float | None = positive(None, per_run=True)
    beta2: float = between(0.99, 0, 1, "[)")
    eps: float = positive(1e-3)
    correction: str = one_of("freeze", "none", "gamma")
    temperature: float = positive(1.0, per_run=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.correction == "freeze" and not self.burn_in:
            raise MethodError(
                "correction='freeze' adapts in burn-in only: burn_in must be above 0, or "
                "correction='none'"
            )

    def memory(self, run: Run, theta: Tensor) -> State:
        return {"square": torch.zeros_like(theta), "weight": theta.new_zeros(theta.shape[0], 1)}

    def step_of(self, run: Run, move: Any = None, burning: bool = False) -> Step:
        adapting = burning or self.correction != "freeze"

        def step(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
            value, grad, changed = stochastic_gradient(run, state, batch, clock)
            theta, mean = state["theta"], run.descent(grad)  # ḡ
            new = self._adapted(state, mean) if adapting else {}
            scale = self._preconditioner({**state, **new})  # G, [M, P]
            eta, t = step_size(run, self), run.setting(self, "temperature")
            drift, eps = scale * grad, clock.noise(*theta.shape[1:])
            spread = (2.0 * eta * t * scale).sqrt()
            if adapting and self.correction == "gamma":
                gamma = self._gamma(run, {**state, **new}, batch, clock, scale, mean)
                steepest = scale / spread  # the limit: G changes by G within the noise
                drift = drift + t * gamma.clamp(-steepest, steepest)
            new["theta"] = held(run, theta + eta * drift + spread * eps, theta)
            trace_gradient(run, state, new, grad, batch, clock)
            return {**state, **changed, **new}, report(run, value)

        return step

    def _adapted(self, state: State, mean: Tensor) -> State:
        square = torch.addcmul(state["square"] * self.beta2, mean, mean, value=self._fresh)
        return {"square": square, "weight": state["weight"] * self.beta2 + self._fresh}

    @property
    def _fresh(self) -> float:
        return 1.0 - self.beta2

    def _preconditioner(self, state: State) -> Tensor:
        """G."""
        return (_root(state) + self.eps).reciprocal()

    def _gamma(
        self, run: Run, state: State, batch: Batch, clock: Clock, scale: Tensor, mean: Tensor
    ) -> Tensor:
        """Γ, with the curvature h from one random vector of signs."""
        theta = state["theta"]
        signs = torch.where(clock.uniform(theta.shape[1]) > 0.5, 1.0, -1.0).to(theta.dtype)
        width = torch.finfo(theta.dtype).eps ** (1 / 3)
        ahead, behind = (
            stochastic_gradient(run, {**state, "theta": theta + side * signs}, batch, clock)[1]
            for side in (width, -width)
        )
        curvature = run.descent(signs * (ahead - behind)) / (2.0 * width)  # ∂ḡ_i/∂θ_i
        share = self._fresh / state["weight"]  # of ḡ² in V
        return -share * scale.square() * mean * curvature / _root(state).clamp_min(1e-12)


def _root(state: State) -> Tensor:
    """√V, with V divided by the sum of its weights. Otherwise V would be too small at the start."""
    return torch.sqrt(state["square"] / state["weight"])
