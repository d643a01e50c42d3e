"""`doxa fit` and `doxa watch` on tables that are read by windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from doxa.app.cli import app
from doxa.errors import DataError
from doxa.tables import schema
from doxa.tables.schema import TableSpec, read_dataset, read_stream

N = 1500


@pytest.fixture
def frame() -> pd.DataFrame:
    g = np.random.default_rng(0)
    table = pd.DataFrame({
        "row": np.arange(N), "a": g.normal(size=N), "city": g.choice(["Rome", "Oslo, N"], N),
        "day": pd.date_range("2020-01-01", periods=N, freq="h").strftime("%Y-%m-%d"),
        "flag": g.random(N) < 0.3, "note": [f"text {i % 80}" for i in range(N)],
    })  # fmt: skip
    table["y"] = 2 * table.a + 3 * (table.city == "Rome") + 0.1 * g.normal(size=N)
    table["kind"] = np.where(table.y > 1, "high", "low")
    table.loc[N - 1, "city"] = "Paris\nFrance"  # seen once, in the last group
    table.loc[N - 2, "a"] = np.nan
    return table


@pytest.mark.parametrize("kind", ["csv", "parquet", "folder"])
@pytest.mark.parametrize("target", ["y", "kind"])
def test_the_schema_is_that_of_the_whole_table(
    frame: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, target: str
) -> None:
    monkeypatch.setattr("doxa.data.readers._CSV_BLOCK", 20_000)
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_parquet(tmp_path / "a.parquet", row_group_size=200)
    place = tmp_path / ("a.csv" if kind == "csv" else "a.parquet")
    spec = TableSpec(target, missing="impute")
    whole, expected = read_dataset(place, spec)
    if kind == "folder":
        place = tmp_path / "parts"
        place.mkdir()
        frame[:700].to_parquet(place / "1.parquet", row_group_size=200)
        frame[700:].to_parquet(place / "2.parquet", row_group_size=200)
    rows, found = read_stream(place, spec)
    assert len(rows.reader.sizes) > 3
    assert found.columns == expected.columns and found.classes == expected.classes
    assert set(found.left_out) == set(expected.left_out) == {"row", "note"}
    x = np.concatenate([x.numpy() for _, x, _ in rows.blocks(500)])
    y = np.concatenate([y.numpy() for _, _, y in rows.blocks(500)])
    assert np.array_equal(x, expected.features(whole)[0])
    assert np.array_equal(y, expected.targets(whole))


def test_rare_values_are_gathered(
    frame: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the rows from which the schema is inferred, only a few are evenly spaced."""
    monkeypatch.setattr(schema, "MOST_GATHERED", 30)
    monkeypatch.setattr(schema, "_HEAD", 25)
    frame.loc[1111, "kind"] = "middle"
    frame.to_parquet(tmp_path / "a.parquet", row_group_size=200)
    spec = TableSpec("kind", missing="impute")
    _, expected = read_dataset(tmp_path / "a.parquet", spec)
    _, found = read_stream(tmp_path / "a.parquet", spec)
    assert found.classes == expected.classes and "middle" in (found.classes or ())
    assert found.left_out == expected.left_out
    for own, whole in zip(found.columns, expected.columns, strict=True):
        assert own.categories == whole.categories and own.indicator == whole.indicator


def test_faults_of_a_large_table_name_the_group(frame: pd.DataFrame, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    frame.to_parquet(path, row_group_size=200)
    with pytest.raises(DataError, match=r"'a'.*--missing impute"):
        read_stream(path, TableSpec("y"))
    with pytest.raises(DataError, match=r"no column 'yy'.*'y'"):
        read_stream(path, TableSpec("yy"))
    frame.loc[N - 2, "a"] = 0.0
    frame.to_parquet(path, row_group_size=200)
    rows, _ = read_stream(path, TableSpec("kind"))
    frame.loc[900, "kind"] = "new"
    frame.to_parquet(path, row_group_size=200)
    with pytest.raises(DataError, match="row group 0: the file has changed"):
        list(rows.blocks(100))


def run(*command: Any) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(part) for part in command])
    return done.exit_code, done.output + (str(done.exception) if done.exception else "")


@pytest.mark.slow
def test_fit_predict_and_watch(
    frame: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame.to_parquet(tmp_path / "a.parquet", row_group_size=200)
    frame.to_csv(tmp_path / "b.csv", index=False)
    out = tmp_path / "run"
    command = ["fit", tmp_path / "a.parquet", "-t", "y", "--missing", "impute", "--out", out]
    command += ["--steps", "400", "-m", "map", "--drop", "kind", "--test", tmp_path / "b.csv"]
    monkeypatch.setattr(schema, "STREAMED", 1000)
    code, text = run(*command)
    assert code == 0, text
    assert "windows of rows are read in turn" in text and "map: ok" in text
    monkeypatch.setattr(schema, "STREAMED", 1 << 30)
    code, text = run("predict", out, tmp_path / "b.csv", "--out", tmp_path / "p.csv")
    assert code == 0, text
    mean = pd.read_csv(tmp_path / "p.csv")["mean"]
    assert float(((mean - frame.y) ** 2).mean()) < 0.1
    code, whole = run("watch", out, tmp_path / "b.csv", "--state", tmp_path / "whole")
    again, parts = run("watch", out, tmp_path / "a.parquet", "--stream", "--state", tmp_path / "w")
    assert again == code and "1,500 rows, 1,500 with a target" in parts and "1,500" in whole
    assert parts.count("ALARM") == whole.count("ALARM")
    assert "counted before" in run(
        "watch", out, tmp_path / "a.parquet", "--stream", "--state", tmp_path / "w"
    )[1]  # fmt: skip


def test_options_that_need_all_rows(frame: pd.DataFrame, tmp_path: Path) -> None:
    frame.to_parquet(tmp_path / "a.parquet")
    first = ("fit", tmp_path / "a.parquet", "-t", "y", "--stream", "--out", tmp_path / "run")
    for option in (("--split", "0.2"), ("--group", "city"), ("--plan",)):
        code, text = run(*first, *option)
        assert code == 2 and f"{option[0]} needs" in text
    code, text = run(*first, "-m", "gp")
    assert code == 2 and "'gp' needs all rows in memory" in text
    assert "by mini-batches" in run("methods", "map")[1]
