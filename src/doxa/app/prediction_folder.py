"""Predictions of a large file in a folder, part by part: `doxa predict RUN BIG --out FOLDER`.

    folder/_predictions.json            the plan: the file, the run, the parts
    folder/part-00000012.parquet        the predictions of one part; complete or absent

A part is a row group of a Parquet file, or a block of rows of a CSV file; a row group of more than
`rows` rows is cut. So memory is bounded by a part, whatever the size of the file. The order of the
parts is that of their names. `pandas.read_parquet(folder)` reads all of them, as files that begin
with `_` or `.` are no part of a data set.

Any number of processes, of one call or of several, work on one folder. A process takes a part by a
lock that the operating system releases if the process ends in any way, predicts it, writes it under
a temporary name and renames it. Each part has the id of the plan, and its number of rows is checked
at the end. The next call continues where the last one ended.

The plan has the size, the time of the last change and a digest of the input, and the checksum of
the run. If one of them is another, a later call is refused. The size and the time are compared
again before each part is renamed.

A CSV file is read once for the plan: where the blocks begin, and which columns hold text. Each
block is then read as if it were a whole table whose columns have these types. The separator, and
whether numbers have decimal commas, are detected in the first block.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from doxa.app import reading
from doxa.app.predictions import predict_table
from doxa.app.processes import side_by_side
from doxa.app.reading import LINE, Dialect, import_pandas
from doxa.app.schema import Schema
from doxa.app.tables import PARQUET
from doxa.data.text_files import check_regular
from doxa.driver.bar import shown
from doxa.errors import (
    CorruptedArtefact,
    DataError,
    DoxaError,
    FolderInUse,
    MissingExtra,
    StoreError,
    did_you_mean,
)
from doxa.store.artefact import CHECKSUMS, make_directory, readable_errors, sync, write_text
from doxa.store.lock import exclusive

if TYPE_CHECKING:
    import pandas as pd

PLAN = "_predictions.json"
FORMAT = 1
ROW = "row"  # the column with the number of a row in a Parquet file, from 0
MOST_ROWS = 1 << 16  # rows of a part, by default
MOST_CELLS = 1 << 23  # columns times rows of a part, by default
_PAUSE = 0.5  # seconds between two looks at parts of other processes
_KEY = b"doxa.plan"  # in the metadata of a part
_LONGEST_LINE = 1 << 26  # bytes
_NOTES = 20  # notes that are kept of one call


@dataclass(frozen=True)
class Part:
    """A run of rows of the input."""

    group: int  # the row group of a Parquet file, the block of a CSV file
    start: int  # the number of its first row in the file
    rows: int
    offset: int = 0  # of a CSV file: its first byte, the number of its bytes, and its first line
    size: int = 0
    line: int = 0


@dataclass(frozen=True)
class Plan:
    """What a folder holds, or will hold; saved before the first part."""

    id: str
    source: dict[str, Any]  # facts of the input, as messages name them
    run: str  # checksum of the run
    level: float | None
    label: str | None  # the column that names the rows
    rows: int  # the largest part
    parts: tuple[Part, ...]
    text: dict[str, Any] | None = None  # how a CSV file is written

    @property
    def total(self) -> int:
        return sum(part.rows for part in self.parts)

    def save(self, folder: Path) -> None:
        saved = asdict(self) | {
            "format": FORMAT,
            "parts": [[*asdict(p).values()] for p in self.parts],
        }
        write_text(folder / PLAN, json.dumps(saved))

    @classmethod
    def load(cls, folder: Path) -> Plan | None:
        """The plan of a folder; None if it has none."""
        try:
            with readable_errors("read", folder / PLAN):
                saved = json.loads((folder / PLAN).read_text(encoding="utf-8"))
            if saved.pop("format") != FORMAT:
                raise StoreError(f"{folder} was begun by another version of doxa; --overwrite")
            saved["parts"] = tuple(Part(*part) for part in saved["parts"])
            return cls(**saved)
        except StoreError as error:
            if getattr(error, "errno", None) in (2, 20):  # there is no such file or folder
                return None
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptedArtefact(
                f"{folder / PLAN} is damaged; --overwrite starts anew"
            ) from error


def name_of(number: int) -> str:
    return f"part-{number:08}.parquet"


class ParquetInput:
    """The row groups of a Parquet file."""

    number = ROW

    def __init__(self, path: Path) -> None:
        self.path = path
        self._arrow, self._parquet = _import_pyarrow()
        with self._open() as file:
            self._columns = [str(name) for name in file.schema_arrow.names]
            self._groups = [
                file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)
            ]
            described = (file.schema_arrow.pandas_metadata or {}).get("index_columns") or []
        stored = [name for name in described if isinstance(name, str) and name in self._columns]
        self.stored_label = stored[0] if len(stored) == 1 else None

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        check_regular(self.path)
        try:
            with (
                readable_errors("read", self.path),
                self._parquet.ParquetFile(self.path, pre_buffer=False) as file,
            ):
                yield file
        except self._arrow.ArrowException as error:
            first = (str(error).splitlines() or [""])[0]
            raise DataError(f"{self.path} cannot be read as Parquet: {first[:300]}") from error

    @property
    def names(self) -> list[str]:
        """The columns as messages name them, stripped of spaces."""
        return [name.strip() for name in self._columns]

    def digest(self) -> str:
        """Of the footer, which has the place and the statistics of every column of every group."""
        with readable_errors("read", self.path), self.path.open("rb") as file:
            file.seek(-8, os.SEEK_END)
            length = int.from_bytes(file.read(4), "little")
            file.seek(-8 - length, os.SEEK_END)
            return hashlib.sha256(file.read(length)).hexdigest()

    def plan(self, rows: int, label: str | None) -> tuple[list[Part], None]:
        parts, start = [], 0
        for group, count in enumerate(self._groups):
            for first in range(0, count, rows):
                parts.append(Part(group, start + first, min(rows, count - first)))
            start += count
        return parts, None

    def frames(
        self, parts: Sequence[Part], wanted: Sequence[str], label: str | None, text: Any
    ) -> Iterator[Callable[[], tuple[pd.DataFrame, dict[str, Any]]]]:
        """For each of the parts of one row group, a function that returns its rows and the columns
        that name them. The group is decoded a part at a time."""
        stripped = dict(zip(self.names, self._columns, strict=True))
        names = {stripped[name] for name in (*wanted, *([label] if label else []))}
        with self._open() as file:
            # pre-buffering would read the whole group into memory
            batches = file.iter_batches(
                max(p.rows for p in parts), row_groups=[parts[0].group], columns=sorted(names)
            )
            waiting: list[Any] = []

            def rows_of(count: int) -> Any:
                nonlocal waiting
                while sum(batch.num_rows for batch in waiting) < count:
                    batch = next(batches, None)
                    if batch is None:
                        raise _changed(self.path)
                    waiting.append(batch)
                table = self._arrow.Table.from_batches(waiting)
                waiting = table.slice(count).to_batches() if table.num_rows > count else []
                return table.slice(0, count)

            at = parts[0].start
            for part in parts:

                def read(part: Part = part) -> tuple[pd.DataFrame, dict[str, Any]]:
                    nonlocal at
                    while at < part.start:  # parts that another process has
                        count = next(p.rows for p in parts if p.start == at)
                        rows_of(count)
                        at += count
                    at += part.rows
                    return self._frame(rows_of(part.rows), part, wanted, label)

                yield read

    def _frame(
        self, table: Any, part: Part, wanted: Sequence[str], label: str | None
    ) -> tuple[Any, dict[str, Any]]:
        pandas = import_pandas()
        table = table.rename_columns([name.strip() for name in table.column_names])
        table = table.replace_schema_metadata(None)  # no index: it is a column here
        numbers = pandas.RangeIndex(part.start, part.start + part.rows)
        frame = table.select(list(wanted)).to_pandas()
        names: dict[str, Any] = {ROW: numbers.to_numpy()}
        frame.index = numbers
        if label is not None:
            names[label] = table.column(label)
            frame.index = pandas.Index(table.column(label).to_pandas(), name=label)
        return frame, names


class _Block(NamedTuple):
    """Records of a text table that follow each other."""

    offset: int  # of the first byte
    size: int  # bytes
    lines: list[int]  # at which each record begins
    records: list[list[str]]
    text: str


class TextInput:
    """Blocks of rows of a CSV file that is not compressed, in an encoding that contains ASCII."""

    number = LINE

    def __init__(self, path: Path, asked: Dialect) -> None:
        self.path = path
        if check_regular(path) == 0:
            raise DataError(f"{path} is empty")
        with readable_errors("read", path), path.open("rb") as file:
            first = file.read(1 << 16)
            whole = len(first) < 1 << 16
        if any(first.startswith(magic) for magic in (*reading.PACKED, b"PK\x03\x04")):
            raise DataError(
                f"{path} is compressed, and cannot be read a block at a time: unpack it first, or "
                "give --out a .csv or .parquet file"
            )
        found = asked.encoding or reading.encoding_of(
            first if whole else first.rpartition(b"\n")[0]
        )
        self.encoding = found or "cp1252"
        if "utf-16" in self.encoding or "utf-32" in self.encoding:
            raise DataError(
                f"{path} is encoded in {self.encoding.upper()}, which cannot be read a block at a "
                "time: save it as UTF-8 first, or give --out a .csv or .parquet file"
            )
        self._asked, self._skip = asked, 3 * first.startswith(b"\xef\xbb\xbf")
        if self._skip:
            self.encoding = "utf-8"
        self.stored_label: str | None = None
        sample = first[self._skip :].decode(self.encoding, "replace")
        self.sep = asked.sep or reading.separator_of(sample)
        header = next(self._blocks(1, 1), None)
        if header is None:
            raise DataError(f"{path} is empty")
        self._header = [reading.unescape(cell.strip()) for cell in header.records[0]]
        if len(self._header) > reading.MOST_COLUMNS:
            raise DataError(f"{path} has more than {reading.MOST_COLUMNS:,} columns")
        reading.check_header(self._header, path)
        if self._header[0] == "":
            self._header[0] = self.stored_label = "Unnamed: 0"

    @property
    def names(self) -> list[str]:
        return list(self._header)

    def digest(self) -> str:
        """Of the first and the last megabyte; size and time are compared besides."""
        found = hashlib.sha256()
        with readable_errors("read", self.path), self.path.open("rb") as file:
            found.update(file.read(1 << 20))
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 20)))
            found.update(file.read(1 << 20))
        return found.hexdigest()

    def _blocks(self, rows: int, first: int) -> Iterator[_Block]:
        """The blocks of the file: the first of `first` records, the others of `rows`."""
        with readable_errors("read", self.path), self.path.open("rb") as file:
            file.seek(self._skip)
            yield from self._records(file, self._skip, 1, rows, first)

    def _records(
        self, file: Any, offset: int, line: int, rows: int, first: int, most: int | None = None
    ) -> Iterator[_Block]:
        """Blocks of the records that begin at a byte and a line, in at most `most` bytes."""
        taken: list[str] = []
        size = 0

        def lines() -> Iterator[str]:
            nonlocal size
            while most is None or size < most:
                raw = file.readline(_LONGEST_LINE)
                size += len(raw)
                if not raw:
                    return
                at = line + reader.line_num
                if len(raw) == _LONGEST_LINE:
                    raise DataError(f"{self.path}, line {at}: it is longer than 64 MiB")
                try:
                    text = raw.decode(self.encoding)
                except UnicodeError as error:
                    raise DataError(
                        f"{self.path}, line {at}: it is not {self.encoding.upper()}; name the "
                        "encoding with --encoding"
                    ) from error
                if "\0" in text:
                    raise DataError(f"{self.path}, line {at}: a zero byte, so it is not text")
                taken.append(text)
                yield text

        reader: Any = csv.reader(lines(), delimiter=self.sep, strict=True)
        records: list[list[str]] = []
        starts: list[int] = []
        wanted, began, at = first, 0, line
        try:
            for cells in reader:
                if len(cells) > 1 or (cells and cells[0].strip()):
                    records.append(cells)
                    starts.append(at)
                at = line + reader.line_num
                if len(records) == wanted:
                    yield _Block(offset + began, size - began, starts, records, "".join(taken))
                    records, starts, wanted, began = [], [], rows, size
                    taken.clear()
        except csv.Error as error:
            what = "a quotation mark is never closed" if "unexpected end" in str(error) else error
            raise DataError(f"{self.path}, line {at}: it cannot be read: {what}") from error
        if records:
            yield _Block(offset + began, size - began, starts, records, "".join(taken))

    def plan(self, rows: int, label: str | None) -> tuple[list[Part], dict[str, Any]]:
        """The blocks, and the columns that hold text in some block: read once for all."""
        parts: list[Part] = []
        kinds: dict[str, set[str]] = {name: set() for name in self._header}
        decimal = self._asked.decimal
        blocks = self._blocks(rows, 1)
        next(blocks)
        start = 0
        for number, block in enumerate(blocks):
            for at, cells in zip(block.lines, block.records, strict=True):
                if len(cells) != len(self._header):
                    raise DataError(
                        f"{self.path}, line {at}: {len(cells)} cells, and {len(self._header)} in "
                        f"the header; they are separated by {self.sep!r} (--sep names another)"
                    )
            frame = self._parse(block.text, decimal or ".", {})
            if decimal is None:
                commas = self.sep != "," and reading.has_decimal_commas(frame)
                decimal = "," if commas else "."
                frame = self._parse(block.text, decimal, {}) if commas else frame
            for name in self._header:
                kinds[name].add(_kind(frame[name]))
            count = len(block.records)
            first = block.lines[0]
            parts.append(Part(number, start, count, block.offset, block.size, first))
            start += count
        forced = [name for name, found in kinds.items() if _as_text(found, name == label)]
        return parts, {
            "sep": self.sep, "decimal": decimal or ".", "encoding": self.encoding, "text": forced,
        }  # fmt: skip

    def _parse(self, text: str, decimal: str, dtypes: Mapping[str, Any]) -> Any:
        frame = import_pandas().read_csv(
            io.StringIO(text), sep=self.sep, decimal=decimal, index_col=False, low_memory=False,
            header=None, names=self._header, dtype=dict(dtypes),
        )  # fmt: skip
        return reading.unescaped(frame) if reading.has_escaped(text) else frame

    def frames(
        self, parts: Sequence[Part], wanted: Sequence[str], label: str | None, text: Any
    ) -> Iterator[Callable[[], tuple[pd.DataFrame, dict[str, Any]]]]:
        self.sep, self.encoding = text["sep"], text["encoding"]
        for part in parts:
            yield lambda part=part: self._frame(part, wanted, label, text)

    def _frame(
        self, part: Part, wanted: Sequence[str], label: str | None, text: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        pandas = import_pandas()
        with readable_errors("read", self.path), self.path.open("rb") as file:
            file.seek(part.offset)
            count = part.rows + 1  # one block takes all
            found = list(self._records(file, part.offset, part.line, count, count, part.size))
        if len(found) != 1 or len(found[0].records) != part.rows:
            raise _changed(self.path)
        block = found[0]
        frame = self._parse(block.text, text["decimal"], dict.fromkeys(text["text"], str))
        if len(frame) != part.rows:
            raise DataError(
                f"{self.path}, from line {part.line}: {len(frame)} rows were read and {part.rows} "
                "are there; write the file again, without blank lines"
            )
        if text["decimal"] == ",":
            reading.refuse_points(frame)
        lines = pandas.Index(block.lines, name=LINE)
        names: dict[str, Any] = {LINE: lines.to_numpy()}
        frame.index = lines
        if label is not None:
            names[label] = frame[label].to_numpy()
            frame.index = pandas.Index(frame[label], name=label)
        return frame[list(wanted)], names


def _kind(values: pd.Series) -> str:
    """What pandas made of a column of a block: text, true/false, whole numbers, numbers, nothing."""
    if values.isna().all():
        return "none"
    if reading.is_text(values):
        return "text" if any(isinstance(cell, str) for cell in values) else "bool"
    return {"b": "bool", "i": "whole", "u": "whole"}.get(values.dtype.kind, "number")


def _as_text(kinds: set[str], label: bool) -> bool:
    """Whether a column with these kinds in its blocks is text in the whole file."""
    found = kinds - {"none"}
    return "text" in found or ("bool" in found and len(found) > 1) or (label and len(kinds) > 1)


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra(
            "predictions in a folder need pyarrow: pip install 'doxa[tables]'"
        ) from error
    return pyarrow, pyarrow.parquet


Input = ParquetInput | TextInput


def opened(path: Path, dialect: Dialect) -> Input:
    check_regular(path)
    with readable_errors("read", path), path.open("rb") as file:
        packed = file.read(4) == b"PAR1"
    return (
        ParquetInput(path) if packed or path.suffix.lower() in PARQUET else TextInput(path, dialect)
    )


def _stamp(path: Path) -> dict[str, Any]:
    with readable_errors("read", path):
        found = os.stat(path)
    return {"size": found.st_size, "changed": found.st_mtime_ns}


def _changed(path: Path) -> DataError:
    return DataError(
        f"{path} was changed while it was predicted: the parts that are written are of the earlier "
        "file; --overwrite starts anew"
    )


def prepare(
    folder: Path,
    source: Input,
    run: Path,
    schema: Schema,
    outputs: Sequence[str],
    level: float | None = None,
    label: str | None = None,
    rows: int | None = None,
    overwrite: bool = False,
) -> tuple[Plan, list[str]]:
    """The plan of a folder, made or continued, and notes for the user.

    Parameters
    ----------
    folder : Path
        Created if necessary. It may hold the parts of an earlier call, and nothing else.
    source : ParquetInput or TextInput
        The rows to predict.
    run : Path
        The saved posterior.
    schema : Schema
        The columns that the posterior takes.
    outputs : sequence of str
        The columns of a prediction, of which none may be named like the column of labels.
    level : float, optional
        The level of intervals and sets.
    label : str, optional
        The column that names the rows. Default: that of the fit, or the index that pandas has
        stored in a Parquet file, if there is one.
    rows : int, optional
        The largest number of rows of a part. Default: 65,536, fewer with more than 128 columns.
    overwrite : bool
        Remove the predictions of another file, run or level, or finished ones.
    """
    make_directory_checked(folder)
    notes = schema.check_columns([n for n in source.names if n not in (label, source.stored_label)])
    if label is None:
        label = schema.index if schema.index in source.names else source.stored_label
    elif label not in source.names:
        raise DataError(f"no column {label!r}{did_you_mean(label, source.names)}")
    if source.names.count(str(label)) > 1 or len(set(source.names)) < len(source.names):
        twice = next(n for n in source.names if source.names.count(n) > 1)
        raise DataError(f"{source.path}: {twice!r} stands more than once in the header")
    if label in outputs:
        raise DataError(f"the column {label!r} names the rows, and a prediction has it too: --id")
    wide = len(schema.columns)
    most = rows or max(256, min(MOST_ROWS, MOST_CELLS // max(1, wide)))
    stamp = _stamp(source.path)
    facts = {"name": source.path.name, **stamp, "digest": source.digest()}
    with readable_errors("read", run):
        summed = hashlib.sha256((run / CHECKSUMS).read_bytes()).hexdigest()
    with _alone(folder):
        old = None if overwrite else Plan.load(folder)
        if old is None:
            others = [p.name for p in folder.iterdir() if not _own(p.name)]
            if others:
                raise StoreError(
                    f"{folder} holds other files ({others[0]!r}): give a folder that is empty or new"
                )
            parts, text = source.plan(most, label)
            if not parts:
                raise DataError(f"{source.path} has a header but no rows")
            if stamp != _stamp(source.path):
                raise _changed(source.path)
            plan = Plan(
                secrets.token_hex(16), facts, summed, level, label, most, tuple(parts), text
            )
            for path in folder.glob("part-*.parquet"):
                path.unlink(missing_ok=True)
            plan.save(folder)
            return plan, notes
    _check_same(folder, old, facts, summed, level, label, rows)
    return old, notes


def make_directory_checked(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file; --out takes a .csv or .parquet file, or a folder")
    with readable_errors("written", folder):
        make_directory(folder)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """The lock on the plan; another call holds it while it makes the plan."""
    while True:
        try:
            with exclusive(folder / PLAN):
                yield
            return
        except FolderInUse:
            time.sleep(_PAUSE)


def _own(name: str) -> bool:
    return name == PLAN or (name.startswith("part-") and name.endswith(".parquet")) or (
        name.startswith(".") and ("part-" in name or PLAN in name or name.startswith(".stop-"))
    )  # fmt: skip


def _check_same(
    folder: Path, plan: Plan, facts: Mapping[str, Any], run: str, level: float | None,
    label: str | None, rows: int | None,
) -> None:  # fmt: skip
    """An error that names what differs between the plan of a folder and this call."""
    anew = "--overwrite starts anew, or give another --out"
    if {**plan.source, "name": ""} != {**facts, "name": ""}:
        what = "has changed since" if plan.source["name"] == facts["name"] else "is another file"
        raise DataError(
            f"{folder} holds predictions of {plan.source['name']!r}, and {facts['name']!r} {what} "
            f"({plan.source['size']:,} bytes then, {facts['size']:,} now); {anew}"
        )
    pairs = (
        ("run", plan.run[:12], run[:12]), ("--level", plan.level, level),
        ("--id", plan.label, label), ("--rows", plan.rows, rows or plan.rows),
    )  # fmt: skip
    for name, then, now in pairs:
        if then != now:
            raise StoreError(f"{folder} was begun with another {name} ({then}, now {now}); {anew}")


def parts_left(folder: Path, plan: Plan) -> list[int]:
    """The numbers of the parts that are not yet written."""
    with readable_errors("read", folder):
        there = set(os.listdir(folder))
    return [k for k in range(len(plan.parts)) if name_of(k) not in there]


def work(
    folder: Path,
    source: Input,
    plan: Plan,
    posterior: Any,
    schema: Schema,
    stop: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Predict parts until none is left, also those that another process has given up. Returns
    notes for the user."""
    notes: dict[str, None] = {}
    wanted = [column.name for column in schema.columns]
    groups: dict[int, list[int]] = {}
    for number, part in enumerate(plan.parts):
        groups.setdefault(part.group, []).append(number)
    while (left := parts_left(folder, plan)) and not stop():
        before = len(left)
        missing = {plan.parts[number].group for number in left}
        for group in sorted(missing):
            numbers = groups[group]
            if stop() or all((folder / name_of(k)).exists() for k in numbers):
                continue
            rows = source.frames([plan.parts[k] for k in numbers], wanted, plan.label, plan.text)
            with contextlib.closing(rows):  # type: ignore[type-var]
                for number, read in zip(numbers, rows, strict=True):
                    if stop() or (folder / name_of(number)).exists():
                        continue
                    for note in _take(folder, source, plan, number, read, posterior, schema):
                        if len(notes) < _NOTES:
                            notes[note] = None
        if len(parts_left(folder, plan)) == before:  # all are being predicted by others
            time.sleep(_PAUSE)
    return list(notes)


def _take(
    folder: Path, source: Input, plan: Plan, number: int,
    read: Callable[[], tuple[pd.DataFrame, dict[str, Any]]], posterior: Any, schema: Schema,
) -> list[str]:  # fmt: skip
    """Predict a part and write it, unless another process is doing so."""
    target = folder / name_of(number)
    try:
        with exclusive(target):
            if target.exists():
                return []
            for old in folder.glob(f".{name_of(number)}.tmp-*"):  # of a process that was killed
                old.unlink(missing_ok=True)
            try:
                frame, names = read()
                table, notes = predict_table(posterior, schema, frame, plan.level)
            except DataError as error:
                part = plan.parts[number]
                kind = "row group" if isinstance(source, ParquetInput) else "block"
                raise DataError(f"{source.path}, {kind} {part.group}: {error}") from error
            _write(target, plan, source.path, names, table)
            return notes
    except FolderInUse:
        return []


def _write(
    target: Path, plan: Plan, path: Path, names: Mapping[str, Any], table: pd.DataFrame
) -> None:
    arrow, parquet = _import_pyarrow()
    found = arrow.Table.from_pandas(table, preserve_index=False)
    for at, (name, values) in enumerate(names.items()):
        named = "index" if name in ("Unnamed: 0", "__index_level_0__") else name
        held = isinstance(values, arrow.ChunkedArray)
        found = found.add_column(
            at, named, values if held else arrow.array(values, from_pandas=True)
        )
    found = found.replace_schema_metadata({_KEY: plan.id.encode()})
    temporary = target.with_name(f".{target.name}.tmp-{secrets.token_hex(8)}")
    try:
        with readable_errors("written", target):
            parquet.write_table(found, temporary)
            sync(temporary)
            if {k: plan.source[k] for k in ("size", "changed")} != _stamp(path):
                raise _changed(path)
            now = Plan.load(target.parent)
            if now is None or now.id != plan.id:
                raise StoreError(f"{target.parent} was started anew by another call")
            os.replace(temporary, target)
            sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def finish(folder: Path, plan: Plan) -> int:
    """Check that every part is there, complete and of this plan; returns the number of rows.

    A part that is damaged, or of another plan, is removed, so that the next call writes it again.
    """
    arrow, parquet = _import_pyarrow()
    bad: list[str] = []
    for number, part in enumerate(plan.parts):
        path = folder / name_of(number)
        try:
            with parquet.ParquetFile(path) as file:
                own = (file.schema_arrow.metadata or {}).get(_KEY) == plan.id.encode()
                sound = own and file.metadata.num_rows == part.rows
        except (OSError, arrow.ArrowException):
            sound = False
        if not sound:
            bad.append(path.name)
            path.unlink(missing_ok=True)
    if bad:
        raise CorruptedArtefact(
            f"{folder}: {', '.join(bad[:3])}{', ...' if len(bad) > 3 else ''} "
            f"{'was' if len(bad) == 1 else 'were'} damaged, and removed: the same command writes "
            f"{'it' if len(bad) == 1 else 'them'} again"
        )
    return plan.total


def predict_folder(
    folder: Path, source: Input, plan: Plan, run: Path, net: str | None, posterior: Any,
    schema: Schema, jobs: int = 1,
) -> list[str]:  # fmt: skip
    """Predict all parts that are left, in `jobs` processes, with a progress bar."""
    left = parts_left(folder, plan)
    stop = folder / f".stop-{secrets.token_hex(8)}"  # one process that fails ends the others
    over = threading.Event()
    notes: dict[str, None] = {}
    try:
        with shown("predict", len(plan.parts), len(plan.parts) - len(left)) as bar:

            def follow() -> None:
                while not over.wait(_PAUSE):
                    with contextlib.suppress(DoxaError):
                        bar.show(len(plan.parts) - len(parts_left(folder, plan)), "parts", {})

            watcher = threading.Thread(target=follow, daemon=True)
            watcher.start()
            try:
                jobs = min(jobs, max(1, len(left)))
                if jobs == 1:
                    found = work(folder, source, plan, posterior, schema)
                    notes |= dict.fromkeys(found)
                else:
                    dialect = getattr(source, "_asked", Dialect())
                    given = [(folder, source.path, dialect, run, net, stop)] * jobs
                    for _, outcome in side_by_side(_work_apart, given, jobs):
                        notes |= dict.fromkeys(outcome())
            finally:
                over.set()
                watcher.join()
            bar.advance_to(len(plan.parts))
    finally:
        stop.unlink(missing_ok=True)
    return list(notes)


def _work_apart(
    folder: Path, path: Path, dialect: Dialect, run: Path, net: str | None, stop: Path
) -> list[str]:
    """`work` in a process of its own."""
    from doxa.app.fitting import load_run

    try:
        posterior, schema = load_run(run, net)
        plan = Plan.load(folder)
        if plan is None:
            raise StoreError(f"{folder} has lost its plan, {PLAN}")
        return work(folder, opened(path, dialect), plan, posterior, schema, stop.exists)
    except BaseException:
        with contextlib.suppress(OSError):
            stop.touch()
        raise
