"""SGNHT: stationary moments from the thermostat's condition, and its recursion by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gaussian_chains import Target, target

import doxa
from doxa.errors import MethodError

Z = 4.5  # |z| above this comes by chance 7 times in a million


def stationary(goal: Target, eta: float, a: float, heat: float, noise: Any) -> tuple[float, Any]:
    """α, and the variance of each weight, for d → ∞ weights with curvatures λ and independent
    gradient noise C. Velocities of one weight have the variance

        V = (2aηT + η²C) / (α (2 − α − ηλ/2)),

    that of θ is V (2 − α) / 2ηλ, both from the AR(2) process at this α; and α makes the mean of V
    equal to ηT."""
    curvature = np.diag(goal.precision)
    low, high = 1e-9, 1.9
    for _ in range(200):
        alpha = (low + high) / 2
        push = 2 * a * eta * heat + eta**2 * noise
        energy = push / (alpha * (2 - alpha - eta * curvature / 2))
        low, high = (alpha, high) if energy.mean() > eta * heat else (low, alpha)
    return alpha, energy * (2 - alpha) / (2 * eta * curvature)


def assert_variances(draws: Any, want: Any, power: float) -> None:
    """Means of squares over copies [T, copies, D] of independent weights."""
    each = np.square(draws).mean(0)
    error = each.std(0) / len(each) ** 0.5
    assert (np.abs(each.mean(0) - want) < Z * error).all()
    assert (error < power * want).all()


@pytest.mark.slow
@pytest.mark.parametrize(("friction", "temperature"), [(0.1, 1.0), (0.4, 0.25), (0.2, 3.0)])
def test_variance_with_full_batches(friction: float, temperature: float) -> None:
    """900 weights of three curvatures in one chain, whose α hardly fluctuates."""
    goal = target(n=16)
    eta = 0.6 / np.diag(goal.precision).max()
    method = doxa.SGNHT(100, 1000, 20, step_size=eta, friction=friction, temperature=temperature)
    posterior = goal.fit(method, copies=300, members=1, batch_size=16)
    alpha, want = stationary(goal, eta, friction, temperature, 0.0)
    draws = posterior.samples[0].unflatten(1, (-1, 3)).numpy() - goal.mean
    assert_variances(draws, want, power=0.03)
    assert np.abs(draws.mean((0, 1)) / (want / 300) ** 0.5).max() < Z
    assert alpha > 1.02 * friction


def noisy(columns: int, rows: int = 32, seed: int = 1) -> Target:
    """Many weights of one curvature, whose gradient noise is nearly independent."""
    y = 0.4 + np.random.default_rng(seed).normal(size=(rows, columns))
    return Target(torch.from_numpy(y), (1.0,) * columns)


@pytest.mark.slow
def test_mini_batches_do_not_heat_it(friction: float = 0.01) -> None:
    """The variance is (1 − α/2) T/λ with batches of 4, whose noise heats SGHMC of equal friction.
    Eight chains of 400 weights: the errors are from chains."""
    goal, members = noisy(400), 8
    eta = 0.01 / goal.precision[0, 0]
    settings = {"draws": 100, "burn_in": 2000, "thin": 40, "step_size": eta, "friction": friction}
    options: Any = {"members": members, "batch_size": 4}
    noise = np.diag(goal.gradient_noise(4, independent=True))
    alpha, want = stationary(goal, eta, friction, 1.0, noise)
    truth = 1 / goal.precision[0, 0]
    found = {}
    for cls in (doxa.SGNHT, doxa.SGHMC):
        draws = goal.fit(cls(**settings), **options).samples.numpy() - goal.mean  # [M, T, D]
        found[cls.name] = np.square(draws).mean((1, 2))  # of each chain
    ours, theirs = found["sgnht"], found["sghmc"]
    assert abs(ours.mean() - want.mean()) < Z * ours.std() / members**0.5 + 0.01 * truth
    assert ours.std() / members**0.5 < 0.02 * truth
    assert want.mean() == pytest.approx((1 - alpha / 2) * truth, rel=0.01)
    assert abs(ours.mean() / truth - 1) < 0.5 * abs(theirs.mean() / truth - 1)


def test_a_step_is_the_papers() -> None:
    """In the paper's p and ξ with step h, by hand: what is left of each step is the noise that
    SGHMC has at that step, whose friction is constant."""
    goal = target(n=16)
    h, a, heat = 0.1, 0.3, 0.5
    options: Any = {"members": 2, "batch_size": 16, "seed": 3}
    settings: Any = {"burn_in": 0, "thin": 1, "step_size": h**2, "friction": a, "temperature": heat}
    method = doxa.SGNHT(draws=4, coupling=h**2 * heat, **settings)
    path = goal.fit(method, **options).samples.numpy()  # [M, T, D]
    cold = settings | {"temperature": 1e-200}
    quiet = goal.fit(doxa.SGNHT(draws=1, **cold), **options)
    first = quiet.samples[:, 0].numpy()  # from rest and without noise: −h² ∇U(0)
    np.testing.assert_allclose(first, [h**2 * (goal.precision @ goal.mean)] * 2, rtol=1e-9)
    p = np.diff(path, axis=1) / h  # of steps 2, 3, 4
    xi = a / h + h * ((path[:, 0] / h) ** 2).mean(1, keepdims=True) - h * heat  # after step 1
    before = path[:, 0] / h
    spent = []
    for t in range(3):
        force = (path[:, t] - goal.mean) @ goal.precision
        drift = before - xi * h * before - h * force
        spent.append(p[:, t] - drift)
        xi = xi + h * ((p[:, t] ** 2).mean(1, keepdims=True) - heat)
        before = p[:, t]
    size = (2 * (a / h) * heat * h) ** 0.5  # √(2A T h)
    normal = np.stack(spent, 1) / size
    assert 0.3 < np.square(normal).mean() < 3.0
    fixed = goal.fit(doxa.SGHMC(draws=4, **settings), **options).samples.numpy()
    rest = (1 - a) * np.diff(fixed, axis=1, prepend=0)[:, :3]  # the same noise, constant friction
    force = (fixed[:, :3] - goal.mean) @ goal.precision
    theirs = np.diff(fixed, axis=1) - rest + h**2 * force
    np.testing.assert_allclose(theirs / (h * size), normal, rtol=1e-7, atol=1e-9)


def test_weights_outside_the_subset_are_not_counted() -> None:
    """d and vᵀv are of the sampled weights: a trunk of 200 more changes α nowhere."""
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
    net = torch.nn.Sequential(torch.nn.Linear(1, 100), torch.nn.Tanh(), torch.nn.Linear(100, 1))
    model = doxa.Model(net.double(), doxa.Gaussian(0.5), subset="last_layer")
    method = doxa.SGNHT(draws=50, burn_in=200, thin=5, step_size=1e-4, friction=0.1)
    posterior = doxa.fit(model, (x, x.sin()), method, members=2, steps=50, batch_size=20)
    free = posterior.samples[:, :, 200:]  # the last layer's 101
    speed = (free[:, 1:] - free[:, :-1]).square().mean()
    assert 0.3 < float(speed) / (25 * 1e-4) < 1.0  # of five steps at ηT each, with α of 0.1 or 0.2
    assert float((posterior.samples[:, 1:, :200] - posterior.samples[:, :1, :200]).abs().max()) == 0


@pytest.mark.parametrize("setting", [{"friction": 0.0}, {"friction": 1.5}, {"step_size": 0.0}])
def test_settings_out_of_range_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(MethodError, match=next(iter(setting))):
        doxa.SGNHT(**setting)
