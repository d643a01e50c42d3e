"""One column of a table: its type, inferred from its cells, and its encoding as numbers.

`infer_column` and `infer_target` decide the type; the rules are in `doxa.tables.schema`. `Column`
encodes the cells.

Dates become numbers: days since 1970-01-01 (with the time as a fraction), month, weekday. A text
column holds dates if at least half of its cells are written in one of these ways: 2024-03-31 or
2024/03/31, with or without a time; 31.03.2024; 31/03/2024 or 03/31/2024 (also with dashes). In the
last two the day is the number that exceeds 12 somewhere in the column; if neither number does, the
layout is ambiguous and the column is dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from doxa.errors import DataError, did_you_mean
from doxa.likelihoods import LIKELIHOODS
from doxa.tables.reading import (
    Array,
    fault_at,
    gaps,
    import_pandas,
    is_text,
    label_of,
    labels_of,
    mostly_numbers,
    nested,
    numbers_of,
)

if TYPE_CHECKING:
    import pandas as pd


ISO, DAY_FIRST, MONTH_FIRST, UNCLEAR = "year-month-day", "day first", "month first", "unclear"
LAYOUTS = (ISO, DAY_FIRST, MONTH_FIRST)
PARTS = ("day", "month", "weekday")

_TIME = r"(?:[T ](?P<hour>\d{1,2})(?P<rest>:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:?\d{2})?))?"
_YEAR_FIRST = re.compile(r"(?P<year>\d{4})([-/])(?P<month>\d{1,2})\2(?P<day>\d{1,2})" + _TIME)
_YEAR_LAST = re.compile(r"(?P<one>\d{1,2})([./-])(?P<two>\d{1,2})\2(?P<year>\d{4})" + _TIME)


def layout_of(values: pd.Series) -> str | None:
    """How the dates of a column are written; None if the column holds no dates."""
    from pandas.api import types

    if types.is_datetime64_any_dtype(values):
        return ISO
    if not types.is_object_dtype(values) and not types.is_string_dtype(values):
        return None
    present = values.dropna().value_counts(sort=False)
    cells = [(str(cell).strip(), count) for cell, count in present.items()]
    first = sum(count for cell, count in cells if _YEAR_FIRST.fullmatch(cell))
    matches = [(match, count) for cell, count in cells if (match := _YEAR_LAST.fullmatch(cell))]
    last = sum(count for _, count in matches)
    if 2 * max(first, last) < present.sum() or not cells:
        return None
    if first >= last:
        return ISO
    one, two = (max(int(match[name]) for match, _ in matches) for name in ("one", "two"))
    if one > 12 or any(match[2] == "." for match, _ in matches):
        return DAY_FIRST
    return MONTH_FIRST if two > 12 else UNCLEAR


def days_of(values: pd.Series, layout: str) -> Array:
    """Days since 1970-01-01 in UTC [N], NaN if missing; an error for a cell that is no date."""
    pandas = import_pandas()
    given, options = values, {"errors": "coerce", "utc": True}
    if not pandas.api.types.is_datetime64_any_dtype(values):
        cells = values.astype("object").map(lambda c: _iso(str(c), layout), na_action="ignore")
        values, options = cells.astype("object"), options | {"format": "ISO8601"}
    moments = pandas.to_datetime(values, **options)
    bad = np.flatnonzero((moments.isna() & given.notna()).to_numpy())
    if bad.size:
        cell = given.iloc[int(bad[0])]
        raise DataError(
            f"{fault_at(given, bad.tolist())}: {str(cell)!r} is not a date "
            f"({layout}), but most cells of the column are; correct it, or drop the "
            "column with --drop"
        )
    epoch, day = pandas.Timestamp(0, tz="UTC"), pandas.Timedelta(days=1)
    for unit in ("ns", "s"):  # nanoseconds cannot represent times after 2262
        try:
            since = moments - epoch.as_unit(unit)
            return np.array(since / day.as_unit(unit), dtype=np.float64)
        except (OverflowError, ValueError) as error:
            wrong = error
    raise DataError(f"column {given.name!r} holds dates too far from today: {wrong}")


def _iso(cell: str, layout: str) -> str | None:
    """A date as 2024-03-31T09:30; None if it does not have this layout."""
    match = (_YEAR_FIRST if layout == ISO else _YEAR_LAST).fullmatch(cell.strip())
    if match is None:
        return None
    day, month = {ISO: ("day", "month"), DAY_FIRST: ("one", "two")}.get(layout, ("two", "one"))
    date = f"{match['year']}-{match[month]:0>2}-{match[day]:0>2}"
    return date if match["hour"] is None else f"{date}T{match['hour']:0>2}{match['rest']}"


def part_of(days: Array, part: str) -> Array:
    """One number of each date: its day, its month (1 to 12) or its weekday (Monday is 0)."""
    if part == "day":
        return days
    dates = np.floor(days).astype("datetime64[D]")
    if part == "month":
        return dates.astype("datetime64[M]").astype(np.int64) % 12 + 1.0
    return (dates.astype(np.int64) + 3.0) % 7  # 1970-01-01 was a Thursday


MISSING = "missing"  # the category of cells that are empty


@dataclass(frozen=True)
class Column:
    """A number; a category, with the categories seen in the fit; or a date, with its parts."""

    name: str
    categories: tuple[str, ...] | None = None
    parts: tuple[str, ...] | None = None
    layout: str | None = None  # how a date is written
    fill: float | None = None  # for a missing number or date: the median in the fit
    indicator: bool = False  # one more input marks missing cells

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Column:
        """Read a saved column, also of a version with fewer fields."""
        given: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()
        }
        return cls(**given)

    @property
    def sound(self) -> bool:
        """Whether every field has a valid value; a column from a file may not."""
        categories, parts, fill = self.categories, self.parts, self.fill
        return (
            isinstance(self.name, str)
            and isinstance(self.indicator, bool)
            and (categories is None or (isinstance(categories, tuple) and len(categories) > 0))
            and all(isinstance(category, str) for category in categories or ())
            and (parts is None or (isinstance(parts, tuple) and set(parts) <= set(PARTS)))
            and (parts is None or (self.layout in (None, *LAYOUTS) and len(parts) > 0))
            and (fill is None or (isinstance(fill, int | float) and math.isfinite(fill)))
            and not (fill is None and self.indicator)
        )

    @property
    def inputs(self) -> tuple[str, ...]:
        """The name of each input that the column becomes."""
        if self.categories is not None:
            return tuple(f"{self.name} = {category}" for category in self.categories)
        names = [f"{self.name} ({part})" for part in self.parts or ()] or [self.name]
        return (*names, f"{self.name} (missing)") if self.indicator else tuple(names)

    @property
    def width(self) -> int:
        return len(self.inputs)

    def encode(self, values: pd.Series) -> tuple[Array, list[str]]:
        """The inputs [N, width], and notes for the user."""
        empty = gaps(values)
        if self.categories is not None:
            return self._one_hot(values, empty)
        notes = []
        numbers = numbers_of(values) if self.parts is None else days_of(values, self.layout or "")
        if empty and self.fill is not None:  # otherwise missing cells are an error
            numbers[empty] = self.fill
            if not self.indicator:
                notes.append(
                    f"column {self.name!r}: {_cells(len(empty))} missing, none in the fit; "
                    "filled with the median"
                )
        shown = [numbers] if self.parts is None else [part_of(numbers, p) for p in self.parts]
        if self.indicator:
            shown.append(values.isna().to_numpy().astype(np.float64))
        return np.stack(shown, axis=1), notes

    def _one_hot(self, values: pd.Series, empty: list[int]) -> tuple[Array, list[str]]:
        assert self.categories is not None
        labels = labels_of(values)
        labels[empty] = MISSING
        hot = np.stack([labels == category for category in self.categories], axis=1)
        unseen = sorted(set(labels) - set(self.categories))
        notes = []
        if unseen:
            rows = int(np.isin(labels, unseen).sum())
            shown = ", ".join(map(repr, unseen[:3])) + (", ..." if len(unseen) > 3 else "")
            notes.append(
                f"column {self.name!r}: {shown} not seen in the fit ({rows} "
                f"row{'s' * (rows != 1)}); encoded as no category"
            )
        return hot.astype(np.float64), notes


def with_tuples(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping from JSON, with its lists as tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}


def _cells(count: int) -> str:
    return f"{count} cell{'s' * (count != 1)}"


MOST_CATEGORIES = 50
MOST_INTEGER_CLASSES = 10
FEWEST_COUNTED = 20  # rows from which a column 1, 2, 3, ... is a row number and not a measurement
COUNTS = "it counts the rows"
CLASSIFIERS = tuple(name for name, kind in LIKELIHOODS.items() if kind.classifies)
REGRESSIONS = tuple(name for name, kind in LIKELIHOODS.items() if not kind.classifies)
_YEARS = (1500, 2200)
_ID_WORDS = {"id", "uid", "uuid", "guid", "key", "idx", "nr", "rowid", "identifier"}
_ID_NAMES = {"index", "row", "no", "number", "#"}
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


class LeftOut(str):
    """The reason why a column is dropped."""


def infer_column(
    values: pd.Series, categorical: bool = False, numeric: bool = False, impute: bool = False
) -> Column | LeftOut:
    """The column, or the reason to drop it. `categorical`, `numeric`: given by the user."""
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
    """Why a column is an id or a row number; "" if it is neither.

    Every cell differs, and the cells are whole numbers or text under a name such as `id` or
    `customer_id`, or whole numbers that count the rows (from any start, years excepted), or UUIDs.
    """
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


FEWEST_NAMED, FEWEST_UNNAMED = 8, 21  # values of a column of groups, by its name


def may_hold_groups(values: pd.Series) -> bool:
    """Whether a column may name groups of rows: whole numbers or text, neither dates nor numbers as
    text, whose values repeat, two rows each on average. There are many values, or the column is
    named like an id. Of whole numbers without such a name, each value repeats."""
    from pandas.api import types

    whole, n = bool(types.is_integer_dtype(values)), len(values)
    if not (whole or (is_text(values) and not mostly_numbers(values))) or bool(values.isna().any()):
        return False
    counts = values.value_counts()
    named = _named_as_id(str(values.name))
    if not (FEWEST_NAMED if named else FEWEST_UNNAMED) <= len(counts) <= n / 2:
        return False
    repeated = int(counts[counts > 1].sum()) / n
    return (repeated == 1.0 if whole and not named else repeated >= 0.9) and (
        whole or layout_of(values) is None
    )


def describe(column: Column) -> str:
    """A note for the user on a column that is not a plain number; "" for one that is."""
    gone = f"; missing cells {_FILLED}" if column.indicator else ""
    if column.parts is not None:
        parts = {"day": "days since 1970-01-01"}
        listed = ", ".join(parts.get(part, part) for part in column.parts)
        return f"column {column.name!r} holds dates ({column.layout}): {listed}{gone}"
    if column.categories is not None:
        empty = f", including {MISSING!r}" if MISSING in column.categories else ""
        width = column.width
        return f"column {column.name!r} is categorical: {width} categories, one-hot{empty}"
    return f"column {column.name!r}{gone.replace(';', ':')}" if gone else ""


_FILLED = "are filled with the median, and one more input marks them"


def _number(values: pd.Series, impute: bool) -> Column:
    numbers = numbers_of(values)
    return Column(str(values.name), fill=_median(numbers), indicator=impute and bool(gaps(values)))


def _date(values: pd.Series, layout: str, impute: bool) -> Column | LeftOut:
    if layout == UNCLEAR:
        cell = str(values.dropna().iloc[0])
        return LeftOut(
            f"dates such as {cell!r}, in which day and month are ambiguous; write them as "
            "year-month-day"
        )
    days = days_of(values, layout)
    known = days[np.isfinite(days)]
    parts = tuple(p for p in PARTS if len(np.unique(part_of(known, p))) > 1) or PARTS[:1]
    gap = impute and len(known) < len(days)
    return Column(str(values.name), None, parts, layout, _median(known), indicator=gap)


def _median(numbers: Array) -> float:
    """The median of the present numbers, which fills missing cells; of two that are too large to
    be added, the lower."""
    with np.errstate(over="ignore"):
        found = float(np.nanmedian(numbers))
    return found if math.isfinite(found) else float(np.nanquantile(numbers, 0.5, method="lower"))


def _categories(values: pd.Series) -> Column:
    categories = set(labels_of(values.dropna())) | ({MISSING} if gaps(values) else set())
    return Column(str(values.name), tuple(sorted(categories)))


def infer_target(values: pd.Series, asked: str | None) -> tuple[str, tuple[Any, ...] | None, str]:
    """(likelihood, classes or None, note for the user)."""
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
        is_class, why = asked in CLASSIFIERS, "by --likelihood"
    elif boolean:
        is_class, why = True, "true/false"
    elif text:
        is_class, why = not mostly_numbers(values), "text"
    else:
        is_class = bool(types.is_integer_dtype(values)) and few
        why = f"whole numbers with {distinct} distinct values"
    if not is_class:
        likelihood = asked or "gaussian"
        numbers = numbers_of(values)  # an error, before any fit, for a cell that is no number
        if n > 1 and bool((numbers == numbers[0]).all()):
            raise DataError(
                f"column {name!r} is {numbers[0]:g} in every row: there is nothing to predict"
            )
        return (
            likelihood,
            None,
            f"target {name!r}: regression, likelihood {likelihood}"
            + (" (by --likelihood)" if asked else _if_counts(values, numbers)),
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
    if LIKELIHOODS[likelihood].binary and len(classes) != 2:
        raise DataError(f"column {name!r} has {len(classes)} classes; {likelihood} needs two")
    shown = ", ".join(map(str, classes[:6])) + (", ..." if len(classes) > 6 else "")
    return (
        likelihood,
        classes,
        f"target {name!r}: classification, {len(classes)} classes ({shown}), "
        f"likelihood {likelihood} ({why})",
    )


def _if_counts(values: pd.Series, numbers: Array) -> str:
    """Advice where a target may be counts: whole numbers from 0 on. Ages and years rarely have a
    0."""
    from pandas.api import types

    may = types.is_integer_dtype(values) and numbers.min() == 0
    return " (--likelihood counts, if it counts something)" if may else ""


def _classes(values: pd.Series) -> tuple[Any, ...]:
    """The distinct labels in order, as plain Python values for JSON."""
    plain = {label_of(v): v.item() if isinstance(v, np.generic) else v for v in values.unique()}
    numbers = all(isinstance(v, (int, float)) for v in plain.values())
    keys = sorted(plain, key=(lambda k: plain[k]) if numbers else None)
    return tuple(plain[k] if numbers else k for k in keys)
