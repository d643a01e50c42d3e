"""Frames: tables whose columns and rows have names, of whichever library.

Nothing is imported for them: a frame is what has `columns`, `to_numpy` and columns by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from doxa.errors import DataError

_MOST = 12  # names in a message


@dataclass(frozen=True)
class Names:
    """What a table's columns and rows are called, where it says so."""

    columns: tuple[str, ...] | None = None
    index: Any = None  # row labels, by position

    @classmethod
    def of(cls, value: Any) -> Names:
        """Of a frame or a series; of anything else, none."""
        if not hasattr(value, "to_numpy"):
            return cls()
        index = getattr(value, "index", None)
        return cls(columns_of(value), None if callable(index) else index)

    def row(self, i: int) -> str:
        """ "row 3", counted from 0, with its label where that is another."""
        label = i if self.index is None else self.index[i]
        return f"row {i}" if label == i else f"row {i} (index {_plain(label)!r})"

    def place(self, i: int, at: Sequence[int]) -> str:
        """A row and what is in it: "row 3, column 'age'"."""
        if not at:
            return self.row(i)
        if len(at) == 1 and self.columns is not None:
            return f"{self.row(i)}, column {self.columns[at[0]]!r}"
        return f"{self.row(i)}, column {at[0] if len(at) == 1 else list(at)}"


def _plain(label: Any) -> Any:
    """A label as Python shows it, not as its library does; dates as text."""
    value = label.item() if isinstance(label, np.generic) else label
    return value if isinstance(value, int | float | str | tuple) else str(value)


def is_frame(value: Any) -> bool:
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def columns_of(value: Any) -> tuple[str, ...] | None:
    """The names of a frame's columns; None where they are no words, such as 0, 1, 2."""
    if not is_frame(value):
        return None
    names = tuple(value.columns)
    return names if names and all(isinstance(name, str) for name in names) else None


def in_order(frame: Any, columns: Sequence[str] | None, what: str = "x") -> Any:
    """A frame with the columns of the fit, in its order; what has no names is taken by position."""
    given = columns_of(frame)
    if columns is None or given is None or given == tuple(columns):
        return frame
    check_once(given, what)
    missing = [name for name in columns if name not in given]
    extra = [name for name in given if name not in columns]
    lacks = f"lacks the column{'s' if len(missing) > 1 else ''} {_listed(missing)}"
    said = [lacks] if missing else []
    said += [f"has {_listed(extra)}, which the fit did not see"] if extra else []
    if said:
        advice = "" if missing else f"; select what it saw: {what}[posterior.columns]"
        raise DataError(f"{what} {' and '.join(said)}{advice}")
    return frame[list(columns)]


def numbers(frame: Any, what: str) -> np.ndarray[Any, Any]:
    """A frame as an array; columns that are no numbers are named, all at once."""
    check_once(tuple(frame.columns), what)
    array = np.asarray(frame.to_numpy())
    if array.dtype.kind in "biufc":
        return array
    parts = {name: _column(frame[name]) for name in frame.columns}
    bad = [
        f"{name!r} ({getattr(frame[name], 'dtype', part.dtype)})"
        for name, part in parts.items() if part.dtype.kind not in "biufc"
    ]  # fmt: skip
    if bad:
        one = len(bad) == 1
        raise DataError(
            f"{what} has {'a column' if one else 'columns'} of other things than numbers: "
            f"{', '.join(bad[:_MOST])}{', …' if len(bad) > _MOST else ''}; encode "
            f"{'it' if one else 'them'} first, or fit the file from the shell, which does"
        )
    return np.column_stack(list(parts.values()))


def _column(series: Any) -> np.ndarray[Any, Any]:
    """One column; numbers that may be missing are NaN where they are."""
    column = np.asarray(series)
    if column.dtype.kind == "O" and getattr(series.dtype, "kind", "O") in "biuf":
        return np.asarray(series.to_numpy(dtype=float, na_value=np.nan))
    return column


def check_once(names: Sequence[Any], what: str) -> None:
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{what} has several columns called {_listed(twice)}; rename them")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_MOST])) + (", …" if len(names) > _MOST else "")
