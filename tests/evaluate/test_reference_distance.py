"""Agreement, total variation and W2 against closed forms, scipy and plain loops."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

import doxa
from doxa.errors import DataError, ModelError, ShapeError, Unavailable
from doxa.evaluate.reference_distance import (
    agreement,
    closeness,
    sample_wasserstein2,
    total_variation,
    wasserstein2,
)

DOUBLE = torch.float64


def normal(means: list[float], noise: float, dtype: torch.dtype = DOUBLE) -> doxa.Predictive:
    """One draw at each row: y ~ N(mean_i, noise²)."""
    f = torch.tensor(means, dtype=dtype).reshape(1, -1, 1)
    return doxa.Predictive.from_samples(f, doxa.Gaussian(noise=noise))


def mixture(draws: np.ndarray, noise: float, weights: list[float] | None = None):
    f = torch.tensor(draws, dtype=DOUBLE).unsqueeze(-1)
    return doxa.Predictive.from_samples(f, doxa.Gaussian(noise=noise), weights=weights)


def random_probs(seed: int, draws: int, rows: int, classes: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.dirichlet(np.ones(classes), size=(draws, rows)))


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize(
    ("shift", "std"), [(0.01, 1.0), (1.0, 1.0), (2.0, 0.5), (0.0, 1.02), (3.0, 0.01)]
)
def test_normals_have_their_closed_forms(shift: float, std: float, dtype: torch.dtype) -> None:
    """W2² = Δμ² + Δσ²; total variation from where the two densities cross."""
    p, q = normal([0.0, 5.0], 1.0, dtype), normal([shift, 5.0 + shift], std, dtype)
    if std == 1.0:
        expected = 2 * stats.norm.cdf(shift / 2) - 1
    else:
        # (y − s)²/σ² − y² = −2 log σ: a quadratic in y
        roots = np.sort(
            np.roots([1 / std**2 - 1, -2 * shift / std**2, (shift / std) ** 2 + 2 * np.log(std)])
        )
        inside = np.diff(stats.norm.cdf(roots))[0]
        expected = abs(inside - np.diff(stats.norm.cdf(roots, shift, std))[0])
    assert total_variation(p, q) == pytest.approx(expected, rel=1e-3)
    assert total_variation(p, q) <= expected + 1e-6
    assert wasserstein2(p, q) == pytest.approx(math.hypot(shift, 1 - std), rel=1e-3)


def test_rows_are_averaged_not_pooled() -> None:
    p, q = normal([0.0, 10.0], 1.0), normal([3.0, 10.0], 1.0)
    assert wasserstein2(p, q) == pytest.approx(1.5, rel=1e-3)
    assert total_variation(p, q) == pytest.approx(stats.norm.cdf(1.5) - 0.5, rel=1e-3)


def test_mixtures_against_scipy_integration() -> None:
    """Bimodal and skewed mixtures, unequal weights, different numbers of draws."""
    one, two = np.array([-2.0, 2.0, 2.5]), np.array([-1.5, 1.8])
    w1, w2 = [0.5, 0.3, 0.2], [0.4, 0.6]
    p, q = mixture(one[:, None], 0.3, w1), mixture(two[:, None], 0.4, w2)

    def density(y: float) -> float:
        first = np.dot(w1, stats.norm.pdf(y, one, 0.3))
        return abs(first - np.dot(w2, stats.norm.pdf(y, two, 0.4)))

    grid = np.linspace(-5, 6, 400_001)
    variation = 0.5 * integrate.quad(density, -5, 6, limit=500)[0]
    cdfs = [
        (stats.norm.cdf((grid[:, None] - m) / s) * w).sum(1)
        for m, s, w in ((one, 0.3, w1), (two, 0.4, w2))
    ]
    levels = (np.arange(200_000) + 0.5) / 200_000
    quantiles = [np.interp(levels, cdf, grid) for cdf in cdfs]
    distance = np.sqrt(np.mean((quantiles[0] - quantiles[1]) ** 2))
    assert total_variation(p, q) == pytest.approx(variation, abs=2e-4)
    assert wasserstein2(p, q) == pytest.approx(distance, rel=1e-3)


@pytest.mark.slow
def test_heavy_tails_are_resolved() -> None:
    f = torch.zeros(1, 1, 1, dtype=DOUBLE)
    p = doxa.Predictive.from_samples(f, doxa.StudentT(df=3.0, scale=1.0))
    q = doxa.Predictive.from_samples(f + 1.0, doxa.StudentT(df=3.0, scale=1.0))
    assert total_variation(p, q) == pytest.approx(2 * stats.t.cdf(0.5, 3) - 1, rel=5e-3)
    assert wasserstein2(p, q) == pytest.approx(1.0, rel=0.01)  # a shift moves every quantile


@pytest.mark.slow
def test_counts() -> None:
    """Poisson: total variation from the mass function, W2 from the step quantiles."""
    rates = (2.0, 3.5)
    p, q = (
        doxa.Predictive.from_samples(torch.full((1, 2, 1), math.log(r), dtype=DOUBLE), "poisson")
        for r in rates
    )
    counts = np.arange(60)
    mass = [stats.poisson.pmf(counts, r) for r in rates]
    levels = (np.arange(400_000) + 0.5) / 400_000
    steps = [stats.poisson.ppf(levels, r) for r in rates]
    assert total_variation(p, q) == pytest.approx(0.5 * np.abs(mass[0] - mass[1]).sum(), abs=1e-5)
    expected = np.sqrt(np.mean((steps[0] - steps[1]) ** 2))
    assert wasserstein2(p, q) == pytest.approx(expected, rel=1e-3)


def test_classes_against_loops() -> None:
    """Categorical, with other numbers of draws and unequal weights."""
    a, b = random_probs(0, 4, 7, 3), random_probs(1, 6, 7, 3)
    w = np.array([1, 2, 3, 4]) / 10
    p, q = doxa.Predictive.from_probs(a, weights=w), doxa.Predictive.from_probs(b)
    same, variation, distance = 0, 0.0, 0.0
    for i in range(7):
        left, right = (w[:, None] * a[:, i].numpy()).sum(0), b[:, i].numpy().mean(0)
        same += int(left.argmax() == right.argmax())
        variation += 0.5 * np.abs(left - right).sum()
        for c in range(3):
            # 60 copies each, in proportion to the weights: equal samples pair up when sorted
            copies = np.repeat(a[:, i, c].numpy(), [6, 12, 18, 24])
            others = np.repeat(b[:, i, c].numpy(), 10)
            distance += np.sqrt(np.mean((np.sort(copies) - np.sort(others)) ** 2))
    assert agreement(p, q) == pytest.approx(same / 7)
    assert 0 < same < 7
    assert total_variation(p, q) == pytest.approx(variation / 7, abs=1e-12)
    assert wasserstein2(p, q) == pytest.approx(distance / 21, abs=1e-12)


def test_two_classes_are_a_bernoulli() -> None:
    a, b = random_probs(2, 3, 9, 2), random_probs(3, 3, 9, 2)
    categorical = [doxa.Predictive.from_probs(t) for t in (a, b)]
    bernoulli = [doxa.Predictive.from_samples(torch.logit(t[..., 1:]), "bernoulli") for t in (a, b)]
    assert closeness(*bernoulli) == pytest.approx(closeness(*categorical), abs=1e-9)
    assert 0 < agreement(*bernoulli) < 1


def test_w2_sees_what_the_mean_hides() -> None:
    """Sure of one half, or torn between zero and one: the same average."""
    sure = doxa.Predictive.from_probs(torch.full((2, 1, 2), 0.5, dtype=DOUBLE))
    torn = doxa.Predictive.from_probs(torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]], dtype=DOUBLE))
    assert total_variation(sure, torn) == pytest.approx(0.0, abs=1e-12)
    assert wasserstein2(sure, torn) == pytest.approx(0.5)


def test_sample_distance_of_a_shift_is_the_shift_and_scipy_agrees() -> None:
    """For a shift W1 = W2, which scipy computes."""
    rng = np.random.default_rng(0)
    a, w = rng.normal(size=11), rng.uniform(0.1, 1.0, 11)
    b = a + 2.5
    ours = float(sample_wasserstein2(*map(torch.tensor, (a, b, w, w))))
    assert ours == pytest.approx(2.5)
    assert ours == pytest.approx(stats.wasserstein_distance(a, b, w, w))


def test_sample_distance_is_the_best_of_all_couplings() -> None:
    """W2 is the least root mean square over all pairings."""
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=5), rng.normal(1.0, 2.0, size=5)
    best = min(np.mean((a - np.array(order)) ** 2) for order in itertools.permutations(b))
    assert float(sample_wasserstein2(torch.tensor(a), torch.tensor(b))) == pytest.approx(
        math.sqrt(best)
    )


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), draws=st.tuples(st.integers(1, 6), st.integers(1, 6)))
def test_regression_distances_are_distances(seed: int, draws: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    p, q, r = (mixture(rng.normal(size=(s, 2)), rng.uniform(0.2, 2.0)) for s in (*draws, 2))
    for distance in (total_variation, wasserstein2):
        assert distance(p, q) == pytest.approx(distance(q, p), abs=1e-12)
        assert distance(p, p) == 0.0
        assert distance(p, q) > 0.0
        assert distance(p, r) <= distance(p, q) + distance(q, r) + 1e-3
    assert total_variation(p, q) <= 1.0
    assert wasserstein2(p, q) >= float((p.mean - q.mean).abs().mean()) - 1e-3  # Jensen


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), classes=st.integers(2, 5))
def test_class_distances_are_distances(seed: int, classes: int) -> None:
    tables = [random_probs(seed + i, 3 + i, 4, classes) for i in range(3)]
    p, q, r = (doxa.Predictive.from_probs(t) for t in tables)
    shuffled = doxa.Predictive.from_probs(tables[0].flip(0))
    for distance in (total_variation, wasserstein2):
        assert 0.0 < distance(p, q) <= 1.0
        assert distance(p, q) == pytest.approx(distance(q, p), abs=1e-12)
        assert distance(p, shuffled) == pytest.approx(0.0, abs=1e-7)
        assert distance(p, r) <= distance(p, q) + distance(q, r) + 1e-9
    assert agreement(p, p) == 1.0
    assert agreement(p, q) == agreement(q, p)


def test_w2_is_in_the_units_of_y() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(4, 3)), rng.normal(size=(5, 3))
    plain = closeness(mixture(a, 0.5), mixture(b, 0.7))
    scaled = closeness(mixture(100 * a + 7, 50.0), mixture(100 * b + 7, 70.0))
    assert scaled.wasserstein2 == pytest.approx(100 * plain.wasserstein2, rel=1e-6)
    assert scaled.total_variation == pytest.approx(plain.total_variation, abs=1e-6)
    assert plain.agreement is None


def test_worst_cases() -> None:
    far = closeness(normal([0.0], 1.0), normal([1e3], 1.0))
    assert far.total_variation == pytest.approx(1.0, abs=1e-5)
    assert far.wasserstein2 == pytest.approx(1e3, rel=1e-6)
    one, other = (doxa.Predictive.from_probs(torch.eye(2, dtype=DOUBLE)[[k]]) for k in (0, 1))
    assert closeness(one, other) == (0.0, 1.0, 1.0)


def test_what_cannot_be_compared_is_said() -> None:
    p = normal([0.0, 1.0], 1.0)
    classes = doxa.Predictive.from_probs(torch.full((2, 3), 1 / 3))
    with pytest.raises(ModelError, match="likeliest class"):
        agreement(p, p)
    with pytest.raises(ModelError, match="different kinds"):
        total_variation(p, classes)
    with pytest.raises(ShapeError, match="same rows"):
        wasserstein2(p, normal([0.0], 1.0))
    with pytest.raises(DataError, match="second predictive is not finite at row 1"):
        total_variation(p, normal([0.0, math.nan], 1.0))
    with pytest.raises(DataError, match="N = 0"):
        total_variation(normal([], 1.0), normal([], 1.0))
    with pytest.raises(ShapeError, match="at least one sample"):
        sample_wasserstein2(torch.zeros(0, 2), torch.zeros(3, 2))
    with pytest.raises(ShapeError, match="weights"):
        sample_wasserstein2(torch.zeros(3), torch.zeros(3), torch.ones(2))
    outputs = (torch.zeros(1, 2, 1), torch.zeros(1, 2, 1))
    heads = doxa.Predictive(outputs, (doxa.Gaussian(noise=1.0), "bernoulli"))
    with pytest.raises(Unavailable, match="use one of them"):
        total_variation(heads, heads)
