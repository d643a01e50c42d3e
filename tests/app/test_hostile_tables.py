"""Tables that were made to hang, to fill the memory or to be run: a typed error, at once."""

from __future__ import annotations

import bz2
import csv
import gzip
import lzma
import os
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shell import doxa

from doxa import store
from doxa.data import Tasks, text_files
from doxa.data.text_files import MOST_UNPACKED, escape, unescape
from doxa.errors import DataError, DoxaError, MemoryBudgetError, StoreError
from doxa.tables import files as tables
from doxa.tables.reading import MOST_COLUMNS
from doxa.tables.schema import TableSpec, read_dataset

pd = pytest.importorskip("pandas")

WITHIN = 20  # seconds on a busy machine; each takes three at most on an idle one


class Late(BaseException):
    """Nothing takes it for an error of a file."""


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """No read may hang."""

    def late(*_: object) -> None:
        raise Late(f"no end after {WITHIN} s")

    if not hasattr(signal, "alarm"):
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(WITHIN)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def repeated(count: int) -> bytes:
    """A table of so many bytes, all rows alike."""
    return b"a,y\n" + b"1,2\n" * (count // 4)


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zip"])
def test_a_file_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """18 parts of a sixteenth of the limit; for quickness the limit itself is one of gzip only."""
    limit = MOST_UNPACKED if kind == "gz" else MOST_UNPACKED // 16
    monkeypatch.setattr(text_files, "MOST_UNPACKED", limit)
    part = repeated(limit // 16)
    path = tmp_path / "t.csv"
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("t.csv", part * 18)
    else:
        pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
        path.write_bytes(pack[kind](part) * 18)
    assert path.stat().st_size < limit / 50
    with pytest.raises(DataError, match=f"unpacks to more than {limit >> 20} MiB"):
        tables.open_table(path)
    small = tmp_path / "small.csv.gz"  # far above 50 times its size, and below the limit
    small.write_bytes(gzip.compress(repeated(1 << 20)))
    assert len(tables.open_table(small)) == (1 << 18)


def test_a_parquet_file_of_too_many_numbers_is_refused(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    zeros = arrow.table({"x": np.zeros(1 << 22), "y": np.zeros(1 << 22)})
    with parquet.ParquetWriter(tmp_path / "t.parquet", zeros.schema) as writer:
        for _ in range(5):
            writer.write_table(zeros)
    assert (tmp_path / "t.parquet").stat().st_size < MOST_UNPACKED / 50
    with pytest.raises(MemoryBudgetError, match=r"20,971,520 rows of 2 columns, 0\.312 GiB"):
        tables.open_table(tmp_path / "t.parquet")


def test_an_encrypted_archive_is_said_to_be_one(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("t.csv", "a,y\n1,2\n")
    raw = bytearray(path.read_bytes())
    for magic, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        raw[raw.find(magic) + flags] |= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match="is encrypted"):
        tables.open_table(path)


@pytest.mark.parametrize("digits", [309, 400, 5000])
@pytest.mark.parametrize("column", ["x", "y"])
def test_a_number_of_hundreds_of_digits_is_named(tmp_path: Path, digits: int, column: str) -> None:
    cells = {"x": [str(i % 7) for i in range(30)], "y": [str(i / 7) for i in range(30)]}
    cells[column][3] = "9" * digits
    rows = zip(cells["x"], cells["y"], strict=True)
    (tmp_path / "t.csv").write_text("x,y\n" + "".join(f"{x},{y}\n" for x, y in rows))
    with pytest.raises(DataError, match=f"column '{column}', line 5: .* is not finite") as found:
        read_dataset(tmp_path / "t.csv", TableSpec("y"))
    assert len(str(found.value)) < 300


@pytest.mark.parametrize("target", ["list", "struct"])
def test_nested_parquet_columns_are_no_inputs_and_no_target(tmp_path: Path, target: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    columns = {
        "list": [None, [1, 2]] * 20, "struct": [{"u": 1}, None] * 20,
        "x": np.arange(40.0) ** 2, "y": np.arange(40.0) ** 3,
    }  # fmt: skip
    parquet.write_table(arrow.table(columns), path)
    frame, schema = read_dataset(path, TableSpec("y"))
    assert [column.name for column in schema.columns] == ["x"]
    assert schema.features(frame)[0].tolist() == [[x] for x in (np.arange(40.0) ** 2).tolist()]
    assert schema.targets(frame).tolist() == (np.arange(40.0) ** 3).tolist()
    columns |= {"list": [[1], [1, 2]] * 20, "struct": [{"u": 1}, {"u": 2}] * 20}
    parquet.write_table(arrow.table(columns), path)
    with pytest.raises(DataError, match=f"column '{target}' holds several values"):
        read_dataset(path, TableSpec(target))


def test_names_that_stand_twice(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    columns = [arrow.array(np.arange(40.0))] * 3
    parquet.write_table(arrow.table(columns, names=["x", "x", "y"]), path)
    with pytest.raises(DataError):
        tables.open_table(path)
    with pytest.raises(DataError, match="2 columns named 'x'"):
        store.parquet(path, "y")
    for header in ("x, x,y", "=x,'=x,y"):  # also where only spaces or an apostrophe differ
        (tmp_path / "t.csv").write_text(f"{header}\n1,2,3\n4,5,6\n")
        with pytest.raises(DataError, match="more than once"):
            tables.open_table(tmp_path / "t.csv")


@pytest.mark.parametrize("text", ["," * 2_000_000, "," * 2_000_000 + "\n1\n", '"' * 2_000_000])
def test_a_line_of_separators_is_no_table(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=r"columns, and 100,000 are read|cannot be read"):
        tables.open_table(tmp_path / "t.csv")
    assert MOST_COLUMNS == 100_000


@pytest.mark.parametrize("text", ['"\n"', '"",""', "\x1c", ";\n;", '" "\n" "'])
def test_a_file_of_empty_cells_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError):
        read_dataset(tmp_path / "t.csv", TableSpec("y"))


def test_pipes_devices_and_folders_are_refused(tmp_path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("there are no pipes here")
    (tmp_path / "d.csv").write_text("a,y\n" + "".join(f"{i},{i / 3}\n" for i in range(40)))
    for name in ("t.csv", "t.parquet", "t.npy"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "link.csv").symlink_to(tmp_path / "t.csv")
    for name in ("t.csv", "t.parquet", "link.csv", "folder.csv"):
        with pytest.raises(DataError, match=r"no regular file|is a folder"):
            tables.open_table(tmp_path / name)
    with pytest.raises(DataError, match="no regular file"):
        store.parquet(tmp_path / "t.parquet", "y")
    (tmp_path / "tasks").mkdir()
    os.mkfifo(tmp_path / "tasks" / "one.csv")
    with pytest.raises(DataError, match="no regular file"):
        Tasks.from_folder(tmp_path / "tasks", "y")
    with pytest.raises(DataError, match="no regular file"):
        tables.open_table("/dev/zero")
    run = tmp_path / "run"
    fit = ("fit", tmp_path / "d.csv", "-t", "y", "-m", "linear", "--out", run, "--allow-status")
    assert "no regular file" in doxa(*fit, "--test", tmp_path / "t.csv", code=2)
    doxa(*fit)
    for words in (("report", run, "--test"), ("predict", run), ("report", run, "--train")):
        assert "no regular file" in doxa(*words, tmp_path / "t.csv", code=2)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="'=+-@\t\r\n a1.e5;,\"é", max_size=8))
def test_every_text_comes_back_and_none_is_run(text: str) -> None:
    written = escape(text)
    assert unescape(written) == text
    try:
        float(text)
    except ValueError:
        assert not written.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
    else:
        assert written == text or text != text.strip()


def test_text_in_a_written_table_is_read_as_it_was(tmp_path: Path) -> None:
    """In cells, names of rows and names of columns; numbers have no apostrophe."""
    texts = ["=1+1", "-a", "@x", "-3.5", "+1e5", "'tis", "'=a", "''@b", "a=b", "=HYPERLINK(1)"]
    frame = pd.DataFrame(
        {"=text": texts, "-number": np.arange(10) - 5.5, "@kind": pd.Categorical(texts)},
        index=pd.Index(texts[::-1], name="+id"),
    )
    for name in ("t.csv", "t.tsv"):
        tables.write_table(frame, tmp_path / name)
        back = tables.open_table(tmp_path / name, "+id").frame
        assert list(back.index) == texts[::-1]
        assert list(back.columns) == ["=text", "-number", "@kind"]
        assert back["=text"].tolist() == back["@kind"].tolist() == texts
        assert back["-number"].tolist() == frame["-number"].tolist()
    with (tmp_path / "t.csv").open(newline="") as file:
        header, first, *_ = csv.reader(file)
    assert header == ["'+id", "'=text", "'-number", "'@kind"]
    assert first == ["'=HYPERLINK(1)", "'=1+1", "-5.5", "'=1+1"]
    assert list(frame["=text"]) == texts  # what was given is not changed


@pytest.mark.parametrize("length", [250, 256, 5000])
def test_a_name_that_is_too_long_is_an_error_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Or it works: names of 250 characters fit, those of folders too, whose temporary ones beside
    them are shortened."""
    monkeypatch.chdir(tmp_path)
    Path("d.csv").write_text("a,y\n" + "".join(f"{i},{i * i % 17 / 3}\n" for i in range(40)))
    long = "r" * length
    words = "choose a shorter one"
    fits = length <= 255
    fit = ("fit", "d.csv", "-t", "y", "-m", "linear", "--out", long)
    keep = ("compare", "d.csv", "-t", "y", "--methods", "linear", "--keep", "best", "--out", long)
    if fits:
        doxa(*fit, code=0)
    else:
        assert words in doxa(*fit, code=2)
        assert words in doxa(*keep, code=2)
    for name in ("r" * (length - 4) + ".csv", "r" * (length - 8) + ".parquet"):
        if fits:
            tables.write_table(pd.DataFrame({"a": [1.0]}), Path(name))
            assert len(tables.open_table(name)) == 1
        else:
            with pytest.raises(StoreError, match=words):
                tables.write_table(pd.DataFrame({"a": [1.0]}), Path(name))
            with pytest.raises(DoxaError):
                tables.open_table(name)
    if not fits:
        for start in (("active", "start", "d.csv", "-t", "y", "--out"), ("design",)):
            assert words in doxa(*start, long, code=2)
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith("r")) == ["d.csv"]
