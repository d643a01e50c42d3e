"""One door for tables: the shell and Python read, encode, fit and predict a table alike."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import doxa
from doxa.errors import DataError, MethodError
from doxa.sklearn import BayesianClassifier, BayesianRegressor
from doxa.tabular import in_python

pandas = pytest.importorskip("pandas")
from typer.testing import CliRunner  # noqa: E402

from doxa.app.cli import app  # noqa: E402

OPTIONS: dict[str, Any] = {"epochs": 3, "members": 2, "progress": False}


def rents(rows: int = 60) -> Any:
    """Text, dates, a number, and a target."""
    random = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {
            "size": random.normal(70.0, 9.0, rows),
            "town": random.choice(["Oslo", "Rome", "Turin"], rows),
            "day": pandas.date_range("2024-01-05", periods=rows, freq="9D").strftime("%d.%m.%Y"),
        }
    )
    frame["rent"] = 12.0 * frame["size"] + 80.0 * (frame["town"] == "Oslo") + random.normal(rows)
    return frame


def shell(*words: str) -> str:
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code in (0, 4), done.output
    return done.output


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a table, a run that the shell has fitted and its predictions; and the fit in
    Python."""
    folder = tmp_path_factory.mktemp("door")
    rents().to_csv(folder / "rents.csv", index=False)
    shell("fit", f"{folder}/rents.csv", "--target", "rent", "--epochs", "3", "--members", "2",
          "--out", f"{folder}/shell")  # fmt: skip
    shell("predict", f"{folder}/shell", f"{folder}/rents.csv", "--out", f"{folder}/shell.parquet")
    return folder, doxa.fit_table(rents(), target="rent", **OPTIONS)


def shuffled() -> Any:
    """The rows with other columns in between, in another order, with the index kept."""
    return rents()[["day", "town", "size"]].assign(colour="red")


def test_a_run_of_the_shell_predicts_a_frame_with_the_same_bits(both: tuple[Path, Any]) -> None:
    folder, _ = both
    written = pandas.read_parquet(folder / "shell.parquet")
    run = doxa.load(folder / "shell")
    p = run.predict(shuffled())
    assert np.array_equal(p.mean.double().numpy(), written["mean"].to_numpy())
    table = doxa.predict_table(run, shuffled())
    for name in ("mean", "std", "aleatoric_std", "epistemic_std", "low", "high", "level"):
        assert np.array_equal(table[name].to_numpy(), written[name].to_numpy()), name
    same = run.functions(rents()[["size", "town", "day"]], 2)
    assert torch.equal(run.functions(shuffled(), 2), same)


def test_a_fit_in_python_has_the_bits_of_the_shell_and_is_a_run(both: tuple[Path, Any]) -> None:
    folder, fitted = both
    written = pandas.read_parquet(folder / "shell.parquet")
    assert np.array_equal(fitted.predict(shuffled()).mean.double().numpy(), written["mean"])
    fitted.save(folder / "python")
    shell("predict", f"{folder}/python", f"{folder}/rents.csv", "--out", f"{folder}/python.parquet")
    assert pandas.read_parquet(folder / "python.parquet").equals(written)
    from_file = doxa.fit_table(folder / "rents.csv", "rent", **OPTIONS)
    assert torch.equal(from_file.predict(shuffled()).mean, fitted.predict(shuffled()).mean)


def test_the_reader_is_that_of_the_shell(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("größe;preis;k\n1,5;2;a\n2,5;3;b\n".encode("cp1252"))
    table = doxa.read_table(path, index="k")
    assert isinstance(table, doxa.Table) and len(table) == 2
    assert table.frame["größe"].tolist() == [1.5, 2.5] and table.frame.index.tolist() == ["a", "b"]
    assert "semicolons" in table.notes[0] and "semicolons" in repr(table)
    with pytest.raises(DataError, match="--sep takes a character"):
        doxa.read_table(path, sep="ab")


def test_messages_name_columns(both: tuple[Path, Any], caplog: pytest.LogCaptureFixture) -> None:
    _, fitted = both
    with pytest.raises(DataError, match="no column 'town'"):
        fitted.predict(shuffled().drop(columns="town"))
    with pytest.raises(DataError, match="missing values: column 'size', row 3"):
        fitted.predict(shuffled().assign(size=[1.0, 2.0, 3.0, np.nan] + [1.0] * 56))
    with caplog.at_level(logging.WARNING, "doxa"):
        fitted.predict(shuffled().assign(town="Bergen", size=1e6))
    assert "column 'town': 'Bergen' not seen in the fit (60 rows)" in caplog.text
    assert "'colour'" in caplog.text and "'size'" in caplog.text
    with pytest.raises(DataError, match=r"column 'size', row 0.*'big' is not a number"):
        fitted.predict(shuffled().assign(size="big"))


def test_gaps_of_new_rows_are_filled_with_the_medians_of_the_fit(both: tuple[Path, Any]) -> None:
    folder, fitted = both
    gaps = rents()
    middle = float(gaps["size"].median())
    filled = gaps.assign(size=gaps["size"].where(gaps.index != 4, middle))
    gaps.loc[4, "size"] = np.nan
    found = doxa.predict_table(fitted, gaps, missing="impute")
    assert found["mean"].equals(doxa.predict_table(fitted, filled)["mean"])
    gaps.to_csv(folder / "gaps.csv", index=False)
    done = CliRunner().invoke(app, ["predict", f"{folder}/shell", f"{folder}/gaps.csv"])
    assert done.exit_code == 2 and "column 'size', line 6" in " ".join(done.output.split())
    for out in ("filled.parquet", "parts"):
        shell("predict", f"{folder}/shell", f"{folder}/gaps.csv", "--missing", "impute",
              "--out", f"{folder}/{out}")  # fmt: skip
        written = pandas.read_parquet(folder / out)
        assert np.array_equal(written["mean"].to_numpy(), found["mean"].to_numpy())
    again = CliRunner().invoke(app, ["predict", f"{folder}/shell", f"{folder}/gaps.csv",
                                     "--out", f"{folder}/parts"])  # fmt: skip
    assert again.exit_code == 2 and "--missing" in again.output


def test_classes_groups_and_labels(tmp_path: Path) -> None:
    frame = rents(80)
    frame["dear"] = np.where(frame.pop("rent") > 840.0, "yes", "no")
    frame["street"] = np.repeat([f"s{k}" for k in range(8)], 10)
    frame.to_csv(tmp_path / "t.csv", index=False)
    fitted = doxa.fit_table(frame, "dear", "map", group="street", epochs=3, progress=False)
    assert fitted.table is not None
    assert fitted.table.classes == ("no", "yes") and fitted.table.group == "street"
    shell("fit", f"{tmp_path}/t.csv", "--target", "dear", "--method", "map", "--group", "street",
          "--epochs", "3", "--out", f"{tmp_path}/run")  # fmt: skip
    of_shell = doxa.load(tmp_path / "run")
    ours, theirs = (doxa.predict_table(each, frame, level=0.9) for each in (fitted, of_shell))
    assert ours.equals(theirs)
    assert {"p(no)", "p(yes)", "predicted", "set", "set_size", "level"} <= set(ours.columns)
    p = fitted.predict(frame)
    scores = doxa.evaluate.metrics(p, torch.as_tensor(fitted.table.targets(frame)))
    assert 0.0 <= scores["accuracy"] <= 1.0


def test_what_cannot_be_fitted_says_so() -> None:
    with pytest.raises(DataError, match=r"a table is a data frame.*not ndarray"):
        doxa.fit_table(np.ones((3, 2)), "y")
    with pytest.raises(DataError, match="no column 'ren'; did you mean 'rent'"):
        doxa.fit_table(rents(), "ren", **OPTIONS)
    with pytest.raises(MethodError, match="fit_table sets groups itself"):
        doxa.fit_table(rents(), "rent", groups=[1])
    with pytest.raises(MethodError, match="needs no network"):
        doxa.fit_table(rents(), "rent", "gp", net=torch.nn.Linear(3, 1))
    plain = doxa.fit(doxa.nets.mlp(1, 1), (np.ones((4, 1)), np.arange(4.0)), "map", steps=1)
    assert plain.table is None
    with pytest.raises(DataError, match=r"doxa\.fit_table fits one"):
        doxa.predict_table(plain, rents())


def test_the_estimators_use_the_same_encoders(tmp_path: Path) -> None:
    """The inputs of the network are those of `fit_table`, and the bits too."""
    frame = rents()
    y = frame.pop("rent")
    regressor = BayesianRegressor(epochs=3, members=2, dtype="float32").fit(frame, y)
    fitted = doxa.fit_table(rents(), "rent", **OPTIONS)
    assert np.array_equal(regressor.predict(frame), fitted.predict(frame).mean.double().numpy())
    assert regressor.n_features_in_ == 3 and regressor.feature_names_in_.tolist() == [*frame]
    regressor.save(tmp_path / "r")
    again = BayesianRegressor.load(tmp_path / "r")
    assert np.array_equal(again.predict(frame), regressor.predict(frame))
    with pytest.raises(DataError, match="same order as they were in fit"):
        regressor.predict(frame[["town", "size", "day"]])
    with pytest.raises(DataError, match="pass a data frame with the columns 'size', 'town'"):
        regressor.predict(np.ones((2, 3)))
    labels = np.where(y > 840, "a", "b")
    numbers = frame[["size"]]
    classifier = BayesianClassifier("map", steps=5).fit(frame, labels).fit(numbers, labels)
    assert "columns_" not in vars(classifier) and len(classifier.predict(numbers)) == 60


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("--missing impute fills them in; or drop a column with --drop",
         'missing="impute" fills them in; or drop a column with drop='),
        ("--time-input needs --time, the column of times",
         "time_input= needs time=, the column of times"),
        ("a well-known column -- 3 rows", "a well-known column -- 3 rows"),
    ],
)  # fmt: skip
def test_messages_of_a_table_name_arguments_in_python(said: str, meant: str) -> None:
    assert in_python(said) == meant


def test_an_error_of_a_table_says_what_to_pass() -> None:
    frame = pandas.DataFrame({"a": [1.0, None, 3.0, 4.0], "y": [1.0, 2.0, 3.0, 4.0]})
    with pytest.raises(DataError, match=r'column \'a\'.*missing="impute".*drop=') as caught:
        doxa.fit_table(frame, "y", "map")
    assert "--" not in str(caught.value)
