"""IVON against Algorithm 1 of the paper, written out with h, and against the linear anchor.

A linear network with Gaussian noise σ and prior s has the exact precision A = XᵀX/σ² + I/s². The
fixed point of the algorithm at temperature T has the exact mean and the variances T/A_jj.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import doxa
from doxa.errors import MethodError
from doxa.method import Clock

N, D = 30, 2
NOISE, STD = 1.5, 0.7


def rows() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=g, dtype=torch.float64)
    x[:, 1] += 0.6 * x[:, 0]
    y = x @ torch.tensor([0.8, -0.5]).double()
    return x, y + NOISE * torch.randn(N, generator=g, dtype=torch.float64)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def loss(theta: Tensor) -> Tensor:
    """The mean of −log p(y | θ)."""
    x, y = rows()
    w1, b1, w2, b2 = theta.split([3 * D, 3, 3, 1])
    f = torch.tanh(x @ w1.reshape(3, D).T + b1) @ w2 + b2
    return -Normal(f, NOISE).log_prob(y).mean()


def algorithm_1(
    m: Tensor, free: Tensor, noise: list[Tensor], heat: float, clip: float, h0: float, rate: float
) -> tuple[Tensor, Tensor]:
    """Mean and variances after some steps, each with draws ε [S, free]; others are left alone."""
    beta1, beta2, delta, lam = 0.9, 0.99, STD**-2 / N, N / heat
    m = m.clone()
    h = torch.full((int(free.sum()),), h0, dtype=torch.float64)
    g = torch.zeros_like(h)
    for t, draws in enumerate(noise, 1):
        std = 1 / (lam * (h + delta)).sqrt()
        grads, hessians = [], []
        for eps in draws:
            theta = m.clone()
            theta[free] += std * eps
            (grad,) = torch.autograd.grad(loss(theta.requires_grad_()), [theta])
            grads.append(grad[free])
            hessians.append(grad[free] * eps / std)
        g_hat, h_hat = torch.stack(grads).mean(0), torch.stack(hessians).mean(0)
        g = beta1 * g + (1 - beta1) * g_hat
        h = (
            beta2 * h + (1 - beta2) * h_hat
            + 0.5 * (1 - beta2) ** 2 * (h - h_hat) ** 2 / (h + delta)
        )  # fmt: skip
        step = (g / (1 - beta1**t) + delta * m[free]) / (h + delta)
        m[free] = m[free] - rate * step.clamp(-clip, clip)
    return m, 1 / (lam * (h + delta))


@pytest.mark.parametrize(
    ("subset", "samples", "heat", "clip"),
    [
        ("all", 1, 1.0, 1e9),
        ("all", 3, 0.4, 1e9),
        ("all", 2, 1.0, 0.05),
        ("last_layer", 1, 1.0, 1e9),
    ],
)
def test_three_steps_are_algorithm_1(
    monkeypatch: Any, subset: str, samples: int, heat: float, clip: float
) -> None:
    """To rounding. With a subset, points move as well, after the first gradient: one step then."""
    net = network()
    start = torch.cat([p.detach().flatten() for p in net.parameters()])
    free = torch.ones(len(start), dtype=torch.bool)
    steps = 3 if subset == "all" else 1
    if subset == "last_layer":
        free[: 3 * D + 3] = False
    size = int(free.sum())
    g = torch.Generator().manual_seed(2)
    noise = [torch.randn(samples, size, generator=g, dtype=torch.float64) for _ in range(steps)]
    monkeypatch.setattr(
        doxa.IVON, "normals", lambda self, clock, numbers: noise[int(clock.t)].unsqueeze(0)
    )
    method = doxa.IVON(
        beta2=0.99, initial_curvature=0.3, samples=samples, temperature=heat, clip=clip,
        average=0.0, elbo_samples=1,
    )  # fmt: skip
    model = doxa.Model(net, doxa.Gaussian(NOISE), doxa.Normal(STD), subset=subset)
    q = doxa.fit(
        model, rows(), method, init="given", steps=steps, lr=0.2, batch_size=N, validation=None,
        schedule="constant", engine="loop:eager", progress=False,
    )  # fmt: skip
    mean, variance = algorithm_1(start, free, noise, heat, clip, 0.3, 0.2)
    torch.testing.assert_close(q.mean[0, free], mean[free], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(q.covariance.diagonal()[0], variance, rtol=1e-9, atol=0.0)
    if subset == "last_layer":  # Adam's first step: a tenth of the rate, by the sign
        moved = (q.mean[0, ~free] - start[~free]).abs()
        torch.testing.assert_close(moved, torch.full_like(moved, 0.02), rtol=1e-3, atol=0.0)


def linear(noise: Any = NOISE) -> doxa.Model:
    net = nn.Linear(D, 1, bias=False).double()
    return doxa.Model(net, doxa.Gaussian(noise), doxa.Normal(STD))


@pytest.mark.parametrize("heat", [1.0, pytest.param(0.25, marks=pytest.mark.slow)])
def test_its_fixed_point_is_the_exact_mean_and_the_diagonal_of_the_precision(heat: float) -> None:
    """Pairs ±ε leave no noise in the mean's gradient: to 1e-6 of a standard deviation. Variances
    T/A_jj: each is noisy (below 15 %), the mean over 8 members within 5 %."""
    x, y = rows()
    precision = x.T @ x / NOISE**2 + torch.eye(D, dtype=torch.float64) / STD**2
    mean = torch.linalg.solve(precision, x.T @ y / NOISE**2)
    method = doxa.IVON(beta2=0.99, samples=2, temperature=heat, elbo_samples=1, average=0.5)
    q = doxa.fit(
        linear(), rows(), method, members=8, batch_size=N, steps=1000, validation=None,
        progress=False,
    )  # fmt: skip
    std = precision.diagonal().rsqrt()
    assert ((q.mean - mean).abs() < 1e-6 * std).all()
    ratio = q.covariance.diagonal() * precision.diagonal() / heat
    assert ((ratio.mean(0) - 1).abs() < 0.05).all(), ratio.mean(0)
    assert (ratio.std(0) < 0.15).all()
    assert (q.elbo is None) == (heat != 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [600, 2400])
def test_the_defaults_find_the_mean_and_the_variances_in_a_run_of_any_length(steps: int) -> None:
    """One draw a step: ε alternates in sign, so that its noise in the mean cancels, to 1 % of a
    standard deviation; with independent draws the error would be some per cent. The variances,
    over eight members, to 15 %: with a memory of 1,000 steps, the shorter run would give half."""
    x, y = rows()
    precision = x.T @ x / NOISE**2 + torch.eye(D, dtype=torch.float64) / STD**2
    mean = torch.linalg.solve(precision, x.T @ y / NOISE**2)
    q = doxa.fit(
        linear(), rows(), doxa.IVON(elbo_samples=1), members=8, batch_size=N, steps=steps,
        validation=None, progress=False,
    )  # fmt: skip
    assert ((q.mean - mean).abs() < 0.01 * precision.diagonal().rsqrt()).all()
    ratio = (q.covariance.diagonal() * precision.diagonal()).mean(0)
    assert ((ratio - 1).abs() < 0.15).all(), ratio


@pytest.mark.parametrize(("steps", "beta2"), [(100, 0.96), (20, 0.9)])
def test_by_default_a_quarter_of_the_steps_make_a_hessian(steps: int, beta2: float) -> None:
    """1/(1 − β₂) is 25 of 100 steps; ten steps at least."""
    options: dict[str, Any] = {
        "steps": steps, "batch_size": N, "validation": None, "progress": False,
    }  # fmt: skip
    own, given, other = (
        doxa.fit(linear(), rows(), doxa.IVON(beta2=b, elbo_samples=1), **options)
        for b in (None, beta2, 0.95)
    )
    torch.testing.assert_close(own.covariance.diagonal(), given.covariance.diagonal())
    assert not torch.allclose(own.covariance.diagonal(), other.covariance.diagonal(), rtol=1e-3)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e3, 1e9, 1e30])
def test_hostile_gradients_leave_the_variance_positive(monkeypatch: Any, size: float) -> None:
    """1 + x + x²/2 ≥ ½: σ² at most doubles in a step, and is never 0, whatever the gradients are.
    In single precision, at β₂ = 0.5, where every term counts."""
    method = doxa.IVON(beta2=0.5, average=0.0)
    seen: list[Tensor] = []
    original = doxa.IVON._variance

    def spied(self: Any, run: Any, variance: Tensor, away: Tensor, slope: Tensor) -> Tensor:
        g = torch.Generator().manual_seed(len(seen))
        hostile = size * torch.randn(slope.shape, generator=g)
        seen.append(variance.clone())
        return original(self, run, variance, torch.ones_like(away), hostile)

    monkeypatch.setattr(doxa.IVON, "_variance", spied)
    x, y = rows()
    net = nn.Linear(D, 1)
    doxa.fit(
        doxa.Model(net, doxa.Gaussian(NOISE), doxa.Normal(STD)), (x.float(), y.float()), method,
        steps=40, lr=1e-6, engine="loop:eager", validation=None, progress=False,
    )  # fmt: skip
    values = torch.stack(seen)
    assert len(values) >= 40
    assert (values > 0).all()
    assert values.isfinite().all()
    assert (values[1:] <= 2.0001 * values[:-1].clamp_min(torch.finfo(torch.float32).tiny)).all()


def test_noise_alternates_in_sign_and_is_new_every_second_step(monkeypatch: Any) -> None:
    drawn: list[Tensor] = []
    original = Clock.alternating

    def spied(self: Clock, *shape: int) -> Tensor:
        drawn.append(original(self, *shape))
        return drawn[-1]

    monkeypatch.setattr(Clock, "alternating", spied)
    doxa.fit(
        linear(), rows(), doxa.IVON(elbo_samples=1), steps=4, engine="loop:eager",
        validation=None, progress=False,
    )  # fmt: skip
    a, b, c, d = drawn[-4:]
    assert torch.equal(a, -b)
    assert torch.equal(c, -d)
    assert not torch.equal(a, c)


def test_only_gaussian_priors() -> None:
    net = nn.Linear(D, 1).double()
    with pytest.raises(MethodError, match=r"need a Gaussian prior.*mean-field takes any"):
        doxa.fit(net, rows(), "ivon", prior=doxa.LaplacePrior(0.4), steps=1)


def test_learned_noise_is_found_as_a_point() -> None:
    """With 400 rows and one weight the noise is known to √(1/800) = 3.5 %: within four of that."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(400, 1, generator=g, dtype=torch.float64)
    y = 0.5 * x + 0.3 * torch.randn(400, 1, generator=g, dtype=torch.float64)
    q = doxa.fit(
        nn.Linear(1, 1).double(), (x, y), doxa.IVON(elbo_samples=1), steps=400, validation=None,
        prior=doxa.Normal(1.0), progress=False,
    )  # fmt: skip
    noise = float(q.predict(x[:1]).aleatoric) ** 0.5
    assert noise == pytest.approx(0.3, rel=0.14)
    assert q.covariance.diagonal().shape == (1, 2)  # of weight and bias: noise has no variance
