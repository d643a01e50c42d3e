"""PIT values, their histogram and its tests against scipy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from metric_cases import of_probs, randn
from scipy import special, stats

from doxa.errors import DataError
from doxa.evaluate.calibration import kolmogorov_smirnov, pit, pit_histogram, quantile_reliability
from doxa.likelihoods import Gaussian, Poisson
from doxa.predictive import Predictive


def normal(rows: int = 200, noise: float = 1.0) -> tuple[Predictive, torch.Tensor]:
    """N(m, noise) predicted, N(m, 1) true."""
    m = randn(1, rows, 1)
    return Predictive(m, Gaussian(noise=noise)), m[0] + randn(rows, 1, seed=1)


def test_pit_is_the_distribution_function_at_y() -> None:
    f, y = randn(3, 7, 2), randn(7, 2, seed=1)
    p = Predictive(f, Gaussian(noise=0.5), weights=[0.5, 0.2, 0.3])
    cdf = stats.norm(f.numpy(), 0.5).cdf(y.numpy())
    assert np.allclose(pit(p, y), np.einsum("s,snk->nk", [0.5, 0.2, 0.3], cdf), atol=1e-12)


def test_counts_are_spread_over_their_step() -> None:
    """u lies between F(y-1) and F(y), and y = 0 starts at 0."""
    f = randn(2, 400, 1)
    p = Predictive(f, Poisson())
    y = p.sample(1, seed=2)[0]
    u = pit(p, y, seed=5).numpy()[:, 0]
    rate, count = np.exp(f.numpy()[..., 0]), y.numpy()[:, 0]
    low, high = (stats.poisson(rate).cdf(count - k).mean(0) for k in (1, 0))
    assert ((low <= u) & (u <= high)).all()
    assert (count == 0).any()
    share = (u - low) / (high - low)
    assert stats.kstest(share, "uniform").pvalue > 1e-3  # fails once in 1,000 seeds; fixed
    assert np.array_equal(u, pit(p, y, seed=5).numpy()[:, 0])
    assert not np.array_equal(u, pit(p, y, seed=6).numpy()[:, 0])
    assert stats.kstest(u, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("bins", [2, 10, 17])
def test_histogram_and_chi_squared_equal_scipy(bins: int) -> None:
    p, y = normal(noise=0.8)
    found = pit_histogram(p, y, bins)
    u = pit(p, y).flatten().numpy()
    count, edges = np.histogram(u, bins, (0, 1))
    assert found.count.tolist() == count.tolist()
    assert np.allclose(found.edges, edges)
    assert np.allclose(found.density, count / 200 * bins)
    theirs = stats.chisquare(count)
    assert found.chi2 == pytest.approx(theirs.statistic, abs=1e-9)
    assert found.chi2_pvalue == pytest.approx(theirs.pvalue, abs=1e-9)


def test_u_on_an_edge_belongs_to_the_bin_above() -> None:
    """As in numpy.histogram; 1 to the last."""
    p = Predictive(torch.zeros(1, 3, 1).double(), Gaussian(noise=1.0))
    y = torch.tensor([0.0, -1.0, 60.0])
    assert pit(p, y).flatten()[[0, 2]].tolist() == [0.5, 1.0]
    assert pit_histogram(p, y, 2).count.tolist() == [1, 2]


@pytest.mark.parametrize("size", [1, 2, 10, 50, 1000])
def test_kolmogorov_smirnov_equals_scipy(size: int) -> None:
    for seed in range(5):
        u = np.random.default_rng(seed).uniform(size=size) ** (1 + 0.2 * seed)
        u[: size // 3] = u[0]  # ties
        distance, pvalue = kolmogorov_smirnov(torch.as_tensor(u))
        exact = stats.kstest(u, "uniform")
        assert distance == pytest.approx(exact.statistic, abs=1e-12)
        corrected = (np.sqrt(size) + 0.12 + 0.11 / np.sqrt(size)) * distance
        assert pvalue == pytest.approx(special.kolmogorov(corrected), abs=1e-9)
        if size >= 10:
            assert pvalue == pytest.approx(exact.pvalue, abs=0.03 if size == 10 else 0.01)


def test_a_perfect_grid_and_a_point() -> None:
    grid = (torch.arange(1000).double() + 0.5) / 1000
    distance, pvalue = kolmogorov_smirnov(grid)
    assert distance == pytest.approx(0.0005)
    assert pvalue == 1.0
    assert kolmogorov_smirnov(torch.zeros(20).double())[1] < 1e-9
    assert kolmogorov_smirnov(torch.ones(20).double())[0] == 1.0


def test_shapes_that_people_look_for() -> None:
    """Too narrow: a U. Too wide: a hump. Right: neither test objects (p > 0.001; fixed seed)."""
    narrow, wide, right = (pit_histogram(*normal(2000, s), 10) for s in (0.5, 2.0, 1.0))
    assert narrow.density[0] > 1.5 < narrow.density[-1]
    assert wide.density[0] < 0.5 > wide.density[-1]
    for wrong in (narrow, wide):
        assert wrong.ks_pvalue < 1e-6
        assert wrong.chi2_pvalue < 1e-6
    assert right.ks_pvalue > 1e-3
    assert right.chi2_pvalue > 1e-3


def test_quantile_reliability_counts_y_below_each_quantile() -> None:
    p, y = normal(noise=1.5)
    found = quantile_reliability(p, y, [0.1, 0.5, 0.9])
    expected = [float((y <= p.quantile(q)).double().mean()) for q in (0.1, 0.5, 0.9)]
    assert found.observed.tolist() == expected
    assert found.error == pytest.approx(np.mean(np.abs(np.array(expected) - [0.1, 0.5, 0.9])))
    tie = quantile_reliability(Predictive(torch.zeros(1, 4, 1), Gaussian(noise=1.0)),
                               torch.zeros(4), [0.4, 0.5])  # fmt: skip
    assert tie.observed.tolist() == [0.0, 1.0]


def test_what_cannot_be_asked() -> None:
    with pytest.raises(DataError, match="about classes"):
        pit(of_probs(np.array([[0.5, 0.5]])), [0])
    with pytest.raises(DataError, match="bins must be at least 2"):
        pit_histogram(*normal(), 1)
    with pytest.raises(DataError, match="nothing to score"):
        pit(Predictive(torch.zeros(1, 0, 1), Gaussian(noise=1.0)), torch.zeros(0))
