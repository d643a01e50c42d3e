"""Predictives against hand calculation, scipy and brute force."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import likelihood_rows
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats
from torch import Tensor

from doxa.errors import Unavailable
from doxa.likelihoods import (
    Affine,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    NegativeBinomial,
    StudentT,
)
from doxa.predictive import Predictive, mixture

S, N = 7, 4
LOC, SCALE = torch.tensor([3.0, -1.0]).double(), torch.tensor([2.0, 0.5]).double()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CASES: dict[str, tuple[Likelihood, tuple[int, ...]]] = likelihood_rows.cases() | {
    "gaussian, given": (Gaussian(noise=[0.4, 0.9]), (2,)),
    "gaussian, no output axis": (Gaussian(), ()),
    "affine": (Affine(Gaussian(per_output=True), LOC, SCALE), (2,)),
    "heteroscedastic": (Affine(HeteroscedasticGaussian(), LOC, SCALE), (4,)),
    "student-t": (Affine(StudentT(), LOC, SCALE), (2,)),
    "categorical": (Categorical(), (3,)),
    "segmentation": (Categorical(ignore_index=-1), (3, 2, 2)),
}
REGRESSION = [n for n, (lik, _) in CASES.items() if not lik.discrete]
ORDERED = [n for n, (lik, _) in CASES.items() if not lik.classifies]
CLASSES = [n for n in CASES if n not in ORDERED]
every = pytest.mark.parametrize("name", CASES)


def components(name: str) -> tuple[Tensor, Likelihood, dict[str, Tensor], Tensor]:
    lik, output = CASES[name]
    theta = {k: 0.3 * randn(S, *v.shape, seed=3) for k, v in lik.parameters(output).items()}
    theta |= {k: v.expand(S, *v.shape) for k, v in lik.constants(output).items()}
    return (
        randn(S, N, *output),
        lik,
        theta,
        torch.rand(S, generator=torch.Generator(), dtype=torch.float64),
    )


def build(name: str, weighted: bool = True) -> Predictive:
    f, lik, theta, weights = components(name)
    return Predictive(f, lik, theta, weights=weights if weighted else None)


def targets(name: str) -> Tensor:
    f, lik, theta, _ = components(name)
    return lik.sample(f, theta, torch.Generator().manual_seed(1), 1)[0]


@every
def test_decompositions_hold_exactly(name: str) -> None:
    f, lik, theta, weights = components(name)
    p = build(name)
    w = (weights / weights.sum()).numpy()
    means, noise = lik.mean(f, theta, 1).numpy(), lik.variance(f, theta, 1).numpy()
    mean = np.average(means, axis=0, weights=w)
    np.testing.assert_allclose(p.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(p.aleatoric, np.average(noise, axis=0, weights=w), rtol=1e-12)
    spread = np.average((means - mean) ** 2, axis=0, weights=w)
    np.testing.assert_allclose(p.epistemic, spread, rtol=1e-10)
    assert torch.equal(p.variance, p.aleatoric + p.epistemic)
    assert torch.equal(p.std, p.variance.sqrt())
    if name in CLASSES:
        assert torch.equal(p.entropy, p.expected_entropy + p.mutual_information)
        torch.testing.assert_close(p.variance, p.probs * (1 - p.probs))
        assert (p.mutual_information >= 0).all()


def test_entropy_by_hand() -> None:
    """Two certain models that disagree, two unsure ones that agree, and one in between."""
    probs = torch.tensor(
        [
            [[1.0, 0.0], [0.5, 0.5], [0.9, 0.1], [1.0, 0.0]],
            [[0.0, 1.0], [0.5, 0.5], [0.5, 0.5], [1.0, 0.0]],
        ],
        dtype=torch.float64,
    )
    p = Predictive.from_probs(probs)
    h = stats.entropy([0.9, 0.1])
    np.testing.assert_allclose(p.expected_entropy, [0, np.log(2), (h + np.log(2)) / 2, 0])
    between = stats.entropy([0.7, 0.3])
    np.testing.assert_allclose(p.entropy, [np.log(2), np.log(2), between, 0], atol=1e-15)
    information = [np.log(2), 0, between - (h + np.log(2)) / 2, 0]
    np.testing.assert_allclose(p.mutual_information, information, atol=1e-15)
    np.testing.assert_allclose(p.variation_ratio, [0.5, 0.5, 0.3, 0.0], atol=1e-15)
    np.testing.assert_allclose(p.votes()[0], [0.5, 0.5])
    np.testing.assert_allclose(p.votes()[3], [1.0, 0.0])
    np.testing.assert_allclose(p.log_prob([0, 1, 1, 0]), np.log([0.5, 0.5, 0.3, 1.0]))
    assert p.log_prob([0, 0, 0, 1])[3] == -np.inf
    single = Predictive.from_probs(probs[0])
    assert torch.equal(single.mutual_information, torch.zeros(4).double())
    # The same as Bernoulli logits, whose single probability is the second class's.
    q = Predictive((probs[:, :, 1:] / probs[:, :, :1]).log(), "bernoulli")
    for quantity in ("entropy", "mutual_information", "variation_ratio"):
        torch.testing.assert_close(getattr(q, quantity).squeeze(1), getattr(p, quantity))
    torch.testing.assert_close(q.votes()[[0, 3], 0], p.votes()[[0, 3], 1])


@every
def test_log_prob_is_the_log_of_the_mean_density(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    f, lik, theta, weights = components(name)
    y = targets(name)
    densities = lik.log_prob(f, y, theta, 1).exp()
    wanted = np.log(np.average(densities, axis=0, weights=weights))
    np.testing.assert_allclose(build(name).log_prob(y), wanted, rtol=1e-10)
    whole = build(name)
    quantities = ["mean", "aleatoric", "epistemic", "expected_entropy"]
    before = {q: getattr(whole, q) for q in quantities}
    monkeypatch.setattr(mixture, "CHUNK_ELEMENTS", 2 * f[0].numel())
    np.testing.assert_allclose(build(name).log_prob(y), wanted, rtol=1e-10)
    chunked = build(name)
    for q in quantities:
        torch.testing.assert_close(getattr(chunked, q), before[q], rtol=1e-10, atol=1e-12)
    if name in ORDERED:
        torch.testing.assert_close(chunked.quantile([0.1, 0.8]), whole.quantile([0.1, 0.8]))
        torch.testing.assert_close(chunked.cdf(y), whole.cdf(y))


@pytest.mark.parametrize("name", ORDERED)
def test_quantiles_against_brute_force(name: str) -> None:
    """scipy's root finder on the mixture's cdf, one element at a time."""
    f, lik, theta, weights = components(name)
    w = (weights / weights.sum()).numpy()
    p = build(name)
    levels = [0.025, 0.5, 0.9]
    found = p.quantile(levels)
    assert found.shape == (3, *p.mean.shape)
    parts = [_scipy(lik, f[s], {k: v[s] for k, v in theta.items()}) for s in range(S)]

    def cdf(y: float, place: tuple[int, ...]) -> float:
        return sum(w[s] * parts[s].cdf(y)[place] for s in range(S))

    for q, level in enumerate(levels):
        for place in [(0, *[0] * (p.mean.ndim - 1)), (N - 1, *[-1] * (p.mean.ndim - 1))]:
            value = float(found[(q, *place)])
            if lik.discrete:
                assert cdf(value, place) >= level - 1e-12
                assert cdf(value - 1, place) < level
            else:
                gap = lambda y, q=level, at=place: cdf(y, at) - q  # noqa: E731
                exact = optimize.brentq(gap, -500, 500, xtol=1e-13)
                assert value == pytest.approx(exact, rel=1e-8, abs=1e-8)
    low, high = p.interval(0.9)
    torch.testing.assert_close(torch.stack([low, high]), p.quantile([0.05, 0.95]))
    torch.testing.assert_close(p.quantile(0.5), found[1])
    if not lik.discrete:
        torch.testing.assert_close(p.cdf(found[2]), torch.full_like(found[2], 0.9))


def _scipy(lik: Likelihood, f: Tensor, theta: dict[str, Tensor]) -> Any:
    if isinstance(lik, Affine) and isinstance(lik.base, StudentT):
        df, scale = 2 + 4 * theta["log_df"].exp(), theta["log_scale"].exp() * lik.scale
        return stats.t(df.numpy(), lik.location(f).numpy(), scale.numpy())
    if isinstance(lik, NegativeBinomial):
        mean, r = f.exp().numpy(), theta["log_concentration"].exp().numpy()
        return stats.nbinom(r, r / (r + mean))
    if lik.discrete:
        return stats.poisson(f.exp().numpy())
    if not lik.is_normal:  # its own, which tests/likelihoods compares with scipy
        return SimpleNamespace(cdf=lambda y: lik.cdf(torch.full_like(f, y), f, theta).numpy())
    return stats.norm(lik.mean(f, theta).numpy(), lik.variance(f, theta).sqrt().numpy())


@settings(max_examples=25, deadline=None)
@given(
    means=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6),
    noise=st.floats(1e-3, 1e2),
    level=st.floats(1e-4, 1 - 1e-4),
)
def test_quantile_inverts_the_cdf(means: list[float], noise: float, level: float) -> None:
    p = Predictive(torch.tensor(means, dtype=torch.float64)[:, None], Gaussian(noise=noise))
    y = p.quantile(level)
    below, above = p.cdf(y - 1e-9 * (1 + y.abs())), p.cdf(y + 1e-9 * (1 + y.abs()))
    assert below - 1e-12 <= level <= above + 1e-12


@every
def test_draws_follow_the_mixture(name: str) -> None:
    """Means of 20,000 draws within 6 standard errors; quantile levels within 6 too."""
    p, n = build(name), 20_000
    y = p.sample(n, seed=4)
    assert torch.equal(y, p.sample(n, seed=4))
    assert not torch.equal(y, p.sample(n, seed=5))
    if isinstance(p.likelihood, Categorical):
        one_hot = torch.nn.functional.one_hot(y, 3).movedim(-1, 2).double()
        error = (p.variance / n).sqrt()
        assert ((one_hot.mean(0) - p.probs).abs() < 6 * error).all()
        return
    assert y.shape == (n, *p.mean.shape)
    if name != "student-t":  # whose variance converges too slowly
        assert ((y.mean(0) - p.mean).abs() < 6 * (p.variance / n).sqrt()).all()
    if name in REGRESSION:
        share = (y < p.quantile(0.3)).double().mean(0)
        assert ((share - 0.3).abs() < 6 * (0.21 / n) ** 0.5).all()


def test_draws_use_every_function_evenly() -> None:
    f = torch.arange(5.0)[:, None].expand(5, 3)
    p = Predictive(f, Gaussian(noise=1e-6), weights=torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0]))
    y = p.sample(40).round()
    assert torch.equal(y[:, 0], y[:, 2])  # one function at all rows
    assert sorted(y[:, 0].tolist()) == [1.0] * 10 + [2.0] * 10 + [3.0] * 10 + [4.0] * 10
    assert len(set(p.sample(4)[:, 0].round().tolist())) == 4


def test_gaussian_over_functions_is_a_closed_form() -> None:
    """N(m, v) through Gaussian noise is N(m, v + sigma^2); Monte Carlo agrees."""
    f, v, theta = randn(2, N, 2), randn(2, N, 2, seed=1).exp(), {"log_noise": randn(2, seed=2)}
    lik = Affine(Gaussian(), LOC, SCALE)
    p = Predictive(f, lik, theta, f_variance=v)
    sd = (v + (2 * theta["log_noise"]).exp()[:, None, None]).sqrt() * SCALE
    each = stats.norm(lik.location(f, 1).numpy(), sd.numpy())
    y = randn(N, 2, seed=3)
    wanted = np.log(np.exp(each.logpdf(y).sum(-1)).mean(0))
    np.testing.assert_allclose(p.log_prob(y), wanted, rtol=1e-11)
    np.testing.assert_allclose(p.cdf(y), each.cdf(y).mean(0), rtol=1e-11)
    weights, mean, std = p.normals()
    torch.testing.assert_close(std, sd)
    torch.testing.assert_close(mean, lik.location(f, 1))
    assert weights.tolist() == [0.5, 0.5]
    epistemic = (SCALE**2 * v).mean(0) + mean.var(0, correction=0)
    torch.testing.assert_close(p.epistemic, epistemic)
    torch.testing.assert_close(p.quantile(0.7), _invert(each, 0.7), rtol=1e-9, atol=1e-9)
    n = 4000
    eps = randn(n, 2, N, 2, seed=4)
    many = Predictive(
        (f + v.sqrt() * eps).flatten(0, 1), lik, {"log_noise": theta["log_noise"].repeat(n)}
    )
    assert ((many.mean - p.mean).abs() < 6 * (p.epistemic / (2 * n)).sqrt()).all()
    torch.testing.assert_close(many.log_prob(y), p.log_prob(y), rtol=0.1, atol=0.1)
    draws = p.sample(20_000)
    assert ((draws.mean(0) - p.mean).abs() < 6 * (p.variance / 20_000).sqrt()).all()
    torch.testing.assert_close(draws.var(0), p.variance, rtol=0.1, atol=0)
    with pytest.raises(Unavailable, match="functions"):
        _ = p.samples


def _invert(each: Any, level: float) -> Tensor:
    low, high = np.full((N, 2), -1e3), np.full((N, 2), 1e3)
    for _ in range(100):
        middle = (low + high) / 2
        reached = each.cdf(middle).mean(0) >= level
        low, high = np.where(reached, low, middle), np.where(reached, middle, high)
    return torch.tensor(high)


def test_one_gaussian_has_an_entropy() -> None:
    p = Predictive(randn(1, N, 1), Gaussian(noise=0.5), f_variance=randn(1, N, 1).exp())
    np.testing.assert_allclose(p.entropy, stats.norm(0, p.std.numpy()).entropy(), rtol=1e-12)
    wanted = 0.5 * np.log1p((p.epistemic / 0.25).numpy())
    np.testing.assert_allclose(p.mutual_information, wanted, rtol=1e-9)
    with pytest.raises(Unavailable, match="moment_matched"):
        _ = build("gaussian").entropy
    assert not hasattr(build("gaussian"), "probs")


def test_functions_are_drawn_where_there_is_no_closed_form() -> None:
    """The logistic-normal mean, by quadrature, within 6 standard errors of 4,000 draws."""
    f, v = torch.tensor([[[0.5], [-2.0]]]).double(), torch.tensor([[[4.0], [1.0]]]).double()
    p = Predictive(f, "bernoulli", f_variance=v, draws=4000)
    again = Predictive(f, "bernoulli", f_variance=v, draws=4000)
    assert torch.equal(p.samples, again.samples)
    assert p.samples.shape == (4000, 2, 1)
    nodes, w = np.polynomial.hermite_e.hermegauss(60)
    x = f[0, :, 0].numpy()[:, None] + v[0, :, 0].sqrt().numpy()[:, None] * nodes
    wanted = (w / (1 + np.exp(-x))).sum(1) / w.sum()
    error = (p.epistemic / 4000).sqrt().squeeze(1).numpy()
    assert (np.abs(p.probs.squeeze(1).numpy() - wanted) < 6 * error).all()
    assert not torch.equal(p.samples, Predictive(f, "bernoulli", f_variance=v, seed=1).samples)
