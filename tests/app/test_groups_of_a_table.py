"""`--group` and `--time`: which rows of a table are held out, and what a run remembers of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shell import doxa

from doxa import load
from doxa.app.held_out import divide
from doxa.errors import DataError
from doxa.tables.columns import may_hold_groups
from doxa.tables.schema import Together

pd = pytest.importorskip("pandas")

QUICK = ["--steps", "60", "--hidden", "8", "--allow-status"]


@pytest.fixture
def visits(tmp_path: Path) -> Path:
    """30 persons with five visits each, on days that follow each other."""
    rng = np.random.default_rng(0)
    person = np.arange(30).repeat(5)
    frame = pd.DataFrame({"person": [f"p{k}" for k in person], "x": rng.normal(size=150)})
    days = pd.Timestamp("2024-01-01") + pd.to_timedelta(np.arange(150), unit="D")
    frame["day"] = days.strftime("%d.%m.%Y")
    frame["y"] = frame["x"] + rng.normal(size=30)[person] + 0.3 * rng.normal(size=150)
    frame.to_csv(tmp_path / "visits.csv", index=False)
    return tmp_path / "visits.csv"


def metadata(run: Path) -> Any:
    return load(run).metadata


def test_the_group_is_no_input_and_parts_are_whole_groups(visits, tmp_path) -> None:
    run = tmp_path / "run"
    said = doxa(
        "fit", visits, "-t", "y", "--group", "person", "--drop", "day", "--split", 0.2,
        "--conformal", 0.5, "-o", run, *QUICK,
    )  # fmt: skip
    assert "column 'person' dropped: it holds the groups" in said
    assert "30 groups, by 'person'" in said and "whole groups" in said
    assert "if new groups are like these" in said
    person = pd.read_csv(visits)["person"].to_numpy()
    posterior = load(run)
    assert posterior.diagnostics["held_out"]["groups"] > 0
    held = [
        set(person[posterior.metadata[k]["rows"]]) for k in ("held_out_rows", "calibration_rows")
    ]
    assert len(held[0]) == len(held[1]) == 6 and not held[0] & held[1]
    assert posterior.metadata["table"]["group"] == "person"
    new = pd.read_csv(visits).drop(columns=["person", "y", "day"])
    new.to_csv(tmp_path / "new.csv", index=False)
    assert "note" not in doxa("predict", run, tmp_path / "new.csv", "-o", tmp_path / "p.csv")
    assert "note" not in doxa("predict", run, visits, "-o", tmp_path / "q.csv"), "known columns"
    assert len(pd.read_csv(tmp_path / "q.csv")) == 150
    doxa("report", run, "--train", visits, "--out", tmp_path / "r.html")
    assert "--group person" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_calibration_of_a_run_needs_its_groups(visits, tmp_path) -> None:
    rng, run = np.random.default_rng(1), tmp_path / "run"
    doxa("fit", visits, "-t", "y", "--group", "person", "--drop", "day", "-o", run, *QUICK)
    more = pd.read_csv(visits)
    more["y"] += rng.normal(size=150)
    more.to_csv(tmp_path / "more.csv", index=False)
    said = doxa("calibrate", run, tmp_path / "more.csv", "--conformal", 0.8)
    assert "if new groups are like these" in said
    more.drop(columns="person").to_csv(tmp_path / "less.csv", index=False)
    less, out = tmp_path / "less.csv", tmp_path / "o"
    failed = doxa("calibrate", run, less, "--conformal", 0.8, "-o", out, code=2)
    assert "no column 'person'" in failed


def test_times_are_dates_and_an_input_only_if_asked(visits, tmp_path) -> None:
    run = tmp_path / "run"
    said = doxa(
        "fit", visits, "-t", "y", "--time", "day", "--drop", "person", "--split", 0.2, "-o", run,
        *QUICK,
    )  # fmt: skip
    assert "150 times, by 'day'" in said and "1 inputs per row" in said
    assert metadata(run)["held_out_rows"]["rows"] == list(range(120, 150)), "the last days"
    assert load(run).diagnostics["held_out"]["later_rows"]
    doxa("report", run, "--train", visits, "--out", tmp_path / "r.html")
    assert "--time day" in (tmp_path / "r.html").read_text(encoding="utf-8")
    other = tmp_path / "other"
    said = doxa(
        "fit", visits, "-t", "y", "--time", "day", "--time-input", "--group", "person", "-o",
        other, *QUICK,
    )  # fmt: skip
    assert "holds dates (day first)" in said and "30 groups, by 'person', 150 times" in said
    assert metadata(other)["asked"]["time_input"] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--group", "persn"], "no column 'persn'"),
        (["--group", "y"], "is the target and cannot be given as --group"),
        (["--time-input"], "--time-input needs --time"),
        (["--time", "day", "--conformal", "0.9"], "--time day says that new rows are later"),
        (["--time", "person"], "person"),
    ],
)  # fmt: skip
def test_mistakes(visits, tmp_path, words, message) -> None:
    said = doxa("fit", visits, "-t", "y", *words, "-o", tmp_path / "run", *QUICK, code=2)
    assert message in said


def test_an_empty_cell_names_its_row(visits, tmp_path) -> None:
    frame = pd.read_csv(visits)
    frame.loc[7, "person"] = None
    frame.to_csv(visits, index=False)
    failed = doxa(
        "fit", visits, "-t", "y", "--group", "person", "-o", tmp_path / "run", *QUICK, code=2
    )
    assert "'person'" in failed and "line 9" in failed


def test_rows_are_divided_by_groups_and_times() -> None:
    groups, time = np.arange(40).repeat(5).astype(str), np.arange(200.0)
    by_time = divide(200, 0.1, 0.2, 0, None, Together(None, time))
    assert by_time.train.tolist() == list(range(140))
    assert by_time.calibration.tolist() == list(range(140, 180))
    both = divide(200, 0.1, 0.0, 0, None, Together(groups, time))
    assert both.test.tolist() == list(range(180, 200)), "the groups that begin last"
    alone = [divide(200, 0.1, 0.2, seed, None, Together(groups, None)) for seed in (0, 0, 1)]
    assert alone[0].test.tolist() == alone[1].test.tolist() != alone[2].test.tolist()
    with pytest.raises(DataError, match="cannot be divided"):
        divide(200, 0.5, 0.0, 0, None, Together(np.array(["a"] * 200), None))


def test_a_report_calls_dates_dates(visits, tmp_path) -> None:
    run, later = tmp_path / "run", tmp_path / "later.csv"
    doxa("fit", visits, "-t", "y", "--drop", "person", "-o", run, *QUICK)
    frame = pd.read_csv(visits)
    frame["day"] = (
        pd.Timestamp("2026-01-01") + pd.to_timedelta(np.arange(150), unit="D")
    ).strftime("%d.%m.%Y")
    frame.to_csv(later, index=False)
    doxa("report", run, "--train", visits, "--test", later, "--out", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "of other dates than the training rows" in page and "in other units" not in page


@pytest.mark.parametrize(
    ("name", "cells", "may"),
    [
        ("who", [f"p{k}" for k in range(30)] * 4, True),
        ("who", [f"p{k}" for k in range(10)] * 12, False),  # a category
        ("patient_id", [f"p{k}" for k in range(10)] * 12, True),
        ("patient_id", [f"p{k}" for k in range(120)], False),  # each value once
        ("code", list(range(40)) * 3, True),
        ("code", [*range(39), *range(39), *range(40), 7, 7], False),  # 39 occurs once
        ("code", [0.5 * k for k in range(40)] * 3, False),
        ("who", [*[f"p{k}" for k in range(30)] * 4, None], False),
        ("text", [str(k) for k in range(40)] * 3, False),  # numbers
        ("day", [f"2024-01-{k:02}" for k in range(1, 31)] * 4, False),  # dates
    ],
)
def test_which_columns_may_hold_groups(name: str, cells: list[Any], may: bool) -> None:
    assert may_hold_groups(pd.Series(cells, name=name)) is may


def test_a_leaking_column_is_named_with_its_option(tmp_path) -> None:
    rng = np.random.default_rng(0)
    person = np.arange(40).repeat(6)
    frame = pd.DataFrame({"person": [f"p{k}" for k in person], "x": rng.normal(size=240)})
    frame["age"] = rng.normal(size=40)[person]
    frame["y"] = frame["x"] + rng.normal(size=40)[person] + 0.3 * rng.normal(size=240)
    frame.to_csv(tmp_path / "t.csv", index=False)
    said = doxa("fit", tmp_path / "t.csv", "-t", "y", "-o", tmp_path / "run", *QUICK)
    assert "rows belong together by column 'person'" in said and "use --group person" in said
    (leak,) = metadata(tmp_path / "run")["leakage"]
    assert (leak["column"], leak["option"]) == ("person", "--group") and leak["loss"] > 0.05
    doxa("report", tmp_path / "run", "--out", tmp_path / "r.html")
    assert "use --group person" in (tmp_path / "r.html").read_text(encoding="utf-8")
    options = ["-t", "y", "--group", "person", "-o", tmp_path / "other", *QUICK]
    assert "belong together" not in doxa("fit", tmp_path / "t.csv", *options)
    frame["y"] = frame["x"] + 0.3 * rng.normal(size=240)
    frame.to_csv(tmp_path / "t.csv", index=False)
    options = ["-t", "y", "-o", tmp_path / "third", *QUICK]
    assert "belong together" not in doxa("fit", tmp_path / "t.csv", *options)
