"""Streamed moments, mixtures of predictives, several heads; and what is refused."""

from __future__ import annotations

import math

import likelihood_rows
import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from doxa.errors import DataError, MethodError, ModelError, ShapeError, Unavailable
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
from doxa.predictive import Moments, Predictive

S, N = 7, 4
LOC, SCALE = torch.tensor([3.0, -1.0]).double(), torch.tensor([2.0, 0.5]).double()
CASES: dict[str, tuple[Likelihood, tuple[int, ...]]] = likelihood_rows.cases() | {
    "affine": (Affine(Gaussian(noise=[0.3, 2.0]), LOC, SCALE), (2,)),
    "heteroscedastic": (HeteroscedasticGaussian(), (2,)),
    "cauchy": (StudentT(df=1.0, scale=0.5), (1,)),
    "bernoulli": (Bernoulli(), (1,)),
    "categorical": (Categorical(class_weight=[1.0, 5.0, 2.0]), (3,)),
    "segmentation": (Categorical(), (3, 2, 2)),
    "poisson": (Poisson(), ()),
}
every = pytest.mark.parametrize("name", CASES)
QUANTITIES = ("mean", "aleatoric", "epistemic", "variance", "expected_entropy")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def components(name: str, seed: int = 0) -> tuple[Tensor, Likelihood, dict[str, Tensor]]:
    lik, output = CASES[name]
    theta = {k: 0.3 * randn(S, *v.shape, seed=3) for k, v in lik.parameters(output).items()}
    return randn(S, N, *output, seed=seed), lik, theta


def assert_same(p: Predictive, q: Predictive, quantities: tuple[str, ...] = QUANTITIES) -> None:
    for quantity in quantities:
        a, b = getattr(p, quantity), getattr(q, quantity)
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@every
@pytest.mark.parametrize("closed", [False, True])
def test_streaming_gives_the_same_moments(name: str, closed: bool) -> None:
    f, lik, theta = components(name)
    v = randn(*f.shape, seed=1).exp() if closed else None
    weights = torch.rand(S, generator=torch.Generator()).double()
    weights[1:3] = 0.0
    p = Predictive(f, lik, theta, f_variance=v, weights=weights, draws=5)
    moments = Moments(lik, draws=5)
    for some in (slice(0, 1), slice(1, 3), slice(3, 7)):
        own = {k: value[some] for k, value in theta.items()}
        moments.update(f[some], own, None if v is None else v[some], weights[some])
    q = moments.result()
    assert_same(p, q)
    if lik.classifies:
        assert_same(p, q, ("probs", "entropy", "mutual_information", "variation_ratio"))
        torch.testing.assert_close(p.votes(), q.votes())
    else:
        with pytest.raises(Unavailable, match="keep='samples'"):
            q.quantile(0.5)
        with pytest.raises(Unavailable, match="keep='samples'"):
            q.log_prob(np.zeros(q.mean.shape))
        with pytest.raises(Unavailable, match="classification"):
            q.votes()
    if lik.classifies and math.prod(lik.event(CASES[name][1])) == 1:
        labels = [0, 1, 1, 0]
        torch.testing.assert_close(p.log_prob(labels), q.log_prob(labels))
        draws = q.sample(20_000)
        share = (draws == 1).double().mean(0).squeeze()
        wanted = q.probs[:, 1] if lik.class_axis else q.probs[:, 0]
        assert ((share - wanted).abs() < 6 * (0.25 / 20_000) ** 0.5).all()
    if name in ("gaussian", "affine", "heteroscedastic"):
        y = randn(N, *lik.event(CASES[name][1]), seed=2)
        torch.testing.assert_close(p.moment_matched().log_prob(y), q.moment_matched().log_prob(y))
    with pytest.raises(Unavailable):
        _ = q.samples


@every
def test_blocks_of_rows_join(name: str) -> None:
    f, lik, theta = components(name)
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        moments = Moments(lik)
        moments.update(f[:, rows], theta)
        parts.append(moments.result())
    whole = Predictive.concat(parts)
    assert_same(whole, Predictive(f, lik, theta))
    if lik.classifies:
        torch.testing.assert_close(whole.votes(), Predictive(f, lik).votes())
    with pytest.raises(MethodError):
        Predictive.concat([Predictive(f, lik, theta)])


@every
def test_a_mixture_of_predictives_is_the_mixture_of_their_components(name: str) -> None:
    (f, lik, theta), (g, _, _) = components(name), components(name, seed=5)
    both = {k: torch.cat([v, v]) for k, v in theta.items()}
    weights = torch.tensor([0.25 / S] * S + [0.75 / S] * S, dtype=torch.float64)
    wanted = Predictive(torch.cat([f, g]), lik, both, weights=weights)
    p = Predictive.mix([Predictive(f, lik, theta), Predictive(g, lik, theta)], [1.0, 3.0])
    assert_same(p, wanted)
    assert_same(p, wanted, ("samples", "weights"))
    y = wanted.likelihood.sample(f, p_theta(wanted, f, theta), torch.Generator(), 1)[0]
    torch.testing.assert_close(p.log_prob(y), wanted.log_prob(y))
    if lik.classifies:
        assert_same(p, wanted, ("entropy", "mutual_information"))
        torch.testing.assert_close(p.votes(), wanted.votes())
    else:
        torch.testing.assert_close(p.quantile([0.2, 0.7]), wanted.quantile([0.2, 0.7]))
        torch.testing.assert_close(p.cdf(y), wanted.cdf(y))
    if name in ("gaussian", "affine"):
        for a, b in zip(p.normals(), wanted.normals(), strict=True):
            torch.testing.assert_close(a, b)
    assert p.sample(40).shape == wanted.sample(40).shape


def test_equal_parts_of_a_mixture_draw_different_targets() -> None:
    part = Predictive(randn(S, 1, 1), Gaussian(noise=1.0))
    assert len(Predictive.mix([part, part]).sample(1000).flatten().unique()) == 1000


def p_theta(p: Predictive, f: Tensor, theta: dict[str, Tensor]) -> dict[str, Tensor]:
    constants = p.likelihood.constants(tuple(f.shape[2:]))
    return {**theta, **{k: v.expand(S, *v.shape) for k, v in constants.items()}}


def test_mixtures_of_different_units() -> None:
    """Two runs standardised differently: their densities of the same y are averaged."""
    f, g = randn(S, N, 1), randn(S, N, 1, seed=1)
    parts = [
        Predictive(f, Affine(Gaussian(noise=0.5), torch.tensor(1.0), torch.tensor(2.0))),
        Predictive(g, Affine(Gaussian(noise=0.7), torch.tensor(-3.0), torch.tensor(0.1))),
    ]
    p, y = Predictive.mix(parts), np.linspace(-4, 3, N)[:, None]
    first = stats.norm(1 + 2 * f.numpy(), 0.5).pdf(y).mean(0)
    second = stats.norm(-3 + 0.1 * g.numpy(), 0.7).pdf(y).mean(0)
    np.testing.assert_allclose(p.log_prob(y).exp(), ((first + second) / 2).squeeze(1), rtol=1e-6)
    draws = p.sample(4000)
    assert ((draws.mean(0) - p.mean).abs() < 6 * (p.variance / 4000).sqrt()).all()
    assert ((draws < -2).double().mean(0) - p.cdf(np.full((N, 1), -2.0))).abs().max() < 0.05


def test_moment_matched_is_what_deep_ensembles_score() -> None:
    f, lik = randn(S, N, 4), Affine(HeteroscedasticGaussian(), LOC, SCALE)
    p = Predictive(f, lik)
    g, y = p.moment_matched(), randn(N, 2)
    mean = lik.mean(f, {}, 1)
    variance = (lik.variance(f, {}, 1) + mean**2).mean(0) - mean.mean(0) ** 2
    normal = stats.norm(mean.mean(0).numpy(), variance.sqrt().numpy())
    np.testing.assert_allclose(g.log_prob(y), normal.logpdf(y).sum(1), rtol=1e-9)
    np.testing.assert_allclose(g.quantile([0.1, 0.9])[1], normal.ppf(0.9), rtol=1e-9)
    np.testing.assert_allclose(g.entropy, normal.entropy(), rtol=1e-9)
    np.testing.assert_allclose(g.cdf(y), normal.cdf(y), rtol=1e-9)
    assert torch.equal(g.epistemic, p.epistemic)
    assert torch.equal(g.moment_matched().mean, g.mean)
    assert ((g.sample(20_000).mean(0) - g.mean).abs() < 6 * g.std / 20_000**0.5).all()
    with pytest.raises(Unavailable):
        Predictive(randn(S, N, 3), "categorical").moment_matched()


def test_several_heads() -> None:
    lik = (Gaussian(noise=0.5), "categorical")
    f = (randn(S, N, 2), randn(S, N, 3))
    p = Predictive(f, lik)
    assert len(p.heads) == 2
    assert_same(p.heads[0], Predictive(f[0], lik[0]))
    torch.testing.assert_close(p.heads[1].probs, torch.softmax(f[1], 2).mean(0))
    for ask in (
        lambda: p.mean,
        lambda: p.probs,
        lambda: p.variation_ratio,
        lambda: p.entropy,
        lambda: p.log_prob((0, 0)),
        lambda: p.quantile(0.5),
        lambda: p.sample(3),
    ):
        with pytest.raises(Unavailable, match=r"heads\[0\]"):
            ask()
    moments = Moments(lik)
    moments.update((f[0][:3], f[1][:3]))
    moments.update((f[0][3:], f[1][3:]))
    for a, b in zip(moments.result().heads, p.heads, strict=True):
        assert_same(a, b)
    assert_same(p.heads[0].moment_matched(), p.heads[0])
    learned = Predictive(f, ("gaussian", "categorical"), {"0.log_noise": randn(S)})
    torch.testing.assert_close(learned.heads[0].aleatoric[0, 0], (2 * randn(S)).exp().mean())
    mixed = Predictive.mix([p, p])
    assert_same(mixed.heads[0], p.heads[0])
    first = p.heads[0]
    assert first.heads == (first,)


def test_samples_are_functions_in_units_of_y() -> None:
    f = randn(S, N, 4)
    p = Predictive(f, Affine(HeteroscedasticGaussian(), LOC, SCALE))
    torch.testing.assert_close(p.samples, LOC + SCALE * f[..., :2])
    assert torch.equal(Predictive(f, "categorical").samples, f)
    assert Predictive.from_samples(f, "categorical").weights.tolist() == [pytest.approx(1 / S)] * S


def test_scores_leave_class_weights_out() -> None:
    f, y = randn(S, N, 3), [0, 1, 2, 0]
    weighted = Predictive(f, Categorical(class_weight=[1.0, 5.0, 2.0]))
    torch.testing.assert_close(weighted.log_prob(y), Predictive(f, "categorical").log_prob(y))


def test_what_counts_nothing_may_be_undefined() -> None:
    f, weights = randn(S, N, 1), torch.ones(S)
    f[3], weights[3] = torch.nan, 0.0
    rest = [s for s in range(S) if s != 3]
    p = Predictive(f, Gaussian(noise=0.5), weights=weights)
    q = Predictive(f[rest], Gaussian(noise=0.5))
    assert_same(p, q)
    torch.testing.assert_close(p.log_prob(np.zeros(N)), q.log_prob(np.zeros(N)))


def test_gradients_reach_the_functions() -> None:
    f = randn(S, N, 1).requires_grad_()
    p = Predictive(f, Gaussian(noise=0.5))
    (grad,) = torch.autograd.grad(p.log_prob(np.zeros(N)).sum() + p.epistemic.sum(), f)
    assert torch.isfinite(grad).all()


def test_types_and_rows() -> None:
    f = randn(S, N, 1)
    assert Predictive(f.half(), Gaussian(noise=1.0)).mean.dtype == torch.float32
    single = Predictive(f.float(), Gaussian(noise=1.0))
    assert single.log_prob(np.zeros(N)).dtype == torch.float32
    assert single.quantile(0.5).dtype == torch.float32
    assert Predictive(f[:, :1], Gaussian(noise=1.0)).interval(0.9)[0].shape == (1, 1)
    empty = Predictive(f[:, :0], Gaussian(noise=1.0))
    assert empty.mean.shape == (0, 1)
    assert empty.quantile([0.1, 0.9]).shape == (2, 0, 1)
    assert empty.log_prob(np.zeros((0, 1))).shape == (0,)


def test_what_is_refused() -> None:
    f = randn(S, N, 1)
    good = Predictive(f, Gaussian(noise=1.0))
    for error, wrong in (
        (ModelError, lambda: Predictive(f, "gaussian")),  # learned, but not given
        (ModelError, lambda: Predictive(f, "categorical")),
        (ShapeError, lambda: Predictive(f, "gaussian", {"log_noise": torch.zeros(3)})),
        (ShapeError, lambda: Predictive(f[0, 0], "bernoulli")),
        (ShapeError, lambda: Predictive(f, Gaussian(noise=1.0), f_variance=f[:1])),
        (ShapeError, lambda: Predictive(f, Gaussian(noise=1.0), weights=torch.ones(3))),
        (DataError, lambda: Predictive(f[:0], Gaussian(noise=1.0))),
        (DataError, lambda: Predictive(f, Gaussian(noise=1.0), weights=-torch.ones(S))),
        (DataError, lambda: Predictive.from_probs(torch.tensor([[0.5, 0.5], [0.9, 0.9]]))),
        (ShapeError, lambda: Predictive.from_probs(torch.tensor([0.5, 0.5]))),
        (ShapeError, lambda: good.log_prob(np.zeros(N + 1))),
        (ShapeError, lambda: good.log_prob(np.zeros((N, 2)))),
        (DataError, lambda: good.log_prob(np.full(N, np.nan))),
        (DataError, lambda: good.quantile(1.0)),
        (DataError, lambda: good.interval(95)),
        (DataError, lambda: good.sample(0)),
        (DataError, lambda: Moments("bernoulli").result()),
        (ModelError, lambda: Predictive.mix([good, Predictive(f, "bernoulli")])),
        (ShapeError, lambda: Predictive.mix([good, Predictive(f[:, :2], Gaussian(noise=1.0))])),
        (DataError, lambda: Predictive.mix([])),
        (Unavailable, lambda: Predictive(f, "bernoulli").interval(0.9)),
        (Unavailable, lambda: Predictive(f, "bernoulli").cdf(np.zeros(N))),
        (Unavailable, lambda: good.probs),
        (Unavailable, lambda: good.votes()),
        (Unavailable, lambda: Predictive(f, "poisson").normals()),
    ):
        with pytest.raises(error):
            wrong()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantiles_far_out_in_the_tails(dtype: torch.dtype) -> None:
    """Of one normal those of scipy, of a mixture roots of its distribution function, by scipy. (In
    float32 a level of 1 − 10⁻⁹ is 1, and the quantile was infinite.)"""
    noise, norm = Gaussian(noise=0.5), stats.norm
    f = torch.tensor([[[0.3]], [[1.1]]], dtype=dtype)
    for level in (1e-9, 0.01, 0.5, 0.99, 1 - 1e-9):
        one = Predictive.from_samples(f[:1], noise).quantile(level)
        assert float(one) == pytest.approx(norm.ppf(level, 0.3, 0.5), rel=1e-5)
        both = float(Predictive.from_samples(f, noise).quantile(level))
        tail = norm.sf if level > 0.5 else norm.cdf
        share = sum(tail(both, float(m), 0.5) for m in f.flatten()) / 2
        assert share == pytest.approx(min(level, 1 - level), rel=1e-4)
