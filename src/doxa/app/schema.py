"""What the columns of a table mean: the schema that is saved with a posterior.

What a column means is decided once, when fitting, and kept as a `Schema`; prediction reads new
tables by it. Every decision is said to the user through `Schema.notes`.

Columns. Numbers are used as they are. Text, categories and true/false become one-hot columns, one
for each category seen when fitting; a category seen only later is all zeros, and said. A text
column in which at least half the cells are numbers (or would be without a percent or currency sign
or separators) is meant to be numeric, and the others are an error naming column and row. Dates
become days, month and weekday (`doxa.app.columns`). Dropped, with a note: constant columns, ids
(every cell differs, and the name says so, or they count the rows and are not the only input, or
they are UUIDs), text with more than 50 categories or a different value in (nearly) every row.
`categorical` and `numeric` override.

Missing cells are an error that names every such column, unless `missing` is "impute": then numbers
and dates get the median and one more input that says where, categories the category "missing", and
rows without a target are left out.

Target. Text, categories, true/false, and whole numbers (an integer column) with at most 10
distinct values, each seen twice on average, are classes: `bernoulli` for two, `categorical` for
more. Any other number is a regression: `gaussian`. `--likelihood` overrides.

From a file to rows and their meaning: what every command on tables begins with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from doxa.app.columns import (
    CLASSIFIERS,
    COUNTS,
    REGRESSIONS,
    Column,
    LeftOut,
    describe,
    infer_column,
    infer_target,
    with_tuples,
)
from doxa.app.reading import (
    Array,
    Dialect,
    gaps,
    label_of,
    labels_of,
    numbers_of,
    place_of,
    refuse_gaps,
)
from doxa.app.tables import open_table, pick
from doxa.errors import DataError, StoreError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd


IMPUTE = "impute"
MISSING_CELLS = ("error", IMPUTE)


@dataclass(frozen=True)
class Schema:
    """What the columns of a table mean. Saved as JSON in the posterior's metadata."""

    target: str
    likelihood: str
    columns: tuple[Column, ...]
    classes: tuple[Any, ...] | None = None  # labels in the order of the network's outputs
    index: str | None = None
    notes: tuple[str, ...] = ()
    missing: str = "error"  # what becomes of missing cells, here and in prediction
    left_out: tuple[str, ...] = ()
    dialect: Dialect | None = None  # how the file was written, where it was text
    assumed: bool = False  # nobody asked for the likelihood

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
        """Also of a schema that knew fewer fields; StoreError where it is none that was saved."""
        try:
            given = with_tuples(saved)
            given["columns"] = tuple(Column.from_json(column) for column in saved["columns"])
            if given.get("dialect") is not None:
                given["dialect"] = Dialect(**given["dialect"])
            found = cls(**given)
            sound = found._sound()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"what the run's columns mean cannot be read: {error}") from error
        if not sound:
            raise StoreError("what the run's columns mean is not as it was saved")
        return found

    def _sound(self) -> bool:
        """Whether every field holds what `infer_schema` puts there."""
        texts = [self.target, self.likelihood, *self.notes, *self.left_out]
        maybe: list[Any] = [self.index]
        if self.dialect is not None:
            maybe += asdict(self.dialect).values()
        classes = None if self.classes is None else [*self.classes]
        return (
            all(isinstance(text, str) for text in texts)
            and all(text is None or isinstance(text, str) for text in maybe)
            and all(isinstance(each, tuple) for each in (self.notes, self.left_out))
            and self.likelihood in (*REGRESSIONS, *CLASSIFIERS)
            and self.missing in MISSING_CELLS
            and isinstance(self.assumed, bool)
            and (classes is not None) == (self.likelihood in CLASSIFIERS)
            and (classes is None or all(isinstance(label, str | int | float) for label in classes))
            and (classes is None or len({label_of(label) for label in classes}) == len(classes) > 1)
            and not (self.likelihood == "bernoulli" and len(classes or ()) != 2)
            and len(self.columns) > 0
            and all(column.sound for column in self.columns)
            and len({column.name for column in self.columns}) == len(self.columns)
        )

    def features(self, frame: pd.DataFrame) -> tuple[Array, list[str]]:
        """The network's inputs [N, D] in float64, columns taken by name, and what to tell the user:
        columns that are not used, categories never seen, cells filled in."""
        names = [column.name for column in self.columns]
        known = {*names, *self.left_out, self.target, self.index}
        extra = [str(name) for name in frame.columns if name not in known]
        there = extra or [str(name) for name in frame.columns]
        _refuse_absent([name for name in names if name not in frame.columns], there)
        notes = []
        if extra:
            notes.append(f"not used, as there was no such column when fitting: {_quoted(extra)}")
        values = [pick(frame, name) for name in names]
        if self.missing != IMPUTE:
            refuse_gaps(frame, names)
        parts = []
        for column, cells in zip(self.columns, values, strict=True):
            numbers, said = column.encode(cells)
            parts.append(numbers)
            notes += said
        return np.concatenate(parts, axis=1), notes

    def targets(self, frame: pd.DataFrame) -> Array:
        """The target [N]: class numbers, or values in their own units."""
        values = pick(frame, self.target)
        refuse_gaps(frame, [self.target])
        if self.classes is None:
            return numbers_of(values)
        number = {label_of(value): k for k, value in enumerate(self.classes)}
        labels = labels_of(values)
        for row, label in enumerate(labels):
            if label not in number:
                raise DataError(
                    f"column {self.target!r}, {place_of(frame.index, row)}: class {label!r} was "
                    f"not seen when fitting{did_you_mean(label, number)}"
                )
        codes = np.array([number[label] for label in labels])
        return codes.astype(np.float64) if self.likelihood == "bernoulli" else codes


def with_target(frame: pd.DataFrame, target: str, missing: str) -> tuple[pd.DataFrame, list[str]]:
    """The rows whose target is known, and how many are not, where missing cells are imputed."""
    empty = gaps(pick(frame, target))
    if missing != IMPUTE or not empty:
        return frame, []
    if len(empty) == len(frame):
        raise DataError(f"column {target!r} is the target, and has no values")
    first = place_of(frame.index, empty[0])
    rows = f"{len(empty)} row{'s' * (len(empty) != 1)}"
    note = f"{rows} left out, without a value of the target {target!r} (the first: {first})"
    return frame[frame[target].notna()], [note]


def infer_schema(
    frame: pd.DataFrame,
    target: str,
    likelihood: str | None = None,
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
    index: str | None = None,
    numeric: Sequence[str] = (),
    missing: str = "error",
    dialect: Dialect | None = None,
) -> Schema:
    """Decide what every column means; see the module's docstring for the rules."""
    if missing not in MISSING_CELLS:
        raise DataError(f"--missing takes error or impute, not {missing!r}")
    values = pick(frame, target)
    _refuse_absent(
        [name for name in (*drop, *categorical, *numeric) if name not in frame.columns],
        [str(name) for name in frame.columns],
    )
    if target in drop:
        raise DataError(f"column {target!r} is the target and cannot be dropped")
    if twice := sorted(set(categorical) & set(numeric)):
        raise DataError(f"column {twice[0]!r} is asked to be both numeric and categorical")
    columns: list[Column] = []
    notes: list[str] = []
    left_out: list[str] = []
    counted: list[str] = []
    for name in map(str, frame.columns):
        if name == target:
            continue
        if name in drop:
            found: Column | LeftOut = LeftOut("as asked")
        else:
            found = infer_column(
                pick(frame, name), name in categorical, name in numeric, missing == IMPUTE
            )
        if isinstance(found, LeftOut):
            left_out.append(name)
            counted += [name] * found.startswith(COUNTS)
            notes.append(f"column {name!r} left out: {found}")
            continue
        columns.append(found)
        notes += [words] if (words := describe(found)) else []
    if not columns and counted:  # the only input: a time, and not the number of a row
        only = counted[0]
        columns = [Column(only, fill=float(frame[only].median()))]
        at = left_out.index(only)
        notes[at] = f"column {left_out.pop(at)!r} counts the rows; used, as there is no other input"
    if missing != IMPUTE:
        refuse_gaps(frame, [target, *(column.name for column in columns)])
    assumed = likelihood is None
    likelihood, classes, note = infer_target(values, likelihood)
    if not columns:
        raise DataError("no input column is left" + "".join(f"; {note}" for note in notes))
    return Schema(
        target,
        likelihood,
        tuple(columns),
        classes,
        index,
        (note, *notes),
        missing,
        tuple(left_out),
        dialect,
        assumed,
    )


def _refuse_absent(absent: Sequence[str], there: Sequence[str]) -> None:
    """Columns that are not there, all at once; a mistyped name gets the closest ones."""
    if len(absent) == 1:
        raise DataError(f"no column {absent[0]!r}{did_you_mean(absent[0], there)}")
    if absent:
        listed = ", ".join(there[:12]) + (", ..." if len(there) > 12 else "")
        raise DataError(f"no columns {_quoted(absent)}; there are: {listed}")


def _quoted(names: Iterable[str], most: int = 12) -> str:
    shown = [repr(name) for name in names]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


@dataclass(frozen=True)
class TableSpec:
    """What a user says of a table, instead of leaving it to recognition."""

    target: str
    likelihood: str | None = None
    index: str | None = None
    drop: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    numeric: tuple[str, ...] = ()
    missing: str = "error"
    dialect: Dialect = field(default_factory=Dialect)

    def __post_init__(self) -> None:
        if self.missing not in MISSING_CELLS:
            raise DataError(f"--missing takes error or impute, not {self.missing!r}")

    def facts(self) -> dict[str, Any]:
        """For the record of a run, the target aside, which its schema has."""
        said = asdict(self)
        return {k: v for k, v in said.items() if k not in ("target", "dialect")} | said["dialect"]


def read_dataset(path: Path, asked: TableSpec) -> tuple[pd.DataFrame, Schema]:
    """The rows that can be used, and what their columns mean."""
    frame, dialect, notes = open_table(path, asked.index, dialect=asked.dialect)
    frame, fewer = with_target(frame, asked.target, asked.missing)
    schema = inferred(frame, asked, dialect)
    return frame, replace(schema, notes=(*notes, *fewer, *schema.notes))


def inferred(frame: pd.DataFrame, asked: TableSpec, dialect: Dialect | None) -> Schema:
    """What the columns of some rows mean; their target is known."""
    return infer_schema(
        frame, asked.target, asked.likelihood, asked.drop, asked.categorical, asked.index,
        asked.numeric, asked.missing, dialect,
    )  # fmt: skip


def read_more(path: Path, schema: Schema, dialect: Dialect) -> tuple[pd.DataFrame, list[str]]:
    """Rows for a schema that is there already, and what to tell the user of their file."""
    frame, _, notes = open_table(path, schema.index, index_needed=False, dialect=dialect)
    return frame, notes


def read_labelled(path: Path, schema: Schema, dialect: Dialect) -> tuple[pd.DataFrame, list[str]]:
    """The same for rows whose target is to be known: to score by."""
    frame, notes = read_more(path, schema, dialect)
    frame, fewer = with_target(frame, schema.target, schema.missing)
    return frame, notes + fewer
