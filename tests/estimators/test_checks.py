"""scikit-learn's own checks of an estimator: every one, on both, without exceptions.

Quick ones on a tiny network; slow ones at the defaults, and with methods of other families.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sklearn.utils.estimator_checks import check_estimator, parametrize_with_checks

from doxa.sklearn import BayesianClassifier, BayesianRegressor

TINY = {"hidden": (8,), "members": 2, "steps": 30, "lr": 0.05}
BOTH = (BayesianRegressor, BayesianClassifier)


@parametrize_with_checks([estimator(**TINY) for estimator in BOTH])
def test_tiny(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


def all_pass(estimator: Any) -> None:
    """None fails; one is skipped where scipy's own support of other arrays is off."""
    done = check_estimator(estimator, on_skip=None, on_fail="raise")
    assert len(done) > 55
    ended = {row["check_name"]: row["status"] for row in done}
    assert {name for name, status in ended.items() if status != "passed"} <= {
        "check_array_api_input"
    }


@pytest.mark.slow
@pytest.mark.parametrize("estimator", BOTH)
def test_as_they_come(estimator: Any) -> None:
    all_pass(estimator())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["map", "laplace", "mean-field", "mc-dropout"])
@pytest.mark.parametrize("estimator", BOTH)
def test_other_methods(estimator: Any, method: str) -> None:
    all_pass(estimator(method, hidden=(8,), steps=200, lr=0.05))
