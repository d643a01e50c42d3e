"""Langevin dynamics on Gaussian targets: every moment from matrices, none from the sampler."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gaussian_chains import Z, assert_moments, measured, predicted, target
from torch import nn

import doxa
from doxa.errors import MethodError


def chains(**settings: Any) -> doxa.SGLD:
    return doxa.SGLD(**{"draws": 40, "burn_in": 200, "thin": 17, "decay": 0.0, **settings})


def test_without_noise_a_step_is_one_of_gradient_descent_on_the_mean_loss() -> None:
    """At the rate of `fit`, which is divided by n = 40, not by the 8 rows of a batch."""
    net = nn.Linear(2, 1, bias=False).double()
    x = torch.ones(40, 2).double()  # every batch is the same
    cold = doxa.SGLD(draws=1, burn_in=0, thin=1, decay=0.0, temperature=1e-30)
    posterior = doxa.fit(
        net, (x, x[:, :1]), cold, likelihood=doxa.Gaussian(1.0), prior=doxa.Normal(2.0), lr=0.1,
        batch_size=8, members=1, init="given", progress=False,
    )  # fmt: skip
    theta = net.weight.detach().clone().requires_grad_()
    loss = 0.5 * (x @ theta.T - 1).square().mean() + theta.square().sum() / (2 * 2.0**2 * 40)
    (grad,) = torch.autograd.grad(loss, theta)
    want = (theta - 0.1 * grad).detach().flatten()
    torch.testing.assert_close(posterior.samples.flatten(), want, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_stationary_moments_with_mini_batches() -> None:
    """Mean and covariance of 200 chains × 40 draws, with the noise of shuffled mini-batches; the
    same draws are far from what they would be without that noise."""
    goal = target()
    eta = 0.1 / goal.precision.max()
    posterior = goal.fit(chains(step_size=eta), members=200, batch_size=4)
    kept = list(range(17, 17 * 40 + 1, 17))
    stages = [[eta] * 200, [eta] * 680]
    assert_moments(posterior, goal, predicted(goal, stages, [[], kept], batch=4), power=0.03)
    _, _, second, error = measured(posterior, goal)
    blind = predicted(goal, stages, [[], kept], batch=goal.n)[1]
    assert (np.diag(np.abs(second - blind) / error) > Z).any()


@pytest.mark.slow
def test_the_bias_shrinks_with_the_step_as_theory_says() -> None:
    """Full batches: the variance is 1/(λ(1 − ηλ/2)), in all directions and at three steps, stacked
    as runs of one fit. The largest step is 25 % too wide where the curvature is largest."""
    goal = target(n=16)
    steps = [share / goal.precision.max() for share in (0.4, 0.2, 0.1)]
    method = chains(burn_in=300, thin=20, draws=40)
    runs = doxa.Runs(grid={"step_size": steps})
    sweep = goal.fit(method, copies=300, members=2, batch_size=16, runs=runs)
    bias = []
    for eta, posterior in zip(steps, sweep, strict=True):
        curvature = np.diag(goal.precision)
        want = np.diag(1 / (curvature * (1 - eta * curvature / 2)))
        assert_moments(posterior, goal, (np.zeros(3), want), power=0.02)
        bias.append(measured(posterior, goal)[2][0, 0] * curvature[0] - 1)
    assert bias[0] == pytest.approx(0.25, abs=0.05)
    assert bias[0] > bias[1] > bias[2] > 0


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.25, 4.0])
def test_temperature_scales_the_covariance(temperature: float) -> None:
    goal = target(n=16)
    curvature = np.diag(goal.precision)
    eta = 0.2 / curvature.max()
    method = chains(step_size=eta, temperature=temperature)
    posterior = goal.fit(method, copies=200, members=1, batch_size=16)
    want = np.diag(temperature / (curvature * (1 - eta * curvature / 2)))
    assert_moments(posterior, goal, (np.zeros(3), want), power=0.03)


@pytest.mark.slow
def test_a_falling_step_is_followed_step_by_step() -> None:
    """η_t = a (b + t)^−γ over burn-in and sampling alike, from a cold start at 0."""
    goal = target(n=16)
    first, gamma, delay = 1.0 / goal.precision.max(), 0.7, 20.0
    method = doxa.SGLD(draws=20, burn_in=30, thin=5, step_size=first, decay=gamma, delay=delay)
    posterior = goal.fit(method, members=300, batch_size=4)
    a = first * delay**gamma
    eta = [a * (delay + t) ** -gamma for t in range(130)]
    kept = list(range(5, 101, 5))
    want = predicted(goal, [eta[:30], eta[30:]], [[], kept], batch=4)
    assert_moments(posterior, goal, want, power=0.04)


@pytest.mark.slow
def test_status_says_whether_the_chains_have_met() -> None:
    """4 chains, some 40 autocorrelation times long or one tenth of one."""
    goal = target(n=16)
    long = goal.fit(chains(step_size=0.2 / goal.precision.max(), draws=100), members=4)
    assert long.status == "ok"
    assert long.diagnostics["rhat_functions"] < 1.1
    short = goal.fit(chains(step_size=1e-4 / goal.precision.max(), thin=1, burn_in=0), members=4)
    assert short.status == "not-converged"


@pytest.mark.parametrize("decay", [0.5, 1.01, -0.6, 0.3])
def test_rates_that_break_the_conditions_are_refused(decay: float) -> None:
    with pytest.raises(MethodError, match="Σ η"):
        doxa.SGLD(decay=decay)


@pytest.mark.parametrize(
    "setting", [{"draws": 0}, {"thin": 0}, {"step_size": -1.0}, {"burn_in": 1.5}]
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(MethodError, match=next(iter(setting))):
        doxa.SGLD(**setting)


@pytest.mark.slow
def test_without_a_step_the_rate_of_fit_is_taken_over_n() -> None:
    """So that it means what it means to gradient descent on the mean loss."""
    goal = target()
    given = goal.fit(chains(draws=5, step_size=0.01 / goal.n), members=2, seed=3)
    derived = goal.fit(chains(draws=5), members=2, seed=3, lr=0.01)
    assert torch.allclose(given.samples, derived.samples, rtol=1e-12)


@pytest.mark.slow
def test_a_linear_model_comes_close_to_its_exact_posterior() -> None:
    """Correlated inputs: doxa's exact linear model says what mean and spread should be. With a
    step of 2 % of the stability limit the bias is below 5 % of the spread, beside 3 % of Monte
    Carlo error (200 chains, an autocorrelation time of some 100 steps)."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=g, dtype=torch.float64)
    x = x @ torch.tensor([[1, 0.5, 0], [0, 1, 0.5], [0, 0, 1]], dtype=torch.float64)
    y = x @ torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    y = y + 0.5 * torch.randn(200, generator=g, dtype=torch.float64)
    exact = doxa.fit(None, (x, y), doxa.BayesianLinear(intercept=False, prior_std=1.0, noise=0.5))
    net = nn.Linear(3, 1, bias=False).double()
    steepest = float(torch.linalg.eigvalsh(x.mT @ x / 0.25)[-1])
    method = chains(step_size=0.04 / steepest, burn_in=600, draws=10, thin=100)
    ours = doxa.fit(net, (x, y), method, likelihood=doxa.Gaussian(0.5), members=200, batch_size=50)
    covariance = exact.covariance.dense()[0]
    std = covariance.diagonal().sqrt()
    draws = ours.samples.flatten(0, 1)
    assert ((draws.mean(0) - exact.mean.flatten()).abs() < Z * std / math.sqrt(1000)).all()
    assert torch.allclose(torch.cov(draws.mT), covariance, atol=0.12 * float(covariance.max()))


def test_only_the_subset_is_sampled() -> None:
    x = torch.linspace(-1, 1, 40, dtype=torch.float64).unsqueeze(1)
    net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    method = chains(draws=10, step_size=1e-4)
    posterior = doxa.fit(net, (x, x.sin()), method, subset="last_layer", members=2, steps=50)
    draws = {k: v.reshape(2, 10, -1) for k, v in posterior.draw().items()}
    assert draws["0.weight"].std(1).max() == 0
    assert draws["2.weight"].std(1).min() > 0
    assert draws["likelihood.log_noise"].std(1).min() > 0


@pytest.mark.slow
def test_batch_norm_is_said(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    posterior = doxa.fit(net, (x, x.sum(1)), chains(draws=5), members=2)
    assert "BatchNorm" in caplog.text
    running = posterior.buffers["1.running_mean"]
    assert running.shape == (2, 4)
    assert (running[0] != running[1]).any()
    assert (running != 0).all()
