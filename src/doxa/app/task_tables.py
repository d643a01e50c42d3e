"""Tables of tasks, for methods that learn from several of them.

A fit groups the rows of a table by its column of tasks. A prediction takes a second table, the
context, with the known rows. If both tables have the column, every task of the first is predicted
from its own rows in the context; if the context has no such column, all rows are predicted from the
whole context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import doxa
from doxa.data import Tasks
from doxa.errors import DataError, MethodError
from doxa.tables.predictions import predict_frame
from doxa.tables.reading import Array, import_pandas
from doxa.tables.schema import Schema

if TYPE_CHECKING:
    import pandas as pd


_KEY = "task"  # of the metadata


def check_task_column(method: str, task: str | None, target: str, shares: bool) -> None:
    """An error unless `--task` is given exactly if the method learns from tasks."""
    learns = doxa.methods()[method].tasks == ("tasks",)
    if learns and task is None:
        raise MethodError(f"method {method!r} learns from tasks: name their column with --task")
    if not learns and task is not None:
        names = [row.name for row in doxa.methods() if row.tasks == ("tasks",)]
        raise MethodError(f"--task is for methods that learn from tasks ({', '.join(names)})")
    if task is not None and task == target:
        raise DataError(f"column {task!r} is the target and cannot name the tasks")
    if learns and shares:
        raise MethodError(
            "--test, --split, --calibrate and --conformal do not apply to methods that learn from "
            f"tasks: {method!r} predicts a task from its context"
        )


def dropped_tasks(drop: list[str] | None, task: str | None) -> list[str] | None:
    """The columns to drop, with the column of tasks."""
    return drop if task is None else [*(drop or ()), task]


def task_labels(frame: pd.DataFrame, task: str | None) -> list[str] | None:
    """The task of each row."""
    if task is None:
        return None
    if bool(frame[task].isna().any()):
        row = frame.index[int(np.flatnonzero(frame[task].isna())[0])]
        raise DataError(f"column {task!r} is empty at row {row}: every row needs a task")
    return [str(value) for value in frame[task]]


def grouped(x: Array, y: Array, tasks: Sequence[str]) -> Tasks:
    """Rows grouped by task, in the order of first appearance."""
    names = np.asarray(tasks)
    each = [np.flatnonzero(names == name) for name in dict.fromkeys(tasks)]
    for rows in each:
        if len(rows) < 2:
            raise DataError(
                f"task {names[rows[0]]!r} has one row: a task needs one to learn from and one to "
                "predict; remove it from the table"
            )
    return Tasks((x[rows], y[rows]) for rows in each)


def remembered_tasks(task: str | None) -> dict[str, str]:
    return {} if task is None else {_KEY: task}


def check_context(posterior: Any, given: bool) -> None:
    """An error unless `--context` is given exactly if the run needs one."""
    needs = _KEY in posterior.metadata
    if needs and not given:
        raise DataError(
            "this run predicts a task from some of its rows: give them, target included, with "
            "--context KNOWN.csv"
        )
    if given and not needs:
        raise DataError("--context is for runs that were fitted with --task; remove it")


def predict_tasks(
    posterior: Any, schema: Schema, frame: pd.DataFrame, known: pd.DataFrame, level: float | None
) -> tuple[pd.DataFrame, list[str]]:
    """Predictions for every row of `frame` from the rows of its task in `known`, and notes."""
    task = posterior.metadata[_KEY]
    if task not in known.columns:
        return predict_frame(conditioned(posterior, schema, known), schema, frame, level)
    if task not in frame.columns:
        raise DataError(
            f"the context has the column of tasks {task!r}, but the rows to predict do not: add it"
        )
    asked, there = np.asarray(task_labels(frame, task)), np.asarray(task_labels(known, task))
    missing = sorted(set(asked) - set(there))
    if missing:
        raise DataError(f"the context has no row of task {missing[0]!r}")
    tables: list[pd.DataFrame] = []
    notes: dict[str, None] = {}
    for name in dict.fromkeys(asked.tolist()):
        own = conditioned(posterior, schema, known[there == name])
        table, messages = predict_frame(own, schema, frame[asked == name], level)
        tables.append(table)
        notes |= dict.fromkeys(messages)
    places = np.concatenate([np.flatnonzero(asked == name) for name in dict.fromkeys(asked)])
    together = import_pandas().concat(tables)
    return together.iloc[np.argsort(places)], list(notes)


def conditioned(posterior: Any, schema: Schema, known: pd.DataFrame) -> Any:
    return posterior.condition(schema.features(known)[0], schema.targets(known))
