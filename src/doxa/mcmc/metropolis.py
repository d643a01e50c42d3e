"""Random-walk Metropolis with a proposal whose shape and scale are adapted in burn-in.

    θ' = θ + s · F ε,  ε ~ N(0, I);   accept with probability min(1, p(θ', D)^{1/T} / p(θ, D)^{1/T})

Metropolis et al. (1953). F Fᵀ is the covariance of the draws in the windows of burn-in (Haario,
Saksman & Tamminen, 2001; the windows are those of `doxa.mcmc.hamiltonian`). The scale is adapted by
a Robbins–Monro recursion, log s ← log s + γ_t (α − α*). Its aim α* is the acceptance rate that is
optimal for random walks, 0.234 (0.44 in one dimension; Roberts, Gelman & Gilks, 1997). F and s are
fixed while draws are kept. The method needs no gradient. Use it for checks, and for targets of a
few dimensions: its cost grows as the number of parameters P, and that of HMC as P^{1/4}. For
networks use `HMC` or `NUTS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch
from doxa.mcmc.hamiltonian import KINDS, learn_mass, observe, start_mass, window_hooks
from doxa.mcmc.kernel import Kernel, acceptance, free, push
from doxa.method import Clock, Hook, Hooks, Info, Run, State
from doxa.method.method import one_of, positive, whole
from doxa.method.trace import Proposal


@store.register("metropolis")
@dataclass(frozen=True)
class Metropolis(Kernel):
    """Adaptive random-walk Metropolis.

    Parameters
    ----------
    draws, burn_in : int
        Transitions that are kept from each chain (after `thin`), and transitions before them.
    scale : float
        The scale of the first proposals, in units of 2.38/√P. Burn-in adapts it.
    covariance : str
        The adapted covariance of the proposal, "full" or "diagonal".
    thin : int
        Keep every `thin`-th draw.
    temperature : float
        T.
    """

    name: ClassVar[str] = "metropolis"
    renamed_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {"covariance": {"dense": "full"}}
    default_members: ClassVar[int] = 4
    tallied: ClassVar[tuple[str, ...]] = ("accept", "undefined")

    draws: int = whole(2000, least=1)
    burn_in: int = whole(2000, least=0)
    scale: float = positive(1.0, per_run=True)
    thin: int = whole(1, least=1)
    temperature: float = positive(1.0, per_run=True)
    covariance: str = one_of(*KINDS, default="full")

    def own_state(self, run: Run, unfixed: Tensor) -> State:
        moving = unfixed.sum(1).clamp(min=1)
        step = 2.38 * moving.rsqrt() * run.field(self, "scale")
        return {**_untuned(step), **start_mass(unfixed, self.covariance)}

    def transition(self, run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        theta, density = state["theta"], state["log_density"]
        noise = clock.noise(theta.shape[1])
        proposal = theta + state["step"].unsqueeze(1) * push(state["metric"], noise)
        value = self._value(run, state, proposal, batch)
        rate = acceptance(value - density)
        accept = clock.uniform(1).squeeze(1) < rate
        if clock.trace is not None:
            clock.trace.append(Proposal(theta, proposal, value - density, rate, accept))
        new = {
            **state,
            "theta": torch.where(accept.unsqueeze(1), proposal, theta),
            "log_density": torch.where(accept, value, density),
        }
        undefined = torch.isnan(value).to(rate.dtype)
        return new, {"accept": rate, "undefined": undefined, "step_size": state["step"]}

    def adapt(self, run: Run, state: State, info: Info) -> State:
        several = free(state["metric"]).sum(1) > 1
        target = torch.where(several, 0.234, 0.44).to(state["step"].dtype)
        count = state["tuned"] + 1
        gain = 2 * (count + 4) ** -0.6
        log_step = state["step"].log() + gain * (info["accept"] - target)
        mean = state["tuned.mean"] + (log_step - state["tuned.mean"]) / count
        new = {"step": log_step.exp(), "tuned": count, "tuned.mean": mean}
        return {**state, **new, **observe(state)}

    def with_step(self, state: State, step: Tensor) -> State:
        return {**state, **_untuned(step)}

    def begin(self, run: Run, state: State) -> State:
        return self._seek(run, state, state["step"], 0)

    def _seek(self, run: Run, state: State, step: Tensor, t: int) -> State:
        """Halve the scale of each chain until a proposal loses at most 3 nats."""
        batch, noise = run.all_rows(), run.noise(f"scale/{t}")
        seeking = torch.isfinite(state["log_density"])
        for trial in range(60):
            away = push(state["metric"], noise.normal((state["theta"].shape[1],), trial))
            there = self._value(run, state, state["theta"] + step.unsqueeze(1) * away, batch)
            seeking = seeking & ~(there - state["log_density"] > -3.0)
            if not bool(seeking.any()):
                break
            step = torch.where(seeking, 0.5 * step, step)
        return {**state, **_untuned(step)}

    def hooks(self) -> Hooks:
        return window_hooks(self.burn_in, self._window_end)

    def _window_end(self, t: int) -> Hook:
        """A hook at the end of a window. It sets the new shape of the proposals, and the scale that
        is optimal for a Gaussian of this shape, or a smaller scale."""

        def mark(run: Run, state: State) -> State:
            moving = free(state["metric"]).sum(1).clamp(min=1)
            return self._seek(run, learn_mass(state), 2.38 * moving.rsqrt(), t)

        return mark

    def settle(self, run: Run, state: State) -> State:
        tuned = torch.where(state["tuned"] > 0, state["tuned.mean"].exp(), state["step"])
        return {**state, "step": tuned}

    def report(self, state: State) -> dict[str, Any]:
        return {
            "step_size": state["step"].tolist(),
            "undefined": int(state["sum.undefined"].sum()),
            "undefined_share": float(self.share(state, "undefined").mean()),
        }

    def _value(self, run: Run, state: State, theta: Tensor, batch: Batch) -> Tensor:
        """log_joint/T, [M], computed without a gradient."""
        return run.value(theta, batch, state) / run.field(self, "temperature")


def _untuned(step: Tensor) -> State:
    """The scale, and the running mean of its logarithm since the window began."""
    zero = torch.zeros_like(step)
    return {"step": step, "tuned": zero, "tuned.mean": zero.clone()}
