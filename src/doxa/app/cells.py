"""Cells of a column as numbers, labels or dates, each fault with its place.

A row is named one way everywhere: by its line in the file where a text table has no index of its
own (the header is line 1), else by its index, which Python counts from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any

import numpy as np

from doxa.errors import DataError, MissingExtra

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, np.dtype[Any]]

LINE = "line"  # the name of an index that holds lines of a file
_STAND_INS = ("?", "-", "--", "–", ".", "*", "missing", "unknown", "undefined", "empty", "no data")
_CURRENCY = "$€£¥₹"
_NUMBER = re.compile(r"[+-]?(\d+([.,\s’']\d+)*|[.,]\d+)(e[+-]?\d+)?", re.IGNORECASE)
_COMMA = re.compile(r"[+-]?\d*,\d+")


def import_pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra("reading tables needs pandas: pip install 'doxa[tables]'") from error
    return pandas


def place_of(index: pd.Index, row: int) -> str:
    """How messages name a row: `line 7` of a file, else `row 'k7'` or `row 7` of its index."""
    label = index[row]
    if index.name == LINE:
        return f"line {label}"
    return f"row {str(label)!r}" if isinstance(label, str) else f"row {label}"


def fault_at(values: pd.Series, rows: Sequence[int]) -> str:
    """`column 'age', line 7 (3 in all)`: where something is wrong first, and how often."""
    more = f" ({len(rows)} in all)" if len(rows) > 1 else ""
    return f"column {values.name!r}, {place_of(values.index, int(rows[0]))}{more}"


def is_text(values: pd.Series) -> bool:
    from pandas.api import types

    return (
        types.is_object_dtype(values)
        or types.is_string_dtype(values)
        or isinstance(values.dtype, import_pandas().CategoricalDtype)
    )


def nested(values: pd.Series) -> bool:
    """Whether some cell holds several values: a list, a map or a structure of Parquet."""
    if values.dtype != object:
        return False
    return any(isinstance(cell, (list, tuple, dict, set, np.ndarray)) for cell in values)


def mostly_numbers(values: pd.Series) -> bool:
    """At least half of the cells are numbers, or would be without a sign, unit or separator."""
    if isinstance(values.dtype, import_pandas().CategoricalDtype):
        return False
    present = values.dropna().value_counts(sort=False)
    numeric = sum(count for cell, count in present.items() if _looks_numeric(cell))
    return bool(2 * numeric >= present.sum() > 0)


def _looks_numeric(cell: Any) -> bool:
    if isinstance(cell, str):
        text = cell.strip().strip(_CURRENCY + "%").strip()
        return _NUMBER.fullmatch(text) is not None or text.lower().lstrip("+-") in ("inf", "nan")
    return isinstance(cell, Number) and not isinstance(cell, (bool, np.bool_))


def numbers_of(values: pd.Series) -> Array:
    """The cells as float64 [N], NaN where they are missing; the first that is no finite number is
    named."""
    try:
        numbers = import_pandas().to_numeric(values, errors="coerce")
        parsed = np.array(numbers, dtype=np.float64)
    except (OverflowError, TypeError, ValueError):  # an integer of 400 digits, among others
        parsed = np.array([float_of(cell) for cell in values])
    bad = np.flatnonzero(~np.isfinite(parsed) & values.notna().to_numpy())
    if bad.size:
        cell = values.iloc[int(bad[0])]
        if isinstance(cell, str) and not np.isinf(float_of(cell)):
            wrong = f"{_short(cell)!r} is not a number{_advice(cell.strip())}"
        else:
            wrong = (
                f"'{_short(str(cell))}' is not finite; mend it, or leave the cell empty if it is "
                "not known"
            )
        raise DataError(f"{fault_at(values, bad.tolist())}: {wrong}")
    return parsed


def float_of(cell: Any) -> float:
    """A cell as a number: infinite where it is too large for one, NaN where it is none."""
    try:
        return float(cell)
    except OverflowError:
        return float("inf")
    except (TypeError, ValueError):
        return float("nan")


def _short(cell: str) -> str:
    return cell if len(cell) <= 60 else f"{cell[:59]}…"


def _advice(cell: str) -> str:
    """What to do about a text in a column of numbers."""
    if "%" in cell:
        return "; remove the percent signs"
    if any(sign in cell for sign in _CURRENCY):
        return "; remove the currency signs"
    if _COMMA.fullmatch(cell):
        return "; for a decimal comma --decimal ',', else remove the separators of thousands"
    if _looks_numeric(cell):
        return "; remove the separators of thousands"
    if cell.lower() in _STAND_INS:
        return "; if it stands for a missing value, leave the cell empty"
    return ", as most of the column are"


def label_of(value: Any) -> str:
    """A category as text; 1 and 1.0 are the same one."""
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    return str(value).strip()


def labels_of(values: Iterable[Any]) -> Array:
    return np.array([label_of(value) for value in values], dtype=object)


def gaps(values: pd.Series) -> list[int]:
    """Where cells are missing."""
    return np.flatnonzero(values.isna().to_numpy()).tolist()


def refuse_gaps(frame: pd.DataFrame, names: Iterable[str]) -> None:
    """All columns with missing cells at once, each with its first place and their number."""
    wanted = [frame[name] for name in names]
    faults = [fault_at(values, rows) for values in wanted if (rows := gaps(values))]
    if faults:
        raise DataError(
            f"missing values: {'; '.join(faults)}. --missing impute fills them in; or fill these "
            "cells, remove their rows, or leave a column out with --drop"
        )
