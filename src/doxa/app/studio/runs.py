"""The room "Your run": what a saved posterior knows about the rows of a table.

The numbers are those of the commands: the predictions of `doxa predict`, the findings and the
calibration of `doxa report`, the scores of `doxa.evaluate`. A process keeps the last few runs with
their tables, so that a slider waits for a prediction and not for a file.

    surprise           −log p(y) of a row with a target, in nats
    dependence         means over rows, with one column set to the same value in all of them: of the
                       prediction, and of the aleatoric and the epistemic variance (of classes: of
                       the two parts of the entropy)
    support            the range of each column in the rows of the fit, and the distance to the
                       nearest of them, in standard deviations: it is far if 99 % of these rows have
                       a nearer neighbour

The rows of the fit are known if a named table has the checksum that the run has kept, or if the
posterior has seen each of its rows.
"""

from __future__ import annotations

import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

import doxa
from doxa.app.fitting import load_run
from doxa.app.held_out import checksum
from doxa.app.report.calibration import (
    confidence_gap,
    coverage_curve,
    coverage_gap,
    describe_confidence,
    describe_coverage,
    reliability_of,
    share_band,
)
from doxa.app.report.evaluation import LEVELS, Evaluation, evaluate
from doxa.app.report.status import assess
from doxa.app.report.subject import (
    FITTED,
    HELD_OUT,
    Rows,
    Subject,
    inputs_of,
    rows_of_files,
    rows_of_frame,
    without_seen,
)
from doxa.app.studio.uploads import place_of_upload
from doxa.app.task_tables import check_context
from doxa.errors import DataError, DoxaError, StoreError
from doxa.store import read_artefact
from doxa.tables.columns import Column
from doxa.tables.files import write_table
from doxa.tables.predictions import (
    ROWS_AT_ONCE,
    array,
    class_probs,
    columns,
    flat,
    predict_inputs,
)
from doxa.tables.reading import Array, Dialect, import_pandas, place_of
from doxa.tables.schema import Schema, read_labelled, read_more

MOST_CELLS = 1_000_000
MOST_SHOWN = 50  # rows of one page of the table
_KEPT = 4  # runs with tables that a process keeps
_GRID = 31  # values of a column in a curve of dependence
_AVERAGED = 200  # rows over which it is averaged
_NEIGHBOURS = 2000  # rows of the fit among which neighbours are looked for
_LONGEST_CELL = 200


@dataclass
class Given:
    """What the command line has named. Pages use its numbers."""

    runs: list[Path] = field(default_factory=list)
    tables: list[Path] = field(default_factory=list)
    uploads: Path | None = None
    net: str | None = None


_given = Given()
_cases: OrderedDict[tuple[int, str], Case] = OrderedDict()  # the last ones used


def begin(given: dict[str, Any]) -> None:
    """Take what the command line has named, as JSON."""
    global _given
    uploads = given.get("uploads")
    _given = Given(
        [Path(p) for p in given["runs"]], [Path(p) for p in given["tables"]],
        None if uploads is None else Path(uploads), given.get("net"),
    )  # fmt: skip
    _cases.clear()


def facts() -> dict[str, Any]:
    """The names of runs and tables; nothing is opened."""
    return {
        "runs": [path.resolve().name for path in _given.runs],
        "tables": [path.name for path in _given.tables],
        "shown": MOST_SHOWN,
    }


def warm_up() -> Iterator[Callable[[], object]]:
    """Open the runs while nobody waits."""
    for number in range(len(_given.runs)):
        yield lambda number=number: _quietly(number)  # type: ignore[misc]


def _quietly(number: int) -> None:
    try:
        _case(number, None)
    except (DoxaError, OSError):  # said to the person who opens it
        return


@dataclass
class Case:
    """A run, and the rows of a table as it reads them."""

    posterior: Any
    schema: Schema
    name: str
    subject: Subject
    rows: Rows | None = None  # all rows that are shown: those that are scored, if there is a target
    frame: Any = None  # their cells
    notes: list[str] = field(default_factory=list)
    scored: bool = False  # whether rows have targets

    @cached_property
    def x(self) -> Array:
        assert self.rows is not None
        found: Array = self.rows.x.numpy()
        return found

    @cached_property
    def predicted(self) -> dict[str, Array]:
        """The columns of `doxa predict`."""
        return predict_inputs(self.posterior, self.schema, self.x)

    @cached_property
    def surprise(self) -> Array | None:
        """−log p(y) of each row."""
        return surprises(self.posterior, self.x, self.rows.y) if self.scored and self.rows else None

    @cached_property
    def support(self) -> Support | None:
        """The rows of the fit, where they are known."""
        fitted = self.subject.train
        return None if fitted is None else Support.of(fitted.x.numpy())


@dataclass(frozen=True)
class Support:
    """Where the rows of a fit are: the ends of each input [D], and a sample of the rows."""

    low: Array
    high: Array
    scale: Array
    some: Array  # [n, D], standardised
    far: float  # 99 % of the rows of the fit have a nearer neighbour

    @classmethod
    def of(cls, x: Array) -> Support:
        scale = x.std(axis=0)
        scale = np.where(scale > 0, scale, 1.0)
        step = math.ceil(len(x) / _NEIGHBOURS)
        some = x[::step] / scale
        away = torch.cdist(torch.as_tensor(some), torch.as_tensor(some))
        away.fill_diagonal_(math.inf)
        nearest = away.min(dim=1).values
        far = float(nearest.quantile(0.99)) if len(some) > 1 else math.inf
        return cls(x.min(axis=0), x.max(axis=0), scale, some, far)

    def distance(self, x: Array) -> float:
        """From one row [D] to the nearest row of the fit, in standard deviations."""
        return float(np.sqrt(((self.some - x / self.scale) ** 2).sum(axis=1)).min())


def surprises(posterior: Any, x: Array, y: Any) -> Array:
    """−log p(y) of each row, [N]."""
    parts = []
    for start in range(0, len(x), ROWS_AT_ONCE):
        p, own = posterior.predict(x[start : start + ROWS_AT_ONCE]), y[start : start + ROWS_AT_ONCE]
        own = own.to(p.mean.dtype) if own.is_floating_point() else own
        parts.append(-array(p.log_prob(own)).reshape(len(own), -1).sum(axis=1))
    return np.concatenate(parts)


def open_posterior(run: Path, net: str | None) -> tuple[Any, Schema]:
    """A run of `doxa fit`, or any saved posterior whose rows are a matrix: its columns are then
    called x1, x2, …, or as the posterior calls them."""
    record = read_artefact(run)[1].get("record")
    metadata = record.get("metadata") if isinstance(record, dict) else None
    if isinstance(metadata, dict) and "table" in metadata:
        return load_run(run, net if metadata.get("net") is not None else None)
    posterior = doxa.load(str(run))
    return posterior, plain_schema(posterior)


def plain_schema(posterior: Any) -> Schema:
    """The columns of a posterior that was fitted to tensors."""
    shape, likelihood = posterior.inputs, posterior.fitted_likelihood.name
    if not (isinstance(shape, list) and len(shape) == 1 and isinstance(shape[0], int)):
        raise DataError("the studio opens runs whose rows are a matrix of numbers, one line a row")
    names = posterior.columns or [f"x{k + 1}" for k in range(shape[0])]
    classes = None
    if posterior.likelihood.classifies:
        p = posterior.predict(torch.zeros(1, shape[0]))
        classes = tuple(range(2 if p.likelihood.binary else p.probs.shape[1]))
    elif posterior.predict(torch.zeros(1, shape[0])).mean[0].numel() > 1:
        raise DataError("the studio opens runs with one target")
    made = tuple(Column(str(name)) for name in names)
    return Schema("y", likelihood, made, classes)


def _case(run: Any, table: Any) -> Case:
    """The run of a number with a table: {"named": number}, {"upload": id} or None."""
    if not isinstance(run, int) or isinstance(run, bool) or not 0 <= run < len(_given.runs):
        raise DataError(f"runs have the numbers 0 to {len(_given.runs) - 1}, not {run!r:.40}")
    path = None if table is None else _table(table)
    key = (run, "" if path is None else str(path))
    if key not in _cases:
        _cases[key] = _opened(_given.runs[run], path)
        while len(_cases) > _KEPT:
            _cases.popitem(last=False)
    _cases.move_to_end(key)
    return _cases[key]


def _table(asked: Any) -> Path:
    if isinstance(asked, dict) and set(asked) == {"upload"} and _given.uploads is not None:
        return place_of_upload(_given.uploads, asked["upload"])
    number = asked["named"] if isinstance(asked, dict) and set(asked) == {"named"} else None
    if type(number) is not int or not 0 <= number < len(_given.tables):
        raise DataError("a table is one of those named on the command line, or an upload")
    return _given.tables[number]


def _opened(run: Path, table: Path | None) -> Case:
    known = next((case for (n, _), case in _cases.items() if _given.runs[n] == run), None)
    if known is None:
        if not run.is_dir():
            raise StoreError(f"{run.name} is no folder of a run")
        posterior, schema = open_posterior(run, _given.net)
        check_context(posterior, False)
    else:
        posterior, schema = known.posterior, known.schema
    classes = None if schema.classes is None else tuple(map(str, schema.classes))
    subject = Subject(
        posterior, schema.target, classes, inputs_of(schema), schema=schema,
        folder=run.resolve().name,
    )  # fmt: skip
    case = Case(posterior, schema, run.resolve().name, subject)
    if table is not None:
        _read_rows(case, table)
    return case


def _read_rows(case: Case, path: Path) -> None:
    """The rows of a table, and those of the fit among the tables that were named."""
    schema, dialect = case.schema, Dialect()
    frame, notes = read_more(path, schema, dialect)
    if frame.shape[0] * max(frame.shape[1], 1) > MOST_CELLS:
        raise DataError(
            f"{path.name} has {frame.shape[0]:,} rows of {frame.shape[1]:,} columns, and "
            f"{MOST_CELLS:,} cells are read here: doxa report reads more"
        )
    if schema.target not in frame.columns:
        x, more = schema.features(frame)
        shown = frame[[column.name for column in schema.columns]]
        case.rows = Rows(
            torch.as_tensor(x), None, path.name, "", label=lambda row: place_of(frame.index, row),
        )  # fmt: skip
        case.frame, case.notes = shown, [*notes, *more]
        return
    metadata, subject = case.posterior.metadata, case.subject
    source = metadata.get("source", {}).get("sha256")
    if source is None:
        frame, notes = read_labelled(path, schema, dialect)
        new = rows_of_frame(schema, frame, path.name, HELD_OUT, notes)
        seen = case.posterior.count_fitted(new.x, new.y)
        if seen == new.count:
            subject.train = rows_of_frame(schema, frame, path.name, FITTED, notes)
        else:
            subject.test = new
    else:
        fitted = next((p for p in (path, *_given.tables) if checksum(p) == source), None)
        subject.test, subject.train, subject.remarks = rows_of_files(
            metadata, schema, path, fitted, dialect
        )
        if subject.test is not None and subject.train is not None:
            subject.test, remarks = without_seen(subject.test, subject.train)
            subject.remarks += remarks
    rows = subject.rows
    assert rows is not None
    case.rows, case.scored = rows, True
    case.frame = import_pandas().DataFrame(
        [rows.cells(row) for row in range(rows.count)], columns=list(rows.columns)
    )
    case.notes = [*rows.notes, *subject.remarks]


def open_run(asked: Any, call: Any) -> dict[str, Any]:
    """What is known about a run: its findings, its columns, its calibration on the rows."""
    case = _case(asked.get("run"), asked.get("table"))
    subject, status = case.subject, case.posterior.status
    if subject.rows is not None and not subject.evaluations:
        call.check()
        subject.evaluations = evaluate(case.posterior, subject.rows)
    if subject.status is None:
        subject.status = assess(subject)
    found = subject.status.diagnosis
    return {
        "name": case.name, "method": subject.method_name, "target": subject.target,
        "likelihood": case.schema.likelihood, "classes": _listed(subject.classes),
        "status": str(status), "reason": status.reason,
        "headline": found.headline, "summary": found.summary, "grade": found.status,
        "not_run": subject.status.reason,
        "findings": [
            {"check": f.check, "status": f.status, "words": f.words, "advice": f.advice}
            for f in found.ranked
        ],
        "code": found.code,
        "rows": None if case.rows is None else {
            "count": case.rows.count, "source": case.rows.source,
            "provenance": case.rows.provenance, "scored": case.scored,
        },
        "notes": case.notes,
        "columns": _columns(case),
        "known_fit": case.support is not None,
        "calibration": [calibration(each) for each in subject.evaluations[:1]],
        "sortable": sortable(case),
    }  # fmt: skip


def _listed(values: Any) -> list[str] | None:
    return None if values is None else [str(value) for value in values]


def calibration(found: Evaluation) -> dict[str, Any]:
    """Reliability of classes; coverage and PIT of numbers. With the band of chance."""
    result: dict[str, Any] = {
        "kind": found.kind, "scores": found.scores, "rows": found.rows, "total": found.total,
        "missing": found.missing,
    }  # fmt: skip
    gap = confidence_gap(found) if found.kind == "classes" else coverage_gap(found)
    if gap is None:
        return result
    if found.kind == "classes":
        confidence, accuracy, number = reliability_of(found)
        band = [share_band(c, int(n)) for c, n in zip(confidence, number, strict=True)]
        return result | {
            "words": describe_confidence(gap), "confidence": confidence.tolist(),
            "accuracy": accuracy.tolist(), "count": number.tolist(), "band": band,
        }  # fmt: skip
    covered = coverage_curve(found)
    assert covered is not None
    result |= {
        "words": describe_coverage(found, gap), "levels": list(LEVELS),
        "covered": covered.tolist(), "chance": gap.chance,
    }  # fmt: skip
    if found.pit is not None:
        bins = 20 if found.pit.size >= 200 else 10
        result["pit"] = np.histogram(found.pit, bins, (0.0, 1.0))[0].tolist()
    return result


def _columns(case: Case) -> list[dict[str, Any]]:
    """The columns, for sliders: their kind, the ends of the rows of the fit or of the table, and a
    value to begin with."""
    made, at = [], 0
    for column in case.schema.columns:
        one: dict[str, Any] = {"name": column.name, "missing": case.schema.missing == "impute"}
        if column.categories is not None:
            one |= {"kind": "category", "categories": list(column.categories)}
        elif column.parts is not None:
            one |= {"kind": "date"}
        else:
            one |= {"kind": "number"} | _ends(case, at, column)
        made.append(one)
        at += column.width
    return made


def _ends(case: Case, at: int, column: Column) -> dict[str, Any]:
    if case.support is not None:
        return {"low": float(case.support.low[at]), "high": float(case.support.high[at]),
                "of": "fit"}  # fmt: skip
    loc, scale = case.posterior.scales.x_loc, case.posterior.scales.x_scale
    if isinstance(loc, torch.Tensor) and loc.ndim == 1:
        middle, spread = float(loc[at]), float(scale[at])
        return {"low": middle - 2 * spread, "high": middle + 2 * spread, "of": "scales"}
    if case.rows is not None:
        return {"low": float(case.x[:, at].min()), "high": float(case.x[:, at].max()),
                "of": "table"}  # fmt: skip
    middle = column.fill or 0.0
    return {"low": middle - 1.0, "high": middle + 1.0, "of": "nothing"}


def sortable(case: Case) -> list[str]:
    """The columns by which rows are sorted, the largest first."""
    if case.rows is None:
        return []
    own = ["epistemic_std", "std"] if case.schema.classes is None else [
        "mutual_information", "entropy"
    ]  # fmt: skip
    return ["surprise"] * case.scored + own


def list_rows(asked: Any, call: Any) -> dict[str, Any]:
    """Rows in the order of a column, the largest first: labels, cells, targets, predictions."""
    case = _with_rows(asked)
    order = _order(case, asked.get("by"))
    start = asked.get("start", 0)
    if type(start) is not int or not 0 <= start < len(order):
        raise DataError(f"rows have the numbers 0 to {len(order) - 1}, not {start!r:.40}")
    return {
        "by": asked["by"], "start": start, "count": len(order),
        "rows": [row_of(case, int(row)) for row in order[start : start + MOST_SHOWN]],
    }  # fmt: skip


def _with_rows(asked: Any) -> Case:
    case = _case(asked.get("run"), asked.get("table"))
    if case.rows is None:
        raise DataError("choose a table first")
    return case


def _order(case: Case, by: Any) -> Array:
    if by not in sortable(case):
        raise DataError(f"rows are sorted by {' or '.join(sortable(case))}, not by {by!r:.40}")
    values = case.surprise if by == "surprise" else case.predicted.get(by)
    if values is None:
        raise DataError(f"{case.name} has no {by}: its predictions have no draws to compare")
    return np.argsort(-np.nan_to_num(values, nan=-np.inf), kind="stable")


def row_of(case: Case, row: int) -> dict[str, Any]:
    assert case.rows is not None
    found: dict[str, Any] = {
        "row": row, "label": str(case.rows.label(row)),
        "cells": [_text(cell) for cell in case.frame.iloc[row]],
        "predicted": {name: _plain(values[row]) for name, values in case.predicted.items()},
    }  # fmt: skip
    if case.scored and case.surprise is not None:
        found |= {"surprise": float(case.surprise[row]), "target": _target(case, row)}
    return found


def _target(case: Case, row: int) -> Any:
    assert case.rows is not None
    value = float(case.rows.y[row])
    return value if case.schema.classes is None else str(case.schema.classes[int(value)])


def _text(cell: Any) -> str:
    empty = cell is None or cell != cell
    text = "" if empty else f"{cell:.12g}" if isinstance(cell, float) else str(cell)
    return text[:_LONGEST_CELL]


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, float | np.floating) else (
        int(value) if isinstance(value, np.integer) else str(value)
    )  # fmt: skip


def what_if(asked: Any, call: Any) -> dict[str, Any]:
    """The prediction for one row of cells, and where it leaves the rows of the fit."""
    case = _case(asked.get("run"), asked.get("table"))
    x = _encoded(case, [asked.get("cells")])
    found = columns(case.posterior.predict(x), case.schema, None)
    outside, support = [], case.support
    at = 0
    for column in case.schema.columns:
        inside = range(at, at + column.width)
        if support is not None and column.categories is None:
            low, high = support.low, support.high
            if any(not low[k] <= x[0, k] <= high[k] for k in inside):
                outside.append(column.name)
        at += column.width
    return {
        "predicted": {name: _plain(values[0]) for name, values in found.items()},
        "outside": outside,
        "distance": None if support is None else support.distance(x[0]),
        "far": None if support is None else support.far,
    }  # fmt: skip


def _encoded(case: Case, rows: Sequence[Any]) -> Array:
    """The inputs of rows of cells, {column: cell} each."""
    names = [column.name for column in case.schema.columns]
    for row in rows:
        if not isinstance(row, dict) or set(row) != set(names):
            raise DataError(f"a row has a cell for each of {', '.join(names)[:200]}")
        for cell in row.values():
            sound = cell is None or isinstance(cell, str | int | float)
            if not sound or (isinstance(cell, str) and len(cell) > _LONGEST_CELL):
                raise DataError(f"a cell is a number or at most {_LONGEST_CELL} characters")
    return case.schema.features(import_pandas().DataFrame(list(rows), columns=names))[0]


def dependence(asked: Any, call: Any) -> dict[str, Any]:
    """The curve of a column: means over rows in which it has the same value."""
    case = _with_rows(asked)
    column = next((c for c in case.schema.columns if c.name == asked.get("column")), None)
    if column is None or column.parts is not None:
        raise DataError("a curve is of a column of numbers or of categories")
    assert case.rows is not None
    some = case.frame.iloc[:: math.ceil(case.rows.count / _AVERAGED)]
    if column.categories is None:
        at = case.schema.input_names.index(column.name)
        values: list[Any] = np.linspace(case.x[:, at].min(), case.x[:, at].max(), _GRID).tolist()
    else:
        values = list(column.categories)
    means: dict[str, list[Any]] = {"mean": [], "aleatoric": [], "epistemic": []}
    for value in values:
        call.check()
        for name, one in averages(case, some.assign(**{column.name: value})).items():
            means[name].append(one)
    fit = case.support
    inside = None
    if fit is not None and column.categories is None:
        inside = [float(fit.low[at]), float(fit.high[at])]
    return {
        "column": column.name, "values": values, "rows": len(some), "inside": inside,
        "classes": _listed(case.subject.classes), **means,
    }  # fmt: skip


def averages(case: Case, frame: Any) -> dict[str, Any]:
    """Means over rows: of the prediction (of each class), and of the two parts of the variance (of
    the entropy)."""
    p = case.posterior.predict(case.schema.features(frame)[0])
    if case.schema.classes is None:
        return {
            "mean": float(flat(p.mean).mean()),
            "aleatoric": math.sqrt(float(flat(p.aleatoric).mean())),
            "epistemic": math.sqrt(max(float(flat(p.epistemic).mean()), 0.0)),
        }
    own = float(flat(p.mutual_information).mean()) if p.splits else 0.0
    return {
        "mean": class_probs(p, case.schema).mean(axis=0).tolist(),
        "aleatoric": float(flat(p.entropy).mean()) - own, "epistemic": own,
    }  # fmt: skip


def compare(asked: Any, call: Any) -> dict[str, Any]:
    """Scores of two runs on the rows that both score, and the mean difference of their surprise."""
    pair = [_with_rows(asked | {"run": asked.get(name)}) for name in ("run", "other")]
    first, second = pair
    if not (first.scored and second.scored):
        raise DataError("runs are compared on a table with the target")
    if (first.schema.target, first.subject.classes) != (
        second.schema.target, second.subject.classes
    ):  # fmt: skip
        raise DataError("the two runs predict different targets")
    places = [
        {str(case.rows.label(row)): row for row in range(case.rows.count)}
        for case in pair if case.rows is not None
    ]  # fmt: skip
    common = [label for label in places[0] if label in places[1]]
    if len(common) < 2:
        raise DataError("the two runs have fewer than two rows in common that neither has fitted")
    scores, each = [], []
    for case, place in zip(pair, places, strict=True):
        call.check()
        at = np.array([place[label] for label in common])
        assert case.rows is not None and case.surprise is not None
        p, y = case.posterior.predict(case.x[at]), case.rows.y[torch.as_tensor(at)]
        y = y.to(p.mean.dtype) if y.is_floating_point() else y
        scores.append({k: float(v) for k, v in doxa.evaluate.metrics(p, y).items()})
        each.append(case.surprise[at])
    away = each[0] - each[1]
    return {
        "rows": len(common), "names": [case.name for case in pair], "scores": scores,
        "difference": float(away.mean()),
        "error": float(away.std(ddof=1) / math.sqrt(len(away))),
        "surprise": [values.tolist()[:2000] for values in each], "labels": common[:2000],
    }  # fmt: skip


def export(asked: Any, call: Any) -> dict[str, Any]:
    """All rows with their predictions, as CSV; text that a spreadsheet would run is escaped."""
    case = _with_rows(asked)
    assert case.rows is not None and _given.uploads is not None
    labels = [str(case.rows.label(row)) for row in range(case.rows.count)]
    table = case.frame.set_axis(import_pandas().Index(labels, name="row"))
    if case.scored:
        targets = [_target(case, row) for row in range(case.rows.count)]
        table = table.assign(**{case.schema.target: targets, "surprise": case.surprise})
    table = table.assign(**{k: v for k, v in case.predicted.items() if k not in table})
    place = _given.uploads / f"{secrets.token_hex(8)}.csv"
    try:
        write_table(table.iloc[_order(case, asked.get("by"))], place)
        return {"name": f"{case.name}.csv", "text": place.read_text(encoding="utf-8")}
    finally:
        place.unlink(missing_ok=True)


TASKS = {
    "open": open_run, "rows": list_rows, "what_if": what_if, "dependence": dependence,
    "compare": compare, "export": export,
}  # fmt: skip
