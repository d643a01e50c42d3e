"""Constant-rate SGD on a quadratic: its covariance from scipy's Lyapunov solvers, and the rate that
minimises the divergence from the posterior."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gaussian_chains import Target, Z, assert_moments, measured, target
from scipy.linalg import solve_continuous_lyapunov, solve_discrete_lyapunov
from torch import Tensor, nn

import doxa
from doxa.errors import MethodError

BATCH = 4


def stationary(goal: Target, rate: float, discrete: bool = True) -> Any:
    """Covariance at the rate ε of the mean loss: η = ε/n on the potential."""
    eta, spread = rate / goal.n, goal.gradient_noise(BATCH, independent=True)
    if discrete:
        return solve_discrete_lyapunov(np.eye(3) - eta * goal.precision, eta**2 * spread)
    return solve_continuous_lyapunov(goal.precision, eta * spread)


@pytest.mark.slow
def test_the_covariance_solves_the_discrete_lyapunov_equation() -> None:
    """300 chains × 60 draws at ηλ = 0.1: within 4.5 standard errors of the discrete solution in all
    six entries, while the continuous one is 5 % low where the curvature is largest."""
    goal = target()
    rate = 0.1 * goal.n / goal.precision.max()
    method = doxa.ConstantSGD(draws=60, burn_in=150, thin=15, step_size=rate)
    posterior = goal.fit(method, members=300, batch_size=BATCH, steps=200)
    want = stationary(goal, rate)
    assert_moments(posterior, goal, (np.zeros(3), want), power=0.02)
    low = stationary(goal, rate, discrete=False)
    assert low[0, 0] / want[0, 0] == pytest.approx(1 - 0.1 / 2, rel=1e-6)
    _, _, second, error = measured(posterior, goal)
    assert second[0, 0] - low[0, 0] > 3 * error[0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_optimal_rate_is_estimated_without_bias(temperature: float) -> None:
    """1/ε* = n tr C / 2DT is linear in the measured variance: its mean over 100 chains, each from
    100 probes, within 4.5 standard errors of what the rows say."""
    goal = target()
    method = doxa.ConstantSGD(draws=1, burn_in=0, thin=1, temperature=temperature)
    posterior = goal.fit(method, members=100, batch_size=BATCH, steps=200)
    assert posterior.diagnostics["step_size_limited"] is False
    inverse = 1 / np.array(posterior.diagnostics["step_size"])
    trace = np.trace(goal.gradient_noise(BATCH, independent=True)) / goal.n**2
    want = goal.n * trace / (2 * 3 * temperature)
    assert abs(inverse.mean() - want) < Z * inverse.std() / 10
    assert inverse.std() / 10 < 0.02 * want


class Parted(nn.Module):
    """A location whose last number is a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.last = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first, self.last]).expand(x.shape[0], -1)


def test_the_optimal_rate_of_a_subset_counts_its_own_weights() -> None:
    """ε* = 2 T D/(n tr C) with D = 1 and the gradient noise of that weight. 20 chains, each from
    100 probes; with D = 3 it would be three times as large."""
    goal = target()
    model = doxa.Model(Parted(), doxa.Gaussian(list(goal.noise)), subset=("last",))
    data = torch.zeros(goal.n, 1, dtype=torch.float64), goal.y
    method = doxa.ConstantSGD(draws=1, burn_in=0, thin=1, temperature=0.2)
    posterior = doxa.fit(model, data, method, init="given", members=20, batch_size=BATCH, steps=100)
    trace = goal.gradient_noise(BATCH, independent=True)[2, 2] / goal.n**2
    inverse = 1 / np.array(posterior.diagnostics["step_size"])
    want = goal.n * trace / (2 * 1 * 0.2)
    assert posterior.diagnostics["step_size_limited"] is False
    assert abs(inverse.mean() - want) < Z * inverse.std() / 20**0.5
    assert inverse.std() / 20**0.5 < 0.05 * want


@pytest.mark.slow
def test_the_optimal_rate_minimises_the_divergence_from_the_posterior() -> None:
    """KL(N(0, Σ_ε) ‖ N(0, A⁻¹)) with the paper's Σ_ε, over a grid of rates: the least is at ε*, to
    within the grid's 2 %. And the discrete Σ at ε* is closer than at half or twice the rate."""
    goal = target()
    best = 2 * 3 * goal.n / np.trace(goal.gradient_noise(BATCH, independent=True))

    def divergence(rate: float, discrete: bool) -> float:
        product = goal.precision @ stationary(goal, rate, discrete)
        return 0.5 * (np.trace(product) - np.linalg.slogdet(product)[1] - 3)

    grid = best * 1.02 ** np.arange(-50, 51)
    values = [divergence(rate, discrete=False) for rate in grid]
    assert grid[int(np.argmin(values))] == pytest.approx(best, rel=1e-6)
    at = divergence(best, discrete=True)
    assert at < divergence(best / 2, discrete=True)
    assert at < divergence(best * 2, discrete=True)
    method = doxa.ConstantSGD(draws=1, burn_in=0, thin=1, probes=2000)
    posterior = goal.fit(method, members=4, batch_size=BATCH, steps=200)
    assert np.mean(posterior.diagnostics["step_size"]) == pytest.approx(best, rel=0.05)


def test_a_rate_that_would_explode_is_held_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """With all but one row in a batch the noise is small and ε* large: it stops at one over the
    largest curvature of the mean loss, found by power iteration."""
    goal = target(n=16)
    method = doxa.ConstantSGD(draws=10, burn_in=20, thin=1)
    posterior = goal.fit(method, members=3, batch_size=15, steps=200)
    assert posterior.diagnostics["step_size_limited"] is True
    assert "explode" in caplog.text
    limit = goal.n / goal.precision.max()
    assert posterior.diagnostics["step_size"] == pytest.approx([limit] * 3, rel=1e-3)
    assert torch.isfinite(posterior.samples).all()


@pytest.mark.slow
def test_batches_of_all_rows_are_said_to_sample_nothing(caplog: pytest.LogCaptureFixture) -> None:
    goal = target(n=16)
    for size, said in ((8, False), (16, True)):
        caplog.clear()
        goal.fit(doxa.ConstantSGD(5, 5, 1), members=2, batch_size=size, steps=50)
        assert ("samples nothing" in caplog.text) is said


@pytest.mark.slow
def test_batches_are_independent_and_uniform() -> None:
    """Rows are drawn with replacement: in 4,000 batches of 4 the count of each row is Poisson-like,
    and consecutive batches repeat rows as often as chance says (16 rows: 1 − (15/16)⁴)."""
    from doxa.data import Batches

    seen: list[Any] = []
    goal = target(n=16)
    original = Batches.index

    def index(self: Any, t: int, steps: int) -> Any:
        rows = original(self, t, steps)
        if self.independent and self.stage == "sample":
            seen.append(rows[:, 0])
        return rows

    Batches.index = index  # type: ignore[method-assign]
    try:
        goal.fit(doxa.ConstantSGD(4000, 0, 1, step_size=0.01), members=1, batch_size=4, steps=5)
    finally:
        Batches.index = original  # type: ignore[method-assign]
    rows = torch.cat(seen)[:4000]
    counts = torch.bincount(rows.flatten(), minlength=16).double()
    assert ((counts - 1000).abs() < Z * 1000**0.5).all()
    again = (rows[1:, :1] == rows[:-1]).any(1).double().mean()
    chance = 1 - (15 / 16) ** 4
    assert abs(float(again) - chance) < Z * (chance * (1 - chance) / 3999) ** 0.5


@pytest.mark.parametrize("setting", [{"step_size": 0.0}, {"probes": 1}, {"draws": 0}])
def test_settings_out_of_range_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(MethodError, match=next(iter(setting))):
        doxa.ConstantSGD(**setting)
