"""Whose rows they are: those of the fit, those it split off, or new ones.

A run remembers the checksum of its file, and which rows of it `doxa fit --split` held out. A file
that is given as a test but is the file of the fit holds no new rows; nor do rows that stand among
those of the fit one by one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils._pytree import tree_flatten

from doxa.app.held_out import checksum
from doxa.app.reading import Dialect
from doxa.app.report.subject import Rows, rows_of_frame
from doxa.app.report.words import count
from doxa.app.schema import Schema, read_labelled
from doxa.errors import DataError

FITTED = "the rows it was fitted to"
HELD_OUT = "held out from the fit"


def rows_of_files(
    metadata: dict[str, Any],
    schema: Schema,
    test: Path | None,
    train: Path | None,
    dialect: Dialect = Dialect(),  # noqa: B008 - frozen
) -> tuple[Rows | None, Rows | None, list[str]]:
    """(new rows, rows of the fit, what a person should know of the choice)."""
    source = metadata.get("source", {})
    split = metadata.get("held_out_rows") or {}
    said: list[str] = []
    own = {path: _checksum(path) == source.get("sha256") for path in (test, train) if path}
    if train is not None and source.get("sha256") and not own[train]:
        said.append(
            f"{train.name} is not the file of the fit ({source.get('file', 'unknown')}): its "
            "checksum differs"
        )
    whole = test if test is not None and own[test] else None
    if whole is None and test is None and train is not None and own[train]:
        whole = train if split else None
    if whole is None:
        new_rows = _read(schema, test, HELD_OUT, dialect)
        return new_rows, _read(schema, train, FITTED, dialect), said
    everything = _read(schema, whole, FITTED, dialect)
    assert everything is not None
    if not split:
        said.append(
            f"{whole.name} is the file of the fit (same checksum): its rows are {FITTED}, not new "
            "ones"
        )
        return None, everything, said
    new = _split(split, _checksum(whole), whole.name, everything.count)
    # rows that it was calibrated on are neither
    used = metadata.get("calibration_rows") or {}
    old = ~new & ~_split(used, _checksum(whole), whole.name, everything.count)
    said.append(f"{count(int(new.sum()), 'row')} of {whole.name}, set aside by --split, scored")
    return everything.only(new, "set aside by the fit"), everything.only(old, FITTED), said


def without_seen(test: Rows, train: Rows) -> tuple[Rows | None, list[str]]:
    """The test rows, with a word about those that the fit has seen; None where it saw them all."""
    seen = _shared(test, train)
    if not seen:
        return test, []
    if seen == test.count:
        return None, [f"all {test.count:,} test rows are among {FITTED}: there are no new ones"]
    words = f"{seen:,} of {test.count:,} test rows are also among {FITTED}"
    return replace(test, told=f"{test.told}, but {seen:,} of them are also among {FITTED}"), [words]


def _read(schema: Schema, path: Path | None, told: str, dialect: Dialect) -> Rows | None:
    if path is None:
        return None
    frame, said = read_labelled(path, schema, dialect)
    return rows_of_frame(schema, frame, path.name, told, said)


def _checksum(path: Path) -> str:
    try:
        return checksum(path)
    except DataError:
        return ""  # reading the table says what is wrong with it


def _split(split: dict[str, Any], checksum: str, file: str, rows: int) -> Any:
    """[rows]: which ones were held out."""
    numbers = np.asarray(split.get("rows", []), dtype=int)
    if split.get("sha256") not in (None, checksum) or (numbers.size and numbers.max() >= rows):
        raise DataError(f"the rows that the run set aside are not rows of {file}; pass --test")
    chosen = np.zeros(rows, dtype=bool)
    chosen[numbers] = True
    return chosen


def _shared(test: Rows, train: Rows) -> int:
    """How many test rows stand among those of the fit, x and y alike."""
    known = set(_keys(train))
    return sum(key in known for key in _keys(test))


def _keys(rows: Rows) -> list[bytes]:
    leaves = tree_flatten((rows.x, rows.y))[0]
    flat = [t.detach().cpu().float().reshape(len(t), -1).numpy() for t in leaves]
    table = np.concatenate(flat, axis=1)
    return [row.tobytes() for row in table]
