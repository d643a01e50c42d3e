"""The estimators as they come, on tables that come with scikit-learn, and the pages about them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from doxa.sklearn import BayesianClassifier, BayesianRegressor

ROOT = Path(__file__).parents[2]


def run(blocks: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Blocks of a page, one after the other, as pasted."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "page", "exec"), names)
    return names


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_the_block_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own,) = (block for block in blocks(ROOT / "README.md") if "doxa.sklearn" in block)
    names = run([own.replace("print(", "got = (")], tmp_path, monkeypatch)
    assert names["got"] > 0.9


@pytest.mark.slow
def test_the_blocks_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run(blocks(ROOT / "docs" / "sklearn.md"), tmp_path, monkeypatch)
    low, high, y = (np.asarray(names[name]) for name in ("low", "high", "y_test"))
    assert 0.8 < np.mean((low <= y) & (y <= high)) < 0.97  # 111 rows: four standard errors


@pytest.mark.slow
def test_numbers() -> None:
    """Diabetes: near a ridge on the mean of three splits; intervals hold what they say."""
    X, y = load_diabetes(return_X_y=True)
    ours, ridge, held = [], [], []
    for seed in range(3):
        X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=seed)
        fitted = BayesianRegressor().fit(X_train, y_train)
        ours.append(fitted.score(X_test, y_test))
        ridge.append(Ridge(0.1).fit(X_train, y_train).score(X_test, y_test))
        low, high = fitted.predict_interval(X_test, level=0.9)
        held.append(np.mean((low <= y_test) & (y_test <= high)))
        assert fitted.posterior_.status == "ok"
    assert np.mean(ours) > np.mean(ridge) - 0.07
    assert abs(np.mean(held) - 0.9) < 0.06  # 333 rows: 3.6 standard errors


@pytest.mark.slow
@pytest.mark.parametrize("load", [load_breast_cancer, load_wine, load_digits])
def test_classes(load: Any) -> None:
    """As good as logistic regression, to a few rows and to 0.05 nats."""
    X, y = load(return_X_y=True)
    X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0, stratify=y)
    fitted = BayesianClassifier().fit(X_train, y_train)
    linear = make_pipeline(StandardScaler(), LogisticRegression()).fit(X_train, y_train)
    assert fitted.score(X_test, y_test) > linear.score(X_test, y_test) - 0.03
    loss, other = (log_loss(y_test, m.predict_proba(X_test)) for m in (fitted, linear))
    assert loss < other + 0.05
    assert fitted.posterior_.status == "ok"
