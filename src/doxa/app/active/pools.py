"""The pool of rows to label, and the sheet in which a person enters labels.

A pool holds the rows of a table, or images in an array or a folder: the inputs of the network, a
name for each row, and what the person sees of it. Rows with a value in the target column are
labelled already.

A sheet is a table with a column of row names and a column of labels. It is read as spreadsheet
programs save it: separated by commas, semicolons or tabs, with or without a byte order mark, its
columns in any order, with other columns beside them. All of it is checked before any label is
entered. A sheet that holds answers is never replaced unless each of them was entered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np

from doxa.app.figures import encode
from doxa.data.text_files import check_memory, check_regular, most_unpacked, unescape
from doxa.decide.active import LabelState
from doxa.errors import DataError, MethodError, StoreError, did_you_mean
from doxa.likelihoods import LIKELIHOODS
from doxa.tables.columns import CLASSIFIERS, MOST_INTEGER_CLASSES, Column
from doxa.tables.files import open_table
from doxa.tables.reading import (
    Array,
    float_of,
    gaps,
    import_pandas,
    label_of,
    numbers_of,
    place_of,
    read_records,
)
from doxa.tables.schema import Schema, TableSpec, inferred

ARRAYS = (".npy", ".npz")
ROW = "row"  # the column of the numbers of images
IMAGE = "image"  # the column of their names, if they have names


@dataclass
class Pool:
    """The rows of a session.

    x: [N, D]. ids: the name of each row, as text. shown: the columns that the person sees.
    known: {row: label} of rows with a label from the start. images: [N, H, W] or [N, H, W, 3].
    """

    schema: Schema
    x: Array
    ids: list[str]
    id_name: str
    places: list[str]
    shown: Any = None
    known: dict[int, Any] = field(default_factory=dict)
    images: Array | None = None

    def to_label(self, rows: Sequence[int], folder: Path) -> Any:
        """The table that the person fills in; images are written to `folder`."""
        pandas = import_pandas()
        index = pandas.Index([self.ids[row] for row in rows], name=self.id_name)
        if self.images is None:
            table = self.shown.iloc[list(rows)].set_axis(index)
        else:
            names = [_picture(self.ids[row]) for row in rows]
            if folder.is_symlink():
                raise StoreError(f"{folder} is a link: images are written to a folder only")
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for name, row in zip(names, rows, strict=True):
                    (folder / name).unlink(missing_ok=True)  # it may be a link to a file elsewhere
                    (folder / name).write_bytes(encode(self.images[row]))
            except OSError as error:
                raise StoreError(
                    f"{folder} cannot be written: {error.strerror or error}"
                ) from error
            table = pandas.DataFrame({"file": [f"{folder.name}/{n}" for n in names]}, index=index)
        return table.assign(**{self.schema.target: ""})


def read_pool(path: Path, asked: TableSpec, classes: Sequence[str]) -> Pool:
    """Read a CSV or Parquet file, or a .npy or .npz file of images (`session.pack` makes one)."""
    if path.suffix.lower() in ARRAYS:
        return _images(path, asked, classes)
    read = open_table(path, asked.index, dialect=asked.dialect)
    frame, dialect, notes = read.frame, read.dialect, read.notes
    if not frame.index.is_unique:
        raise DataError(f"{path.name}: every row needs a unique name, but the index repeats some")
    known = _known(frame, asked.target)
    likelihood, labels = _meaning(known, asked, classes)
    stand_in = frame.assign(**{asked.target: _cycled(labels, len(frame))})
    schema = inferred(stand_in, replace(asked, likelihood=likelihood), dialect)
    schema = replace(schema, classes=labels, notes=(*notes, *schema.notes))
    answers = {row: answer_of(schema, cell, place_of(frame.index, row)) for row, cell in known}
    shown = frame.drop(columns=asked.target, errors="ignore")
    ids = [str(name).strip() for name in frame.index]
    if len(set(ids)) < len(ids) or "" in ids:
        raise DataError(f"{path.name}: every row needs a unique name, but the index repeats some")
    called = str(frame.index.name or ROW)
    while called in (*shown.columns, asked.target):  # each column of a sheet has its own name
        called += "_"
    return Pool(
        schema, schema.features(shown)[0], ids, called,
        [place_of(frame.index, i) for i in range(len(frame))], shown, answers,
    )  # fmt: skip


def answer_of(schema: Schema, cell: Any, place: str) -> Any:
    """A label as it is stored: the class as text, or a number; else an error names the place."""
    if schema.classes is None:
        number = float_of(cell)
        if not np.isfinite(number):
            raise DataError(f"{place}: {cell!r} is not a number")
        return number
    label = label_of(cell)
    if label not in schema.classes and label.replace(".", "", 1).isdecimal():
        label = label_of(float(label))  # 3.0 is the class 3
    if label not in schema.classes:
        some = ", ".join(map(str, schema.classes[:12]))
        raise DataError(f"{place}: {label!r} is no class; classes are {some}")
    return label


def _known(frame: Any, target: str) -> list[tuple[int, Any]]:
    """(row, label) of the rows that have one."""
    if target not in frame.columns:
        return []
    cells, empty = frame[target], set(gaps(frame[target]))
    return [(row, cells.iloc[row]) for row in range(len(cells)) if row not in empty]


def _meaning(
    known: list[tuple[int, Any]], asked: TableSpec, classes: Sequence[str]
) -> tuple[str, tuple[str, ...] | None]:
    """The likelihood, and its classes if it has some: given, or inferred from the labels."""
    labels = list(dict.fromkeys(label.strip() for label in classes if label.strip()))
    if not labels and asked.likelihood not in (None, *CLASSIFIERS):
        return str(asked.likelihood), None
    if not labels:
        if not known:
            raise DataError(
                f"no row has a label in {asked.target!r} yet: give the classes, --classes a,b,c, "
                "or --likelihood gaussian for a number"
            )
        seen = [cell for _, cell in known]
        whole = all(not isinstance(c, str) and float_of(c).is_integer() for c in seen)
        text = any(isinstance(cell, str) for cell in seen)
        if not text and not (whole and len(set(seen)) <= MOST_INTEGER_CLASSES):
            return asked.likelihood or "gaussian", None
        labels = sorted({label_of(cell) for cell in seen})
    if len(labels) < 2:
        raise DataError(f"{asked.target!r} has one class only ({labels[0]}); give --classes a,b")
    return ("bernoulli" if len(labels) == 2 else "categorical"), tuple(labels)


def _cycled(labels: tuple[str, ...] | None, rows: int) -> list[Any]:
    """A placeholder target, used while the schema of the inputs is inferred."""
    if labels is None:
        return [float(i % 7) + 0.5 for i in range(rows)]
    if rows < 2 * len(labels):
        raise DataError(f"the pool has {rows} rows, too few for {len(labels)} classes")
    return [labels[i % len(labels)] for i in range(rows)]


def _images(path: Path, asked: TableSpec, classes: Sequence[str]) -> Pool:
    """Grey or RGB images [N, H, W], [N, H, W, 3] or [N, 1, H, W]; 0 … 255, or 0 … 1."""
    ids: list[Any] = []
    size = check_regular(path)
    try:
        if path.suffix.lower() == ".npz":
            with ZipFile(path) as archive:
                check = sum(one.file_size for one in archive.infolist())
            if check > most_unpacked(size):
                raise DataError(f"it unpacks to {check >> 20} MiB, which is refused")
            check_memory(check, path)
        found = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(found, np.ndarray):
            names = found.files
            ids = found["names"].tolist() if set(names) == {"x", "names"} else []
            found = found["x" if "x" in names else names[0]]
    except Exception as error:  # NumPy raises many types for a damaged file
        raise DataError(f"{path} cannot be read as an array of images: {error}") from error
    if found.dtype.kind not in "buif":
        raise DataError(f"{path} holds an array of {found.dtype}, not of numbers")
    pixels = found[:, 0] if found.ndim == 4 and found.shape[1] == 1 else found
    if pixels.ndim not in (3, 4) or (pixels.ndim == 4 and pixels.shape[3] != 3) or not len(pixels):
        raise DataError(
            f"{path} holds an array of shape {list(found.shape)}: images are [N, H, W] or "
            "[N, H, W, 3]"
        )
    if asked.likelihood in CLASSIFIERS and not classes:
        raise MethodError("images need --classes a,b,c")
    scale = 255.0 if pixels.dtype == np.uint8 or float(pixels.max()) > 1.5 else 1.0
    likelihood, labels = _meaning([], asked, classes)
    x = (pixels.reshape(len(pixels), -1) / scale).astype(np.float64)
    schema = Schema(
        asked.target, likelihood, tuple(Column(f"pixel{i}") for i in range(x.shape[1])), labels
    )
    called = IMAGE if ids else ROW
    ids = ids or [str(row) for row in range(len(x))]
    _check_names(ids, len(x), path)
    if asked.target in (called, "file"):
        raise DataError(f"{asked.target!r} is another column of the sheet; choose another --target")
    shown = np.clip(pixels / scale * 255.0, 0, 255).astype(np.uint8)
    places = [f"image {name}" for name in ids]
    return Pool(schema, x, ids, called, places, images=shown)


def _picture(name: str) -> str:
    """The name of the file of an image."""
    return f"{name.removesuffix('.png')}.png"


def _check_names(names: Sequence[Any], rows: int, path: Path) -> None:
    """An error unless names are unique and no paths: a file of each name is written."""
    for name in names:
        plain = isinstance(name, str) and Path(name).name == name and "\0" not in name
        if not plain or name in ("", ".", ".."):
            raise DataError(f"{path}: the image name {name!r} is not a file name")
    if len(names) != rows or len({_picture(name).strip() for name in names}) != rows:
        raise DataError(f"{path}: {rows} images need {rows} different names")


def coded(schema: Schema, answers: Sequence[Any]) -> Array:
    """Labels as targets of the fit."""
    if schema.classes is None:
        return numbers_of(import_pandas().Series(list(answers)))
    code = {label: k for k, label in enumerate(schema.classes)}
    codes = np.array([code[label] for label in answers])
    return codes.astype(np.float64) if LIKELIHOODS[schema.likelihood].binary else codes


_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Sheet:
    """answers: (row name, label) of each line with a label. names: of all its rows."""

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
            raise DataError(f"{path}: {name!r} appears more than once in the header")
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
    """A cell without its escape; the cell itself if only that is a known value, as a person may
    have typed it."""
    plain = unescape(cell)
    return cell if cell in known and plain not in known else plain


def being_filled_in(path: Path, pool: Pool, book: LabelState) -> bool:
    """Whether a person is working on the sheet: it holds all open rows and some answers.

    False if nothing is lost when it is written again. Anything else is an error, and the sheet is
    kept.
    """
    if not path.exists() and not path.is_symlink():
        return False
    keep = (
        f"; {path} is kept: correct it, enter its answers with doxa active label, or move it away, "
        "so that it is written again"
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
                        f"{pool.places[row]} was answered {book.answers[row]!r}, but the sheet has "
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
    given: Sequence[tuple[str, str]], pool: Pool, book: LabelState, correct: bool = False
) -> dict[int, Any]:
    """{row: label} of open rows, and of corrected answers with `correct`. An unknown name or class,
    a repeated row or a row that was not chosen is an error that names it."""
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


def refuse_missing(answers: Mapping[int, Any], pool: Pool, book: LabelState) -> None:
    missing = [row for row in book.asked if row not in answers]
    if missing:
        raise DataError(
            f"{len(answers)} answers for {len(book.asked)} rows: {pool.places[missing[0]]} has "
            "none; --partial enters the others"
        )


def pair_of(text: str, pool: Pool) -> tuple[str, str]:
    """Parse ROW=LABEL; the row name may contain =, and an apostrophe as in a sheet."""
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


def _row(name: str, number: Mapping[str, int], pool: Pool, book: LabelState) -> int:
    if name not in number:
        open_rows = [pool.ids[row] for row in book.asked]
        raise DataError(
            f"there is no {pool.id_name} {name!r} in the pool{did_you_mean(name, open_rows)}"
        )
    return number[name]
