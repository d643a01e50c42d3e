"""The subject of a report: a posterior, the rows to evaluate it on, and the names of things.

A saved run contains the checksum of its data file, and the rows that `doxa fit --split` held out.
If the test data are the same file, only its held-out rows are new. In other files, rows that also
occur among the rows of the fit are counted and reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map

from doxa.app.held_out import checksum
from doxa.app.report.html import Content, Names
from doxa.app.report.text import count
from doxa.data import as_tensors, rows_of
from doxa.errors import DataError, ShapeError
from doxa.tables.reading import Dialect, place_of
from doxa.tables.schema import Schema, read_labelled

if TYPE_CHECKING:
    import pandas as pd

    from doxa.app.report.evaluation import Evaluation
    from doxa.app.report.status import OverallStatus

Array = np.ndarray[Any, np.dtype[Any]]

FITTED = "the rows it was fitted to"
HELD_OUT = "held out from the fit"
TEST = "the test rows"  # the name of rows that are given as arrays


@dataclass(frozen=True)
class Rows:
    """Inputs and targets, with the label and the cells with which each row is shown."""

    x: Any
    y: Any  # a tensor, or one tensor per head
    source: str  # "test.csv", "the test rows"
    provenance: str  # "held out from the fit", "the rows it was fitted to"
    columns: tuple[str, ...] = ()
    cells: Callable[[int], Sequence[object]] = lambda row: ()
    label: Callable[[int], object] = lambda row: f"row {row}"  # counted from 0
    notes: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return rows_of(self.x, "x")

    def take(self, index: Any) -> Any:
        """x at some rows."""
        return tree_map(lambda t: t[index], self.x)

    def only(self, chosen: Array, provenance: str) -> Rows:
        """The rows for which the mask `chosen` is true, with their labels."""
        places = np.flatnonzero(chosen)
        index = torch.as_tensor(places)
        y = tree_map(lambda t: t[index], self.y)
        return replace(
            self, x=self.take(index), y=y, provenance=provenance,
            cells=lambda row: self.cells(int(places[row])),
            label=lambda row: self.label(int(places[row])),
        )  # fmt: skip

    @property
    def table(self) -> Array | None:
        """x as a matrix [N, D] of numbers. None if x is not a matrix."""
        leaves = tree_flatten(self.x)[0]
        if len(leaves) != 1 or leaves[0].ndim != 2 or not leaves[0].is_floating_point():
            return None
        return leaves[0].detach().cpu().double().numpy()


@dataclass(frozen=True)
class Input:
    """One input column and its positions in x, of which a column of categories has several. A flag
    column is 1 where a cell was missing, else 0."""

    name: str
    at: tuple[int, ...]
    categories: tuple[str, ...] | None = None
    flag: bool = False


@dataclass
class Subject:
    """The input of all sections. `report.render` adds the evaluations and the status.

    Attributes
    ----------
    posterior : Posterior
        Any posterior. It may be loaded from disk, recalibrated or conformal.
    target, classes, inputs
        Names of the target, its classes and the input columns.
    test, train : Rows or None
        Rows that were not used by the fit, and rows that were.
    folder : str or None
        The folder that the posterior was loaded from.
    image : tuple of int or None
        The shape of one row of x, if rows are shown as pictures.
    remarks : list of str
        Remarks on the given rows, for the reader.
    evaluations : list of Evaluation
        Predictions at the scored rows, one entry per head.
    """

    posterior: Any
    target: str = "y"
    classes: tuple[str, ...] | None = None
    inputs: tuple[Input, ...] = ()
    test: Rows | None = None
    train: Rows | None = None
    schema: Schema | None = None
    title: str | None = None
    folder: str | None = None
    image: tuple[int, ...] | None = None
    remarks: list[str] = field(default_factory=list)
    names: Names = field(default_factory=Names)
    evaluations: list[Evaluation] = field(default_factory=list)
    status: OverallStatus | None = None

    def __post_init__(self) -> None:
        stored = self.posterior.metadata.get("table")
        if self.classes is None and stored:  # a run of `doxa fit` stores the names of its classes
            known = Schema.from_json(stored).classes
            self.classes = None if known is None else tuple(map(str, known))

    @property
    def rows(self) -> Rows | None:
        """The rows that are scored: the new rows, or the rows of the fit if there are none."""
        return self.test or self.train

    @property
    def heading(self) -> Content:
        if self.title:
            return self.names.show(self.title, 120)
        return [f"{self.method_name} for ", self.names.show(self.target)]

    @property
    def method_name(self) -> str:
        return str(self.posterior.method.name)

    def class_names(self, number: int) -> list[str]:
        """The names of `number` classes. They are known only if there is a single head."""
        if self.classes and len(self.classes) == number and len(self.evaluations) < 2:
            return list(self.classes)
        return [f"class {k}" for k in range(number)]


def rows_of_arrays(data: Any, source: str, provenance: str, names: Sequence[str] | None) -> Rows:
    """Rows from a pair (x, y), as given in Python."""
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise DataError(f"{source} must be a pair (x, y)")
    x = as_tensors(data[0], f"x of {source}")
    number = rows_of(x, f"x of {source}")
    if number == 0:
        raise DataError(f"{source} have no rows (N = 0)")
    heads = isinstance(data[1], (tuple, list)) and all(hasattr(t, "shape") for t in data[1])
    y = tuple(torch.as_tensor(t) for t in data[1]) if heads else torch.as_tensor(data[1])
    lengths = [len(t) for t in y] if isinstance(y, tuple) else [len(y)]
    if lengths != [number] * len(lengths):
        raise ShapeError(f"{source}: x has {number} rows and y {lengths[0]}")
    rows = Rows(x, y, source, provenance)
    table = rows.table
    if table is None:
        return rows
    columns = column_names(table.shape[1], names)
    return replace(rows, columns=columns, cells=lambda row: table[row].tolist())


def rows_of_frame(
    schema: Schema, frame: pd.DataFrame, source: str, provenance: str, notes: Sequence[str] = ()
) -> Rows:
    """Rows from a table, which is read as by `doxa fit`, with notes about its file. Cells are shown
    unchanged."""
    x, more = schema.features(frame)
    shown = [column.name for column in schema.columns]
    cells = frame[shown]
    return Rows(
        torch.as_tensor(x), torch.as_tensor(schema.targets(frame)), source, provenance,
        tuple(shown), lambda row: list(cells.iloc[row]), lambda row: place_of(frame.index, row),
        (*notes, *more),
    )  # fmt: skip


def column_names(number: int, names: Sequence[str] | None) -> tuple[str, ...]:
    if names is None:
        return tuple(f"x{k + 1}" for k in range(number))
    if len(names) != number:
        raise DataError(f"{len(names)} names for {number} input columns")
    return tuple(map(str, names))


def inputs_of(schema: Schema) -> tuple[Input, ...]:
    """The columns of a table and their positions in x."""
    found, at = [], 0
    for column in schema.columns:
        places = range(at, at + column.width)
        if column.categories is not None:
            found.append(Input(column.name, tuple(places), column.categories))
        else:
            own = [Input(n, (k,)) for n, k in zip(column.inputs, places, strict=True)]
            if column.indicator:
                own[-1] = replace(own[-1], flag=True)
            found += own
        at += column.width
    return tuple(found)


def rows_of_files(
    metadata: dict[str, Any],
    schema: Schema,
    test: Path | None,
    train: Path | None,
    dialect: Dialect = Dialect(),  # noqa: B008 - frozen
) -> tuple[Rows | None, Rows | None, list[str]]:
    """The rows in two files, as (new rows, rows of the fit, remarks on the choice)."""
    source = metadata.get("source", {})
    split = metadata.get("held_out_rows") or {}
    remarks: list[str] = []
    same = {path: _checksum(path) == source.get("sha256") for path in (test, train) if path}
    if train is not None and source.get("sha256") and not same[train]:
        remarks.append(
            f"{train.name} is not the file of the fit ({source.get('file', 'unknown')}): its "
            "checksum differs"
        )
    whole = test if test is not None and same[test] else None
    if whole is None and test is None and train is not None and same[train]:
        whole = train if split else None
    if whole is None:
        new_rows = _read(schema, test, HELD_OUT, dialect)
        return new_rows, _read(schema, train, FITTED, dialect), remarks
    everything = _read(schema, whole, FITTED, dialect)
    assert everything is not None
    if not split:
        remarks.append(
            f"{whole.name} is the file of the fit (same checksum): its rows are {FITTED}, not new "
            "ones"
        )
        return None, everything, remarks
    new = _split(split, _checksum(whole), whole.name, everything.count)
    # Rows that calibrated the posterior are neither new nor rows of the fit.
    used = metadata.get("calibration_rows") or {}
    old = ~new & ~_split(used, _checksum(whole), whole.name, everything.count)
    rows = count(int(new.sum()), "row")
    remarks.append(f"the scored rows are the {rows} of {whole.name} that --split held out")
    return everything.only(new, "held out by the fit"), everything.only(old, FITTED), remarks


def without_seen(test: Rows, train: Rows) -> tuple[Rows | None, list[str]]:
    """The test rows, and remarks on those that the fit has used. None in place of the rows if it
    has used all of them."""
    known = set(_keys(train))
    seen = sum(key in known for key in _keys(test))
    if not seen:
        return test, []
    if seen == test.count:
        return None, [f"all {test.count:,} test rows are among {FITTED}: there are no new ones"]
    remark = f"{seen:,} of {test.count:,} test rows are also among {FITTED}"
    some = f"{test.provenance}, but {seen:,} of them are also among {FITTED}"
    return replace(test, provenance=some), [remark]


def _read(schema: Schema, path: Path | None, provenance: str, dialect: Dialect) -> Rows | None:
    if path is None:
        return None
    frame, notes = read_labelled(path, schema, dialect)
    return rows_of_frame(schema, frame, path.name, provenance, notes)


def _checksum(path: Path) -> str:
    try:
        return checksum(path)
    except DataError:
        return ""  # reading the table raises the error


def _split(split: dict[str, Any], checksum: str, file: str, rows: int) -> Array:
    """Which rows were held out, [rows]."""
    numbers = np.asarray(split.get("rows", []), dtype=int)
    if split.get("sha256") not in (None, checksum) or (numbers.size and numbers.max() >= rows):
        raise DataError(f"the rows that the run held out are not rows of {file}; pass --test")
    chosen = np.zeros(rows, dtype=bool)
    chosen[numbers] = True
    return chosen


def _keys(rows: Rows) -> list[bytes]:
    """One key per row. Rows with the same x and y have the same key."""
    leaves = tree_flatten((rows.x, rows.y))[0]
    flat = [t.detach().cpu().float().reshape(len(t), -1).numpy() for t in leaves]
    return [row.tobytes() for row in np.concatenate(flat, axis=1)]
