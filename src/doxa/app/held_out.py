"""Held-out rows of a table: rows to test on and rows to calibrate on.

The choice is a function of the seed, the number of rows and the labels: the same command gives the
same rows, also if a fit is resumed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from doxa.app.calibration import Calibration
from doxa.data.rows import shuffled
from doxa.data.text_files import check_regular
from doxa.errors import DataError
from doxa.evaluate import Streaming, table
from doxa.likelihoods import LIKELIHOODS
from doxa.predictive import Predictive
from doxa.tables.files import pick
from doxa.tables.predictions import ROWS_AT_ONCE, conformal_level
from doxa.tables.reading import Array, Dialect
from doxa.tables.schema import (
    Schema,
    TableSpec,
    Together,
    groups_of,
    inferred,
    read_labelled,
)

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
