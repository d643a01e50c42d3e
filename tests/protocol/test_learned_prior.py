"""A prior's standard deviation learned jointly with the weights: it is the posterior's own, and is
saved."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from trial import curve, held_to_the_protocol

import doxa
from doxa import store
from doxa.method import Method, Run, Stage, State, optimise
from doxa.posterior import SamplePosterior


@store.register("test-learned-prior")
@dataclass(frozen=True)
class LearnedPrior(Method):
    """log p(D | θ) + Σ log N(θ; 0, s²) + log N(log s; 0, 1), over θ and log s."""

    name: ClassVar[str] = "test-learned-prior"

    def init(self, run: Run) -> State:
        return {**run.init_network(), "log_std": torch.zeros_like(run.n).unsqueeze(1)}

    def stages(self, run: Run) -> Iterable[Stage]:
        yield optimise(self._objective, run.steps, over=("theta", "log_std"))

    def _objective(self, run: Run, params: State, batch: Any, clock: Any) -> Any:
        fit = run.train(params["theta"], params, batch, clock)
        log_std = params["log_std"]
        each = -0.5 * (params["theta"] / log_std.exp()).square() - log_std
        prior = (each - 0.5 * math.log(2 * math.pi)).sum(1) - 0.5 * log_std.square().sum(1)
        return fit.value + prior, fit.changed

    def finish(self, run: Run, state: State, kept: Tensor | None) -> SamplePosterior:
        priors = [doxa.Normal(float(s)) for s in state["log_std"].exp().flatten()]
        common = run.common(self) | run.shared(state)
        return SamplePosterior(samples=state["theta"].unsqueeze(1), priors=priors, **common)


def test_it_is_learned_stacked_resumed_and_saved(tmp_path: Path) -> None:
    net = doxa.nets.mlp(1, 1, (8,), "tanh").double()
    x, _ = data = curve()
    posterior = held_to_the_protocol(net, data, LearnedPrior(), tmp_path)
    scales = [prior.std for prior in posterior.priors]
    assert len(set(scales)) == 3  # each member's own
    # at a stationary point of log s: Σθ²/s² − P − log s = 0, so that s² is near the mean square
    theta = posterior.samples[:, 0]
    for own, s in zip(theta, scales, strict=True):
        assert 0.5 < float(own.square().mean().sqrt()) / s < 2.0
    posterior.save(tmp_path / "run")
    again = doxa.load(tmp_path / "run")
    assert again.priors == posterior.priors
    wide, given = again.prior_functions(x, 300), doxa.fit(net, data, "map", steps=1)
    ratio = float(wide.var() / given.prior_functions(x, 300).var())
    assert ratio < 0.8  # s is well below the model's 1, and functions drawn from it are narrower
    assert torch.equal(wide, posterior.prior_functions(x, 300))
