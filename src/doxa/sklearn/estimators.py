"""`BayesianClassifier`: class probabilities, averaged over the posterior. `BayesianRegressor`:
numbers, with their uncertainty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets
from torch import nn

from doxa.errors import DataError, ModelError, did_you_mean
from doxa.likelihoods import Likelihood
from doxa.model import Model
from doxa.sklearn import estimator
from doxa.sklearn.estimator import Array, BayesianEstimator, as_numbers


class BayesianClassifier(ClassifierMixin, BayesianEstimator):
    """Classification with any network and any method of doxa.

    Two classes are "bernoulli", with one output, as on the command line; more are "categorical",
    with one output per class. An `nn.Module` with two outputs is taken as categorical. `score` is
    the accuracy.

    >>> classifier = BayesianClassifier().fit(X, y)
    >>> classifier.predict_proba(X_new)
    >>> classifier.predictive(X_new).mutual_information    # epistemic uncertainty

    The other attributes and all settings are those of `BayesianEstimator`.
    """

    def predict(self, X: Any) -> Array:
        """The likeliest label of each row."""
        likeliest = self.predict_proba(X).argmax(1)
        labels: Array = self.classes_[likeliest]
        return labels

    def predict_proba(self, X: Any) -> Array:
        """[N, classes], in the order of `classes_`."""
        probs = as_numbers(self._summary(X).probs)
        if self._outputs > 1:
            return probs
        probs = probs.reshape(len(probs), 1)
        return np.hstack([1.0 - probs, probs])

    def predict_log_proba(self, X: Any) -> Array:
        """[N, classes]: the logarithm of `predict_proba`."""
        with np.errstate(divide="ignore"):  # a probability that is 0 in double precision
            return np.log(self.predict_proba(X))

    def sample_y(self, X: Any, n_samples: int = 1, random_state: int = 0) -> Array:
        """Draws of labels, each from one function at all rows: [N, n_samples]."""
        drawn = self.predictive(X).sample(n_samples, random_state).cpu().long()  # [n, N(, 1)]
        labels: Array = self.classes_[drawn.reshape(n_samples, -1).numpy().T]
        return labels

    def _read(self, X: Any, y: Any) -> tuple[Array, Array]:
        X, y = estimator.training_rows(self, X, y)
        try:
            check_classification_targets(y)
        except ValueError as error:
            raise DataError(f"{error} For numbers there is BayesianRegressor.") from error
        except TypeError as error:  # labels that cannot be sorted
            kinds = ", ".join(sorted({type(label).__name__ for label in y.tolist()}))
            raise DataError(
                f"y holds labels of several types ({kinds}): make them one, and drop or fill rows "
                "without a label"
            ) from error
        return X, y

    def _learn_targets(self, y: Array, weight: Array | None) -> Array:
        self.classes_, codes = np.unique(y, return_inverse=True)
        seen = np.unique(codes if weight is None else codes[weight > 0])
        if len(seen) < 2:
            (only,) = self.classes_[seen].tolist()
            raise DataError(
                f"y holds one class only ({only!r}), in rows of positive weight: two classes are "
                "needed"
            )
        return codes

    def _known_targets(self, y: Any) -> Array:
        labels = np.asarray(y).reshape(-1)
        codes = np.searchsorted(self.classes_, labels).clip(max=len(self.classes_) - 1)
        unknown = np.flatnonzero(self.classes_[codes] != labels)
        if len(unknown):
            row = int(unknown[0])
            label = labels.tolist()[row]
            known = did_you_mean(str(label), map(str, self.classes_))
            raise DataError(f"y is {label!r} at row {row}, a class not seen when fitting{known}")
        return codes

    def _meaning(self, X: Array) -> tuple[Likelihood, int]:
        count = len(self.classes_)
        two = count == 2 and _outputs_of(self.net, X) != (2,)
        meant = self._likelihood("bernoulli" if two else "categorical")
        if not meant.classifies:
            raise ModelError(f"a {meant.name} likelihood is for numbers: use BayesianRegressor")
        if not meant.binary:
            return meant, count
        if count != 2:
            raise ModelError(f"y has {count} classes, and {meant.name} is for two")
        return meant, 1


def _outputs_of(net: Any, X: Array) -> Any:
    """The shape that a given network has for one row; None where there is none yet."""
    if not isinstance(net, nn.Module):
        return None
    model = Model(net)
    return model.build(torch.as_tensor(X[:1]).to(model.device, model.dtype)).output


class BayesianRegressor(RegressorMixin, BayesianEstimator):
    """Regression with any network and any method of doxa.

    y may have several columns. The likelihood is Gaussian unless another is given: an object, or a
    name of `doxa.likelihoods.LIKELIHOODS` that is not for classes. `score` is R², as everywhere in
    scikit-learn.

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
        return estimator.training_rows(self, X, y, multi_output=True, y_numeric=True)

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
        return meant, meant.outputs(torch.empty(1, self.n_outputs_))[0]
