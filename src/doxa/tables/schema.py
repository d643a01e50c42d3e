"""The schema of a table: the type and encoding of its columns, saved with a posterior.

The schema is inferred once, in the fit, and kept as a `Schema`; prediction reads new tables with
it. Every decision is reported to the user through `Schema.notes`.

Columns. Numbers are used as they are. Text, categories and true/false become one-hot columns, one
for each category seen in the fit; a category that appears only later is encoded as all zeros, with
a note. A text column is taken as numeric if at least half of its cells are numbers (or would be
without a percent or currency sign or separators); its other cells are an error that names column
and row. Dates become days, month and weekday (`doxa.tables.columns`). Dropped, with a note:
constant columns; ids (every cell differs, and the column is named like an id, or counts the rows
and is not the only input, or holds UUIDs); text with more than 50 categories, or with a different
value in (nearly) every row. `categorical` and `numeric` override these rules.

Missing cells are an error that names every such column, unless `missing` is "impute". Then numbers
and dates get the median and one more input that marks the filled cells, categories get the category
"missing", and rows without a target are dropped.

Target. Text, categories, true/false, and whole numbers (an integer column) with at most 10
distinct values, each seen twice on average, are classes: `bernoulli` for two, `categorical` for
more. Any other number is a regression: `gaussian`. `--likelihood` overrides this.

`read_dataset`, `read_more` and `read_labelled` read a file and give its rows: every command on
tables begins with one of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from doxa.data.readers import ArrowReader, CsvReader
from doxa.data.streams import Stream
from doxa.errors import DataError, StoreError, did_you_mean
from doxa.likelihoods import LIKELIHOODS
from doxa.tables.columns import (
    CLASSIFIERS,
    COUNTS,
    MOST_CATEGORIES,
    REGRESSIONS,
    UNCLEAR,
    Column,
    LeftOut,
    days_of,
    describe,
    id_words,
    infer_column,
    infer_target,
    layout_of,
    with_tuples,
)
from doxa.tables.files import PARQUET, Table, open_table, pick
from doxa.tables.reading import (
    Array,
    Dialect,
    gaps,
    import_pandas,
    label_of,
    labels_of,
    numbers_of,
    place_of,
    refuse_gaps,
    separator_of_file,
)

if TYPE_CHECKING:
    import pandas as pd


IMPUTE = "impute"
MISSING_CELLS = ("error", IMPUTE)


@dataclass(frozen=True)
class Schema:
    """The columns of a table and their encoding. Saved as JSON in the posterior's metadata."""

    target: str
    likelihood: str
    columns: tuple[Column, ...]
    classes: tuple[Any, ...] | None = None  # labels in the order of the network's outputs
    index: str | None = None
    notes: tuple[str, ...] = ()
    missing: str = "error"  # how missing cells are treated, in the fit and in prediction
    left_out: tuple[str, ...] = ()  # dropped columns
    dialect: Dialect | None = None  # how the file was written, if it was text
    assumed: bool = False  # the user did not choose the likelihood
    group: str | None = None  # the column with the group of each row
    time: str | None = None  # the column with the time of each row

    @property
    def inputs(self) -> int:
        return sum(column.width for column in self.columns)

    @property
    def input_names(self) -> list[str]:
        """The column of the table that each input of the network comes from."""
        return [column.name for column in self.columns for _ in range(column.width)]

    @property
    def outputs(self) -> int:
        """The number of outputs of the network per row."""
        kind = LIKELIHOODS[self.likelihood]
        if kind.class_axis:
            return len(self.classes or ())
        return kind().outputs(torch.empty(1))[0]

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Schema:
        """Read a saved schema, also of a version with fewer fields; StoreError if it is damaged."""
        try:
            given = with_tuples(saved)
            given["columns"] = tuple(Column.from_json(column) for column in saved["columns"])
            if given.get("dialect") is not None:
                given["dialect"] = Dialect(**given["dialect"])
            found = cls(**given)
            sound = found._sound()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"the schema of the run's table cannot be read: {error}") from error
        if not sound:
            raise StoreError("the schema of the run's table is damaged")
        return found

    def _sound(self) -> bool:
        """Whether every field has a value that `infer_schema` can give."""
        texts = [self.target, self.likelihood, *self.notes, *self.left_out]
        maybe: list[Any] = [self.index, self.group, self.time]
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
            and not (LIKELIHOODS[self.likelihood].binary and len(classes or ()) != 2)
            and len(self.columns) > 0
            and all(column.sound for column in self.columns)
            and len({column.name for column in self.columns}) == len(self.columns)
        )

    def with_missing(self, missing: str | None) -> Schema:
        """The schema with another treatment of missing cells; None: that of the fit."""
        if missing not in (None, *MISSING_CELLS):
            raise DataError(f"--missing takes error or impute, not {missing!r}")
        if missing == IMPUTE:
            empty = [c.name for c in self.columns if c.categories is None and c.fill is None]
            if empty:
                raise DataError(
                    f"the run holds no median of {_quoted(empty)}, because an earlier version of "
                    "doxa fitted it: fit again, or fill the cells"
                )
        return self if missing is None else replace(self, missing=missing)

    def named(self, x: Array) -> Any:
        """The inputs [N, D] as a data frame, so that messages name their columns; as they are if
        two inputs have the same name."""
        names = [name for column in self.columns for name in column.inputs]
        if len(set(names)) < len(names):
            return x
        return import_pandas().DataFrame(x, columns=names, copy=False)

    def features(self, frame: pd.DataFrame) -> tuple[Array, list[str]]:
        """The network's inputs [N, D] in float64, with columns taken by name, and notes for the
        user: unused columns, unseen categories, imputed cells."""
        notes = self.check_columns([str(name) for name in frame.columns])
        x, more = encode(frame, self.columns, self.missing)
        return x, notes + more

    def check_columns(self, there: Sequence[str]) -> list[str]:
        """An error if a column of the fit is not in a table with these columns, and a note on the
        columns that the fit did not have."""
        names = [column.name for column in self.columns]
        known = {*names, *self.left_out, self.target, self.index, self.group, self.time}
        extra = [name for name in there if name not in known]
        present = set(there)
        _refuse_absent([name for name in names if name not in present], extra or there)
        return [f"columns that the fit did not have are not used: {_quoted(extra)}"] * bool(extra)

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
        return codes.astype(np.float64) if LIKELIHOODS[self.likelihood].binary else codes


def with_target(frame: pd.DataFrame, target: str, missing: str) -> tuple[pd.DataFrame, list[str]]:
    """The rows with a target, and a note on the dropped rows, if missing cells are imputed."""
    empty = gaps(pick(frame, target))
    if missing != IMPUTE or not empty:
        return frame, []
    if len(empty) == len(frame):
        raise DataError(f"column {target!r} is the target, and has no values")
    first = place_of(frame.index, empty[0])
    rows = f"{len(empty)} row{'s' * (len(empty) != 1)}"
    note = f"{rows} dropped: no value of the target {target!r} (the first: {first})"
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
    group: str | None = None,
    time: str | None = None,
    time_input: bool = False,
) -> Schema:
    """Infer the type of every column; see the module's docstring for the rules."""
    if missing not in MISSING_CELLS:
        raise DataError(f"--missing takes error or impute, not {missing!r}")
    values = pick(frame, target)
    _refuse_absent(
        [
            name
            for name in (*drop, *categorical, *numeric, group, time)
            if name is not None and name not in frame.columns
        ],
        [str(name) for name in frame.columns],
    )
    for option, name in (("--group", group), ("--time", time)):
        if name == target:
            raise DataError(f"column {name!r} is the target and cannot be given as {option}")
    if target in drop:
        raise DataError(f"column {target!r} is the target and cannot be dropped")
    if twice := sorted(set(categorical) & set(numeric)):
        raise DataError(f"column {twice[0]!r} is given as both numeric and categorical")
    unused = dict.fromkeys(drop, "by --drop")
    if group is not None:
        unused[group] = "it holds the groups (--group)"
    if time is not None and not time_input:
        unused[time] = "it holds the times (--time); --time-input makes it an input"
    inputs = frame[[name for name in frame.columns if name != target]]
    columns, notes, left_out = infer_inputs(inputs, unused, categorical, numeric, missing == IMPUTE)
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
        group,
        time,
    )


def infer_inputs(
    frame: pd.DataFrame, unused: Mapping[str, str], categorical: Sequence[str] = (),
    numeric: Sequence[str] = (), impute: bool = False,
) -> tuple[list[Column], list[str], list[str]]:  # fmt: skip
    """The columns that are inputs, notes for the user, and the names of the dropped columns;
    `unused` says why some columns are none."""
    columns: list[Column] = []
    notes: list[str] = []
    left_out: list[str] = []
    counted: list[str] = []
    for name in map(str, frame.columns):
        found: Column | LeftOut
        if name in unused:
            found = LeftOut(unused[name])
        else:
            found = infer_column(pick(frame, name), name in categorical, name in numeric, impute)
        if isinstance(found, LeftOut):
            left_out.append(name)
            counted += [name] * found.startswith(COUNTS)
            notes.append(f"column {name!r} dropped: {found}")
            continue
        columns.append(found)
        notes += [note] if (note := describe(found)) else []
    if not columns and counted:  # the only input: a time, not a row number
        only = counted[0]
        columns = [Column(only, fill=float(frame[only].median()))]
        at = left_out.index(only)
        notes[at] = (
            f"column {left_out.pop(at)!r} counts the rows; used because it is the only input"
        )
    return columns, notes, left_out


def encode(
    frame: pd.DataFrame, columns: Sequence[Column], missing: str = "error"
) -> tuple[Array, list[str]]:
    """The network's inputs [N, D] of these columns, in float64, and notes for the user."""
    if missing != IMPUTE:
        refuse_gaps(frame, [column.name for column in columns])
    parts, notes = [], []
    for column in columns:
        numbers, messages = column.encode(pick(frame, column.name))
        parts.append(numbers)
        notes += messages
    return np.concatenate(parts, axis=1), notes


def _refuse_absent(absent: Sequence[str], there: Sequence[str]) -> None:
    """An error that names all absent columns; a mistyped name gets the closest ones."""
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
    """The options of a user for a table; the rest is inferred."""

    target: str
    likelihood: str | None = None
    index: str | None = None
    drop: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    numeric: tuple[str, ...] = ()
    missing: str = "error"
    dialect: Dialect = field(default_factory=Dialect)
    group: str | None = None
    time: str | None = None
    time_input: bool = False

    def __post_init__(self) -> None:
        if self.missing not in MISSING_CELLS:
            raise DataError(f"--missing takes error or impute, not {self.missing!r}")
        if self.time_input and self.time is None:
            raise DataError("--time-input needs --time, the column of times")

    def facts(self) -> dict[str, Any]:
        """For the record of a run, without the target, which the schema has."""
        options = asdict(self)
        dialect = options.pop("dialect")
        return {k: v for k, v in options.items() if k != "target"} | dialect


def read_dataset(path: Path, asked: TableSpec) -> tuple[pd.DataFrame, Schema]:
    """The rows that can be used, and the schema of their columns."""
    return of_table(open_table(path, asked.index, dialect=asked.dialect), asked)


def of_table(table: Table, asked: TableSpec) -> tuple[pd.DataFrame, Schema]:
    """The same for a table that was read, or a data frame."""
    frame, fewer = with_target(table.frame, asked.target, asked.missing)
    schema = inferred(frame, asked, table.dialect)
    return frame, replace(schema, notes=(*table.notes, *fewer, *schema.notes))


def inferred(frame: pd.DataFrame, asked: TableSpec, dialect: Dialect | None) -> Schema:
    """The schema of some rows whose target is known."""
    return infer_schema(
        frame, asked.target, asked.likelihood, asked.drop, asked.categorical, asked.index,
        asked.numeric, asked.missing, dialect, asked.group, asked.time, asked.time_input,
    )  # fmt: skip


STREAMED = 1 << 30  # bytes of a file; larger ones are read by windows
MOST_GATHERED = 20_000  # rows from which the types of columns are inferred, besides rare values
_HEAD = 2000  # rows at the start among them


def is_large(path: Path) -> bool:
    """Whether a table is read by windows: a folder, or a file of more than 1 GiB."""
    try:
        return path.is_dir() or path.stat().st_size > STREAMED
    except OSError:
        return False


def open_frames(path: Path, dialect: Dialect, **encoding: Any) -> ArrowReader | CsvReader:
    """A reader of a table by groups of rows."""
    if path.is_dir() or path.suffix.lower() in (*PARQUET, ".arrow", ".feather", ".ipc"):
        return ArrowReader(path, **encoding)
    if dialect.encoding not in (None, "utf-8", "utf-8-sig", "ascii"):
        raise DataError(f"{path} is read by windows, which needs UTF-8, not {dialect.encoding}")
    separator = dialect.sep or separator_of_file(path)
    return CsvReader(path, separator=separator, decimal=dialect.decimal or ".", **encoding)


def read_stream(path: Path, asked: TableSpec) -> tuple[Stream, Schema]:
    """The rows of a large table, encoded as they are read, and the schema of their columns.

    One pass over the table gathers the rows from which the schema is inferred: the first 2,000,
    evenly spaced ones, and the first row with each category, up to the largest number of
    categories, and with the first missing cell of each column. Medians, which fill missing cells,
    are those of these rows."""
    frames = open_frames(path, asked.dialect, width=1)
    head, some = _gathered(frames, asked)
    counting = [
        name for name in map(str, head.columns)
        if name not in (asked.target, *asked.numeric, *asked.categorical, *asked.drop)
        and id_words(pick(head, name)) == COUNTS
    ]  # fmt: skip
    if len(counting) + len(asked.drop) + 1 >= head.shape[1]:
        counting = []
    dialect = (
        None
        if isinstance(frames, ArrowReader)
        else replace(asked.dialect, sep=frames.separator, decimal=frames.decimal, encoding="utf-8")
    )
    schema = inferred(some, replace(asked, drop=(*asked.drop, *counting)), dialect)
    notes = [
        note.replace("dropped: by --drop", f"dropped: {COUNTS}")
        if any(note.startswith(f"column {name!r} dropped") for name in counting) else note
        for note in schema.notes
    ]  # fmt: skip
    schema = replace(schema, notes=tuple(notes))

    def encode(frame: pd.DataFrame) -> tuple[Array, Array]:
        frame = _named(frame)
        return schema.features(frame)[0], schema.targets(frame)

    reader = open_frames(path, asked.dialect, encode=encode, width=schema.inputs)
    return Stream(reader), schema


def _named(frame: pd.DataFrame) -> pd.DataFrame:
    frame.columns = [str(name).strip() for name in frame.columns]
    return frame


def _gathered(
    frames: ArrowReader | CsvReader, asked: TableSpec
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The first rows, and the rows from which a schema is inferred, with them."""
    seen: dict[str, set[str]] = {}
    empty: set[str] = set()
    parts: list[pd.DataFrame] = []
    head: pd.DataFrame | None = None
    filled = [group for group, rows in enumerate(frames.sizes) if rows]
    each = max(1, MOST_GATHERED // len(filled))
    for group in filled:
        frame = _named(frames.frame(group))
        kept = set(np.linspace(0, len(frame) - 1, min(each, len(frame))).round().astype(int))
        if head is None:
            head = frame.head(_HEAD)
            kept |= set(range(len(head)))
        for name in frame.columns:
            values = pick(frame, name)
            known = seen.setdefault(name, set())
            missing = gaps(values)
            if missing and name not in empty:
                empty.add(name)
                kept.add(missing[0])
            most = 2 if values.dtype.kind == "f" else MOST_CATEGORIES + 1
            if len(known) >= most:
                continue
            for row in np.flatnonzero(~(values.duplicated() | values.isna()).to_numpy()):
                label = label_of(values.iloc[int(row)])
                if label not in known:
                    known.add(label)
                    kept.add(int(row))
                if len(known) >= most:
                    break
        parts.append(frame.iloc[sorted(kept)])
    assert head is not None
    some = import_pandas().concat(parts, ignore_index=True)
    if asked.target not in some.columns:
        pick(some, asked.target)  # an error with similar names
    return head, some


def times_of(values: pd.Series) -> Array:
    """The times of a column: numbers, or dates as days since 1970-01-01."""
    refuse_gaps(values.to_frame(), [str(values.name)])
    layout = layout_of(values)
    if layout == UNCLEAR:
        raise DataError(
            f"column {values.name!r} holds dates in which day and month are ambiguous: write them "
            "as year-month-day to use them with --time"
        )
    return numbers_of(values) if layout is None else days_of(values, layout)


def groups_of(values: pd.Series) -> Array:
    """The groups of a column, as text."""
    refuse_gaps(values.to_frame(), [str(values.name)])
    return labels_of(values)


class Together(NamedTuple):
    """The group and the time of each row, if rows belong together."""

    groups: Array | None = None  # text
    time: Array | None = None  # numbers

    @classmethod
    def of(cls, frame: pd.DataFrame, schema: Schema) -> Together:
        """The columns of `--group` and `--time`. A table to calibrate on must have them."""
        given = [
            None if name is None else pick(frame, name) for name in (schema.group, schema.time)
        ]
        return cls(
            None if given[0] is None else groups_of(given[0]),
            None if given[1] is None else times_of(given[1]),
        )

    def some(self, rows: Array) -> Together:
        return Together(*(None if each is None else each[rows] for each in self))

    def options(self) -> dict[str, Any]:
        """The arguments of `doxa.fit`."""
        return {name: each for name, each in self._asdict().items() if each is not None}

    def words(self, schema: Schema) -> str:
        """The message for the user; "" if rows do not belong together."""
        said = []
        if self.groups is not None:
            said.append(f"{len(set(self.groups))} groups, by {schema.group!r}")
        if self.time is not None:
            said.append(f"{len(set(self.time))} times, by {schema.time!r}")
        return ", ".join(said)

    def held(self, share: float, seed: int) -> Array:
        """A mask of about this share of the rows: whole groups, or the last rows, or the groups
        that begin last."""
        if self.groups is None:
            assert self.time is not None
            times, counts = np.unique(self.time, return_counts=True)
            if len(times) < 2:
                return np.zeros(len(self.time), bool)
            later = len(self.time) - np.cumsum(counts)  # rows after each time
            return self.time > times[np.abs(later[:-1] - share * len(self.time)).argmin()]
        order = np.random.default_rng([seed, 5]).permutation(len(self.groups))
        first: dict[Any, Any] = {}
        for row in order:
            name, when = self.groups[row], 0.0 if self.time is None else self.time[row]
            first[name] = min(first.get(name, when), when)
        sizes = Counter(self.groups.tolist())
        latest = sorted(first, key=first.__getitem__, reverse=True)
        away = np.abs(np.cumsum([sizes[name] for name in latest]) - share * len(self.groups))
        return np.isin(self.groups, latest[: int(away.argmin()) + 1])


def read_more(
    path: Path, schema: Schema, dialect: Dialect, label: str | None = None
) -> tuple[pd.DataFrame, list[str]]:
    """The rows of a file for a known schema, and notes on the file for the user. `label`: the
    column that names the rows, if it is not that of the fit."""
    wanted = label or schema.index
    found = open_table(path, wanted, index_needed=label is not None, dialect=dialect)
    return found.frame, found.notes


def read_labelled(path: Path, schema: Schema, dialect: Dialect) -> tuple[pd.DataFrame, list[str]]:
    """The same for rows that must have a target, to score or to calibrate on."""
    frame, notes = read_more(path, schema, dialect)
    frame, fewer = with_target(frame, schema.target, schema.missing)
    return frame, notes + fewer
