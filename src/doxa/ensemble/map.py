"""MAP: the maximum of the log joint.

    θ* = argmax Σ_i log p(y_i | f(x_i; θ)) + log p(θ)

With a Gaussian prior of standard deviation s this is weight decay 1/(s² n) on the mean loss
(MacKay, 1992). One point says nothing about epistemic uncertainty: use it as the baseline, and as
the start of other methods.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from doxa import store
from doxa.ensemble.mixed_noise import without_spread
from doxa.method import Method, Run, Stage, State, log_joint, noise_on_held_out, optimise
from doxa.posterior import Posterior, SamplePosterior


@store.register("map")
@dataclass(frozen=True)
class MAP(Method):
    """Maximum a posteriori by stochastic gradients."""

    name: ClassVar[str] = "map"
    half_precision: ClassVar[bool] = True
    overfits: ClassVar[bool] = True

    def stages(self, run: Run) -> Iterable[Stage]:
        yield optimise(log_joint, run.steps)
        yield from noise_on_held_out(self.score, run)

    def finish(self, run: Run, state: State, kept: Tensor | None) -> Posterior:
        theta = without_spread(run, state, state["theta"])
        return SamplePosterior(samples=theta.unsqueeze(1), **run.common(self), **run.shared(state))
