"""`BayesianRegressor`: numbers, with how sure they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils import Tags

from doxa.errors import DataError, ModelError
from doxa.likelihoods import HeteroscedasticGaussian, Likelihood
from doxa.sklearn import inputs
from doxa.sklearn.estimator import BayesianEstimator, as_numbers
from doxa.sklearn.inputs import Array


class BayesianRegressor(RegressorMixin, BayesianEstimator):
    """Regression with any network and any method of doxa.

    y may have several columns. The likelihood is Gaussian unless another is given, such as
    "heteroscedastic", "student-t" or "poisson". `score` is R², as everywhere in scikit-learn.

    >>> regressor = BayesianRegressor("laplace").fit(X, y)
    >>> mean, std = regressor.predict(X_new, return_std=True)
    >>> low, high = regressor.predict_interval(X_new, level=0.9)

    The other attributes and all settings are those of `BayesianEstimator`.
    """

    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:
        """E[y], in the shape of y; with `return_std` also the standard deviation of y itself, its
        noise included."""
        p = self._summary(X)
        return (self._as_y(p.mean), self._as_y(p.std)) if return_std else self._as_y(p.mean)

    def predict_interval(self, X: Any, level: float = 0.95) -> tuple[Array, Array]:
        """(low, high): the central interval that holds y with probability `level`."""
        low, high = self.predictive(X).interval(level)
        return self._as_y(low), self._as_y(high)

    def predict_quantile(self, X: Any, q: float | Sequence[float]) -> Array:
        """The q-quantile of y, in the shape of y; for several q with an axis for them in front."""
        found = self.predictive(X).quantile(q)
        if np.ndim(q) == 0:
            return self._as_y(found)
        return np.stack([self._as_y(each) for each in found])

    def sample_y(self, X: Any, n_samples: int = 1, random_state: int = 0) -> Array:
        """Draws of y, noise included, each one function at all rows: [N, n_samples], or
        [N, columns of y, n_samples]."""
        drawn = as_numbers(self.predictive(X).sample(n_samples, random_state))  # [n, N(, T)]
        drawn = np.moveaxis(drawn, 0, -1)
        return drawn.reshape(len(drawn), n_samples) if self._flat else drawn

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _as_y(self, values: torch.Tensor) -> Array:
        numbers = as_numbers(values)
        return numbers.reshape(len(numbers)) if self._flat else numbers

    def _read(self, X: Any, y: Any) -> tuple[Array, Array]:
        return inputs.training_rows(self, X, y, multi_output=True, y_numeric=True)

    def _learn_targets(self, y: Array, weight: Array | None) -> Array:
        self._flat = y.ndim == 1
        self.n_outputs_ = 1 if self._flat else y.shape[1]
        return self._known_targets(y)

    def _known_targets(self, y: Any) -> Array:
        try:
            return np.asarray(y, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"y holds no numbers ({error}): for labels there is BayesianClassifier"
            ) from error

    def _meaning(self, X: Array) -> tuple[Likelihood, int]:
        meant = self._likelihood("gaussian")
        if meant.classifies:
            raise ModelError(f"a {meant.name} likelihood is for classes: use BayesianClassifier")
        each = 2 if isinstance(meant, HeteroscedasticGaussian) else 1
        return meant, each * self.n_outputs_
