"""The anchor: a linear network with Gaussian noise and prior has an exact posterior.

    Σ⁻¹ = XᵀX/σ² + I/s²,  μ = ΣXᵀy/σ²,  y* ~ N(x*ᵀμ, σ² + x*ᵀΣx*),  p(y) = N(y; 0, σ²I + s²XXᵀ)

Exact, Laplace and GP are held to it in float64, samplers and mean-field within Monte Carlo error.
A check at 3 standard errors fails by chance with probability 0.0027 (0.005 where the error is
itself estimated from 40 batches); seeds are fixed, so that what passes once passes always.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor, nn

import doxa

N, D = 40, 3
NOISE, STD = 0.5, 0.7
EXACT = 1e-10  # relative; 1e-6 is promised


class Truth(NamedTuple):
    """The closed form, from numpy and scipy."""

    x: Tensor
    y: Tensor
    x_new: Tensor
    y_new: Tensor
    mean: np.ndarray[Any, Any]
    covariance: np.ndarray[Any, Any]
    log_evidence: float


@cache
def truth() -> Truth:
    rng = np.random.default_rng(0)
    mixing = np.array([[1.0, 0.6, 0.0], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0]])  # correlated columns
    x, x_new = rng.normal(size=(N, D)) @ mixing, rng.normal(size=(7, D))
    weight = rng.normal(size=D)
    y = x @ weight + NOISE * rng.normal(size=N)
    y_new = x_new @ weight + NOISE * rng.normal(size=7)
    precision = x.T @ x / NOISE**2 + np.eye(D) / STD**2
    covariance = np.linalg.inv(precision)
    marginal = NOISE**2 * np.eye(N) + STD**2 * x @ x.T
    evidence = multivariate_normal(np.zeros(N), marginal).logpdf(y)
    tensors = [torch.from_numpy(a) for a in (x, y, x_new, y_new)]
    return Truth(*tensors, covariance @ x.T @ y / NOISE**2, covariance, float(evidence))


def network() -> doxa.Model:
    net = nn.Linear(D, 1, bias=False).double()
    return doxa.Model(net, doxa.Gaussian(noise=NOISE), doxa.Normal(STD))


@cache
def fitted(name: str) -> Any:
    data = truth().x, truth().y
    if name == "exact":
        method = doxa.BayesianLinear(intercept=False, prior_std=STD, noise=NOISE)
        return doxa.fit(None, data, method)
    if name == "gp":
        method = doxa.GP("linear", variance=STD**2, noise=NOISE, learn_kernel=False)
        return doxa.fit(None, data, method)
    return doxa.fit(network(), data, doxa.Laplace("full", newton_steps=2), steps=50)


def relative(ours: Any, theirs: Any) -> float:
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("name", ["exact", "laplace"])
def test_posterior_over_weights_is_the_closed_form(name: str) -> None:
    posterior = fitted(name)
    assert relative(posterior.mean.flatten(), truth().mean) < EXACT
    assert relative(posterior.covariance.dense()[0], truth().covariance) < EXACT


@pytest.mark.parametrize("name", ["exact", "laplace", "gp"])
def test_predictive_is_the_closed_form(name: str) -> None:
    t = truth()
    x, y = t.x_new.numpy(), t.y_new.numpy()
    mean = x @ t.mean
    epistemic = np.einsum("nd,de,ne->n", x, t.covariance, x)
    std = np.sqrt(epistemic + NOISE**2)
    p = fitted(name).predict(t.x_new)
    assert relative(p.mean, mean) < EXACT
    assert relative(p.epistemic, epistemic) < EXACT
    assert relative(p.aleatoric, np.full(7, NOISE**2)) < EXACT
    log_prob = -0.5 * ((y - mean) / std) ** 2 - np.log(std) - 0.5 * math.log(2 * math.pi)
    assert relative(p.log_prob(t.y_new), log_prob) < EXACT


@pytest.mark.parametrize("name", ["exact", "laplace", "gp"])
def test_evidence_is_the_marginal_density_of_y(name: str) -> None:
    assert relative(fitted(name).log_evidence, truth().log_evidence) < EXACT


@pytest.mark.parametrize("name", ["exact", "laplace", "gp"])
def test_function_draws_have_the_joint_covariance(name: str) -> None:
    """5,000 draws at three rows: each of 9 entries within 4 standard errors (chance 6e-4)."""
    t = truth()
    x = t.x_new[:3]
    f = fitted(name).functions(x, n=5000, seed=1)
    expected = x.numpy() @ t.covariance @ x.numpy().T
    ours = np.cov(f.numpy().T, bias=True)
    variance = np.diag(expected)
    error = np.sqrt((np.outer(variance, variance) + expected**2) / 5000)
    assert (np.abs(ours - expected) < 4 * error).all()


def test_bayesian_ridge_at_its_own_hyper_parameters() -> None:
    from sklearn.linear_model import BayesianRidge

    t = truth()
    zero = {"alpha_1": 0.0, "alpha_2": 0.0, "lambda_1": 0.0, "lambda_2": 0.0}
    ridge = BayesianRidge(fit_intercept=False, compute_score=True, tol=1e-12, max_iter=2000, **zero)
    ridge.fit(t.x.numpy(), t.y.numpy())
    noise, std = ridge.alpha_**-0.5, ridge.lambda_**-0.5
    method = doxa.BayesianLinear(intercept=False, prior_std=std, noise=noise)
    ours = doxa.fit(None, (t.x, t.y), method)
    mean, spread = ridge.predict(t.x_new.numpy(), return_std=True)
    p = ours.predict(t.x_new)
    assert relative(ours.mean[0, :, 0], ridge.coef_) < EXACT
    assert relative(ours.covariance.dense()[0], ridge.sigma_) < EXACT
    assert relative(p.mean, mean) < EXACT
    assert relative(p.std, spread) < EXACT
    assert relative(ours.log_evidence, ridge.scores_[-1]) < EXACT
    fitted_by_us = doxa.fit(None, (t.x, t.y), doxa.BayesianLinear(intercept=False))
    assert relative(fitted_by_us.noise, noise) < 1e-6
    assert relative(fitted_by_us.prior_std, std) < 1e-6
    assert fitted_by_us.log_evidence >= ours.log_evidence - 1e-9


CHAINS = {
    "hmc": doxa.HMC(draws=500, burn_in=300, leapfrog=8),
    "hmc, dense mass": doxa.HMC(draws=500, burn_in=300, leapfrog=5, mass="full"),
    "nuts": doxa.NUTS(draws=1000, burn_in=300),
    "mala": doxa.MALA(draws=500, burn_in=500, thin=5),
    "mala, dense mass": doxa.MALA(draws=500, burn_in=500, thin=5, mass="full"),
    "metropolis": doxa.Metropolis(draws=500, burn_in=500, thin=10),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "nuts" else n for n in CHAINS]
)
def test_chains_within_three_standard_errors(name: str) -> None:
    """Means and variances of 3 weights, with errors from 40 batches of 50 draws or more."""
    t = truth()
    posterior = doxa.fit(network(), (t.x, t.y), CHAINS[name], members=4, seed=0)
    assert posterior.status == "ok"
    draws = posterior.samples  # [4, T, D]
    mean, variance = torch.from_numpy(t.mean), torch.from_numpy(t.covariance).diagonal()
    for values, exact in ((draws, mean), ((draws - mean).square(), variance)):
        batches = values.reshape(40, -1, D).mean(1)
        error = batches.std(0) / math.sqrt(40)
        assert ((values.mean((0, 1)) - exact).abs() < 3 * error).all()
        assert (error < 0.2 * variance.sqrt().max()).all()  # the check has some power


@cache
def mean_field() -> Any:
    """16 members, each an independent fit: their spread is the optimiser's Monte Carlo error."""
    t = truth()
    method = doxa.MeanField(elbo_samples=64)
    return doxa.fit(network(), (t.x, t.y), method, members=16, batch_size=N, steps=4000, seed=0,
                    validation=None)  # fmt: skip


@pytest.mark.slow
def test_mean_field_at_its_fixed_point() -> None:
    """The mean is exact and the precision the diagonal of the exact precision: 6 checks of the
    mean over members at 4 standard errors (t with 15 degrees of freedom: 0.0012 each)."""
    t, q = truth(), mean_field()
    precision = torch.from_numpy(np.linalg.inv(t.covariance)).diagonal()
    log_precision = -q.covariance.diagonal().log()
    for values, exact in ((q.mean, torch.from_numpy(t.mean)), (log_precision, precision.log())):
        error = values.std(0) / 4
        assert ((values.mean(0) - exact).abs() < 4 * error).all()
    std = torch.from_numpy(t.covariance).diagonal().sqrt()
    assert (q.mean.std(0) < 0.1 * std).all()  # the error bars are small beside the posterior
    assert (log_precision.std(0) < 0.2).all()


@pytest.mark.slow
def test_elbo_is_the_evidence_minus_the_divergence() -> None:
    """At the fixed point KL(q ‖ p) = ½ (Σ log A_jj − log |A|), A the exact precision. The ELBO's
    Monte Carlo error follows from the variance of a quadratic form under q:
    with θ = μ + σε, Var[log p(y | θ)] = ‖σg‖² + ½ ‖σGσ‖²_F, over 16 × 64 draws."""
    t, q = truth(), mean_field()
    precision = np.linalg.inv(t.covariance)
    divergence = 0.5 * (np.log(np.diag(precision)).sum() - np.linalg.slogdet(precision)[1])
    std = np.diag(precision) ** -0.5
    gradient = t.mean / STD**2  # of the log-likelihood at the posterior mean: minus the prior's
    curvature = t.x.numpy().T @ t.x.numpy() / NOISE**2
    scaled = std[:, None] * curvature * std
    variance = ((std * gradient) ** 2).sum() + 0.5 * (scaled**2).sum()
    error = math.sqrt(variance / (16 * 64))
    assert q.elbo <= t.log_evidence + 3 * error
    # the fits stop a little short of the fixed point: their spread costs ½ Σ A_jj Var[μ_j]
    shortfall = 0.5 * float((torch.from_numpy(np.diag(precision).copy()) * q.mean.var(0)).sum())
    log_precision = -q.covariance.diagonal().log()
    shortfall += 0.25 * float(log_precision.var(0).sum())
    assert abs(q.elbo - (t.log_evidence - divergence - shortfall)) < 3 * error
    assert error < 0.1 * divergence + 0.05
