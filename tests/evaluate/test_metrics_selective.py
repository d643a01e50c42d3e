"""Risk-coverage curves against loops over thresholds and orders."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from metric_cases import TABLES, of_probs, randn

from doxa.errors import DataError, ShapeError
from doxa.evaluate.scores import risk_coverage, risk_coverage_of
from doxa.likelihoods import HeteroscedasticGaussian
from doxa.predictive import Predictive


def loop(uncertainty: np.ndarray, loss: np.ndarray) -> tuple[list[float], list[float], float]:
    """Accept everything at or below each threshold in turn."""
    coverage, risk = [], []
    for threshold in sorted(set(uncertainty.tolist())):
        accepted = uncertainty <= threshold
        coverage.append(float(accepted.mean()))
        risk.append(float(loss[accepted].mean()))
    steps = np.diff([0.0, *coverage])
    return coverage, risk, float(steps @ np.array(risk))


@pytest.mark.parametrize("name", TABLES)
def test_classes_equal_a_loop_over_thresholds(name: str) -> None:
    probs, label = TABLES[name]
    p = of_probs(probs)
    loss = (probs.argmax(1) != label).astype(float)
    coverage, risk, area = loop(1 - probs.max(1), loss)
    found = risk_coverage(p, label)
    assert np.allclose(found.coverage, coverage, atol=1e-12)
    assert np.allclose(found.risk, risk, atol=1e-12)
    assert found.area == pytest.approx(area, abs=1e-12)
    assert float(found.risk[-1]) == pytest.approx(loss.mean())
    assert float(found.coverage[-1]) == 1.0


def test_numbers_are_ordered_by_variance() -> None:
    f, y = randn(4, 30, 4), randn(30, 2, seed=1)
    p = Predictive(f, HeteroscedasticGaussian())
    loss = (y - p.mean).square().flatten().numpy()
    _, _, area = loop(p.variance.flatten().numpy(), loss)
    assert risk_coverage(p, y).area == pytest.approx(area)
    _, _, other = loop(p.epistemic.flatten().numpy(), loss)
    assert risk_coverage(p, y, p.epistemic).area == pytest.approx(other)
    assert risk_coverage(p, y, torch.as_tensor(loss)).excess == 0.0


@settings(max_examples=30, deadline=None)
@given(loss=st.lists(st.integers(0, 4), min_size=1, max_size=6), ranks=st.lists(st.integers(0, 3)))
def test_excess_is_over_the_best_of_all_orders(loss: list[int], ranks: list[int]) -> None:
    ranks = (ranks + [1] * len(loss))[: len(loss)]
    found = risk_coverage_of(torch.tensor(ranks), torch.tensor(loss).double())
    best = min(
        np.mean(np.cumsum(order) / np.arange(1, len(loss) + 1)) for order in permutations(loss)
    )
    assert found.excess == pytest.approx(found.area - best, abs=1e-12)
    assert found.excess >= 0.0


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999))
def test_order_of_rows_and_monotone_changes_do_not_matter(seed: int) -> None:
    source = np.random.default_rng(seed)
    uncertainty, loss = source.integers(5, size=40), source.uniform(size=40)
    rows = source.permutation(40)
    first = risk_coverage_of(torch.as_tensor(uncertainty), torch.as_tensor(loss))
    second = risk_coverage_of(
        torch.as_tensor(np.exp(uncertainty[rows])), torch.as_tensor(loss[rows])
    )
    assert first.area == pytest.approx(second.area, abs=1e-12)
    assert torch.allclose(first.risk, second.risk)
    assert len(first.risk) == len(set(uncertainty.tolist()))


def test_all_equally_certain_is_one_point() -> None:
    found = risk_coverage_of(torch.zeros(10), torch.arange(10.0))
    assert found.coverage.tolist() == [1.0]
    assert found.risk.tolist() == [4.5]
    assert found.area == 4.5


def test_what_cannot_be_asked() -> None:
    with pytest.raises(ShapeError, match="one for each"):
        risk_coverage_of(torch.zeros(3), torch.zeros(2))
    with pytest.raises(DataError, match="no losses"):
        risk_coverage_of(torch.zeros(0), torch.zeros(0))
    with pytest.raises(DataError, match="uncertainty at row 1 is nan"):
        risk_coverage_of(torch.tensor([0.0, torch.nan]), torch.zeros(2))
