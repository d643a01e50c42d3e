"""Reading files: every fault names the place; the index is carried."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from doxa.errors import DataError, StoreError
from doxa.tables import files as tables
from doxa.tables import reading

pd = pytest.importorskip("pandas")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_csv_and_its_parquet_are_the_same_table(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1.5, 2.5], "b": ["x", "y"]}, index=["r1", "r2"])
    frame.to_csv(tmp_path / "t.csv")
    frame.to_csv(tmp_path / "t.csv.gz")
    frame.to_parquet(tmp_path / "t.parquet")
    for name in ("t.csv", "t.csv.gz", "t.parquet"):
        read = tables.open_table(tmp_path / name).frame
        assert list(read.index) == ["r1", "r2"]
        assert list(read.columns) == ["a", "b"]
        assert read["a"].tolist() == [1.5, 2.5]


def test_a_named_index_is_no_input(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "id,a\nk7,1\nk9,2\n")
    read = tables.open_table(path, "id").frame
    assert list(read.index) == ["k7", "k9"]
    assert list(read.columns) == ["a"]
    without = tables.open_table(write(path, "a\n1\n2\n"), "id", index_needed=False).frame
    assert list(without.index) == [2, 3] and without.index.name == "line"
    with pytest.raises(DataError, match="did you mean 'id'"):
        tables.open_table(write(path, "id,a\nk7,1\n"), "idd")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "", "is empty"),
        ("t.csv", "\n\n", "is empty"),
        ("t.csv", "a,b\n", "no rows"),
        ("t.csv", "a,b\n1,2\n3,4,5,6\n", "line 3: 4 cells, and 2 in the header"),
        ("t.parquet", "not parquet at all", "cannot be read as a table"),
        ("t.xlsx", "whatever", "use .csv"),
    ],
)
def test_an_unreadable_file_is_one_clear_error(tmp_path: Path, name, text, message) -> None:
    with pytest.raises(DataError, match=message):
        tables.open_table(write(tmp_path / name, text))


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        tables.open_table(tmp_path / "none.csv")
    with pytest.raises(DataError, match="folder"):
        tables.open_table(tmp_path)


def test_binary_rubbish_as_csv(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(bytes(range(128, 256)) * 4)
    with pytest.raises(DataError, match="cannot be read"):
        tables.open_table(tmp_path / "t.csv")


def test_a_cell_that_is_no_number_is_named() -> None:
    with pytest.raises(DataError, match=r"'age', row 2 \(2 in all\): 'abc' is not a number"):
        reading.numbers_of(pd.Series(["1", "2", "abc", "x"], name="age"))
    with pytest.raises(DataError, match=r"column 'age', row 1: 'inf' is not finite"):
        reading.numbers_of(pd.Series([1.0, np.inf], name="age"))
    with pytest.raises(DataError, match=r"missing values: column 'age', row 'k2' \(2 in all\)"):
        reading.refuse_gaps(pd.DataFrame({"age": [1.0, None, None]}, ["k1", "k2", "k3"]), ["age"])


def test_labels_do_not_depend_on_how_the_file_typed_them() -> None:
    assert {reading.label_of(v) for v in (1, 1.0, "1", np.int64(1), np.float32(1), " 1 ")} == {"1"}
    assert reading.label_of(True) == reading.label_of(np.True_) == "True"
    assert reading.label_of(0.5) == "0.5"


def test_a_table_is_written_with_its_index(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0]}, index=pd.Index(["u", "v"], name="id"))
    for name in ("deep/t.csv", "t.parquet"):
        tables.write_table(frame, tmp_path / name)
        back = tables.open_table(tmp_path / name, "id").frame
        assert list(back.index) == ["u", "v"]
    with pytest.raises(StoreError, match="written as"):
        tables.check_writable(tmp_path / "t.json")
    with pytest.raises(StoreError, match="is a folder"):
        (tmp_path / "d.csv").mkdir()
        tables.check_writable(tmp_path / "d.csv")
