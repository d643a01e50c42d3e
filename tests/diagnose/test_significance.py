"""The tests of the diagnostics against scipy, and their level under the hypothesis."""

from __future__ import annotations

import pytest
import torch

from doxa.diagnose import data

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("n", [1, 20, 137, 500])
@pytest.mark.parametrize("p", [0.03, 0.5, 0.9])
def test_binomial_tests_are_exact(n: int, p: float) -> None:
    for k in {0, 1, n // 3, n // 2, round(0.9 * n), n}:
        want = stats.binomtest(k, n, p).pvalue
        assert data.binomial(k, n, p) == pytest.approx(want, rel=1e-9, abs=1e-300)
        upper = stats.binom.sf(k - 1, n, p)
        assert data.binomial_upper(k, n, p) == pytest.approx(upper, rel=1e-9, abs=1e-300)


def test_kolmogorov_distance() -> None:
    g = torch.Generator().manual_seed(0)
    u = torch.rand(3, 40, generator=g, dtype=torch.float64)
    for row, got in zip(u, data.kolmogorov(u), strict=True):
        assert float(got) == pytest.approx(stats.kstest(row.numpy(), "uniform").statistic, 1e-12)


def test_a_mean_above_zero() -> None:
    x = torch.tensor([0.2, -0.1, 0.4, 0.3, 0.0, 0.5], dtype=torch.float64)
    z = float(x.mean() / (x.std() / 6**0.5))
    assert data.mean_above_zero(x) == pytest.approx(stats.norm.sf(z), rel=1e-12)
    assert data.normal_quantile(0.999) == pytest.approx(stats.norm.ppf(0.999), rel=1e-12)
    assert data.mean_above_zero(torch.ones(5)) == 0.0
    assert data.mean_above_zero(torch.zeros(5)) == 1.0


def test_monte_carlo_tests_hold_their_level() -> None:
    """Exact: of 40 ranks each is equally likely, so that P(p ≤ 2/40) = 2/40. Over 4,000 trials the
    share lies within 4.5 standard errors (1 in 10⁵)."""
    g = torch.Generator().manual_seed(1)
    values = torch.randn(4000, 40, generator=g)
    one = sum(data.monte_carlo(row[0], row[1:]) <= 0.05 for row in values) / 4000
    two = sum(data.two_sided(row[0], row[1:]) <= 0.1 for row in values) / 4000
    assert abs(one - 0.05) < 4.5 * (0.05 * 0.95 / 4000) ** 0.5
    assert abs(two - 0.1) < 4.5 * (0.1 * 0.9 / 4000) ** 0.5
