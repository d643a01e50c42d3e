"""What a column and a target mean, decided from their cells; the rules are in `doxa.app.schema`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from doxa.app.cells import gaps, is_text, label_of, labels_of, mostly_numbers, nested, numbers_of
from doxa.app.columns import MISSING, Column
from doxa.app.dates import PARTS, UNCLEAR, days_of, layout_of, part_of
from doxa.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

MOST_CATEGORIES = 50
MOST_INTEGER_CLASSES = 10
FEWEST_COUNTED = 20  # rows from which a column 1, 2, 3, ... is a row number and not a measurement
COUNTS = "it counts the rows"
CLASSIFIERS = ("bernoulli", "categorical")
REGRESSIONS = ("gaussian", "heteroscedastic", "student-t", "poisson")
_YEARS = (1500, 2200)
_ID_WORDS = {"id", "uid", "uuid", "guid", "key", "idx", "nr", "rowid", "identifier"}
_ID_NAMES = {"index", "row", "no", "number", "#"}
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


class LeftOut(str):
    """Why a column is no input."""


def infer_column(
    values: pd.Series, categorical: bool = False, numeric: bool = False, impute: bool = False
) -> Column | LeftOut:
    """The column's meaning, or the reason to leave it out. `categorical`, `numeric`: as asked."""
    from pandas.api import types

    present = values.dropna()
    if present.empty:
        return LeftOut("no values")
    if nested(present):
        return LeftOut("its cells hold several values each")
    if values.nunique(dropna=False) == 1:
        return LeftOut("constant")
    if categorical:
        return _categories(values)
    if not numeric and (reason := id_words(values)):
        return LeftOut(f"{reason} (--numeric or --categorical uses it)")
    text = is_text(values)
    if numeric or (types.is_numeric_dtype(values) and not types.is_bool_dtype(values)):
        return _number(values, impute)
    if not types.is_bool_dtype(values) and (layout := layout_of(values)):
        return _date(values, layout, impute)
    if text and mostly_numbers(values):
        return _number(values, impute)
    if not (types.is_bool_dtype(values) or text):
        return LeftOut(f"type {values.dtype} is not supported")
    different = present.nunique()
    if different > max(2, 0.9 * len(present)):
        return LeftOut("text that differs in nearly every row")
    if different > MOST_CATEGORIES:
        return LeftOut(f"text with {different} different values")
    return _categories(values)


def id_words(values: pd.Series) -> str:
    """Why a column names rows and measures nothing; "" where it does not.

    Every cell differs, and either they are whole numbers or text under a name such as `id` or
    `customer_id`, or whole numbers that count the rows (from anywhere, but for years), or UUIDs."""
    from pandas.api import types

    n = len(values)
    whole = bool(types.is_integer_dtype(values))
    if n < 3 or not (whole or is_text(values)) or values.isna().any() or values.nunique() < n:
        return ""
    if not whole and all(_UUID.fullmatch(label_of(cell)) for cell in values):
        return "an id: another UUID in every row"
    if _named_as_id(str(values.name)) and (whole or layout_of(values) is None):
        return "an id: another value in every row"
    if whole and n >= FEWEST_COUNTED:
        steps = values.to_numpy().astype(np.float64) - np.arange(n)
        years = steps[0] >= _YEARS[0] and steps[0] + n <= _YEARS[1]
        if not years and bool((steps == steps[0]).all()):
            return COUNTS
    return ""


def _named_as_id(name: str) -> bool:
    words = re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower().replace("_", " ")
    last = re.split(r"[\s.\-]+", words.strip())[-1]
    return words.strip() in _ID_NAMES or last in _ID_WORDS or last.endswith("nr")


def describe(column: Column) -> str:
    """What to tell the user of a column that is not simply a number; "" of one that is."""
    gone = f"; missing cells {_FILLED}" if column.indicator else ""
    if column.parts is not None:
        parts = {"day": "days since 1970-01-01"}
        listed = ", ".join(parts.get(part, part) for part in column.parts)
        return f"column {column.name!r} holds dates ({column.layout}): {listed}{gone}"
    if column.categories is not None:
        empty = f", {MISSING!r} among them" if MISSING in column.categories else ""
        width = column.width
        return f"column {column.name!r} is categorical: {width} categories, one-hot{empty}"
    return f"column {column.name!r}{gone.replace(';', ':')}" if gone else ""


_FILLED = "are filled with the median, and one more input says where"


def _number(values: pd.Series, impute: bool) -> Column:
    numbers = numbers_of(values)
    fill = float(np.nanmedian(numbers)) if impute else None
    return Column(str(values.name), fill=fill, indicator=impute and bool(gaps(values)))


def _date(values: pd.Series, layout: str, impute: bool) -> Column | LeftOut:
    if layout == UNCLEAR:
        cell = str(values.dropna().iloc[0])
        return LeftOut(
            f"dates such as {cell!r}, of which nobody can tell day from month; write them as "
            "year-month-day"
        )
    days = days_of(values, layout)
    known = days[np.isfinite(days)]
    parts = tuple(p for p in PARTS if len(np.unique(part_of(known, p))) > 1) or PARTS[:1]
    fill = float(np.median(known)) if impute else None
    return Column(
        str(values.name), None, parts, layout, fill, indicator=impute and len(known) < len(days)
    )


def _categories(values: pd.Series) -> Column:
    categories = set(labels_of(values.dropna())) | ({MISSING} if gaps(values) else set())
    return Column(str(values.name), tuple(sorted(categories)))


def infer_target(values: pd.Series, asked: str | None) -> tuple[str, tuple[Any, ...] | None, str]:
    """(likelihood, classes or None, what to tell the user)."""
    from pandas.api import types

    name, n = values.name, len(values)
    known = (*REGRESSIONS, *CLASSIFIERS)
    if asked is not None and asked not in known:
        raise DataError(f"unknown likelihood {asked!r}{did_you_mean(asked, known)}")
    boolean, text = types.is_bool_dtype(values), is_text(values)
    if nested(values):
        raise DataError(f"column {name!r} holds several values in each cell: it cannot be a target")
    if not (boolean or text or types.is_numeric_dtype(values)):
        raise DataError(f"column {name!r} of type {values.dtype} cannot be a target")
    if text and asked not in CLASSIFIERS and layout_of(values):
        raise DataError(f"column {name!r} holds dates, which cannot be a target; derive a number")
    distinct = values.nunique()
    few = distinct <= MOST_INTEGER_CLASSES and 2 * distinct <= n
    if asked is not None:
        is_class, why = asked in CLASSIFIERS, "as asked"
    elif boolean:
        is_class, why = True, "true/false"
    elif text:
        is_class, why = not mostly_numbers(values), "text"
    else:
        is_class = bool(types.is_integer_dtype(values)) and few
        why = f"whole numbers with {distinct} distinct values"
    if not is_class:
        likelihood = asked or "gaussian"
        numbers = numbers_of(values)  # a cell that is no number is an error before any fit
        if n > 1 and bool((numbers == numbers[0]).all()):
            raise DataError(
                f"column {name!r} is {numbers[0]:g} in every row: there is nothing to predict"
            )
        return (
            likelihood,
            None,
            f"target {name!r}: regression, likelihood {likelihood}"
            + (" (as asked)" if asked else ""),
        )
    classes = _classes(values)
    if len(classes) < 2:
        raise DataError(f"column {name!r} has one class only ({classes[0]!r}); two are needed")
    if len(classes) > max(2, n // 2):
        raise DataError(
            f"column {name!r} has {len(classes)} classes in {n} rows; a class needs two rows on "
            "average (for a number, ask for --likelihood gaussian)"
        )
    likelihood = asked or ("bernoulli" if len(classes) == 2 else "categorical")
    if likelihood == "bernoulli" and len(classes) != 2:
        raise DataError(f"column {name!r} has {len(classes)} classes; bernoulli needs two")
    shown = ", ".join(map(str, classes[:6])) + (", ..." if len(classes) > 6 else "")
    return (
        likelihood,
        classes,
        f"target {name!r}: classification, {len(classes)} classes ({shown}), "
        f"likelihood {likelihood} ({why})",
    )


def _classes(values: pd.Series) -> tuple[Any, ...]:
    """The distinct labels in order, as plain Python values that JSON keeps."""
    plain = {label_of(v): v.item() if isinstance(v, np.generic) else v for v in values.unique()}
    numbers = all(isinstance(v, (int, float)) for v in plain.values())
    keys = sorted(plain, key=(lambda k: plain[k]) if numbers else None)
    return tuple(plain[k] if numbers else k for k in keys)
