"""Simulation-based calibration (Talts et al., 2018) of the samplers with an acceptance test.

    θ_r ~ p(θ),   y_r ~ p(y | θ_r),   draws of θ | y_r:   the rank of θ_r among them is uniform

All through the front door: 400 data sets are the runs of one stacked fit, whose weights have the
model's prior and whose noise is learned with the library's, log σ ~ N(0, 1). It tests what a fit
says of its data, prior and likelihood included, where Geweke's test is of a kernel alone.

99 kept draws leave 100 places for θ_r, in ten bins of equal probability: 40 data sets a bin. χ² of
9 degrees of freedom for each of three parameters at p > 1e-4: a right sampler fails once in 3,000
times. Then bugs are planted, and each must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import doxa
from doxa.driver.runs import RunSpec
from doxa.likelihoods import Gaussian
from doxa.mcmc import mala
from doxa.method import Run

SETS, ROWS, DRAWS, BINS = 400, 8, 99, 10
STD = 1.5  # of the weights' prior
LEAST = 1e-4

METHODS: dict[str, Any] = {
    "hmc": doxa.HMC(draws=DRAWS, burn_in=300, leapfrog=6, thin=3),
    "hmc, large steps": doxa.HMC(draws=DRAWS, burn_in=300, leapfrog=2, thin=6, target_accept=0.5),
    "nuts": doxa.NUTS(draws=DRAWS, burn_in=150, thin=2),
    "metropolis": doxa.Metropolis(draws=DRAWS, burn_in=1500, thin=40),
    "mala": doxa.MALA(draws=DRAWS, burn_in=500, thin=15),
}


def simulated() -> tuple[Tensor, Tensor, Tensor]:
    """x and y of all data sets, one after the other, and the parameters (w₁, w₂, log σ) of each."""
    g = torch.Generator().manual_seed(7)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    truth = normal(SETS, 3)
    truth[:, :2] *= STD
    x = normal(SETS, ROWS, 2)
    x[..., 1] += 0.8 * x[..., 0]
    f = (x * truth[:, None, :2]).sum(-1)
    y = f + truth[:, 2:].exp() * normal(SETS, ROWS)
    return x.flatten(0, 1), y.flatten(), truth


@dataclass(frozen=True)
class DataSets(doxa.Runs):
    """Runs that share no random number: with one seed for all, as they have by default to be
    compared, their ranks would not be independent, and χ² not what it should be."""

    def expand(self, seed: int) -> list[RunSpec]:
        return [replace(spec, seed=seed + r) for r, spec in enumerate(super().expand(seed))]


def p_values(method: Any) -> list[float]:
    """Of uniform ranks, for each parameter."""
    x, y, truth = simulated()
    rows = [torch.arange(r * ROWS, (r + 1) * ROWS) for r in range(SETS)]
    sweep = doxa.fit(
        nn.Linear(2, 1, bias=False).double(), (x, y), method, likelihood=Gaussian(),
        prior=doxa.Normal(STD), runs=DataSets(rows=rows), members=1, progress=False,
    )  # fmt: skip
    draws = torch.stack([posterior.samples[0] for posterior in sweep])  # [sets, draws, 3]
    ranks = (draws < truth.unsqueeze(1)).sum(1)  # 0 … 99: 100 places, ten a bin
    counts = [torch.bincount(each // (100 // BINS), minlength=BINS) for each in ranks.T]
    return [float(stats.chisquare(each.numpy()).pvalue) for each in counts]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_ranks_are_uniform(name: str) -> None:
    assert min(p_values(METHODS[name])) > LEAST


def every_proposal_is_taken(patch: pytest.MonkeyPatch) -> None:
    """Whatever its energy; the step size is still adapted to the rate that was asked for."""
    right = doxa.HMC._transition

    def lucky(self: Any, state: Any, clock: Any, trajectory: Any, *more: Any) -> Any:
        first, uniform = clock.uniform(1), clock.uniform
        clock.uniform = lambda *shape: (setattr(clock, "uniform", lambda *_: 0 * first), first)[1]
        found = right(self, state, clock, trajectory, *more)
        clock.uniform = uniform
        return found

    patch.setattr(doxa.HMC, "_transition", lucky)


def likelihood_counts_half(patch: pytest.MonkeyPatch) -> None:
    right = Run.log_likelihood
    patch.setattr(Run, "log_likelihood", lambda self, *a, **k: 0.5 * right(self, *a, **k))


def proposals_count_as_symmetric(patch: pytest.MonkeyPatch) -> None:
    """MALA accepts by the densities alone: the momentum at the end, which is the noise of the way
    back, is that of the start."""
    right = mala.leapfrog

    def forgetful(density: Any, point: Any, *more: Any) -> Any:
        return right(density, point, *more)._replace(momentum=point.momentum)

    patch.setattr(mala, "leapfrog", forgetful)


Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: list[tuple[str, Plant]] = [
    ("hmc, large steps", every_proposal_is_taken),
    ("nuts", likelihood_counts_half),
    ("metropolis", likelihood_counts_half),
    ("mala", likelihood_counts_half),
    ("mala", proposals_count_as_symmetric),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plant"), BUGS, ids=lambda v: getattr(v, "__name__", v))
def test_a_planted_bug_is_found(name: str, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert min(p_values(METHODS[name])) < 1e-6
