"""From the shell to a calibrated prediction: rows held out, corrections, guarantees, scores."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import doxa
from doxa import evaluate
from doxa.app import held_out
from doxa.app.cli import app
from doxa.tables.schema import Column, Schema, TableSpec, infer_schema

pd = pytest.importorskip("pandas")


def shell(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def line(n: int, noise: float, seed: int) -> pd.DataFrame:
    """y = 3 + 2a − b + noise."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"a": rng.normal(5, 1, n), "b": rng.normal(-3, 0.1, n)})
    return frame.assign(y=3 + 2 * frame["a"] - frame["b"] + noise * rng.normal(size=n))


def species(n: int, seed: int) -> pd.DataFrame:
    """Three classes that overlap."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 3, n)
    x = np.array([[0, 0], [2, 0], [0, 2]])[label] + 0.9 * rng.normal(size=(n, 2))
    kinds = np.array(["ant", "bee", "cat"])[label]
    return pd.DataFrame({"u": x[:, 0], "v": x[:, 1], "kind": kinds})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables and two runs. New rows are three times as noisy as those of the fit: its intervals
    are too narrow for them."""
    there = tmp_path_factory.mktemp("calibrate")
    tables = {
        "train": line(200, 0.5, 0), "held": line(300, 1.5, 1), "new": line(400, 1.5, 2),
        "kinds": species(300, 3), "more-kinds": species(300, 4), "new-kinds": species(400, 5),
    }  # fmt: skip
    for name, frame in tables.items():
        frame.to_csv(there / f"{name}.csv", index=False)
    shell("fit", there / "train.csv", "-t", "y", "-m", "linear", "-o", there / "run")
    shell("fit", there / "kinds.csv", "-t", "kind", "-m", "map", "--steps", 60, "--hidden", 8,
          "--validation", 0, "-o", there / "classifier")  # fmt: skip
    return there


def predictions(run: Path, table: Path, out: Path, *options: object) -> pd.DataFrame:
    shell("predict", run, table, "-o", out, "--overwrite", *options)
    return pd.read_csv(out, keep_default_na=False)


def covered(p: pd.DataFrame, table: Path) -> float:
    y = pd.read_csv(table)["y"]
    return float(((p["low"] <= y) & (y <= p["high"])).mean())


def test_calibrated_intervals_hold_where_those_of_the_fit_do_not(folder, tmp_path) -> None:
    new = folder / "new.csv"
    before = predictions(folder / "run", new, tmp_path / "p.csv")
    assert covered(before, new) < 0.65
    said = shell("calibrate", folder / "run", folder / "held.csv", "-o", tmp_path / "better")
    assert "recalibrated by quantile on 300 rows: the 95 % intervals contained" in said
    after = predictions(tmp_path / "better", new, tmp_path / "p.csv")
    # 400 rows: one standard error is 0.011; 300 calibration rows add as much again
    assert 0.9 < covered(after, new) < 0.99
    metadata = doxa.load(tmp_path / "better").metadata
    step = metadata["calibration"][0]
    assert (step["kind"], step["level"], step["rows"]) == ("quantile", None, 300)
    assert step["sha256"] == held_out.checksum(folder / "held.csv")


def test_a_conformal_run_predicts_at_its_own_level(folder, tmp_path) -> None:
    out = tmp_path / "holds"
    said = shell("calibrate", folder / "run", folder / "held.csv", "--conformal", 0.8, "-o", out)
    assert "recalibrated" not in said and "probability 0.8" in said
    new = folder / "new.csv"
    p = predictions(out, new, tmp_path / "p.csv")  # no level is given: its own
    assert 0.74 < covered(p, new) < 0.86
    same = predictions(out, new, tmp_path / "q.csv", "--level", 0.8)
    pd.testing.assert_frame_equal(p, same)
    assert "calibrated for level 0.8" in shell("predict", out, new, "--level", 0.95, code=2)
    assert "probability 0.8" in shell("predict", out, new)


def test_sets_of_classes_are_a_column(folder, tmp_path) -> None:
    out, new = tmp_path / "sets", folder / "new-kinds.csv"
    said = shell("calibrate", folder / "classifier", folder / "more-kinds.csv", "--method", "auto",
                 "--conformal", 0.9, "-o", out)  # fmt: skip
    assert "recalibrated by temperature on 150 rows: temperature" in said
    assert "other 150 rows: sets of classes" in said
    p = predictions(out, new, tmp_path / "p.csv")
    sets = [set(text.split(" | ")) - {""} for text in p["set"]]
    assert [len(each) for each in sets] == p["set_size"].tolist()
    assert {len(each) for each in sets} >= {1, 2}  # overlapping classes: some rows need two
    truth = pd.read_csv(new)["kind"]
    held = np.mean([kind in each for kind, each in zip(truth, sets, strict=True)])
    assert 0.85 < held < 0.96
    likely = p[["p(ant)", "p(bee)", "p(cat)"]].idxmax(axis=1).str[2:-1]
    assert all(kind in each or not each for kind, each in zip(likely, sets, strict=True))


def test_a_level_gives_sets_by_the_models_own_account(folder, tmp_path) -> None:
    plain = predictions(folder / "classifier", folder / "new-kinds.csv", tmp_path / "p.csv")
    assert "set" not in plain
    p = predictions(folder / "classifier", folder / "new-kinds.csv", tmp_path / "p.csv",
                    "--level", 0.7)  # fmt: skip
    probs = {kind: p[f"p({kind})"] for kind in ("ant", "bee", "cat")}
    for row, text in enumerate(p["set"]):
        assert sum(probs[kind].iloc[row] for kind in text.split(" | ")) >= 0.7 - 1e-6


@pytest.fixture(scope="module")
def parted(folder: Path) -> Path:
    """A fit with rows to test and rows to calibrate on."""
    said = shell("fit", folder / "train.csv", "-t", "y", "-m", "linear", "--split", 0.25,
                 "--calibrate", "--conformal", 0.9, "--calibration-share", 0.3, "--seed", 4,
                 "-o", folder / "parted")  # fmt: skip
    assert "90 rows to train on, 50 to test on, 60 to calibrate on" in said
    assert "log likelihood" in said and "constant" in said and "90 % coverage" in said
    return folder / "parted"


def test_rows_held_out_are_not_trained_on(parted, folder) -> None:
    posterior = doxa.load(parted)
    digest = held_out.checksum(folder / "train.csv")
    rows = {}
    for name in ("held_out_rows", "calibration_rows"):
        assert posterior.metadata[name]["sha256"] == digest
        rows[name] = posterior.metadata[name]["rows"]
    test, calibration = rows["held_out_rows"], rows["calibration_rows"]
    assert not set(test) & set(calibration)
    train = np.setdiff1d(np.arange(200), [*test, *calibration])
    frame = pd.read_csv(folder / "train.csv")
    x, y = frame[["a", "b"]].to_numpy(), frame["y"].to_numpy()
    alone = doxa.fit(None, (x[train], y[train]), "linear", standardize=True, seed=4)
    np.testing.assert_array_equal(
        posterior.base.base.predict(x).mean.numpy(), alone.predict(x).mean.numpy()
    )


def test_scores_of_held_out_rows_are_kept_beside_a_constants(parted, folder) -> None:
    posterior = doxa.load(parted)
    kept = posterior.metadata["held_out_scores"]
    frame = pd.read_csv(folder / "train.csv")
    rows = posterior.metadata["held_out_rows"]["rows"]
    test = frame.iloc[rows]
    p = posterior.predict(test[["a", "b"]].to_numpy())
    assert kept["scores"] == pytest.approx(evaluate.metrics(p, test["y"].to_numpy(), level=0.9))
    assert (kept["rows"], kept["level"], kept["file"]) == (50, 0.9, "train.csv")
    others = sorted({*rows, *posterior.metadata["calibration_rows"]["rows"]})
    mean = frame["y"].drop(index=others).mean()
    assert kept["constant"]["rmse"] == pytest.approx(np.sqrt(((test["y"] - mean) ** 2).mean()))


def test_the_report_repeats_the_command(parted) -> None:
    from doxa.app.fitting import load_run
    from doxa.app.report import Subject
    from doxa.app.report.fitted import command

    posterior, schema = load_run(parted)
    line = command(Subject(posterior, schema.target, schema=schema)) or ""
    for words in ("--split 0.25", "--calibrate auto", "--conformal 0.9", "--calibration-share 0.3"):
        assert words in line


def test_the_seed_chooses_the_rows() -> None:
    first, same, other = (held_out.divide(100, 0.2, 0.1, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.test, same.test)
    assert set(first.test) != set(other.test)
    labels = np.repeat([0, 1], [90, 10])
    for part in (held_out.divide(100, 0.2, 0.2, 3, labels).test,
                 held_out.divide(100, 0.2, 0.2, 3, labels).calibration):  # fmt: skip
        assert labels[part].sum() == 2  # each class in proportion


def test_columns_are_read_from_the_training_rows_alone() -> None:
    frame = line(40, 0.5, 0).assign(colour=["red", "blue"] * 19 + ["red", "mauve"])
    parts = held_out.Parts(np.arange(38), np.array([38, 39]), np.array([], int))
    found = held_out.schema_of(frame, infer_schema(frame, "y"), parts, TableSpec("y"))
    assert found.columns[-1].categories == ("blue", "red")


def test_what_counts_the_rows_is_no_input_of_a_part_of_them() -> None:
    """Every other number of a customer counts nothing any more, and names rows still."""
    frame = line(60, 0.5, 0).assign(customer=np.arange(100234, 100294))
    parts = held_out.Parts(np.arange(0, 60, 2), np.arange(1, 60, 2), np.array([], int))
    whole = infer_schema(frame, "y")
    found = held_out.schema_of(frame, whole, parts, TableSpec("y"))
    assert [column.name for column in found.columns] == [column.name for column in whole.columns]
    assert found.left_out == ("customer",)
    assert [n for n in found.notes if "customer" in n] == [
        n for n in whole.notes if "customer" in n
    ]


def test_a_constant_is_scored_as_the_run_is() -> None:
    """The Brier score of two classes is that of one probability, whoever gives it."""
    schema = Schema("kind", "bernoulli", (Column("a"),), ("no", "yes"))
    seen, y = np.repeat([0.0, 1.0], [70, 30]), np.array([0.0, 1.0, 0.0])
    found = evaluate.metrics(held_out.constant(schema, seen, 3), y)
    share = 31 / 102  # one more of each than was seen
    assert found["brier"] == pytest.approx(np.mean((share - y) ** 2))
    assert found["log_likelihood"] == pytest.approx(np.log([1 - share, share, 1 - share]).mean())
    counts = Schema("n", "poisson", (Column("a"),))
    p = held_out.constant(counts, np.array([1.0, 5.0]), 2)
    np.testing.assert_allclose(p.mean, [3.0, 3.0], rtol=1e-6)


def test_a_file_of_test_rows(folder, tmp_path) -> None:
    said = shell("fit", folder / "kinds.csv", "-t", "kind", "-m", "map", "--steps", 30,
                 "--hidden", 8, "--validation", 0, "--test", folder / "new-kinds.csv",
                 "-o", tmp_path / "run", code=4)  # fmt: skip
    assert "map: underconfident (the 400 rows of --test new-kinds.csv would be predicted" in said
    assert "400 held-out rows of new-kinds.csv" in said
    assert all(word in said for word in ("accuracy", "ECE", "Brier"))
    posterior = doxa.load(tmp_path / "run")
    assert "held_out_rows" not in posterior.metadata  # every row of the table was trained on
    kept = posterior.metadata["held_out_scores"]
    assert kept["sha256"] == held_out.checksum(folder / "new-kinds.csv")
    truth = pd.read_csv(folder / "new-kinds.csv")["kind"]
    commonest = pd.read_csv(folder / "kinds.csv")["kind"].mode()[0]
    assert kept["constant"]["accuracy"] == pytest.approx((truth == commonest).mean())


def test_the_best_of_a_comparison_is_kept_as_a_run(folder, tmp_path) -> None:
    said = shell("compare", folder / "train.csv", "-t", "y", "--methods", "map,linear", "--steps",
                 5, "--splits", 2, "--reference", "none", "--keep", "best", "-o", tmp_path / "kept",
                 "--table", tmp_path / "t.csv")  # fmt: skip
    assert "keeping linear (the best by held-out log likelihood): fitted to all 200 rows" in said
    assert list(pd.read_csv(tmp_path / "t.csv")["method"]) == ["linear", "map"]
    kept = predictions(tmp_path / "kept", folder / "new.csv", tmp_path / "p.csv")
    fitted = predictions(folder / "run", folder / "new.csv", tmp_path / "q.csv")
    pd.testing.assert_frame_equal(kept, fitted)  # as `doxa fit` would
    metadata = doxa.load(tmp_path / "kept").metadata
    assert metadata["comparison"]["methods"] == ["linear", "map"]
    assert metadata["source"]["file"] == "train.csv"


def test_a_sampler_says_its_cost_before_it_starts(folder, tmp_path) -> None:
    said = shell("fit", folder / "train.csv", "-t", "y", "-m", "nuts", "--hidden", 2,
                 "--set", "draws=2", "--set", "burn_in=1", "--set", "max_depth=3",
                 "--allow-status", "-o", tmp_path / "r")  # fmt: skip
    bound = "nuts: 3 to 21 gradients of 4 chains on all 200 rows"
    assert bound in said
    assert said.index(bound) < said.index("nuts: 3 steps") < said.index("nuts: done at step 3")
    assert (
        re.search(r"[\x00-\x08\x0b-\x1f]", said) is None
    )  # a CI's log takes no control characters
    assert doxa.HMC(draws=10, burn_in=5, thin=2, leapfrog=7).gradients == (175, 175)


def test_the_version(monkeypatch, capsys) -> None:
    assert shell("--version") == f"doxa {doxa.__version__}"
    monkeypatch.setattr("sys.argv", ["doxa", "methods", "linear"])
    with pytest.raises(SystemExit) as ended:  # python -m doxa
        runpy.run_module("doxa", run_name="__main__")
    assert ended.value.code == 0
