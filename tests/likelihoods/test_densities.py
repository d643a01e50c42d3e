"""Densities, cumulative distributions and entropies against scipy and quadrature."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, special, stats
from torch import Tensor

import doxa
from doxa.likelihoods import (
    Affine,
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    LaplaceNoise,
    Likelihood,
    NegativeBinomial,
    Poisson,
    StudentT,
)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


ONE = torch.tensor([[1.3]], dtype=torch.float64)
AFFINE = (number(2.0), number(3.0))
SCIPY: dict[str, tuple[Likelihood, Tensor, Any]] = {
    "gaussian": (Gaussian(noise=0.7), ONE, stats.norm(1.3, 0.7)),
    "heteroscedastic": (
        HeteroscedasticGaussian(),
        torch.tensor([[1.3, -0.4]], dtype=torch.float64),
        stats.norm(1.3, np.log1p(np.exp(-0.4)) + 1e-3),
    ),
    "student-t": (StudentT(df=3.5, scale=0.7), ONE, stats.t(3.5, 1.3, 0.7)),
    "cauchy": (StudentT(df=1.0, scale=0.7), ONE, stats.cauchy(1.3, 0.7)),
    "laplace": (LaplaceNoise(scale=0.7), ONE, stats.laplace(1.3, 0.7)),
    "affine": (Affine(Gaussian(noise=0.7), *AFFINE), ONE, stats.norm(5.9, 0.7)),
    "affine student-t": (
        Affine(StudentT(df=3.5, scale=0.7), *AFFINE),
        ONE,
        stats.t(3.5, 5.9, 0.7),
    ),
}


@pytest.mark.parametrize("name", SCIPY)
def test_continuous_against_scipy(name: str) -> None:
    lik, f, scipy = SCIPY[name]
    theta = lik.constants((1,))
    y = np.linspace(-30, 40, 301)
    columns, rows = torch.tensor(y)[:, None], f.expand(len(y), -1)
    log_p = lik.log_prob(rows, columns, theta)
    np.testing.assert_allclose(log_p, scipy.logpdf(y), rtol=1e-10, atol=1e-12)
    below = lik.cdf(columns, rows, theta).squeeze(1)
    np.testing.assert_allclose(below, scipy.cdf(y), rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(lik.entropy(f, theta)[0, 0], scipy.entropy(), rtol=1e-9)
    if name == "cauchy":
        assert torch.isinf(lik.variance(f, theta)).all()
    else:
        np.testing.assert_allclose(lik.mean(f, theta)[0, 0], scipy.mean(), rtol=1e-12)
        np.testing.assert_allclose(lik.variance(f, theta)[0, 0], scipy.var(), rtol=1e-12)

    def density(v: float) -> float:
        return float(lik.log_prob(f, torch.tensor([[v]], dtype=torch.float64), theta).exp())

    centre = float(scipy.median())
    mass = integrate.quad(density, -np.inf, centre)[0] + integrate.quad(density, centre, np.inf)[0]
    assert mass == pytest.approx(1.0, abs=1e-7)


@settings(max_examples=40, deadline=None)
@given(df=st.floats(1.0, 1e6), z=st.floats(-60.0, 60.0))
def test_student_t_cdf_anywhere(df: float, z: float) -> None:
    """By the incomplete beta function; scipy's t.cdf is off by 2e-9 next to zero."""
    lik = StudentT(df=df, scale=1.0)
    f = torch.zeros(1, 1, dtype=torch.float64)
    below = float(lik.cdf(f + z, f, lik.constants((1,))))
    away = 0.5 * special.betainc(0.5, df / 2, z * z / (df + z * z))
    assert below == pytest.approx(0.5 + np.sign(z) * away, abs=1e-9)


def test_discrete_against_scipy() -> None:
    rates = np.array([1e-3, 0.5, 3.0, 40.0, 63.9, 64.1, 500.0])
    f, counts = torch.tensor(rates).log(), np.arange(0, 900)
    lik = Poisson()
    table = lik.log_prob(
        f[:, None].expand(-1, 900), torch.tensor(counts).double().expand(7, -1), {}, lead=1
    )
    np.testing.assert_allclose(table, stats.poisson.logpmf(counts, rates[:, None]), rtol=1e-9)
    np.testing.assert_allclose(table.exp().sum(1), 1.0, rtol=1e-9)
    np.testing.assert_allclose(lik.entropy(f, {}), stats.poisson(rates).entropy(), rtol=2e-8)
    where = np.array([-1.0, 0.0, 2.0, 2.7, 60.0])
    np.testing.assert_allclose(
        lik.cdf(torch.tensor(where)[:, None].expand(-1, 7), f.expand(5, -1), {}, lead=0),
        stats.poisson.cdf(where[:, None], rates),
        rtol=1e-9,
    )
    logits = randn(6)
    p = torch.sigmoid(logits).numpy()
    np.testing.assert_allclose(Bernoulli().entropy(logits, {}), stats.bernoulli(p).entropy())
    ones = Bernoulli().log_prob(logits, torch.ones(6), {})
    np.testing.assert_allclose(ones, stats.bernoulli.logpmf(1, p))
    table = randn(6, 4)
    soft = torch.softmax(table, 1).numpy()
    np.testing.assert_allclose(Categorical().entropy(table, {}), stats.entropy(soft, axis=1))
    for c in range(4):
        log_p = Categorical().log_prob(table, torch.full((6,), c), {})
        np.testing.assert_allclose(log_p, np.log(soft[:, c]))


@pytest.mark.parametrize("r", [0.02, 0.7, 1.0, 15.9, 16.1, 300.0])
def test_negative_binomial_against_scipy(r: float) -> None:
    means = np.array([1e-3, 0.4, 3.0, 50.0, 2e3])
    lik, f, counts = NegativeBinomial(concentration=r), torch.tensor(means).log(), np.arange(3000)
    theta, law = lik.constants(()), stats.nbinom(r, r / (r + means))
    rows = torch.tensor(counts).double()[:, None].expand(-1, 5)
    table = lik.log_prob(f.expand(3000, -1), rows, theta, lead=1)
    np.testing.assert_allclose(table, law.logpmf(counts[:, None]), rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(lik.mean(f, theta), law.mean(), rtol=1e-9)
    np.testing.assert_allclose(lik.variance(f, theta), law.var(), rtol=1e-9)
    where = np.array([-1.0, 0.0, 2.0, 2.7, 60.0, 2900.0])
    below = lik.cdf(torch.tensor(where)[:, None].expand(-1, 5), f.expand(6, -1), theta, lead=0)
    np.testing.assert_allclose(below, law.cdf(where[:, None]), rtol=1e-9, atol=1e-9)
    for k, mean in enumerate(means):
        log_p = stats.nbinom(r, r / (r + mean)).logpmf(np.arange(int(500 + 40 * (mean + mean / r))))
        log_p = log_p[np.isfinite(log_p)]
        assert float(lik.entropy(f, theta)[k]) == pytest.approx(
            -(np.exp(log_p) * log_p).sum(), abs=1e-8
        )


def test_a_large_concentration_is_poisson_noise() -> None:
    """In single precision, where lgamma(y + r) − lgamma(r) has no digits left."""
    f, y = torch.tensor([[1.2], [-3.0]]), torch.tensor([[4.0], [0.0]])
    theta = {"log_concentration": torch.tensor(18.0)}
    found = NegativeBinomial().log_prob(f, y, theta)
    torch.testing.assert_close(found, Poisson().log_prob(f, y, {}), rtol=1e-5, atol=1e-6)
    wide = {"log_concentration": torch.tensor(30.0).double()}
    entropy = NegativeBinomial().entropy(f.double(), wide)
    torch.testing.assert_close(entropy, Poisson().entropy(f.double(), {}), rtol=0, atol=1e-7)


def test_the_entropy_of_many_counts_is_that_of_a_normal() -> None:
    mean, r = 2e6, 3e6
    f = torch.tensor([[math.log(mean)]]).double()
    theta = {"log_concentration": number(math.log(r))}
    found = float(NegativeBinomial().entropy(f, theta))
    log_p = stats.nbinom(r, r / (r + mean)).logpmf(np.arange(1_980_000, 2_020_000))
    assert found == pytest.approx(-(np.exp(log_p) * log_p).sum(), abs=1e-6)


def test_negative_binomial_parameters_and_constant() -> None:
    """The constant is the maximum-likelihood fit, by scipy; a network that learns it gets there."""
    assert list(NegativeBinomial().parameters((1,))) == ["log_concentration"]
    assert NegativeBinomial(concentration=2.0).parameters((1,)) == {}
    counts = np.random.default_rng(0).negative_binomial(1.5, 0.2, 500).astype(float)

    def loss(log_r: float) -> float:
        r, mean = np.exp(log_r), counts.mean()
        return -float(stats.nbinom(r, r / (r + mean)).logpmf(counts).sum())

    best = optimize.minimize_scalar(loss, bounds=(-5, 5), method="bounded").x
    likelihood, f = NegativeBinomial().constant_prediction(counts, (1,))
    assert isinstance(likelihood, NegativeBinomial)
    assert likelihood.concentration == pytest.approx(np.exp(best), rel=2e-2)
    assert float(f) == pytest.approx(np.log(counts.mean()))
    y = torch.tensor(counts)[:, None]
    found = NegativeBinomial().constant(y, y)
    assert float(found.sum()) == pytest.approx(-loss(best), rel=1e-6)
    twice = NegativeBinomial().constant(y[::2], y[:9], torch.full((250,), 2.0))
    again = NegativeBinomial().constant(torch.cat([y[::2], y[::2]]), y[:9])
    torch.testing.assert_close(twice, again)
    given = NegativeBinomial(concentration=2.0).constant(y, y[:9])
    law = stats.nbinom(2.0, 2.0 / (2.0 + counts.mean()))
    np.testing.assert_allclose(given, law.logpmf(counts[:9]))


def test_laplace_parameters_and_constant() -> None:
    """The constant is scipy's maximum-likelihood fit: the median and the mean distance from it."""
    assert list(LaplaceNoise().parameters((2,))) == ["log_scale"]
    assert LaplaceNoise(scale=2.0).parameters((2,)) == {}
    seen = np.random.default_rng(0).laplace(3.0, 0.7, 401)
    law = stats.laplace(*stats.laplace.fit(seen))
    likelihood, f = LaplaceNoise().constant_prediction(seen, (1,))
    assert isinstance(likelihood, LaplaceNoise)
    assert float(f) == pytest.approx(law.median())
    assert likelihood.scale == pytest.approx(law.kwds.get("scale", law.args[-1]))
    y = torch.tensor(seen)[:, None]
    np.testing.assert_allclose(LaplaceNoise().constant(y, y), law.logpdf(seen), rtol=1e-12)
    counted = torch.tensor([1.0, 2.0, 3.0] * 100)
    twice = LaplaceNoise().constant(y[:300], y[:9], counted)
    again = LaplaceNoise().constant(y[:300].repeat_interleave(counted.long(), 0), y[:9])
    torch.testing.assert_close(twice, again)


def test_draws_of_laplace_noise_are_finite_and_right() -> None:
    """100,000 float32 draws; Kolmogorov and Smirnov's test fails by chance once in 10,000 seeds."""
    f = torch.full((100_000, 1), 1.3)
    draws = LaplaceNoise().sample(f, {"log_scale": number(math.log(0.7))}, torch.Generator())
    assert torch.isfinite(draws).all()
    assert stats.kstest(draws[:, 0].numpy(), stats.laplace(1.3, 0.7).cdf).pvalue > 1e-4


@pytest.mark.parametrize("scale", [None, 0.4])
def test_a_line_by_least_absolute_deviations(scale: float | None) -> None:
    """A wide prior: the maximum is scipy's least absolute deviations, and the learned scale near
    their mean; two rows far out do not move it, in units of y with standardised targets, too."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(60, 1))
    y = 40.0 + 20.0 * x + 0.4 * rng.laplace(size=(60, 1))
    y[:2] += 300.0

    def loss(w: Any) -> float:
        return float(np.abs(y[:, 0] - w[0] - w[1] * x[:, 0]).sum())

    best = optimize.minimize(loss, [40.0, 20.0], method="Nelder-Mead", tol=1e-10)
    posterior = doxa.fit(
        torch.nn.Linear(1, 1).double(), (x, y), "map", likelihood=LaplaceNoise(scale),
        prior=doxa.Normal(1e3), steps=2000, lr=0.02, standardize=True, validation=None,
        batch_size=60, progress=False,
    )  # fmt: skip
    p = posterior.predict(torch.tensor([[0.0], [1.0]]).double())
    np.testing.assert_allclose(p.mean[:, 0], [best.x[0], best.x.sum()], atol=0.05)
    wanted = 0.4 if scale else best.fun / 60
    width = p.quantile(0.975) - p.quantile(0.025)  # 2 b log 20
    np.testing.assert_allclose(width / (2 * math.log(20)), wanted, rtol=1e-6 if scale else 0.1)


def test_the_scale_of_a_few_held_out_rows_is_a_little_wider() -> None:
    """A network that stays at zero, m = 12 rows held out, and N(0, 1) for log b: the derivative of
    −(m − 1) log b − Σ|y|/b − (log b)²/2 is zero, Σ|y|/b = m − 1 + log b."""
    y = 0.5 * randn(72).reshape(72, 1)
    x = torch.zeros_like(y)
    posterior = doxa.fit(
        torch.nn.Linear(1, 1, bias=False).double(), (x[:60], y[:60]), "map", init="given",
        likelihood="laplace-noise", lr=1e-12, steps=5, validation=(x[60:], y[60:]), progress=False,
    )  # fmt: skip
    scale = (0.5 * float(posterior.predict(x[:1]).variance)) ** 0.5
    found = float(y[60:].abs().sum()) / scale
    assert found == pytest.approx(11 + math.log(scale), rel=0.02)


def test_learned_student_t_has_a_variance() -> None:
    lik, f = StudentT(), torch.zeros(1, 1).double()
    theta = {"log_scale": number(0.0), "log_df": number(-3.0)}
    df = 2 + 4 * np.exp(-3.0)
    assert float(lik.variance(f, theta)) == pytest.approx(stats.t(df).var())
