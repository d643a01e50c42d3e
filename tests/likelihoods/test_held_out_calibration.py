"""What rows left out say of a likelihood, where it is known what they should say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import Tensor

from doxa.likelihoods import (
    Bernoulli,
    Categorical,
    Counts,
    Gaussian,
    Likelihood,
    NegativeBinomial,
    Poisson,
    StudentT,
    assumed,
)
from doxa.likelihoods.base import significant_gain

N = 2000


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(likelihood: Likelihood, f: Tensor, seed: int = 1) -> Tensor:
    return likelihood.sample(f, {}, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("truth", [0.6, 2.0])
@pytest.mark.parametrize(
    ("kind", "outputs"), [(Bernoulli, 1), (Categorical, 3)], ids=["bernoulli", "categorical"]
)
def test_the_temperature_of_labels_that_were_drawn_at_one(
    kind: type[Bernoulli | Categorical], outputs: int, truth: float
) -> None:
    """log T has the standard error 1/√(N E[(dlog p/dlog T)²]), some 0.04 here; the prior moves it
    by a hundredth of log T at most. Four standard errors, once in 16,000."""
    f = 2.0 * normals(1, N, outputs)
    y = labels(kind(temperature=truth), f[0])
    found = kind().calibrate_held_out(f, y, {}, torch.ones(N))
    assert found is not None and isinstance(found.likelihood, kind)
    assert found.likelihood.temperature is not None
    assert math.log(found.likelihood.temperature / truth) == pytest.approx(0.0, abs=0.16)


def best_of(logits: np.ndarray, signs: np.ndarray, members: int) -> tuple[float, float]:
    """By scipy: the log T that is likeliest under N(0, 0.35²) with log T for each member, and the
    gain over T = 1 in its standard errors, of which that slope is a part."""

    def each(log_t: float) -> np.ndarray:
        return -np.log1p(np.exp(-signs * logits / np.exp(log_t)))

    def loss(log_t: float) -> float:
        prior = stats.norm(0.0, 0.35).logpdf(log_t) + members * log_t
        return -float(each(log_t).sum() + prior)

    found = optimize.minimize_scalar(loss, bounds=(-1.6, 1.6), options={"xatol": 1e-6}).x
    gain = each(found) - each(0.0)
    error = math.sqrt(len(gain)) * np.std(gain)
    return found, (gain.sum() + members * found) / error


@pytest.mark.parametrize("members", [1, 5])
def test_few_rows_say_it_with_a_prior_and_clearly(members: int) -> None:
    """100 labels that were drawn at T = 1, forty times, and at 0.7: T > 1 is taken from a gain of a
    quarter of its standard error on, T < 1 from one; and T is scipy's. Where labels are right, five
    members are worth a fifth of log T, and the rows have a standard error of 0.2."""
    seen, right = set(), []
    for seed in range(40):
        for truth in (1.0, 0.7):
            f = 2.0 * normals(1, 100, 1, seed=seed)
            y = labels(Bernoulli(temperature=truth), f[0], 1000 + seed)
            found = Bernoulli().calibrate_held_out(f, y, {}, torch.ones(100), members)
            signs = 2.0 * y.double().numpy().ravel() - 1.0
            expected, gain = best_of(f[0, :, 0].numpy(), signs, members)
            assert (found is not None) == (gain > (0.25 if expected > 0 else 1.0))
            t = 1.0 if found is None else found.likelihood.temperature  # type: ignore[attr-defined]
            if found is not None:
                assert math.log(t) == pytest.approx(expected, abs=1e-3)
            seen.add((expected > 0, found is not None))
            right += [math.log(t)] if truth == 1.0 else []
    assert len(seen) == 4
    assert 0.0 < np.mean(right) < 0.06 * members and max(map(abs, right)) < 0.8


def test_rows_of_weight_two_are_two_rows() -> None:
    f = 2.0 * normals(1, 200, 1)
    y, weight = labels(Bernoulli(temperature=2.0), f[0]), torch.ones(200)
    weight[:100] = 2.0
    twice = torch.cat([torch.arange(100), torch.arange(200)])
    one = Bernoulli().calibrate_held_out(f, y, {}, weight)
    two = Bernoulli().calibrate_held_out(f[:, twice], y[twice], {}, torch.ones(300))
    assert one is not None and two is not None
    assert one.likelihood.temperature == pytest.approx(  # type: ignore[attr-defined]
        two.likelihood.temperature, rel=1e-3  # type: ignore[attr-defined]
    )  # fmt: skip


def test_whether_a_gain_is_clear_is_a_matter_of_relative_weights() -> None:
    """Weights that are all a hundredth say the same as weights of one, and rows of weight zero say
    nothing, whatever they would have gained; a gain that varies is less clear than one that does
    not."""
    gain = torch.tensor([0.5, 1.0, -0.2, 0.8, 0.1]).double()
    weight = torch.tensor([1.0, 2.0, 1.0, 0.5, 1.5]).double()
    for errors in (0.5, 1.0, 1.5, 1.9, 2.5, 4.0):
        asked = significant_gain(gain, weight, errors)
        for scale in (0.01, 100):
            assert significant_gain(gain, scale * weight, errors) == asked
        more, none = torch.tensor([50.0, -80.0]).double(), torch.zeros(2).double()
        assert significant_gain(torch.cat([gain, more]), torch.cat([weight, none]), errors) == asked
    assert significant_gain(gain, weight, 0.5) and not significant_gain(gain, weight, 4.0)
    assert significant_gain(torch.full((5,), 1e-3).double(), weight, 4.0)  # no spread, no error


def test_nothing_is_asked_of_what_is_given() -> None:
    asked = [Bernoulli(), Categorical(ignore_index=0), assumed("gaussian"), assumed("categorical")]
    given = [
        Bernoulli(temperature=1.0), Categorical(class_weight=[1.0, 2.0]), Gaussian(), StudentT(),
        Gaussian(noise=1.0, assumed=True), Gaussian(per_output=True, assumed=True),
    ]  # fmt: skip
    assert all(each.calibrates_on_held_out for each in asked)
    assert not any(each.calibrates_on_held_out for each in given)
    assert assumed("gaussian") == Gaussian() and repr(assumed("gaussian")) == repr(Gaussian())


def test_heavy_tails_are_student_t_and_gaussian_ones_are_not() -> None:
    """Errors of 0.5 times a Student-t with four degrees of freedom, by scipy, and a level of noise
    that is three times too large; s has the standard error 0.5/√N · 1.4, and half of that again for
    the degrees of freedom that are tried."""
    rng = np.random.default_rng(0)
    f, wide = torch.zeros(1, N, 1).double(), {"log_noise": torch.tensor([math.log(1.5)]).double()}
    heavy = torch.tensor(0.5 * stats.t(4).rvs(N, random_state=rng))[:, None]
    found = assumed("gaussian").calibrate_held_out(f, heavy, wide, torch.ones(N))
    assert found is not None and isinstance(found.likelihood, StudentT)
    assert found.likelihood.df in (3.0, 4.0, 5.0)
    scale = 1.5 * math.exp(found.moved["log_scale"])
    _, _, expected = stats.t.fit(heavy[:, 0].numpy(), fdf=found.likelihood.df, floc=0.0)
    assert scale == pytest.approx(expected, rel=1e-3)
    light = 0.5 * normals(N, 1, seed=3)
    assert assumed("gaussian").calibrate_held_out(f, light, wide, torch.ones(N)) is None


DEGREES = (3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0)


def twice_log_ratio(errors: np.ndarray) -> float:
    """Of Student-t noise at its best over Gaussian noise at its best, both around 0, by scipy."""

    def best(noise: stats.rv_continuous, **shape: float) -> float:
        fitted = noise.fit(errors, floc=0.0, **shape)
        return float(noise.logpdf(errors, *fitted).sum())

    return 2.0 * (max(best(stats.t, fdf=df) for df in DEGREES) - best(stats.norm))


def errors_of(ratio: float) -> np.ndarray:
    """Quantiles of a normal, but the outermost two so far out that the log ratio is half this."""

    def errors(far: float) -> np.ndarray:
        return np.r_[stats.norm.ppf((np.arange(198) + 0.5) / 198), -far, far]

    far = optimize.brentq(lambda far: twice_log_ratio(errors(far)) - ratio, 3.0, 8.0, xtol=1e-6)
    return errors(far)


@pytest.mark.parametrize(("ratio", "heavy"), [(6.6, False), (6.66, True), (13.2, True)])
def test_one_fit_in_two_hundred_takes_gaussian_errors_for_heavy_ones(
    ratio: float, heavy: bool
) -> None:
    """Where twice the log ratio is above the 99 % point of chi-squared, 6.63: under Gaussian noise,
    on the edge of what Student-t can be, one in two hundred."""
    assert stats.chi2(1).sf(6.63) / 2 == pytest.approx(1 / 200, abs=1e-4)
    y = torch.tensor(errors_of(ratio))[:, None]
    level = {"log_noise": torch.tensor([math.log(1.2)]).double()}
    found = assumed("gaussian").calibrate_held_out(
        torch.zeros(1, *y.shape).double(), y, level, torch.ones(200)
    )
    assert (found is not None) == heavy


def test_the_spread_of_functions_is_not_noise() -> None:
    """Functions ±1 and noise of 0.5: the mixture's rows are y = ±1 + 0.5 e, whose variance of 1.25
    is no reason for wider noise, nor (it is bimodal) for tails."""
    f = torch.tensor([-1.0, 1.0]).double()[:, None, None].expand(2, N, 1)
    y = normals(N, 1).sign() + 0.5 * normals(N, 1, seed=1)
    theta = {"log_noise": torch.full((2,), math.log(0.5)).double()}
    assert assumed("gaussian").calibrate_held_out(f, y, theta, torch.ones(N)) is None
    heavy = normals(N, 1).sign() + torch.tensor(0.5 * stats.t(3).rvs((N, 1), random_state=0))
    found = assumed("gaussian").calibrate_held_out(f, heavy, theta, torch.ones(N))
    assert found is not None and abs(found.moved["log_scale"]) < 0.15


def counts(n: int, r: float, seed: int) -> tuple[Tensor, Tensor]:
    """Log means f [1, N, 1] between -1 and 2, and counts [N, 1] by numpy: Poisson for r = ∞."""
    rng = np.random.default_rng(seed)
    f = rng.uniform(-1.0, 2.0, n)
    rate = np.exp(f) * (1.0 if math.isinf(r) else rng.gamma(r, 1.0 / r, n))
    return torch.tensor(f).reshape(1, n, 1), torch.tensor(rng.poisson(rate)).double()[:, None]


@pytest.mark.parametrize("r", [0.5, 3.0])
def test_overdispersed_counts_are_negative_binomial(r: float) -> None:
    """r is that of scipy, and near the truth: 2,000 counts give log r to 0.1 or better."""
    f, y = counts(N, r, 0)
    found = Counts().calibrate_held_out(f, y, {}, torch.ones(N))
    assert isinstance(found.likelihood, NegativeBinomial)
    own = found.likelihood.concentration
    assert isinstance(own, float) and math.log(own / r) == pytest.approx(0.0, abs=0.3)
    mean, at = np.exp(f[0, :, 0].numpy()), y[:, 0].numpy()

    def loss(log_r: float) -> float:
        k = math.exp(log_r)
        return -float(stats.nbinom.logpmf(at, k, k / (k + mean)).sum())

    best = optimize.minimize_scalar(loss, bounds=(-5, 5), options={"xatol": 1e-6}).x
    assert math.log(own) == pytest.approx(best, abs=0.01)
    assert "negative binomial" in found.message and not found.moved


def test_poisson_counts_stay_poisson_in_all_but_one_of_a_hundred() -> None:
    """100 tables of 60 Poisson counts: more than 5 false alarms have a probability of 0.0005. Of
    counts with r = 1, most are found; underdispersed ones are Poisson."""
    chosen = {
        r: [
            Counts().calibrate_held_out(*counts(60, r, seed), {}, torch.ones(60)).likelihood.name
            for seed in range(repeats)
        ]
        for r, repeats in ((math.inf, 100), (1.0, 20))
    }
    assert chosen[math.inf].count("negative-binomial") <= 5
    assert chosen[1.0].count("negative-binomial") >= 18
    f, _ = counts(60, 1.0, 0)
    even = f[0].exp().round()
    assert Counts().calibrate_held_out(f, even, {}, torch.ones(60)).likelihood == Poisson()
    assert stats.chi2(1).sf(5.41) / 2 == pytest.approx(0.01, abs=1e-4)


def test_counts_of_weight_two_are_two_counts() -> None:
    f, y = counts(100, 1.0, 1)
    weight = torch.ones(100)
    weight[:50] = 2.0
    twice = torch.cat([torch.arange(50), torch.arange(100)])
    one = Counts().calibrate_held_out(f, y, {}, weight)
    assert one.likelihood == Counts().calibrate_held_out(
        f[:, twice], y[twice], {}, torch.ones(150)
    ).likelihood  # fmt: skip
