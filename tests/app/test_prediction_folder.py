"""Predictions in a folder: each row once, in order, after kills, and never of another file."""

from __future__ import annotations

import os
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shell import doxa, started

from doxa.app import prediction_folder as parts
from doxa.app import row_blocks
from doxa.app.fitting import load_run
from doxa.errors import CorruptedArtefact, DataError, StoreError
from doxa.tables.predictions import output_names, predict_frame
from doxa.tables.reading import Dialect
from doxa.tables.schema import read_more

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

N = 1000


def table(n: int = N, seed: int = 1) -> Any:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"x": rng.normal(size=n), "z": rng.normal(5, 2, size=n)})
    frame["c"] = rng.choice(["a", "b", "07"], n)
    return frame


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    frame = table(200, seed=0)
    frame["y"] = 2 * frame["x"] - frame["z"] + (frame["c"] == "a")
    frame["y"] += np.random.default_rng(9).normal(0, 0.5, 200)
    frame.to_csv(folder / "train.csv", index=False)
    doxa("fit", folder / "train.csv", "-t", "y", "-m", "linear", "-o", folder / "run",
         "--allow-status")  # fmt: skip
    return folder / "run"


@pytest.fixture
def big(tmp_path) -> Path:
    frame = table().assign(id=[f"k{i}" for i in range(N)])
    frame.to_parquet(tmp_path / "big.parquet", row_group_size=300, index=False)
    return tmp_path / "big.parquet"


class Begun:
    """A folder of parts, as a test drives it."""

    def __init__(self, run: Path, path: Path, folder: Path, **options: Any) -> None:
        self.posterior, self.schema = load_run(run)
        self.folder, self.source = folder, row_blocks.opened(path, Dialect())
        names = output_names(self.posterior, self.schema)
        self.plan, self.notes = parts.prepare(
            folder, self.source, run, self.schema, names, **options
        )

    def work(self, posterior: Any = None) -> None:
        parts.work(
            self.folder, self.source, self.plan, posterior or self.posterior, self.schema
        )  # fmt: skip


class Dies:
    """A posterior whose process is interrupted at its nth prediction."""

    def __init__(self, posterior: Any, at: int) -> None:
        self._posterior, self._left = posterior, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._posterior, name)

    def predict(self, x: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt
        return self._posterior.predict(x)


def whole(run: Path, path: Path) -> Any:
    posterior, schema = load_run(run)
    return predict_frame(posterior, schema, read_more(path, schema, Dialect())[0])[0]


def check(folder: Path, expected: Any, number: str = "row") -> Any:
    """Every row once, in order, and the numbers of a prediction in one piece."""
    found = pd.read_parquet(folder)
    assert found[number].tolist() == (
        expected.index.tolist() if number == "line" else list(range(len(expected)))
    )
    for name in expected.columns:
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, atol=1e-6)
    return found


@pytest.mark.slow
def test_a_folder_has_the_predictions_of_a_file(run, big, tmp_path) -> None:
    """Row groups of 300, of 128 rows a part: 300 = 128 + 128 + 44."""
    said = doxa("predict", run, big, "--out", tmp_path / "p", "--rows", 128, "--id", "id")
    assert "1,000 predictions written" in said and "in 10 parts" in said
    found = check(tmp_path / "p", whole(run, big))
    assert found["id"].tolist() == [f"k{i}" for i in range(N)]
    sizes = [len(pd.read_parquet(p)) for p in sorted((tmp_path / "p").glob("part-*"))]
    assert sizes == [128, 128, 44] * 3 + [100]


@pytest.mark.slow
def test_the_column_of_labels_of_a_file(run, big, tmp_path) -> None:
    doxa("predict", run, big, "--out", tmp_path / "p.csv", "--id", "id")
    assert pd.read_csv(tmp_path / "p.csv")["id"].tolist() == [f"k{i}" for i in range(N)]
    for out in ("q.csv", "q"):
        said = doxa("predict", run, big, "--out", tmp_path / out, "--id", "idd", code=2)
        assert "no column 'idd'; did you mean 'id'?" in said


@pytest.mark.slow
def test_a_finished_folder_says_so_and_is_not_written_again(run, big, tmp_path) -> None:
    doxa("predict", run, big, "--out", tmp_path / "p")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "p").iterdir()}
    assert "already has all 1,000" in doxa("predict", run, big, "--out", tmp_path / "p")
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "p").iterdir()} == before
    said = doxa("predict", run, big, "--out", tmp_path / "p", "--level", 0.5, code=2)
    assert "another --level" in said
    doxa("predict", run, big, "--out", tmp_path / "p", "--level", 0.5, "--overwrite")
    found = pd.read_parquet(tmp_path / "p")
    assert np.allclose((found["high"] - found["mean"]) / found["std"], 0.6745, atol=0.05)


@pytest.mark.slow
def test_what_was_interrupted_goes_on(run, big, tmp_path) -> None:
    first = Begun(run, big, tmp_path / "p", rows=100)
    with pytest.raises(KeyboardInterrupt):
        first.work(Dies(first.posterior, at=4))
    written = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "p").glob("part-*")}
    assert len(written) == 4
    # what a process that was killed while it wrote leaves behind
    (tmp_path / "p" / ".part-00000004.parquet.tmp-00").write_bytes(b"half")
    assert "parts are already there" in doxa("predict", run, big, "--out", tmp_path / "p")
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "p").glob("part-*")}
    assert {k: after[k] for k in written} == written and len(after) == 10
    assert not list((tmp_path / "p").glob(".*tmp*"))
    check(tmp_path / "p", whole(run, big))


def test_two_at_once_write_each_row_once(run, big, tmp_path) -> None:
    """Two threads exclude each other as two processes do: each part is predicted once."""
    both = [Begun(run, big, tmp_path / "p", rows=50) for _ in range(2)]
    assert both[0].plan == both[1].plan
    rows: list[int] = []

    class Counts(Dies):
        def predict(self, x: Any) -> Any:
            rows.append(len(x))
            time.sleep(0.002)
            return self._posterior.predict(x)

    threads = [
        threading.Thread(target=each.work, args=(Counts(each.posterior, 0),)) for each in both
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(rows) == N
    assert parts.finish(tmp_path / "p", both[0].plan) == N
    check(tmp_path / "p", whole(run, big))


def test_another_file_is_refused(run, big, tmp_path) -> None:
    begun = Begun(run, big, tmp_path / "p", rows=100)
    with pytest.raises(KeyboardInterrupt):
        begun.work(Dies(begun.posterior, at=2))
    table(seed=2).to_parquet(big, row_group_size=300, index=False)
    with pytest.raises(DataError, match="was changed while it was predicted"):
        begun.work()
    assert len(list((tmp_path / "p").glob("part-*"))) == 2
    assert "has changed since" in doxa("predict", run, big, "--out", tmp_path / "p", code=2)
    doxa("predict", run, big, "--out", tmp_path / "p", "--overwrite")
    check(tmp_path / "p", whole(run, big))


def test_a_file_of_the_same_size_and_time_is_another_by_its_footer(run, big, tmp_path) -> None:
    Begun(run, big, tmp_path / "p")
    found, data = big.stat(), bytearray(big.read_bytes())
    at = data.rindex(b"PAR1") - 30
    data[at] ^= 1
    big.write_bytes(bytes(data))
    os.utime(big, ns=(found.st_atime_ns, found.st_mtime_ns))
    source = row_blocks.ParquetInput.__new__(row_blocks.ParquetInput)
    source.path = big
    assert source.digest() != parts.Plan.load(tmp_path / "p").source["digest"]


@pytest.mark.slow
def test_a_damaged_part_is_removed_and_written_again(run, big, tmp_path) -> None:
    doxa("predict", run, big, "--out", tmp_path / "p", "--rows", 100)
    (tmp_path / "p" / "part-00000003.parquet").write_bytes(b"PAR1 nothing PAR1")
    other = pd.read_parquet(tmp_path / "p" / "part-00000000.parquet")
    other.to_parquet(tmp_path / "p" / "part-00000005.parquet")  # not of this plan
    said = doxa("predict", run, big, "--out", tmp_path / "p", code=2)
    assert "part-00000003.parquet, part-00000005.parquet were damaged" in said
    doxa("predict", run, big, "--out", tmp_path / "p")
    check(tmp_path / "p", whole(run, big))


def test_a_bad_cell_is_named_by_file_row_group_row_and_column(run, big, tmp_path) -> None:
    frame = pd.read_parquet(big)
    frame.loc[765, "x"] = np.nan
    frame.to_parquet(big, row_group_size=300, index=False)
    said = doxa("predict", run, big, "--out", tmp_path / "p", "--rows", 100, code=2)
    assert "big.parquet, row group 2: missing values: column 'x', row 765" in said
    said = doxa("predict", run, big, "--out", tmp_path / "q", "--id", "id", code=2)
    assert "column 'x', row 'k765'" in said


def test_a_folder_with_other_files_is_refused(run, big, tmp_path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "thesis.tex").touch()
    assert "holds other files" in doxa("predict", run, big, "--out", tmp_path / "p", code=2)
    for words in (["--jobs", 2], ["--rows", 9]):
        said = doxa("predict", run, big, "--out", tmp_path / "p.csv", *words, code=2)
        assert "is for predictions in a folder" in said


def test_a_plan_that_is_damaged_or_gone(run, big, tmp_path) -> None:
    begun = Begun(run, big, tmp_path / "p", rows=100)
    (tmp_path / "p" / parts.PLAN).write_text("{")
    with pytest.raises(CorruptedArtefact, match="overwrite"):
        parts.Plan.load(tmp_path / "p")
    Begun(run, big, tmp_path / "p", rows=100, overwrite=True)
    with pytest.raises(StoreError, match="started anew by another call"):
        begun.work()


def test_blocks_of_csv_are_read_as_the_whole_table(run, tmp_path) -> None:
    """Categories that look like numbers in some blocks only, quoted line breaks, blank lines."""
    frame = table(60)
    frame["c"] = ["07"] * 20 + ["a", "b"] * 20
    frame["note"] = ['two\nlines, "quoted"' if i % 7 == 0 else "plain" for i in range(60)]
    text = frame.to_csv(index=False).replace("plain\n", "plain\n\n", 3)
    (tmp_path / "big.csv").write_text(text)
    doxa("predict", run, tmp_path / "big.csv", "--out", tmp_path / "p", "--rows", 10)
    check(tmp_path / "p", whole(run, tmp_path / "big.csv"), "line")
    assert len(list((tmp_path / "p").glob("part-*"))) == 6


def test_parts_need_not_begin_where_a_batch_does(big) -> None:
    """Batches have as many rows as the largest part, 128: the others share them."""
    source, starts = row_blocks.ParquetInput(big), [300, 400, 528, 530, 600]
    given = [row_blocks.Part(1, start, end - start) for start, end in pairwise(starts)]
    frame = pd.read_parquet(big)
    for part, read in zip(given, source.frames(given, ["x", "c"], "id", None), strict=True):
        found, names = read()
        rows = slice(part.start, part.start + part.rows)
        assert found["x"].tolist() == frame["x"][rows].tolist()
        assert names["id"].to_pylist() == frame["id"][rows].tolist()
        assert names["row"].tolist() == list(range(part.start, part.start + part.rows))


def test_a_point_among_decimal_commas_is_refused_in_every_block(run, tmp_path) -> None:
    """As text, 2.5 would be read as a number, though it may be a thousand."""
    rows = ["1,5;2;a", "2,5;2;b", "2.5;2;a", "3.5;2;b"]
    (tmp_path / "big.csv").write_text("x;z;c\n" + "\n".join(rows))
    said = doxa("predict", run, tmp_path / "big.csv", "--out", tmp_path / "p", "--rows", 2, code=2)
    assert "column 'x', line" in said and "numbers in this file have a decimal comma" in said


def test_csv_in_another_dialect(run, tmp_path) -> None:
    frame = table(50).assign(name="Zoë")
    text = frame.to_csv(index=False, sep=";", decimal=",")
    (tmp_path / "big.csv").write_bytes(text.encode("cp1252"))
    doxa("predict", run, tmp_path / "big.csv", "--out", tmp_path / "p", "--rows", 7)
    check(tmp_path / "p", whole(run, tmp_path / "big.csv"), "line")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("x,z,c\n1,2,a\n3,4\n", "line 3: 2 cells, and 3 in the header"),
        ("x,z,c\n1,2,a\n3,oops,b\n", "block 1: column 'z', line 3: 'oops' is not a number"),
        ("x,z\n1,2\n", "no column 'c'"),
        ("x,z,c\n", "no rows"),
        ('x,z,c\n1,2,a\n1,2,"a\n', "quotation mark is never closed"),
        ("x,z,x\n1,2,3\n", "more than once"),
    ],
)
def test_a_mistake_in_a_csv_file_is_named(run, tmp_path, text, wrong) -> None:
    (tmp_path / "big.csv").write_text(text)
    said = doxa("predict", run, tmp_path / "big.csv", "--out", tmp_path / "p", "--rows", 1, code=2)
    assert wrong in said


def test_what_cannot_be_read_by_blocks_is_refused(run, tmp_path) -> None:
    table(20).to_csv(tmp_path / "t.csv.gz", index=False)
    (tmp_path / "u.csv").write_text(table(20).to_csv(index=False), encoding="utf-16")
    for name, wrong in (("t.csv.gz", "is compressed"), ("u.csv", "save it as UTF-8")):
        assert wrong in doxa("predict", run, tmp_path / name, "--out", tmp_path / "p", code=2)


@pytest.mark.slow
def test_processes_that_are_killed_lose_nothing(run, big, tmp_path) -> None:
    """Two calls at once, one killed in the middle; a third one ends the work."""
    table(60_000).to_parquet(big, row_group_size=400, index=False)
    words = ("predict", run, big, "--out", tmp_path / "p", "--rows", 200)
    killed = started(*words, "--jobs", 2, log=tmp_path / "one.txt")
    other = started(*words, log=tmp_path / "two.txt")
    try:
        deadline = time.monotonic() + 120
        while len(list((tmp_path / "p").glob("part-*"))) < 20 and time.monotonic() < deadline:
            time.sleep(0.05)
        killed.send_signal(signal.SIGKILL)
        assert killed.wait(60) == -signal.SIGKILL
        assert other.wait(240) == 0, (tmp_path / "two.txt").read_text()
    finally:
        for process in (killed, other):
            if process.poll() is None:
                process.kill()
                process.wait(60)
    assert "already has all 60,000" in doxa(*words)
    check(tmp_path / "p", whole(run, big))


@pytest.mark.slow
def test_jobs_share_the_parts_and_one_that_fails_ends_all(run, big, tmp_path) -> None:
    doxa("predict", run, big, "--out", tmp_path / "p", "--rows", 50, "--jobs", 2)
    check(tmp_path / "p", whole(run, big))
    frame = pd.read_parquet(big)
    frame.loc[0, "x"] = np.inf
    frame.to_parquet(big, row_group_size=300, index=False)
    said = doxa("predict", run, big, "--out", tmp_path / "q", "--rows", 50, "--jobs", 2, code=2)
    assert "row group 0: column 'x', row 0: 'inf' is not finite" in said
    assert not list((tmp_path / "q").glob(".stop*"))
