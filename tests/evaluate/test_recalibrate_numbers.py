"""Recalibrated numbers: quantiles and variances against closed forms and numerical integrals."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from given_posterior import GivenPosterior
from scipy import integrate, stats
from torch import Tensor

from doxa.errors import DataError, Unavailable
from doxa.evaluate.recalibrate import recalibrate
from doxa.likelihoods import Gaussian
from doxa.noise import generator

NARROW = GivenPosterior(Gaussian(noise=0.5))  # of noise that has standard deviation 1


def rows(n: int, draws: int = 3, outputs: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    f = torch.randn(n, 1, outputs, generator=g, dtype=torch.float64)
    f = f + 0.1 * torch.randn(n, draws, outputs, generator=g, dtype=torch.float64)
    return f, f[:, 0] + torch.randn(n, outputs, generator=g, dtype=torch.float64)


def mixture_cdf(f: Tensor, y: float) -> float:
    return float(stats.norm.cdf(y, f.numpy().ravel(), 0.5).mean())


def test_variance_is_the_closed_form_of_maximum_likelihood() -> None:
    x, y = rows(200)
    base = NARROW.predict(x)
    want = (((y - base.mean) / base.std) ** 2).mean().sqrt()
    posterior = recalibrate(NARROW, (x, y), "variance")
    p = posterior.predict(x)
    torch.testing.assert_close(p.mean, base.mean)
    torch.testing.assert_close(p.std, want * base.std)
    torch.testing.assert_close(p.aleatoric + p.epistemic, p.variance)
    scores = [
        float(stats.norm.logpdf(y, base.mean, s * base.std).sum())
        for s in (0.99 * want, want, 1.01 * want)
    ]
    assert scores[1] == max(scores)
    assert p.log_prob(y).mean() > base.log_prob(y).mean()


def test_a_rescaled_predictive_is_one_distribution() -> None:
    """Density, distribution function, quantiles, components and draws tell the same."""
    x, y = rows(100)
    p = recalibrate(NARROW, (x, y), "variance").predict(x[:1])

    def density(t: float) -> float:
        return float(p.log_prob(torch.tensor([[t]], dtype=torch.float64)).exp())

    total, _ = integrate.quad(density, -15, 15, epsabs=1e-10)
    mean, _ = integrate.quad(lambda t: t * density(t), -15, 15, epsabs=1e-10)
    assert total == pytest.approx(1.0, abs=1e-8)
    assert mean == pytest.approx(float(p.mean), abs=1e-8)
    below, _ = integrate.quad(density, -15, 0.3, epsabs=1e-10)
    assert float(p.cdf(torch.tensor([[0.3]], dtype=torch.float64))) == pytest.approx(
        below, abs=1e-8
    )
    assert float(p.cdf(p.quantile(0.3))) == pytest.approx(0.3, abs=1e-12)
    weights, means, stds = p.normals()
    assert (weights * (stds**2 + means**2).flatten()).sum() - p.mean**2 == pytest.approx(
        float(p.variance)
    )
    drawn = p.sample(20_000, seed=0).flatten()  # within 4.5 standard errors: one seed in 1e5
    assert abs(float(drawn.mean() - p.mean)) < 4.5 * float(p.std) / 20_000**0.5


def test_variance_has_a_factor_for_each_output_and_streams() -> None:
    x, y = rows(300, outputs=2)
    y = x[:, 0] + torch.tensor([1.0, 4.0]).double() * (y - x[:, 0])
    posterior = recalibrate(NARROW, (x, y), "variance")
    base = NARROW.predict(x)
    for keep in ("samples", "moments"):
        p = posterior.predict(x, keep=keep)
        z = ((y - p.mean) / p.std).square().mean(0)
        torch.testing.assert_close(z, torch.ones(2).double())
    p = posterior.predict(x)
    factor: Tensor = posterior.transform.factor  # type: ignore[attr-defined]
    want = base.log_prob(base.mean + (y - base.mean) / factor) - factor.log().sum()
    torch.testing.assert_close(p.log_prob(y), want)


def test_variance_needs_errors_and_spread() -> None:
    x, y = rows(20, draws=1)
    with pytest.raises(DataError, match="predicted exactly"):
        recalibrate(NARROW, (x, x[:, 0]), "variance")
    x[4] = torch.nan
    for kind in ("variance", "quantile"):
        with pytest.raises(DataError, match="row 4 is not finite"):
            recalibrate(NARROW, (x, y), kind)


def test_quantile_with_all_knots_passes_through_the_empirical_distribution() -> None:
    """With K = n + 1 the i-th of the ordered rows stands at level i / (n + 1)."""
    x, y = rows(40)
    p = recalibrate(NARROW, (x, y), "quantile", knots=41).predict(x)
    got = p.cdf(y).flatten().sort()[0]
    torch.testing.assert_close(got, torch.arange(1, 41).double() / 41, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_quantile_repairs_the_coverage_of_a_predictive_that_is_too_narrow() -> None:
    """20,000 new rows: R at a level has standard error sqrt(q (1 - q) / n) from the 2,000
    calibration rows; 4.5 of both together."""
    x, y = rows(2000, draws=1)
    posterior = recalibrate(NARROW, (x, y), "quantile")
    new, target = rows(20_000, draws=1, seed=1)
    p, base = posterior.predict(new), NARROW.predict(new)
    for q in (0.005, 0.05, 0.25, 0.5, 0.9, 0.99):
        tolerance = 4.5 * (q * (1 - q) * (1 / 2000 + 1 / 20_000)) ** 0.5
        assert abs(float((target <= p.quantile(q)).double().mean()) - q) < tolerance
    assert abs(float((target <= base.quantile(0.05)).double().mean()) - 0.05) > 0.1
    # The truth is N(f, 1), whose expected log density is -log sqrt(2 pi e).
    truth = -0.5 * np.log(2 * np.pi * np.e)
    assert float(base.log_prob(target).mean()) < truth - 0.5
    assert abs(float(p.log_prob(target).mean()) - truth) < 0.08
    assert float(p.std.mean()) == pytest.approx(1.0, abs=0.08)


def test_quantile_repairs_the_tails_with_few_rows() -> None:
    """At 0.95 on the 200 rows it was fitted to: 5 of them lie outside on either side, to within
    the two between neighbouring points of the curve."""
    x, y = rows(200)
    low, high = recalibrate(NARROW, (x, y), "quantile").predict(x).interval(0.95)
    assert 3 <= int((y < low).sum()) <= 7
    assert 3 <= int((y > high).sum()) <= 7


def test_quantile_of_a_true_predictive_changes_little() -> None:
    """R is within the 99.99 % band of the uniform distribution: sup |R - u| < 2.23 / sqrt(n)
    (Kolmogorov), plus 1/K of linear interpolation."""
    true = GivenPosterior(Gaussian(noise=1.0))
    x, y = rows(900, draws=1)
    transform: Any = recalibrate(true, (x, y), "quantile").transform
    middle = transform.happened[0]
    for k in range(31):  # the levels k/30
        assert float((middle - k / 30).abs().min()) < 1e-12
    gap = float((transform.said - transform.happened).abs().max())
    assert gap < 2.23 / 30 + 1 / 900


@pytest.mark.slow
def test_a_warped_predictive_is_one_distribution() -> None:
    x, y = rows(60)
    posterior = recalibrate(NARROW, (x, y), "quantile")
    p = posterior.predict(x[:1])
    curve: Any = posterior.transform

    def cdf(t: float) -> float:
        return float(p.cdf(torch.tensor([[t]], dtype=torch.float64)))

    def density(t: float) -> float:
        return float(p.log_prob(torch.tensor([[t]], dtype=torch.float64)).exp())

    corners = [
        float(NARROW.predict(x[:1]).quantile(float(u))) for u in curve.said[0, 1:-1].unique()
    ]
    ends = [-12.0, *corners, 12.0]
    pieces = [integrate.quad(density, a, b)[0] for a, b in itertools.pairwise(ends)]
    assert sum(pieces) == pytest.approx(1.0, abs=1e-6)
    for t in (-1.0, 0.2, 1.7):
        u = mixture_cdf(x[0], t)
        want = np.interp(u, curve.said[0].numpy(), curve.happened[0].numpy())
        assert cdf(t) == pytest.approx(want, abs=1e-9)
    for q in (0.01, 0.4, 0.99):
        assert cdf(float(p.quantile(q))) == pytest.approx(q, abs=1e-9)
    low, high = p.interval(0.8)
    assert cdf(float(high)) - cdf(float(low)) == pytest.approx(0.8, abs=1e-9)

    def moment(power: int, about: float) -> float:
        parts = [
            integrate.quad(lambda t: (t - about) ** power * density(t), a, b)[0]
            for a, b in itertools.pairwise(ends)
        ]
        return float(sum(parts))

    mean = moment(1, 0.0)
    assert float(p.mean) == pytest.approx(mean, abs=1e-4)
    assert float(p.variance) == pytest.approx(moment(2, mean), rel=1e-4)
    torch.testing.assert_close(p.aleatoric + p.epistemic, p.variance)
    drawn = p.sample(400, seed=0).flatten().sort()[0]  # Kolmogorov at 1e-4
    uniform = torch.tensor([cdf(float(t)) for t in drawn], dtype=torch.float64)
    assert float((uniform - (torch.arange(400).double() + 0.5) / 400).abs().max()) < 2.23 / 20


@pytest.mark.parametrize("knots", [2, 5, None, 41])
@pytest.mark.parametrize(("noise", "draws"), [(0.3, 1), (0.5, 3), (2.0, 2)])
def test_moments_are_those_of_the_density(noise: float, draws: int, knots: int | None) -> None:
    """Sums over a fine grid of y: 40,000 cells, on which R(F(y)) is known."""
    x, y = rows(40, draws)
    base = GivenPosterior(Gaussian(noise=noise))
    p = recalibrate(base, (x, y), "quantile", knots=knots).predict(x[:1])
    at = torch.linspace(-20.0, 20.0, 40_001, dtype=torch.float64)
    mass = p.form.cdf(at[:, None]).flatten().diff()
    middle = 0.5 * (at[1:] + at[:-1])
    mean = float((mass * middle).sum())
    variance = float((mass * (middle - mean).square()).sum())
    assert float(mass.sum()) == pytest.approx(1.0, abs=1e-9)
    assert float(p.mean) == pytest.approx(mean, abs=2e-4)
    assert float(p.variance) == pytest.approx(variance, rel=1e-3)


def test_each_output_has_its_own_curve() -> None:
    x, y = rows(500, draws=1, outputs=2)
    y = x[:, 0] + torch.tensor([1.0, 0.2]).double() * (y - x[:, 0])
    p = recalibrate(NARROW, (x, y), "quantile").predict(x)
    low, high = p.interval(0.8)
    inside = ((low <= y) & (y <= high)).double().mean(0)
    assert bool(((inside - 0.8).abs() < 2.0 / 23).all())  # 2 / K, on the rows it was fitted to
    alone = recalibrate(NARROW, (x[:, :, 1:], y[:, 1:]), "quantile").predict(x[:, :, 1:])
    torch.testing.assert_close(p.quantile(0.3)[:, 1:], alone.quantile(0.3))
    torch.testing.assert_close(p.variance[:, 1:], alone.variance)
    with pytest.raises(Unavailable, match="no joint density"):
        p.log_prob(y)


def test_rows_beyond_what_the_predictive_knows_give_finite_densities() -> None:
    """Every calibration row lies 50 standard deviations out: F(y) is 1 to rounding."""
    x, _ = rows(30, draws=1)
    p = recalibrate(NARROW, (x, x[:, 0] + 25.0), "quantile").predict(x)
    assert bool(torch.isfinite(p.log_prob(x[:, 0] + 1.0)).all())
    assert bool(torch.isfinite(p.quantile([0.01, 0.5, 0.99])).all())
    assert bool((p.quantile(0.5) > x[:, 0] + 2.0).all())


def test_quantiles_need_more_than_moments() -> None:
    x, y = rows(30)
    p = recalibrate(NARROW, (x, y), "quantile").predict(x, keep="moments")
    with pytest.raises(Unavailable, match="keep='samples'"):
        p.quantile(0.5)
    with pytest.raises(Unavailable, match=r"posterior\.base"):
        recalibrate(NARROW, (x, y), "quantile").predict(x).samples  # noqa: B018


def test_draws_of_a_recalibrated_predictive_are_its_quantiles() -> None:
    """The draw of a standard normal t is the quantile at Φ(t), up to the table's steps."""
    x, y = rows(400)
    p = recalibrate(NARROW, (x, y), "quantile", knots=3).predict(x[:1].double())
    t = torch.randn((200, 1, 1), generator=generator(5, "predictive", "sample"), dtype=torch.double)
    drawn = p.sample(200, seed=5).flatten()
    exact = torch.stack([p.quantile(level) for level in stats.norm.cdf(t.flatten()).tolist()])
    away = (drawn - exact.flatten()).abs() / p.std.flatten()
    assert float(away.median()) < 1e-3  # a step of the table is 0.08
    assert float(away.max()) < 0.05  # beside a knot
