"""Variational implicit processes against the Gaussian process that has the draws' moments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.errors import MethodError
from doxa.function.implicit_process import gaussian_energy

NOISE = 0.4


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(15, 2, generator=g).double()
    y = x @ torch.tensor([[0.7], [-0.4]]).double() + 0.2
    return x, y + NOISE * torch.randn(15, 1, generator=g).double()


def fit(functions: int, steps: int = 1, **settings: Any) -> Any:
    """A linear network under N(0, 1): the implicit process is the Bayesian linear model."""
    weight = settings.pop("sample_weight", None)
    chosen = {"functions": functions, "learn_prior": False, "exact": True, **settings}
    return doxa.fit(
        nn.Linear(2, 1).double(), data(), doxa.ImplicitProcess(**chosen),
        likelihood=doxa.Gaussian(noise=NOISE), validation=None, progress=False, steps=steps,
        lr=0.05, schedule="cosine", sample_weight=weight,
    )  # fmt: skip


def empirical(posterior: Any, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean at `at`, k(x, x), k(at, x), k(at, at) of the draws themselves, by their weights."""
    weights = posterior.layout.unflatten(posterior.basis[0])
    values = lambda at: (at @ weights["weight"][:, 0].mT + weights["bias"].mT).mT  # noqa: E731 [S, N]
    f, there = values(x), values(at)
    a, b = f - f.mean(0), there - there.mean(0)
    return there.mean(0), a.mT @ a / len(f), b.mT @ a / len(f), b.mT @ b / len(f)


def test_it_is_the_process_with_the_draws_covariance() -> None:
    """Equation by equation: GP regression with the empirical mean and covariance of five draws, and
    its evidence, which the bound reaches."""
    (x, y), at = data(), torch.linspace(-3, 3, 14).double().reshape(7, 2)
    posterior = fit(5)
    mean, _, across, own = empirical(posterior, x, at)
    start, k, _, _ = empirical(posterior, x, x)
    noisy = k + NOISE**2 * torch.eye(len(x)).double()
    wanted = mean + across @ torch.linalg.solve(noisy, y[:, 0] - start)
    covariance = own - across @ torch.linalg.solve(noisy, across.mT)
    p = posterior.predict(at)
    assert torch.allclose(p.mean[:, 0], wanted, atol=1e-9)
    assert torch.allclose(p.epistemic[:, 0], covariance.diagonal(), atol=1e-9)
    density = torch.distributions.MultivariateNormal(start, noisy).log_prob(y[:, 0])
    assert abs(posterior.elbo - float(density)) < 1e-8
    drawn = torch.cov(posterior.functions(at, 5000)[..., 0].mT)  # five standard errors
    assert (drawn - covariance).abs().max() < 5 * math.sqrt(2 / 5000) * covariance.max()


def test_the_exact_solution_counts_rows_by_their_weights() -> None:
    """A row of weight w is one whose noise has the variance σ²/w: GP regression with the empirical
    moments of five draws."""
    (x, y), at = data(), torch.linspace(-3, 3, 14).double().reshape(7, 2)
    weight = torch.linspace(0.1, 3.0, len(x)).double()
    posterior = fit(5, sample_weight=weight)
    mean, _, across, own = empirical(posterior, x, at)
    start, k, _, _ = empirical(posterior, x, x)
    noisy = k + NOISE**2 * torch.diag(1 / weight)
    p = posterior.predict(at)
    wanted = mean + across @ torch.linalg.solve(noisy, y[:, 0] - start)
    covariance = own - across @ torch.linalg.solve(noisy, across.mT)
    assert torch.allclose(p.mean[:, 0], wanted, atol=1e-9)
    assert torch.allclose(p.epistemic[:, 0], covariance.diagonal(), atol=1e-9)


@pytest.mark.slow
def test_many_functions_are_the_exact_linear_model() -> None:
    """400 draws: the prior's moments are within 1/√S = 0.05 of themselves, and so are those of the
    posterior, in units of its standard deviation: three of them."""
    (x, y), at = data(), torch.linspace(-2, 2, 8).double().reshape(4, 2)
    phi, there = (torch.cat([t, torch.ones_like(t[:, :1])], 1) for t in (x, at))
    precision = torch.eye(3).double() + phi.mT @ phi / NOISE**2
    mean = there @ torch.linalg.solve(precision, phi.mT @ y / NOISE**2)
    std = (there @ torch.linalg.solve(precision, there.mT)).diagonal().sqrt()
    f = fit(400).predict(at)
    assert ((f.mean - mean)[:, 0].abs() / std).max() < 3 / math.sqrt(400)
    assert (f.epistemic[:, 0].sqrt() / std - 1).abs().max() < 3 / math.sqrt(400)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_what_is_trained_comes_to_the_closed_form(alpha: float) -> None:
    """Without `exact`, q(a) ascends the energy: at α = 0 its optimum is the posterior of a; at ½
    the mean is near it and every variance larger."""
    exact, found = fit(3), fit(3, 500, exact=False, alpha=alpha)
    away = (found.a_mean - exact.a_mean).abs().max()
    both = [posterior.a_root @ posterior.a_root.mT for posterior in (found, exact)]
    ratio = both[0].diagonal(dim1=1, dim2=2) / both[1].diagonal(dim1=1, dim2=2)
    assert away < (5e-3 if alpha == 0 else 0.2)
    assert (ratio - 1).abs().max() < 0.03 if alpha == 0 else (ratio > 1.0).all()


def test_a_learned_prior_starts_around_the_network() -> None:
    """100 draws of 51 weights after one step of no length: their mean is the network that was given
    and their deviation 0.1 of the prior's, within five and four standard errors."""
    net, y = nn.Linear(50, 1).double(), data()[1]
    x = torch.randn(len(y), 50, generator=torch.Generator().manual_seed(1)).double()
    posterior = doxa.fit(
        net, (x, y), doxa.ImplicitProcess(functions=100, initial_scale=0.1), init="given",
        prior=doxa.Normal(2.0), likelihood=doxa.Gaussian(noise=NOISE), validation=None,
        progress=False, steps=1, lr=1e-12,
    )  # fmt: skip
    given = torch.cat([net.weight.detach().flatten(), net.bias.detach()])
    weights = posterior.basis[0]
    assert ((weights.mean(0) - given).abs() < 5 * 0.2 / math.sqrt(100)).all()
    spread = float((weights - given).square().mean().sqrt())
    assert abs(spread / 0.2 - 1) < 4 / math.sqrt(2 * weights.numel())


@pytest.mark.parametrize("alpha", [1e-4, 0.3, 1.0])
def test_the_energy_of_gaussian_noise_is_its_integral(alpha: float) -> None:
    """(1/α) log ∫ N(f; μ, v) N(y; f, σ²)^α df on a grid, for one output; as α → 0, E log p."""
    left, std, noise = torch.tensor([0.7, 0.5, 0.3], dtype=torch.float64)
    f = torch.linspace(-6, 6, 20_001, dtype=torch.float64)
    q = torch.distributions.Normal(0 * std, std).log_prob(f)
    p = torch.distributions.Normal(f, noise).log_prob(left)
    wanted = torch.logsumexp(q + alpha * p, 0) + math.log(12 / 20_000)
    one = (1, 1, 1)
    own = gaussian_energy(
        left.reshape(one), std.reshape(1, *one), noise.square().reshape(one), alpha
    )
    assert abs(float(own) - float(wanted) / alpha) < 1e-3
    if alpha < 1e-3:  # what is left is α/2 times a variance of some 30
        assert abs(float(own) - float((q.exp() * p).sum() * 12 / 20_000)) < 5e-3


def test_the_energy_of_several_outputs() -> None:
    """At α = 1 it is log N(y; μ, V + σ²) of correlated outputs; where they are independent, at any
    α, the sum of the energies of each."""
    g = torch.Generator().manual_seed(0)
    left, half = torch.randn(1, 4, 3, generator=g).double(), torch.randn(1, 5, 4, 3, generator=g)
    half, noise = half.double(), torch.tensor([0.2, 0.5, 1.1]).double().expand(1, 4, 3)
    covariance = torch.einsum("sbo,sbp->bop", half[0], half[0]) + noise[0, 0].diag()
    wanted = torch.distributions.MultivariateNormal(torch.zeros(3).double(), covariance)
    torch.testing.assert_close(gaussian_energy(left, half, noise, 1.0)[0], wanted.log_prob(left[0]))
    alone = torch.zeros(1, 3, 4, 3).double()
    for o in range(3):
        alone[:, o, :, o] = half[:, o, :, o]
    each = [
        gaussian_energy(left[..., o : o + 1], alone[..., o : o + 1], noise[..., o : o + 1], 0.3)
        for o in range(3)
    ]
    torch.testing.assert_close(gaussian_energy(left, alone, noise, 0.3), sum(each))


def test_a_given_sampler_is_the_prior() -> None:
    """f = zx: whatever S is, the posterior is a line through the origin, and with 100 draws the
    exact one within 5/√100 of its width."""
    x = torch.linspace(-1, 1, 12).double()[:, None]
    line = doxa.ImplicitPrior(lambda x, z: z[0] * x[:, 0], 1)
    posterior = doxa.fit(
        nn.Linear(1, 1).double(), (x, 0.8 * x), steps=1, likelihood=doxa.Gaussian(noise=0.5),
        method=doxa.ImplicitProcess(functions=100, function_prior=line, exact=True),
        validation=None, progress=False,
    )  # fmt: skip
    precision = 1 + float(x.square().sum()) / 0.25
    at = torch.tensor([[0.0], [1.0]]).double()
    p = posterior.predict(at)
    assert float(p.mean[0]) == 0.0
    assert abs(float(p.mean[1]) - 0.8 * (1 - 1 / precision)) < 0.5 / precision**0.5
    assert abs(float(p.epistemic[1]) * precision - 1) < 0.5


def test_weighted_classes_have_no_energy() -> None:
    x, y = data()
    with pytest.raises(MethodError, match="alpha=0"):
        doxa.fit(
            nn.Linear(2, 2).double(), (x, (y[:, 0] > 0).long()), "vip", steps=2, progress=False,
            likelihood=doxa.Categorical(class_weight=(1.0, 2.0)),
        )  # fmt: skip


def test_it_ends_with_its_best_score() -> None:
    """The predictive density of the held-out rows, which have nothing to do with the others."""
    g = torch.Generator().manual_seed(2)
    x, y = (torch.randn(24, k, generator=g).double() for k in (2, 1))
    held = (x[12:], y[12:])
    posterior = doxa.fit(
        doxa.nets.mlp(2, 1, (8,)).double(), (x[:12], y[:12]),
        doxa.ImplicitProcess(functions=4, average=0.0), likelihood=doxa.Gaussian(noise=0.5),
        prior=doxa.Normal(3.0), validation=held, steps=200, patience=200, lr=0.05, batch_size=12,
        schedule="constant", progress=False,
    )  # fmt: skip
    scores = [each[0] for _, each in posterior.history["validation"]]
    assert max(scores) > scores[-1] + 0.1, "it never overfitted, so that nothing was tested"
    best = float(posterior.predict(held[0]).log_prob(held[1]).sum())
    assert best == pytest.approx(max(scores), rel=1e-9)


def test_classes_held_out_are_scored_as_they_are_predicted() -> None:
    """By E_q[p(y | f)], not at the mean function, after few steps: q(a) is still as wide as the
    prior. Both are means over draws, of 32 and of as many as a prediction takes: within 0.05 nats a
    row. At the mean function they are 0.15 higher."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=g)
    y = (x.sum(1) > 0).long()
    posterior = doxa.fit(
        doxa.nets.mlp(3, 2, (20,)), (x, y), "vip", likelihood="categorical", steps=60,
        progress=False, patience=100, validation=0.1,
    )  # fmt: skip
    kept = posterior.diagnostics["stopping"]
    (score,) = [v for t, v in posterior.history["validation"] if t == kept["kept_step"][0]]
    told = posterior.diagnostics["held_out"]["log_prob"]
    assert abs(score[0] / kept["rows"][0] - told) < 0.05
