"""SGHMC: stationary moments from matrices, and its noiseless path from torch's momentum SGD."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gaussian_chains import Z, assert_moments, measured, predicted, target
from torch import nn

import doxa
from doxa.errors import MethodError
from doxa.mcmc.sghmc import as_momentum_sgd, momentum_sgd


@pytest.mark.slow
def test_stationary_moments_with_mini_batches() -> None:
    """200 chains × 40 draws against the exact moments of the recursion with shuffled batches;
    without the noise of the batches they would be told apart."""
    goal = target()
    eta, friction = 0.05 / goal.precision.max(), 0.2
    method = doxa.SGHMC(draws=40, burn_in=200, thin=17, step_size=eta, friction=friction)
    posterior = goal.fit(method, members=200, batch_size=4)
    stages, kept = [[eta] * 200, [eta] * 680], list(range(17, 681, 17))
    want = predicted(goal, stages, [[], kept], batch=4, friction=friction)
    assert_moments(posterior, goal, want, power=0.03)
    _, _, second, error = measured(posterior, goal)
    blind = predicted(goal, stages, [[], kept], batch=goal.n, friction=friction)[1]
    assert (np.diag(np.abs(second - blind) / error) > Z).any()


@pytest.mark.slow
@pytest.mark.parametrize(("friction", "temperature"), [(0.1, 1.0), (0.5, 0.25), (1.0, 2.0)])
def test_variance_with_full_batches(friction: float, temperature: float) -> None:
    """T / λ(1 − ηλ/(4 − 2α)), from the variance of an AR(2) process; at friction 1, SGLD's."""
    goal = target(n=16)
    curvature = np.diag(goal.precision)
    eta = 0.8 / curvature.max()
    method = doxa.SGHMC(100, 100, 20, step_size=eta, friction=friction, temperature=temperature)
    posterior = goal.fit(method, copies=300, members=1, batch_size=16)
    want = np.diag(temperature / (curvature * (1 - eta * curvature / (4 - 2 * friction))))
    assert want[0, 0] * curvature[0] / temperature > 1.2  # the formula says something
    assert_moments(posterior, goal, (np.zeros(3), want), power=0.02)


@pytest.mark.parametrize("estimate", [0.2, 0.3])
def test_the_noise_that_mini_batches_bring_is_not_added_again(estimate: float) -> None:
    """√(1 − β̂/α) of the noise is added, exactly: the first step less its drift, under the same
    noise, against the step with β̂ = 0."""
    goal = target(n=16)

    def first(gradient_noise: float, temperature: float = 1.0) -> torch.Tensor:
        method = doxa.SGHMC(
            1, 0, 1, step_size=0.01, friction=0.4, gradient_noise=gradient_noise,
            temperature=temperature,
        )  # fmt: skip
        return goal.fit(method, members=3, batch_size=16).samples[:, 0]

    drift = first(0.0, 1e-300)
    whole, rest = first(0.0) - drift, first(estimate) - drift
    assert whole.abs().min() > 1e-3
    torch.testing.assert_close(rest, (1 - estimate / 0.4) ** 0.5 * whole, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_the_estimate_of_gradient_noise_takes_its_share_of_the_added_noise() -> None:
    """With β̂ = α/2 half the noise is left out: with full batches, which bring none, the variance
    is halved."""
    goal = target(n=16)
    curvature = np.diag(goal.precision)
    eta = 0.2 / curvature.max()
    method = doxa.SGHMC(50, 100, 20, step_size=eta, friction=0.4, gradient_noise=0.2)
    posterior = goal.fit(method, copies=300, members=1, batch_size=16)
    want = np.diag(0.5 / (curvature * (1 - eta * curvature / 3.2)))
    assert_moments(posterior, goal, (np.zeros(3), want), power=0.02)


@pytest.mark.parametrize("averaged", [False, True])
def test_without_noise_it_is_momentum_sgd(averaged: bool) -> None:
    """torch.optim.SGD on the mean loss with weight decay for the prior, step by step to 1e-12;
    with `dampening` its gradient is a running average, which starts from 0 here and from the
    first gradient there: that start is put right by hand."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(32, 3, generator=g, dtype=torch.float64)
    y = x.sin().sum(1, keepdim=True)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    rate, momentum, steps = 0.05, 0.8, 60
    step, friction = momentum_sgd(rate, momentum, n=32, averaged=averaged)
    method = doxa.SGHMC(steps, 0, 1, step_size=step, friction=friction, temperature=1e-300)
    ours = doxa.fit(
        net, (x, y), method, likelihood=doxa.Gaussian(0.5), members=1, batch_size=32, init="given",
        prior=doxa.Normal(2.0),
    ).samples[0]  # fmt: skip
    weights = list(net.parameters())
    damping = momentum if averaged else 0.0
    sgd = torch.optim.SGD(weights, rate, momentum, damping, weight_decay=1 / (2.0**2 * 32))
    path = []
    for _ in range(steps):
        sgd.zero_grad()
        (0.5 * ((net(x) - y) / 0.5).square().mean()).backward()
        if averaged and not path:
            for w in weights:
                sgd.state[w]["momentum_buffer"] = torch.zeros_like(w)
        sgd.step()
        path.append(torch.cat([w.detach().flatten() for w in weights]))
    assert torch.allclose(ours, torch.stack(path), rtol=0, atol=1e-12)
    assert (path[-1] - path[0]).abs().max() > 0.1


def test_the_mapping_goes_both_ways_and_is_the_lectures() -> None:
    """Friction is one minus momentum. The lecture's form is p ← (1 − b) p − b ∇R, W ← W + η p."""
    for averaged in (False, True):
        step, friction = momentum_sgd(0.3, 0.9, n=50, averaged=averaged)
        assert friction == pytest.approx(0.1)
        assert as_momentum_sgd(step, friction, 50, averaged) == pytest.approx((0.3, 0.9))
    eta, b, w, p, force = 0.3, 0.1, 1.0, 0.5, -2.0
    p = (1 - b) * p + b * force
    step, friction = momentum_sgd(eta, 1 - b, averaged=True)
    velocity = (1 - friction) * eta * 0.5 + step * force
    assert w + velocity == pytest.approx(w + eta * p)


@pytest.mark.parametrize(
    "setting", [{"friction": 0.0}, {"friction": 1.5}, {"gradient_noise": 0.1}, {"step_size": 0.0}]
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(MethodError, match=next(iter(setting))):
        doxa.SGHMC(**setting)
