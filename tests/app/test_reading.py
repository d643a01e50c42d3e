"""How files are written: recognised by the documented rules, said, and overruled by flags."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zipfile
from pathlib import Path

import numpy as np
import pytest

from doxa.errors import DataError
from doxa.tables.files import open_table
from doxa.tables.reading import Dialect, place_of

pd = pytest.importorskip("pandas")

TRUTH = pd.DataFrame(
    {"größe": [1.5, -2.25, 3.0], "stadt": ["Köln", "a, b; c", "Bern"], "n": [7, 8, 9]}
)


def written(path: Path, sep: str = ",", decimal: str = ".", encoding: str = "utf-8") -> Path:
    TRUTH.to_csv(path, sep=sep, decimal=decimal, encoding=encoding, index=False)
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "cp1252"])
@pytest.mark.parametrize(
    ("sep", "decimal"), [(",", "."), (";", "."), (";", ","), ("\t", ","), ("|", ".")]
)
def test_every_way_of_writing_gives_the_same_table(tmp_path, sep, decimal, encoding) -> None:
    path = written(tmp_path / "t.csv", sep, decimal, encoding)
    table = open_table(path)
    frame, found, notes = table.frame, table.dialect, table.notes
    assert frame.reset_index(drop=True).equals(TRUTH)
    assert list(frame.index) == [2, 3, 4] and place_of(frame.index, 1) == "line 3"
    assert found == Dialect(sep, decimal, encoding)
    plain = (sep, decimal, encoding.removesuffix("-sig")) == (",", ".", "utf-8")
    assert bool(notes) != plain
    assert not notes or all(
        (word in notes[0]) == holds
        for word, holds in (
            ("semicolons", sep == ";"), ("tabs", sep == "\t"), ("decimal commas", decimal == ","),
            ("Windows-1252", encoding == "cp1252"), ("UTF-16", encoding.startswith("utf-16")),
        )
    )  # fmt: skip


@pytest.mark.parametrize("pack", ["gz", "bz2", "xz", "zip", "unnamed"])
def test_a_packed_file_is_unpacked_whatever_it_is_called(tmp_path, pack) -> None:
    raw = written(tmp_path / "t.csv", ";").read_bytes()
    packers = {"gz": gzip, "bz2": bz2, "xz": lzma, "unnamed": gzip}
    path = tmp_path / ("p.csv" if pack == "unnamed" else f"p.csv.{pack}")
    if pack == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("t.csv", raw)
    else:
        path.write_bytes(packers[pack].compress(raw))
    assert open_table(path).frame.reset_index(drop=True).equals(TRUTH)
    if pack == "gz":
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(DataError, match="cut off"):
            open_table(path)


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    text = 'a,note\n\n1,"two\nlines"\n2,one\n\n3,"x ""y"" z"\n'
    (tmp_path / "t.csv").write_text(text)
    frame = open_table(tmp_path / "t.csv").frame
    starts = {name: k + 1 for k, line in enumerate(text.split("\n")) for name in line[:1]}
    assert list(frame.index) == [starts["1"], starts["2"], starts["3"]] == [3, 5, 7]
    assert frame["note"].tolist() == ["two\nlines", "one", 'x "y" z']


@pytest.mark.parametrize(
    ("text", "sep", "decimal", "columns"),
    [
        ("x\n1,5\n2,25\n", ";", ",", 1),  # one column
        ("x\n1.5\n2.25\n", ",", ".", 1),
        ("a;b\n1;2\n3;4\n", ";", ".", 2),  # nothing to tell a decimal mark by
        ("a;b\n1;x,y\n3;z,1\n", ";", ".", 2),  # text with commas is no number
        ("a;b\n1,5;x\n2;y\n3;z\n", ";", ",", 2),  # one comma among whole numbers
        ("a,b;c,d\n1,2;3,4\n", ",", ".", 3),  # most cells
        ("a,b\n1,2\n", ",", ".", 2),
        ("a|b\n1|2,5\n", "|", ",", 2),
    ],
)
def test_the_rule_for_separator_and_decimal_mark(tmp_path, text, sep, decimal, columns) -> None:
    (tmp_path / "t.csv").write_text(text)
    table = open_table(tmp_path / "t.csv")
    frame, found = table.frame, table.dialect
    assert found == Dialect(sep, decimal, "utf-8")
    assert len(frame.columns) == columns


def test_flags_overrule_recognition(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("a;b\n1,234;é\n".encode())
    frame = open_table(path).frame
    assert frame["a"].tolist() == [1.234]
    frame = open_table(path, dialect=Dialect.asked("semicolon", "point", "latin-1")).frame
    assert frame["a"].tolist() == ["1,234"] and frame["b"].tolist() == ["Ã©"]
    path.write_text("a b\n1 2\n")
    assert list(open_table(path, dialect=Dialect.asked("space", None, None)).frame.columns) == [
        "a",
        "b",
    ]
    for bad in (("and", None, None), (None, ";", None), (None, None, "utf-9"), (None, None, "hex")):
        with pytest.raises(DataError, match=r"--sep takes|--decimal takes|unknown --encoding"):
            Dialect.asked(*bad)


def test_what_nobody_can_tell_is_an_error_that_names_the_flag(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a;b\n1,5;0.5\n2,5;1.5\n")
    with pytest.raises(DataError, match=r"'a' has a comma.*\(1,5\).*'b' a point.*--decimal"):
        open_table(path)
    path.write_text("a;b\n1,5;1.234\n2,5;12\n")
    with pytest.raises(DataError, match=r"column 'b', line 2: '1\.234' has a point"):
        open_table(path, dialect=Dialect.asked(None, ",", None))
    path.write_bytes(b"a,b\n1,\x81\x8d\n")
    with pytest.raises(DataError, match=r"line 2 .*--encoding"):
        open_table(path)
    with pytest.raises(DataError, match="line 2 is not UTF-8"):
        open_table(path, dialect=Dialect.asked(None, None, "utf8"))


def test_a_large_file_is_read_by_its_beginning(tmp_path: Path) -> None:
    n = 20_000  # far past the sample
    text = "id;x;note\n" + "".join(f'{k};{k / 8:.3f};"a;\nb"\n' for k in range(n))
    (tmp_path / "t.csv").write_text(text)
    table = open_table(tmp_path / "t.csv")
    frame, found = table.frame, table.dialect
    assert found.sep == ";" and len(frame) == n
    assert np.array_equal(frame.index, 2 + 2 * np.arange(n))
