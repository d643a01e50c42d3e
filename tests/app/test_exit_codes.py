"""The status of a saved run is that of its test rows, and the exit code of the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shell import doxa

import doxa as library

pd = pytest.importorskip("pandas")


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Rows with little noise to fit, and new ones with ten times as much."""
    rng = np.random.default_rng(0)
    for name, n, noise in (("data", 60, 0.1), ("same", 400, 0.1), ("noisy", 400, 1.0)):
        frame = pd.DataFrame({"a": rng.normal(size=n), "b": rng.normal(size=n)})
        frame["y"] = frame["a"] + noise * rng.normal(size=n)
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    return tmp_path


def test_test_rows_decide_the_exit_code(tables: Path) -> None:
    """Intervals a tenth as wide as they must be hold about 13 % of new rows."""
    words = ["fit", tables / "data.csv", "-t", "y", "-m", "linear", "--overwrite"]
    run, noisy = tables / "run", ["--test", tables / "noisy.csv"]
    doxa(*words, "-o", run, "--test", tables / "same.csv")
    assert library.load(run).status == "ok"
    said = doxa(*words, "-o", run, *noisy, code=4)
    assert "linear: worse-than-constant (the 400 rows of --test noisy.csv" in said
    assert "linear: ok" not in said and "saved to" in said
    status = library.load(run).status
    assert status == "worse-than-constant" and "400 rows of --test noisy.csv" in status.reason
    doxa(*words, "-o", run, *noisy, "--allow-status")
    assert library.load(run).status == "worse-than-constant"
    doxa("report", run, "--out", tables / "r.html")
    head = (tables / "r.html").read_text().partition("<main")[0]
    assert "Do not rely on it" in head and "400 rows of --test noisy.csv" in head


def test_a_report_on_new_rows_has_the_status_of_these_rows(tables: Path) -> None:
    doxa("fit", tables / "data.csv", "-t", "y", "-m", "linear", "-o", tables / "run")
    said = doxa(
        "report", tables / "run", "--test", tables / "noisy.csv", "--out", tables / "r.html"
    )
    assert "Do not rely on it" in said and "status" in said
    page = (tables / "r.html").read_text()
    assert "400 rows of noisy.csv" in page and "worse-than-constant" in page
    assert library.load(tables / "run").status == "ok"  # a report changes no run


def test_a_correction_evaluates_the_status_again(tables: Path) -> None:
    """With twice the noise, 90 % intervals hold 59 %."""
    rng = np.random.default_rng(5)
    for name in ("new", "more"):
        frame = pd.DataFrame({"a": rng.normal(size=400), "b": rng.normal(size=400)})
        frame["y"] = frame["a"] + 0.2 * rng.normal(size=400)
        frame.to_csv(tables / f"{name}.csv", index=False)
    run = tables / "run"
    words = ["fit", tables / "data.csv", "-t", "y", "-m", "linear", "-o", run]
    assert "overconfident" in doxa(*words, "--test", tables / "new.csv", code=4)
    said = doxa("calibrate", run, tables / "more.csv", "-o", tables / "calibrated")
    assert "status: overconfident before the correction, ok after it" in said
    assert library.load(tables / "calibrated").status == "ok"
    assert library.load(run).status == "overconfident"


def test_a_network_that_was_not_evaluated_is_not_ok(tables: Path) -> None:
    frame = pd.read_csv(tables / "data.csv")[:10]
    frame.to_csv(tables / "ten.csv", index=False)
    words = ["fit", tables / "ten.csv", "-t", "y", "--steps", 5, "--overwrite", "-o", tables / "r"]
    said = doxa(*words, "-m", "map", code=4)
    assert "not-evaluated" in said and "gp; linear" in said
    doxa(*words, "-m", "gp")
    words = ["compare", tables / "ten.csv", "-t", "y", "--methods", "map", "--steps", 5]
    words += ["--splits", 1, "--reference", "none"]
    doxa(*words)
    doxa(*words, "--keep", "map", "-o", tables / "kept", code=4)
    doxa(*words, "--keep", "map", "-o", tables / "also", "--allow-status")
