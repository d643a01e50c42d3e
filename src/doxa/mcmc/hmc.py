"""Hamiltonian Monte Carlo with a fixed number of leapfrog steps.

    H(θ, p) = −log p(θ, D)/T + ½ pᵀ M⁻¹ p
    p ← p + ½ε∇log p(θ, D)/T;   θ ← θ + ε M⁻¹ p;   p ← p + ½ε∇log p(θ, D)/T
    accept with probability min(1, exp(H(θ, p) − H(θ', p')))

Neal (2011). All chains advance together. Burn-in runs in windows: the step size is found by dual
averaging towards `target_accept` (Hoffman & Gelman, 2014), the diagonal mass from the variance of
each window's draws, and the last window settles the step size. Each transition's step size is
jittered by ±10 % so that no trajectory length is in resonance. Exact up to Monte Carlo error;
its cost is draws × leapfrog full-data gradients. Dropout is off and BatchNorm frozen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch, Pass
from doxa.errors import MethodError
from doxa.mcmc.convergence import chain_status
from doxa.method import Clock, Info, Method, Run, Stage, State, log_joint, optimise
from doxa.posterior import Posterior, SamplePosterior

log = logging.getLogger("doxa")

_WINDOWS = (0.15, 0.15, 0.25, 0.25, 0.2)  # shares of burn-in; mass is updated after the middle ones


@store.register("hmc")
@dataclass(frozen=True)
class HMC(Method):
    """Static Hamiltonian Monte Carlo.

    Parameters
    ----------
    draws: transitions kept from each chain (after `thin`), `burn_in` transitions before them.
    leapfrog: gradient steps in one transition.
    target_accept: what the step size is adapted towards.
    thin: keep every `thin`-th draw. temperature: T.
    """

    name: ClassVar[str] = "hmc"
    default_members: ClassVar[int] = 4
    per_run: ClassVar[tuple[str, ...] | None] = ("target_accept", "temperature")

    draws: int = 500
    burn_in: int = 500
    leapfrog: int = 20
    target_accept: float = 0.8
    thin: int = 1
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if min(self.draws, self.leapfrog, self.thin) < 1 or self.burn_in < 0:
            raise MethodError("draws, leapfrog and thin must be at least 1, burn_in at least 0")
        if not 0 < self.target_accept < 1 or self.temperature <= 0:
            raise MethodError("target_accept must lie in (0, 1) and temperature be positive")

    def init(self, run: Run) -> State:
        if run.net.batch_norm:
            log.warning("hmc: BatchNorm is frozen at the statistics that the network came with")
        theta = run.start()
        one = torch.zeros_like(run.n)
        step = torch.full_like(run.n, 0.1 * theta.shape[1] ** -0.25)
        return {
            "theta": theta, "grad": torch.zeros_like(theta), "log_density": one - torch.inf,
            "inverse_mass": torch.ones_like(theta), "step": step, "dual.mean": one.clone(),
            "dual.log_step": step.log(), "dual.centre": (10 * step).log(), "count": one.clone(),
            "welford.mean": torch.zeros_like(theta), "welford.square": torch.zeros_like(theta),
            "accepted": one.clone(), "divergences": one.clone(), **run.init_buffers(),
        }  # fmt: skip

    def stages(self, run: Run, steps: int) -> Iterable[Stage]:
        free = torch.ones(run.layout.size, device=run.device, dtype=run.dtype)
        if run.net.subset != "all":  # the rest is a point estimate, found first
            fixed = set(run.layout.names) - set(run.net.subset_names)
            fixed = {name for name in fixed if not name.startswith("likelihood.")}
            free[run.layout.index(fixed).to(run.device)] = 0.0
            yield optimise(log_joint, steps, name="maximum")
        for i, share in enumerate(_WINDOWS):
            length = round(share * self.burn_in)
            if length:
                adapt = self._stage(f"burn-in {i + 1}", length, free, adapting=True)
                adapt.enter = self._enter(free, new_mass=i >= 2)
                yield adapt
        sample = self._stage("sample", self.draws * self.thin, free, adapting=False)
        sample.keep = self.thin
        sample.enter = self._settle
        yield sample

    def total_steps(self, steps: int) -> int:
        return sum(round(s * self.burn_in) for s in _WINDOWS) + self.draws * self.thin

    def _density(
        self, run: Run, state: State, theta: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        fit, grad = run.grad(theta, batch, buffers=run.buffers(state) or None)
        temperature = run.field(self, "temperature")
        value = (fit + run.prior.log_prob(theta)) / temperature
        return value, (grad + run.prior.score(theta)) / temperature.unsqueeze(1)

    def _stage(self, name: str, steps: int, free: Tensor, adapting: bool) -> Stage:
        def step(run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
            new, rate = self._transition(run, state, batch, clock, free)
            if adapting:
                new |= _dual_averaging(new, rate, clock.t, run.field(self, "target_accept"))
                new |= _welford(new, clock.t)
            info = {"accept": rate, "log_density": new["log_density"], "step_size": new["step"]}
            return new, info

        return Stage(name, step, steps, batch="all")

    def _transition(
        self, run: Run, state: State, batch: Batch, clock: Clock, free: Tensor
    ) -> tuple[State, Tensor]:
        """One proposal and its acceptance, for every chain."""
        inverse_mass = state["inverse_mass"] * free
        theta = state["theta"]
        density, grad = state["log_density"], state["grad"]
        momentum = clock.noise(theta.shape[1]) / state["inverse_mass"].sqrt()
        jitter = 0.9 + 0.2 * clock.uniform(1)
        step = state["step"].unsqueeze(1) * jitter
        start = density - 0.5 * (momentum.square() * inverse_mass).sum(1)

        q, p, g = theta, momentum + 0.5 * step * grad, grad
        value = density
        for i in range(self.leapfrog):
            q = q + step * inverse_mass * p
            value, g = self._density(run, state, q, batch)
            p = p + (0.5 if i == self.leapfrog - 1 else 1.0) * step * g
        end = value - 0.5 * (p.square() * inverse_mass).sum(1)

        change = torch.nan_to_num(end - start, nan=-torch.inf, posinf=-torch.inf)
        rate = change.exp().clamp(max=1.0)
        accept = clock.uniform(1).squeeze(1) < rate
        take = accept.unsqueeze(1)
        new = {
            **state,
            "theta": torch.where(take, q, theta),
            "grad": torch.where(take, g, grad),
            "log_density": torch.where(accept, value, density),
            "accepted": state["accepted"] + rate,
            "divergences": state["divergences"] + (change < -1000.0).to(rate.dtype),
        }
        return new, rate

    def _enter(self, free: Tensor, new_mass: bool):  # type: ignore[no-untyped-def]
        def enter(run: Run, state: State) -> State:
            state = self._at(run, state)
            if new_mass:
                n = state["count"].unsqueeze(1)
                variance = state["welford.square"] / (n - 1).clamp(min=1)
                shrunk = (n / (n + 5)) * variance + 1e-3 * (5 / (n + 5))  # as Stan regularises
                state["inverse_mass"] = torch.where(free > 0, shrunk, torch.ones_like(shrunk))
            for name in ("count", "welford.mean", "welford.square", "dual.mean"):
                state[name] = torch.zeros_like(state[name])
            state["dual.centre"] = (10 * state["step"]).log()
            state["dual.log_step"] = state["step"].log()
            return state

        return enter

    def _at(self, run: Run, state: State) -> State:
        """The state with density and gradient at its position."""
        rows = Pass(run.data, run.run_of)
        density, grad = self._density(run, state, state["theta"], rows.batch(0))
        return {**state, "log_density": density, "grad": grad}

    def _settle(self, run: Run, state: State) -> State:
        state = self._at(run, state)
        zero = torch.zeros_like(state["accepted"])
        step = state["dual.log_step"].exp() if self.burn_in else state["step"]
        return {**state, "step": step, "accepted": zero, "divergences": zero.clone()}

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        assert kept is not None
        samples = kept.transpose(0, 1).contiguous()  # [K, T, P]
        posterior = SamplePosterior(samples=samples, **run.common(self), **run.shared(state))
        total = self.draws * self.thin
        accept = state["accepted"] / total
        posterior.record.diagnostics |= {
            "accept": accept.tolist(),
            "step_size": state["step"].tolist(),
            "divergences": int(state["divergences"].sum()),
        }
        chain_status(posterior, run, float(accept.min()))
        return posterior


def _dual_averaging(state: State, rate: Tensor, t: Tensor, target: Tensor) -> State:
    """log ε ← μ − √t/γ · H̄,  and its weighted average, with γ = 0.05, t₀ = 10, κ = 0.75."""
    m = t.to(rate.dtype) + 1
    weight = 1 / (m + 10)
    error = (1 - weight) * state["dual.mean"] + weight * (target - rate)
    log_step = state["dual.centre"] - m.sqrt() / 0.05 * error
    power = m**-0.75
    average = power * log_step + (1 - power) * state["dual.log_step"]
    return {"dual.mean": error, "dual.log_step": average, "step": log_step.exp()}


def _welford(state: State, t: Tensor) -> State:
    """Running mean and sum of squares of the draws of a window."""
    count = state["count"] + 1
    away = state["theta"] - state["welford.mean"]
    mean = state["welford.mean"] + away / count.unsqueeze(1)
    square = state["welford.square"] + away * (state["theta"] - mean)
    return {"count": count, "welford.mean": mean, "welford.square": square}
