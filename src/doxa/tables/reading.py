"""Reading a text table: encoding, separator, decimal mark, and its cells as numbers or labels.

Encoding. The one of the byte order mark; without one, UTF-16 if every other byte of the start is
zero; UTF-8 if the whole file is valid UTF-8; else Windows-1252 (which also reads Latin-1), if the
file has none of its undefined bytes. Anything else is an error that suggests `--encoding`.

Separator. Of comma, semicolon, tab and bar, the one that cuts the header into most cells, at least
two, and the following lines into as many. If none cuts all lines alike, the one that cuts the
header into most cells, and the error names the first line that differs. Without any of them the
table has one column.

Decimal mark. A comma if the separator is not a comma, and some text column has a number with a
comma (12,5), and at least half of its cells are such numbers or whole numbers; else a point. A file
with both marks is an error that suggests `--decimal`.

The limit on the size of a file, and the removal of apostrophes, are in `doxa.data.text_files`.

Errors name the place of a cell. A row of a text table without an index is named by its line in the
file (the header is line 1); any other row is named by its index, which Python counts from 0.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import csv
import gzip
import io
import lzma
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from doxa.data.text_files import has_escaped, most_unpacked, read_bytes, unescape
from doxa.errors import DataError, MissingExtra

if TYPE_CHECKING:
    import pandas as pd


Array = np.ndarray[Any, np.dtype[Any]]

LINE = "line"  # the name of an index that holds lines of a file
_STAND_INS = ("?", "-", "--", "–", ".", "*", "missing", "unknown", "undefined", "empty", "no data")
_CURRENCY = "$€£¥₹"
_NUMBER = re.compile(r"[+-]?(\d+([.,\s’']\d+)*|[.,]\d+)(e[+-]?\d+)?", re.IGNORECASE)
_COMMA = re.compile(r"[+-]?\d*,\d+")


def import_pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra("reading tables needs pandas: pip install 'doxa[tables]'") from error
    return pandas


def place_of(index: pd.Index, row: int) -> str:
    """How messages name a row: `line 7` of a file, else `row 'k7'` or `row 7` of its index."""
    label = index[row]
    if index.name == LINE:
        return f"line {label}"
    return f"row {str(label)!r}" if isinstance(label, str) else f"row {label}"


def fault_at(values: pd.Series, rows: Sequence[int]) -> str:
    """`column 'age', line 7 (3 in all)`: the place of the first fault, and their number."""
    more = f" ({len(rows)} in all)" if len(rows) > 1 else ""
    return f"column {values.name!r}, {place_of(values.index, int(rows[0]))}{more}"


def is_text(values: pd.Series) -> bool:
    from pandas.api import types

    return (
        types.is_object_dtype(values)
        or types.is_string_dtype(values)
        or isinstance(values.dtype, import_pandas().CategoricalDtype)
    )


def nested(values: pd.Series) -> bool:
    """Whether some cell holds several values: a list, map or struct of Parquet."""
    if values.dtype != object:
        return False
    return any(isinstance(cell, (list, tuple, dict, set, np.ndarray)) for cell in values)


def mostly_numbers(values: pd.Series) -> bool:
    """Whether at least half of the cells are numbers, once signs and separators are removed."""
    if isinstance(values.dtype, import_pandas().CategoricalDtype):
        return False
    present = values.dropna().value_counts(sort=False)
    numeric = sum(count for cell, count in present.items() if _looks_numeric(cell))
    return bool(2 * numeric >= present.sum() > 0)


def _looks_numeric(cell: Any) -> bool:
    if isinstance(cell, str):
        text = cell.strip().strip(_CURRENCY + "%").strip()
        return _NUMBER.fullmatch(text) is not None or text.lower().lstrip("+-") in ("inf", "nan")
    return isinstance(cell, Number) and not isinstance(cell, (bool, np.bool_))


def numbers_of(values: pd.Series) -> Array:
    """The cells as float64 [N], NaN if missing; an error names the first cell that is no finite
    number."""
    try:
        numbers = import_pandas().to_numeric(values, errors="coerce")
        parsed = np.array(numbers, dtype=np.float64)
    except (OverflowError, TypeError, ValueError):  # an integer of 400 digits, among others
        parsed = np.array([float_of(cell) for cell in values])
    bad = np.flatnonzero(~np.isfinite(parsed) & values.notna().to_numpy())
    if bad.size:
        cell = values.iloc[int(bad[0])]
        if isinstance(cell, str) and not np.isinf(float_of(cell)):
            wrong = f"{_short(cell)!r} is not a number{_advice(cell.strip())}"
        else:
            wrong = (
                f"'{_short(str(cell))}' is not finite; correct it, or leave the cell empty if it "
                "is not known"
            )
        raise DataError(f"{fault_at(values, bad.tolist())}: {wrong}")
    return parsed


def float_of(cell: Any) -> float:
    """A cell as a number: infinite if it is too large, NaN if it is no number."""
    try:
        return float(cell)
    except OverflowError:
        return float("inf")
    except (TypeError, ValueError):
        return float("nan")


def _short(cell: str) -> str:
    return cell if len(cell) <= 60 else f"{cell[:59]}…"


def _advice(cell: str) -> str:
    """The remedy for text in a column of numbers."""
    if "%" in cell:
        return "; remove the percent signs"
    if any(sign in cell for sign in _CURRENCY):
        return "; remove the currency signs"
    if _COMMA.fullmatch(cell):
        return "; for a decimal comma --decimal ',', else remove the separators of thousands"
    if _looks_numeric(cell):
        return "; remove the separators of thousands"
    if cell.lower() in _STAND_INS:
        return "; if it stands for a missing value, leave the cell empty"
    return ", but most cells of the column are"


def label_of(value: Any) -> str:
    """A category as text; 1 and 1.0 are the same category."""
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    return str(value).strip()


def labels_of(values: Iterable[Any]) -> Array:
    return np.array([label_of(value) for value in values], dtype=object)


def gaps(values: pd.Series) -> list[int]:
    """The rows of missing cells."""
    return np.flatnonzero(values.isna().to_numpy()).tolist()


def refuse_gaps(frame: pd.DataFrame, names: Iterable[str]) -> None:
    """An error that names all columns with missing cells, their first place and number."""
    wanted = [frame[name] for name in names]
    faults = [fault_at(values, rows) for values in wanted if (rows := gaps(values))]
    if faults:
        raise DataError(
            f"missing values: {'; '.join(faults)}. --missing impute fills them in; or fill these "
            "cells, remove their rows, or drop a column with --drop"
        )


SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars", " ": "spaces"}
_CANDIDATES = ",;\t|"
_WORDS = {"comma": ",", "semicolon": ";", "tab": "\t", "\\t": "\t", "bar": "|", "pipe": "|",
          "space": " "}  # fmt: skip
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
PACKED: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open,
}  # fmt: skip
_CHUNK = 1 << 20  # bytes unpacked at a time
MOST_COLUMNS = 100_000
_SAMPLE = 1 << 16  # characters used to detect the separator
_WITH_COMMA = r"[+-]?(\d{1,3}(\.\d{3})+|\d*),\d+(?:[eE][+-]?\d+)?"
_WITH_POINT = r"[+-]?\d*\.\d+(?:[eE][+-]?\d+)?"
_WHOLE = r"[+-]?\d+(?:[eE][+-]?\d+)?"


@dataclass(frozen=True)
class Dialect:
    """How a text table is written; None: to be detected."""

    sep: str | None = None
    decimal: str | None = None
    encoding: str | None = None

    @classmethod
    def asked(cls, sep: str | None, decimal: str | None, encoding: str | None) -> Dialect:
        """The dialect of `--sep`, `--decimal` and `--encoding`, checked."""
        sep = None if sep is None else _WORDS.get(sep.lower(), sep)
        if sep is not None and (len(sep) != 1 or sep.isalnum() or sep in '"\r\n'):
            raise DataError(f"--sep takes a character, comma, semicolon, tab or bar, not {sep!r}")
        decimal = None if decimal is None else {"comma": ",", "point": "."}.get(decimal, decimal)
        if decimal not in (None, ",", "."):
            raise DataError(f"--decimal takes , or . (comma, point), not {decimal!r}")
        if encoding is not None:
            try:
                with contextlib.suppress(UnicodeError):  # one byte is not valid UTF-16
                    b"a".decode(encoding)  # refuses codecs that are not for text, such as hex
                encoding = codecs.lookup(encoding).name
            except LookupError:
                known = "utf-8, utf-16, latin-1, cp1252"
                raise DataError(f"unknown --encoding {encoding!r}; such as {known}") from None
        return cls(sep, decimal, encoding)

    @property
    def words(self) -> str:
        """The message for the user; "" for a plain file: UTF-8, commas, points."""
        parts = []
        if self.sep not in (None, ","):
            parts.append(f"separated by {SEPARATORS.get(str(self.sep), repr(self.sep))}")
        if self.decimal == ",":
            parts.append("with decimal commas")
        if self.encoding not in (None, "utf-8", "utf-8-sig", "ascii"):
            parts.append(f"encoded in {_shown(str(self.encoding))}")
        return ", ".join(parts)


def read_text_table(path: Path, asked: Dialect) -> tuple[pd.DataFrame, Dialect]:
    """The table, indexed by the lines of the file, and its dialect."""
    text, encoding = read_text(path, asked.encoding)
    sep = asked.sep or separator_of(text)
    lines = _structure(text, sep, path)
    if asked.sep is not None:
        _check_asked(text, sep, path)
    found = Dialect(sep, asked.decimal or ".", encoding)
    frame = _parse(text, found)
    if has_escaped(text):
        frame = unescaped(frame)
    if asked.decimal is None and sep != "," and has_decimal_commas(frame):
        found = replace(found, decimal=",")
        frame = _parse(text, found)
        frame = unescaped(frame) if has_escaped(text) else frame
    if len(frame) == len(lines):
        frame.index = import_pandas().Index(lines, name=LINE)
    if found.decimal == ",":
        refuse_points(frame)
    return frame, found


def _parse(text: str, dialect: Dialect) -> pd.DataFrame:
    """The typed cells; `index_col=False`: the first column is never silently an index."""
    return import_pandas().read_csv(
        io.StringIO(text), sep=dialect.sep, decimal=dialect.decimal, index_col=False,
        low_memory=False,
    )  # fmt: skip


def unescaped(frame: pd.DataFrame) -> pd.DataFrame:
    """Text without the apostrophe that protects it from evaluation in a spreadsheet."""
    for at, name in enumerate(frame.columns):
        values = frame[name]
        if is_text(values):
            plain = values.map(lambda cell: unescape(cell) if isinstance(cell, str) else cell)
            frame.isetitem(at, plain.array)
    return frame


def read_text(path: Path, encoding: str | None = None) -> tuple[str, str]:
    """The text of a file, decompressed, and its encoding; an error for an empty file."""
    text, found = _decode(_unpacked(path), encoding, path)
    if not text.strip():
        raise DataError(f"{path} is empty")
    return text, found


def read_records(path: Path) -> tuple[list[tuple[int, list[str]]], str]:
    """(line, cells) of a small file, its header first, and the separator that was detected; cells
    are text, stripped of spaces."""
    text, _ = read_text(path)
    sep = separator_of(text)
    try:
        records = list(_records(text, sep, strict=True))
    except csv.Error as error:
        raise DataError(f"{path} cannot be read as a table: {error}") from error
    if not records:
        raise DataError(f"{path} is empty")
    return [(line, [cell.strip() for cell in cells]) for line, cells in records], sep


def separator_of_file(path: Path) -> str:
    """The separator of a large text table in UTF-8, from its first lines."""
    with path.open("rb") as file:
        start = file.read(4 * _SAMPLE)
    if start.startswith((b"PK\x03\x04", *PACKED)):
        raise DataError(f"{path} is compressed: a table that is read by windows must be unpacked")
    return separator_of(start.decode("utf-8-sig", errors="ignore"))


def _unpacked(path: Path) -> bytes:
    """The bytes of a file, decompressed; the first bytes tell the format, not the file name."""
    raw = read_bytes(path)
    most = most_unpacked(len(raw))
    try:
        if raw.startswith(b"PK\x03\x04"):
            with zipfile.ZipFile(io.BytesIO(raw)) as archive:
                inside = archive.infolist()
                if len(inside) != 1:
                    raise DataError(
                        f"{path} is an archive of {len(inside)} files (an Excel workbook?); doxa "
                        "reads .csv, .tsv and .parquet: save it as CSV"
                    )
                if inside[0].flag_bits & 1:
                    raise DataError(f"{path} is encrypted: decompress it with its password first")
                with archive.open(inside[0]) as file:
                    return _at_most(file, most, path)
        for magic, opened in PACKED.items():
            if raw.startswith(magic):
                with opened(io.BytesIO(raw)) as file:
                    return _at_most(file, most, path)
    except DataError:
        raise
    except (
        OSError, EOFError, ValueError, RuntimeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile,
    ) as error:  # fmt: skip
        raise DataError(f"{path} cannot be decompressed, it may be cut off: {error}") from error
    return raw


def _at_most(file: Any, most: int, path: Path) -> bytes:
    """The decompressed bytes of a file, if there are at most `most` of them."""
    parts, size = [], 0
    while part := file.read(_CHUNK):
        parts.append(part)
        size += len(part)
        if size > most:
            raise DataError(
                f"{path} unpacks to more than {most >> 20} MiB, which is refused: unpack it "
                "yourself and pass the unpacked file"
            )
    return b"".join(parts)


def _decode(raw: bytes, asked: str | None, path: Path) -> tuple[str, str]:
    encoding = asked or encoding_of(raw)
    try:
        text = raw.decode(encoding or "cp1252")
    except UnicodeError as error:
        line = raw.count(b"\n", 0, getattr(error, "start", 0)) + 1
        tried = f"is not {_shown(asked)}" if asked else "has an encoding that was not recognised"
        raise DataError(
            f"{path} cannot be read as a table: line {line} {tried}; name it with --encoding"
        ) from error
    if "\0" in text:
        raise DataError(f"{path} cannot be read as a table: it holds zero bytes, so it is not text")
    return text.removeprefix("\ufeff"), encoding or "cp1252"


def encoding_of(raw: bytes) -> str | None:
    """By the rule above; None for what is neither marked nor UTF-8."""
    for mark, name in _MARKS.items():
        if raw.startswith(mark):
            return name
    start = raw[:4096]
    for first, name in ((1, "utf-16-le"), (0, "utf-16-be")):
        half = start[first::2]
        if len(half) > 1 and 2 * half.count(0) > len(half):
            return name
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return "utf-8"


def separator_of(text: str) -> str:
    whole = len(text) <= _SAMPLE
    sample = text if whole else text[: text.rfind("\n", 0, _SAMPLE) + 1] or text[:_SAMPLE]
    counts = {sep: [len(cells) for _, cells in _records(sample, sep, strict=False)]
              for sep in _CANDIDATES}  # fmt: skip
    if not whole:  # the sample may end within a quoted cell
        counts = {sep: widths[:-1] or widths for sep, widths in counts.items()}
    alike = [sep for sep, widths in counts.items() if len(set(widths)) == 1]
    wide = [sep for sep, widths in counts.items() if widths and widths[0] > 1]
    for chosen in ([sep for sep in alike if sep in wide], wide, alike):
        if chosen:
            return max(chosen, key=lambda sep: counts[sep][0])
    return ","


def _structure(text: str, sep: str, path: Path) -> list[int]:
    """The line at which each row begins; uneven rows and repeated names are errors."""
    header: list[str] = []
    lines: list[int] = []
    try:
        for line, cells in _records(text, sep, strict=True):
            if not header:
                header = [unescape(cell.strip()) for cell in cells]
                if len(header) > MOST_COLUMNS:
                    raise DataError(
                        f"{path} has {len(header):,} columns, and {MOST_COLUMNS:,} are read at "
                        f"most; cells are separated by {SEPARATORS.get(sep, repr(sep))}"
                    )
                continue
            if len(cells) != len(header):
                raise DataError(
                    f"{path}, line {line}: {_cells(len(cells))}, and {len(header)} in the header; "
                    f"they are separated by {SEPARATORS.get(sep, repr(sep))} (--sep names another "
                    "separator; a cell that holds one stands in quotes)"
                )
            lines.append(line)
    except csv.Error as error:
        open_quote = "unexpected end" in str(error)
        what = "a quotation mark is never closed" if open_quote else str(error)
        raise DataError(f"{path} cannot be read as a table: {what}") from error
    if not header:
        raise DataError(f"{path} is empty")
    check_header(header, path)
    return lines


def check_header(header: Sequence[str], path: Path) -> None:
    """An error if a name stands more than once."""
    twice = [name for name, count in Counter(header).items() if count > 1 and name]
    if twice:
        raise DataError(
            f"{path}: {', '.join(map(repr, twice))} "
            f"{'stands' if len(twice) == 1 else 'stand'} more than once in the header; every "
            "column needs a name of its own"
        )


def _check_asked(text: str, sep: str, path: Path) -> None:
    """An error if the given separator leaves one column and another would not."""
    header = next(cells for _, cells in _records(text, sep, strict=False))
    if len(header) == 1 and any(other in header[0] for other in _CANDIDATES):
        raise DataError(
            f"{path}: --sep {sep!r} leaves one column, {header[0]!r}; without --sep the separator "
            "is detected"
        )


def _records(text: str, sep: str, strict: bool) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of every record; blank lines are skipped."""
    reader: Any = csv.reader(io.StringIO(text, newline=""), delimiter=sep, strict=strict)
    line = 1
    for cells in reader:
        if len(cells) > 1 or (cells and cells[0].strip()):
            yield line, cells
        line = reader.line_num + 1


def has_decimal_commas(frame: pd.DataFrame) -> bool:
    """Whether numbers have a decimal comma; an error if other numbers have a point."""
    commas = None
    for name in frame.columns:
        values = frame[name]
        if not is_text(values):
            continue
        cells = values.dropna().astype(str).str.strip()
        marked = cells.str.fullmatch(_WITH_COMMA)
        if marked.any() and 2 * (marked | cells.str.fullmatch(_WHOLE)).sum() >= len(cells):
            commas = commas or (name, cells[marked].iloc[0])
    if commas is None:
        return False
    for name in frame.select_dtypes("float").columns:
        broken = frame[name].dropna() % 1 != 0
        if broken.any():
            point = frame[name].dropna()[broken].iloc[0]
            raise DataError(
                f"column {commas[0]!r} has a comma in its numbers ({commas[1]}) and column "
                f"{name!r} a point ({point:g}): give the decimal mark with --decimal"
            )
    return True


def refuse_points(frame: pd.DataFrame) -> None:
    """An error for points in numbers with decimal commas: 1.234 may be a thousand."""
    for name in frame.columns:
        values = frame[name]
        if not is_text(values):
            continue
        cells = values.astype("string").str.strip()
        point = cells.str.fullmatch(_WITH_POINT).fillna(False).astype(bool)
        both = cells.str.fullmatch(_WITH_COMMA).fillna(False).astype(bool)
        whole = cells.str.fullmatch(_WHOLE).fillna(False).astype(bool)
        if (point | both).any() and 2 * (point | both | whole).sum() >= values.notna().sum():
            rows = (point | both).to_numpy().nonzero()[0].tolist()
            raise DataError(
                f"{fault_at(values, rows)}: {values.iloc[rows[0]]!r} has a point, and numbers in "
                "this file have a decimal comma; remove the separators of thousands, or give "
                "--decimal ."
            )


def _cells(count: int) -> str:
    return f"{count} cell{'s' * (count != 1)}"


def _shown(encoding: str) -> str:
    return {"cp1252": "Windows-1252 (or Latin-1)", "iso8859-1": "Latin-1"}.get(
        encoding, encoding.upper()
    )
