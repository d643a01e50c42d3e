"""Three thousand mutated tables: each ends in a typed error or in the right numbers, none hangs,
and the process stays below 2 GiB.

Run as a script, the file reads tables in a process whose memory is limited; the test starts that.
"Right" is decided by another reader: the `csv` module and `float` on the text that was written. A
packed file has a checksum, so one that is read in spite of a mutation must hold the text as it was.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "support"))  # as a script, too
from most_memory import most_memory

COUNT, SEED = 3000, 11
BUDGET = 2 << 30  # bytes
LIMIT = 5.0  # seconds for one table

HOSTILE_CELLS = (
    "9" * 400, "-" + "9" * 5000, "1e999", "nan", "inf", "-inf", "NA", "", " ", "'", "''", "=1+1",
    "'=1+1", "-a", "@x", "-3.5", "1,5", "1.234,5", "1_000", "0x10", "1e", "--1", "٣", "²", "½",
    "2024-02-30", "0000-00-00", "99999-01-01", "31.12.9999", "2024-01-01T99:99:99", "2262-04-12",
    "1677-09-21 00:12:43.1", "2024-01-01T00:00:00+99:99", "true", "None", "\x1b[31m", "\u202e",
    "👩‍👧", "a" * 5000, "|", ";", "\t", "[1, 2]", "{'a': 1}", "\ufeff", "\x85", "\u2028", "10%",
    "€3", "1 000", "00000000-0000-0000-0000-000000000000", "1" * 30, "-0", "1e-400", ".5", "5.",
    "+7",
)  # fmt: skip
BYTES = (b"", b"\0", b"\xff", b'"', b",", b"\n", b"\r", b"PAR1", b"PK\x03\x04", b"\x1f\x8b", b"''")


def base(chance: random.Random) -> list[list[str]]:
    """A table of 24 rows as text, its header first."""
    rows = []
    for i in range(24):
        day = f"2024-{1 + i % 12:02}-{1 + i:02}"
        kind = ("red", "green", "=blue")[i % 3]
        rows.append([f"k{i}", f"{chance.gauss(0, 3):.3f}", str(i * i % 11), kind, day])
    target = chance.choice((lambda i: f"{i * 7 % 24 / 3:.4f}", lambda i: ("yes", "-no")[i % 2]))
    return [
        ["id", "a", "b", "kind", "day", "y"],
        *([*row, target(i)] for i, row in enumerate(rows)),
    ]


def changed(table: list[list[str]], chance: random.Random) -> None:
    """Some cells, names, rows or columns become others."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        what = chance.random()
        row = chance.randrange(len(table))
        if what < 0.55:
            at = chance.randrange(len(table[row]) or 1)
            table[row][at : at + 1] = [chance.choice(HOSTILE_CELLS)]
        elif what < 0.65:
            at = chance.randrange(1, len(table[0]))
            cell = chance.choice(HOSTILE_CELLS)
            for cells in table[1:]:
                cells[at : at + 1] = [cell] if chance.random() < 0.7 else cells[at : at + 1]
        elif what < 0.75:
            table[row].insert(chance.randrange(len(table[row]) + 1), chance.choice(HOSTILE_CELLS))
        elif what < 0.82 and len(table[row]) > 1:
            table[row].pop(chance.randrange(len(table[row])))
        elif what < 0.9:
            table[0][:] = [chance.choice(table[0]) for _ in table[0]]
        elif what < 0.96:
            del table[max(1, row) :]
        else:
            table[row].extend([""] * chance.choice((10, 1000, 200_000)))


def damaged(raw: bytes, chance: random.Random) -> bytes:
    """Some bytes become others, or go, or come twice."""
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        at = chance.randrange(len(raw) + 1)
        to = min(len(raw), at + chance.choice((1, 1, 4, 40, 400)))
        what = chance.random()
        if what < 0.4:
            raw = raw[:at] + bytes(b ^ (1 << chance.randrange(8)) for b in raw[at : at + 1]) + (
                raw[at + 1 :]
            )  # fmt: skip
        elif what < 0.55:
            raw = raw[:at] + raw[to:]
        elif what < 0.7:
            raw = raw[:to] + raw[at:to] + raw[to:]
        elif what < 0.8:
            raw = raw[:at]
        else:
            raw = raw[:at] + chance.choice(BYTES) + raw[to if what < 0.9 else at :]
    return raw


def packed(raw: bytes, kind: str) -> bytes:
    if kind == "zip":
        held = io.BytesIO()
        with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("t.csv", raw)
        return held.getvalue()
    each = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    return each[kind](raw) if kind in each else raw


def parquet_of(table: list[list[str]], chance: random.Random) -> bytes:
    """The same columns as Parquet, some of another type, with what others write beside them."""
    import decimal

    import pyarrow as pa
    from pyarrow import parquet

    count = len(table) - 1
    makers: tuple[Any, ...] = (
        lambda: pa.array([[1, 2], None] * count)[:count],
        lambda: pa.array([{"u": 1}, {"u": None}] * count)[:count],
        lambda: pa.array([[("k", 1)]] * count, pa.map_(pa.string(), pa.int64())),
        lambda: pa.array([decimal.Decimal("9" * 60)] * count, pa.decimal256(70, 0)),
        lambda: pa.array([i * 10**17 for i in range(count)], pa.timestamp("us", "UTC")),
        lambda: pa.array([2**52] * count, pa.timestamp("s")),
        lambda: pa.array(range(count), pa.duration("ns")),
        lambda: pa.array(range(count), pa.date32()),
        lambda: pa.array(range(count), pa.time64("ns")),
        lambda: pa.array([b"\xff\0"] * count, pa.binary()),
        lambda: pa.array(["a", None] * count)[:count].dictionary_encode(),
        lambda: pa.array([float("inf"), float("nan"), 1.0] * count)[:count],
        lambda: pa.array([2**64 - 1 - i for i in range(count)], pa.uint64()),
        lambda: pa.array([None] * count, pa.null()),
        lambda: pa.array([True, None, False] * count)[:count],
        lambda: pa.array([str(i) for i in range(count)], pa.large_string()),
    )
    columns, names = [], []
    for j, name in enumerate(table[0]):
        cells = [row[j] if j < len(row) else "" for row in table[1:]]
        try:
            columns.append(pa.array([float(cell) for cell in cells]))
        except ValueError:
            columns.append(pa.array(cells))
        names.append(name)
        if chance.random() < 0.12:
            columns[-1] = chance.choice(makers)()
    if chance.random() < 0.1:
        names[chance.randrange(len(names))] = chance.choice(names)
    made = pa.table(columns, names=names)
    if chance.random() < 0.2:
        made_of = {"kind": "range", "name": None, "start": 0, "stop": 3, "step": 0}
        rest = {"column_indexes": [], "columns": [], "pandas_version": "2"}
        said = [
            {},
            [],
            {"index_columns": ["y"], "columns": []},
            {"index_columns": [made_of]} | rest,
        ]
        what = chance.choice((b"\xff", *(json.dumps(one).encode() for one in said)))
        made = made.replace_schema_metadata({b"pandas": what})
    held = io.BytesIO()
    parquet.write_table(made, held, compression=chance.choice(("snappy", "gzip", "none", "zstd")))
    return held.getvalue()


def same(cell: str, value: float, fill: float | None) -> bool:
    """Whether another reader takes a cell for the same number."""
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        return fill is not None and value == fill
    return math.isclose(number, value, rel_tol=1e-12)


def check_text(text: str, schema: Any, frame: Any, x: Any) -> None:
    """The numbers of a table are those that `csv` and `float` read."""
    sep = schema.dialect.sep
    records = list(csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), delimiter=sep))
    kept = [cells for cells in records if len(cells) > 1 or (cells and cells[0].strip())]
    header = [plain(name.strip()) or f"Unnamed: {j}" for j, name in enumerate(kept[0])]
    assert len(kept) - 1 >= len(frame)
    if len(kept) - 1 != len(frame) or schema.dialect.decimal != ".":
        return  # rows without a target were left out, or commas are decimal
    at = 0
    for column in schema.columns:
        cells = [row[header.index(column.name)] for row in kept[1:]]
        numbers = x[:, at : at + column.width]
        at += column.width
        if column.categories is None and column.parts is None:
            for cell, value in zip(cells, numbers[:, 0], strict=True):
                assert same(plain(cell), float(value), column.fill), (column.name, cell, value)
        elif column.categories is not None and frame[column.name].dtype == object:
            for cell, hot in zip(cells, numbers, strict=True):
                if hot.any():
                    category = column.categories[int(hot.argmax())]
                    assert category in (plain(cell).strip(), plain(cell.strip()), "missing")


def plain(cell: str) -> str:
    """Without the apostrophe before a sign that a spreadsheet would run."""
    left = cell.lstrip("'")
    return cell[1:] if left != cell and left[:1] in tuple("=+-@\t\r\n") and left else cell


def one(seed: int, number: int, folder: Path) -> str:
    """Make, mutate and read one table; what came of it."""
    from doxa.errors import DoxaError
    from doxa.tables.files import open_table
    from doxa.tables.reading import read_records
    from doxa.tables.schema import TableSpec, inferred, read_dataset

    chance = random.Random(f"{seed} {number}")
    table = base(chance)
    mode = chance.choice(("benign", "cells", "cells", "cells", "bytes", "both"))
    kind = chance.choice(("csv", "csv", "tsv", "semicolon", "gz", "bz2", "xz", "zip", "parquet"))
    if mode in ("cells", "both"):
        changed(table, chance)
    text = None
    if kind == "parquet":
        table[0] = table[0][:50]  # a column takes a while to write
        raw = parquet_of(table, chance)
    else:
        held = io.StringIO()
        sep = {"tsv": "\t", "semicolon": ";"}.get(kind, ",")
        ends = chance.choice(("\n", "\r\n"))
        quoting = chance.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL))
        csv.writer(held, delimiter=sep, lineterminator=ends, quoting=quoting).writerows(table)
        text = held.getvalue()
        encoding = chance.choice(("utf-8", "utf-8", "utf-8-sig", "utf-16"))
        raw = packed(text.encode(encoding, "surrogatepass"), kind)
    if mode in ("bytes", "both"):
        raw = damaged(raw, chance)
        if kind not in ("gz", "bz2", "xz", "zip"):
            text = None  # there is no checksum: what it holds now is another table
    path = folder / f"t{number}.{'parquet' if kind == 'parquet' else 'csv'}"
    path.write_bytes(raw)
    asked = TableSpec(
        "y", index=chance.choice((None, "id")), missing=chance.choice(("error", "impute")),
        drop=(), likelihood=chance.choice((None,) * 6 + ("gaussian", "categorical")),
    )  # fmt: skip
    try:
        if chance.random() < 0.2:
            read_records(path)
        frame, schema = read_dataset(path, asked)
        x, _ = schema.features(frame)
        y = schema.targets(frame)
        again = inferred(open_table(path, asked.index).frame, asked, schema.dialect)
    except DoxaError as error:
        assert 0 < len(str(error)) < 20_000
        assert mode != "benign" or kind == "parquet" or asked.likelihood is not None, error
        return f"{kind} {type(error).__name__}"
    except BaseException as error:
        raise AssertionError(f"number {number}: {kind}, {mode}: {error!r}") from error
    finally:
        path.unlink()
    import numpy as np

    assert x.shape == (len(frame), schema.inputs) and len(y) == len(frame) == len(x)
    assert np.isfinite(x).all() and np.isfinite(np.asarray(y, dtype=np.float64)).all()
    assert again.inputs == schema.inputs or asked.missing == "impute"
    if text is not None:
        check_text(text, schema, frame, x)
    return f"{kind} right"


class Late(BaseException):
    """Nothing takes it for an error of a file."""


def work(seed: int, start: int, count: int) -> None:
    """Read tables in this process, with little memory, and say what came of them."""
    import resource

    import doxa.tables.schema

    assert doxa.tables.schema
    one(seed, 0, Path(tempfile.mkdtemp()))  # what is imported late is imported now

    def late(*_: object) -> None:
        raise Late(f"no end after {LIMIT} s")

    signal.signal(signal.SIGALRM, late)
    pages = Path("/proc/self/statm")
    if pages.exists():
        whole, resident = (4096 * int(n) for n in pages.read_text().split()[:2])
        room = whole + BUDGET - resident
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
    found: Counter[str] = Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(start, start + count):
            began = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, LIMIT)
            try:
                found[one(seed, number, Path(folder))] += 1
            except BaseException:
                sys.stderr.write(f"table {number} of seed {seed}\n")
                raise
            signal.setitimer(signal.ITIMER_REAL, 0)
            slowest = max(slowest, time.monotonic() - began)
    peak = most_memory()
    assert peak < BUDGET, peak
    right = sum(n for what, n in found.items() if what.endswith("right"))
    sys.stdout.write(f"{sum(found.values())} {right} {peak} {slowest:.2f} {dict(found)}\n")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="a clock interrupts a read that hangs")
def test_mutated_tables_end_in_a_typed_error_or_the_right_numbers() -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    command = [sys.executable, __file__, str(SEED), "0", str(COUNT)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    count, right = map(int, ended.stdout.split()[:2])
    assert count == COUNT
    assert 0.15 * COUNT < right < 0.7 * COUNT  # both ways are tried


if __name__ == "__main__":
    work(*map(int, sys.argv[1:]))
