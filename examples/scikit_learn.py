"""doxa in scikit-learn: intervals, class probabilities, a pipeline, a search by density.

    python examples/scikit_learn.py

Three tables of scikit-learn, each with a quarter of its rows held out. The printed scores are those
of the held-out rows.
"""

from __future__ import annotations

import tempfile

import numpy as np
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from doxa.sklearn import BayesianClassifier, BayesianRegressor


def main() -> None:
    diabetes()
    breast_cancer()
    wine()


def diabetes() -> None:
    """Regression with intervals; text columns go through scikit-learn's encoder."""
    X, y = load_diabetes(return_X_y=True, as_frame=True, scaled=False)
    X["sex"] = np.where(X["sex"] == 1, "F", "M")
    encode = ColumnTransformer([("text", OneHotEncoder(), ["sex"])], remainder="passthrough")
    X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)
    model = make_pipeline(encode, BayesianRegressor()).fit(X_train, y_train)
    regressor, rows = model[-1], model[:-1].transform(X_test)
    low, high = regressor.predict_interval(rows, level=0.9)
    held = np.mean((low <= y_test) & (y_test <= high))
    print(f"diabetes: {regressor.posterior_.status}, R² {model.score(X_test, y_test):.2f}, "
          f"90 % intervals hold {held:.0%}, {np.mean(high - low):.0f} wide")  # fmt: skip
    p = regressor.predictive(rows)
    share = float((p.epistemic / p.variance).mean())
    print(f"          {share:.0%} of the variance is epistemic, the rest is noise")


def breast_cancer() -> None:
    """Class probabilities, and an estimator saved to disk."""
    X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    labels = np.where(y == 1, "benign", "malignant")
    X_train, X_test, y_train, y_test = train_test_split(X, labels, random_state=0)
    classifier = BayesianClassifier().fit(X_train, y_train)
    loss = log_loss(y_test, classifier.predict_proba(X_test))
    print(f"breast cancer: accuracy {classifier.score(X_test, y_test):.3f}, log loss {loss:.3f}")
    with tempfile.TemporaryDirectory() as folder:
        classifier.save(f"{folder}/run")
        again = BayesianClassifier.load(f"{folder}/run")
        assert np.array_equal(again.predict_proba(X_test), classifier.predict_proba(X_test))


def wine() -> None:
    """Selection of a method by the log density of held-out rows."""
    X, y = load_wine(return_X_y=True)
    X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)
    search = GridSearchCV(
        BayesianClassifier(), {"method": ["map", "deep-ensemble", "laplace"]},
        scoring="neg_log_loss", cv=3,
    ).fit(X_train, y_train)  # fmt: skip
    found = pd.DataFrame(search.cv_results_)[["param_method", "mean_test_score"]]
    print("wine: mean log density of held-out rows")
    print(found.round(3).to_string(index=False, header=False))
    best = search.best_estimator_
    print(f"      {best.method}: accuracy {best.score(X_test, y_test):.3f}")


if __name__ == "__main__":
    main()
