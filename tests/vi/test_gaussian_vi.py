"""Gaussian families that hold the posterior find it: low rank and the last layer, on the anchor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import doxa
from doxa.errors import MemoryBudgetError, MethodError, ModelError
from doxa.vi.last_layer import LastLayerVI, lost_to_softmax

NOISE = 0.5


def line(n: int = 30) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=g, dtype=torch.float64) @ torch.tensor(
        [[1.0, 0.8], [0.0, 0.6]], dtype=torch.float64
    )
    y = x @ torch.tensor([[1.0], [-0.5]], dtype=torch.float64) + 0.3
    return x, y + NOISE * torch.randn(n, 1, generator=g, dtype=torch.float64)


def exact(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float]:
    """Mean and covariance of (w, b) under N(0, 1) and noise 0.5, and the log evidence."""
    phi = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    precision = phi.T @ phi / NOISE**2 + torch.eye(3, dtype=x.dtype)
    covariance = precision.inverse()
    mean = covariance @ phi.T @ y[:, 0] / NOISE**2
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(len(x), dtype=x.dtype),
        phi @ phi.T + NOISE**2 * torch.eye(len(x), dtype=x.dtype),
    )
    return mean, covariance, float(marginal.log_prob(y[:, 0]))


def found(posterior: doxa.Posterior) -> tuple[Tensor, Tensor]:
    eye = torch.eye(3, dtype=torch.float64).unsqueeze(1)
    return posterior.mean[0], posterior.covariance.matmul(eye)[:, 0]


@pytest.mark.parametrize("method", [doxa.MeanField(), doxa.LowRankVI(rank=2), LastLayerVI()])
def test_draws_variances_and_determinant_are_of_one_covariance(method: Any) -> None:
    """R Rᵀ from the draws of unit vectors, against what the bound and the posterior use."""
    g = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(2, *shape, generator=g, dtype=torch.float64)  # noqa: E731
    params = {"rho": normal(4), "factor": normal(4, 2), "lower": normal(4, 4)}
    eye = torch.eye(method.numbers(params), dtype=torch.float64).expand(2, -1, -1)
    root = method.away(params, eye).mT
    sigma = root @ root.mT
    assert torch.allclose(method.variances(params), sigma.diagonal(dim1=1, dim2=2))
    assert torch.allclose(method.logdet(params), torch.linalg.slogdet(sigma).logabsdet)
    every = torch.eye(4, dtype=torch.float64).unsqueeze(1).expand(-1, 2, -1)
    assert torch.allclose(method.covariance(params).matmul(every).transpose(0, 1), sigma)


@pytest.mark.slow
def test_the_last_layer_is_bayesian_linear_regression() -> None:
    """Nothing is random but the batch, and here it holds all rows: mean and covariance to 1e-3, and
    the bound is the evidence."""
    x, y = line()
    mean, covariance, evidence = exact(x, y)
    posterior = doxa.fit(
        nn.Linear(2, 1).double(), (x, y), doxa.LastLayerVI(elbo_samples=400), steps=3000, lr=0.02,
        batch_size=30, likelihood=doxa.Gaussian(noise=NOISE), prior=doxa.Normal(1.0),
        validation=None,
    )  # fmt: skip
    got_mean, got = found(posterior)
    assert torch.allclose(got_mean, mean, atol=1e-3 * float(covariance.diag().min().sqrt()))
    assert torch.allclose(got, covariance, atol=1e-3 * float(covariance.diag().max()))
    # of 400 draws: half the trace of a χ²₃ a draw has sd √(3/2)
    assert abs(posterior.elbo - evidence) < 4 * math.sqrt(1.5 / 400)


def test_a_mini_batch_stands_for_all_rows() -> None:
    """All 40 rows are the same row, so that every batch of 4 has the gradient of all rows: the
    variance of the one weight is 1/(1 + 40/σ²), not that of a fit to 4 rows."""
    x = torch.ones(40, 1, dtype=torch.float64)
    posterior = doxa.fit(
        nn.Linear(1, 1, bias=False).double(), (x, 0.7 * x), doxa.LastLayerVI(), steps=400, lr=0.05,
        schedule="cosine", batch_size=4, likelihood=doxa.Gaussian(noise=NOISE),
        prior=doxa.Normal(1.0), validation=None,
    )  # fmt: skip
    precision = 1 + 40 / NOISE**2
    assert float(posterior.mean) == pytest.approx(0.7 * (1 - 1 / precision), rel=1e-3)
    assert float(posterior.covariance.diagonal()) == pytest.approx(1 / precision, rel=0.02)


@pytest.mark.parametrize("method", [doxa.MeanField, doxa.LowRankVI])
def test_the_bound_under_a_prior_without_a_closed_form(method: Any) -> None:
    """One weight, q = N(m, s²) as it was given, a Student-t prior: E_q log p(w) and
    E_q log p(y | w) by a sum over a grid of w. 1,000 draws, five standard errors."""
    x, y = torch.tensor([[1.0], [0.5]]).double(), torch.tensor([[0.3], [0.4]]).double()
    net = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(net.weight, 0.4)
    prior = doxa.StudentTPrior(3.0, 0.2)
    posterior = doxa.fit(
        net, (x, y), method(initial_std=0.5, elbo_samples=1000), steps=1, lr=1e-12, batch_size=2,
        likelihood=doxa.Gaussian(noise=1.0), prior=prior, init="given", validation=None,
    )  # fmt: skip
    centre, spread = float(posterior.mean), float(posterior.covariance.diagonal().sqrt())
    w = centre + spread * torch.linspace(-8, 8, 20_001, dtype=torch.float64)
    q = torch.distributions.Normal(centre, spread).log_prob(w)
    fits = torch.distributions.Normal(w[:, None] * x[:, 0], 1.0).log_prob(y[:, 0]).sum(1)
    log_p = torch.distributions.StudentT(3.0, 0.0, 0.2).log_prob(w)
    terms, mass = fits + log_p - q, q.exp() * float(w[1] - w[0])
    want = float((mass * terms).sum())
    # the entropy is added in closed form: what varies is the rest
    rest = terms + q
    error = float((mass * (rest - (mass * rest).sum()).square()).sum().sqrt()) / math.sqrt(1000)
    assert posterior.elbo == pytest.approx(want, abs=5 * error)
    assert 10 * error < abs(float((mass * log_p).sum())), "a missing prior would be seen"


@pytest.mark.slow
def test_low_rank_finds_the_posterior_and_mean_field_does_not() -> None:
    """Rank 2 plus a diagonal holds any covariance of three weights. The mean to 1e-3 of the largest
    standard deviation, since pairs ±ε leave no noise in its gradient here; the covariance, whose
    gradient is estimated, to 1 % of the largest variance."""
    x, y = line()
    mean, covariance, evidence = exact(x, y)
    options = {
        "steps": 6000, "lr": 0.003, "batch_size": 30, "likelihood": doxa.Gaussian(noise=NOISE),
        "prior": doxa.Normal(1.0), "validation": None,
    }  # fmt: skip
    net = nn.Linear(2, 1).double()
    rich = doxa.LowRankVI(rank=2, samples=64, elbo_samples=400)
    posterior = doxa.fit(net, (x, y), rich, **options)
    got_mean, got = found(posterior)
    assert torch.allclose(got_mean, mean, atol=1e-3 * float(covariance.diag().max().sqrt()))
    assert torch.allclose(got, covariance, atol=0.01 * float(covariance.diag().max()))
    poor = doxa.fit(net, (x, y), doxa.MeanField(elbo_samples=400), **options)
    error = 4 * math.sqrt(1.5 / 400)
    assert poor.elbo < posterior.elbo - error
    assert abs(posterior.elbo - evidence) < error


@pytest.mark.slow
def test_the_objective_is_the_exact_elbo_of_a_low_rank_gaussian() -> None:
    """−KL(q ‖ p) by torch's own, at the answer of a short fit, from the reported bound."""
    x, y = line()
    net = nn.Linear(2, 1).double()
    method = doxa.LowRankVI(rank=2, elbo_samples=4000)
    posterior = doxa.fit(
        net, (x, y), method, steps=50, likelihood=doxa.Gaussian(noise=NOISE),
        prior=doxa.Normal(1.3), batch_size=30,
    )  # fmt: skip
    mean, covariance = found(posterior)
    normal = torch.distributions.MultivariateNormal
    q = normal(mean, covariance)
    p = normal(torch.zeros_like(mean), 1.69 * torch.eye(3, dtype=x.dtype))
    phi = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    f = phi @ mean
    each = torch.distributions.Normal(f, NOISE).log_prob(y[:, 0])
    lost = 0.5 * ((phi @ covariance) * phi).sum(1) / NOISE**2
    want = float((each - lost).sum() - torch.distributions.kl_divergence(q, p))
    assert posterior.elbo == pytest.approx(want, abs=0.2)


@pytest.mark.slow
def test_several_draws_a_step_are_one_draw_with_less_noise() -> None:
    """The objective at a fixed q: it differs by chance only, and less with more draws."""
    x, y = line()
    net = nn.Linear(2, 1).double()
    spread = []
    for samples in (1, 64):
        gaps = []
        for seed in range(6):
            posterior = doxa.fit(
                net, (x, y), doxa.LowRankVI(rank=1, samples=samples, average=0.0),
                steps=1, lr=1e-9, batch_size=30, likelihood=doxa.Gaussian(noise=NOISE), seed=seed,
                init="given",
            )  # fmt: skip
            gaps.append(posterior.history["loss"][0][1][0])
        spread.append(torch.tensor(gaps).std())
    assert spread[1] < 0.5 * spread[0]


def images() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(60, 4, generator=g, dtype=torch.float64)
    return x, (x[:, :3] + 0.5 * torch.randn(60, 3, generator=g, dtype=torch.float64)).argmax(1)


def test_what_the_softmax_bound_takes_is_an_expectation() -> None:
    """log E Σ exp f by 10⁶ draws, to 5 standard errors (0.2 %)."""
    mean = torch.tensor([[[0.3, -1.0, 0.5]]], dtype=torch.float64)
    variance = torch.tensor([[[0.5, 1.0, 0.2]]], dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    f = mean + variance.sqrt() * torch.randn(1_000_000, 1, 3, generator=g, dtype=torch.float64)
    want = f.exp().sum(2).mean().log() - mean.exp().sum().log()
    assert float(lost_to_softmax(mean, variance)) == pytest.approx(float(want), abs=5e-3)


@pytest.mark.slow
def test_the_softmax_bound_is_below_what_sampling_finds() -> None:
    x, y = images()
    loss = {}
    for softmax in ("bound", "sampled"):
        net = doxa.nets.mlp(4, 3, (5,)).double()
        torch.manual_seed(0)
        method = LastLayerVI(softmax=softmax, samples=200, initial_std=0.5, average=0.0)
        posterior = doxa.fit(
            net, (x, y), method, steps=1, lr=1e-9, batch_size=60, validation=None, seed=3
        )
        loss[softmax] = posterior.history["loss"][0][1][0]
    assert loss["sampled"] < loss["bound"] < loss["sampled"] + 1.0


def test_frozen_features_stay_and_joint_ones_move() -> None:
    x, y = images()
    net = doxa.nets.mlp(4, 3, (5,)).double()
    first = next(net.parameters()).detach()
    for features in ("frozen", "joint"):
        posterior = doxa.fit(
            net, (x, y), LastLayerVI(features=features), steps=20, init="given", validation=None
        )
        weights = posterior.layout.unflatten(posterior.mean[0])
        assert ("0.weight" in weights) == (features == "joint")  # what is frozen is not in θ
        found = {**posterior.model.fixed, **weights}["0.weight"]
        assert torch.equal(found, first) == (features == "frozen")
        assert posterior.covariance.size == 3 * 6
        assert (posterior.predict(x).mutual_information > 0).all()


def test_last_layers_it_cannot_hold() -> None:
    x, y = images()
    with pytest.raises(MethodError, match="trained network and init='given'"):
        doxa.fit(doxa.nets.mlp(4, 3, (5,)), (x, y), LastLayerVI(features="frozen"), steps=1)
    with pytest.raises(MemoryBudgetError, match=r"6003 weights of '2'.*low-rank-vi"):
        doxa.fit(doxa.nets.mlp(4, 3, (2000,)), (x, y), "last-layer-vi", steps=1)
    conv = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 4), nn.Flatten())
    with pytest.raises(ModelError, match="is a Conv1d: last-layer VI needs a linear one"):
        doxa.fit(conv, (x, y), "last-layer-vi", steps=1)
    with pytest.raises(ModelError, match="leave subset= out"):
        doxa.fit(doxa.nets.mlp(4, 3, (5,)), (x, y), "last-layer-vi", subset=lambda n: True)
