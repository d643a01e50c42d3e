"""A folder of CSV files as tasks: a file is a task, a line one of its points."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from doxa.data.text_files import read_bytes, unescape
from doxa.errors import DataError


def read_folder(
    folder: str | Path, target: str | Sequence[str], drop: Sequence[str] = ()
) -> list[tuple[Tensor, Tensor]]:
    """(x, y) of each file, in the order of their names. The first line names the columns, which
    are the same in every file and hold numbers; all that are neither the target nor dropped are
    inputs."""
    files = sorted(Path(folder).glob("*.csv"))
    if not files:
        raise DataError(f"{folder} holds no .csv file")
    targets = [target] if isinstance(target, str) else list(target)
    names = _rows(files[0])[0]
    absent = [name for name in (*targets, *drop) if name not in names]
    if absent:
        raise DataError(f"{files[0].name} has no column {absent[0]!r}; there are {names}")
    inputs = [name for name in names if name not in targets and name not in drop]
    if not inputs:
        raise DataError(f"{files[0].name} has no input column besides {targets}")
    tasks = []
    for file in files:
        header, *rows = _rows(file)
        if sorted(header) != sorted(names):
            raise DataError(f"{file.name} has the columns {header}, {files[0].name} {names}")
        place = {name: i for i, name in enumerate(header)}
        x, y = (
            torch.tensor(
                [[_number(row, place[name], name, file, i) for name in columns]
                 for i, row in enumerate(rows, 2)], dtype=torch.float64,
            ).reshape(len(rows), len(columns))
            for columns in (inputs, targets)
        )  # fmt: skip
        if len(x) < 2:
            raise DataError(f"{file.name} has {len(x)} rows: one to learn from and one to predict")
        tasks.append((x, y))
    return tasks


def _rows(file: Path) -> list[list[str]]:
    try:
        text = read_bytes(file).decode("utf-8-sig")
        rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file.name} cannot be read as a table: {error}") from error
    if not rows:
        raise DataError(f"{file.name} is empty")
    return [[unescape(name) for name in rows[0]], *rows[1:]]


def _number(row: Sequence[str], at: int, name: str, file: Path, line: int) -> float:
    try:
        return float(row[at])
    except (IndexError, ValueError) as error:
        cell = repr(row[at]) if at < len(row) else "missing"
        raise DataError(f"{file.name}, line {line}: {name} is {cell}, not a number") from error
