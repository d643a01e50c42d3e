"""The Metropolis-adjusted Langevin algorithm: Langevin steps with an acceptance test.

    θ' = θ + ½ε² A ∇log π(θ) + ε F ξ,    A = F Fᵀ,   ξ ~ N(0, I),   π = p(θ, D)^{1/T}
    accept with probability min(1, π(θ') q(θ | θ') / π(θ) q(θ' | θ)),
    log q(θ' | θ) = −½|ξ|² + const,      log q(θ | θ') = −½|ξ'|² + const

Besag (1994); Roberts & Tweedie (1996). ξ' is the noise that would lead back from θ',

    ξ' = −[ξ + ½ε Fᵀ(∇log π(θ) + ∇log π(θ'))],

so that no density of a proposal has to be computed. A transition is one leapfrog step of HMC with
the momentum ξ, and is computed as such: −ξ' is the momentum at the end. Burn-in adapts ε to the
acceptance rate 0.574, which is optimal in high dimension (Roberts & Rosenthal, 1998), and F to the
spread of the draws, as for HMC (`doxa.mcmc.hamiltonian`), but with γ = 0.2: the acceptance of
single steps varies more than that of trajectories, and with γ = 0.05 the step size would follow it,
and its average would be too small. The draws are exact up to Monte Carlo error. The number of
gradients for a draw far from the last one grows as P^{1/3}, between `Metropolis` (P) and `HMC`
(P^{1/4} with long trajectories): the chain forgets its direction after every step. Use it to see
what the acceptance test adds to `SGLD`, or where a long trajectory does not pay. Gradients use all
rows; dropout is off and BatchNorm is frozen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from doxa import store
from doxa.data import Batch
from doxa.mcmc.hamiltonian import KINDS, Hamiltonian
from doxa.mcmc.kernel import DIVERGENT, acceptance, leapfrog, pull, push
from doxa.method import Clock, Info, Run, State
from doxa.method.method import between, one_of, positive, whole
from doxa.method.trace import Gradient, Proposal


@store.register("mala")
@dataclass(frozen=True)
class MALA(Hamiltonian):
    """Metropolis-adjusted Langevin algorithm.

    Parameters
    ----------
    draws, burn_in : int
        Transitions that are kept from each chain (after `thin`), and transitions before them.
    target_accept : float
        The acceptance rate to which the step size is adapted.
    thin : int
        Keep every `thin`-th draw.
    temperature : float
        T.
    mass : str
        "diagonal" (one scale per parameter) or "full" (a covariance matrix, for at most a few
        hundred parameters): the shape of the proposals.
    """

    name: ClassVar[str] = "mala"
    default_members: ClassVar[int] = 4
    tallied: ClassVar[tuple[str, ...]] = ("accept", "divergent")
    gamma: ClassVar[float] = 0.2

    draws: int = whole(2000, least=1)
    burn_in: int = whole(1000, least=0)
    target_accept: float = between(0.574, 0, 1, "()", per_run=True)
    thin: int = whole(1, least=1)
    temperature: float = positive(1.0, per_run=True)
    mass: str = one_of(*KINDS)

    @property
    def gradients(self) -> tuple[int, int]:
        return (self.transitions,) * 2

    def transition(self, run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        start, step = self.depart(state, clock), state["step"].unsqueeze(1)  # its momentum is ξ
        end = leapfrog(self.density(run, state, batch), start, state["metric"], step)
        error = end.energy - start.energy  # −log of the ratio, with ½|ξ'|² and ½|ξ|²
        rate = acceptance(-error)
        accept = clock.uniform(1).squeeze(1) < rate
        take = accept.unsqueeze(1)
        if clock.trace is not None:
            mean = start.theta + 0.5 * step**2 * push(
                state["metric"], pull(state["metric"], start.grad)
            )
            moved = torch.where(take, end.theta - start.theta, 0.0)
            clock.trace.append(Proposal(start.theta, end.theta, -error, rate, accept, mean))
            clock.trace.append(Gradient(start.theta, start.grad, None, moved))
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
            "step_size": state["step"],
        }
        return new, info
