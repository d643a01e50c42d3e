"""Densities, cumulative distributions and entropies against scipy and quadrature."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats
from torch import Tensor

from doxa.likelihoods import (
    Affine,
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
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


def test_learned_student_t_has_a_variance() -> None:
    lik, f = StudentT(), torch.zeros(1, 1).double()
    theta = {"log_scale": number(0.0), "log_df": number(-3.0)}
    df = 2 + 4 * np.exp(-3.0)
    assert float(lik.variance(f, theta)) == pytest.approx(stats.t(df).var())
