"""`BayesianEstimator`, the base of both estimators, and the checks of its inputs.

An estimator stores the arguments of `doxa.fit` and, after a fit, the posterior. X, y and weights
are checked by the rules of scikit-learn; an error names the place of the fault.

A weight is a count: a row of weight 2 gives bit for bit the same result as the row twice. Rows that
occur more than once become one row with the sum of their weights, rows of weight 0 are dropped, and
the other rows are sorted, so that the result does not depend on their order. A copy of a training
row is therefore never among the held-out rows. Rows without weights or copies are passed on
unchanged.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import _safe_indexing, check_array, check_random_state
from sklearn.utils.validation import (
    _check_feature_names,
    _num_samples,
    check_is_fitted,
    validate_data,
)
from torch import Tensor, nn

from doxa import checks, likelihoods, nets
from doxa.errors import DataError, DoxaError, MemoryBudgetError, MethodError, ModelError, ShapeError
from doxa.fit import fit
from doxa.likelihoods import Heads, Likelihood
from doxa.method import Method, as_method
from doxa.model import Subset
from doxa.predictive import Predictive
from doxa.sklearn import saving
from doxa.sklearn.saving import Builder, made
from doxa.tables.columns import Column
from doxa.tables.schema import encode, infer_inputs

Array = np.ndarray[Any, np.dtype[Any]]

log = logging.getLogger("doxa")

_FLOATS = (np.float64, np.float32)
_ENCODE = (
    "encode them as numbers first, in a pipeline: ColumnTransformer([('text', OneHotEncoder("
    "handle_unknown='ignore'), [names])], remainder='passthrough')"
)


def training_rows(estimator: BaseEstimator, X: Any, y: Any, **rules: Any) -> tuple[Array, Array]:
    """X [N, D] and y of a fit; the estimator learns how many columns there are, and their names."""
    X, y = _array_of(X), _array_of(y)
    vars(estimator).pop("columns_", None)
    names = _raw_columns(X)
    if names is not None:
        X = _learn_columns(estimator, X)
    rows: tuple[Array, Array] = _checked(estimator, X, y, reset=True, ensure_min_samples=2, **rules)
    if names is not None:
        estimator.n_features_in_, estimator.feature_names_in_ = len(names), names
    return rows


def _raw_columns(X: Any) -> Array | None:
    """The names of a data frame that has text, categories or dates; None for any other X."""
    if not _is_frame(X) or not all(isinstance(name, str) for name in X.columns):
        return None
    if all(getattr(dtype, "kind", "O") in "biuf" for dtype in X.dtypes):
        return None
    return np.asarray(X.columns, dtype=object)


def _learn_columns(estimator: Any, X: Any) -> Array:
    """The encoded inputs; the estimator remembers the columns and their encoding."""
    columns, notes, _ = infer_inputs(X, {})
    for note in notes:
        log.info(note)
    if not columns:
        raise DataError("X has no input column that can be used: " + "; ".join(notes))
    found = encode(X, columns)[0]
    estimator.columns_ = [asdict(column) for column in columns]
    return found


def new_rows(estimator: BaseEstimator, X: Any, any_order: bool) -> Array:
    """X [N, D] of a prediction, with the columns of the fit; `any_order` puts them in order by
    name."""
    X = _array_of(X)
    known = getattr(estimator, "feature_names_in_", None)
    if any_order and known is not None and hasattr(X, "columns"):
        given = list(X.columns)
        if given != list(known) and len(given) == len(known) and set(given) == set(known):
            X = X[list(known)]
    columns = vars(estimator).get("columns_")
    if columns is not None:
        return _encoded_rows(estimator, X, [Column.from_json(column) for column in columns])
    rows: Array = _checked(estimator, X, "no_validation", reset=False)
    return rows


def _encoded_rows(estimator: Any, X: Any, columns: list[Column]) -> Array:
    """New rows of raw columns, encoded as in the fit."""
    if not _is_frame(X):
        raise DataError(
            "the estimator was fitted to a data frame with text or dates: pass a data frame with "
            f"the columns {_listed([repr(name) for name in estimator.feature_names_in_])}"
        )
    try:
        _check_feature_names(estimator, X, reset=False)
    except ValueError as error:
        raise DataError(_with_place(str(error), X, None)) from error
    found, notes = encode(X, columns)
    for note in notes:
        log.warning(note)
    return found


def row_weights(sample_weight: Any, rows: int) -> Array | None:
    """One finite, nonnegative weight a row; not all of them zero."""
    if sample_weight is None:
        return None
    weight: Array = check_array(
        _array_of(sample_weight), ensure_2d=False, dtype=np.float64, ensure_all_finite=False
    )
    if weight.shape != (rows,):
        raise ShapeError(f"sample_weight has shape {weight.shape}, expected ({rows},)")
    wrong = np.flatnonzero(~np.isfinite(weight) | (weight < 0))
    if len(wrong):
        raise DataError(
            f"sample_weight is {weight[wrong[0]]} at row {wrong[0]}; weights are finite and "
            "nonnegative"
        )
    if not weight.any():
        raise DataError("every sample_weight is zero: no row is left to fit to")
    return weight


def without_zeros(X: Any, y: Any, sample_weight: Any) -> tuple[Any, Any]:
    """X and y in which rows of weight 0 are copies of a row that counts, so that nothing looks at
    what they hold, and errors name rows as they were passed. They are removed later."""
    X, y = _array_of(X), _array_of(y)
    if sample_weight is None or y is None:
        return X, y
    try:
        counts = np.asarray(_array_of(sample_weight), dtype=np.float64) > 0
        rows = (_num_samples(X), _num_samples(y))
    except (TypeError, ValueError):  # the checks of X, y and weights report the fault
        return X, y
    if rows != (len(counts),) * 2 or counts.ndim != 1 or counts.all() or not counts.any():
        return X, y
    index = np.where(counts, np.arange(len(counts)), np.flatnonzero(counts)[0])
    return _safe_indexing(X, index), _safe_indexing(y, index)


def _array_of(value: Any) -> Any:
    """A tensor as an array, wherever it lies; anything else as it is."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def _checked(estimator: BaseEstimator, X: Any, y: Any, **rules: Any) -> Any:
    try:
        return validate_data(estimator, X, y, dtype=_FLOATS, **rules)
    except DoxaError:
        raise
    except ValueError as error:
        raise DataError(_with_place(str(error), X, y)) from error


def _with_place(message: str, X: Any, y: Any) -> str:
    """The message of scikit-learn, with the place of the fault in the table, or a remedy."""
    if "must be in the same order" in message:
        return f"{message.rstrip()}\ncolumn_order='any' puts columns in order by their names."
    if "could not convert string" in message:
        columns = _text_columns(X)
        if columns:
            return f"X holds text in column {_listed(columns)} ({message}); {_ENCODE}"
        return f"y holds text ({message}): for labels there is BayesianClassifier"
    if "contains NaN" in message or "contains infinity" in message:
        of_y = "Input y" in message or "Input Y" in message
        return f"{message.rstrip()}\n{_first_not_finite(y if of_y else X)}"
    return message


def _first_not_finite(table: Any) -> str:
    try:
        bad = np.argwhere(~np.isfinite(np.asarray(table, dtype=np.float64)))
    except (TypeError, ValueError):  # labels
        return ""
    if not len(bad):
        return ""
    row, *column = bad[0].tolist()
    where = f", column {_names(table)[column[0]]}" if column else ""
    return f"The first is at row {row}{where} (rows counted from 0)."


def _text_columns(X: Any) -> list[str]:
    cells = np.asarray(X, dtype=object)
    if cells.ndim != 2:
        return []
    return [
        name
        for name, column in zip(_names(X), cells.T, strict=True)
        if any(isinstance(cell, str) and not _is_number(cell) for cell in column)
    ]


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _names(table: Any) -> list[str]:
    if _is_frame(table):
        return [repr(name) for name in table.columns]
    return [str(number) for number in range(np.shape(table)[1])]


def _is_frame(table: Any) -> bool:
    return hasattr(table, "columns") and hasattr(table, "dtypes")


def _listed(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def counted(X: Array, y: Array, weight: Array | None) -> tuple[Array, Array, Array | None]:
    """(X, y, weight) with each row once; weight is None where every row counts one."""
    if weight is not None:
        X, y, weight = X[weight != 0], y[weight != 0], weight[weight != 0]
    table = np.ascontiguousarray(np.column_stack([X, y]), np.float64) + 0.0  # -0.0 is 0.0
    keys = table.view(np.dtype((np.void, table.dtype.itemsize * table.shape[1]))).ravel()
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    copies = len(X) - len(first)
    if copies == 0 and (weight is None or bool((weight == 1).all())):
        return X, y, None
    if copies:
        log.info("%d rows are copies of others: they count as weights", copies)
    return X[first], y[first], np.bincount(which, weights=weight).astype(np.float64)


_TYPES: dict[Any, Any] = {"float64": torch.float64, "float32": torch.float32}


class BayesianEstimator(BaseEstimator):
    """A network with a posterior, as a scikit-learn estimator.

    Attributes
    ----------
    posterior_ : Posterior
        The result of `doxa.fit`: status, diagnostics, `predict`, `functions`, `save`.
    n_features_in_ : int
        Number of columns of X.
    feature_names_in_ : ndarray of str
        Names of the columns, if X had any.
    columns_ : list of dict
        How the columns are encoded, if X was a data frame with text, categories or dates.
    """

    def __init__(
        self,
        method: str | Method | type[Method] = "deep-ensemble",
        *,
        net: nn.Module | Builder | None = None,
        hidden: Sequence[int] = (50,),
        likelihood: str | Likelihood | None = None,
        prior: Any = None,
        subset: Subset | None = None,
        members: int | Sequence[int] | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        lr: float | None = None,
        batch_size: int | None = None,
        schedule: Any = None,
        optimizer: Any = "adam",
        validation: str | float | None = "auto",
        patience: int = 20,
        init: str = "fresh",
        standardize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = "float64",
        random_state: int | np.random.RandomState | None = 0,
        progress: bool | None = False,
        column_order: str = "fixed",
    ) -> None:
        """Store the settings; nothing is checked before `fit`.

        Parameters that are not listed are those of `doxa.fit`. The defaults are the same, except
        for `standardize` (as on the command line) and `dtype` (double precision, as in
        scikit-learn).

        Parameters
        ----------
        method : str or Method, default "deep-ensemble"
            A name (see `doxa.methods()`) or a method object with its settings.
        net : Module or callable, optional
            An `nn.Module`, or a builder that is called as net(inputs, outputs). The default is an
            MLP.
        hidden : sequence of int, default (50,)
            Hidden widths of the MLP.
        likelihood : str or Likelihood, optional
            A name or an object. The default depends on the estimator.
        members, epochs, steps, lr, batch_size : optional
            None uses the defaults of the method.
        validation : "auto", float or None, default "auto"
            "auto": methods that can overfit hold rows out, different ones for each member. A
            number: hold out that share of the rows. None: train on every row.
        standardize : bool, default True
            Scale the columns of X, and y if it is continuous.
        dtype : str or dtype, default "float64"
            "float64" or "float32" ("float32" gives bit for bit the result of a plain `doxa.fit`).
            None: that of the network.
        random_state : int, RandomState or None, default 0
            The seed of `doxa.fit`, a `RandomState` from which one is drawn, or None for a different
            seed in each fit.
        column_order : {"fixed", "any"}, default "fixed"
            "fixed": columns of a DataFrame in another order than in `fit` are an error, as in
            scikit-learn. "any": they are sorted by name.
        """
        self.method = method
        self.net = net
        self.hidden = hidden
        self.likelihood = likelihood
        self.prior = prior
        self.subset = subset
        self.members = members
        self.epochs = epochs
        self.steps = steps
        self.lr = lr
        self.batch_size = batch_size
        self.schedule = schedule
        self.optimizer = optimizer
        self.validation = validation
        self.patience = patience
        self.init = init
        self.standardize = standardize
        self.device = device
        self.dtype = dtype
        self.random_state = random_state
        self.progress = progress
        self.column_order = column_order

    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> Self:
        """Fit to rows X and targets y.

        Parameters
        ----------
        X : array_like [N, D]
            Inputs.
        y : array_like [N]
            Targets.
        sample_weight : array_like [N], optional
            One weight per row. A row of weight 2 counts as two rows, bit for bit, and a row of
            weight 0 is dropped: see `doxa.sklearn.estimator`.
        groups : array_like [N], optional
            The group of each row, as in `doxa.fit`: held-out rows are whole groups. Copies of a row
            then stay rows, and a row of weight 2 counts in the sum of its group.

        Returns
        -------
        self
        """
        self._check_settings()
        X, y = self._read(*without_zeros(X, y, sample_weight))
        weight = row_weights(sample_weight, len(X))
        targets = self._learn_targets(y, weight)
        method = as_method(self.method)
        likelihood, self._outputs = self._meaning(X)
        likelihood.prepare_targets(
            targets, (self._outputs,)
        )  # an error names the row as it is here
        if groups is None:
            X, targets, weight = counted(X, targets, weight)
        elif weight is not None and bool((weight == 1).all()):
            weight = None
        self.posterior_ = fit(
            self._network(method), (X, targets), method, likelihood=likelihood, prior=self.prior,
            subset=self.subset, members=self.members, seed=self._seed(), init=self.init,
            validation=self.validation, patience=self.patience, standardize=self.standardize,
            sample_weight=weight, groups=groups, device=self.device,
            dtype=_TYPES.get(self.dtype, self.dtype),
            batch_size=self.batch_size, steps=self.steps, epochs=self.epochs, lr=self.lr,
            schedule=self.schedule, optimizer=self.optimizer, progress=self.progress,
        )  # fmt: skip
        return self

    def predictive(self, X: Any) -> Predictive:
        """The predictive distribution of y at X: `aleatoric`, `epistemic`, `quantile`, …"""
        X = self._new(X)
        return self.posterior_.predict(X)

    def log_likelihood(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The mean log predictive density of y: a score for searches that includes uncertainty."""
        p = self.predictive(X)
        each = p.log_prob(self._known_targets(y)).cpu().double().numpy()
        return float(np.average(each, weights=row_weights(sample_weight, len(each))))

    def save(self, path: str | Path, overwrite: bool | None = None) -> None:
        """Write posterior and settings as safetensors and JSON; `load` and `doxa.load` read it.
        `overwrite` as in `Posterior.save`."""
        check_is_fitted(self)
        saving.save(self, path, overwrite)

    @classmethod
    def load(
        cls,
        path: str | Path,
        net: nn.Module | Builder | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """What `save` wrote; `net` where the network was not made by a registered builder."""
        return saving.load(cls, path, net, device)

    def __getstate__(self) -> dict[str, Any]:
        return saving.to_state(super().__getstate__())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        saving.from_state(self)

    @abstractmethod
    def _read(self, X: Any, y: Any) -> tuple[Array, Array]:
        """X and y as checked arrays."""

    @abstractmethod
    def _learn_targets(self, y: Array, weight: Array | None) -> Array:
        """y as `doxa.fit` takes it; what it looks like is remembered."""

    @abstractmethod
    def _known_targets(self, y: Any) -> Array:
        """y as `doxa.fit` takes it, after a fit."""

    @abstractmethod
    def _meaning(self, X: Array) -> tuple[Likelihood, int]:
        """The likelihood, and how many outputs it needs of the network."""

    def _likelihood(self, default: str) -> Likelihood:
        given = self.likelihood
        chosen = likelihoods.assumed(default) if given is None else likelihoods.likelihood(given)
        if isinstance(chosen, Heads):
            raise ModelError(
                f"{type(self).__name__} takes one likelihood, not a tuple; several heads are for "
                "doxa.fit"
            )
        return chosen

    def _network(self, method: Method) -> nn.Module | None:
        """The network for the settings, or None for a method that needs no network."""
        if self.net is None:
            if not method.needs_network:
                return None
            return nets.mlp(self._inputs(), self._outputs, self._widths())
        return made(self.net, self._inputs(), self._outputs)

    def _inputs(self) -> int:
        """The number of inputs of the network."""
        columns = vars(self).get("columns_")
        if columns is None:
            return int(self.n_features_in_)
        return sum(Column.from_json(column).width for column in columns)

    def _widths(self) -> list[int]:
        if isinstance(self.hidden, str) or not isinstance(self.hidden, Iterable):
            raise MethodError(f"hidden is a list of widths, such as (50, 50), not {self.hidden!r}")
        return [checks.whole("a width in hidden", width) for width in self.hidden]

    def _check_settings(self) -> None:
        share = isinstance(self.validation, Real)
        if self.validation is not None and self.validation != "auto" and not share:
            raise MethodError(
                f"validation is 'auto', None or a share of the rows, not {self.validation!r}; "
                "rows of your own are for doxa.fit"
            )
        if self.column_order not in ("fixed", "any"):
            raise MethodError(f"column_order is 'fixed' or 'any', not {self.column_order!r}")

    def _seed(self) -> int:
        if isinstance(self.random_state, Integral):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _new(self, X: Any) -> Array:
        check_is_fitted(self)
        return new_rows(self, X, any_order=self.column_order == "any")

    def _summary(self, X: Any) -> Predictive:
        """For means and variances: streamed where samples do not fit in memory."""
        X = self._new(X)
        try:
            return self.posterior_.predict(X)
        except MemoryBudgetError:
            return self.posterior_.predict(X, keep="moments")


def as_numbers(values: Tensor) -> Array:
    """In double precision, as scikit-learn's own estimators answer."""
    return values.detach().cpu().double().numpy()
