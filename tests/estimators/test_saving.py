"""Estimators on disk and pickled: the same bits, and no pickle in what doxa writes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import doxa
from doxa.errors import ModelError, StoreError
from doxa.sklearn import BayesianClassifier, BayesianRegressor

generator = np.random.default_rng(0)
X = generator.normal(size=(30, 2))
Y = X @ [1.0, -1.0]
LABELS = np.where(Y > 0, "up", "down")
FAST: dict[str, Any] = {"steps": 4, "hidden": (4,)}


def small(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 3), nn.BatchNorm1d(3), nn.Linear(3, outputs))


@pytest.mark.parametrize(
    "estimator",
    [
        BayesianRegressor(random_state=np.random.RandomState(3), members=2, **FAST),
        BayesianRegressor(doxa.Laplace(structure="diagonal"), prior=doxa.Normal(2.0), **FAST),
        BayesianRegressor("linear"),
        BayesianRegressor("map", net=doxa.nets.mlp(2, 1, (3,)), steps=4),
        BayesianClassifier("mean-field", dtype="float32", **FAST),
        BayesianClassifier("map", net=small, steps=4),
    ],
    ids=["ensemble", "laplace", "linear", "builder", "mean-field", "own"],
)
def test_the_same_bits_from_a_folder_and_from_pickle(estimator: Any, tmp_path: Path) -> None:
    classifies = isinstance(estimator, BayesianClassifier)
    fitted = estimator.fit(X, LABELS if classifies else Y)
    fitted.save(tmp_path / "run")
    own = {"net": small} if estimator.net is small else {}
    loaded = type(estimator).load(tmp_path / "run", **own)
    again = pickle.loads(pickle.dumps(fitted))  # noqa: S301
    for other in (loaded, again):
        assert np.array_equal(other.predict(X), fitted.predict(X))
        if classifies:
            assert np.array_equal(other.predict_proba(X), fitted.predict_proba(X))
            assert np.array_equal(other.classes_, fitted.classes_)
        else:
            pairs = zip(other.predict(X, return_std=True), fitted.predict(X, True), strict=True)
            assert all(np.array_equal(a, b) for a, b in pairs)
        assert other.n_features_in_ == 2 and other.posterior_.status == fitted.posterior_.status
    kept = {k: v for k, v in fitted.get_params().items() if k not in ("net", "random_state")}
    assert {k: v for k, v in loaded.get_params().items() if k in kept} == kept
    assert (loaded.net is None) == (fitted.net is None)  # so that it can be fitted again
    loaded.fit(X, LABELS if classifies else Y)
    net = small(2, 1) if own else None
    assert doxa.load(tmp_path / "run", net=net).predict(X).mean.shape == (30,)


def test_what_cannot_be_read_says_who_can(tmp_path: Path) -> None:
    BayesianRegressor("map", **FAST).fit(X, Y).save(tmp_path / "numbers")
    with pytest.raises(StoreError, match=r"BayesianRegressor\.load reads it"):
        BayesianClassifier.load(tmp_path / "numbers")
    doxa.fit(doxa.nets.mlp(2, 1), (X, Y), "map", steps=2).save(tmp_path / "plain")
    with pytest.raises(StoreError, match=r"doxa\.load reads it"):
        BayesianRegressor.load(tmp_path / "plain")
    BayesianRegressor("map", net=small, steps=2).fit(X, Y).save(tmp_path / "own")
    with pytest.raises(ModelError, match="net="):
        BayesianRegressor.load(tmp_path / "own")
    ours = BayesianRegressor("map", subset=lambda name: "0" in name, **FAST).fit(X, Y)
    with pytest.raises(StoreError, match="parameter subset"):
        ours.save(tmp_path / "function")


def test_names_are_kept(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["a", "b"])
    BayesianRegressor("map", column_order="any", **FAST).fit(frame, Y).save(tmp_path / "run")
    loaded = BayesianRegressor.load(tmp_path / "run")
    assert loaded.feature_names_in_.tolist() == ["a", "b"]
    assert np.array_equal(loaded.predict(frame[["b", "a"]]), loaded.predict(frame))
