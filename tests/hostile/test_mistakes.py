"""Mistakes with data and networks: each is one of doxa's errors, with words that help, or a
documented result. None is a traceback of torch or numpy, and none is silent.

A row is what is done, the error, and what its message says: what is wrong, where, what to do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from mistakes import (
    FRAME,
    LABELS,
    After,
    D,
    Endless,
    N,
    Row,
    X,
    Y,
    fit,
    listed,
    loader,
    net,
    noisy_object,
    without,
)
from torch import nn
from torch.utils.data import TensorDataset

import doxa
from doxa.errors import (
    DataError,
    DoxaError,
    ModelError,
    ShapeError,
)  # fmt: skip

nan, inf = float("nan"), float("inf")

DATA: dict[str, Row] = {
    "y of two columns": (
        lambda: fit(data=(X, torch.cat([Y, Y], 1))), ShapeError, r"\[20, 2\].*\[N, 1\]",
    ),
    "y too short": (lambda: fit(data=(X, Y[:-1])), ShapeError, "x has 20 rows and y 19"),
    "y transposed": (lambda: fit(data=(X, Y.T)), ShapeError, "x has 20 rows and y 1"),
    "x transposed": (lambda: fit(data=(X.T, Y)), ShapeError, "x has 3 rows and y 20"),
    "x one column short": (lambda: fit(data=(X[:, :2], Y)), ModelError, r"one row of x.*\(2,\)"),
    "x without columns": (
        lambda: fit(data=(X[:, 0], Y)), ModelError, r"one row of x.*\(\).*x\[:, None\]",
    ),
    "x and y swapped": (lambda: fit(data=(Y, X)), ModelError, r"one row of x.*\(1,\)"),
    "y with an axis too many": (lambda: fit(data=(X, Y[..., None])), ShapeError, r"\[20, 1, 1\]"),
    "y one-hot": (
        lambda: fit(net(3), (X, torch.eye(3)[LABELS]), likelihood="categorical"),
        ShapeError, r"\[20, 3\].*\[N\].*argmax",
    ),
    "x a number": (lambda: fit(data=(torch.tensor(1.0), Y)), ShapeError, "x is a scalar"),
    "no pair": (lambda: fit(data=X), DataError, r"a pair \(x, y\)"),
    "three parts": (lambda: fit(data=(X, Y, Y)), DataError, r"a pair \(x, y\)"),
    "a file's name": (lambda: fit(data="data.csv"), DataError, r"a pair \(x, y\).*doxa fit"),
    "no y": (lambda: fit(data=(X, None)), DataError, "y is None"),
    "no x": (lambda: fit(data=(None, Y)), DataError, "x is None"),
    "x of whole numbers": (
        lambda: fit(nn.Sequential(nn.Flatten(), net()), ((X > 0).long()[:, :, None], Y)),
        ModelError, "convert x to floats",
    ),
    "labels as floats": (lambda: fit(net(3), (X, LABELS.float())), DoxaError, "categorical"),
    "labels as words": (
        lambda: fit(net(3), (X, np.array(["a", "b"] * 10))), DataError, "y holds <U1.*numbers",
    ),
    "x of words": (lambda: fit(data=(X.numpy().astype(str), Y)), DataError, "x holds <U.*numbers"),
    "x of objects": (lambda: fit(data=(noisy_object(), Y)), DataError, "x holds object.*numbers"),
    "x complex": (lambda: fit(data=(X.to(torch.complex64), Y)), DataError, "real and imaginary"),
    "x ragged": (
        lambda: fit(data=([[1.0, 2.0, 3.0], [1.0]] * 10, Y)), DataError, "x is not a table",
    ),
    "x of scipy, sparse": (
        lambda: fit(data=(scipy.sparse.csr_matrix(X.numpy()), Y)), DataError, r"x\.toarray\(\)",
    ),
    "x of torch, sparse": (lambda: fit(data=(X.to_sparse(), Y)), DataError, r"x\.to_dense\(\)"),
    "x with NaN": (
        lambda: fit(data=(without(nan), Y)), DataError, "nan at row 7, column 2; remove",
    ),
    "x with inf": (
        lambda: fit(data=(without(inf), Y)), DataError, "inf at row 7, column 2; remove",
    ),
    "y with NaN": (
        lambda: fit(data=(X, without(nan, of=Y[:, 0]))), DataError, "y is nan at row 7;",
    ),
    "a frame with NaN": (
        lambda: fit(data=(FRAME.where(FRAME.iloc[4, 1] != FRAME), Y)), DataError,
        r"x is nan at row 4 \(index 'p4'\), column 'height'",
    ),
    "a frame with words": (
        lambda: fit(data=(FRAME.assign(age="old", height="tall"), Y)), DataError,
        "'age'.*'height'.*encode",
    ),
    "a frame with a column twice": (
        lambda: fit(data=(FRAME.set_axis(["age", "age", "weight"], axis=1), Y)), DataError,
        "several columns called 'age'",
    ),
    "weights with NaN": (
        lambda: fit(sample_weight=without(nan, of=torch.ones(N))), DataError,
        "sample_weight is nan at row 7",
    ),
    "negative weights": (lambda: fit(sample_weight=-torch.ones(N)), DataError, "-1.0 at row 0"),
    "too few weights": (
        lambda: fit(sample_weight=torch.ones(N - 1)), ShapeError, r"\(19,\), expected \(20,\)",
    ),
    "a label too large": (
        lambda: fit(net(3), (X, LABELS + 1), likelihood="categorical"), DataError,
        "row 2 .*it is 3",
    ),
    "a negative label": (
        lambda: fit(net(3), (X, LABELS - 1), likelihood="categorical"), DataError,
        "row 0 .*it is -1",
    ),
    "one class": (
        lambda: fit(net(3), (X, LABELS * 0), likelihood="categorical"), DataError, "one class only",
    ),
    "no rows": (lambda: fit(data=(X[:0], Y[:0])), DataError, "N = 0"),
    "counts below zero": (lambda: fit(data=(X, -LABELS), likelihood="poisson"), DataError, "row 1"),
    "an endless dataset": (lambda: fit(data=loader(Endless())), DataError, "map-style Dataset"),
    "an empty dataset": (lambda: fit(data=TensorDataset(X[:0], Y[:0])), DataError, "N = 0"),
    "a dataset without y": (lambda: fit(data=TensorDataset(X)), DataError, r"pairs \(x, y\)"),
}  # fmt: skip

NETWORKS: dict[str, Row] = {
    "a class": (lambda: fit(nn.Linear), ModelError, "an object, not the class Linear"),
    "a function": (lambda: fit(lambda x: x), ModelError, "must be a torch.nn.Module"),
    "hidden layers as a number": (
        lambda: doxa.nets.mlp(3, 1, hidden=50), ModelError, r"such as \(50,\)",
    ),
    "frozen": (lambda: fit(net().requires_grad_(False)), ModelError, "no trainable parameter"),
    "rows averaged away": (
        lambda: fit(After(lambda h: h.mean(0))), DoxaError, "first axis must be the rows",
    ),
    "a loss": (lambda: fit(After(torch.sum)), DoxaError, "first axis must be the rows"),
    "two outputs": (lambda: fit(After(lambda h: (h, h))), DoxaError, "likelihood|head|outputs"),
    "rows on another axis": (lambda: fit(After(lambda h: h.T)), DoxaError, "rows"),
    "of halves and doubles": (
        lambda: fit(nn.Sequential(nn.Linear(D, 2), nn.Linear(2, 1).double())), ModelError,
        "mixed types",
    ),
    "detached": (lambda: fit(After(torch.detach)), ModelError, "no gradient"),
    "an input that is no tensor": (
        lambda: doxa.nets.mlp("3", 1), ModelError, "widths must be whole",
    ),
    "hidden layers of no width": (lambda: doxa.nets.mlp(3, 1, hidden=(0,)), ModelError, "widths"),
    "a builder that is none": (lambda: doxa.nets.build("mpl", {}), ModelError, "mlp"),
}  # fmt: skip


@pytest.mark.parametrize("mistake, error, words", listed(data=DATA, network=NETWORKS))
def test_a_mistake_is_named(mistake: Callable[[], Any], error: type[DoxaError], words: str) -> None:
    with pytest.raises(error, match=words):
        mistake()


SAID: dict[str, tuple[Callable[[], Any], str]] = {
    "a softmax at the end": (
        lambda: fit(After(lambda h: h.softmax(1), 3), (X, LABELS), likelihood="categorical"),
        "softmax",
    ),
    "labels without a likelihood": (lambda: fit(net(3), (X, LABELS)), "categorical"),
    "0.0 and 1.0 without one": (lambda: fit(data=(X, (Y > 0).float())), "bernoulli"),
    "a network for linear": (lambda: fit(method="linear"), "last layer only"),
    "columns of odd size": (lambda: fit(data=(X * 1e5, Y)), "standardize=True"),
    "a constant column": (lambda: fit(data=(X * 0 + 1, Y), standardize=True), "constant column"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_a_likely_mistake_is_said(name: str, caplog: pytest.LogCaptureFixture) -> None:
    mistake, words = SAID[name]
    with caplog.at_level(logging.WARNING, "doxa"):
        mistake()
    assert words in caplog.text


def test_outputs_that_are_no_numbers_are_in_the_status() -> None:
    posterior = fit(After(lambda h: h * nan))
    assert posterior.status == "diverged" and "outputs are finite" in posterior.status.reason


def test_what_a_callback_raises_is_its_own() -> None:
    def breaks(_step: int, _info: Any) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        fit(callbacks=[breaks])


def test_a_batch_holds_all_rows_at_most() -> None:
    assert torch.equal(fit(batch_size=10**6).samples, fit(batch_size=N).samples)


def test_a_class_stands_for_its_defaults() -> None:
    assert fit(method=doxa.MAP).method == doxa.MAP()
