"""What a person sends back: a table with a column of row names and one of labels, checked whole."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from doxa.app.active.pools import Pool, answer_of
from doxa.decide.active import Book
from doxa.errors import DataError, did_you_mean


def read_answers(path: Path, pool: Pool) -> list[tuple[str, str]]:
    """(row's name, label) of each line, as text; lines without a label are left out."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    header = text.partition("\n")[0]
    separator = max(",;\t", key=header.count)
    lines = list(csv.reader(io.StringIO(text), delimiter=separator))
    names = [name.strip() for name in lines[0]] if lines else []
    for name in (pool.id_name, pool.schema.target):
        if name not in names:
            raise DataError(f"{path}: no column {name!r}{did_you_mean(name, names)}")
    row, label = names.index(pool.id_name), names.index(pool.schema.target)
    found = []
    for number, cells in enumerate(lines[1:], 2):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(names):
            raise DataError(
                f"{path}, line {number}: {len(cells)} cells, and the header has {len(names)}"
            )
        if cells[label].strip():
            found.append((cells[row].strip(), cells[label].strip()))
    return found


def begun(path: Path, pool: Pool, book: Book) -> bool:
    """Whether a file holds all open rows and some answers: a person is at work on it."""
    try:
        given = read_answers(path, pool) if path.exists() else []
    except DataError:
        return False
    if not given:
        return False
    lines = csv.reader(io.StringIO(path.read_text("utf-8-sig")))
    names = {cells[0].strip() for cells in lines if cells}
    return {pool.ids[row] for row in book.asked} <= names


def checked(given: Sequence[tuple[str, str]], pool: Pool, book: Book) -> dict[int, Any]:
    """{row: label} of rows that are open; an unknown name or class, a row twice or one that was not
    asked about is refused by its name."""
    number = {name: row for row, name in enumerate(pool.ids)}
    answers: dict[int, Any] = {}
    for name, cell in given:
        if name not in number:
            open_rows = [pool.ids[row] for row in book.asked]
            raise DataError(
                f"there is no {pool.id_name} {name!r} in the pool{did_you_mean(name, open_rows)}"
            )
        row = number[name]
        place = pool.places[row]
        if row in answers:
            raise DataError(f"{place} is answered twice")
        label = answer_of(pool.schema, cell, place)
        if row in book.answers:
            if book.answers[row] == label:
                continue  # the same file once more
            raise DataError(f"{place} has an answer already, {book.answers[row]!r}")
        if row not in book.asked:
            raise DataError(f"{place} was not asked about")
        answers[row] = label
    return answers


def refuse_missing(answers: Mapping[int, Any], pool: Pool, book: Book) -> None:
    missing = [row for row in book.asked if row not in answers]
    if missing:
        raise DataError(
            f"{len(answers)} answers for {len(book.asked)} rows: {pool.places[missing[0]]} has "
            "none; --partial takes those that are there"
        )
