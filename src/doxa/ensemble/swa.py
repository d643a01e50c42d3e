"""Stochastic weight averaging: the mean of the points that SGD visits at a high rate.

    w ← w − α(i) ∇L(w);   every c steps:  w_SWA ← (w_SWA · n + w) / (n + 1)
    α(i) = (1 − t(i)) α₁ + t(i) α₂,   t(i) = ((i − 1) mod c + 1) / c       (cyclic)

Izmailov, Podoprikhin, Garipov, Vetrov & Wilson (2018), Algorithm 1. The first part of the steps is
ordinary training. Then the rate stays at α₁ (constant), or falls from α₁ to α₂ in every cycle, and
the points at the ends of cycles are averaged. The points lie around a wide optimum, and their mean
lies near its middle, where it generalises better than the points. The mean has no BatchNorm
statistics from training, so they are recomputed by one pass over the data. Without BatchNorm, if
rows are held out, the mean that predicts them best is kept. One point has no epistemic uncertainty;
with `members`, it is an ensemble of such points.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from doxa import store
from doxa.method import (
    Method,
    Run,
    Stage,
    State,
    average_name,
    averaged,
    log_joint,
    noise_on_held_out,
    optimise,
    refresh_batch_norm,
)
from doxa.method.method import Alternatives, between, one_of, positive, whole
from doxa.posterior import Posterior, SamplePosterior


@store.register("swa")
@dataclass(frozen=True)
class SWA(Method):
    """Stochastic weight averaging.

    Parameters
    ----------
    average : float
        The share of the last steps whose points are averaged.
    cycle : int
        c, the steps between points that are averaged.
    schedule : str
        "constant" or "cyclic".
    swa_lr : float or None
        α₁; None: half the rate of `fit`.
    lowest : float
        α₂, as a share of α₁, of the cyclic schedule.
    """

    rate_by_network: ClassVar[bool] = True
    streams: ClassVar[Literal["batches", "passes"] | None] = "passes"
    name: ClassVar[str] = "swa"
    renamed: ClassVar[Mapping[str, str]] = {"share": "average", "rate": "swa_lr"}
    half_precision: ClassVar[bool] = True
    overfits: ClassVar[bool] = True
    alternatives: ClassVar[Alternatives] = Alternatives()

    average: float = between(0.25, 0, 1, "(]")
    cycle: int = whole(10, least=1)
    schedule: str = one_of("constant", "cyclic")
    swa_lr: float | None = positive(None, per_run=True)
    lowest: float = between(0.01, 0, 1, "(]")

    def averaging_steps(self, run: Run) -> int:
        return max(self.cycle, round(self.average * run.steps))

    def stages(self, run: Run) -> Iterable[Stage]:
        steps = self.averaging_steps(run)
        if run.steps > steps:
            yield optimise(log_joint, run.steps - steps, name="train")
        averaging = optimise(  # the average has no BatchNorm statistics yet, so no score
            log_joint, steps, average=1.0, every=self.cycle, name="average",
            validates=not run.net.momenta,
        )  # fmt: skip
        yield replace(averaging, rates=self.rates(run, steps))
        yield from refresh_batch_norm(run, average_name("theta"))
        yield from noise_on_held_out(self.score, run, average_name("theta"))

    def rates(self, run: Run, steps: int) -> Tensor:
        """α(i) of each step: [steps], or [steps, M, 1] where runs differ."""
        shape = torch.ones(steps, dtype=run.dtype, device=run.device)
        if self.schedule == "cyclic":
            at = torch.arange(steps, dtype=run.dtype, device=run.device)
            done = (at % self.cycle + 1) / self.cycle  # t(i)
            shape = (1 - done) + done * self.lowest
        if "swa_lr" not in run.hyper and self.swa_lr is None:
            return run.rates(0.5 * shape)
        first = run.setting(self, "swa_lr")
        return shape[:, None, None] * first if isinstance(first, Tensor) else shape * first

    def parameters(self, run: Run, state: State) -> Tensor:
        return averaged(state, "theta")

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        samples = averaged(state, "theta").unsqueeze(1)
        return SamplePosterior(samples=samples, **run.common(self), **run.shared(state))
