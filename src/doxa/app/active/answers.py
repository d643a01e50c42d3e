"""What a person sends back: a table with a column of row names and one of labels, checked whole.

A sheet is read as spreadsheet programs save it: separated by commas, semicolons or tabs, with or
without a byte order mark, its columns in any order and others beside them. One that holds answers
is never written over unless each of them was entered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doxa.app.active.pools import Pool, answer_of
from doxa.app.reading import read_records
from doxa.data.text_files import unescape
from doxa.decide.active import Book
from doxa.errors import DataError, did_you_mean

_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Sheet:
    """answers: (row's name, label) of each line that has a label. names: of all its rows."""

    answers: list[tuple[str, str]]
    names: set[str]


def read_sheet(path: Path, pool: Pool) -> Sheet:
    """The rows of a sheet, as text."""
    records, separator = read_records(path)
    (_, first), *lines = records
    header = [unescape(name) for name in first]
    for name in (pool.id_name, pool.schema.target):
        if name not in header:
            raise DataError(f"{path}: no column {name!r}{did_you_mean(name, header)}")
        if header.count(name) > 1:
            raise DataError(f"{path}: {name!r} stands more than once in the header")
    row, label = header.index(pool.id_name), header.index(pool.schema.target)
    comma = separator != "," and pool.schema.classes is None  # numbers may have a decimal comma
    ids, classes = set(pool.ids), set(map(str, pool.schema.classes or ()))
    sheet = Sheet([], set())
    for number, cells in lines:
        if not any(cells):
            continue
        if len(cells) > len(header) and any(cells[len(header) :]):
            raise DataError(
                f"{path}, line {number}: {len(cells)} cells, and the header has {len(header)}"
            )
        cells = cells + [""] * (len(header) - len(cells))  # empty ones at the end may be dropped
        name, answer = _plain(cells[row], ids), _plain(cells[label], classes)
        sheet.names.add(name)
        if answer:
            if comma and _DECIMAL_COMMA.fullmatch(answer):
                answer = answer.replace(",", ".")
            sheet.answers.append((name, answer))
    return sheet


def _plain(cell: str, known: set[str]) -> str:
    """A cell as it was before it was written; as a person may have typed it, where only that is
    known."""
    plain = unescape(cell)
    return cell if cell in known and plain not in known else plain


def being_filled_in(path: Path, pool: Pool, book: Book) -> bool:
    """Whether a person is at work on a sheet: it holds all open rows and some answers.

    False where nothing in it is lost if it is written anew. Anything else is an error, and the
    sheet stays as it is.
    """
    if not path.exists() and not path.is_symlink():
        return False
    keep = (
        f"; {path} is kept: mend it, take its answers with doxa active label, or move it away to "
        "have it written anew"
    )
    try:
        sheet = read_sheet(path, pool)
        number = _numbers(pool)
        waiting = False
        for name, cell in sheet.answers:
            row = _row(name, number, pool, book)
            if row in book.answers:
                if answer_of(pool.schema, cell, pool.places[row]) != book.answers[row]:
                    raise DataError(
                        f"{pool.places[row]} was answered {book.answers[row]!r}, the sheet says "
                        f"{cell!r} (doxa active label --correct enters it)"
                    )
            elif row in book.asked:
                waiting = True
            else:
                raise DataError(f"{pool.places[row]} was not asked about")
        missing = [row for row in book.asked if pool.ids[row] not in sheet.names]
        if waiting and missing:
            raise DataError(
                f"{pool.places[missing[0]]} is not in the sheet, which holds answers to others "
                "(doxa active label --partial enters them)"
            )
    except DataError as error:
        raise DataError(f"{error}{keep}") from error
    return bool(sheet.answers) and bool(book.asked) and not missing


def checked(
    given: Sequence[tuple[str, str]], pool: Pool, book: Book, correct: bool = False
) -> dict[int, Any]:
    """{row: label} of rows that are open, and of answers that change if `correct`; an unknown name
    or class, a row twice or one that was not asked about is refused by its name."""
    number = _numbers(pool)
    answers: dict[int, Any] = {}
    seen: set[int] = set()
    for name, cell in given:
        row = _row(name, number, pool, book)
        place = pool.places[row]
        if row in seen:
            raise DataError(f"{place} is answered twice")
        seen.add(row)
        label = answer_of(pool.schema, cell, place)
        if row in book.answers:
            if book.answers[row] == label:
                continue  # the same file once more
            if not correct:
                raise DataError(
                    f"{place} has an answer already, {book.answers[row]!r}; --correct replaces it"
                )
        elif row not in book.asked:
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


def pair_of(text: str, pool: Pool) -> tuple[str, str]:
    """ROW=LABEL; a row's name may hold = itself, and an apostrophe as in a sheet."""
    names = set(pool.ids)
    parts = [(text[:i].strip(), text[i + 1 :].strip()) for i, c in enumerate(text) if c == "="]
    pairs = [(row, label) for row, label in parts if row and label]
    if not pairs:
        raise DataError(f"--answer takes ROW=LABEL, not {text!r}")
    for row, label in pairs:
        if row in names:
            return row, label
    return next(((unescape(row), x) for row, x in pairs if unescape(row) in names), pairs[0])


def _numbers(pool: Pool) -> dict[str, int]:
    return {name: row for row, name in enumerate(pool.ids)}


def _row(name: str, number: Mapping[str, int], pool: Pool, book: Book) -> int:
    if name not in number:
        open_rows = [pool.ids[row] for row in book.asked]
        raise DataError(
            f"there is no {pool.id_name} {name!r} in the pool{did_you_mean(name, open_rows)}"
        )
    return number[name]
