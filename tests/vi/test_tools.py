"""Divergences and gradient estimators against closed forms, torch and the lecture's example."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical, MultivariateNormal, Normal, kl_divergence

from doxa import linalg
from doxa.errors import DataError, MethodError, ShapeError
from doxa.vi import kl


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def test_discrete() -> None:
    q, p = draw(4, 5).softmax(1), draw(4, 5, seed=1).softmax(1)
    want = kl_divergence(Categorical(q), Categorical(p))
    assert torch.allclose(kl.discrete(q, p), want)
    sure = torch.tensor([1.0, 0.0])
    assert float(kl.discrete(sure, torch.tensor([0.25, 0.75]))) == pytest.approx(math.log(4))
    assert float(kl.discrete(torch.tensor([0.5, 0.5]), sure)) == math.inf
    with pytest.raises(DataError, match="q holds no probabilities"):
        kl.discrete(torch.tensor([0.5, 0.6]), sure)
    with pytest.raises(ShapeError, match="2 outcomes and p has 3"):
        kl.discrete(sure, torch.ones(3) / 3)


def test_gaussian_is_a_sum() -> None:
    """Of 600 weights, the sum: a mean over them, as some libraries take it, is 600 times less."""
    mean, std = draw(600), draw(600, seed=1).exp()
    want = kl_divergence(Normal(mean, std), Normal(0.3, 1.7)).sum()
    assert torch.allclose(kl.gaussian(mean, std, 0.3, 1.7), want)
    assert float(kl.gaussian(mean, std, mean, std)) == 0.0


def test_a_peer_averages_over_weights() -> None:
    """bayesian-torch 0.5.0, `LinearReparameterization(400, 10).kl_loss()`, at these means and ρ and
    with N(0, 1) as prior, gave 2.9728150: the mean over the weights plus the mean over the biases.
    The divergence of the layer is their sum."""
    mean, rho = torch.linspace(-1, 1, 4000), torch.linspace(-3, 0, 4000)
    weights = kl.gaussian(mean, torch.nn.functional.softplus(rho), 0.0, 1.0)
    std = torch.nn.functional.softplus(torch.full((10,), -2.0))
    biases = kl.gaussian(torch.linspace(-0.5, 0.5, 10), std, 0.0, 1.0)
    assert float(weights / 4000 + biases / 10) == pytest.approx(2.9728150, rel=1e-5)
    assert float(weights + biases) == pytest.approx(5415.0254, rel=1e-5)


@pytest.mark.parametrize("kind", ["diagonal", "low-rank", "dense"])
def test_multivariate(kind: str) -> None:
    mean, root = draw(3, 4), draw(3, 4, 4, seed=1)
    structure = {
        "diagonal": linalg.Diagonal(draw(3, 4, seed=2).exp()),
        "low-rank": linalg.LowRankPlusDiagonal(draw(3, 4, seed=2).exp(), draw(3, 4, 2, seed=3)),
        "dense": linalg.Dense.from_covariance(root @ root.mT + torch.eye(4, dtype=root.dtype)),
    }[kind]
    scale = draw(4, seed=4).exp()
    got = kl.multivariate(mean, structure, 0.5, scale)
    full = structure.matmul(torch.eye(4, dtype=mean.dtype).unsqueeze(1).expand(4, 3, 4))
    for k in range(3):
        q = MultivariateNormal(mean[k], full[:, k])
        p = MultivariateNormal(torch.full((4,), 0.5, dtype=mean.dtype), scale.square().diag())
        assert float(got[k]) == pytest.approx(float(kl_divergence(q, p)), rel=1e-9)


def test_a_mixture_by_monte_carlo() -> None:
    """KL of a Gaussian to an equal mixture of two, against a fine grid; four standard errors."""
    q = Normal(torch.tensor(0.3, dtype=torch.float64), 0.8)

    def log_p(x: torch.Tensor) -> torch.Tensor:
        each = [Normal(torch.tensor(m, dtype=x.dtype), 0.5).log_prob(x) for m in (-1.0, 1.0)]
        return torch.logsumexp(torch.stack(each), 0) - math.log(2)

    at = torch.linspace(-6, 6, 20_001, dtype=torch.float64)
    density = q.log_prob(at).exp()
    want = torch.trapezoid(density * (q.log_prob(at) - log_p(at)), at)
    got = kl.monte_carlo(0.3 + 0.8 * draw(20_000), q.log_prob, log_p)
    assert abs(float(got.value - want)) < 4 * float(got.error)
    assert float(got.error) < 0.02


@pytest.mark.parametrize("estimator", [kl.pathwise, kl.score_function])
@pytest.mark.parametrize("mu", [-1.0, 0.5])
def test_estimators_are_unbiased(estimator: object, mu: float) -> None:
    """The lecture's: f(θ) = θ + θ² has ∂_μ E f = 1 + 2μ and ∂_σ E f = 2σ. Five standard errors of
    the mean of 50,000 estimates."""
    mean, std = torch.tensor(mu, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    got = estimator(lambda t: t + t**2, mean, std, draw(50_000))  # type: ignore[operator]
    for values, want in ((got.mean, 1 + 2 * mu), (got.std, 2 * 0.7)):
        found = kl.mean_of(values)
        assert abs(float(found.value) - want) < 5 * float(found.error)


def test_their_variances_are_in_the_order_that_is_claimed() -> None:
    mean, std = torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    f = lambda t: t + t**2  # noqa: E731
    eps = draw(20_000)
    path = kl.pathwise(f, mean, std, eps).mean.var()
    with_baseline = kl.score_function(f, mean, std, eps).mean.var()
    without = kl.score_function(f, mean, std, eps, baseline="none").mean.var()
    assert path < 0.2 * with_baseline < 0.2 * 0.5 * without
    with pytest.raises(MethodError, match="baseline must be"):
        kl.score_function(f, mean, std, eps, baseline="mine")


def test_a_standard_error_needs_two_draws_and_no_more() -> None:
    """Of 1 and 4: mean 2.5, deviation 3/√2, error 3/2."""
    found = kl.mean_of(torch.tensor([1.0, 4.0]))
    assert (float(found.value), float(found.error)) == pytest.approx((2.5, 1.5))
    with pytest.raises(DataError, match="two draws"):
        kl.mean_of(torch.tensor([1.0]))
