"""The posterior over models, and the average over it."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import softmax
from torch import Tensor

import doxa
from doxa.errors import MethodError, Unavailable
from doxa.exact import model_average, posterior_over_models

ORDERS = list(range(7))
log = logging.getLogger(__name__)


def quadratic(seed: int, n: int = 50) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(n, 1))
    y = 1.0 - 0.8 * x + 0.9 * x**2 + 0.5 * rng.normal(size=(n, 1))
    return torch.from_numpy(x), torch.from_numpy(y)


def orders(data: tuple[Tensor, Tensor]) -> doxa.Sweep:
    method = doxa.BayesianLinear("polynomial", prior_std=1.0)
    sweep: doxa.Sweep = doxa.fit(None, data, method, runs=doxa.Runs(grid={"degree": ORDERS}))
    return sweep


@pytest.mark.slow
def test_data_of_order_two_is_recognised() -> None:
    """Over k = 0 … 6 and 20 seeds, k = 2 has the most mass, and more than half of it."""
    mass = torch.stack([posterior_over_models(orders(quadratic(s))) for s in range(20)])
    first = (mass.argmax(1) == 2).double().mean()
    majority = (mass[:, 2] > 0.5).double().mean()
    log.info("k=2 first %.2f, a majority %.2f, mass %.3f", first, majority, mass[:, 2].mean())
    assert first == 1.0
    assert majority >= 0.9
    assert mass[:, 2].mean() > 0.7


def test_probabilities_are_bayes_rule() -> None:
    sweep = orders(quadratic(0))
    logs = np.array([posterior.log_evidence for posterior in sweep])
    assert np.allclose(posterior_over_models(sweep), softmax(logs))
    prior = np.array([4.0, 1, 1, 1, 1, 1, 1])
    weighted = posterior_over_models(sweep, prior)
    assert np.allclose(weighted, softmax(logs + np.log(prior)))


def test_the_average_is_the_mixture(tmp_path: Path) -> None:
    x, y = quadratic(1)
    sweep = orders((x, y))
    weights = posterior_over_models(sweep)
    average = model_average(sweep)
    p, parts = average.predict(x), [posterior.predict(x) for posterior in sweep]
    means = torch.stack([part.mean for part in parts])
    w = weights[:, None, None]
    mean = (w * means).sum(0)
    variance = (w * torch.stack([part.variance for part in parts])).sum(0)
    variance = variance + (w * (means - mean).square()).sum(0)
    density = torch.stack([part.log_prob(y) for part in parts])
    assert torch.allclose(p.mean, mean)
    assert torch.allclose(p.variance, variance)
    assert torch.allclose(p.log_prob(y), torch.logsumexp(density + weights.log()[:, None], 0))
    assert average.functions(x, 11).shape == (11, 50, 1)
    average.save(tmp_path / "run")
    assert torch.equal(doxa.load(tmp_path / "run").predict(x).mean, p.mean)


def test_conditioning_the_average_is_averaging_the_conditioned() -> None:
    x, y = quadratic(2, 60)

    def each(rows: slice) -> list[doxa.Posterior]:
        methods = [
            doxa.BayesianLinear("polynomial", degree=k, prior_std=1.0, noise=0.5) for k in range(4)
        ]
        return [doxa.fit(None, (x[rows], y[rows]), method) for method in methods]

    later = model_average(each(slice(0, 30))).condition(x[30:], y[30:])
    whole = posterior_over_models(each(slice(0, 60)))
    assert torch.allclose(later.weights, whole, rtol=1e-8)


def test_what_cannot_be_compared() -> None:
    x, y = quadratic(0)
    with pytest.raises(MethodError, match="no models"):
        posterior_over_models([])
    unknown = doxa.fit(doxa.nets.mlp(1, 1, (4,)), (x.float(), y.float()), "map", steps=2)
    with pytest.raises(Unavailable, match="no evidence"):
        posterior_over_models([unknown])
    fits = [doxa.fit(None, (x[:n], y[:n]), "linear") for n in (20, 30)]
    with pytest.raises(MethodError, match="different numbers of rows"):
        posterior_over_models(fits)
    with pytest.raises(MethodError, match="prior must be"):
        posterior_over_models(fits[:1], [1.0, 2.0])
