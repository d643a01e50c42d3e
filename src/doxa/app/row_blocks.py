"""The rows of a table that does not fit into memory, part by part.

A part is a row group of a Parquet file, or a block of rows of a CSV file. A row group that has more
rows than a part may have is cut. Both inputs have the same methods: `names` are the columns, `plan`
finds the parts, and `frames` reads them.

A CSV file is read once to find where the blocks begin, and which columns hold text. Each block is
then read as if it were a whole table whose columns have these types: a column with `07` in one
block and `a` in another is text in both. The separator and the encoding are detected in the first
64 KiB, and in the first block whether numbers have decimal commas.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from doxa.data.text_files import check_regular
from doxa.errors import DataError, MissingExtra
from doxa.store.artefact import readable_errors
from doxa.tables import reading
from doxa.tables.files import PARQUET
from doxa.tables.reading import LINE, Dialect, import_pandas

if TYPE_CHECKING:
    import pandas as pd

ROW = "row"  # the column with the number of a row in a Parquet file, from 0
_LONGEST_LINE = 1 << 26  # bytes


@dataclass(frozen=True)
class Part:
    """A run of rows of the input."""

    group: int  # the row group of a Parquet file, the block of a CSV file
    start: int  # the number of its first row in the file
    rows: int
    offset: int = 0  # of a CSV file: its first byte, the number of its bytes, and its first line
    size: int = 0
    line: int = 0


def stamp_of(path: Path) -> dict[str, Any]:
    with readable_errors("read", path):
        found = os.stat(path)
    return {"size": found.st_size, "changed": found.st_mtime_ns}


def changed(path: Path) -> DataError:
    return DataError(
        f"{path} was changed while it was predicted: the parts that are written are of the earlier "
        "file; --overwrite starts anew"
    )


class ParquetInput:
    """The row groups of a Parquet file."""

    dialect = Dialect()

    def __init__(self, path: Path) -> None:
        self.path = path
        self._arrow, self._parquet = import_pyarrow()
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
                self._parquet.ParquetFile(self.path, pre_buffer=False, buffer_size=1 << 20) as file,
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
            # Pre-buffering, and reading without a buffer, would hold the bytes of a whole group.
            batches = file.iter_batches(
                max(p.rows for p in parts), row_groups=[parts[0].group], columns=sorted(names)
            )
            waiting: list[Any] = []

            def rows_of(count: int) -> Any:
                nonlocal waiting
                while sum(batch.num_rows for batch in waiting) < count:
                    batch = next(batches, None)
                    if batch is None:
                        raise changed(self.path)
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
        self.dialect, self._skip = asked, 3 * first.startswith(b"\xef\xbb\xbf")
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
        decimal = self.dialect.decimal
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
            yield partial(self._frame, part, wanted, label, text)

    def _frame(
        self, part: Part, wanted: Sequence[str], label: str | None, text: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        pandas = import_pandas()
        with readable_errors("read", self.path), self.path.open("rb") as file:
            file.seek(part.offset)
            count = part.rows + 1  # one block takes all
            found = list(self._records(file, part.offset, part.line, count, count, part.size))
        if len(found) != 1 or len(found[0].records) != part.rows:
            raise changed(self.path)
        block = found[0]
        frame = self._parse(block.text, text["decimal"], dict.fromkeys(text["text"], str))
        if len(frame) != part.rows:
            raise DataError(
                f"{self.path}, from line {part.line}: {len(frame)} rows were read and {part.rows} "
                "are there; write the file again, without blank lines"
            )
        lines = pandas.Index(block.lines, name=LINE)
        names: dict[str, Any] = {LINE: lines.to_numpy()}
        frame.index = lines
        if text["decimal"] == ",":
            reading.refuse_points(frame)
        if label is not None:
            names[label] = frame[label].to_numpy()
            frame.index = pandas.Index(frame[label], name=label)
        return frame[list(wanted)], names


def _kind(values: pd.Series) -> str:
    """The kind that pandas found in a column of a block."""
    if values.isna().all():
        return "none"
    if reading.is_text(values):
        return "text" if any(isinstance(cell, str) for cell in values) else "bool"
    return {"b": "bool", "i": "whole", "u": "whole"}.get(values.dtype.kind, "number")


def _as_text(kinds: set[str], label: bool) -> bool:
    """Whether a column with these kinds in its blocks is text in the whole file."""
    found = kinds - {"none"}
    return "text" in found or ("bool" in found and len(found) > 1) or (label and len(kinds) > 1)


def import_pyarrow() -> tuple[Any, Any]:
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
