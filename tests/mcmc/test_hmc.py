"""The leapfrog's geometry and the sampler's stationarity, on densities known in closed form."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import doxa
from doxa.errors import MethodError
from doxa.likelihoods import Heads
from doxa.mcmc.convergence import _compared
from doxa.mcmc.kernel import Point
from doxa.method import Clock
from doxa.noise import Noise
from doxa.posterior.chains import rhat


def _linear(n: int = 60, inputs: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, inputs, generator=g, dtype=torch.float64)
    weights = torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64)[:inputs]
    noise = 0.5 * torch.randn(n, 1, generator=g, dtype=torch.float64)
    return x, (x @ weights).unsqueeze(1) + noise


def _exact(x: torch.Tensor, y: torch.Tensor, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    precision = x.mT @ x / noise**2 + torch.eye(x.shape[1], dtype=x.dtype)
    covariance = torch.linalg.inv(precision)
    return (covariance @ x.mT @ y / noise**2).flatten(), covariance


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.25])
def test_moments_of_a_linear_model(temperature: float) -> None:
    """Means and variances of 4 × 1,000 draws within 5 standard errors (12 comparisons: 1 in 10⁵);
    a temperature scales the covariance."""
    x, y = _linear()
    net = nn.Linear(3, 1, bias=False).double()
    method = doxa.HMC(draws=1000, burn_in=400, leapfrog=8, temperature=temperature)
    posterior = doxa.fit(net, (x, y), method, likelihood=doxa.Gaussian(0.5), seed=2)
    mean, covariance = _exact(x, y, 0.5)
    draws = posterior.samples.flatten(0, 1)
    effective = len(draws) / 3  # trajectories are long enough that few draws are wasted
    std = (temperature * covariance.diagonal()).sqrt()
    assert ((draws.mean(0) - mean).abs() < 5 * std / math.sqrt(effective)).all()
    ratio = draws.var(0) / std.square()
    assert ((ratio - 1).abs() < 5 * math.sqrt(2 / effective)).all()
    assert posterior.status == "ok"
    assert posterior.diagnostics["rhat_functions"] < 1.02


def test_a_rejected_transition_leaves_everything_as_it_was() -> None:
    """Position, gradient, log density and the energy that is recorded: the departing particle's
    where the proposal is rejected, the proposal's where it is taken. 60 chains, about half each."""
    chains, g = 60, torch.Generator().manual_seed(0)
    theta = torch.randn(chains, 2, generator=g, dtype=torch.float64)
    ones = torch.ones(chains, dtype=torch.float64)
    state = {
        "theta": theta, "grad": -theta, "log_density": -0.5 * theta.square().sum(1),
        "metric": torch.ones_like(theta), "step": 0.1 * ones,
    }  # fmt: skip
    seen: list[Point] = []

    def trajectory(point: Point, step: torch.Tensor) -> Point:
        there = Point(theta + 1, 1.5 * point.momentum, point.log_density - 0.3, 2 - theta)
        seen.extend([point, there])
        return there

    t = torch.tensor(0)
    noise = Noise(0, "test", range(chains), dtype=torch.float64)
    new, info = doxa.HMC()._transition(state, Clock(t, t.double(), 1, noise), trajectory)
    taken = (new["theta"] == theta + 1).all(1)
    assert 10 < int(taken.sum()) < 50
    for m in range(chains):
        at = seen[1] if taken[m] else seen[0]
        energy = 0.5 * at.momentum[m].square().sum() - at.log_density[m]
        assert float(info["energy"][m]) == pytest.approx(float(energy), rel=1e-12)
        assert new["log_density"][m] == at.log_density[m]
        assert torch.equal(new["grad"][m], at.grad[m])
        assert torch.equal(new["theta"][m], at.theta[m])


@pytest.mark.slow
def test_acceptance_follows_its_target() -> None:
    """Acceptance falls off a cliff at the leapfrog's stability limit, so the averaged step size
    ends on the safe side of a low target; a high one is met."""
    x, y = _linear()
    net = nn.Linear(3, 1).double()
    seen = {}
    for target in (0.65, 0.95):
        method = doxa.HMC(draws=300, burn_in=500, leapfrog=10, target_accept=target)
        accept = doxa.fit(net, (x, y), method).diagnostics["accept"]
        seen[target] = sum(accept) / len(accept)
        assert seen[target] > target - 0.05
    assert seen[0.65] < seen[0.95]


@pytest.mark.slow
def test_learned_noise_is_sampled() -> None:
    """The posterior of log σ concentrates at the noise the data was made with, 0.5."""
    x, y = _linear(n=400)
    net = nn.Linear(3, 1).double()
    posterior = doxa.fit(net, (x, y), doxa.HMC(draws=300, burn_in=300, leapfrog=10))
    noise = posterior.draw()["likelihood.log_noise"].exp()
    assert noise.std() > 0.005
    assert float(noise.mean()) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(2 * 400))


@pytest.mark.slow
def test_a_subset_leaves_the_rest_at_its_point() -> None:
    x, y = _linear()
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    posterior = doxa.fit(
        net, (x, y), doxa.HMC(draws=30, burn_in=30, leapfrog=4), subset="last_layer", members=2
    )
    draws = posterior.draw()
    for name in ("0.weight", "0.bias"):
        per_chain = draws[name].reshape(2, 30, -1)
        assert per_chain.std(1).max() == 0
    assert draws["2.weight"].reshape(2, 30, -1).std(1).min() > 0


def test_settings_are_checked() -> None:
    for bad in ({"draws": 0}, {"leapfrog": 0}, {"target_accept": 1.0}, {"temperature": 0.0}):
        with pytest.raises(MethodError):
            doxa.HMC(**bad)


def test_a_shift_of_all_logits_is_no_disagreement_between_chains() -> None:
    g = torch.Generator().manual_seed(0)
    f = torch.randn(400, 5, 3, generator=g)  # 2 chains of 200 draws, 5 rows, 3 classes
    shifted = f.clone()
    shifted[200:] += 100.0
    for logits in (f, shifted):
        (own,) = _compared(logits, doxa.Categorical())
        assert rhat(own.reshape(2, 200, -1)).max() < 1.02
    (raw,) = _compared(shifted, doxa.Gaussian())
    assert rhat(raw.reshape(2, 200, -1)).max() > 1.5  # ranks bound it
    both = _compared((f[..., :1], shifted), Heads((doxa.Gaussian(), doxa.Categorical())))
    assert [tuple(own.shape) for own in both] == [(400, 5), (400, 15)]
