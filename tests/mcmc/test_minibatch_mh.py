"""Approximate acceptance: exact on full batches, biased on small ones by what the stationary
distribution of its transition matrix says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gaussian_chains import Target, Z, assert_moments, measured, target
from scipy.stats import norm

import doxa
from doxa.errors import MethodError


def symmetric(n: int = 64) -> Target:
    """One output, rows at the quantiles of a normal: batch means are Gaussian to high order."""
    quantiles = norm.ppf((np.arange(n) + 0.5) / n)
    return Target(torch.from_numpy(quantiles[:, None] + 0.3), (1.0,))


def stationary_variance(goal: Target, eta: float, batch: int | None) -> float:
    """Of the random walk on a grid: a proposal's log ratio −λ(θ'² − θ²)/2 + (θ' − θ) ξ, with
    ξ ~ N(0, C) of the batch, is X ~ N(m, s²): E min(1, e^X) = Φ(m/s) + e^{m + s²/2} Φ(−s − m/s).
    """
    curvature = float(goal.precision[0, 0])
    grid = np.linspace(-14, 14, 401) * curvature**-0.5
    away = grid[None, :] - grid[:, None]  # to minus from
    move = norm.pdf(away, scale=np.sqrt(2 * eta)) * (grid[1] - grid[0])
    mean = -0.5 * curvature * (grid[None, :] ** 2 - grid[:, None] ** 2)
    if batch is None:
        accept = np.exp(np.minimum(mean, 0))
    else:
        s = np.abs(away) * np.sqrt(goal.gradient_noise(batch, independent=True)[0, 0]) + 1e-12
        accept = norm.cdf(mean / s) + np.exp(mean + s**2 / 2 + norm.logcdf(-s - mean / s))
    kernel = move * accept
    np.fill_diagonal(kernel, 0)
    np.fill_diagonal(kernel, 1 - kernel.sum(1))
    law = np.full(len(grid), 1 / len(grid))
    for _ in range(14):  # 2¹⁴ transitions
        kernel = kernel @ kernel
    law = law @ kernel
    return float(law @ grid**2 / law.sum())


@pytest.mark.parametrize("batch", [pytest.param(32, marks=pytest.mark.slow), 8])
def test_the_bias_of_a_random_walk_is_that_of_its_transition_matrix(batch: int) -> None:
    """200 chains × 60 draws within 4.5 standard errors; the posterior's own variance is far off,
    the more so the smaller the batch."""
    goal = symmetric()
    curvature = float(goal.precision[0, 0])
    eta = 0.5 / curvature
    method = doxa.MinibatchMH(60, 200, 10, "walk", step_size=eta)
    posterior = goal.fit(method, members=200, batch_size=batch)
    want = stationary_variance(goal, eta, batch)
    assert_moments(posterior, goal, (np.zeros(1), np.array([[want]])), power=0.04)
    assert want * curvature > {32: 1.2, 8: 2.0}[batch]


def test_the_bias_falls_with_the_step_and_with_the_batch() -> None:
    goal = symmetric()
    curvature = float(goal.precision[0, 0])
    ratio = lambda eta, batch: curvature * stationary_variance(goal, eta / curvature, batch)  # noqa: E731
    assert ratio(0.5, None) == pytest.approx(1.0, abs=1e-3)
    assert ratio(0.5, 8) > ratio(0.5, 32) > 1.1
    assert ratio(0.5, 32) > ratio(0.02, 32) > 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("proposal", "share", "temperature"), [("walk", 2.0, 1.0), ("langevin", 0.8, 0.3)]
)
def test_full_batches_make_it_exact(proposal: str, share: float, temperature: float) -> None:
    """One over the precision, times T, however large the step: Langevin steps without acceptance
    would be 67 % too wide at ηλ = 0.8."""
    goal = target(n=16)
    curvature = np.diag(goal.precision)
    method = doxa.MinibatchMH(
        60, 100, 10, proposal, step_size=share / curvature.max(), temperature=temperature
    )
    posterior = goal.fit(method, members=150, batch_size=16)
    want = temperature * np.linalg.inv(goal.precision)
    assert_moments(posterior, goal, (np.zeros(3), want), power=0.05)


@pytest.mark.slow
def test_langevin_proposals_on_mini_batches_are_biased_too() -> None:
    """Within a batch the step is exact for the posterior of that batch's potential, so that what
    the batches disagree about stays: wider than the posterior, as measured against full MH."""
    goal = target()
    eta = 0.8 / goal.precision.max()
    widths = {}
    for batch in (4, goal.n):
        method = doxa.MinibatchMH(40, 150, 10, "langevin", step_size=eta)
        posterior = goal.fit(method, members=40, batch_size=batch)
        _, _, second, error = measured(posterior, goal)
        widths[batch] = np.diag(second), np.diag(error)
    rise = (widths[4][0] - widths[goal.n][0]) / np.hypot(widths[4][1], widths[goal.n][1])
    assert (rise > Z).all()


@pytest.mark.slow
@pytest.mark.parametrize(("proposal", "target_accept"), [("walk", None), ("langevin", 0.7)])
def test_the_step_is_adapted_in_burn_in(proposal: str, target_accept: float | None) -> None:
    goal = target(n=16)
    method = doxa.MinibatchMH(200, 800, 2, proposal, target_accept=target_accept)
    posterior = goal.fit(method, members=4, batch_size=16)
    assert np.mean(posterior.diagnostics["accept"]) == pytest.approx(
        target_accept or 0.234, abs=0.08
    )
    fixed = goal.fit(doxa.MinibatchMH(10, 50, 1, proposal, step_size=1e-3), members=2)
    assert fixed.diagnostics["step_size"] == pytest.approx([1e-3, 1e-3])


def test_a_chain_that_sticks_says_so() -> None:
    goal = target(n=16)
    posterior = goal.fit(doxa.MinibatchMH(20, 0, 1, "walk", step_size=1e4), members=2)
    assert posterior.status == "not-converged"
    assert "hardly move" in posterior.status.reason


@pytest.mark.parametrize(
    "setting", [{"proposal": "jump"}, {"target_accept": 1.0}, {"step_size": 0.0}]
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(MethodError, match=next(iter(setting))):
        doxa.MinibatchMH(**setting)


def test_the_acceptance_of_a_run_on_its_way_is_that_of_its_steps() -> None:
    """`doxa.transitions` gives draws before the end: acceptance is not divided by steps to come."""
    density = doxa.density.GradientNoise(lambda p: -0.5 * p["x"].square().sum(), std=0.5)
    method = doxa.MinibatchMH(draws=500, burn_in=10, thin=2, step_size=0.05)
    chain = doxa.transitions(density, {"x": torch.zeros(2)}, method, members=2)
    accept = [next(chain).info["accept"] for _ in range(60)]
    found = chain.draws().diagnostics["accept"]
    torch.testing.assert_close(torch.tensor(found).double(), torch.stack(accept[10:]).mean(0))
    assert min(found) > 0.9
