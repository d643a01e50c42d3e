"""Readers of tables that stay on disk: Parquet, Arrow files, CSV, and rows that were spooled.

A reader divides its rows into *groups* in a fixed order (the row groups of Parquet, the record
batches of an Arrow file, blocks of lines of a CSV file) and reads any of them by seeking. It keeps
no position, so that what it returns depends on the number of the group alone. Each file is compared
with what it was when it was opened: its size, its time of change and its inode.

Columns are numbers and truth values. The inputs become float32 if all of them are truth values or
floats of at most 32 bits, else float64, as in `doxa.store.parquet`. A target of whole numbers stays
whole: its numbers may be classes.
"""

from __future__ import annotations

import io
import math
import os
import shutil
import tempfile
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from doxa.data.rows import as_tensors
from doxa.data.tokens import split_labels
from doxa.errors import DataError, MemoryBudgetError, MissingExtra, StoreError, did_you_mean

Array = np.ndarray[Any, np.dtype[Any]]

MOST_GROUP = 512 << 20  # bytes of a group in memory, at most
SPOOL_LIMIT = 10 << 30  # bytes that a plain iterable may take on disk, unless given
_DECODED = 1 << 16  # rows that are decoded at a time
_SCANNED = 4 << 20  # bytes of a CSV file that are scanned at a time
_CSV_BLOCK = 8 << 20  # bytes of a block of a CSV file, at least
_SPOOLED = 8 << 20  # bytes of a spooled group, at least


class Reader:
    """Groups of rows in a fixed order. `sizes` has the number of rows of each group, `row_bytes`
    the size of a row in memory, and `columns` the names of the inputs, if they have names."""

    sizes: list[int]
    row_bytes: int
    columns: tuple[str, ...] | None = None

    @abstractmethod
    def read(self, group: int) -> tuple[Any, Any]:
        """x and y of a group, as trees of tensors with rows first; y is None without targets."""

    @abstractmethod
    def place(self, group: int) -> str:
        """The file and the group, for messages."""

    @property
    @abstractmethod
    def source(self) -> str:
        """What is read, for messages."""


Encode = Callable[[Any], tuple[Array, Array]]  # inputs and targets of a data frame


def encoded(encode: Encode, frame: Any, place: str) -> tuple[Tensor, Tensor]:
    """The rows of a data frame as tensors; an error names the group."""
    try:
        x, y = encode(frame)
    except DataError as error:
        raise type(error)(f"{place}: {error}") from error
    return torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(np.ascontiguousarray(y))


@dataclass(frozen=True)
class OpenedFile:
    """A file as it was when it was opened."""

    path: Path
    size: int
    time: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> OpenedFile:
        try:
            found = os.stat(path)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        return cls(path, found.st_size, found.st_mtime_ns, found.st_ino)

    def check(self, place: str) -> None:
        """An error if the file is not the one that was opened."""
        try:
            now = OpenedFile.of(self.path)
        except StoreError as error:
            raise DataError(f"{place}: the file has been removed since it was opened") from error
        if now != self:
            raise DataError(
                f"{place}: the file has changed since it was opened (it had {self.size} bytes, and "
                f"has {now.size}): do not write to it during a fit, and open the stream again"
            )


def files_of(path: str | os.PathLike[str], endings: Sequence[str]) -> list[Path]:
    """The file, or the files of a folder with one of these endings, in the order of their names."""
    place = Path(path)
    if not place.is_dir():
        if not place.exists():
            raise DataError(f"{place} does not exist")
        return [place]
    found = [
        file for file in place.rglob("*")
        if file.suffix.lower() in endings
        and not any(part.startswith((".", "_")) for part in file.relative_to(place).parts)
        and file.is_file()
    ]  # fmt: skip
    if not found:
        raise DataError(f"the folder {place} has no file that ends with {' or '.join(endings)}")
    return sorted(found, key=lambda file: file.relative_to(place).as_posix())


def import_arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra(
            "reading Parquet and Arrow files needs the extra 'tables': pip install 'doxa[tables]'"
        ) from error
    return pyarrow


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class ArrowReader(Reader):
    """Parquet files by row groups, and Arrow (IPC) files by record batches. Files are opened for
    each read, and nothing is read ahead (`pre_buffer=False`), so that the memory is that of one
    group."""

    def __init__(
        self, path: str | os.PathLike[str], target: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None, encode: Encode | None = None, width: int = 0,
    ) -> None:  # fmt: skip
        self.arrow, self.encode = import_arrow(), encode
        self.path = Path(path)
        self.parquet = not self._holds_arrow()
        endings = (".parquet", ".pq") if self.parquet else (".arrow", ".feather", ".ipc")
        self.files = [OpenedFile.of(file) for file in files_of(path, endings)]
        self.sizes = []
        self.at: list[tuple[int, int]] = []  # the file and the number of each group in it
        self.schema = self._schema(self.files[0])
        for number, file in enumerate(self.files):
            self._add(number, file)
        if sum(self.sizes) == 0:
            raise DataError(f"{self.path} has columns but no rows")
        self.targets = [target] if isinstance(target, str) else list(target or ())
        self.single = isinstance(target, str)
        if width:
            self.names, self.row_bytes = list(self.schema.names), 8 * (width + 1)
            self._check_sizes()
            return
        self.columns = tuple(self._inputs(columns))
        names = [*self.columns, *self.targets]
        self.x_type = _common([self._type(name) for name in self.columns], whole=False)
        self.y_type = _common([self._type(name) for name in self.targets], whole=True)
        self.row_bytes = len(self.columns) * self.x_type.itemsize
        self.row_bytes += len(self.targets) * self.y_type.itemsize
        self.names = names
        self._check_sizes()

    def _check_sizes(self) -> None:
        for group, rows in enumerate(self.sizes):
            if rows * self.row_bytes > MOST_GROUP:
                raise MemoryBudgetError(
                    f"{self.place(group)} takes {rows * self.row_bytes / 2**30:.3g} GiB in memory, "
                    f"and a group may take {MOST_GROUP / 2**30:.3g}: write the file with smaller "
                    f"row groups (row_group_size={MOST_GROUP // self.row_bytes // 8})"
                )

    @property
    def source(self) -> str:
        return str(self.path)

    def _holds_arrow(self) -> bool:
        """Whether these are Arrow files, and not Parquet."""
        if self.path.is_dir():
            kinds = {file.suffix.lower() for file in self.path.rglob("*")}
            return not kinds & {".parquet", ".pq"} and bool(kinds & {".arrow", ".feather", ".ipc"})
        if not self.path.exists():
            raise DataError(f"{self.path} does not exist")
        with self.path.open("rb") as file:
            return file.read(6) == b"ARROW1"

    def _open(self, file: OpenedFile, place: str) -> Any:
        """The file, opened by pyarrow."""
        arrow = self.arrow
        try:
            if self.parquet:
                return arrow.parquet.ParquetFile(file.path, pre_buffer=False, memory_map=False)
            return arrow.ipc.open_file(arrow.OSFile(str(file.path)))
        except (arrow.ArrowException, OSError, ValueError) as error:
            kind = "Parquet" if self.parquet else "Arrow"
            raise DataError(
                f"{place} cannot be read as {kind}, it may be cut off: {first_line(error)}"
            ) from error

    def _schema(self, file: OpenedFile) -> Any:
        opened = self._open(file, str(file.path))
        return opened.schema_arrow if self.parquet else opened.schema

    def _add(self, number: int, file: OpenedFile) -> None:
        """Add the groups of a file, and compare its columns with those of the first file."""
        opened = self._open(file, str(file.path))
        schema = opened.schema_arrow if self.parquet else opened.schema
        if names_and_types(schema) != names_and_types(self.schema):
            first, own = names_and_types(self.schema), names_and_types(schema)
            wrong = sorted({*first.items()} ^ {*own.items()})[0][0]
            raise DataError(
                f"{file.path}: column {wrong!r} is {own.get(wrong, 'missing')}, and in "
                f"{self.files[0].path.name} it is {first.get(wrong, 'missing')}: all files must "
                "have the same columns"
            )
        if self.parquet:
            meta = opened.metadata
            rows = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
            opened.close()
        else:
            rows = [opened.get_batch(i).num_rows for i in range(opened.num_record_batches)]
        for i, count in enumerate(rows):
            self.sizes.append(int(count))
            self.at.append((number, i))

    def _type(self, name: str) -> np.dtype[Any] | None:
        kind = self.schema.field(name).type
        if self.arrow.types.is_boolean(kind):
            return np.dtype(bool)
        try:
            dtype = np.dtype(kind.to_pandas_dtype())
        except (NotImplementedError, TypeError):
            return None
        return dtype if dtype.kind in "iuf" else None

    def _inputs(self, columns: Sequence[str] | None) -> list[str]:
        names = list(self.schema.names)
        chosen = [n for n in names if n not in self.targets] if columns is None else list(columns)
        for name in [*self.targets, *chosen]:
            if name not in names:
                raise DataError(f"{self.path} has no column {name!r}{did_you_mean(name, names)}")
            if names.count(name) > 1:
                raise DataError(f"{self.path} has {names.count(name)} columns named {name!r}")
            if self._type(name) is None:
                raise DataError(
                    f"{self.path}: column {name!r} holds {self.schema.field(name).type}, not "
                    "numbers; leave it out with columns=[...], or encode it first"
                )
        both = sorted(set(self.targets) & set(chosen))
        if both:
            raise DataError(f"{both[0]!r} is the target and cannot be an input too")
        if not chosen:
            raise DataError(f"{self.path} has no input column")
        return chosen

    def place(self, group: int) -> str:
        number, inside = self.at[group]
        return f"{self.files[number].path}, row group {inside}"

    def read(self, group: int) -> tuple[Any, Any]:
        place, (number, inside) = self.place(group), self.at[group]
        if self.encode is not None:
            return encoded(self.encode, self.frame(group), place)
        file = self.files[number]
        file.check(place)
        rows = self.sizes[group]
        x = np.empty((rows, len(self.columns or ())), self.x_type)
        y = np.empty((rows, len(self.targets)), self.y_type)
        opened, start = self._open(file, place), 0
        try:
            for batch in self._batches(opened, inside):
                for j, name in enumerate(self.columns or ()):
                    x[start : start + batch.num_rows, j] = _values(batch, name, start, place)
                for j, name in enumerate(self.targets):
                    y[start : start + batch.num_rows, j] = _values(batch, name, start, place)
                start += batch.num_rows
        except (self.arrow.ArrowException, OSError, KeyError) as error:
            raise DataError(
                f"{place} cannot be read, it may be cut off or damaged: {first_line(error)}"
            ) from error
        finally:
            if self.parquet:
                opened.close()
        if start != rows:
            raise DataError(f"{place} has {start} rows, and had {rows} when it was opened")
        self.arrow.default_memory_pool().release_unused()
        if not self.targets:
            return torch.from_numpy(x), None
        return torch.from_numpy(x), torch.from_numpy(y[:, 0].copy() if self.single else y)

    def frame(self, group: int) -> Any:
        """A group as a data frame, with all columns."""
        place, (number, inside) = self.place(group), self.at[group]
        self.files[number].check(place)
        opened = self._open(self.files[number], place)
        try:
            parts = list(self._batches(opened, inside))
            frame = self.arrow.Table.from_batches(parts, self.schema).to_pandas()
        except (self.arrow.ArrowException, OSError, KeyError) as error:
            raise DataError(
                f"{place} cannot be read, it may be cut off or damaged: {first_line(error)}"
            ) from error
        finally:
            if self.parquet:
                opened.close()
        self.arrow.default_memory_pool().release_unused()
        return frame

    def _batches(self, opened: Any, inside: int) -> Iterable[Any]:
        if not self.parquet:
            yield opened.get_batch(inside)
            return
        yield from opened.iter_batches(
            _DECODED, row_groups=[inside], columns=list(dict.fromkeys(self.names)),
            use_threads=False,
        )  # fmt: skip


def names_and_types(schema: Any) -> dict[str, str]:
    return {name: str(schema.field(i).type) for i, name in enumerate(schema.names)}


def _common(kinds: Sequence[np.dtype[Any] | None], whole: bool) -> np.dtype[Any]:
    """One type for several columns: int64 if whole numbers stay whole, else a float."""
    if whole and kinds and all(kind is not None and kind.kind in "biu" for kind in kinds):
        return np.dtype(np.int64)
    narrow = all(
        kind is not None and (kind.kind == "b" or (kind.itemsize <= 4 and kind.kind == "f"))
        for kind in kinds
    )
    return np.dtype(np.float32 if narrow else np.float64)


def _values(batch: Any, name: str, start: int, place: str) -> Array:
    column = batch.column(name)
    if column.null_count:
        row = start + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(
            f"{place}: column {name!r} is missing at row {row} of the group; fill or remove it"
        )
    values: Array = column.to_numpy(zero_copy_only=False)
    return values


class CsvReader(Reader):
    """A CSV file by blocks of lines. The first pass over the file finds where they begin: a line
    ends at a line break outside quotation marks. `pandas` converts a block to numbers."""

    def __init__(
        self, path: str | os.PathLike[str], target: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None, separator: str = ",", block: int | None = None,
        decimal: str = ".", encode: Encode | None = None, width: int = 0,
    ) -> None:  # fmt: skip
        self.pandas, self.decimal, self.encode = import_pandas(), decimal, encode
        self.path = Path(path)
        if self.path.is_dir():
            raise DataError(f"{self.path} is a folder: pass one CSV file")
        self.file, self.separator = OpenedFile.of(self.path), separator
        self.offsets, self.sizes, self.lines = self._index(block or _CSV_BLOCK)
        if not self.sizes:
            raise DataError(f"{self.path} has a header but no rows")
        self.targets = [target] if isinstance(target, str) else list(target or ())
        self.single = isinstance(target, str)
        if width:
            self.row_bytes = 8 * (width + 1)
            return
        header = [str(name) for name in self.frame(0).columns]
        chosen = [n for n in header if n not in self.targets] if columns is None else list(columns)
        for name in [*self.targets, *chosen]:
            if name not in header:
                raise DataError(f"{self.path} has no column {name!r}{did_you_mean(name, header)}")
        both = sorted(set(self.targets) & set(chosen))
        if both:
            raise DataError(f"{both[0]!r} is the target and cannot be an input too")
        if not chosen:
            raise DataError(f"{self.path} has no input column")
        self.columns = tuple(chosen)
        first = self.frame(0)
        self.whole = bool(self.targets) and all(
            self.pandas.api.types.is_integer_dtype(first[name])
            or self.pandas.api.types.is_bool_dtype(first[name])
            for name in self.targets
        )
        self.row_bytes = 8 * (len(chosen) + len(self.targets))

    @property
    def source(self) -> str:
        return str(self.path)

    def _index(self, block: int) -> tuple[list[int], list[int], list[int]]:
        """Where each block begins (and the last one ends), its number of rows, and the number of
        its first line in the file."""
        offsets: list[int] = []
        sizes: list[int] = []
        lines: list[int] = []
        quoted, at, line, rows, last = False, 0, 1, 0, 0
        begun: int | None = None  # the first byte after the header
        try:
            with self.path.open("rb", buffering=0) as file:
                skip = 3 if file.read(3) == b"\xef\xbb\xbf" else 0
                file.seek(skip)
                at = last = self.start = skip
                while data := file.read(_SCANNED):
                    code = np.frombuffer(data, np.uint8)
                    inside = (np.cumsum(code == 34) + quoted) & 1
                    quoted = bool(inside[-1])
                    breaks = np.flatnonzero(code == 10)
                    for k, open_quote in zip(breaks.tolist(), inside[breaks].tolist(), strict=True):
                        line += 1
                        if open_quote:
                            continue
                        end = at + k + 1
                        blank = end - last <= 1 or (end - last == 2 and data[k - 1 : k] == b"\r")
                        last = end
                        if begun is None:
                            if not blank:
                                begun = end
                                offsets, lines = [end], [line]
                            continue
                        rows += not blank
                        if end - offsets[-1] >= block:
                            offsets.append(end)
                            lines.append(line)
                            sizes.append(rows)
                            rows = 0
                    at += len(data)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read: {error.strerror}") from error
        if quoted:
            raise DataError(f"{self.path} ends inside quotation marks: it may be cut off")
        if begun is None:
            raise DataError(f"{self.path} is empty, or has a header only")
        if last < at:  # the last line has no line break
            rows += 1
        if rows:
            offsets.append(at)
            sizes.append(rows)
        return offsets, sizes, lines

    def frame(self, group: int) -> Any:
        """A block as a data frame."""
        place = self.place(group)
        self.file.check(place)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            header = file.read(self.offsets[0] - self.start)
            file.seek(self.offsets[group])
            data = file.read(self.offsets[group + 1] - self.offsets[group])
        try:
            frame = self.pandas.read_csv(
                io.BytesIO(header + data), sep=self.separator, index_col=False, low_memory=False,
                decimal=self.decimal,
            )  # fmt: skip
        except ValueError as error:  # ParserError and UnicodeDecodeError are among them
            raise DataError(f"{place} cannot be read as CSV: {first_line(error)}") from error
        if len(frame) != self.sizes[group]:
            raise DataError(
                f"{place}: {len(frame)} rows were read, and {self.sizes[group]} lines were counted;"
                " a quotation mark inside a cell must be doubled"
            )
        return frame

    def place(self, group: int) -> str:
        return f"{self.path}, block {group} (from line {self.lines[group]})"

    def read(self, group: int) -> tuple[Any, Any]:
        frame, place = self.frame(group), self.place(group)
        if self.encode is not None:
            return encoded(self.encode, frame, place)
        x = self._numbers(frame, self.columns or (), place)
        if not self.targets:
            return torch.from_numpy(x), None
        y = self._numbers(frame, self.targets, place)
        if self.whole:
            if not bool((y == np.floor(y)).all()):
                row, j = (int(i) for i in np.argwhere(y != np.floor(y))[0])
                raise DataError(
                    f"{place}: target {self.targets[j]!r} is {y[row, j]} at row {row} of the "
                    "block, but the first block holds whole numbers: give all as classes or numbers"
                )
            y = y.astype(np.int64)
        return torch.from_numpy(x), torch.from_numpy(y[:, 0].copy() if self.single else y)

    def _numbers(self, frame: Any, names: Sequence[str], place: str) -> Array:
        found = np.empty((len(frame), len(names)))
        for j, name in enumerate(names):
            column = frame[name]
            try:
                found[:, j] = column.to_numpy(dtype=np.float64)
            except (TypeError, ValueError) as error:
                numbers = self.pandas.to_numeric(column, errors="coerce")
                row = int(np.flatnonzero(numbers.isna() & column.notna())[0])
                raise DataError(
                    f"{place}: column {name!r} holds {column.iloc[row]!r} at row {row} of the "
                    "block, not a number; leave it out with columns=[...], or encode it first"
                ) from error
            missing = np.flatnonzero(np.isnan(found[:, j]))
            if missing.size:
                raise DataError(
                    f"{place}: column {name!r} is missing at row {int(missing[0])} of the block; "
                    "fill or remove it"
                )
        return found


def import_pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra(
            "reading CSV needs the extra 'tables': pip install 'doxa[tables]'"
        ) from error
    return pandas


class SpooledReader(Reader):
    """The rows of an iterable, which are written to a temporary folder once and read from there.
    The folder is removed with the reader, and if writing fails."""

    def __init__(
        self, rows: Iterable[Any], target: str | None = None, columns: Sequence[str] | None = None,
        limit: int = SPOOL_LIMIT, folder: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        self.kind = type(rows).__name__
        self.sizes = []
        self.files: list[OpenedFile] = []
        self.folder = Path(tempfile.mkdtemp(prefix="doxa-stream-", dir=folder))
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.columns = None if columns is None else tuple(columns)
        self.spec: Any = None
        self.shapes: Any = None
        self.written, self.limit = 0, limit
        try:
            self._spool(rows, target)
        except BaseException:
            self._remove()
            raise

    @property
    def source(self) -> str:
        return f"the spooled rows of {self.kind}"

    def _spool(self, rows: Iterable[Any], target: str | None) -> None:
        held: list[Any] = []
        size = number = 0
        length = len(rows) if isinstance(rows, Sized) else None
        iterator = iter(rows)
        while True:
            try:
                item = next(iterator)
            except StopIteration:
                break
            except DataError:
                raise
            except Exception as error:  # whatever the user's iterable raises
                raise DataError(f"{self.kind} failed to return row {number}: {error}") from error
            if number == length:
                raise DataError(
                    f"{self.kind} returns more rows than its length, {length}: correct its __len__"
                )
            pair = self._pair(item, target, number)
            self._check(pair, number)
            held.append(pair)
            number += 1
            size += sum(t.nbytes for t in tree_flatten(pair)[0])
            if self.written + size > self.limit:
                raise MemoryBudgetError(
                    f"{self.kind} has more than {number} rows, which take more than "
                    f"{self.limit / 2**30:.3g} GiB on disk: limit=bytes allows more; or "
                    "write the rows to Parquet and use doxa.data.read_parquet"
                )
            if size >= _SPOOLED:
                self._write(held, size)
                held, size = [], 0
        if held:
            self._write(held, size)
        if not self.sizes:
            raise DataError(f"{self.kind} has no rows")
        self.row_bytes = max(1, self.written // sum(self.sizes))

    def _pair(self, item: Any, target: str | None, number: int) -> tuple[Any, Any]:
        """(x, y) of one row of the iterable, each with an axis of rows in front."""
        if isinstance(item, Mapping) and target is not None:
            missing = [n for n in (target, *(self.columns or ())) if n not in item]
            if missing:
                raise DataError(
                    f"{self.kind}: row {number} has no column {missing[0]!r}"
                    f"{did_you_mean(missing[0], [str(key) for key in item])}"
                )
            if self.columns is None:
                self.columns = tuple(name for name in item if name != target)
            x = np.array([_number(item[name], name, number, self.kind) for name in self.columns])
            return torch.from_numpy(x)[None], _row(item[target], "y", number, self.kind)
        if isinstance(item, Mapping):
            item = split_labels(as_tensors(dict(item), "the row"))
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"{self.kind} must return pairs (x, y), one per row, or dicts with target=NAME; "
                f"row {number} is {type(item).__name__}"
            )
        x, y = (_row(part, name, number, self.kind) for part, name in zip(item, "xy", strict=True))
        return x, y

    def _check(self, pair: tuple[Any, Any], number: int) -> None:
        leaves, spec = tree_flatten(pair)
        shapes = [(tuple(t.shape[1:]), t.dtype) for t in leaves]
        if self.spec is None:
            self.spec, self.shapes = spec, shapes
        elif spec != self.spec or shapes != self.shapes:
            raise DataError(
                f"{self.kind}: row {number} has tensors {shapes}, and row 0 has {self.shapes}: all "
                "rows must have the same shapes and types"
            )

    def _write(self, held: list[Any], size: int) -> None:
        leaves = [
            torch.cat(parts) for parts in zip(*(tree_flatten(p)[0] for p in held), strict=True)
        ]
        place = self.folder / f"{len(self.sizes):06d}.npz"
        try:
            np.savez(place, *(leaf.numpy() for leaf in leaves))
        except OSError as error:
            raise StoreError(
                f"the rows of {self.kind} cannot be written to {self.folder}: {error.strerror}"
            ) from error
        self.sizes.append(len(held))
        self.files.append(OpenedFile.of(place))
        self.written += size

    def place(self, group: int) -> str:
        return f"{self.source}, block {group}"

    def read(self, group: int) -> tuple[Any, Any]:
        place = self.place(group)
        self.files[group].check(place)
        with np.load(self.files[group].path, allow_pickle=False) as saved:
            leaves = [torch.from_numpy(saved[f"arr_{i}"]) for i in range(len(self.shapes))]
        x, y = tree_unflatten(leaves, self.spec)
        return x, y


def _row(value: Any, name: str, number: int, kind: str) -> Any:
    """One row as tensors with an axis of rows."""

    def one(part: Any) -> Tensor:
        if isinstance(part, bool | np.bool_ | int | float | np.generic):
            part = np.asarray(part)
            if part.dtype == np.float64 and not isinstance(value, np.generic):
                part = part.astype(np.float32)
        try:
            tensor = (
                part.detach().cpu()
                if isinstance(part, Tensor)
                else torch.as_tensor(np.asarray(part))
            )
        except (TypeError, ValueError) as error:
            raise DataError(f"{kind}: {name} of row {number} is no number: {error}") from error
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise DataError(f"{kind}: {name} is not finite at row {number}; remove the row")
        return tensor.unsqueeze(0).contiguous()

    if isinstance(value, Mapping):
        return {key: _row(part, name, number, kind) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_row(part, name, number, kind) for part in value)
    return one(value)


def _number(value: Any, name: str, number: int, kind: str) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{kind}: column {name!r} holds {value!r} at row {number}, not a number; choose the "
            "columns with columns=[...]"
        ) from error
    if not math.isfinite(found):
        raise DataError(f"{kind}: column {name!r} is {found} at row {number}; remove the row")
    return found
