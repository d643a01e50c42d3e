"""Mistakes with what comes back: each is one of doxa's errors, with words that help, or a
documented result. None is a traceback of torch or numpy, and none is silent.

A row is what is done, the error, and what its message says: what is wrong, where, what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import scipy.sparse
import torch
from mistakes import (
    FRAME,
    LABELS,
    Endless,
    N,
    Row,
    TooLong,
    X,
    Y,
    chains,
    classes,
    exact,
    fit,
    listed,
    loader,
    named,
    numbers,
    process,
    without,
)
from torch.utils.data import TensorDataset

import doxa
from doxa import evaluate
from doxa.diagnose import doctor
from doxa.errors import (
    DataError,
    DoxaError,
    MethodError,
    ShapeError,
    Unavailable,
)  # fmt: skip

nan, inf = float("nan"), float("inf")

PREDICT: dict[str, Row] = {
    "other columns": (lambda: numbers().predict(X[:, :2]), ShapeError, r"\(2,\).*\(3,\)"),
    "a single row": (lambda: numbers().predict(X[0]), ShapeError, r"single row.*x\[None\]"),
    "words": (lambda: numbers().predict(X.numpy().astype(str)), DataError, "x holds <U"),
    "nothing": (lambda: numbers().predict(None), DataError, "x is None"),
    "NaN": (lambda: numbers().predict(without(nan)), DataError, "x is nan at row 7, column 2"),
    "NaN in a frame": (
        lambda: named().predict(FRAME.where(FRAME.iloc[4, 1] != FRAME)), DataError,
        r"row 4 \(index 'p4'\), column 'height'",
    ),
    "NaN after a frame": (
        lambda: named().predict(without(nan)), DataError, "row 7, column 'weight'",
    ),
    "sparse": (
        lambda: numbers().predict(scipy.sparse.csr_matrix(X.numpy())), DataError, r"x\.toarray\(\)",
    ),
    "no rows": (lambda: numbers().predict(X[:0]), DataError, "N = 0"),
    "a frame with names amiss": (
        lambda: named().predict(FRAME.rename(columns={"age": "alter", "weight": "mass"})),
        DataError,
        "lacks the columns 'age', 'weight' and has 'alter', 'mass'",
    ),
    "a frame with a column more": (
        lambda: named().predict(FRAME.assign(shoe=1.0)), DataError,
        r"has 'shoe'.*x\[posterior\.columns\]",
    ),
    "no samples": (lambda: numbers().predict(X, n=0), MethodError, "n must be"),
    "more samples than kept": (
        lambda: numbers().predict(X, n=9), MethodError, "9 draws requested, but 2 are kept",
    ),
    "a seed in words": (lambda: numbers().predict(X, seed="lucky"), MethodError, "seed must be"),
    "keep everything": (
        lambda: numbers().predict(X, keep="all"), MethodError, "'samples' or 'moments'",
    ),
    "a loader that shuffles": (
        lambda: numbers().predict(loader(shuffle=True)), DataError, "shuffle=False",
    ),
    "a loader that drops rows": (
        lambda: numbers().predict(loader(drop_last=True)), DataError,
        "last 2 rows.*drop_last=False",
    ),
    "a loader that never ends": (
        lambda: numbers().predict(loader(Endless())), DataError, "never end",
    ),
    "a loader that is longer than it says": (
        lambda: numbers().predict(loader(TooLong())), DataError, "more rows than its length, 20",
    ),
    "a loader of nothing": (
        lambda: numbers().predict(loader(TensorDataset(X[:0]))), DataError, "N = 0",
    ),
    "a loader of three": (
        lambda: numbers().predict(loader(TensorDataset(X, Y, Y))), DataError, "3 parts",
    ),
    "a level of a percentage": (
        lambda: numbers().predict(X).interval(95), DataError, "between 0 and 1, got 95",
    ),
    "a level in words": (
        lambda: numbers().predict(X).interval("wide"), DataError, "between 0 and 1",
    ),
    "a quantile above one": (
        lambda: numbers().predict(X).quantile(1.5), DataError, "between 0 and 1",
    ),
    "a quantile in words": (
        lambda: numbers().predict(X).quantile("median"), DataError, "between 0 and 1",
    ),
    "probs of numbers": (
        lambda: numbers().predict(X).probs, Unavailable, "classification; use mean",
    ),
    "votes of numbers": (lambda: numbers().predict(X).votes(), Unavailable, "classification"),
    "an interval of classes": (
        lambda: classes().predict(X).interval(0.9), Unavailable, "use probs",
    ),
    "samples of moments": (
        lambda: numbers().predict(X, keep="moments").samples, Unavailable, "no samples",
    ),
    "log_prob of too few": (
        lambda: numbers().predict(X).log_prob(Y[:3]), ShapeError, "3 targets.*20 rows",
    ),
    "log_prob of another shape": (
        lambda: numbers().predict(X).log_prob(Y.T), ShapeError, r"\[1, 20\]",
    ),
    "log_prob of nothing": (lambda: numbers().predict(X).log_prob(None), DataError, "y is None"),
    "log_prob of words": (
        lambda: numbers().predict(X).log_prob(["a"] * N), DataError,
        "targets must be numbers, not values of type <U1",
    ),
    "log_prob of an unseen class": (
        lambda: classes().predict(X).log_prob(LABELS + 1), DataError, "row 2",
    ),
    "draws of y, none": (lambda: numbers().predict(X).sample(0), DataError, "n must be"),
    "draws of y, in words": (lambda: numbers().predict(X).sample("ten"), DoxaError, "n must be"),
    "weights of a process": (lambda: process().draw(3), Unavailable, "no weights"),
    "features of a process": (lambda: process().features(X), Unavailable, "no network"),
    "chains of an exact model": (lambda: exact().to_arviz(), Unavailable, "no chains"),
    "a network conditioned": (lambda: numbers().condition(X, Y), Unavailable, "fit again"),
    "too many draws": (lambda: chains().draw(99), MethodError, "99 draws requested, but 8"),
    "functions of one row": (lambda: numbers().functions(X[0]), ShapeError, "single row"),
    "a mixture of nothing": (
        lambda: doxa.MixturePosterior([], []), MethodError, "one nonnegative weight",
    ),
    "probabilities that are none": (
        lambda: doxa.Predictive.from_probs(torch.ones(4, 3)), DataError, "row 0.*a distribution",
    ),
}  # fmt: skip


EVALUATE: dict[str, Row] = {
    "metrics of too few": (
        lambda: evaluate.metrics(numbers().predict(X), Y[:3]), ShapeError, "3 targets",
    ),
    "metrics of a posterior": (
        lambda: evaluate.metrics(numbers(), Y), DataError, r"posterior\.predict\(x\)",
    ),
    "metrics of plain numbers": (lambda: evaluate.metrics(Y, Y), DataError, "Predictive"),
    "metrics without y": (
        lambda: evaluate.metrics(numbers().predict(X), None), DataError, "y is None",
    ),
    "accuracy of numbers": (lambda: evaluate.accuracy(numbers().predict(X), Y), DoxaError, "class"),
    "ece of numbers": (lambda: evaluate.ece(numbers().predict(X), Y), DoxaError, "class"),
    "brier of numbers": (lambda: evaluate.brier(numbers().predict(X), Y), DoxaError, "class"),
    "rmse of classes": (
        lambda: evaluate.rmse(classes().predict(X), LABELS), DoxaError, "class|regression",
    ),
    "crps of classes": (lambda: evaluate.crps(classes().predict(X), LABELS), DoxaError, "class"),
    "coverage of a percentage": (
        lambda: evaluate.coverage(numbers().predict(X), Y, 95), DataError, "between 0 and 1",
    ),
    "bins of nothing": (
        lambda: evaluate.ece(classes().predict(X), LABELS, bins=0), DoxaError, "bins",
    ),
    "auroc of nothing": (
        lambda: evaluate.auroc([], [1.0]), DataError, "empty|no score|at least one",
    ),
    "auroc of NaN": (lambda: evaluate.auroc([nan], [1.0]), DataError, "nan|finite|NaN"),
    "a score misspelt": (
        lambda: evaluate.ood_scores(numbers(), X, scores=["entropi"]), MethodError, "entropy",
    ),
    "conformal on two rows": (
        lambda: evaluate.conformal(numbers(), (X[:2], Y[:2])), DataError, "at least 9",
    ),
    "conformal of a percentage": (
        lambda: evaluate.conformal(numbers(), (X, Y), 90), DataError, "between 0 and 1",
    ),
    "conformal without y": (
        lambda: evaluate.conformal(numbers(), X), DataError, r"a pair \(x, y\)",
    ),
    "conformal misspelt": (
        lambda: evaluate.conformal(numbers(), (X, Y), kind="splitt"), MethodError, "split",
    ),
    "recalibrate for classes": (
        lambda: evaluate.recalibrate(numbers(), (X, Y)), MethodError, "quantile, variance",
    ),
    "recalibrate misspelt": (
        lambda: evaluate.recalibrate(classes(), (X, LABELS), "temprature"), MethodError,
        "temperature",
    ),
    "an option misspelt": (
        lambda: evaluate.recalibrate(classes(), (X, LABELS), "histogram", bin=3), MethodError,
        "bins",
    ),
    "the doctor without data": (lambda: doctor(numbers(), None), DataError, r"pair \(x, y\)"),
    "predict of a sweep": (
        lambda: fit(runs=doxa.Runs(seeds=[0, 1])).predict(X), Unavailable,
        r"no 'predict'.*sweep\[0\]",
    ),
    "accuracy of a posterior": (
        lambda: evaluate.accuracy(classes(), LABELS), DataError, r"posterior\.predict\(x\)",
    ),
    "nll of a posterior": (
        lambda: evaluate.nll(numbers(), Y), DataError, r"posterior\.predict\(x\)",
    ),
    "the doctor of a sweep": (
        lambda: doctor(fit(runs=doxa.Runs(seeds=[0, 1])), (X, Y)), DoxaError, r"sweep\[",
    ),
    "select without validation": (
        lambda: fit(runs=doxa.Runs(seeds=[0, 1])).select(), Unavailable, r"validation=0\.2",
    ),
    "select by nothing known": (
        lambda: fit(runs=doxa.Runs(seeds=[0, 1])).select(by="rmse"), MethodError, "'validation'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake, error, words", listed(predict=PREDICT, evaluate=EVALUATE))
def test_a_mistake_is_named(mistake: Callable[[], Any], error: type[DoxaError], words: str) -> None:
    with pytest.raises(error, match=words):
        mistake()
