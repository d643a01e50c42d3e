"""Predictions as columns, and scores, against numbers worked out by hand and by scipy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from doxa.tables.predictions import columns, predict_frame
from doxa.tables.schema import Column, Schema

pd = pytest.importorskip("pandas")

REGRESSION = Schema("y", "gaussian", (Column("x"),))
TERNARY = Schema("y", "categorical", (Column("x"),), ("a", "b", "c"))
BINARY = Schema("y", "bernoulli", (Column("x"),), ("no", "yes"))


def normal(mean: list[float], std: float) -> SimpleNamespace:
    """A stand-in predictive: independent normals, a quarter of the variance epistemic."""
    m = torch.tensor(mean, dtype=torch.float64)
    s = torch.full_like(m, std)
    law = stats.norm(m.numpy(), std)
    return SimpleNamespace(
        mean=m, std=s, aleatoric=0.75 * s**2, epistemic=0.25 * s**2,
        interval=lambda level: tuple(torch.as_tensor(v) for v in law.interval(level or 0.95)),
        log_prob=lambda y: torch.as_tensor(law.logpdf(y.numpy())),
    )  # fmt: skip


def classes(probs: list[list[float]]) -> SimpleNamespace:
    p = torch.tensor(probs, dtype=torch.float64)
    entropy = torch.as_tensor(stats.entropy(p.numpy(), axis=1))
    return SimpleNamespace(
        probs=p, mean=p, entropy=entropy, mutual_information=0.1 * entropy, splits=True,
        log_prob=lambda y: p[torch.arange(len(p)), y.long()].log(),
    )  # fmt: skip


def test_regression_columns() -> None:
    table = columns(normal([1.0, 2.0], 2.0), REGRESSION, level=0.9)
    assert list(table) == ["mean", "std", "aleatoric_std", "epistemic_std", "low", "high"]
    assert table["aleatoric_std"] == pytest.approx(np.sqrt([3.0, 3.0]))  # of a variance of 4
    assert table["epistemic_std"] == pytest.approx([1.0, 1.0])
    assert np.allclose(table["high"] - table["mean"], 2.0 * stats.norm.ppf(0.95))


def test_classification_columns_use_the_labels() -> None:
    table = columns(classes([[0.2, 0.5, 0.3], [0.7, 0.2, 0.1]]), TERNARY, level=0.95)
    assert list(table) == ["p(a)", "p(b)", "p(c)", "predicted", "entropy", "mutual_information"]
    assert table["predicted"].tolist() == ["b", "a"]
    assert np.allclose(table["p(a)"] + table["p(b)"] + table["p(c)"], 1.0)


def test_a_bernoulli_gives_two_probabilities() -> None:
    p = classes([[0.9], [0.2]])
    table = columns(p, BINARY, level=0.95)
    assert table["p(yes)"].tolist() == pytest.approx([0.9, 0.2])
    assert table["p(no)"].tolist() == pytest.approx([0.1, 0.8])
    assert table["predicted"].tolist() == ["yes", "no"]


def test_the_index_is_carried_over_chunks(monkeypatch) -> None:
    monkeypatch.setattr("doxa.tables.predictions.ROWS_AT_ONCE", 4)
    posterior = SimpleNamespace(predict=lambda x: normal(list(x[:, 0] * 2), 1.0), transform=None)
    frame = pd.DataFrame({"x": np.arange(10.0)}, index=[f"r{k}" for k in range(10)])
    table, notes = predict_frame(posterior, REGRESSION, frame)
    assert list(table.index) == list(frame.index)
    assert table["mean"].tolist() == (2 * np.arange(10.0)).tolist()
    assert notes == []
