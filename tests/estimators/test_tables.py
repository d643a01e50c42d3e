"""DataFrames, faults in them, and scikit-learn's tools around an estimator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV, CalibrationDisplay
from sklearn.compose import ColumnTransformer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

import doxa
from doxa.errors import DataError
from doxa.sklearn import BayesianClassifier, BayesianRegressor

FAST: dict[str, Any] = {"method": "map", "steps": 10, "hidden": (8,)}


def frame(rows: int = 60) -> tuple[pd.DataFrame, Any]:
    generator = np.random.default_rng(0)
    X = pd.DataFrame(generator.normal(size=(rows, 3)), columns=["age", "height", "weight"])
    return X, X["age"].to_numpy() - 2 * X["weight"].to_numpy()


@pytest.fixture(scope="module")
def named() -> BayesianRegressor:
    return BayesianRegressor(column_order="any", **FAST).fit(*frame())


def test_columns_in_another_order(named: BayesianRegressor) -> None:
    X, y = frame()
    other = X[["weight", "age", "height"]]
    assert named.feature_names_in_.tolist() == ["age", "height", "weight"]
    assert np.array_equal(named.predict(other), named.predict(X))
    assert np.array_equal(named.predict_interval(other)[0], named.predict_interval(X)[0])
    strict = clone(named).set_params(column_order="fixed").fit(X, y)
    with pytest.raises(DataError, match=r"same order as they were in fit\.\ncolumn_order='any'"):
        strict.predict(other)


def test_missing_and_extra_columns_are_named(named: BayesianRegressor) -> None:
    X, _ = frame()
    with pytest.raises(DataError, match="yet now missing:\n- height"):
        named.predict(X.drop(columns="height"))
    with pytest.raises(DataError, match="unseen at fit time:\n- shoe"):
        named.predict(X.assign(shoe=1.0))
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        named.predict(X.to_numpy())


def test_text_and_dates_are_encoded_and_arrays_of_text_are_refused() -> None:
    X, y = frame()
    mixed = X.assign(town=["Ulm", "Bonn"] * 30, code="7", size=pd.Categorical(["S", "L"] * 30))
    own = BayesianRegressor(**FAST).fit(mixed, y)
    assert [each["name"] for each in own.columns_] == ["age", "height", "weight", "town", "size"]
    assert own.posterior_.inputs == [7]
    with pytest.raises(DataError, match="text in column 0"):
        BayesianRegressor(**FAST).fit(np.array([["a", "1"]] * 60), y)
    born = pd.date_range("2020-02-02", periods=60)
    dated = BayesianRegressor(**FAST).fit(X.assign(born=born), y)
    assert dated.columns_[-1]["parts"] == ("day", "month", "weekday")
    encode = ColumnTransformer(
        [("text", OneHotEncoder(), ["town", "size"])], remainder="passthrough"
    )
    piped = make_pipeline(encode, BayesianRegressor(**FAST)).fit(mixed, y)
    assert piped.predict(mixed).shape == (60,)


def test_missing_values_have_a_place(named: BayesianRegressor) -> None:
    X, y = frame()
    holed = X.copy()
    holed.loc[7, "height"] = np.nan
    with pytest.raises(DataError, match=r"NaN(.|\n)*first is at row 7, column 'height'"):
        BayesianRegressor(**FAST).fit(holed, y)
    with pytest.raises(DataError, match=r"NaN(.|\n)*first is at row 7, column 'height'"):
        named.predict(holed)
    with pytest.raises(DataError, match=r"y contains infinity(.|\n)*first is at row 3 "):
        BayesianRegressor(**FAST).fit(X, np.where(np.arange(60) == 3, np.inf, y))
    with pytest.raises(DataError, match="every sample_weight is zero"):
        BayesianRegressor(**FAST).fit(X, y, sample_weight=np.zeros(60))
    with pytest.raises(DataError, match="sample_weight has shape"):
        BayesianRegressor(**FAST).fit(X, y, sample_weight=[1.0, 2.0])
    with pytest.raises(DataError, match=r"sample_weight is -1\.0 at row 0"):
        BayesianRegressor(**FAST).fit(X, y, sample_weight=-np.ones(60))


def test_one_class_only() -> None:
    X, y = frame()
    labels = np.where(y > 0, "a", "b")
    with pytest.raises(DataError, match="one class only"):
        BayesianClassifier(**FAST).fit(X, np.array(["a"] * 60))
    with pytest.raises(DataError, match=r"one class only \('b'\), in rows of positive weight"):
        BayesianClassifier(**FAST).fit(X, labels, sample_weight=labels == "b")


def test_targets_that_cannot_be() -> None:
    X, y = frame()
    labels = np.where(y > 0, "a", "b")
    for text in (labels, labels.astype(object)):
        with pytest.raises(DataError, match=r"y holds .*for labels there is BayesianClassifier"):
            BayesianRegressor(**FAST).fit(X, text)
    with pytest.raises(DataError, match=r"continuous.*there is BayesianRegressor"):
        BayesianClassifier(**FAST).fit(X, y)
    with pytest.raises(DataError, match=r"several types \(NoneType, str\)"):
        BayesianClassifier(**FAST).fit(X, np.where(np.arange(60) == 4, None, labels))
    counts = np.where(np.arange(61) == 60, -1.0, 2.0)  # the last row, after a copy of the first
    copied = pd.concat([X, X[:1]])
    with pytest.raises(DataError, match="target at row 60"):
        BayesianRegressor(likelihood="poisson", **FAST).fit(copied, counts)


def test_tensors_are_arrays() -> None:
    X, y = frame()
    numbers = X.to_numpy()
    fitted = BayesianRegressor(**FAST)
    from_tensors = fitted.fit(torch.tensor(numbers), torch.tensor(y)).predict(torch.tensor(numbers))
    assert np.array_equal(from_tensors, fitted.fit(numbers, y).predict(numbers))


def test_searches_and_cross_validation() -> None:
    X, y = frame()
    piped = make_pipeline(BayesianRegressor(**FAST))
    name = "bayesianregressor"
    grid = {f"{name}__method": [doxa.MAP(), "linear"], f"{name}__hidden": [(4,)]}
    by_density = GridSearchCV(
        piped, grid, cv=2, scoring=lambda model, X, y: model[-1].log_likelihood(X, y)
    )
    assert by_density.fit(X, y).best_params_[f"{name}__method"] == "linear"  # which y is in X
    assert by_density.predict(X).shape == (60,)
    scores = cross_val_score(BayesianRegressor("linear"), X, y, cv=3)
    assert scores.min() > 0.99


def test_calibration_tools() -> None:
    X, y = frame()
    labels = np.where(y > 0, "up", "down")
    classifier = BayesianClassifier(**FAST)
    wrapped = CalibratedClassifierCV(classifier, cv=2).fit(X, labels, sample_weight=np.ones(60))
    assert wrapped.predict_proba(X).shape == (60, 2)
    pytest.importorskip("matplotlib").use("Agg")
    shown = CalibrationDisplay.from_estimator(classifier.fit(X, labels), X, labels, n_bins=3)
    assert len(shown.prob_pred) > 0
