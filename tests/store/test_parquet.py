"""A Parquet file as memory maps: the same numbers, streamed; bad files named to the cell."""

from __future__ import annotations

import builtins
import errno
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import doxa
from doxa.errors import DataError, MissingExtra, StoreError
from doxa.store.parquet import parquet

N = 500


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def columns(**extra: Any) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    table: dict[str, Any] = {
        "a": generator.normal(size=N), "b": generator.normal(size=N) * 1e3,
        "whole": generator.integers(0, 9, N), "flag": generator.random(N) > 0.5,
        "y": generator.normal(size=N), "class": generator.integers(0, 3, N).astype(np.int8),
    }  # fmt: skip
    return table | extra


def written(path: Path, table: dict[str, Any], group: int = 64) -> Path:
    arrow = pytest.importorskip("pyarrow")
    reader = pytest.importorskip("pyarrow.parquet")
    reader.write_table(arrow.table(table), path, row_group_size=group)
    return path


def test_the_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    table = columns()
    path = written(tmp_path / "t.parquet", table)
    x, y = parquet(path, "y")
    names = ["a", "b", "whole", "flag", "class"]
    np.testing.assert_array_equal(x, np.stack([table[n].astype(float) for n in names], 1))
    np.testing.assert_array_equal(y, table["y"])
    assert isinstance(x, np.memmap) and not x.flags.writeable and x.dtype == np.float64


def test_columns_targets_and_types(tmp_path: Path) -> None:
    table = columns()
    single = {name: table[name].astype(np.float32) for name in ("a", "b", "y")}
    path = written(tmp_path / "t.parquet", table | single)
    x, y = parquet(path, "class", ["b", "a"])
    assert x.dtype == np.float32 and y.dtype == np.int64 and y.shape == (N,)
    np.testing.assert_array_equal(x, np.stack([single["b"], single["a"]], 1))
    _, both = parquet(path, ["y", "class"], ["a"])
    assert both.shape == (N, 2) and both.dtype == np.float64
    np.testing.assert_array_equal(both[:, 1], table["class"])


@pytest.mark.parametrize("streams", [False, True])
def test_fit_streams_it(tmp_path: Path, streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    table = columns()
    path = written(tmp_path / "t.parquet", table)
    x, y = parquet(path, "y", ["a", "b"])
    net = doxa.nets.mlp(2, 1, hidden=(4,))
    arrays = np.stack([table["a"], table["b"]], 1), table["y"]
    settings: dict[str, Any] = {"steps": 20, "members": 2, "standardize": True}
    expected = doxa.fit(net, arrays, **settings)
    if streams:
        for name, module in list(sys.modules.items()):
            if name.startswith("doxa.") and hasattr(module, "free_memory"):
                monkeypatch.setattr(module, "free_memory", lambda *_: 64)
        monkeypatch.setattr("doxa.method.method.free_memory", lambda *_: 1 << 30)
    posterior = doxa.fit(net, (x, y), **settings)
    assert torch.equal(posterior.samples, expected.samples)


def test_an_unchanged_file_is_converted_once(tmp_path: Path, cache: Path) -> None:
    path = written(tmp_path / "t.parquet", columns())
    (x, _), (again, _) = parquet(path, "y"), parquet(path, "y")
    assert x.filename == again.filename  # type: ignore[attr-defined]
    parquet(path, "y", ["a"])
    changed = columns()
    changed["a"] = changed["a"] + 1
    x, _ = parquet(written(path, changed), "y")
    np.testing.assert_array_equal(x[:, 0], changed["a"])
    (folder,) = cache.iterdir()
    assert len(list(folder.iterdir())) == 3
    assert folder.stat().st_mode & 0o077 == 0


def test_wrong_columns_are_named(tmp_path: Path) -> None:
    table = columns(name=["x"] * N)
    path = written(tmp_path / "t.parquet", table)
    with pytest.raises(DataError, match=r"no column 'Flag'; did you mean 'flag'"):
        parquet(path, "Flag")
    with pytest.raises(DataError, match="no column 'z'"):
        parquet(path, "y", ["a", "z"])
    with pytest.raises(DataError, match="column 'name' holds string"):
        parquet(path, "y")
    with pytest.raises(DataError, match="column 'name' holds string"):
        parquet(path, "name", ["a"])
    with pytest.raises(DataError, match="target and cannot be an input"):
        parquet(path, "y", ["a", "y"])
    with pytest.raises(DataError, match="no input column"):
        parquet(path, "y", [])
    with pytest.raises(DataError, match="needs a target"):
        parquet(path, [])


def test_missing_values_name_column_and_row(tmp_path: Path, cache: Path) -> None:
    a: list[float | None] = [0.0] * N
    a[321] = None
    whole: list[int | None] = [1] * N
    whole[77] = None
    path = written(tmp_path / "t.parquet", columns(a=a, whole=whole))
    with pytest.raises(DataError, match="column 'a' is missing at row 321"):
        parquet(path, "y", ["a"])
    with pytest.raises(DataError, match="column 'whole' is missing at row 77"):
        parquet(path, "whole", ["b"])
    (folder,) = cache.iterdir()
    assert list(folder.iterdir()) == []  # nothing half-converted is left


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    written(tmp_path / "empty.parquet", {"a": np.zeros(0), "y": np.zeros(0)})
    with pytest.raises(DataError, match="no rows"):
        parquet(tmp_path / "empty.parquet", "y")
    (tmp_path / "text.parquet").write_text("a,y\n1,2\n")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        parquet(tmp_path / "text.parquet", "y")
    (tmp_path / "nothing.parquet").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        parquet(tmp_path / "nothing.parquet", "y")
    with pytest.raises(StoreError, match="nothing is there"):
        parquet(tmp_path / "nowhere.parquet", "y")
    whole = written(tmp_path / "t.parquet", columns()).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        parquet(tmp_path / "cut.parquet", "y")


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="needs posix_fallocate")
def test_a_full_disk_is_an_error_before_anything_is_mapped(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "t.parquet", columns())

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match="disk is full"):
        parquet(path, "y")
    (folder,) = cache.iterdir()
    assert list(folder.iterdir()) == []


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtra, match=r"doxa\[tables\]"):
        parquet(tmp_path / "t.parquet", "y")
