"""Accuracy, Brier score and its parts, confusion matrix against scikit-learn and loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from metric_cases import TABLES, of_probs, of_yes, randn
from sklearn.metrics import (
    accuracy_score,
    brier_score_loss,
    confusion_matrix,
    top_k_accuracy_score,
)

from doxa.errors import DataError
from doxa.evaluate.calibration import ece
from doxa.evaluate.scores import (
    accuracy,
    brier,
    brier_decomposition,
    confusion,
    log_likelihood,
    top_k_accuracy,
)
from doxa.likelihoods import Bernoulli, Categorical
from doxa.predictive import Predictive

every = pytest.mark.parametrize("name", TABLES)


@every
def test_equal_to_scikit_learn(name: str) -> None:
    probs, label = TABLES[name]
    p, classes = of_probs(probs), np.arange(probs.shape[1])
    top = probs.argmax(1)
    assert accuracy(p, label) == pytest.approx(accuracy_score(label, top), abs=1e-12)
    assert np.array_equal(confusion(p, label), confusion_matrix(label, top, labels=classes))
    summed = np.mean(np.sum((probs - np.eye(len(classes))[label]) ** 2, 1))
    assert brier(p, label) == pytest.approx(summed, abs=1e-12)
    if len(classes) > 2:
        theirs = brier_score_loss(label, probs, labels=classes, scale_by_half=False)
        assert brier(p, label) == pytest.approx(theirs, abs=1e-12)


def test_binary_brier_is_that_of_one_event() -> None:
    probs, label = np.array([0.1, 0.6, 1.0, 0.0, 0.5]), np.array([0, 1, 1, 1, 0])
    assert brier(of_yes(probs), label) == pytest.approx(brier_score_loss(label, probs))
    two = np.stack([1 - probs, probs], 1)
    assert brier(of_probs(two), label) == pytest.approx(2 * brier_score_loss(label, probs))


def test_perfect_and_worst() -> None:
    assert accuracy(of_probs(TABLES["perfect"][0]), TABLES["perfect"][1]) == 1.0
    assert brier(of_probs(TABLES["perfect"][0]), TABLES["perfect"][1]) == 0.0
    assert accuracy(of_probs(TABLES["worst"][0]), TABLES["worst"][1]) == 0.0
    assert brier(of_probs(TABLES["worst"][0]), TABLES["worst"][1]) == 2.0
    assert brier(of_yes(np.array([0.0, 1.0])), [1, 0]) == 1.0


@pytest.mark.parametrize("k", [1, 2, 3])
def test_top_k(k: int) -> None:
    probs, label = TABLES["random"]
    theirs = top_k_accuracy_score(label, probs, k=k, labels=np.arange(4))
    assert top_k_accuracy(of_probs(probs), label, k) == pytest.approx(theirs)


def test_top_k_takes_exactly_k_of_equals() -> None:
    p, label = of_probs(np.full((4, 4), 0.25)), [0, 1, 2, 3]
    assert [top_k_accuracy(p, label, k) for k in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
    for k in (0, 5):
        with pytest.raises(DataError, match="1 to 4"):
            top_k_accuracy(p, label, k)


def murphy(prob: np.ndarray, came: np.ndarray, bins: int) -> np.ndarray:
    """The five parts of one event by loops over bins and rows."""
    where = np.maximum(np.ceil(prob * bins - 1e-12).astype(int) - 1, 0)
    parts, n, base = np.zeros(5), len(prob), came.mean()
    for k in range(bins):
        inside = where == k
        if not inside.any():
            continue
        p_k, o_k = prob[inside].mean(), came[inside].mean()
        parts[0] += inside.sum() * (p_k - o_k) ** 2
        parts[1] += inside.sum() * (o_k - base) ** 2
        for prob_l, came_l in zip(prob[inside], came[inside], strict=True):
            parts[3] += (prob_l - p_k) ** 2
            parts[4] += 2 * (prob_l - p_k) * (came_l - o_k)
    parts /= n
    parts[2] = base * (1 - base)
    return parts


@every
def test_decomposition_equals_loops_and_adds_up(name: str) -> None:
    probs, label = TABLES[name]
    p = of_probs(probs)
    parts = brier_decomposition(p, label, bins=10)
    came = np.eye(probs.shape[1])[label]
    expected = sum(murphy(probs[:, c], came[:, c], 10) for c in range(probs.shape[1]))
    found = [
        parts.reliability,
        parts.resolution,
        parts.uncertainty,
        parts.within_variance,
        parts.within_covariance,
    ]
    assert np.allclose(found, expected, atol=1e-10)
    assert parts.brier == pytest.approx(brier(p, label), abs=1e-12)


def test_decomposition_of_yes_and_no_and_its_limits() -> None:
    probs, label = np.array([0.2, 0.2, 0.8, 0.8, 0.8]), np.array([0, 1, 1, 1, 0])
    parts = brier_decomposition(of_yes(probs), label)
    assert parts.brier == pytest.approx(np.mean((probs - label) ** 2))
    assert parts.within_variance == pytest.approx(0, abs=1e-15)  # one probability a bin
    assert parts.uncertainty == pytest.approx(0.24)
    always = brier_decomposition(of_yes(np.full(5, 0.6)), label)
    assert always.reliability == pytest.approx(0)
    assert always.resolution == pytest.approx(0)
    perfect = brier_decomposition(of_probs(TABLES["perfect"][0]), TABLES["perfect"][1])
    assert perfect.resolution == pytest.approx(perfect.uncertainty)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999))
def test_order_of_rows_and_names_of_classes_do_not_matter(seed: int) -> None:
    source = np.random.default_rng(seed)
    probs, label = TABLES["ties"] if seed % 2 else TABLES["random"]
    rows, classes = source.permutation(len(label)), source.permutation(4)
    moved, renamed = probs[rows][:, classes], np.argsort(classes)[label[rows]]
    p, q = of_probs(probs), of_probs(moved)
    for metric in (accuracy, brier, log_likelihood, ece):
        assert metric(q, renamed) == pytest.approx(metric(p, label), abs=1e-10)
    for kind in ("adaptive", "class-wise", "adaptive-class-wise", "debiased", "kde"):
        assert ece(q, renamed, kind) == pytest.approx(ece(p, label, kind), abs=1e-10)
    assert torch.equal(confusion(q, renamed), confusion(p, label)[classes][:, classes])


def test_sites_are_rows_and_ignored_labels_are_not_there() -> None:
    f = randn(3, 2, 4, 3, 3)
    y = torch.randint(4, (2, 3, 3), generator=torch.Generator().manual_seed(1))
    y[1, 0] = -1
    p = Predictive(f, Categorical(ignore_index=-1))
    kept = y != -1
    q = Predictive(f.movedim(2, -1)[:, kept], Categorical())
    for metric in (accuracy, brier, ece, log_likelihood):
        assert metric(p, y) == pytest.approx(metric(q, y[kept]), abs=1e-12)
    assert int(confusion(p, y).sum()) == int(kept.sum())
    with pytest.raises(DataError, match="every label is the ignored one"):
        accuracy(p, torch.full_like(y, -1))


def test_several_yes_and_no_a_row() -> None:
    f = randn(1, 5, 3)
    y = (randn(5, 3, seed=1) > 0).double()
    p = Predictive(f, Bernoulli())
    assert brier(p, y) == pytest.approx(float((p.probs - y).square().mean()))
    assert accuracy(p, y) == pytest.approx(float(((p.probs > 0.5) == (y > 0.5)).double().mean()))


def test_what_cannot_be_scored() -> None:
    nan = Predictive(torch.tensor([[0.0, 1.0], [torch.nan, 0.0]])[None], Categorical())
    for metric in (accuracy, brier, ece, brier_decomposition, confusion, log_likelihood):
        with pytest.raises(DataError, match="row 1 is nan"):
            metric(nan, [0, 0])
        with pytest.raises(DataError, match="nothing to score"):
            metric(Predictive(torch.zeros(1, 0, 2), Categorical()), torch.zeros(0))
        with pytest.raises(DataError, match="not a class"):
            metric(of_probs(np.array([[0.5, 0.5]])), [2])
    with pytest.raises(DataError, match="not a distribution"):
        of_probs(np.array([[0.5, 0.6]]))


class _Unnormalised(Predictive):
    @property
    def probs(self) -> torch.Tensor:
        return 2.0 * super().probs


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_probabilities_of_any_origin_must_sum_to_one(likelihood: Categorical | Bernoulli) -> None:
    p = _Unnormalised(torch.ones(1, 3, 2), likelihood)
    y = torch.zeros(3) if isinstance(likelihood, Categorical) else torch.zeros(3, 2)
    for metric in (accuracy, brier, ece):
        with pytest.raises(DataError, match="label 0 are no distribution"):
            metric(p, y)
