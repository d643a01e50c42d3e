"""Streams: rows that stay on disk, read by windows, as the data of a fit or the inputs of a
prediction.

    rows = doxa.data.read_parquet("rides/", target="fare")
    posterior = doxa.fit(net, rows, "deep-ensemble", epochs=1, standardize=True)
    for numbers, p in posterior.predict_blocks(doxa.data.read_parquet("new/")):
        ...

A *window* is a fixed run of groups of rows (row groups of Parquet, see `doxa.data.readers`), of
about 32 MiB. In each epoch the windows are in a random order, and so are the rows inside a window:

    position of a batch   t = epoch · ⌊N/B⌋ + step:  rows  step·B … (step + 1)·B − 1  of the epoch
    order of the windows  a permutation from (seed, stage, epoch)
    rows of a window      a permutation from (seed, stage, epoch, window)

Batch t is thus a pure function of (seed, stage, t), found by seeking: there is no state of a reader
to store, and a fit that is resumed has the same bits. All members see the same rows in the same
order. Whether a row is held out from a member, and its weight in a bootstrap, is a function of
(seed, member, number of the row), by the counter hash of `doxa.noise`; a row that is held out is in
the batch with weight 0. The shuffle is local: a file that is sorted, by class say, should be
shuffled once before (a warning says so).

One *first pass* over the rows checks them, and finds their number, means and standard deviations
(Chan, Golub and LeVeque, 1983: groups are merged in their order), the classes of the targets, a
random sample, and the rows that are held out, up to a budget. These rows are in memory during the
fit: they stop the training, set the noise and evaluate the fit, as in any fit.

Every later read of a group compares its checksum with that of the first one.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import DataLoader

from doxa.data.readers import (
    SPOOL_LIMIT,
    ArrowReader,
    CsvReader,
    Reader,
    SpooledReader,
)
from doxa.data.rows import RowsByWindow, rows_of
from doxa.data.scaling import Standardisation
from doxa.errors import DataError
from doxa.noise import Noise

log = logging.getLogger("doxa")

WINDOW_BYTES = 32 << 20
MOST_CLASSES = 10_000  # different whole numbers of a target that are counted
_HEAD = 1000  # rows that are looked at before the first pass
_SORTED = 0.5  # share of the variance of y that lies between windows, of rows that look sorted


class Stream(RowsByWindow):
    """Rows that are read by windows.

    Use `read_parquet`, `read_csv` or `stream` to make one.

    Parameters
    ----------
    reader : Reader
        Where the rows are.
    window : int, optional
        Bytes of a window in memory, about. Default: 32 MiB. Rows are shuffled inside a window; a
        fit with another size has another order of rows.

    Attributes
    ----------
    columns : tuple of str or None
        The names of the inputs.
    """

    def __init__(self, reader: Reader, window: int | None = None) -> None:
        self.reader, self.columns, self._window = reader, reader.columns, window
        self._sums: dict[int, int] = {}  # the checksum of each group that was read
        self._surveys: dict[Any, Survey] = {}
        self.windows: list[range] = []
        self.starts = [0]  # the number of the first row of each window, and of all rows
        most, first, rows = max(1, window or WINDOW_BYTES), 0, 0
        for group, count in enumerate(reader.sizes):
            rows += count
            last = group == len(reader.sizes) - 1
            if rows * reader.row_bytes >= most or (last and rows):
                self.windows.append(range(first, group + 1))
                self.starts.append(self.starts[-1] + rows)
                first, rows = group + 1, 0
        if self.starts[-1] == 0:
            raise DataError(f"{reader.source} has no rows")

    def __len__(self) -> int:
        return self.starts[-1]

    def __repr__(self) -> str:
        return f"Stream({self.reader.source!r}, {len(self):,} rows, {len(self.windows)} windows)"

    def __getitem__(self, names: list[str]) -> Stream:
        """The stream with some of its input columns, in this order."""
        if self.columns is None or not set(names) <= set(self.columns):
            raise DataError(f"{self!r} has the columns {self.columns}, not {names}")
        return Stream(_Columns(self.reader, names), self._window)

    @property
    def identity(self) -> str:
        """What a checkpoint must find unchanged: the groups, the windows, and the checksums of all
        groups that were read, which after the first pass are all."""
        facts = [identity_of(self.reader), self.starts, sorted(self._sums.items())]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def groups(self) -> Iterator[tuple[int, int, Any, Any]]:
        """Every group in order: its number, the number of its first row, x and y."""
        first = 0
        for group, count in enumerate(self.reader.sizes):
            if count:
                x, y = self._read(group, first)
                yield group, first, x, y
            first += count

    def _read(self, group: int, first: int) -> tuple[Any, Any]:
        """A group, which is checked when it is read for the first time, and compared later."""
        x, y = self.reader.read(group)
        place = self.reader.place(group)
        if group_rows(x) != self.reader.sizes[group]:
            raise DataError(
                f"{place} has {group_rows(x)} rows, not {self.reader.sizes[group]} as at first"
            )
        total = 0
        for leaf in tree_flatten((x, y))[0]:
            if leaf is not None:
                total = zlib.crc32(leaf.contiguous().numpy().reshape(-1).view("uint8"), total)
        if group not in self._sums:
            check_group(x, y, place, first)
            self._sums[group] = total
        elif self._sums[group] != total:
            raise DataError(
                f"{place}: its rows are not those that were read before: the file was replaced. "
                "Do not write to it during a fit, and open the stream again"
            )
        return x, y

    def window(self, number: int) -> tuple[Any, Any]:
        """The rows of a window in their order."""
        first, parts = self.starts[number], []
        for group in self.windows[number]:
            if self.reader.sizes[group]:
                parts.append(self._read(group, first))
                first += self.reader.sizes[group]
        return join([x for x, _ in parts]), join([y for _, y in parts])

    def head(self, rows: int = _HEAD) -> tuple[Any, Any]:
        """The first rows."""
        parts, found = [], 0
        for _, _, x, y in self.groups():
            count = min(rows - found, group_rows(x))
            parts.append(tree_map(lambda t: t[:count].clone(), (x, y)))  # noqa: B023
            found += count
            if found >= rows:
                break
        return join([x for x, _ in parts]), join([y for _, y in parts])

    def blocks(self, rows: int) -> Iterator[tuple[Tensor, Any, Any]]:
        """The rows in order, at most `rows` at a time: their numbers, x and y (None without
        targets). One group of rows is in memory."""
        for _, first, x, y in self.groups():
            count = group_rows(x)
            for start in range(0, count, rows):
                stop = min(start + rows, count)
                cut: Callable[[Tensor], Tensor] = lambda t: t[start:stop]  # noqa: B023, E731
                yield (
                    torch.arange(first + start, first + stop), tree_map(cut, x),
                    None if y is None else tree_map(cut, y),
                )  # fmt: skip

    def sample(self, rows: int, seed: int = 0) -> tuple[Any, Any]:
        """A random sample of rows without replacement, in their order: (x, y) in memory.

        Parameters
        ----------
        rows : int
            The number of rows; all of them if there are fewer.
        seed : int, default 0

        Returns
        -------
        tuple
            x and y.
        """
        total = len(self)
        share = min(1.0, (rows + 6.0 * math.sqrt(rows) + 6.0) / total)
        marks, parts = [], []
        for _, first, x, y in self.groups():
            mark = row_hash(seed, "sample", torch.arange(first, first + group_rows(x)))
            chosen = (mark <= share).nonzero()[:, 0]
            marks.append(mark[chosen])
            parts.append(tree_map(lambda t: t[chosen].clone(), (x, y)))  # noqa: B023
        kept = torch.cat(marks).argsort(stable=True)[:rows].sort().values
        x, y = join([x for x, _ in parts]), join([y for _, y in parts])
        return tree_map(lambda t: t[kept], x), tree_map(lambda t: t[kept], y)

    def survey(
        self, key: Any, collect: Callable[[Tensor], tuple[Tensor, Tensor]],
        check_y: Callable[[Any], Any], dtype: torch.dtype,
    ) -> Survey:  # fmt: skip
        """The first pass. `collect` returns, for the numbers of some rows, the mask of those that
        are kept in memory, and how many of them each split holds out. `key` says which."""
        if key not in self._surveys:
            self._surveys = {key: _surveyed(self, collect, check_y, dtype)}
        return self._surveys[key]

    @property
    def surveyed(self) -> Survey | None:
        """The last first pass."""
        return next(iter(self._surveys.values()), None)


class _Columns(Reader):
    """A reader with some of the input columns, in another order."""

    def __init__(self, base: Reader, names: Sequence[str]) -> None:
        self.base, self.columns = base, tuple(names)
        self.sizes, self.row_bytes = base.sizes, base.row_bytes
        self._index = [(base.columns or ()).index(name) for name in names]

    @property
    def source(self) -> str:
        return self.base.source

    def place(self, group: int) -> str:
        return self.base.place(group)

    def read(self, group: int) -> tuple[Any, Any]:
        x, y = self.base.read(group)
        return x[:, self._index], y


def identity_of(reader: Reader) -> str:
    """A digest of the number of rows of each group, and of the names of the inputs."""
    facts = repr([reader.sizes, reader.columns]).encode()
    return hashlib.sha256(facts).hexdigest()


def check_group(x: Any, y: Any, place: str, first: int) -> None:
    """An error for the first number of a group that is not finite; `first` is the number of its
    first row in the stream."""
    for what, tree in (("x", x), ("y", y)):
        for leaf in [] if tree is None else tree_flatten(tree)[0]:
            if not leaf.is_floating_point():
                continue
            bad = ~torch.isfinite(leaf)
            if bool(bad.any()):
                row, *column = (int(i) for i in bad.nonzero()[0])
                value = leaf[(row, *column)].item()
                where = f", column {column[0] if len(column) == 1 else column}" if column else ""
                raise DataError(
                    f"{place}: {what} is {value} at row {row} of the group{where} (row "
                    f"{first + row} of the stream); remove or fill missing values first"
                )


def join(parts: Sequence[Any]) -> Any:
    """Rows of several trees after each other."""
    if len(parts) == 1:
        return parts[0]
    if parts[0] is None:
        return None
    return tree_map(lambda *each: torch.cat(each), *parts)


def group_rows(x: Any) -> int:
    return rows_of(x, "x")


def row_hash(seed: int, purpose: str, numbers: Tensor) -> Tensor:
    """A number in (0, 1] for each row, from the seed and the number of the row."""
    noise = Noise(seed, purpose, ["row"], dtype=torch.float64)
    return noise.uniform_at(numbers)[0]


@dataclass
class Moments:
    """Number, mean and sum of squared deviations of the columns of a matrix, or of all numbers of
    other tensors, merged group by group."""

    count: float = 0.0
    mean: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    squares: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def add(self, values: Tensor) -> None:
        """Add rows [N, ...]."""
        each = values.double()
        each = each if each.ndim <= 2 else each.flatten()
        count, mean = float(len(each)), each.mean(0)
        squares = (each - mean).square().sum(0)
        total = self.count + count
        apart = mean - self.mean
        self.mean = self.mean + apart * (count / total)
        self.squares = self.squares + squares + apart.square() * (self.count * count / total)
        self.count = total

    @property
    def std(self) -> Tensor:
        return (self.squares / self.count).sqrt()


@dataclass(frozen=True)
class Survey:
    """What the first pass has found.

    Parameters
    ----------
    x_moments : list of Moments or None
        One for each tensor of x; None for whole numbers.
    y_moments : Moments or None
    classes : dict of int to int or None
        The number of rows of each whole number of y; None if y is no vector of whole numbers, or
        there are too many.
    spec : object
        The structure of x.
    numbers : Tensor
        The numbers of the rows in memory, [K], increasing.
    x, y : trees of Tensor
        These rows, as they were read.
    held : Tensor
        The number of rows that each split holds out.
    """

    x_moments: list[Moments | None]
    y_moments: Moments | None
    classes: dict[int, int] | None
    spec: Any
    numbers: Tensor
    x: Any
    y: Any
    held: Tensor

    def scales(self, scale_y: bool) -> Standardisation:
        """Locations and scales of all rows."""
        pairs = [self._pair("x", moments) for moments in self.x_moments]
        x_loc, x_scale = (tree_unflatten([p[i] for p in pairs], self.spec) for i in range(2))
        y_loc, y_scale = self._pair("y", self.y_moments) if scale_y else (None, None)
        return Standardisation(x_loc, x_scale, y_loc, y_scale)

    def _pair(self, name: str, moments: Moments | None) -> tuple[Tensor, Tensor]:
        if moments is None:
            return torch.zeros(()), torch.ones(())
        constant = moments.std <= 1e-12 * (moments.mean.abs() + 1e-300)
        if bool(constant.any()):
            columns = constant.nonzero().flatten().tolist() if constant.ndim else "all"
            log.warning("%s: constant column %s gets scale 1", name, columns)
        return moments.mean, torch.where(constant, 1.0, moments.std)


def _surveyed(
    stream: Stream, collect: Callable[[Tensor], tuple[Tensor, Tensor]],
    check_y: Callable[[Any], Any], dtype: torch.dtype,
) -> Survey:  # fmt: skip
    x_moments: list[Moments | None] = []
    y_moments: Moments | None = None
    classes: dict[int, int] | None = {}
    numbers, parts, held, spec = [], [], torch.zeros(0, dtype=torch.long), None
    within, groups = 0.0, 0  # the sum of squares of y inside groups
    for group, first, x, y in stream.groups():
        place = stream.reader.place(group)
        _check_cast(x, y, dtype, place)
        try:
            check_y(y)
        except DataError as error:
            raise type(error)(f"{place}: {error}") from error
        leaves, spec = tree_flatten(x)
        if not x_moments:
            x_moments = [Moments() if t.is_floating_point() else None for t in leaves]
        for leaf, moments in zip(leaves, x_moments, strict=True):
            if moments is not None:
                moments.add(leaf)
        if isinstance(y, Tensor):
            y_moments = y_moments or Moments()
            y_moments.add(y)
            within += float((y.double() - y.double().mean(0)).square().sum())
            classes = _counted(classes, y)
        own = torch.arange(first, first + group_rows(x))
        mask, counts = collect(own)
        held = counts if not len(held) else held + counts
        numbers.append(own[mask])
        parts.append(tree_map(lambda t: t[mask].clone(), (x, y)))  # noqa: B023
        groups += 1
    if y_moments is not None and groups > 3:
        _warn_sorted(stream, within, float(y_moments.squares.sum()), groups)
    return Survey(
        x_moments, y_moments, classes, spec, torch.cat(numbers), join([x for x, _ in parts]),
        join([y for _, y in parts]), held,
    )  # fmt: skip


def _check_cast(x: Any, y: Any, dtype: torch.dtype, place: str) -> None:
    for name, leaf in [("x", t) for t in tree_flatten(x)[0]] + [
        ("y", t) for t in tree_flatten(y)[0]
    ]:
        if leaf.is_floating_point() and leaf.dtype != dtype:
            bad = ~torch.isfinite(leaf.to(dtype))
            if bool(bad.any()):
                at = bad.nonzero()[0].tolist()
                raise DataError(
                    f"{place}: {name} is {leaf[tuple(at)].item()} at row {at[0]} of the group, "
                    f"that is infinite in {dtype}: scale the column first"
                )


def _counted(classes: dict[int, int] | None, y: Tensor) -> dict[int, int] | None:
    """The counts with those of more targets."""
    if classes is None or y.is_floating_point() or y.ndim != 1:
        return None
    found, counts = y.unique(return_counts=True)
    for label, count in zip(found.tolist(), counts.tolist(), strict=True):
        classes[int(label)] = classes.get(int(label), 0) + count
    return classes if len(classes) <= MOST_CLASSES else None


def _warn_sorted(stream: Stream, within: float, squares: float, groups: int) -> None:
    """Warn of rows that are sorted: the variance of y lies between groups, where rows in random
    order have a share of groups/N."""
    between = 1.0 - within / squares if squares > 0 else 0.0
    if between > max(_SORTED, 10 * groups / len(stream)):
        log.warning(
            "%s: %.0f %% of the variance of y lies between groups of rows: the rows look sorted, "
            "and are shuffled inside windows only; write the file in random order",
            stream.reader.source, 100 * between,
        )  # fmt: skip


def read_parquet(
    path: str | os.PathLike[str],
    target: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    window: int | None = None,
) -> Stream:
    """The rows of Parquet or Arrow files, which are not copied.

    Parameters
    ----------
    path : str or Path
        A file, or a folder whose files all have the same columns: they are read in the order of
        their names. Names that begin with "." or "_" are skipped.
    target : str or sequence of str, optional
        The column to predict, or several. Whole numbers stay whole numbers (classes). Not needed
        for rows to predict.
    columns : sequence of str, optional
        The input columns, in this order. Default: all other columns. They are numbers or truth
        values, without missing values.
    window : int, optional
        Bytes of a window in memory, about. Default: 32 MiB.

    Returns
    -------
    Stream

    Raises
    ------
    DataError
        A column does not exist or is not numeric, a file has other columns than the first one, is
        cut off, or is no such file, or there are no rows. While rows are read: a missing value, or
        a file that has changed. The message names the file and the row group.
    MemoryBudgetError
        A row group takes more than 512 MiB.
    MissingExtra
        pyarrow is not installed.
    """
    return Stream(ArrowReader(path, target, columns), window)


def read_csv(
    path: str | os.PathLike[str],
    target: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    separator: str = ",",
    window: int | None = None,
) -> Stream:
    """The rows of a CSV file of numbers, which is not copied.

    Opening the file reads it once, to find where its lines end: line breaks inside quotation marks
    are part of a cell.

    Parameters
    ----------
    path : str or Path
        A file in UTF-8, with a header.
    target : str or sequence of str, optional
        The column to predict, or several. Whole numbers in the first block of lines stay whole
        numbers (classes).
    columns : sequence of str, optional
        The input columns, in this order. Default: all other columns.
    separator : str, default ","
        The character between cells.
    window : int, optional
        Bytes of a window in memory, about. Default: 32 MiB.

    Returns
    -------
    Stream

    Raises
    ------
    DataError
        As for `read_parquet`; the message names the file and the first line of the block.
    """
    return Stream(CsvReader(path, target, columns, separator), window)


def stream(
    rows: Iterable[Any],
    target: str | None = None,
    columns: Sequence[str] | None = None,
    *,
    limit: int = SPOOL_LIMIT,
    folder: str | os.PathLike[str] | None = None,
    window: int | None = None,
) -> Stream:
    """The rows of an iterable, such as an `IterableDataset` or a streaming set of the package
    datasets. They are written to a temporary folder, which is removed with the stream.

    Parameters
    ----------
    rows : iterable
        Returns (x, y) for each row, or a dict: with a `target`, of columns by name; without one,
        with its labels, as `doxa.fit` takes dicts.
    target : str, optional
        The column to predict, if rows are dicts.
    columns : sequence of str, optional
        The input columns, if rows are dicts. Default: all other columns of the first row.
    limit : int, default 10 GiB
        The most bytes on disk. An iterable with more is refused, and nothing stays on disk.
    folder : str or Path, optional
        Where the temporary folder is made. Default: that of the system.
    window : int, optional
        Bytes of a window in memory, about. Default: 32 MiB.

    Returns
    -------
    Stream

    Raises
    ------
    DataError
        A row is not finite, or rows have different shapes; the message names the row.
    MemoryBudgetError
        The rows take more than `limit`.

    Examples
    --------
    >>> import doxa, torch
    >>> rows = doxa.data.stream((torch.randn(2), torch.randn(())) for _ in range(100))
    >>> len(rows)
    100
    """
    if isinstance(rows, DataLoader) and rows.batch_size is not None:
        rows = cast(Iterable[Any], rows.dataset)  # by rows, and not by batches
    return Stream(SpooledReader(rows, target, columns, limit, folder), window)
