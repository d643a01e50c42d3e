"""Metropolis–Hastings with an acceptance test on a mini-batch, which makes it biased.

    log a = [Û(θ) − Û(θ')]/T + log q(θ | θ') − log q(θ' | θ),   accept with probability min(1, a)

Û at θ and at θ' is computed on the same batch of B rows. The sum over the data set is estimated by
n times the mean over the batch; a plain sum over the batch would target the posterior of B rows.
The method lies between exact Metropolis and SGLD. Korattikara, Chen & Welling (2014) and Bardenet,
Doucet & Holmes (2017) study its error. Proposals are

    "langevin"   θ' = θ − η∇Û(θ) + √(2ηT) ε        (a gradient at θ and one at θ')
    "walk"       θ' = θ + √(2ηT) ε                 (no gradient)

The estimate of log a is noisy. Unlike the noise of a gradient, this noise does not average out: a
bad proposal is accepted if the batch happens to favour it. So the stationary distribution is wider
than the posterior. The difference is larger for large moves and small batches, and vanishes as
B → n and as η → 0. Use the method to study why SGLD has no acceptance step. For exact draws use
`Metropolis`, `HMC` or `NUTS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch
from doxa.mcmc.stochastic import (
    StochasticGradient,
    report,
    step_size,
    trace_gradient,
)
from doxa.method import Clock, Info, Run, Stage, State, Step
from doxa.method.method import between, one_of, positive, whole
from doxa.method.trace import Proposal
from doxa.posterior import Posterior

_TARGET = {"langevin": 0.574, "walk": 0.234}  # optimal in high dimension (Roberts & Rosenthal 2001)


@store.register("minibatch-mh")
@dataclass(frozen=True)
class MinibatchMH(StochasticGradient):
    """Approximate Metropolis–Hastings on mini-batches.

    Parameters
    ----------
    draws, thin, burn_in : int
        Draws kept from each chain, `thin` transitions apart, after `burn_in` transitions.
    proposal : str
        "langevin" or "walk".
    step_size : float or None
        η. None: it starts at the learning rate of `fit` over n, and is adapted in burn-in.
    target_accept : float or None
        The acceptance rate to which η is adapted. None: 0.574 for "langevin", 0.234 for "walk".
    temperature : float
        T.
    """

    name: ClassVar[str] = "minibatch-mh"
    renamed: ClassVar[Mapping[str, str]] = {"step": "step_size"}
    rows: ClassVar[str] = "independent"

    draws: int = whole(500, least=1)
    burn_in: int = whole(1000, least=0)
    thin: int = whole(10, least=1)
    proposal: str = one_of(*_TARGET)
    step_size: float | None = positive(None, per_run=True)
    target_accept: float | None = between(None, 0, 1, "()")
    temperature: float = positive(1.0, per_run=True)

    def init(self, run: Run) -> State:
        run.say_frozen(self.name)  # BatchNorm statistics are not trained
        state = run.init_network()
        return {**state, **self.memory(run, state["theta"])}

    def memory(self, run: Run, theta: Tensor) -> State:
        zero = theta.new_zeros(run.size, 1)
        return {"step": zero + step_size(run, self), "accepted": zero, "transitions": zero.clone()}

    def stages(self, run: Run) -> Iterable[Stage]:
        *before, sample = super().stages(run)
        yield from before
        yield replace(sample, enter=_count_anew)

    def step_of(self, run: Run, move: Any = None, burning: bool = False) -> Step:
        adapting = burning and self.step_size is None and "step_size" not in run.hyper
        target = self.target_accept or _TARGET[self.proposal]

        def step(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
            theta, size = state["theta"], state["step"]  # [M, P], [M, 1]
            heat = run.setting(self, "temperature")
            noise = clock.noise(theta.shape[1])
            noise = noise if run.free is None else noise * run.free
            moved = (2.0 * size * heat).sqrt() * noise
            if self.proposal == "walk":
                there = theta + moved
                value, new = run.value(theta, batch, state), run.value(there, batch, state)
                ways = torch.zeros_like(value)
            else:
                value, pull = _pull(run, state, theta, batch)
                there = theta + size * pull + moved
                new, back = _pull(run, state, there, batch)
                away = theta - there - size * back
                there_and_back = 0.5 * noise.square() - away.square() / (4.0 * size * heat)
                ways = there_and_back.sum(1)  # log q(θ | θ') − log q(θ' | θ)
            change = (new - value).unsqueeze(1) / heat + ways.unsqueeze(1)
            change = torch.nan_to_num(change, nan=-torch.inf, posinf=-torch.inf)
            rate = change.exp().clamp(max=1.0)  # [M, 1]
            accept = clock.uniform(1) < rate
            if clock.trace is not None:
                mean = None if self.proposal == "walk" else there - moved
                ratio, taken = change.squeeze(1), accept.squeeze(1)
                clock.trace.append(Proposal(theta, there, ratio, rate.squeeze(1), taken, mean))
                if mean is not None:
                    trace_gradient(
                        run, state, {"theta": torch.where(accept, there, theta)}, pull, batch, clock
                    )
            theta = torch.where(accept, there, theta)
            if adapting:  # log η rises if too much is accepted (Robbins & Monro)
                size = size * ((rate - target) * (clock.t.to(size.dtype) + 1.0) ** -0.6).exp()
            now = torch.where(accept.squeeze(1), new, value)
            info = report(run, now) | {"accept": rate.squeeze(1), "step_size": size.squeeze(1)}
            counted = {
                "accepted": state["accepted"] + rate, "transitions": state["transitions"] + 1,
            }  # fmt: skip
            return {**state, "theta": theta, "step": size, **counted}, info

        return step

    def change(self, run: Run, state: State, name: str, value: Tensor) -> tuple[Run, State]:
        """A step size that is given is no longer adapted."""
        if name == "step_size":
            state = {**state, "step": value.unsqueeze(1)}
        return super().change(run, state, name, value)

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        accept = _share(state).flatten()
        posterior = super().finish(run, state, kept)
        posterior.record.diagnostics |= {
            "accept": accept.tolist(), "step_size": state["step"].flatten().tolist(),
        }  # fmt: skip
        return posterior

    def acceptance(self, state: State) -> float:
        return float(_share(state).min())


def _pull(run: Run, state: State, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """−Û and −∇Û with respect to the sampled weights."""
    value, grad = run.joint(theta, batch, state)
    return value, grad if run.free is None else grad * run.free


def _count_anew(run: Run, state: State) -> State:
    zero = torch.zeros_like(state["accepted"])
    return {**state, "accepted": zero, "transitions": zero.clone()}


def _share(state: State) -> Tensor:
    """The mean acceptance of the transitions so far, [M, 1]: a run may not have ended."""
    return state["accepted"] / state["transitions"].clamp(min=1)
