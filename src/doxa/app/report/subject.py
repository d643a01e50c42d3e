"""What a report is about: a posterior, the rows it is asked about, and what things are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map

from doxa.app.reading import place_of
from doxa.app.report.names import Names
from doxa.app.schema import Schema
from doxa.data import as_tensors, rows_of
from doxa.errors import DataError, ShapeError

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Rows:
    """Inputs and truths, and how each row is written for people."""

    x: Any
    y: Any  # a tensor, or one for each head
    what: str  # "test.csv", "the test rows"
    told: str  # whose they are: "held out from the fit", "the rows it was fitted to"
    columns: tuple[str, ...] = ()
    cells: Callable[[int], Sequence[object]] = lambda row: ()
    label: Callable[[int], object] = lambda row: f"row {row}"  # as Python counts
    notes: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return rows_of(self.x, "x")

    def take(self, index: Any) -> Any:
        """x at some rows."""
        return tree_map(lambda t: t[index], self.x)

    def only(self, chosen: Array, told: str) -> Rows:
        """Some of the rows, chosen by a mask, under the names that they have."""
        places = np.flatnonzero(chosen)
        index = torch.as_tensor(places)
        y = tree_map(lambda t: t[index], self.y)
        return replace(
            self, x=self.take(index), y=y, told=told,
            cells=lambda row: self.cells(int(places[row])),
            label=lambda row: self.label(int(places[row])),
        )  # fmt: skip

    @property
    def table(self) -> Array | None:
        """x as a matrix [N, D] of numbers, where it is one."""
        leaves = tree_flatten(self.x)[0]
        if len(leaves) != 1 or leaves[0].ndim != 2 or not leaves[0].is_floating_point():
            return None
        return leaves[0].detach().cpu().double().numpy()


@dataclass(frozen=True)
class Input:
    """One input column: where it stands in x; several places for the categories of one. A flag is
    1 where a cell was missing, else 0."""

    name: str
    at: tuple[int, ...]
    categories: tuple[str, ...] | None = None
    flag: bool = False


@dataclass
class Subject:
    """Everything the sections read."""

    posterior: Any
    target: str = "y"
    classes: tuple[str, ...] | None = None
    inputs: tuple[Input, ...] = ()
    test: Rows | None = None
    train: Rows | None = None
    schema: Schema | None = None
    title: str | None = None
    place: str | None = None  # the folder it was loaded from
    image: tuple[int, ...] | None = None  # the shape of one row of x, to be looked at
    remarks: list[str] = field(default_factory=list)  # about whose rows were given
    names: Names = field(default_factory=Names)

    @property
    def rows(self) -> Rows | None:
        """The rows that are scored: held-out ones if there are any."""
        return self.test or self.train


def rows_of_arrays(data: Any, what: str, told: str, names: Sequence[str] | None = None) -> Rows:
    """(x, y) of the Python interface."""
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise DataError(f"{what} must be a pair (x, y)")
    x = as_tensors(data[0], f"x of {what}")
    count = rows_of(x, f"x of {what}")
    if count == 0:
        raise DataError(f"{what} have no rows (N = 0)")
    heads = isinstance(data[1], (tuple, list)) and all(hasattr(t, "shape") for t in data[1])
    y = tuple(torch.as_tensor(t) for t in data[1]) if heads else torch.as_tensor(data[1])
    lengths = [len(t) for t in y] if isinstance(y, tuple) else [len(y)]
    if lengths != [count] * len(lengths):
        raise ShapeError(f"{what}: x has {count} rows and y {lengths[0]}")
    rows = Rows(x, y, what, told)
    table = rows.table
    if table is None:
        return rows
    columns = column_names(table.shape[1], names)
    return Rows(x, y, what, told, columns, lambda row: table[row].tolist())


def rows_of_frame(
    schema: Schema, frame: pd.DataFrame, what: str, told: str, said: Sequence[str] = ()
) -> Rows:
    """A table as `doxa fit` reads it, and what was said of its file; cells are shown as they
    are."""
    x, notes = schema.features(frame)
    y = schema.targets(frame)
    shown = [column.name for column in schema.columns]
    cells = frame[shown]
    return Rows(
        torch.as_tensor(x),
        torch.as_tensor(y),
        what,
        told,
        tuple(shown),
        lambda row: list(cells.iloc[row]),
        lambda row: place_of(frame.index, row),
        (*said, *notes),
    )


def column_names(count: int, names: Sequence[str] | None) -> tuple[str, ...]:
    if names is None:
        return tuple(f"x{k + 1}" for k in range(count))
    if len(names) != count:
        raise DataError(f"{len(names)} names for {count} input columns")
    return tuple(map(str, names))


def inputs_of(schema: Schema) -> tuple[Input, ...]:
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
