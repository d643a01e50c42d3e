"""Typical mistakes in tables, made on purpose: each is one line that names what is wrong, where and
what to do (exit code 2), or has a documented result (exit code 0) that is said."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from shell import doxa

pd = pytest.importorskip("pandas")

ROWS = 24
RNG = np.random.default_rng(0)


def good() -> pd.DataFrame:
    frame = pd.DataFrame({"a": RNG.normal(5, 1, ROWS).round(3), "b": RNG.normal(0, 1, ROWS)})
    frame["c"] = RNG.choice(["red", "blue"], ROWS)
    frame["y"] = (2 * frame["a"] + RNG.normal(size=ROWS)).round(3)
    return frame


GOOD = good()


def csv(frame: pd.DataFrame = GOOD, **options: object) -> str:
    return frame.to_csv(index=False, **options)


def column(*cells: object, name: str = "a") -> str:
    """The good table with other cells, repeated, in one column."""
    return csv(GOOD.assign(**{name: [cells[k % len(cells)] for k in range(ROWS)]}))


def cell(row: int, name: str, value: object) -> str:
    """The good table with one other cell, at line row + 2."""
    frame = GOOD.astype(object)
    frame.loc[row, name] = value
    return csv(frame)


# file: what is in it; the words after `doxa fit FILE -t y`; the exit code; what is said
FITS: dict[str, tuple[str | bytes, list[str], int, str]] = {
    "empty": ("", [], 2, "t.csv is empty"),
    "only blank lines": ("\n \n", [], 2, "t.csv is empty"),
    "header only": ("a,b,c,y\n", [], 2, "has a header but no rows"),
    "wrong --sep": (csv(), ["--sep", ";"], 2, "leaves one column, 'a,b,c,y'; without --sep"),
    "semicolons": (csv(sep=";"), [], 0, "t.csv is separated by semicolons"),
    "semicolons, decimal commas": (csv(sep=";", decimal=","), [], 0, "with decimal commas"),
    "bars": (csv(sep="|"), [], 0, "separated by bars"),
    "decimal commas between commas": (
        column("1,5", "2,5"), [], 2, r"'a', line 2 \(24 in all\): '1,5' is not .*--decimal"
    ),
    "both decimal marks": (
        csv(GOOD.astype({"a": str}).assign(a=["1,5", "2,5"] * 12), sep=";"), [], 2,
        "'a' has a comma.*'b' a point.*--decimal",
    ),
    "thousands": (column("1,234", "11,234"), [], 2, "separators of thousands"),
    "millions": (column("1,234,567", "7,654,321"), [], 2, "'1,234,567' .*separators of thousands"),
    "percent": (column("12%", "13.5%"), [], 2, r"line 2 \(24 in all\): '12%' is .*percent signs"),
    "currency": (column("$5", "$7.25"), [], 2, "'\\$5' is not a number; remove the currency"),
    "latin-1": (csv(GOOD.assign(c=["é", "ü"] * 12)).encode("latin-1"), [], 0, "Windows-1252"),
    "utf-16": (csv().encode("utf-16"), [], 0, "encoded in UTF-16"),
    "wrong --encoding": (
        csv(GOOD.assign(c=["é", "ü"] * 12)).encode("latin-1"), ["--encoding", "utf-8"], 2,
        "line 2 is not UTF-8; name it with --encoding",
    ),
    "unknown encoding": (csv(), ["--encoding", "utf-88"], 2, "unknown --encoding 'utf-88'"),
    "binary": (bytes(range(1, 256)) * 9, [], 2, "cannot be read as a table: .*--encoding"),
    "zero bytes": (b"a,y\n1,\x00\x00\x01\x02\n", [], 2, "zero bytes"),
    "a long row": ("a,b,y\n1,2,3\n4,5,6,7\n", [], 2, "line 3: 4 cells, and 3 in the header"),
    "a short row": ("a,b,y\n1,2,3\n4,5\n", [], 2, "line 3: 2 cells, and 3 in the header"),
    "row names without a header": ("a,y\nr1,1,2\nr2,3,4\n", [], 2, "line 2: 3 cells, and 2"),
    "an open quote": ('a,b,y\n1,"2,3\n4,5,6\n', [], 2, "a quotation mark is never closed"),
    "a header twice": ("a,y,a\n1,2,3\n", [], 2, "'a' stands more than once in the header"),
    "spaces make it twice": ("a,y, a\n1,2,3\n", [], 2, "'a' stands more than once"),
    "spaces in names": (csv().replace("a,b,c,y", " a ,b , c,y "), [], 0, "3 input columns"),
    "gaps": (
        csv(GOOD.mask(GOOD["b"] > 1)), [], 2,
        r"column 'y', line \d+.*column 'a', line .*column 'b'.*column 'c'.*--missing impute",
    ),
    "NaN as text": (cell(1, "a", "NaN"), [], 2, "missing values: column 'a', line 3"),
    "N/A, imputed": (
        cell(1, "a", "N/A"), ["--missing", "impute"], 0, "'a': missing cells are filled"
    ),
    "a question mark": (cell(1, "a", "?"), [], 2, "line 3: '\\?' .*leave the cell empty"),
    "unknown --missing": (csv(), ["--missing", "drop"], 2, "--missing takes error or impute"),
    "infinite": (cell(1, "a", "inf"), [], 2, "column 'a', line 3: 'inf' is not finite"),
    "a word among numbers": (cell(4, "a", "oops"), [], 2, "'a', line 6: 'oops' is not a number"),
    "half numbers, half words": (column("1", "x"), [], 2, r"line 3 \(12 in all\): 'x' is not"),
    "huge whole numbers": (column("9" * 25, "8" * 25), [], 0, "3 input columns"),
    "true and false as text": (column("true", "False"), [], 0, "'a' is categorical: 2"),
    "yes and no": (column("yes", "no"), [], 0, "'a' is categorical: 2 categories"),
    "ISO dates": (column("2024-01-30", "2024-02-29"), [], 0, "'a' holds dates"),
    "day first": (column("30.01.2024", "01.02.2024"), [], 0, r"dates \(day first\)"),
    "day or month": (
        column("03/04/2024", "05/06/2024"), [], 0, "'a' dropped: dates such as '03/04/2024', .*"
    ),
    "no such date": (column("2024-01-30", "2024-02-30"), [], 2, "'2024-02-30' is not a date"),
    "a bad date": (
        column("2024-01-30", "2024-01-31", "soon"), [], 2, "'soon' is not a date .*--drop"
    ),
    "an id": (csv(GOOD.assign(id=range(7, 7 + ROWS))), [], 0, "'id' dropped: an id"),
    "a constant column": (column(3), [], 0, "'a' dropped: constant"),
    "nothing left": ("a,y\n" + "1,2\n1,3\n" * 3, [], 2, "no input column is left; .* dropped"),
    "a target mistyped": (csv(), ["-t", "yy"], 2, "no column 'yy'; did you mean 'y'"),
    "a target in another case": (csv(), ["-t", "Y"], 2, "no column 'Y'; did you mean 'y'"),
    "a target with gaps": (cell(1, "y", ""), [], 2, "missing values: column 'y', line 3"),
    "a target with gaps, imputed": (
        cell(1, "y", ""), ["--missing", "impute"], 0, r"1 row dropped: .*\(the first: line 3\)"
    ),
    "a constant target": (column(2.5, name="y"), [], 2, "'y' is 2.5 in every row: there is noth"),
    "one class": (column("k", name="y"), [], 2, "one class only"),
    "names as a target": (
        csv(GOOD.assign(y=[f"n{k}" for k in range(ROWS)])), [], 2, "'y' has 24 classes in 24 rows"
    ),
    "a date as a target": (column("2024-01-30", "2024-01-31", name="y"), [], 2, "holds dates"),
    "the target dropped": (csv(), ["--drop", "y"], 2, "'y' is the target and cannot be dropped"),
    "unknown columns dropped": (csv(), ["--drop", "d", "--drop", "e"], 2, "no columns 'd', 'e'; "),
    "an unknown index": (csv(), ["--index", "key"], 2, "no column 'key'"),
    "an index twice": (column("k1", "k2"), ["--index", "a"], 0, "not unique: 22 rows repeat"),
    "numbers of words": (csv(), ["--numeric", "c"], 2, "column 'c', line 2 .*is not a number"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", FITS)
def test_a_table_to_fit(mistake: str, tmp_path: Path) -> None:
    contents, words, code, said = FITS[mistake]
    path = tmp_path / "t.csv"
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    target = [] if "-t" in words else ["-t", "y"]
    linear = ["-m", "linear", "-o", tmp_path / "run"]
    heard = doxa("fit", path, *target, *linear, *words, code=code)
    assert re.search(said, heard), heard
    assert (tmp_path / "run").exists() == (code == 0)
    assert not (tmp_path / "run.checkpoint").exists()


def test_a_file_that_is_no_table(tmp_path: Path) -> None:
    def fit(path: Path, said: str, code: int = 2) -> None:
        heard = doxa("fit", path, "-t", "y", "-m", "linear", "-o", tmp_path / "run", code=code)
        assert said in heard, heard

    fit(tmp_path / "none.csv", "does not exist")
    fit(tmp_path, "has no file that ends with .parquet or .pq")  # a folder of such files is a table
    (tmp_path / "t.xlsx").write_text("whatever")
    fit(tmp_path / "t.xlsx", "not a table doxa reads; use .csv, .tsv or .parquet")
    (tmp_path / "t.parquet").write_text(csv())
    fit(tmp_path / "t.parquet", "cannot be read as a table")
    GOOD.to_parquet(tmp_path / "cut.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "cut.parquet").read_bytes()[:200])
    fit(tmp_path / "cut.parquet", "cannot be read as a table")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(csv().encode())[:60])
    fit(tmp_path / "cut.csv.gz", "cannot be decompressed, it may be cut off")
    GOOD.to_parquet(tmp_path / "parquet.csv")  # misnamed, and read all the same
    fit(tmp_path / "parquet.csv", "3 input columns", code=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    frame = GOOD.assign(when=pd.date_range("2024-01-01", periods=ROWS).strftime("%Y-%m-%d"))
    frame.assign(id=range(50, 50 + ROWS)).to_csv(folder / "t.csv", index=False)
    doxa("fit", folder / "t.csv", "-t", "y", "-m", "linear", "-o", folder / "run")
    return folder / "run"


NEW = "a,b,c,when\n5,0,red,2024-05-06\n6,1,blue,2024-05-07\n"
PREDICTIONS: dict[str, tuple[str | bytes, int, str]] = {
    "another order": ("when,c,b,a\n2024-05-06,red,0,5\n", 0, "1 predictions written"),
    "another way of writing": (
        "a;b;c;when\n5,5;0,5;red;2024-05-06\n".encode("utf-16"), 0, "note: .*decimal commas.*UTF-16"
    ),
    "a column is missing": ("a,c,when\n5,red,2024-05-06\n", 2, "no column 'b'"),
    "a column is misspelt": (NEW.replace("when", "wen"), 2, "no column 'when'; did you mean 'wen'"),
    "columns are missing": ("c\nred\n", 2, "no columns 'a', 'b', 'when'; there are: c"),
    "columns too many": (
        NEW.replace("a,", "d,a,", 1).replace("\n5", "\n1,5").replace("\n6", "\n1,6"), 0,
        "note: columns that the fit did not have are not used: 'd'",
    ),
    "a new category": (NEW.replace("red", "mauve"), 0, r"'mauve' not seen in the fit \(1 row\)"),
    "a gap": (NEW.replace("6,1", "6,"), 2, "missing values: column 'b', line 3. --missing impute"),
    "a word": (NEW.replace("6,1", "six,1"), 2, "column 'a', line 3: 'six' is not a number"),
    "a date written otherwise": (
        NEW.replace("2024-05-07", "7.5.2024"), 2, "line 3: '7.5.2024' is not a date"
    ),
    "no rows": (NEW.splitlines()[0] + "\n", 2, "has a header but no rows"),
    "no header": ("5,0,red,2024-05-06\n6,1,blue,2024-05-07\n", 2, "no columns 'a', 'b', 'c'"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", PREDICTIONS)
def test_a_table_to_predict(mistake: str, run: Path, tmp_path: Path) -> None:
    contents, code, said = PREDICTIONS[mistake]
    path, out = tmp_path / "new.csv", tmp_path / "p.csv"
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    heard = doxa("predict", run, path, "-o", out, code=code)
    assert re.search(said, heard), heard
    assert out.exists() == (code == 0)
