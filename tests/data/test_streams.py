"""Rows that are read by windows: what is read, in which order, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import doxa
from doxa.data import Stream, read_csv, read_parquet, stream
from doxa.data.readers import SpooledReader
from doxa.errors import DataError, MemoryBudgetError
from doxa.noise import Noise

N = 1000


def table(rows: int = N) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    g = np.random.default_rng(0)
    x = g.normal(3.0, 2.0, size=(rows, 3)).astype(np.float32)
    return x, (x.sum(1) + g.normal(size=rows)).astype(np.float32)


def write(path: Path, x: Any, y: Any, group: int = 90) -> Path:
    columns = {f"c{j}": x[:, j] for j in range(x.shape[1])}
    pq.write_table(pa.table({**columns, "y": y}), path, row_group_size=group)
    return path


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """Three files in a folder, one of them without rows, and files to skip."""
    x, y = table()
    folder = tmp_path / "rows"
    (folder / "sub").mkdir(parents=True)
    write(folder / "a.parquet", x[:300], y[:300])
    write(folder / "b.parquet", x[300:300], y[300:300])
    write(folder / "sub" / "c.parquet", x[300:], y[300:])
    (folder / "_SUCCESS").touch()
    (folder / ".hidden.parquet").write_bytes(b"no table")
    return folder


def whole(rows: Stream) -> tuple[torch.Tensor, torch.Tensor]:
    parts = list(rows.blocks(64))
    assert torch.equal(torch.cat([n for n, _, _ in parts]), torch.arange(len(rows)))
    assert max(len(n) for n, _, _ in parts) <= 64
    return torch.cat([x for _, x, _ in parts]), torch.cat([y for _, _, y in parts])


def test_a_folder_is_read_in_order_by_windows(parquet: Path) -> None:
    x, y = table()
    rows = read_parquet(parquet, target="y", window=2000)
    assert len(rows) == N and len(rows.windows) > 4
    assert rows.columns == ("c0", "c1", "c2")
    found = whole(rows)
    assert np.array_equal(found[0].numpy(), x) and np.array_equal(found[1].numpy(), y)
    for w in reversed(range(len(rows.windows))):  # by seeking, in any order
        start, stop = rows.starts[w : w + 2]
        assert np.array_equal(rows.window(w)[0].numpy(), x[start:stop])
    other = rows[["c2", "c0"]]
    assert np.array_equal(other.window(0)[0].numpy(), x[: other.starts[1]][:, [2, 0]])


def test_arrow_and_csv_have_the_same_rows(tmp_path: Path) -> None:
    x, y = table()
    columns = pa.table({**{f"c{j}": x[:, j] for j in range(3)}, "y": y})
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", columns.schema) as file:
        file.write_table(columns, max_chunksize=130)
    arrow = read_parquet(tmp_path / "a.arrow", target="y", window=2000)
    assert len(arrow.windows) > 3
    assert np.array_equal(whole(arrow)[0].numpy(), x)
    columns.to_pandas().to_csv(tmp_path / "a.csv", index=False)
    csv = read_csv(tmp_path / "a.csv", target="y")
    assert np.allclose(whole(csv)[0].numpy(), x) and np.allclose(whole(csv)[1].numpy(), y)


def test_line_breaks_inside_quotation_marks(tmp_path: Path) -> None:
    """Blocks of a CSV file begin at rows, whatever the cells hold."""
    from doxa.data.readers import CsvReader

    path = tmp_path / "a.csv"
    lines = ["\ufeff" + '"a ""b""\nname",note,y']
    lines += [f'{i}.5,"first\nline, ""{i}"",\r\nsecond",{i % 3}' for i in range(500)]
    path.write_bytes(("\n\n".join(lines[:5]) + "\r\n" + "\n".join(lines[5:])).encode())
    reader = CsvReader(path, "y", ['a "b"\nname'], block=1000)
    assert len(reader.sizes) > 10
    x, y = whole(Stream(reader, 500))
    assert x[:, 0].tolist() == [i + 0.5 for i in range(500)]
    assert y.tolist() == [i % 3 for i in range(500)] and y.dtype == torch.int64


def test_the_moments_of_one_pass(parquet: Path) -> None:
    """Of numbers with a large mean, merged over groups of different sizes."""
    g = np.random.default_rng(1)
    x, y = g.normal(1e6, 1.0, size=(N, 3)), g.normal(size=N)
    x[:, 2] = 7.0
    write(parquet / "a.parquet", x, y, 77)
    for name in ("b.parquet", "sub/c.parquet"):
        (parquet / name).unlink()
    rows = read_parquet(parquet, target="y")
    found = doxa.fit(doxa.nets.mlp(3, 1).double(), rows, steps=1, standardize=True).scales
    assert np.allclose(found.x_loc, x.mean(0), rtol=1e-13)
    assert np.allclose(found.x_scale[:2], x.std(0)[:2], rtol=1e-9) and found.x_scale[2] == 1.0
    assert np.allclose(found.y_loc, y.mean(), atol=1e-13)
    assert np.allclose(found.y_scale, y.std(), rtol=1e-12)


def test_a_sample_is_one_of_all_rows(parquet: Path) -> None:
    x, _ = table()
    rows = read_parquet(parquet, target="y")
    a, b = rows.sample(100)[0], rows.sample(100, seed=1)[0]
    assert len(a) == len(b) == 100 and not torch.equal(a, b)
    places = [int(np.flatnonzero((x == row).all(1))[0]) for row in a.numpy()]
    assert places == sorted(set(places)) and 350 < np.mean(places) < 650
    assert len(rows.sample(5000)[0]) == N


def test_numbers_at_places_are_those_of_the_counter() -> None:
    noise = Noise(3, "held out", ["0", "1"], dtype=torch.float64)
    assert torch.equal(noise.uniform_at(torch.arange(50)), noise.uniform((50,)))
    far = noise.uniform_at(torch.tensor([5, 5 + 2**31, 5 + 2**40]))
    assert far.unique().numel() == 6


def replaced(path: Path, rows: Stream) -> None:
    """Another file of the same size and time."""
    x, y = table()
    found = os.stat(path)
    write(path, x[:300] + np.float32(1.0), y[:300])
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    file = rows.reader.files[0]  # type: ignore[attr-defined]
    now = os.stat(path)
    object.__setattr__(file, "size", now.st_size)
    object.__setattr__(file, "inode", now.st_ino)


def test_files_that_change(parquet: Path) -> None:
    first = parquet / "a.parquet"
    x, y = table()

    def opened() -> Stream:
        write(first, x[:300], y[:300])
        rows = read_parquet(parquet, target="y")
        rows.head(300)
        return rows

    rows = opened()
    write(first, x[:250], y[:250])
    with pytest.raises(DataError, match=r"a\.parquet, row group 0.*has changed"):
        rows.window(0)
    rows = opened()
    first.unlink()
    with pytest.raises(DataError, match=r"a\.parquet, row group 0.*removed"):
        rows.window(0)
    rows = opened()
    replaced(first, rows)
    with pytest.raises(DataError, match=r"a\.parquet, row group 0.*replaced"):
        rows.window(0)
    data = first.read_bytes()
    first.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"a\.parquet.*cut off"):
        read_parquet(parquet, target="y")
    middle = data[:100] + bytes(400) + data[500:]
    first.write_bytes(middle)
    with pytest.raises(DataError, match=r"a\.parquet, row group 0"):
        list(read_parquet(parquet, target="y").blocks(64))


def test_tables_that_cannot_be_used(parquet: Path, tmp_path: Path) -> None:
    x, y = table()
    with pytest.raises(DataError, match="did you mean 'c1'"):
        read_parquet(parquet, target="y", columns=["c11"])
    with pytest.raises(DataError, match="target and cannot be an input"):
        read_parquet(parquet, target="y", columns=["y"])
    with pytest.raises(DataError, match="no file that ends"):
        (tmp_path / "empty").mkdir()
        read_parquet(tmp_path / "empty")
    with pytest.raises(DataError, match="does not exist"):
        read_parquet(tmp_path / "nothing.parquet")
    write(tmp_path / "none.parquet", x[:0], y[:0])
    with pytest.raises(DataError, match="no rows"):
        read_parquet(tmp_path / "none.parquet")
    write(parquet / "d.parquet", x.astype(np.float64), y)
    with pytest.raises(DataError, match=r"d\.parquet: column 'c0' is double"):
        read_parquet(parquet, target="y")
    (parquet / "d.parquet").unlink()
    pq.write_table(pa.table({"c0": ["a", "b"], "y": [1.0, 2.0]}), tmp_path / "text.parquet")
    with pytest.raises(DataError, match="holds string, not numbers"):
        read_parquet(tmp_path / "text.parquet", target="y")


@pytest.mark.parametrize("where", ["x", "y", "null"])
def test_a_missing_number_in_the_last_group(parquet: Path, where: str) -> None:
    x, y = table()
    rest = {f"c{j}": x[300:, j].copy() for j in range(3)} | {"y": y[300:].copy()}
    if where == "null":
        rest["c1"] = pa.array([None if i == 699 else 1.0 for i in range(700)], pa.float32())
    else:
        rest["c1" if where == "x" else "y"][699] = np.nan
    pq.write_table(pa.table(rest), parquet / "sub" / "c.parquet", row_group_size=90)
    with pytest.raises(DataError, match=r"c\.parquet, row group 7.*at row 69"):
        doxa.fit(doxa.nets.mlp(3, 1), read_parquet(parquet, target="y"), steps=2)


def test_classes_that_cannot_be_used(tmp_path: Path) -> None:
    x, _ = table()
    labels = np.arange(N) % 3
    labels[950] = 3
    write(tmp_path / "a.parquet", x, labels, 200)
    with pytest.raises(DataError, match=r"a\.parquet, row group 4.*3"):
        doxa.fit(doxa.nets.mlp(3, 3), read_parquet(tmp_path, target="y"), steps=2)
    write(tmp_path / "a.parquet", x, np.ones(N, np.int64), 200)
    with pytest.raises(DataError, match="one class only"):
        doxa.fit(doxa.nets.mlp(3, 3), read_parquet(tmp_path, target="y"), steps=2)


def test_a_row_group_that_is_too_large(parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("doxa.data.readers.MOST_GROUP", 1000)
    with pytest.raises(MemoryBudgetError, match=r"a\.parquet, row group 0.*row_group_size"):
        read_parquet(parquet, target="y")


def test_csv_files_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for text, match in (
        ("", "empty"), ("a,y\n", "header"), ('a,y\n1,"2\n', "quotation"),
        ("a,y\n1,2\n3,x\n", r"block 0 \(from line 2\).*'x' at row 1"),
        ("a,y\n1,2\n,3\n", "missing at row 1"), ("a,y\n1,2\n1,2,3\n", "cannot be read|rows"),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(DataError, match=match):
            read_csv(path, target="y").head()


class Rows(IterableDataset[Any]):
    def __init__(self, count: int, length: int | None = None) -> None:
        self.count, self.length = count, length

    def __iter__(self) -> Iterator[Any]:
        x, y = table(self.count)
        yield from zip(torch.tensor(x), torch.tensor(y), strict=True)


class Sized(Rows):
    def __len__(self) -> int:
        return self.length or 0


def folders(place: Path) -> list[Path]:
    return list(place.glob("doxa-stream-*"))


def test_an_iterable_is_spooled_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("doxa.data.readers._SPOOLED", 3000)
    x, y = table()
    rows = stream(Rows(N), folder=tmp_path, window=2000)
    assert len(rows.windows) > 2 and len(folders(tmp_path)) == 1
    assert np.array_equal(whole(rows)[0].numpy(), x) and np.array_equal(whole(rows)[1], y)
    again = stream(DataLoader(Rows(N), batch_size=7), folder=tmp_path)
    assert np.array_equal(whole(again)[0].numpy(), x)
    del rows, again
    assert folders(tmp_path) == []
    named = ({"a": i, "b": 2.0 * i, "c": "text", "y": i % 2} for i in range(10))
    dicts = stream(named, target="y", columns=["b", "a"], folder=tmp_path)
    assert whole(dicts)[0][3].tolist() == [6.0, 3.0] and whole(dicts)[1].dtype == torch.int64


class Remote:
    """Rows as a streaming set of the package datasets returns them: it is recognised by what it
    has, and not by its type."""

    column_names = ("a", "y")

    def __iter__(self) -> Iterator[Any]:
        return ({"a": float(i), "y": i % 2} for i in range(20))


def test_a_streaming_set_is_recognised() -> None:
    with pytest.raises(DataError, match=r"doxa\.data\.stream"):
        doxa.fit(doxa.nets.mlp(1, 1), Remote())
    rows = stream(Remote(), target="y")
    assert rows.columns == ("a",) and whole(rows)[0][:, 0].tolist() == list(range(20))


def test_a_spool_that_is_refused_is_removed(tmp_path: Path) -> None:
    with pytest.raises(MemoryBudgetError, match=r"more than \d+ rows.*limit") as found:
        stream(Rows(N), limit=4000, folder=tmp_path)
    assert folders(tmp_path) == [] and found.tb is not None  # also while the error is kept

    def broken() -> Iterator[Any]:
        yield torch.zeros(2), torch.zeros(())
        raise RuntimeError("no connection")

    with pytest.raises(DataError, match="row 1: no connection"):
        stream(broken(), folder=tmp_path)
    with pytest.raises(DataError, match="same shapes"):
        stream(((torch.zeros(i), 0.0) for i in (1, 2)), folder=tmp_path)
    with pytest.raises(DataError, match="y is not finite at row 0"):
        stream([(torch.zeros(2), float("nan"))], folder=tmp_path)
    with pytest.raises(DataError, match="no rows"):
        SpooledReader(iter([]), folder=tmp_path)
    with pytest.raises(DataError, match="no column 'z'"):
        stream([{"a": 1.0}], target="z", folder=tmp_path)
    assert folders(tmp_path) == []


def test_fit_takes_an_iterable_that_has_a_length() -> None:
    posterior = doxa.fit(doxa.nets.mlp(3, 1), Sized(N, N), steps=5)
    assert posterior.diagnostics["rows"] < N
    with pytest.raises(DataError, match="more rows than its length, 7"):
        doxa.fit(doxa.nets.mlp(3, 1), Sized(N, 7), steps=5)
    with pytest.raises(DataError, match=r"doxa\.data\.stream"):
        doxa.fit(doxa.nets.mlp(3, 1), Rows(N), steps=5)
