"""Dates as numbers: days since 1970-01-01 (with the time as a fraction), month, weekday.

A text column holds dates when at least half of its cells are written in one of these ways:
2024-03-31 or 2024/03/31, with or without a time; 31.03.2024; 31/03/2024 or 03/31/2024 (also with
dashes). In the last two the day is the number that exceeds 12 somewhere in the column; where none
does, nobody can tell, and the column is left out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from doxa.app.cells import Array, fault_at, import_pandas
from doxa.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

ISO, DAY_FIRST, MONTH_FIRST, UNCLEAR = "year-month-day", "day first", "month first", "unclear"
LAYOUTS = (ISO, DAY_FIRST, MONTH_FIRST)
PARTS = ("day", "month", "weekday")

_TIME = r"(?:[T ](?P<hour>\d{1,2})(?P<rest>:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:?\d{2})?))?"
_YEAR_FIRST = re.compile(r"(?P<year>\d{4})([-/])(?P<month>\d{1,2})\2(?P<day>\d{1,2})" + _TIME)
_YEAR_LAST = re.compile(r"(?P<one>\d{1,2})([./-])(?P<two>\d{1,2})\2(?P<year>\d{4})" + _TIME)


def layout_of(values: pd.Series) -> str | None:
    """How the dates of a column are written; None where they are none."""
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
    """Days since 1970-01-01 in UTC [N], NaN where missing; a cell that is no date is named."""
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
            f"({layout}), as most of the column are; mend it, or --drop the column"
        )
    epoch, day = pandas.Timestamp(0, tz="UTC"), pandas.Timedelta(days=1)
    for unit in ("ns", "s"):  # in nanoseconds time ends in 2262
        try:
            since = moments - epoch.as_unit(unit)
            return np.array(since / day.as_unit(unit), dtype=np.float64)
        except (OverflowError, ValueError) as error:
            wrong = error
    raise DataError(f"column {given.name!r} holds dates too far from today: {wrong}")


def _iso(cell: str, layout: str) -> str | None:
    """A date as 2024-03-31T09:30; None where it is not written in this way."""
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
