"""Tables in and out: CSV and Parquet files, and their columns by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from doxa.app.cells import Array as Array
from doxa.app.cells import import_pandas
from doxa.app.reading import Dialect, read_text_table
from doxa.errors import DataError, StoreError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

PARQUET = (".parquet", ".pq")
TEXT = (".csv", ".tsv", ".txt")
_UNNAMED = "Unnamed: 0"  # pandas' word for a first column without a header: an index


class Table(NamedTuple):
    """A file's rows, how it is written (None for Parquet), and what to tell the user of it."""

    frame: pd.DataFrame
    dialect: Dialect | None
    notes: list[str]


def read_table(
    path: str | Path,
    index: str | None = None,
    index_needed: bool = True,
    dialect: Dialect = Dialect(),  # noqa: B008 - frozen
) -> pd.DataFrame:
    """The rows of a file, as `open_table` reads it."""
    return open_table(path, index, index_needed, dialect).frame


def open_table(
    path: str | Path,
    index: str | None = None,
    index_needed: bool = True,
    dialect: Dialect = Dialect(),  # noqa: B008 - frozen
) -> Table:
    """A CSV (.csv, .tsv, .txt, also compressed) or Parquet (.parquet, .pq) file.

    The index is the column named `index`, else what Parquet stored, else a CSV's first column if
    its header is empty (as pandas writes it), else the line of a CSV and the row number of a
    Parquet file. An absent column is an error unless `index_needed` is False.
    """
    path = Path(path)
    _check_readable(path)
    found: Dialect | None = None
    try:
        if _is_parquet(path):
            frame = import_pandas().read_parquet(path)
        else:
            frame, found = read_text_table(path, dialect)
    except (DataError, StoreError):
        raise
    except (ValueError, OSError) as error:  # pandas' and pyarrow's parsing errors are of these
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"{path} cannot be read as a table: {first}") from error
    frame.columns = frame.columns.map(lambda name: str(name).strip())
    notes = [f"{path.name} is {found.words}"] if found is not None and found.words else []
    if index is None and len(frame.columns) and frame.columns[0] == _UNNAMED:
        frame = frame.set_index(_UNNAMED).rename_axis(index=None)
    elif index not in (None, frame.index.name) and (index_needed or index in frame.columns):
        frame = frame.set_index(pick(frame, str(index))).drop(columns=str(index))
    if len(frame) == 0:
        raise DataError(f"{path} has a header but no rows")
    if not frame.index.is_unique:
        again = int(frame.index.duplicated().sum())
        notes.append(f"the index of {path.name} is not unique: {again} rows repeat an earlier name")
    return Table(frame, found, notes)


def _check_readable(path: Path) -> None:
    if not path.is_file():
        what = "is a folder, not a table" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {what}")
    try:
        with path.open("rb") as file:
            first = file.read(4)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if not first:
        raise DataError(f"{path} is empty")
    suffixes = {suffix.lower() for suffix in path.suffixes}
    if first != b"PAR1" and not suffixes & {*TEXT, *PARQUET}:
        raise DataError(f"{path}: not a table doxa reads; use .csv, .tsv or .parquet")


def _is_parquet(path: Path) -> bool:
    """By the ending, or by how the file begins, whatever it is called."""
    with path.open("rb") as file:
        return path.suffix.lower() in PARQUET or file.read(4) == b"PAR1"


def write_table(frame: pd.DataFrame, path: Path) -> None:
    """CSV or Parquet by the file's ending, with the index."""
    check_writable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() in PARQUET:
            frame.to_parquet(path)
        else:
            frame.to_csv(path, sep="\t" if path.suffix.lower() == ".tsv" else ",")
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


def check_writable(path: Path) -> None:
    """Fail before the work is done, not after it."""
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
