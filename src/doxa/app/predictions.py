"""Predictions as columns of a table, in the units and labels of the target; tables of tasks.

Regression, all in the unit of the target: mean, std, aleatoric_std and epistemic_std (standard
deviations, whose squares add up to that of std), low and high of an interval.
Classification: one probability per class, the predicted class, the entropy of the prediction and
its epistemic part (mutual information), in nats; for a conformal run or a given level also the
prediction set of classes, and its size.

Tasks, for methods that learn from several of them: a fit groups the rows of a table by its column
of tasks. A prediction takes a second table, the context, with the known rows. If both tables have
the column, every task of the first is predicted from its own rows in the context; if the context
has no such column, all rows are predicted from the whole context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

import doxa
from doxa.app.calibration import conformal_level
from doxa.app.reading import Array, import_pandas
from doxa.app.schema import Schema
from doxa.data import Tasks
from doxa.errors import DataError, MethodError
from doxa.likelihoods import LIKELIHOODS

if TYPE_CHECKING:
    import pandas as pd


SEPARATOR = " | "  # between the classes of a set
ROWS_AT_ONCE = 8192  # bounds the memory of a prediction; rows do not depend on each other


def predict_table(
    posterior: Any, schema: Schema, frame: pd.DataFrame, level: float | None = None
) -> tuple[pd.DataFrame, list[str]]:
    """Predictions for every row of `frame`, with its index, and notes for the user. The default
    level is that of a conformal posterior, else 0.95."""
    x, notes = schema.features(frame)
    table = predict_inputs(posterior, schema, x, level)
    return import_pandas().DataFrame(table, index=frame.index), notes


def predict_inputs(
    posterior: Any, schema: Schema, x: Array, level: float | None = None
) -> dict[str, Array]:
    """{column name: [N]} at the inputs of a network [N, D], `ROWS_AT_ONCE` of them at a time."""
    sets = level is not None or conformal_level(posterior) is not None
    parts = [
        columns(posterior.predict(x[start : start + ROWS_AT_ONCE]), schema, level, sets)
        for start in range(0, len(x), ROWS_AT_ONCE)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def columns(
    p: Any, schema: Schema, level: float | None = None, sets: bool = False
) -> dict[str, Array]:
    """{column name: [N]} of one predictive; `sets`: with prediction sets of classes."""
    if schema.classes is None:
        low, high = (flat(bound) for bound in p.interval(level))
        return {
            "mean": flat(p.mean),
            "std": flat(p.std),
            "aleatoric_std": np.sqrt(flat(p.aleatoric)),
            "epistemic_std": np.sqrt(np.maximum(flat(p.epistemic), 0.0)),
            "low": low,
            "high": high,
        }
    probs = class_probs(p, schema)
    table = {f"p({label})": probs[:, k] for k, label in enumerate(schema.classes)}
    labels = np.array(schema.classes, dtype=object)
    table["predicted"] = labels[probs.argmax(axis=1)]
    table["entropy"] = flat(p.entropy)
    if p.splits:
        table["mutual_information"] = flat(p.mutual_information)
    if sets:
        chosen = p.prediction_set(level).reshape(len(probs), -1).cpu().numpy()
        table["set"] = np.array([SEPARATOR.join(map(str, labels[row])) for row in chosen], object)
        table["set_size"] = chosen.sum(axis=1)
    return table


def output_names(posterior: Any, schema: Schema, level: float | None = None) -> list[str]:
    """The columns that a prediction may have."""
    if schema.classes is None:
        return ["mean", "std", "aleatoric_std", "epistemic_std", "low", "high"]
    names = [f"p({label})" for label in schema.classes]
    names += ["predicted", "entropy", "mutual_information"]
    sets = level is not None or conformal_level(posterior) is not None
    return names + ["set", "set_size"] * sets


def class_probs(p: Any, schema: Schema) -> Array:
    """[N, C], also for a Bernoulli likelihood, whose one number is P(second class)."""
    if LIKELIHOODS[schema.likelihood].binary:
        second = flat(p.mean)
        return np.stack([1.0 - second, second], axis=1)
    return array(p.probs)


def flat(values: Tensor) -> Array:
    return array(values).reshape(len(values))


def array(values: Tensor) -> Array:
    return values.detach().cpu().double().numpy()


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
        return predict_table(conditioned(posterior, schema, known), schema, frame, level)
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
        table, messages = predict_table(own, schema, frame[asked == name], level)
        tables.append(table)
        notes |= dict.fromkeys(messages)
    places = np.concatenate([np.flatnonzero(asked == name) for name in dict.fromkeys(asked)])
    together = import_pandas().concat(tables)
    return together.iloc[np.argsort(places)], list(notes)


def conditioned(posterior: Any, schema: Schema, known: pd.DataFrame) -> Any:
    return posterior.condition(schema.features(known)[0], schema.targets(known))
