"""doxa as scikit-learn estimators: what `doxa.fit` does, where a `Pipeline` or a search expects it.

from doxa.sklearn import BayesianClassifier, BayesianRegressor

mean, std = BayesianRegressor("laplace").fit(X, y).predict(X_new, return_std=True)
"""

from __future__ import annotations

from doxa.errors import MissingExtra

try:
    import sklearn as _installed  # noqa: F401
except ImportError as error:
    raise MissingExtra("doxa.sklearn needs scikit-learn: pip install 'doxa[tables]'") from error

from doxa.sklearn.classifier import BayesianClassifier
from doxa.sklearn.regressor import BayesianRegressor

__all__ = ["BayesianClassifier", "BayesianRegressor"]
