"""Reading and writing tables: CSV and Parquet files, and their columns by name.

Reading any file ends in a table or in a typed error. `doxa.data.text_files` has the limit on the
size, and the escapes for text that a spreadsheet program would evaluate as a formula.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doxa.data.text_files import (
    MOST_GROWTH,
    check_memory,
    check_regular,
    escape,
    most_unpacked,
    unescape,
)
from doxa.errors import (
    DataError,
    DoxaError,
    MemoryBudgetError,
    MissingExtra,
    StoreError,
    did_you_mean,
)
from doxa.store.artefact import make_directory
from doxa.tables.reading import (
    MOST_COLUMNS,
    Dialect,
    import_pandas,
    is_text,
    nested,
    read_text_table,
)
from doxa.tables.reading import Array as Array

if TYPE_CHECKING:
    import pandas as pd

PARQUET = (".parquet", ".pq")
TEXT = (".csv", ".tsv", ".txt")
LONGEST_NAME = 255  # bytes of one name, in common file systems
_UNNAMED = "Unnamed: 0"  # pandas' name for a first column without a header: an index


@dataclass(frozen=True)
class Table:
    """The rows of a file, as the command line reads them.

    Attributes
    ----------
    frame : DataFrame
        The rows. Their index is the one of the file, else the line of each row in a text file.
    dialect : Dialect or None
        How the text is written: separator, decimal mark, encoding. None for Parquet.
    notes : list of str
        What was recognised, in sentences.
    source : Path or None
        The file.
    """

    frame: pd.DataFrame
    dialect: Dialect | None = None
    notes: list[str] = field(default_factory=list)
    source: Path | None = None

    def __len__(self) -> int:
        return len(self.frame)

    def __repr__(self) -> str:
        name = "Table" if self.source is None else f"Table of {self.source.name}"
        rows, columns = self.frame.shape
        said = "".join(f"\n  {note}" for note in self.notes)
        return f"{name}: {rows:,} rows, {columns:,} columns{said}\n{self.frame.head()}"


def read_table(
    path: str | Path,
    *,
    index: str | None = None,
    sep: str | None = None,
    decimal: str | None = None,
    encoding: str | None = None,
) -> Table:
    """Read a table from a file by the rules of `doxa fit` (docs/tables.md).

    Parameters
    ----------
    path : str or Path
        A CSV file (.csv, .tsv, .txt, also compressed) or a Parquet file (.parquet, .pq).
    index : str, optional
        The column that names the rows.
    sep, decimal, encoding : str, optional
        How a text file is written; by default this is detected. The same words as on the command
        line: "semicolon", "comma", "latin-1".

    Returns
    -------
    Table
        The rows, how they were written, and notes.

    Examples
    --------
    >>> table = doxa.read_table("rents.csv")
    >>> table.frame.columns
    """
    return open_table(path, index, dialect=Dialect.asked(sep, decimal, encoding))


def open_table(
    path: str | Path,
    index: str | None = None,
    index_needed: bool = True,
    dialect: Dialect = Dialect(),  # noqa: B008 - frozen
) -> Table:
    """Read a CSV (.csv, .tsv, .txt, also compressed) or Parquet (.parquet, .pq) file.

    The index is the column named `index`; else the stored index of Parquet; else the first column
    of a CSV file if its header is empty (as pandas writes it); else the line of a CSV file, or the
    row number of a Parquet file. An absent column is an error unless `index_needed` is False.
    """
    path = Path(path)
    _check_readable(path)
    found: Dialect | None = None
    try:
        if _is_parquet(path):
            frame = _read_parquet(path)
        else:
            frame, found = read_text_table(path, dialect)
    except DoxaError:
        raise
    except MemoryError as error:
        raise MemoryBudgetError(f"{path} does not fit into the memory as a table") from error
    except Exception as error:  # pandas and pyarrow raise many types for a damaged file
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"{path} cannot be read as a table: {first[:300]}") from error
    names = [str(name).strip() for name in frame.columns]
    frame.columns = names if found is None else [unescape(name) for name in names]
    if not frame.columns.is_unique:
        name = frame.columns[frame.columns.duplicated()][0]
        raise DataError(f"{path}: {name!r} stands more than once in the header")
    notes = [f"{path.name} is {found.words}"] if found is not None and found.words else []
    if index is None and len(frame.columns) and frame.columns[0] == _UNNAMED:
        frame = frame.set_index(_UNNAMED).rename_axis(index=None)
    elif index not in (None, frame.index.name) and (index_needed or index in frame.columns):
        if nested(pick(frame, str(index))):
            raise DataError(f"column {index!r} holds several values in each cell: it names no row")
        frame = frame.set_index(pick(frame, str(index))).drop(columns=str(index))
    if len(frame) == 0:
        raise DataError(f"{path} has a header but no rows")
    if not frame.index.is_unique:
        again = int(frame.index.duplicated().sum())
        notes.append(f"the index of {path.name} is not unique: {again} rows repeat an earlier name")
    return Table(frame, found, notes, path)


def _check_readable(path: Path) -> None:
    if check_regular(path) == 0:
        raise DataError(f"{path} is empty")
    try:
        with path.open("rb") as file:
            first = file.read(4)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    suffixes = {suffix.lower() for suffix in path.suffixes}
    if first != b"PAR1" and not suffixes & {*TEXT, *PARQUET}:
        raise DataError(f"{path}: not a table doxa reads; use .csv, .tsv or .parquet")


def _read_parquet(path: Path) -> pd.DataFrame:
    """The rows of a Parquet file whose numbers fit into the memory."""
    pandas = import_pandas()
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise MissingExtra("reading Parquet needs pyarrow: pip install 'doxa[tables]'") from error
    with ParquetFile(path) as file:
        rows, columns = file.metadata.num_rows, file.metadata.num_columns
    if columns > MOST_COLUMNS:
        raise DataError(f"{path} has {columns:,} columns, and {MOST_COLUMNS:,} are read at most")
    size = 8 * rows * columns
    if size > most_unpacked(path.stat().st_size):
        raise MemoryBudgetError(
            f"{path} has {rows:,} rows of {columns} columns, {size / 2**30:.3g} GiB, which is more "
            f"than {MOST_GROWTH} times its size and is refused; in Python doxa.store.parquet reads "
            "it in parts"
        )
    check_memory(size, path)
    return pandas.read_parquet(path)


def _is_parquet(path: Path) -> bool:
    """By the suffix, or by the first bytes of the file."""
    with path.open("rb") as file:
        return path.suffix.lower() in PARQUET or file.read(4) == b"PAR1"


def write_table(frame: pd.DataFrame, path: Path) -> None:
    """Write CSV or Parquet, by the suffix, with the index. In CSV, text that a spreadsheet program
    would evaluate as a formula gets an apostrophe."""
    check_writable(path)
    try:
        make_directory(path.parent)
        if path.suffix.lower() in PARQUET:
            frame.to_parquet(path)
        else:
            safe = _escaped(frame)
            safe.to_csv(path, sep="\t" if path.suffix.lower() == ".tsv" else ",")
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


def _escaped(frame: pd.DataFrame) -> pd.DataFrame:
    """The table with names, labels and text cells escaped by `text_files.escape`."""

    def safe(cell: Any) -> Any:
        return escape(cell) if isinstance(cell, str) else cell

    found = frame.rename(columns=safe, index=safe).rename_axis(index=safe(frame.index.name))
    for at, name in enumerate(frame.columns):
        values = frame[name]
        if is_text(values):
            found.isetitem(at, values.astype(object).map(safe).to_numpy())
    return found


def check_name(path: Path) -> None:
    """Refuse a name that the file system cannot hold."""
    for name in path.absolute().parts:
        if len(os.fsencode(name)) > LONGEST_NAME:
            raise StoreError(
                f"{str(path)[:60]}… has a name of {len(os.fsencode(name))} bytes, and "
                f"{LONGEST_NAME} is the most: choose a shorter one"
            )


def check_writable(path: Path) -> None:
    """Check, before the work, that a table can be written there."""
    check_name(path)
    if path.suffix.lower() not in (".csv", ".tsv", *PARQUET):
        raise StoreError(f"{path}: a table is written as .csv, .tsv or .parquet")
    if path.is_dir():
        raise StoreError(f"{path} is a folder; give a file")
    if path.parent.is_file():
        raise StoreError(f"{path} cannot be written: {path.parent} is a file, not a folder")


def pick(frame: pd.DataFrame, name: str) -> pd.Series:
    """A column by name; a mistyped name gets the closest ones."""
    if name not in frame.columns:
        raise DataError(f"no column {name!r}{did_you_mean(name, frame.columns)}")
    column = frame[name]
    if column.ndim != 1:
        raise DataError(f"there are {column.shape[1]} columns named {name!r}")
    return column
