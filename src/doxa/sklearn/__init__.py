"""doxa as scikit-learn estimators: `doxa.fit` for use in a `Pipeline` or a search.

from doxa.sklearn import BayesianClassifier, BayesianRegressor

mean, std = BayesianRegressor("laplace").fit(X, y).predict(X_new, return_std=True)
"""

from __future__ import annotations

from doxa.errors import MissingExtra

try:
    from sklearn.utils.validation import validate_data as _since_1_6  # noqa: F401
except ImportError as error:
    raise MissingExtra(
        "doxa.sklearn needs scikit-learn 1.6 or later: pip install 'doxa[tables]'"
    ) from error

from doxa.sklearn.estimators import BayesianClassifier, BayesianRegressor

__all__ = ["BayesianClassifier", "BayesianRegressor"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
