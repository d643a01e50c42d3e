"""Tables in: CSV and Parquet files, and cells as numbers or labels, each fault with its place.

Rows in messages are counted from 1, the header not included.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from doxa.errors import DataError, MissingExtra, StoreError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

PARQUET = (".parquet", ".pq")
Array = np.ndarray[Any, np.dtype[Any]]


def read_table(
    path: str | Path, index: str | None = None, index_needed: bool = True
) -> pd.DataFrame:
    """A CSV (.csv, .tsv, also compressed) or Parquet (.parquet, .pq) file.

    The index is the column named `index`, else what Parquet stored, else a CSV's first column if
    its header is empty (as pandas writes it), else the row number. An absent column is an error
    unless `index_needed` is False.
    """
    pandas = import_pandas()
    path = Path(path)
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if not path.is_file():
        what = "is a folder, not a table" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {what}")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    try:
        if suffixes and suffixes[-1] in PARQUET:
            frame = pandas.read_parquet(path)
        elif {".csv", ".tsv", ".txt"} & set(suffixes):
            frame = pandas.read_csv(path, sep="\t" if ".tsv" in suffixes else ",")
        else:
            raise DataError(f"{path}: not a table doxa reads; use .csv, .tsv or .parquet")
    except DataError:
        raise
    except (ValueError, OSError) as error:  # pandas' and pyarrow's parsing errors are of these
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"{path} cannot be read as a table: {first}") from error
    frame.columns = frame.columns.map(lambda name: str(name).strip())
    if index is None and len(frame.columns) and frame.columns[0] == "Unnamed: 0":
        frame = frame.set_index("Unnamed: 0").rename_axis(index=None)
    elif index not in (None, frame.index.name) and (index_needed or index in frame.columns):
        frame = frame.set_index(pick(frame, str(index))).drop(columns=str(index))
    if len(frame) == 0:
        raise DataError(f"{path} has a header but no rows")
    return frame


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


def import_pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra("reading tables needs pandas: pip install 'doxa[tables]'") from error
    return pandas


def is_text(values: pd.Series) -> bool:
    from pandas.api import types

    return (
        types.is_object_dtype(values)
        or types.is_string_dtype(values)
        or isinstance(values.dtype, import_pandas().CategoricalDtype)
    )


def mostly_numbers(values: pd.Series) -> bool:
    pandas = import_pandas()
    if isinstance(values.dtype, pandas.CategoricalDtype):
        return False
    parsed = pandas.to_numeric(values, errors="coerce")
    return bool(2 * parsed.notna().sum() >= values.notna().sum() > 0)


def numbers_of(values: pd.Series) -> Array:
    """The cells as float64 [N]; the first that is no finite number is named."""
    pandas = import_pandas()
    parsed = np.array(pandas.to_numeric(values, errors="coerce"), dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(parsed))
    if bad.size:
        row, cell = int(bad[0]), values.iloc[int(bad[0])]
        more = f" (and {bad.size - 1} more)" if bad.size > 1 else ""
        kind = "is not finite" if isinstance(cell, float) else "is not a number"
        raise DataError(f"column {values.name!r}, row {row + 1}: {str(cell)!r} {kind}{more}")
    return parsed


def refuse_missing(values: pd.Series) -> None:
    missing = np.flatnonzero(values.isna().to_numpy())
    if missing.size:
        more = f" ({missing.size} in all)" if missing.size > 1 else ""
        raise DataError(
            f"column {values.name!r}, row {int(missing[0]) + 1}: missing value{more}; "
            "fill such cells or remove their rows first"
        )


def label_of(value: Any) -> str:
    """A category as text; 1 and 1.0 are the same one."""
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    return str(value).strip()


def labels_of(values: Iterable[Any]) -> Array:
    return np.array([label_of(value) for value in values], dtype=object)
