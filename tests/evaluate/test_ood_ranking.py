"""Ranking metrics equal scikit-learn's, ties and all."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from doxa.errors import DataError, MethodError, ShapeError
from doxa.evaluate.ood import aupr, auroc, fpr95, ood_metrics

# whole numbers, so that ties are common, and small sizes, so that single rows are too
scores = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=40)


def peer(inside: list[float], outside: list[float]) -> dict[str, float]:
    labels = np.r_[np.zeros(len(inside)), np.ones(len(outside))]
    both = np.r_[inside, outside]
    fpr, tpr, _ = roc_curve(1 - labels, -both, drop_intermediate=False)
    return {
        "auroc": roc_auc_score(labels, both),
        "aupr_out": average_precision_score(labels, both),
        "aupr_in": average_precision_score(1 - labels, -both),
        "fpr95": fpr[tpr >= 0.95 - 1e-12].min(),
    }


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(scores, scores)
def test_ties_and_single_rows_as_in_scikit_learn(inside: list[float], outside: list[float]) -> None:
    assert ood_metrics(inside, outside) == pytest.approx(peer(inside, outside), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_random_scores_as_in_scikit_learn(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    inside = torch.tensor(rng.normal(size=3001), dtype=dtype)
    outside = torch.tensor(rng.normal(1.0, 2.0, size=997), dtype=dtype)
    expected = peer(inside.double().tolist(), outside.double().tolist())
    assert ood_metrics(inside, outside) == pytest.approx(expected, abs=1e-12)


def test_auroc_is_the_share_of_pairs_in_order() -> None:
    inside, outside = [0.0, 1.0, 1.0, 3.0], [1.0, 2.0, 3.0]
    pairs = [(t > s) + 0.5 * (t == s) for s in inside for t in outside]
    assert auroc(inside, outside) == sum(pairs) / 12


@settings(max_examples=60, deadline=None)
@given(scores, scores)
def test_only_the_order_counts(inside: list[float], outside: list[float]) -> None:
    bent = [[math.atan(s) * 7 - 3 for s in side] for side in (inside, outside)]
    assert ood_metrics(*bent) == ood_metrics(inside, outside)
    assert auroc(outside, inside) == pytest.approx(1 - auroc(inside, outside), abs=1e-15)


def test_perfect_worst_and_constant() -> None:
    low, high = torch.arange(50.0), torch.arange(100.0, 120.0)
    assert ood_metrics(low, high) == {"auroc": 1, "aupr_out": 1, "aupr_in": 1, "fpr95": 0}
    worst = ood_metrics(high, low)
    assert worst["auroc"] == 0 and worst["fpr95"] == 1
    same = ood_metrics(torch.ones(30), torch.ones(10))
    assert same == {"auroc": 0.5, "aupr_out": 0.25, "aupr_in": 0.75, "fpr95": 1.0}


def test_95_percent_of_twenty_is_nineteen() -> None:
    inside = torch.arange(1.0, 21.0)
    assert fpr95(inside, torch.tensor([19.0, 19.5, 20.0])) == pytest.approx(1 / 3)


def test_infinite_scores_rank_last() -> None:
    assert auroc([0.0, -math.inf], [1.0, math.inf]) == 1.0


@pytest.mark.parametrize(
    ("inside", "outside", "error", "words"),
    [
        ([], [1.0], DataError, "inside is empty"),
        ([1.0], [], DataError, "outside is empty"),
        ([1.0], [0.0, math.nan], DataError, "outside: the score of row 1 is NaN"),
        ([[1.0]], [0.0], ShapeError, "one score per row"),
    ],
)
def test_bad_scores_are_refused(inside: list, outside: list, error: type, words: str) -> None:
    for metric in (auroc, aupr, fpr95):
        with pytest.raises(error, match=words):
            metric(inside, outside)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(MethodError, match="positive"):
        aupr([1.0], [2.0], positive="both")
    with pytest.raises(MethodError, match="level"):
        fpr95([1.0], [2.0], level=0.0)
