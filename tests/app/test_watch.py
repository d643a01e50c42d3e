"""`doxa watch` on tables: files, later labels, groups, the state, and the exit code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shell import doxa

import doxa as library
from doxa.evaluate import Watch

pd = pytest.importorskip("pandas")


def table(
    n: int, seed: int, noise: float = 0.5, shift: float = 0.0, first: int = 0
) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"a": rng.normal(size=n), "b": shift + rng.normal(size=n)})
    frame["y"] = frame["a"] + noise * rng.normal(size=n)
    return frame.assign(who=[f"w{first + k}" for k in range(n)])


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watch")
    table(150, 0).to_csv(folder / "data.csv", index=False)
    table(400, 1).to_csv(folder / "test.csv", index=False)
    table(300, 2).to_csv(folder / "good.csv", index=False)
    bad = table(200, 3, noise=1.5, first=300)
    bad.to_csv(folder / "bad.csv", index=False)
    bad.drop(columns="y").to_csv(folder / "unlabelled.csv", index=False)
    bad[["who", "y"]].to_csv(folder / "labels.csv", index=False)
    table(200, 4, shift=1.5, first=500).to_csv(folder / "moved.csv", index=False)
    doxa("fit", folder / "data.csv", "-t", "y", "--drop", "who", "-m", "linear",
         "--test", folder / "test.csv", "-o", folder / "run")  # fmt: skip
    return folder


def test_files_are_counted_once_and_alarms_stay(there: Path, tmp_path: Path) -> None:
    state = ["--state", tmp_path / "state"]
    said = doxa("watch", there / "run", there / "good.csv", *state)
    assert "300 rows, 300 with a target" in said and "400 rows of --test test.csv" in said
    said = doxa("watch", there / "run", there / "good.csv", *state)
    assert "good.csv was counted before: it is not counted again" in said
    posterior = library.load(there / "run")
    assert Watch.load(tmp_path / "state", posterior).tests["coverage"].rows == 300
    said = doxa("watch", there / "run", there / "bad.csv", *state, code=5)
    alarm = next(a for a in Watch.load(tmp_path / "state", posterior).alarms)
    assert alarm.test == "coverage" and alarm.row > 300
    assert alarm.place == f"line {alarm.row - 300 + 1} of bad.csv"  # after the header
    assert f"ALARM: coverage: {alarm.place}" in said and "2 new alarms" in said
    said = doxa("watch", there / "run", *state, code=5)  # an alarm stays
    assert "0 new alarms" in said
    said = doxa("watch", there / "run", there / "moved.csv", *state, code=5)
    assert "ALARM: inputs, 'b': line" in said and "1 new alarm:" in said
    assert "stays" in doxa("watch", there / "run", "--level", 0.01, *state, code=2)


def test_labels_that_come_later(there: Path, tmp_path: Path) -> None:
    run, state = there / "run", ["--state", tmp_path / "state"]
    said = doxa("watch", run, there / "unlabelled.csv", *state, "--key", "who")
    assert "200 rows, 0 with a target" in said and "--key" not in said
    assert "needs --key" in doxa("watch", run, "--labels", there / "labels.csv", *state, code=2)
    later = ["--labels", there / "labels.csv", "--key", "who"]
    said = doxa("watch", run, *later, *state, code=5)
    assert "200 of 200 targets belong to rows that wait for one; 0 still wait" in said
    assert "of unlabelled.csv" in said
    other = ["--state", tmp_path / "other"]
    doxa("watch", run, there / "bad.csv", *other, code=5)
    posterior = library.load(run)
    one, two = (Watch.load(tmp_path / n, posterior).tests["scores"] for n in ("state", "other"))
    assert one.log_m == pytest.approx(two.log_m) and one.alarm is not None
    assert two.alarm is not None and one.alarm.row == two.alarm.row
    said = doxa("watch", run, there / "unlabelled.csv", "--state", tmp_path / "none")
    assert "without --key, the targets of the others cannot be added later" in said


def test_rows_of_a_group_and_mistakes(there: Path, tmp_path: Path) -> None:
    frame = table(120, 5).assign(site=[f"s{k // 4}" for k in range(120)])
    frame.to_csv(tmp_path / "sites.csv", index=False)
    run, file, state = there / "run", tmp_path / "sites.csv", ["--state", tmp_path / "state"]
    doxa("watch", run, file, "--group", "site", *state)
    found = Watch.load(tmp_path / "state", library.load(run))
    assert found.tests["coverage"].rows == found.tests["inputs"].rows == 30
    frame["a"] += 0.001
    frame.to_csv(tmp_path / "gap.csv", index=False)
    again = ["watch", run, tmp_path / "gap.csv", *state, "--group"]
    assert "no column 'sight'" in doxa(*again, "sight", code=2)
    frame.loc[3, "site"] = None
    frame.to_csv(tmp_path / "gap.csv", index=False)
    said = doxa(*again, "site", code=2)
    assert "column 'site' is empty at line 5" in said
    doxa("fit", there / "data.csv", "-t", "y", "--drop", "who", "-m", "linear", "-o",
         tmp_path / "other")  # fmt: skip
    assert "of another run" in doxa("watch", tmp_path / "other", file, *state, code=2)
    doxa("watch", tmp_path / "other", file)  # only its inputs
    found = Watch.load(tmp_path / "other" / "watch", library.load(tmp_path / "other"))
    assert list(found.tests) == ["inputs"]
    again = ["fit", there / "data.csv", "-t", "y", "--drop", "who", "-m", "linear", "-o"]
    said = doxa(*again, tmp_path / "other", "--overwrite", code=2)
    assert "holds the state of doxa watch" in said
