"""A factor on the noise for each row: its likelihood, the test, and the fit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from doxa.likelihoods import Gaussian, NoiseScale, ScaledNoise, StudentT, assumed
from doxa.likelihoods.compose import calibrate_noise_scale, noise_p_value

ONES = {"log_noise": torch.zeros(1).double()}


def table(n: int, seed: int) -> tuple[Tensor, np.random.Generator]:
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.standard_normal((n, 3))), rng


@pytest.mark.parametrize("h", [-1.2, 0.7])
@pytest.mark.parametrize(
    ("base", "noise"),
    [
        (Gaussian(noise=0.7), stats.norm(0, 0.7)),
        (StudentT(df=3.5, scale=0.7), stats.t(3.5, 0, 0.7)),
    ],
    ids=["gaussian", "student-t"],
)
def test_scaled_noise_against_scipy(base: Gaussian | StudentT, noise: object, h: float) -> None:
    name = type(noise.dist).__name__  # type: ignore[attr-defined]
    loud = 0.7 * math.exp(h)
    scipy = stats.norm(1.3, loud) if name.startswith("norm") else stats.t(3.5, 1.3, loud)
    likelihood = ScaledNoise(base)
    y = np.linspace(-9, 9, 101)
    f = torch.tensor([[1.3, h]], dtype=torch.float64).expand(len(y), -1)
    theta, at = likelihood.constants((2,)), torch.tensor(y)[:, None]
    np.testing.assert_allclose(likelihood.log_prob(f, at, theta), scipy.logpdf(y), rtol=1e-10)
    np.testing.assert_allclose(
        likelihood.cdf(at, f, theta)[:, 0], scipy.cdf(y), rtol=1e-8, atol=1e-14
    )
    np.testing.assert_allclose(likelihood.entropy(f, theta)[0, 0], scipy.entropy(), rtol=1e-9)
    np.testing.assert_allclose(likelihood.variance(f, theta)[0, 0], scipy.var(), rtol=1e-12)
    drawn = likelihood.sample(f[:1].expand(20_000, -1), theta, torch.Generator().manual_seed(0))
    assert stats.kstest(drawn[:, 0].numpy(), scipy.cdf).pvalue > 1e-4


def rejected(n: int, kind: str, slope: float, repeats: int) -> float:
    """The share of simulated tables whose noise is found to depend on x at the level 0.01."""
    count = 0
    for seed in range(repeats):
        x, rng = table(n, seed)
        if kind == "normal":
            e = rng.standard_normal(n)
        else:
            e = rng.standard_t(3, n) if kind == "student-t" else rng.lognormal(size=n) - 1.65
        error = torch.tensor(e) * (slope * x[:, 1]).exp()
        x[:, 2] = (x[:, 2] > 1.6).double()  # a rare category
        start = NoiseScale.of(x[:, 0], x)
        assert start is not None
        p = noise_p_value(error, start.positions(x[:, 0], x), torch.ones(n).double(), seed)
        count += p <= 0.01
    return count / repeats


@pytest.mark.parametrize("kind", ["normal", "student-t", "skewed"])
def test_the_test_has_its_size_for_any_tails(kind: str) -> None:
    """60 tables of 40 rows. At a size of 0.01, more than 4 rejections have a probability of 0.0003;
    the same errors with a factor of e^x are found in most tables."""
    assert rejected(40, kind, 0.0, 60) <= 4 / 60
    assert rejected(60, kind, 1.0, 20) >= 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "student-t", "skewed"])
def test_the_size_is_one_percent(kind: str) -> None:
    """1,000 tables: 0.01 ± 0.0095, three standard errors (once in 370)."""
    assert rejected(100, kind, 0.0, 1000) == pytest.approx(0.01, abs=0.0095)


def test_ranks_are_those_of_the_rows_and_bounded() -> None:
    x, _ = table(400, 0)
    x[:, 1] = (x[:, 1] > 0.5244).double()  # 30 % ones
    start = NoiseScale.of(x[:, 0], x)
    assert start is not None and start.columns == (-1, 0, 1, 2)
    u = start.positions(x[:, 0], x)
    exact = 2 * (stats.rankdata(x[:, 2].numpy()) - 0.5) / 400 - 1
    np.testing.assert_allclose(u[:, 3], exact, atol=0.1)  # interpolated
    assert len(u[:, 2].unique()) == 2
    far = start.positions(torch.tensor([-1e6, 1e6]).double(), torch.full((2, 3), 1e6).double())
    assert far[:, 0].tolist() == [-1.0, 1.0] and bool((far.abs() <= 1.0).all())
    assert NoiseScale.of(torch.zeros(9).double(), torch.ones(9, 2).double()) is None
    wide = NoiseScale.of(x[:, 0], torch.randn(400, 21).double())
    assert wide is not None and wide.columns == (-1,)  # too many inputs: the prediction alone


@pytest.mark.parametrize("df", [math.inf, 4.0])
def test_the_factor_and_the_noise_are_those_of_the_rows(df: float) -> None:
    """1,500 rows with the noise 0.5 exp(0.6 u) of the rank u of x₁ in [-1, 1]. The slope 0.6 has
    the standard error √(3/(2 · 1,500)) = 0.03 (Student-t: 0.04), and log σ one of 0.02; τ, and
    the ranks between 11 knots, bias both a little. Functions that differ are no noise."""
    n = 1500
    x, rng = table(n, 1)
    u = torch.tensor(2 * stats.rankdata(x[:, 1].numpy()) / n - 1)
    e = rng.standard_normal(n) if math.isinf(df) else rng.standard_t(df, n)
    y = x[:, 0] + 0.5 * (0.6 * u).exp() * torch.tensor(e)
    f = (x[:, 0] + 0.1 * torch.tensor(rng.standard_normal((6, n)))).unsqueeze(2)
    y = y + 0.1 * torch.tensor(rng.standard_normal(n))
    theta = {"log_noise": torch.full((6,), math.log(0.8)).double()}
    found = calibrate_noise_scale(
        assumed("gaussian"), f, y[:, None], theta, torch.ones(n).double(), x
    )
    assert found is not None and found.p_value <= 0.01 and found.columns == (1,)
    k = found.scale.columns.index(1)
    assert found.scale.linear[k] == pytest.approx(0.6, abs=0.13)
    if math.isinf(df):
        assert found.likelihood is None
        level = math.log(0.8)
    else:
        assert found.likelihood is not None
        assert found.likelihood.likelihood.df in (3.0, 4.0, 5.0)  # type: ignore[attr-defined]
        level = math.log(0.8) + found.likelihood.moved["log_scale"]
    h = found.scale.log_scale(x[:, 0], x)
    assert float((level + h - 0.6 * u).mean()) == pytest.approx(math.log(0.5), abs=0.08)
    assert float((h - h.mean() - 0.6 * u).std()) < 0.08


def test_nothing_is_found_where_there_is_nothing_or_little_to_see() -> None:
    """Constant noise with this seed, and rows of weight zero."""
    x, rng = table(300, 2)
    plain = torch.tensor(rng.standard_normal(300))[:, None]
    uneven = plain * (1.5 * x[:, 1:2]).exp()
    f, ones = torch.zeros(1, 300, 1).double(), torch.ones(300).double()

    def found(y: Tensor, weight: Tensor, rows: int = 300) -> bool:
        some = slice(0, rows)
        return calibrate_noise_scale(
            assumed("gaussian"), f[:, some], y[some], ONES, weight[some], x[some]
        ) is not None  # fmt: skip

    assert not found(plain, ones) and found(uneven, ones)
    assert found(uneven, ones, 60)
    half = ones.clone()
    half[150:] = 0.0
    mixed = torch.cat([plain[:150], uneven[150:]])
    assert found(mixed, ones) and not found(mixed, half)
