"""Tables of tasks: rows that belong together by a column, for methods that learn from tasks.

A fit groups the rows of a table by its column of tasks. A prediction is given a second table, the
context, with what is known of a task: where both tables have the column, every task of the first
is predicted from its own rows in the second; where the context has no such column, all rows are
predicted from all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import doxa
from doxa.app.cells import Array, import_pandas
from doxa.app.predictions import predict_table
from doxa.app.schema import Schema
from doxa.data import Tasks
from doxa.errors import DataError, MethodError

if TYPE_CHECKING:
    import pandas as pd

_KEY = "task"  # of the metadata


def check(method: str, task: str | None, target: str, shares: bool) -> None:
    """A column of tasks is there if, and only if, the method learns from tasks."""
    learns = doxa.methods()[method].tasks == ("tasks",)
    if learns and task is None:
        raise MethodError(f"method {method!r} learns from tasks: say which column with --task")
    if not learns and task is not None:
        names = [row.name for row in doxa.methods() if row.tasks == ("tasks",)]
        raise MethodError(f"--task is for methods that learn from tasks ({', '.join(names)})")
    if task is not None and task == target:
        raise DataError(f"column {task!r} is the target and cannot name the tasks")
    if learns and shares:
        raise MethodError(
            "--test, --split, --calibrate and --conformal are for rows that are predicted by "
            f"themselves; {method!r} predicts a task from its context"
        )


def dropped(drop: list[str] | None, task: str | None) -> list[str] | None:
    """What is no input: also the column of tasks."""
    return drop if task is None else [*(drop or ()), task]


def labels(frame: pd.DataFrame, task: str | None) -> list[str] | None:
    """Which task each row belongs to."""
    if task is None:
        return None
    if bool(frame[task].isna().any()):
        row = frame.index[int(np.flatnonzero(frame[task].isna())[0])]
        raise DataError(f"column {task!r} is empty at row {row}: which task does it belong to?")
    return [str(value) for value in frame[task]]


def grouped(x: Array, y: Array, tasks: Sequence[str]) -> Tasks:
    """Rows as tasks, in the order in which these first appear."""
    names = np.asarray(tasks)
    each = [np.flatnonzero(names == name) for name in dict.fromkeys(tasks)]
    for rows in each:
        if len(rows) < 2:
            raise DataError(
                f"task {names[rows[0]]!r} has one row: a task needs one to learn from and one to "
                "predict; leave it out of the table"
            )
    return Tasks((x[rows], y[rows]) for rows in each)


def remembered(task: str | None) -> dict[str, str]:
    return {} if task is None else {_KEY: task}


def check_context(posterior: Any, given: bool) -> None:
    """A context is given if, and only if, the run needs one."""
    needs = _KEY in posterior.metadata
    if needs and not given:
        raise DataError(
            "this run predicts a task from some of its rows: give them, target included, with "
            "--context KNOWN.csv"
        )
    if given and not needs:
        raise DataError("--context is for runs that were fitted with --task; leave it out")


def predict_tasks(
    posterior: Any, schema: Schema, frame: pd.DataFrame, known: pd.DataFrame, level: float | None
) -> tuple[pd.DataFrame, list[str]]:
    """Predictions for every row of `frame` from the rows of its task in `known`, and notes."""
    task = posterior.metadata[_KEY]
    if task not in known.columns:
        return predict_table(conditioned(posterior, schema, known), schema, frame, level)
    if task not in frame.columns:
        raise DataError(
            f"the context has the column of tasks {task!r} and the rows to predict have not: which "
            "task do they belong to?"
        )
    asked, there = np.asarray(labels(frame, task)), np.asarray(labels(known, task))
    missing = sorted(set(asked) - set(there))
    if missing:
        raise DataError(f"the context has no row of task {missing[0]!r}")
    tables: list[pd.DataFrame] = []
    notes: dict[str, None] = {}
    for name in dict.fromkeys(asked.tolist()):
        own = conditioned(posterior, schema, known[there == name])
        table, said = predict_table(own, schema, frame[asked == name], level)
        tables.append(table)
        notes |= dict.fromkeys(said)
    places = np.concatenate([np.flatnonzero(asked == name) for name in dict.fromkeys(asked)])
    together = import_pandas().concat(tables)
    return together.iloc[np.argsort(places)], list(notes)


def conditioned(posterior: Any, schema: Schema, known: pd.DataFrame) -> Any:
    return posterior.condition(schema.features(known)[0], schema.targets(known))
