"""Held-out rows of a table: rows to test on and rows to calibrate on.

The choice is a function of the seed, the number of rows and the labels: the same command gives the
same rows, also if a fit is resumed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from doxa.app.calibration import Calibration, conformal_level
from doxa.app.columns import UNCLEAR, layout_of, may_hold_groups
from doxa.app.predictions import ROWS_AT_ONCE
from doxa.app.reading import Array, Dialect, is_text
from doxa.app.schema import (
    Schema,
    TableSpec,
    groups_of,
    inferred,
    read_labelled,
    times_of,
)
from doxa.app.tables import pick
from doxa.data.rows import shuffled
from doxa.data.text_files import check_regular
from doxa.errors import DataError
from doxa.evaluate import Streaming, table
from doxa.likelihoods import LIKELIHOODS, assumed
from doxa.likelihoods import likelihood as likelihood_of
from doxa.predictive import Predictive

if TYPE_CHECKING:
    import pandas as pd

LEVEL = 0.95
SHARE = 0.2  # of the rows, to calibrate on


@dataclass(frozen=True)
class Parts:
    """Row numbers, from 0, in the order of the table."""

    train: Array
    test: Array
    calibration: Array

    @property
    def whole(self) -> bool:
        """Whether every row is trained on."""
        return not (len(self.test) or len(self.calibration))

    @property
    def words(self) -> str:
        """The message for the user; "" if every row is trained on."""
        held = (("test", self.test), ("calibrate", self.calibration))
        sizes = [f"{len(rows)} to {what} on" for what, rows in held if len(rows)]
        return "" if self.whole else ", ".join([f"{len(self.train)} rows to train on", *sizes])

    def remembered(self, digest: str) -> dict[str, Any]:
        """For the metadata of a run: row numbers, and the checksum of their file."""
        held = {"held_out_rows": self.test, "calibration_rows": self.calibration}
        return {
            name: {"sha256": digest, "rows": rows.tolist()}
            for name, rows in held.items()
            if len(rows)
        }


@dataclass(frozen=True)
class Tested:
    """Rows that a fit is scored on, and their file."""

    x: Array
    y: Array
    file: str
    sha256: str
    groups: Array | None = None  # the group of each row, if rows belong together


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


def leaking_columns(
    frame: pd.DataFrame, schema: Schema, x: Array, y: Array, seed: int
) -> list[dict[str, Any]]:
    """The columns by which rows seem to belong together, if neither `--group` nor `--time` was
    given: `doxa.driver.leakage`. The effect of a category that the fit knows is no leak, so a
    column of categories is tested without its own inputs."""
    if schema.group is not None or schema.time is not None:
        return []
    own: dict[str, Sequence[int]] = {}
    start = 0
    for column in schema.columns:
        own[column.name] = range(start, start + column.width)
        start += column.width
    found: list[tuple[str, Array, bool, Sequence[int]]] = []
    for name in map(str, frame.columns):
        values = pick(frame, name)
        if name == schema.target:
            continue
        layout = layout_of(values)
        if layout not in (None, UNCLEAR) and not values.isna().any():
            found.append((name, np.unique(times_of(values), return_inverse=True)[1], True, ()))
        elif layout is None and may_hold_groups(values):
            text = own.get(name, ()) if is_text(values) else ()
            found.append((name, np.unique(groups_of(values), return_inverse=True)[1], False, text))
    if not found:
        return []
    from doxa.driver.leakage import (  # imported here: most tables have no such column
        Column,
        find_leaks,
    )

    columns = [
        Column(name, torch.as_tensor(value), ordered, torch.as_tensor(
            [i for i in range(x.shape[1]) if i not in without], dtype=torch.long
        ))
        for name, value, ordered, without in found
    ]  # fmt: skip
    likelihood = assumed(schema.likelihood) if schema.assumed else likelihood_of(schema.likelihood)
    leaks = find_leaks(torch.as_tensor(x), torch.as_tensor(y), likelihood, columns, seed)
    return [
        {"column": leak.name, "option": "--time" if leak.ordered else "--group",
         "loss": leak.loss, "error": leak.error, "model": leak.model}
        for leak in leaks
    ]  # fmt: skip


def leak_words(leak: dict[str, Any]) -> str:
    """The message about a column that leaks."""
    name, time = repr(leak["column"]), leak["option"] == "--time"
    near = f"rows of times near theirs in {name}" if time else f"other rows of their {name}"
    new = "later rows" if time else f"a new {name}"
    return (
        f"rows belong together by column {name}: held-out rows are predicted "
        f"{leak['loss']:.2f} ± {leak['error']:.2f} nats per row better ({leak['model']}) if {near} "
        f"are trained on, so status and scores do not hold for {new}; use {leak['option']} "
        f"{leak['column']} if the fit is for {new}"
    )


def check_shares(
    test: Path | None, split: float | None, asked: Calibration, share: float | None
) -> None:
    """Check, before any reading, that options fit together and shares are between 0 and 1."""
    if test is not None and split is not None:
        raise DataError("give --test or --split, not both")
    if share is not None and not asked:
        raise DataError("--calibration-share needs --calibrate or --conformal")
    for option, value in (("--split", split), ("--calibration-share", share)):
        if value is not None and not 0.0 < value < 1.0:
            raise DataError(f"{option} must be between 0 and 1, not {value:g}")


def read_test(test: Path, data: Path, schema: Schema, dialect: Dialect) -> Tested:
    """The rows of `--test`, which must not be the file that is fitted."""
    if test.is_file() and checksum(test) == checksum(data):
        raise DataError(f"--test {test} is the file that is fitted; --split 0.2 holds rows out")
    try:
        frame, digest = read_labelled(test, schema, dialect)[0], checksum(test)
        group = schema.group if schema.group in frame.columns else None
        return Tested(
            schema.features(frame)[0], schema.targets(frame), test.name, digest,
            None if group is None else groups_of(pick(frame, group)),
        )  # fmt: skip
    except DataError as error:
        raise DataError(f"--test {test}: {error}") from error


def divide(
    rows: int, test: float, calibration: float, seed: int, labels: Array | None = None,
    together: Together = Together(),  # noqa: B008 - immutable
) -> Parts:  # fmt: skip
    """Divide the rows into those to train, to test and to calibrate on; a share of 0 gives none.
    With class labels, each class is in each part in proportion. Rows that belong together: a part
    has whole groups, or rows that are later than those of the training part."""
    if not (together.groups is None and together.time is None) and test + calibration > 0.0:
        return _divide_together(rows, test, calibration, seed, together)
    sizes = [max(1, round(share * rows)) if share else 0 for share in (test, calibration)]
    if rows - sum(sizes) < 2:
        raise DataError(
            f"{rows} rows: {sizes[0]} to test and {sizes[1]} to calibrate on leave too few to "
            "train on; hold out less"
        )
    order = shuffled(rows, np.random.default_rng([seed, 5]), labels)
    tested, calibrated, trained = np.split(order, np.cumsum(sizes))
    return Parts(np.sort(trained), np.sort(tested), np.sort(calibrated))


def _divide_together(
    rows: int, test: float, calibration: float, seed: int, together: Together
) -> Parts:
    left, held = np.arange(rows), []
    for share in (test, calibration):
        mask = np.zeros(len(left), bool)
        if share:
            mask = together.some(left).held(min(1.0, share * rows / len(left)), seed)
            if not mask.any() or len(left) - mask.sum() < 2:
                raise DataError(
                    f"{rows} rows cannot be divided by groups or times into rows to train on and "
                    "rows to hold out: hold out another share"
                )
        held.append(left[mask])
        left = left[~mask]
    return Parts(left, held[0], held[1])


def schema_of(frame: pd.DataFrame, whole: Schema, parts: Parts, asked: TableSpec) -> Schema:
    """The schema of the training rows alone: the fit must not use categories or scales of held-out
    rows. The classes and the dropped columns are those of the whole table: a column that counts the
    rows does not count those of a part."""
    if parts.whole:
        return whole
    less = replace(asked, likelihood=whole.likelihood, drop=(*asked.drop, *whole.left_out))
    found = inferred(frame.iloc[parts.train], less, whole.dialect)
    why = {name: f"column {name!r} dropped" for name in whole.left_out}
    kept = {name: note for name, start in why.items() for note in whole.notes
            if note.startswith(start)}  # fmt: skip
    own = [next((kept[n] for n in kept if note.startswith(why[n])), note) for note in found.notes]
    target = next(k for k, note in enumerate(whole.notes) if note.startswith("target "))
    notes = (*whole.notes[: target + 1], *own[1:])
    return replace(found, classes=whole.classes, notes=notes, assumed=whole.assumed)


def checksum(path: Path) -> str:
    """The SHA-256 of a file's bytes; DataError if it is no regular file or cannot be read."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def checksum_of_files(folder: Path) -> str:
    """The SHA-256 of the names, sizes and times of change of the files of a folder. Their bytes may
    be many; a fit compares the rows themselves (`doxa.data.streams`)."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    facts = [
        (file.relative_to(folder).as_posix(), found.st_size, found.st_mtime_ns)
        for file in files if (found := file.stat())
    ]  # fmt: skip
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def score(posterior: Any, schema: Schema, rows: Tested, seen: Array) -> dict[str, Any]:
    """The scores of held-out rows, and those of the best constant for the targets `seen` in
    training; intervals and sets have the level of a conformal posterior."""
    x, y = rows.x, rows.y
    level = conformal_level(posterior) or LEVEL
    stream = Streaming(level=level)
    for start in range(0, len(x), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        stream.update(posterior.predict(x[part]), y[part])
    ground = Streaming(level=level).update(constant(schema, seen, len(y)), y)
    return {
        "file": rows.file, "sha256": rows.sha256, "rows": len(y), "level": level,
        "scores": stream.result(), "constant": ground.result(),
    }  # fmt: skip


def constant(schema: Schema, seen: Array, rows: int) -> Predictive:
    """The prediction that ignores the inputs, from the targets `seen` in training: the shares of
    the classes, the mean rate of counts, or the mean and standard deviation of numbers."""
    kind = LIKELIHOODS[schema.likelihood]()
    likelihood, f = kind.constant_prediction(seen, (schema.outputs,))
    return Predictive(f.expand(1, rows, *f.shape), likelihood)


def score_rows(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(score, value of the run, value of the constant), as text."""
    from doxa.app.report.scores import title_of  # imported here: it imports this module

    rows = []
    for each in table.SCORES:
        if not each.printed or each.name not in found["scores"]:
            continue
        ground = found["constant"].get(each.name)
        beside = "" if ground is None else _number(ground)
        rows.append((title_of(each, found["level"]), _number(found["scores"][each.name]), beside))
    return rows


def _number(value: float) -> str:
    return f"{value:.3f}" if 0.001 <= abs(value) < 1000 else f"{value:.4g}"
