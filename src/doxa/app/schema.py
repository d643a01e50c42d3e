"""What the columns of a table mean: the schema that is saved with a posterior.

What a column means is decided once, when fitting, and kept as a `Schema`; prediction reads new
tables by it. Every decision is said to the user through `Schema.notes`.

Columns. Numbers are used as they are. Text, categories and true/false become one-hot columns, one
for each category seen when fitting; a category seen only later is all zeros, and said. A text
column in which at least half the cells are numbers is meant to be numeric, and the others are an
error naming column and row. Constant columns, dates, and text with more than 50 categories or a
different value in (nearly) every row are left out, and said.

Target. Text, categories, true/false, and whole numbers (an integer column) with at most 10
distinct values, each seen twice on average, are classes: `bernoulli` for two, `categorical` for
more. Any other number is a regression: `gaussian`. `--likelihood` overrides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from doxa.app.tables import (
    Array,
    is_text,
    label_of,
    labels_of,
    mostly_numbers,
    numbers_of,
    pick,
    refuse_missing,
)
from doxa.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

MOST_CATEGORIES = 50
MOST_INTEGER_CLASSES = 10
CLASSIFIERS = ("bernoulli", "categorical")
REGRESSIONS = ("gaussian", "heteroscedastic", "student-t", "poisson")


@dataclass(frozen=True)
class Column:
    """One input column: numeric, or categorical with the categories seen when fitting."""

    name: str
    categories: tuple[str, ...] | None = None

    @property
    def width(self) -> int:
        return 1 if self.categories is None else len(self.categories)


@dataclass(frozen=True)
class Schema:
    """What the columns of a table mean. Saved as JSON in the posterior's metadata."""

    target: str
    likelihood: str
    columns: tuple[Column, ...]
    classes: tuple[Any, ...] | None = None  # labels in the order of the network's outputs
    index: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def inputs(self) -> int:
        return sum(column.width for column in self.columns)

    @property
    def outputs(self) -> int:
        """How many numbers the network must give a row."""
        if self.likelihood == "categorical":
            return len(self.classes or ())
        return 2 if self.likelihood == "heteroscedastic" else 1

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Schema:
        columns = tuple(
            Column(c["name"], None if c["categories"] is None else tuple(c["categories"]))
            for c in saved["columns"]
        )
        classes = None if saved["classes"] is None else tuple(saved["classes"])
        return cls(
            saved["target"],
            saved["likelihood"],
            columns,
            classes,
            saved["index"],
            tuple(saved["notes"]),
        )

    def features(self, frame: pd.DataFrame) -> tuple[Array, list[str]]:
        """The network's inputs [N, D] in float64, and notes on categories never seen."""
        parts, notes = [], []
        for column in self.columns:
            values = pick(frame, column.name)
            refuse_missing(values)
            if column.categories is None:
                parts.append(numbers_of(values)[:, None])
                continue
            labels = labels_of(values)
            parts.append(
                np.stack([labels == category for category in column.categories], axis=1).astype(
                    np.float64
                )
            )
            unseen = sorted(set(labels) - set(column.categories))
            if unseen:
                rows = int(np.isin(labels, unseen).sum())
                shown = ", ".join(map(repr, unseen[:3])) + (", ..." if len(unseen) > 3 else "")
                notes.append(
                    f"column {column.name!r}: {shown} not seen when fitting ({rows} "
                    f"row{'s' * (rows != 1)}); encoded as no category"
                )
        return np.concatenate(parts, axis=1), notes

    def targets(self, frame: pd.DataFrame) -> Array:
        """The target [N]: class numbers, or values in their own units."""
        values = pick(frame, self.target)
        refuse_missing(values)
        if self.classes is None:
            return numbers_of(values)
        number = {label_of(value): k for k, value in enumerate(self.classes)}
        labels = labels_of(values)
        for row, label in enumerate(labels):
            if label not in number:
                raise DataError(
                    f"column {self.target!r}, row {row + 1}: class {label!r} was not seen when "
                    f"fitting{did_you_mean(label, number)}"
                )
        codes = np.array([number[label] for label in labels])
        return codes.astype(np.float64) if self.likelihood == "bernoulli" else codes


def infer_schema(
    frame: pd.DataFrame,
    target: str,
    likelihood: str | None = None,
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
    index: str | None = None,
) -> Schema:
    """Decide what every column means; see the module's docstring for the rules."""
    values = pick(frame, target)
    refuse_missing(values)
    for name in (*drop, *categorical):
        pick(frame, name)
    if target in drop:
        raise DataError(f"column {target!r} is the target and cannot be dropped")
    likelihood, classes, note = _infer_target(values, likelihood)
    columns: list[Column] = []
    notes = [note]
    for name in frame.columns:
        if name == target:
            continue
        if name in drop:
            notes.append(f"column {name!r} left out, as asked")
            continue
        column, reason = _infer_column(frame[name], forced=name in categorical)
        if column is None:
            notes.append(f"column {name!r} left out: {reason}")
            continue
        columns.append(column)
        if column.categories is not None:
            notes.append(f"column {name!r} is categorical: {column.width} categories, one-hot")
    if not columns:
        raise DataError("no input column is left" + "".join(f"; {note}" for note in notes[1:]))
    return Schema(target, likelihood, tuple(columns), classes, index, tuple(notes))


def _infer_target(values: pd.Series, asked: str | None) -> tuple[str, tuple[Any, ...] | None, str]:
    """(likelihood, classes or None, what to tell the user)."""
    from pandas.api import types

    name, n = values.name, len(values)
    known = (*REGRESSIONS, *CLASSIFIERS)
    if asked is not None and asked not in known:
        raise DataError(f"unknown likelihood {asked!r}{did_you_mean(asked, known)}")
    boolean, text = types.is_bool_dtype(values), is_text(values)
    if not (boolean or text or types.is_numeric_dtype(values)):
        raise DataError(f"column {name!r} of type {values.dtype} cannot be a target")
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
        numbers_of(values)  # a cell that is no number is an error here, before anything is fitted
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


def _infer_column(values: pd.Series, forced: bool) -> tuple[Column | None, str]:
    """The column's meaning, or None and the reason to leave it out."""
    from pandas.api import types

    name = str(values.name)
    if values.isna().all():
        return None, "no values"
    if values.nunique(dropna=False) == 1:
        return None, "constant"
    if not forced and types.is_datetime64_any_dtype(values):
        return None, "a date; derive numbers from it"
    numeric = types.is_numeric_dtype(values) and not types.is_bool_dtype(values)
    if not forced and (numeric or (is_text(values) and mostly_numbers(values))):
        refuse_missing(values)
        numbers_of(values)
        return Column(name), ""
    if not (forced or types.is_bool_dtype(values) or is_text(values)):
        return None, f"type {values.dtype} is not supported"
    refuse_missing(values)
    categories = tuple(sorted(set(labels_of(values))))
    if len(categories) > MOST_CATEGORIES and not forced:
        return None, f"text with {len(categories)} different values"
    if len(categories) > max(2, 0.9 * len(values)) and not forced:
        return None, "text that differs in nearly every row"
    return Column(name, categories), ""


def _classes(values: pd.Series) -> tuple[Any, ...]:
    """The distinct labels in order, as plain Python values that JSON keeps."""
    plain = {label_of(v): v.item() if isinstance(v, np.generic) else v for v in values.unique()}
    numbers = all(isinstance(v, (int, float)) for v in plain.values())
    keys = sorted(plain, key=(lambda k: plain[k]) if numbers else None)
    return tuple(plain[k] if numbers else k for k in keys)
