"""Constant-rate stochastic gradient descent as a sampler: the mini-batches are the only noise.

    θ ← θ − ε ĝ,   ĝ = ∇Û/n

Mandt, Hoffman & Blei (2017). Near an optimum with Hessian A of the mean loss and gradient noise
Cov[ĝ] = C, the iterates become stationary with covariance Σ,

    AΣ + ΣA − ε AΣA = ε C     (discrete; the paper's continuous-time limit drops ε AΣA),

while the posterior is N(θ*, (nA/T)⁻¹). With the continuous Σ, the divergence of the stationary
distribution from the posterior is

    KL = ½ [ tr(nAΣ)/T − log |nAΣ/T| − D ] = ½ [ ε n tr(C)/2T − D log ε + const ],

because tr(AΣ) = ε tr(C)/2 and log|Σ| grows as D log ε. Its minimum is the paper's optimal rate,

    ε* = 2 T D / (n tr C)  =  2 T (S/n) D / tr(BBᵀ)    for batches of S, C = BBᵀ/S.

With `step_size=None`, tr C is measured at the optimum and the rate is ε*. One rate is right for
every direction only if C ∝ A, which holds for a well-specified model. Otherwise the shape of the
stationary covariance is wrong. ε* is limited to 1/λ_max, where λ_max is the largest curvature,
because SGD may diverge at larger rates. The diagnostics say whether the limit was used.
Batches are drawn independently (with replacement). In shuffled epochs the noise would cancel within
an epoch, and the stationary variance would be too small.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from doxa import store
from doxa.data import Batch
from doxa.mcmc.stochastic import (
    StochasticGradient,
    report,
    stochastic_gradient,
)
from doxa.method import Clock, Info, Run, Stage, State, log_joint, optimise
from doxa.method.method import positive, whole
from doxa.posterior import Posterior

log = logging.getLogger("doxa")


@store.register("constant-sgd")
@dataclass(frozen=True)
class ConstantSGD(StochasticGradient):
    """Constant-rate SGD around an optimum. The optimum is found first, with the steps, the learning
    rate and the optimiser of `fit`.

    Parameters
    ----------
    draws, thin, burn_in : int
        Draws kept from each chain, `thin` steps apart, after `burn_in` steps at the constant rate.
    step_size : float or None
        ε, the rate for the mean loss. None: the optimal rate.
    probes : int
        The number of mini-batch gradients at the optimum from which the optimal rate is estimated.
    temperature : float
        T. It has an effect only with `step_size=None`.
    """

    name: ClassVar[str] = "constant-sgd"
    renamed: ClassVar[Mapping[str, str]] = {"rate": "step_size"}
    controls: ClassVar[tuple[str, ...]] = ("step_size",)
    default_rate: ClassVar[float] = 1e-2
    default_batch: ClassVar[int] = 32  # the batches are the noise
    rows: ClassVar[str] = "independent"

    draws: int = whole(100, least=1)
    burn_in: int = whole(500, least=0)
    thin: int = whole(10, least=1)
    step_size: float | None = positive(None, per_run=True)
    probes: int = whole(100, least=2)
    temperature: float = positive(1.0, per_run=True)

    def memory(self, run: Run, theta: Tensor) -> State:
        one = theta.new_zeros(theta.shape[0], 1)
        return {"rate": one, "curvature": one.clone(), "limited": one.clone()}

    def maximum(self, run: Run) -> Iterable[Stage]:
        """The stages that find the optimum, and then estimate the rate at the optimum."""
        yield optimise(log_joint, run.steps, name="maximum")
        if self.step_size is not None or "step_size" in run.hyper:
            yield Stage("rate", self._probe, 0, self.rows, enter=self._given)
            return
        yield Stage("gradient noise", self._probe, self.probes, self.rows, enter=_start_probing)
        yield Stage("rate", self._probe, 0, self.rows, enter=self._optimal)

    def move(self, run: Run, state: State, grad: Tensor, clock: Clock) -> State:
        return {"theta": torch.addcmul(state["theta"], run.descent(grad), state["rate"], value=-1)}

    def change(self, run: Run, state: State, name: str, value: Tensor) -> tuple[Run, State]:
        """The rate belongs to the state: until it is set at the optimum, a change has no effect."""
        return run, {**state, "rate": value.unsqueeze(1)}

    def _given(self, run: Run, state: State) -> State:
        rate = run.setting(self, "step_size")
        return {**state, "rate": torch.zeros_like(state["rate"]) + rate}

    def _probe(self, run: Run, state: State, batch: Batch, clock: Clock) -> tuple[State, Info]:
        """A step that does not move θ. It measures the variance of ĝ over batches. It also measures
        the largest curvature by power iteration, v ← Av/‖Av‖, with Av from the difference of two
        gradients."""
        value, grad, changed = stochastic_gradient(run, state, batch, clock)
        mean = run.descent(grad)
        theta, v = state["theta"], state["probe.direction"]
        v = torch.where(clock.t == 0, clock.noise(*theta.shape[1:]), v)
        v = v if run.free is None else v * run.free
        v = v / v.norm(dim=1, keepdim=True).clamp_min(1e-30)
        width = torch.finfo(theta.dtype).eps ** 0.28 * (1 + theta.norm(dim=1, keepdim=True))
        ahead = stochastic_gradient(run, {**state, "theta": theta + width * v}, batch, clock)[1]
        bent = (run.descent(ahead) - mean) / width  # Av
        count = clock.t.to(theta.dtype) + 1
        away = mean - state["probe.mean"]
        centre = state["probe.mean"] + away / count
        spread = state["probe.spread"] + (away * (mean - centre)).sum(1, keepdim=True)
        curvature = torch.maximum(state["curvature"], bent.norm(dim=1, keepdim=True))
        new = {"probe.direction": bent, "probe.mean": centre, "probe.spread": spread,
               "curvature": curvature}  # fmt: skip
        return {**state, **changed, **new}, report(run, value)

    def _optimal(self, run: Run, state: State) -> State:
        heat = run.setting(self, "temperature")
        trace = state["probe.spread"] / (self.probes - 1)  # tr C
        size = state["theta"].shape[1] if run.free is None else int(run.free.sum())
        best = 2.0 * heat * size / (run.n.unsqueeze(1) * trace.clamp_min(1e-30))
        most = 1.0 / state["curvature"].clamp_min(1e-30)
        if run.data.has_rows:
            noiseless = run.settings.batch_size >= min(map(len, run.rows.rows))
            what, advice = "batches hold all rows", "give a smaller batch_size"
        else:
            noiseless = not bool(trace.any())
            what = "the density has no rows and no stated noise"
            advice = "pass doxa.density.RowSum or GradientNoise"
        if noiseless:
            log.warning("constant-sgd: %s, and a gradient without noise samples nothing; %s",
                        what, advice)  # fmt: skip
        elif bool((best > most).any()):
            log.warning("constant-sgd: the optimal rate %.3g would explode along the steepest "
                        "direction; held at %.3g, one over its curvature",
                        float(best.max()), float(most.min()))  # fmt: skip
        limited = (best > most).to(best.dtype)
        return {**state, "rate": torch.minimum(best, most), "limited": limited}

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        posterior = super().finish(run, state, kept)
        posterior.record.diagnostics |= {
            "step_size": state["rate"].flatten().tolist(),
            "step_size_limited": bool(state["limited"].any()),
        }
        return posterior


def _start_probing(run: Run, state: State) -> State:
    zero = torch.zeros_like(state["theta"])
    return {**state, "probe.direction": zero, "probe.mean": zero.clone(),
            "probe.spread": torch.zeros_like(state["rate"])}  # fmt: skip
