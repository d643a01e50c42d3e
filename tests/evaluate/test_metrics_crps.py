"""CRPS against numerical integration, naive sums and what must hold of any CRPS."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from metric_cases import randn
from scipy import integrate, stats

from doxa.errors import DataError, ShapeError, Unavailable
from doxa.evaluate import scores
from doxa.evaluate.scores import crps, crps_draws, crps_each, crps_normals
from doxa.likelihoods import Gaussian, HeteroscedasticGaussian, Poisson, StudentT
from doxa.predictive import Predictive


def integral(cdf: Any, y: float, low: float, high: float) -> float:
    """The definition, integrated on each side of y."""
    below = integrate.quad(lambda x: cdf(x) ** 2, low, y, limit=500, epsabs=1e-11)[0]
    above = integrate.quad(lambda x: (1 - cdf(x)) ** 2, y, high, limit=500, epsabs=1e-11)[0]
    return float(below + above)


def naive(x: Any, y: float, w: Any, fair: bool = False) -> float:
    """Two loops over the draws."""
    near = sum(w[i] * abs(x[i] - y) for i in range(len(x)))
    spread = sum(w[i] * w[j] * abs(x[i] - x[j]) for i in range(len(x)) for j in range(len(x)))
    if fair:
        spread /= 1 - sum(v * v for v in w)
    return float(near - spread / 2)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_mixture_of_normals_equals_the_integral(count: int) -> None:
    f, y = randn(count, 4, 4, seed=1), 2 * randn(4, 2, seed=2)
    weights = np.arange(1.0, count + 1) / np.arange(1.0, count + 1).sum()
    p = Predictive(f, HeteroscedasticGaussian(), weights=weights)
    _, means, stds = (part.numpy() for part in p.normals())
    each = crps_each(p, y)
    assert each.shape == (4, 2)
    for n in range(4):
        for k in range(2):
            law = stats.norm(means[:, n, k], stds[:, n, k])
            expected = integral(lambda x, law=law: weights @ law.cdf(x), float(y[n, k]), -40, 40)
            assert float(each[n, k]) == pytest.approx(expected, abs=1e-8)


def test_one_normal_has_the_textbook_value() -> None:
    """s [z (2 Phi(z) - 1) + 2 phi(z) - 1/sqrt(pi)], Gneiting et al. (2005)."""
    p = Predictive(randn(1, 9, 1), Gaussian(noise=0.6))
    y = randn(9, 1, seed=4)
    z = ((y - p.mean) / 0.6).numpy()
    law = stats.norm()
    expected = 0.6 * (z * (2 * law.cdf(z) - 1) + 2 * law.pdf(z) - 1 / np.sqrt(np.pi))
    assert np.allclose(crps_each(p, y), expected, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("apart", [0.0, 1.0, 40.0])
def test_trapezoids_equal_pairs(apart: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ways to E|X - X'|, for normals of one and of different widths, close and far."""
    m, w = apart * randn(1500, 5), torch.rand(1500, generator=torch.Generator()).double()
    s = 0.3 + randn(1500, 5, seed=1).abs()
    s[:, 0] = 1.0
    used = []
    own = scores._spread_by_trapezoids
    monkeypatch.setattr(scores, "_spread_by_trapezoids", lambda *args: used.append(1) or own(*args))
    w = w / w.sum()
    fast = scores._half_spread(w, m, s)
    assert bool(used) == (apart < 40.0)  # far apart the grid would be the dearer one
    half = sum(
        float(w[i]) * (w @ scores._expected_distance(m - m[i], torch.hypot(s, s[i])))
        for i in range(1500)
    )
    assert torch.allclose(fast, 0.5 * torch.as_tensor(half), rtol=1e-11)


def test_moment_matched() -> None:
    p, y = Predictive(randn(5, 6, 1), Gaussian(noise=0.5)), randn(6, 1, seed=3)
    assert crps(p, y, "normal") == pytest.approx(crps(p.moment_matched(), y))
    assert abs(crps(p, y, "normal") - crps(p, y)) > 1e-4


def test_a_point_mass_has_the_absolute_error() -> None:
    m, y = randn(1, 6), randn(6, seed=1)
    zero = torch.zeros_like(m)
    assert torch.equal(crps_normals(torch.ones(1), m, zero, y), (y - m[0]).abs())
    assert torch.allclose(crps_draws(m, y), (y - m[0]).abs())
    both = crps_normals(torch.tensor([0.5, 0.5]), torch.cat([m, m]), torch.cat([zero, zero]), y)
    assert torch.allclose(both, (y - m[0]).abs())


def test_point_masses_are_draws() -> None:
    """A mixture of normals of no width, more of them than the trapezoids would need."""
    x, y = randn(9, 5), randn(5, seed=1)
    w = torch.full((9,), 1 / 9, dtype=torch.float64)
    assert torch.allclose(crps_normals(w, x, torch.zeros_like(x), y), crps_draws(x, y))
    same = torch.ones(9, 5).double()
    assert torch.allclose(crps_normals(w, same, 0 * same, y), (y - 1.0).abs())


@pytest.mark.parametrize("fair", [False, True])
def test_draws_equal_two_loops(fair: bool) -> None:
    x, y, w = randn(6, 3), randn(3, seed=1), np.array([0.3, 0.1, 0.0, 0.25, 0.15, 0.2])
    x[1] = x[0]  # a tie
    y[0] = x[3, 0]  # y on a draw
    expected = [naive(x[:, n].tolist(), float(y[n]), w, fair) for n in range(3)]
    assert np.allclose(crps_draws(x, y, w, fair=fair), expected, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(counts=st.lists(st.integers(1, 5), min_size=2, max_size=6), seed=st.integers(0, 99))
def test_weights_are_repeated_draws(counts: list[int], seed: int) -> None:
    x, y = randn(len(counts), 4, seed=seed), randn(4, seed=seed + 1)
    repeated = x.repeat_interleave(torch.tensor(counts), 0)
    assert torch.allclose(crps_draws(x, y, counts), crps_draws(repeated, y), atol=1e-12)
    p, q = (Predictive(f[..., None], Gaussian(noise=0.4), weights=w) for f, w in
            ((x, counts), (repeated, None)))  # fmt: skip
    assert crps(p, y) == pytest.approx(crps(q, y), abs=1e-12)


def test_the_fair_form_is_unbiased_and_the_plain_one_is_not() -> None:
    """Four draws of N(0, 1), 40,000 times: the mean fair CRPS lies within 4 standard errors of the
    true one (fails once in 16,000 runs; fixed seed), the plain one E|X-X'|/8 above it."""
    x, y = randn(4, 40_000), torch.full((40_000,), 0.3).double()
    true = float(crps_normals(torch.ones(1), torch.zeros(1, 1), torch.ones(1, 1), y[:1]))
    fair, plain = crps_draws(x, y, fair=True), crps_draws(x, y)
    error = float(fair.std()) / 200
    assert abs(float(fair.mean()) - true) < 4 * error
    assert float(plain.mean()) - true == pytest.approx(2 / np.sqrt(np.pi) / 8, abs=4 * error)


def test_few_draws_of_a_predictive_are_unbiased_too() -> None:
    """Three draws at each of 5,000 rows against the closed form: within 4 standard errors, where
    the plain estimate would be 15 away; fixed seed."""
    p, y = Predictive(randn(1, 5000, 1), Gaussian(noise=1.0)), randn(5000, 1, seed=1)
    off = crps_each(p, y, "draws", draws=3) - crps_each(p, y, "closed")
    assert abs(float(off.mean())) < 4 * float(off.std()) / np.sqrt(5000)


def test_components_without_weight_do_not_count() -> None:
    f, y = randn(2, 4, 1), randn(4, 1, seed=1)
    f[1] = torch.nan
    p = Predictive(f, Gaussian(noise=0.5), weights=[1.0, 0.0])
    assert crps(p, y) == pytest.approx(crps(Predictive(f[:1], Gaussian(noise=0.5)), y))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["student-t", "poisson"])
def test_draws_stand_in_where_nothing_is_closed(kind: str) -> None:
    """Within 4 standard errors over 30 rows of the exact value; fixed seed."""
    f = 0.5 * randn(3, 30, 1)
    p = Predictive(f, StudentT(df=5.0, scale=0.8) if kind == "student-t" else Poisson())
    y = p.sample(1, seed=9)[0]
    g = f.numpy()[..., 0]
    expected = []
    for n in range(30):
        if kind == "student-t":
            law: Any = stats.t(5.0, g[:, n], 0.8)
            expected.append(integral(lambda x, law=law: law.cdf(x).mean(), float(y[n]), -300, 300))
        else:
            k = np.arange(200)
            cdf = stats.poisson(np.exp(g[:, n])[:, None]).cdf(k).mean(0)
            expected.append(float(((cdf - (k >= float(y[n]))) ** 2).sum()))
    found = crps_each(p, y, draws=1000)[:, 0].numpy()
    off = found - np.array(expected)
    assert abs(off.mean()) < 4 * off.std() / np.sqrt(30)
    assert np.abs(off).max() < 0.2
    assert crps(p, y, seed=1) != crps(p, y, seed=2)
    assert crps(p, y, seed=1) == crps(p, y, seed=1)
    with pytest.raises(Unavailable, match="normal"):
        crps(p, y, "closed")


def test_never_negative_and_least_for_the_truth() -> None:
    """Proper: averaged over y from N(0, 1), no other normal scores better (by quadrature)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    y = torch.as_tensor(nodes)
    own = torch.as_tensor(weights / weights.sum())

    def expected(mean: float, std: float) -> float:
        one = torch.ones(1, len(y)).double()
        each = crps_normals(torch.ones(1), mean * one, std * one, y)
        assert (each >= 0).all()
        return float(own @ each)

    best = expected(0.0, 1.0)
    assert best == pytest.approx(1 / np.sqrt(np.pi), abs=1e-4)
    for mean, std in [(0.1, 1.0), (-0.1, 1.0), (0.0, 1.1), (0.0, 0.9), (0.5, 3.0)]:
        assert expected(mean, std) > best


def test_what_cannot_be_scored() -> None:
    x, y = randn(4, 3), randn(3)
    with pytest.raises(ShapeError, match="one more axis"):
        crps_draws(x, y[:2])
    with pytest.raises(DataError, match="finite"):
        crps_draws(x, y * torch.nan)
    with pytest.raises(DataError, match="as many weights"):
        crps_draws(x, y, [1.0, 2.0])
    with pytest.raises(DataError, match="as many weights"):
        crps_draws(x, y, [1.0, 2.0, -1.0, 1.0])
    with pytest.raises(DataError, match="two draws"):
        crps_draws(x[:1], y, fair=True)
    with pytest.raises(DataError, match="two draws"):
        crps_draws(x, y, [1.0, 0.0, 0.0, 0.0], fair=True)
    p = Predictive(x[..., None], Gaussian(noise=1.0))
    with pytest.raises(DataError, match="kind must be"):
        crps(p, y, "exact")  # type: ignore[arg-type]
