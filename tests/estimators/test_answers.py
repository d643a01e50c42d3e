"""What the estimators answer is what `doxa.fit` gives for the same arguments, in scikit-learn's
shapes."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import doxa
from doxa.errors import DataError, MemoryBudgetError, MethodError, MissingExtra, ModelError
from doxa.sklearn import BayesianClassifier, BayesianRegressor

SHORT: dict[str, Any] = {"steps": 20, "members": 2}
LABELS = np.array(["no", "perhaps", "yes"])


def table(rows: int = 80) -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    X = generator.normal(size=(rows, 3)) * [1.0, 10.0, 0.1] + 5.0
    return X, X[:, 0] * 3 + 100 + generator.normal(size=rows)


def classes(count: int) -> tuple[Any, Any]:
    X, y = table()
    edges = np.quantile(y, np.linspace(0, 1, count + 1)[1:-1])
    return X, LABELS[np.searchsorted(edges, y)]


@pytest.fixture(scope="module")
def regressor() -> BayesianRegressor:
    return BayesianRegressor(**SHORT).fit(*table())


@pytest.fixture(scope="module")
def classifier() -> BayesianClassifier:
    return BayesianClassifier(**SHORT).fit(*classes(3))


@pytest.mark.parametrize("precision", [{"dtype": torch.float64}, {}])
def test_the_bits_of_a_plain_fit(precision: dict[str, Any]) -> None:
    """With the defaults, the shell's `standardize` and the estimator's double precision; in single
    precision with nothing else."""
    X, y = table()
    asked = {} if precision else {"dtype": "float32"}
    got = BayesianRegressor(**SHORT, **asked).fit(X, y)
    net = doxa.nets.mlp(3, 1)
    want = doxa.fit(net, (X, y), "deep-ensemble", standardize=True, **SHORT, **precision)
    p = want.predict(X)
    mean, std = got.predict(X, return_std=True)
    assert np.array_equal(mean, p.mean.double()) and np.array_equal(std, p.std.double())
    assert got.posterior_.dtype == precision.get("dtype", torch.float32)


def test_defaults_are_those_of_fit() -> None:
    import inspect

    own = inspect.signature(BayesianRegressor).parameters
    front = inspect.signature(doxa.fit).parameters
    shared = {name for name in own if name in front}
    assert len(shared) > 14
    differ = {name for name in shared if own[name].default != front[name].default}
    assert differ == {"method", "standardize", "dtype", "progress"}
    assert own["random_state"].default == front["seed"].default


def test_intervals_quantiles_and_draws_of_numbers(regressor: BayesianRegressor) -> None:
    X, y = table()
    p = regressor.predictive(X)
    low, high = regressor.predict_interval(X, level=0.8)
    assert low.shape == (80,) and np.array_equal(low, p.interval(0.8)[0])
    levels = regressor.predict_quantile(X, [0.1, 0.9])
    assert np.allclose(levels, [low, high]) and regressor.predict_quantile(X, 0.5).shape == (80,)
    drawn = regressor.sample_y(X, n_samples=400, random_state=1)
    mean, std = regressor.predict(X, return_std=True)
    assert drawn.shape == (80, 400)
    # The mean of 400 draws, five standard errors wide: wrong once in 20,000 such tables.
    assert (np.abs(drawn.mean(1) - mean) < 5 * std / 20).all()
    assert not np.array_equal(drawn, regressor.sample_y(X, n_samples=400, random_state=2))
    assert regressor.log_likelihood(X, y) == pytest.approx(float(p.log_prob(y).mean()))


def test_means_are_streamed_where_samples_do_not_fit(regressor: BayesianRegressor) -> None:
    X, _ = table()
    want = regressor.predict(X, return_std=True)
    regressor.posterior_.memory_budget = 1
    try:
        assert np.allclose(regressor.predict(X, return_std=True), want)
        with pytest.raises(MemoryBudgetError):
            regressor.predict_interval(X)
    finally:
        del regressor.posterior_.memory_budget


def test_classes(classifier: BayesianClassifier) -> None:
    X, y = classes(3)
    probs = classifier.predict_proba(X)
    assert classifier.classes_.tolist() == LABELS.tolist()
    assert np.array_equal(probs, classifier.predictive(X).probs)
    assert np.array_equal(classifier.predict(X), LABELS[probs.argmax(1)])
    assert np.allclose(np.exp(classifier.predict_log_proba(X)), probs)
    drawn = classifier.sample_y(X, n_samples=2000)
    assert drawn.shape == (80, 2000)
    # A share of 2,000 draws is 0.5/√2000 = 0.011 off at most; five times that.
    assert np.abs((drawn == "yes").mean(1) - probs[:, 2]).max() < 0.056
    chosen = np.searchsorted(LABELS, y)
    assert classifier.log_likelihood(X, y) == pytest.approx(
        np.log(probs[np.arange(80), chosen]).mean()
    )
    with pytest.raises(DataError, match="'maybe' at row 0, a class not seen"):
        classifier.log_likelihood(X, np.array(["maybe"] * 80))


def test_two_classes_are_bernoulli_unless_the_network_has_two_outputs() -> None:
    X, y = classes(2)
    quick: dict[str, Any] = {"steps": 2, "members": 1}
    one = BayesianClassifier(**quick).fit(X, y)
    assert one.posterior_.likelihood.name == "bernoulli"
    assert one.predict_proba(X).shape == (80, 2)
    assert np.array_equal(one.predict_proba(X)[:, 1], one.predictive(X).probs)
    for net in (nn.Linear(3, 2), None):
        meant = None if net else "categorical"
        two = BayesianClassifier(net=net, likelihood=meant, **quick).fit(X, y)
        assert two.posterior_.likelihood.name == "categorical"
        assert two.predict_proba(X).shape == (80, 2)
    assert set(one.sample_y(X, 3).ravel()) == {"no", "perhaps"}


def test_several_columns_of_y_and_networks_of_ones_own() -> None:
    X, y = table()
    both = np.column_stack([y, -2 * y])
    built: list[tuple[int, int]] = []

    def build(inputs: int, outputs: int) -> nn.Module:
        built.append((inputs, outputs))
        return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs))

    wide = BayesianRegressor("map", net=build, likelihood="heteroscedastic", steps=5).fit(X, both)
    assert built == [(3, 4)]  # a mean and a scale for each
    mean, std = wide.predict(X, return_std=True)
    assert mean.shape == std.shape == (80, 2) and wide.predict_interval(X)[0].shape == (80, 2)
    assert wide.sample_y(X, 7).shape == (80, 2, 7)
    assert wide.predict_quantile(X, [0.2, 0.8]).shape == (2, 80, 2)
    column = BayesianRegressor("linear").fit(X, y[:, None])  # a method without a network
    assert column.predict(X).shape == (80, 1)


def test_a_weight_is_a_count_to_the_bit() -> None:
    """Also where masks are drawn a row, and whatever the order of the rows."""
    X, y = table(24)
    weight = np.arange(24) % 3
    again = np.repeat(np.arange(24), weight)
    order = np.random.default_rng(1).permutation(24)
    for estimator in (BayesianRegressor("mc-dropout", steps=5), BayesianRegressor("map", steps=5)):
        repeated = estimator.fit(X[again], y[again]).predict(X)
        counted = estimator.fit(X[order], y[order], sample_weight=weight[order]).predict(X)
        plain = estimator.fit(X, y).predict(X)
        ones = estimator.fit(X, y, sample_weight=np.ones(24)).predict(X)
        assert np.array_equal(repeated, counted) and np.array_equal(plain, ones)
        assert not np.array_equal(plain, counted)


def test_rows_of_weight_zero_may_hold_anything() -> None:
    """NaN, and a class of their own; an error names the rows as they were passed."""
    X, y = table(80)
    kept = np.arange(80) % 4 != 1
    weight = np.where(kept, 1.0 + np.arange(80) % 3, 0.0)
    labels = np.where(y > np.median(y), "a", "b")
    far, wild = np.where(kept[:, None], X, np.nan), np.where(kept, y, np.inf)
    strange = np.where(kept, labels, "c")
    frame = pd.DataFrame(far, columns=list("pqr"))
    for estimator, target, full in (
        (BayesianRegressor("map", steps=5), wild, y),
        (BayesianClassifier("map", steps=5), strange, labels),
    ):
        expected = estimator.fit(X[kept], full[kept], sample_weight=weight[kept]).predict(X)
        assert np.array_equal(estimator.fit(far, target, weight).predict(X), expected)
        assert np.array_equal(
            estimator.fit(frame, target, weight).predict(pd.DataFrame(X, columns=list("pqr"))),
            expected,
        )
    assert estimator.classes_.tolist() == ["a", "b"]
    far[10] = np.nan
    with pytest.raises(DataError, match="row 10"):
        BayesianRegressor("map", steps=5).fit(far, wild, weight)


def test_seeds() -> None:
    X, y = table(20)
    fitted = BayesianRegressor("map", steps=2)

    def at(state: Any) -> Any:
        return fitted.set_params(random_state=state).fit(X, y).predict(X)

    assert np.array_equal(at(3), at(3)) and not np.array_equal(at(3), at(4))
    assert np.array_equal(at(np.random.RandomState(5)), at(np.random.RandomState(5)))
    assert not np.array_equal(at(None), at(None))


def test_settings_that_cannot_be() -> None:
    X, y = table(20)
    wrong = [
        ({"net": "mlp"}, ModelError, "a builder"),
        ({"net": lambda inputs: nn.Linear(3, 1)}, ModelError, r"called as net\(3, 1\)"),
        ({"net": lambda inputs, outputs: 3}, ModelError, "gave int"),
        ({"likelihood": "categorical"}, ModelError, "use BayesianClassifier"),
        ({"likelihood": ("gaussian", "gaussian")}, ModelError, "one likelihood"),
        ({"validation": (X, y)}, MethodError, "a share of the rows"),
        ({"hidden": 50}, MethodError, "a list of widths"),
        ({"hidden": (50.5,)}, MethodError, "a width in hidden must be a whole number"),
        ({"column_order": "some"}, MethodError, "'fixed' or 'any'"),
        ({"dtype": "int8"}, MethodError, "dtype"),
        ({"method": "deep-ensembl"}, MethodError, "did you mean 'deep-ensemble'"),
    ]  # fmt: skip
    for settings, kind, words in wrong:
        with pytest.raises(kind, match=words):
            BayesianRegressor(**settings).fit(X, y)
    labels = np.array(["a", "b", "c", "d"] * 5)
    with pytest.raises(ModelError, match="use BayesianRegressor"):
        BayesianClassifier(likelihood="poisson").fit(X, labels)
    with pytest.raises(ModelError, match="4 classes, and bernoulli is for two"):
        BayesianClassifier(likelihood="bernoulli").fit(X, labels)
    with pytest.raises(MethodError, match="gp is for regression"):
        BayesianClassifier("gp").fit(X, labels)


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("doxa.sklearn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn.utils.validation", None)
    monkeypatch.delattr(doxa, "sklearn", raising=False)
    with pytest.raises(MissingExtra, match=r"pip install 'doxa\[tables\]'"):
        _ = doxa.sklearn


def test_groups_are_those_of_fit() -> None:
    """The same posterior as from `doxa.fit`; copies of rows stay rows."""
    rng = np.random.default_rng(0)
    group = np.arange(20).repeat(5)
    X = rng.normal(size=(100, 2))
    y = X[:, 0] + rng.normal(size=20)[group]
    options: dict[str, Any] = {"steps": 40, "members": 2}
    regressor = BayesianRegressor(hidden=(8,), **options).fit(X, y, groups=group)
    want = doxa.fit(
        doxa.nets.mlp(2, 1, (8,)), (X, y), "deep-ensemble", likelihood=doxa.likelihoods.assumed(
            "gaussian"
        ), groups=group, standardize=True, dtype=torch.float64, progress=False, **options,
    )  # fmt: skip
    assert torch.equal(regressor.posterior_.samples, want.samples)
    assert regressor.posterior_.diagnostics["held_out"]["groups"] == 8
    with pytest.raises(DataError, match="groups is None at row 3"):
        BayesianRegressor(**options).fit(X, y, groups=[1, 1, 1, None] + [2] * 96)
