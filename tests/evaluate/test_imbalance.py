"""Scores and decisions for rare classes, against scikit-learn and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as peer
from torch import Tensor

import doxa
from doxa.errors import DataError, ShapeError, Unavailable
from doxa.evaluate import (
    Streaming,
    average_precision,
    least_cost,
    metrics,
    rare_class,
    roc_auc,
    threshold,
)


def rows(classes: int, n: int = 300, seed: int = 0) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Probabilities with many ties [N, C], labels with a rare first class, and weights."""
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.ones(classes), n)
    probs = np.round(probs * 12 + 1)
    probs /= probs.sum(1, keepdims=True)
    share = np.r_[0.05, np.full(classes - 1, 0.95 / (classes - 1))]
    y = rng.choice(classes, n, p=share)
    weight = rng.integers(0, 4, n) / 2
    return torch.tensor(probs), y, weight


def bernoulli_of(yes: Tensor) -> doxa.Predictive:
    return doxa.Predictive(yes.logit().reshape(1, -1, 1), "bernoulli")


@pytest.mark.parametrize("weighted", [False, True])
def test_two_classes_against_scikit_learn(weighted: bool) -> None:
    probs, y, weight = rows(2)
    own = weight if weighted else None
    p = doxa.Predictive.from_probs(probs)
    for positive in (1, 0):
        truth, score = y == positive, np.round(probs[:, positive].numpy(), 12)
        auc = peer.roc_auc_score(truth, score, sample_weight=own)
        ap = peer.average_precision_score(truth, score, sample_weight=own)
        assert roc_auc(p, y, positive, own) == pytest.approx(auc, abs=1e-12)
        assert average_precision(p, y, positive, own) == pytest.approx(ap, abs=1e-12)
    assert roc_auc(p, y, None, own) == roc_auc(p, y, 0, own)  # the rarer one
    assert average_precision(p, y, None, own) == average_precision(p, y, 0, own)
    assert average_precision(p, 1 - y, None, own) == average_precision(p, 1 - y, 1, own)
    even = np.arange(len(y)) % 2
    assert average_precision(p, even) == average_precision(p, even, 1)
    bernoulli = bernoulli_of(probs[:, 1])
    assert roc_auc(bernoulli, y, None, own) == pytest.approx(roc_auc(p, y, None, own))


@pytest.mark.parametrize("weighted", [False, True])
def test_several_classes_against_scikit_learn(weighted: bool) -> None:
    probs, y, weight = rows(4)
    own = weight if weighted else None
    p = doxa.Predictive.from_probs(probs)
    score = np.round(probs.numpy(), 12)
    macro = [
        [f(y == k, score[:, k], sample_weight=own) for k in range(4)]
        for f in (peer.roc_auc_score, peer.average_precision_score)
    ]
    assert roc_auc(p, y, sample_weight=own) == pytest.approx(np.mean(macro[0]), abs=1e-12)
    assert average_precision(p, y, sample_weight=own) == pytest.approx(np.mean(macro[1]), abs=1e-12)
    some = y != 2  # a class that does not occur has no score
    found = roc_auc(doxa.Predictive.from_probs(probs[some]), y[some])
    each = [peer.roc_auc_score(y[some] == k, score[some, k]) for k in (0, 1, 3)]
    assert found == pytest.approx(np.mean(each), abs=1e-12)


def test_they_are_in_the_table_of_scores_batch_by_batch() -> None:
    for classes in (2, 3):
        probs, y, _ = rows(classes)
        p = doxa.Predictive.from_probs(probs)
        found, stream = metrics(p, y), Streaming()
        for start in range(0, len(y), 70):
            part = slice(start, start + 70)
            stream.update(doxa.Predictive.from_probs(probs[part]), y[part])
        for name, value in (
            ("roc_auc", roc_auc(p, y)),
            ("average_precision", average_precision(p, y)),
        ):
            assert found[name] == stream.result()[name] == pytest.approx(value, abs=1e-14)
    one = metrics(doxa.Predictive.from_probs(probs), np.zeros(len(y), dtype=int))
    assert "roc_auc" not in one and "average_precision" not in one
    sites = doxa.Predictive.from_probs(torch.full((1, 2, 2, 5), 0.5))
    assert "roc_auc" not in metrics(sites, torch.zeros(2, 5, dtype=torch.long))


def test_the_threshold_by_cost_is_the_best_one_for_calibrated_probabilities() -> None:
    """Labels that are drawn from the probabilities: with 200,000 rows the threshold a/(a + b) costs
    no more than any other, up to two standard errors of 0.005."""
    rng = np.random.default_rng(0)
    yes = rng.beta(0.4, 3.0, 200_000)
    y = (rng.random(len(yes)) < yes).astype(int)
    p = doxa.Predictive.from_probs(torch.tensor(np.c_[1 - yes, yes]))
    found = threshold(p, y, cost_false_positive=1, cost_false_negative=4)
    assert found.probability == pytest.approx(0.2)
    called = yes >= found.probability
    table = peer.confusion_matrix(y, called)
    assert torch.equal(found.confusion, torch.tensor(table).double())
    assert found.cost == pytest.approx((table[0, 1] + 4 * table[1, 0]) / len(y), abs=1e-12)
    assert found.precision == pytest.approx(peer.precision_score(y, called))
    assert found.recall == pytest.approx(peer.recall_score(y, called))
    searched = threshold(p, y, 1, 4, search=True)
    assert searched.cost <= found.cost < searched.cost + 0.01
    grid = np.linspace(0, 1, 201)
    best = min(np.mean(((yes >= t) & (y == 0)) + 4 * ((yes < t) & (y == 1))) for t in grid)
    assert searched.cost <= best + 1e-12


def test_weights_of_the_threshold_are_repeated_rows() -> None:
    probs, y, _ = rows(2, 60, seed=3)
    weight = np.random.default_rng(1).integers(0, 3, 60)
    many = np.repeat(np.arange(60), weight)
    p, repeated = (doxa.Predictive.from_probs(t) for t in (probs, probs[many]))
    for search in (False, True):
        one = threshold(p, y, 1, 3, sample_weight=weight, search=search)
        two = threshold(repeated, y[many], 1, 3, search=search)
        assert (one.probability, one.cost) == (two.probability, pytest.approx(two.cost))
        assert torch.equal(one.confusion, two.confusion)
    one, two = rare_class(p, y, sample_weight=weight), rare_class(repeated, y[many])
    assert (one.label, one.observed, one.expected) == (
        two.label,
        two.observed,
        pytest.approx(two.expected),
    )


def test_nothing_is_called_where_every_call_costs_too_much() -> None:
    p = doxa.Predictive.from_probs([[0.4, 0.6], [0.1, 0.9]])
    found = threshold(p, [1, 0], cost_false_positive=100, search=True)
    assert found.probability > 0.9 and found.recall == 0.0 and math.isnan(found.precision)


def test_decisions_of_several_classes_cost_least() -> None:
    """By enumeration; a third decision is to ask."""
    probs, _, _ = rows(3, 50)
    costs = np.array([[0, 1, 8, 0.4], [2, 0, 1, 0.4], [9, 3, 0, 0.4]])
    expected = (probs.numpy() @ costs).argmin(1)
    assert least_cost(doxa.Predictive.from_probs(probs), costs).tolist() == expected.tolist()
    yes = bernoulli_of(torch.tensor([0.1, 0.3]))
    assert least_cost(yes, [[0, 1], [4, 0]]).flatten().tolist() == [0, 1]


def test_the_rare_class_is_reliable_or_not() -> None:
    """Labels from the probabilities have |z| < 4 (once in 16,000); half of the probability of the
    rare class gives a z far beyond."""
    rng = np.random.default_rng(2)
    yes = rng.beta(0.5, 9.0, 5000)
    y = (rng.random(len(yes)) < yes).astype(int)
    right, less = (
        rare_class(doxa.Predictive.from_probs(torch.tensor(np.c_[1 - s, s])), y)
        for s in (yes, yes / 2)
    )
    assert right.label == 1 and right.observed == y.sum() and right.share == y.mean()
    assert right.expected == pytest.approx(yes.sum())
    assert right.error == pytest.approx(np.sqrt((yes * (1 - yes)).sum()))
    assert abs(right.z) < 4 < less.z
    assert less.average_precision == pytest.approx(right.average_precision)


def test_mistakes_are_named() -> None:
    p = doxa.Predictive.from_probs([[0.4, 0.6], [0.1, 0.9]])
    with pytest.raises(DataError, match="one class only"):
        roc_auc(p, [1, 1])
    with pytest.raises(DataError, match="no class 2"):
        average_precision(p, [0, 1], 2)
    with pytest.raises(DataError, match="costs must be positive"):
        threshold(p, [0, 1], cost_false_positive=0)
    with pytest.raises(ShapeError, match="3 weights for 2 labels"):
        roc_auc(p, [0, 1], sample_weight=[1, 1, 1])
    with pytest.raises(DataError, match="not negative"):
        roc_auc(p, [0, 1], sample_weight=[1, -1])
    with pytest.raises(ShapeError, match=r"\[2, decisions\]"):
        least_cost(p, [[0, 1, 2]])
    with pytest.raises(Unavailable, match="classification"):
        roc_auc(
            doxa.Predictive.from_samples(torch.zeros(2, 3, 1), doxa.Gaussian(noise=1)), [0, 1, 2]
        )
