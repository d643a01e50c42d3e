"""What people pass to an estimator, checked by scikit-learn's rules, each fault with its place."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import _safe_indexing, check_array
from sklearn.utils.validation import _num_samples, validate_data

from doxa.errors import DataError, DoxaError, ShapeError

Array = np.ndarray[Any, np.dtype[Any]]

_FLOATS = (np.float64, np.float32)
_ENCODE = (
    "encode them as numbers first, in a pipeline: ColumnTransformer([('text', OneHotEncoder("
    "handle_unknown='ignore'), [names])], remainder='passthrough')"
)


def training_rows(estimator: BaseEstimator, X: Any, y: Any, **rules: Any) -> tuple[Array, Array]:
    """X [N, D] and y of a fit; the estimator learns how many columns there are, and their names."""
    X, y = _array_of(X), _array_of(y)
    _refuse_dates(X)
    return _checked(estimator, X, y, reset=True, ensure_min_samples=2, **rules)


def new_rows(estimator: BaseEstimator, X: Any, any_order: bool) -> Array:
    """X [N, D] of a prediction, with the columns of the fit; `any_order` puts them in order by
    name."""
    X = _array_of(X)
    known = getattr(estimator, "feature_names_in_", None)
    if any_order and known is not None and hasattr(X, "columns"):
        given = list(X.columns)
        if given != list(known) and len(given) == len(known) and set(given) == set(known):
            X = X[list(known)]
    return _checked(estimator, X, "no_validation", reset=False)


def row_weights(sample_weight: Any, rows: int) -> Array | None:
    """One finite, nonnegative weight a row; not all of them zero."""
    if sample_weight is None:
        return None
    weight = check_array(
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
    except (TypeError, ValueError):  # what is wrong is said by the checks of X, y and weights
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


def _refuse_dates(X: Any) -> None:
    if not _is_frame(X):
        return
    kinds = [getattr(dtype, "kind", "") for dtype in X.dtypes]
    dates = [repr(name) for name, kind in zip(X.columns, kinds, strict=True) if kind in ("m", "M")]
    if dates:
        raise DataError(
            f"X holds dates in column {_listed(dates)}: derive numbers from them first (days since "
            "a date, month, weekday)"
        )


def _with_place(message: str, X: Any, y: Any) -> str:
    """scikit-learn's words, and where in the table the fault is, or what to do about it."""
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
