"""Scores against their formulas, and on fitted posteriors: far points are stranger than near."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, softmax
from scipy.stats import entropy as scipy_entropy
from torch import nn

import doxa
from doxa.data import simulated
from doxa.errors import DataError, MethodError, Unavailable
from doxa.evaluate import ood
from doxa.evaluate.ood import FeatureDensity, auroc, ood_scores
from doxa.evaluate.ood import features as features_of
from doxa.evaluate.shifts import sweep

CLASS_SCORES = ["msp", "entropy", "mutual_information", "energy"]
ALL_SCORES = [*CLASS_SCORES, "mahalanobis", "density", "knn"]


def predictive(
    dtype: torch.dtype = torch.float64,
) -> tuple[np.ndarray, np.ndarray, doxa.Predictive]:
    rng = np.random.default_rng(1)
    logits, weights = 2 * rng.normal(size=(5, 8, 4)), rng.dirichlet(np.ones(5))
    p = doxa.Predictive(torch.tensor(logits, dtype=dtype), "categorical", weights=weights)
    return logits, weights, p


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_of_weighted_draws(dtype: torch.dtype) -> None:
    logits, weights, p = predictive(dtype)
    each = softmax(logits, -1)
    mean = np.einsum("s,snc->nc", weights, each)
    expected = {
        "msp": 1 - mean.max(1),
        "entropy": scipy_entropy(mean, axis=1),
        "mutual_information": scipy_entropy(mean, axis=1) - weights @ scipy_entropy(each, axis=2),
        "energy": -weights @ logsumexp(logits, axis=2),
    }
    for name, value in expected.items():
        got = ood.PREDICTIVE_SCORES[name](p)
        np.testing.assert_allclose(
            got.numpy(), value, rtol=2e-5 if dtype == torch.float32 else 1e-10
        )


def test_energy_sees_the_size_of_logits_and_probabilities_do_not() -> None:
    logits, _, p = predictive()
    larger = doxa.Predictive(torch.tensor(logits) + 3.0, "categorical", weights=p.weights)
    torch.testing.assert_close(ood.energy(larger), ood.energy(p) - 3.0)
    torch.testing.assert_close(ood.entropy(larger), ood.entropy(p))


def test_probabilities_have_no_energy() -> None:
    probs = torch.tensor([[0.2, 0.8], [0.5, 0.5]])
    with pytest.raises(Unavailable, match="log probabilities"):
        ood.energy(doxa.Predictive.from_probs(probs))


def test_variances_are_for_regression_and_entropies_for_classes() -> None:
    f = torch.tensor([[[0.0], [1.0]], [[2.0], [1.0]]])
    p = doxa.Predictive(f, doxa.Gaussian(noise=0.5))
    assert ood.epistemic(p).tolist() == [1.0, 0.0]
    assert ood.variance(p).tolist() == [1.25, 0.25]
    for score in (ood.entropy, ood.mutual_information, ood.energy, ood.msp):
        with pytest.raises(Unavailable):
            score(p)
    for score in (ood.epistemic, ood.variance):
        with pytest.raises(Unavailable, match="for regression"):
            score(predictive()[2])


def test_places_of_an_image_are_averaged() -> None:
    f = torch.randn(3, 2, 5, 4, 6, generator=torch.Generator().manual_seed(0))
    p = doxa.Predictive(f, "categorical")
    assert ood.entropy(p).shape == (2,)
    torch.testing.assert_close(ood.entropy(p), p.entropy.mean((1, 2)))
    torch.testing.assert_close(ood.energy(p), -f.logsumexp(2).mean((0, 2, 3)))


@pytest.fixture(scope="module")
def moons() -> tuple[doxa.Posterior, torch.Tensor, torch.Tensor]:
    points = simulated.two_moons(200, seed=0)
    x, y = torch.tensor(points.x, dtype=torch.float32), torch.tensor(points.y)
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
    method = doxa.HMC(draws=60, burn_in=100, leapfrog=20)
    return doxa.fit(net, (x, y), method, likelihood="categorical", members=4), x, y


def far_points(n: int = 100) -> torch.Tensor:
    """On a circle of radius 8: far from the moons in every direction."""
    angle = torch.arange(n) * (2 * math.pi / n)
    return 8.0 * torch.stack([angle.cos(), angle.sin()], 1)


@pytest.mark.slow
def test_far_points_are_stranger_than_near_ones(moons) -> None:
    posterior, x, y = moons
    near = torch.tensor(simulated.two_moons(100, seed=1).x, dtype=torch.float32)
    inside = ood_scores(posterior, near, train=(x, y))
    outside = ood_scores(posterior, far_points(), train=(x, y))
    assert list(inside) == ALL_SCORES == list(outside)
    ranks = {name: auroc(inside[name], outside[name]) for name in inside}
    assert ranks["mahalanobis"] > 0.99 and ranks["density"] > 0.99
    assert ranks["mutual_information"] > 0.8 and ranks["knn"] > 0.7
    # near points on the boundary are as doubtful as far ones, which only the split tells apart
    assert 0.6 < ranks["entropy"] < ranks["mutual_information"]
    # each ReLU network's logits grow with the distance (Hein et al. 2019): energy is fooled
    assert ranks["energy"] < 0.1


def test_a_regression_posterior_gives_variances() -> None:
    points = simulated.gap_regression(80)
    posterior = doxa.fit(None, (points.x, points.y), "gp", standardize=True)
    inside = ood_scores(posterior, points.x, train=(points.x, points.y))
    outside = ood_scores(posterior, np.linspace(8, 12, 20)[:, None], train=(points.x, points.y))
    assert list(inside) == ["epistemic", "variance"]  # a process has no features
    assert auroc(inside["epistemic"], outside["epistemic"]) == 1.0
    with pytest.raises(Unavailable, match="features"):
        ood_scores(posterior, points.x, train=(points.x, points.y), scores=["knn"])


@pytest.mark.slow
def test_one_gaussian_over_the_features_of_a_regression_net() -> None:
    points = simulated.gap_regression(80)
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    posterior = doxa.fit(net, (points.x, points.y), "map", steps=200)
    found = ood_scores(posterior, points.x, train=(points.x, points.y))
    assert list(found) == ["epistemic", "variance", "mahalanobis", "density", "knn"]
    z = features_of(posterior, points.x)
    torch.testing.assert_close(found["mahalanobis"], FeatureDensity(z).mahalanobis(z))


@pytest.mark.parametrize("method", ["mc-dropout", "mean-field"])
def test_blocks_of_rows_see_the_same_functions(moons, method: str) -> None:
    _, x, y = moons
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    posterior = doxa.fit(net, (x, y), method, likelihood="categorical", steps=50)
    whole = ood_scores(posterior, x, train=(x, y), n=20)
    parts = ood_scores(posterior, x, train=(x, y), n=20, batch=33)
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-4, atol=1e-5)


def test_a_fitted_density_is_used_again(moons) -> None:
    posterior, x, y = moons
    density = FeatureDensity.of(posterior, (x, y), k=3)
    found = ood_scores(posterior, far_points(), train=density)
    torch.testing.assert_close(found["knn"], density.knn(features_of(posterior, far_points())))
    default = ood_scores(posterior, far_points(), train=(x, y))
    assert not torch.equal(default["knn"], found["knn"])


def test_asked_for_by_name(moons) -> None:
    posterior, x, y = moons
    assert list(ood_scores(posterior, x)) == CLASS_SCORES
    assert list(ood_scores(posterior, x, (x, y), ["knn", "msp"])) == ["knn", "msp"]
    with pytest.raises(MethodError, match="did you mean 'entropy'"):
        ood_scores(posterior, x, scores=["entropie"])
    with pytest.raises(MethodError, match=r"train=\(x, y\)"):
        ood_scores(posterior, x, scores=["knn"])
    with pytest.raises(Unavailable, match="for regression"):
        ood_scores(posterior, x, scores=["variance"])
    with pytest.raises(MethodError, match="empty"):
        ood_scores(posterior, x, scores=[])
    with pytest.raises(DataError, match="no rows"):
        ood_scores(posterior, x[:0])


def test_predictions_that_are_not_finite_are_refused(moons) -> None:
    x = moons[1]

    class Broken:
        def read(self, x):
            return x

        def predict(self, x, n=None, seed=None):
            f = torch.zeros(1, len(x), 2)
            f[0, 1] = math.nan
            return doxa.Predictive(f, "categorical")

    with pytest.raises(DataError, match="of row 1"):
        ood_scores(Broken(), x)


def test_a_sweep_of_ones_own_shift_loses_accuracy_and_gains_doubt(moons) -> None:
    posterior, _, _ = moons
    points = simulated.two_moons(200, seed=1)
    x, y = torch.tensor(points.x, dtype=torch.float32), points.y
    table = sweep(posterior, x, y, lambda x, level: x + torch.tensor([0.0, level]), [0.0, 0.4, 0.8])
    assert [row["level"] for row in table] == [0.0, 0.4, 0.8]
    plain = posterior.predict(x)
    assert table[0]["entropy"] == pytest.approx(float(plain.entropy.mean()), rel=1e-5)
    assert table[0]["accuracy"] == pytest.approx(float((plain.probs.argmax(1).numpy() == y).mean()))
    assert table[2]["accuracy"] < table[0]["accuracy"] - 0.1
    assert table[2]["mutual_information"] > table[0]["mutual_information"]
    with pytest.raises(DataError, match="levels"):
        sweep(posterior, x, y, lambda x, level: x)


def test_a_sweep_over_images_follows_the_severities() -> None:
    source = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 2
    x = 0.2 * torch.rand(60, 1, 8, 8, generator=source)
    x[y == 1, :, :4] += 0.7  # bright above, or not
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2))
    posterior = doxa.fit(net, (x - 0.5, y), "deep-ensemble", likelihood="categorical", steps=150)
    table = sweep(posterior, x, y, "rotation", prepare=lambda images: images - 0.5)
    assert [row["level"] for row in table] == [0.0, 15.0, 30.0, 45.0, 60.0, 90.0]
    assert table[0]["accuracy"] == 1.0 and table[0]["entropy"] < table[-1]["entropy"]
