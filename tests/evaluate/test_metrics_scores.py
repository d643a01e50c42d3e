"""Log-likelihood and sharpness against scikit-learn, scipy and hand calculation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from metric_cases import TABLES, of_probs, of_yes, randn
from scipy import stats
from sklearn.metrics import log_loss

from doxa.errors import DataError
from doxa.evaluate.scores import log_likelihood, log_likelihood_each, nll, sharpness
from doxa.likelihoods import Bernoulli, Categorical, Gaussian, Poisson, StudentT
from doxa.predictive import Moments, Predictive


@pytest.mark.parametrize("name", [n for n in TABLES if n != "worst"])
def test_equal_to_log_loss_of_scikit_learn(name: str) -> None:
    probs, label = TABLES[name]
    if name in (
        "on edges",
        "sharp",
        "calibrated",
    ):  # scikit-learn clips what is 0, which is infinite here
        probs = 0.9 * probs + 0.1 / probs.shape[1]
    expected = log_loss(label, probs, labels=np.arange(probs.shape[1]))
    assert nll(of_probs(probs), label) == pytest.approx(expected, abs=1e-9)
    assert log_likelihood(of_probs(probs), label) == pytest.approx(-expected, abs=1e-9)


def test_a_class_without_probability_that_comes_true_is_infinitely_bad() -> None:
    probs, label = TABLES["worst"]
    assert log_likelihood(of_probs(probs), label) == -np.inf


def test_of_yes_and_no() -> None:
    probs = np.array([0.1, 0.5, 0.8, 0.99])
    assert nll(of_yes(probs), [0, 1, 1, 0]) == pytest.approx(log_loss([0, 1, 1, 0], probs))


def test_of_numbers_is_the_mean_over_rows_of_the_joint_density() -> None:
    f, y = randn(3, 5, 2), randn(5, 2, seed=1)
    p = Predictive(f, Gaussian(noise=[0.4, 0.9]), weights=[0.2, 0.5, 0.3])
    each = stats.norm(f.numpy(), [0.4, 0.9]).pdf(y.numpy()).prod(2)  # [S, N]
    expected = np.log(np.array([0.2, 0.5, 0.3]) @ each)
    assert np.allclose(log_likelihood_each(p, y), expected)
    assert log_likelihood(p, y) == pytest.approx(expected.mean())


@pytest.mark.parametrize(
    ("likelihood", "density"),
    [
        (StudentT(df=3.0, scale=0.5), lambda f, y: stats.t(3.0, f, 0.5).pdf(y)),
        (Poisson(), lambda f, y: stats.poisson(np.exp(f)).pmf(y)),
    ],
    ids=["student-t", "poisson"],
)
def test_of_other_likelihoods(likelihood, density) -> None:  # type: ignore[no-untyped-def]
    f, y = randn(4, 6, 1), torch.arange(6.0).double()
    expected = np.log(density(f.numpy()[..., 0], y.numpy()).mean(0)).mean()
    assert log_likelihood(Predictive(f, likelihood), y) == pytest.approx(expected)


def test_of_label_maps_is_the_mean_over_pixels_that_count() -> None:
    f = randn(5, 2, 3, 4, 4)
    y = torch.randint(3, (2, 4, 4), generator=torch.Generator().manual_seed(2))
    y[0, :2] = -1
    p = Predictive(f, Categorical(ignore_index=-1), weights=[0.1, 0.2, 0.3, 0.2, 0.2])
    total = [
        np.log(float(p.probs[n, y[n, i, j], i, j]))
        for n in range(2)
        for i in range(4)
        for j in range(4)
        if y[n, i, j] >= 0
    ]
    assert len(total) == 24
    assert log_likelihood(p, y) == pytest.approx(np.mean(total))
    moments = Moments(p.likelihood)
    moments.update(f, weights=torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2]).double())
    assert log_likelihood(moments.result(), y) == pytest.approx(np.mean(total))


def test_ignored_rows_count_nothing() -> None:
    f, y = randn(3, 6, 4), torch.tensor([0, 9, 2, 9, 3, 1])
    p = Predictive(f, Categorical(ignore_index=9))
    kept = y != 9
    q = Predictive(f[:, kept], Categorical())
    assert log_likelihood(p, y) == pytest.approx(log_likelihood(q, y[kept]))
    with pytest.raises(DataError, match="every label is the ignored one"):
        log_likelihood(p, torch.full((6,), 9))


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_a_probability_that_rounds_to_nothing_still_has_a_logarithm(likelihood) -> None:  # type: ignore[no-untyped-def]
    """exp(-200) is 0 in float32, its logarithm is -200."""
    if isinstance(likelihood, Categorical):
        f = torch.tensor([200.0, 0.0]).reshape(1, 1, 2, 1, 1).expand(1, 1, 2, 2, 2)
    else:
        f = torch.full((1, 1, 2, 2), -200.0)
    assert log_likelihood(Predictive(f, likelihood), torch.ones(1, 2, 2)) == pytest.approx(-200.0)


def test_draws_without_weight_do_not_count() -> None:
    """Not even where they are undefined."""
    f, y = randn(2, 3, 4, 2, 2), torch.zeros(3, 2, 2)
    f[1] = torch.nan
    one = Predictive(f[:1], Categorical())
    assert log_likelihood(Predictive(f, Categorical(), weights=[1.0, 0.0]), y) == pytest.approx(
        log_likelihood(one, y)
    )


def test_sharpness() -> None:
    p = Predictive(randn(1, 4, 2), Gaussian(noise=[0.5, 1.5]))
    assert sharpness(p) == pytest.approx(1.0)
    probs, _ = TABLES["random"]
    assert sharpness(of_probs(probs)) == pytest.approx(probs.max(1).mean())
    assert sharpness(of_yes(np.array([0.1, 0.7]))) == pytest.approx(0.8)
    with pytest.raises(DataError, match="row 2"):
        sharpness(Predictive(torch.tensor([[0.0], [0.0], [float("nan")]])[None], Bernoulli()))
