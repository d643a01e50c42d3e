"""The command line end to end, against least squares, and its errors: one line, exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from shell import doxa
from typer.testing import CliRunner

from doxa import fit_table
from doxa.app.cli import app
from doxa.app.fitting import Plan, make_method, say_held_out
from doxa.likelihoods import LIKELIHOODS

pd = pytest.importorskip("pandas")

QUICK = ["--steps", "200"]
ANY = ["--allow-status"]  # of few steps


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """y = 3 + 2a − b + shift(colour) + noise, far from zero and one."""
    rng = np.random.default_rng(0)
    n = 200
    frame = pd.DataFrame({"a": rng.normal(50, 10, n), "b": rng.normal(-3, 0.1, n)})
    frame["colour"] = rng.choice(["red", "blue"], n)
    shift = np.where(frame["colour"] == "red", 7.0, 0.0)
    frame["y"] = 3 + 2 * frame["a"] - 40 * frame["b"] + shift + 0.5 * rng.normal(size=n)
    frame.index = [f"row-{k}" for k in range(n)]
    frame.to_csv(tmp_path / "numbers.csv")
    return tmp_path / "numbers.csv"


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    label = rng.integers(0, 3, 150)
    centres = np.array([[0, 0], [4, 0], [0, 4]])
    x = centres[label] + 0.5 * rng.normal(size=(150, 2))
    frame = pd.DataFrame({"u": x[:, 0], "v": x[:, 1]})
    frame["kind"] = np.array(["ant", "bee", "cat"])[label]
    frame.to_parquet(tmp_path / "classes.parquet")
    return tmp_path / "classes.parquet"


def test_a_linear_fit_is_least_squares_in_the_units_of_the_table(numbers, tmp_path) -> None:
    said = doxa("fit", numbers, "--target", "y", "--method", "linear", "--out", tmp_path / "run")
    assert "regression, likelihood gaussian" in said
    assert "'colour' is categorical" in said
    doxa("predict", tmp_path / "run", numbers, "--out", tmp_path / "p.csv")
    p = pd.read_csv(tmp_path / "p.csv", index_col=0)
    frame = pd.read_csv(numbers, index_col=0)
    design = np.column_stack([np.ones(200), frame["a"], frame["b"], frame["colour"] == "red"])
    ols = design @ np.linalg.lstsq(design, frame["y"], rcond=None)[0]
    assert list(p.index) == list(frame.index)
    assert np.abs(p["mean"] - ols).max() < 0.05 * frame["y"].std()
    assert np.allclose(p["aleatoric_std"] ** 2 + p["epistemic_std"] ** 2, p["std"] ** 2, rtol=1e-4)
    assert np.all((p["low"] < p["mean"]) & (p["mean"] < p["high"]))
    # 0.5 is the noise the table was made with, in its own units
    assert p["aleatoric_std"].mean() == pytest.approx(0.5, rel=0.15)
    inside = ((p["low"] <= frame["y"]) & (frame["y"] <= p["high"])).mean()
    assert 0.9 <= inside <= 1.0


def test_classes_come_back_as_their_labels(classes, tmp_path) -> None:
    said = doxa("fit", classes, "-t", "kind", "-m", "map", "-o", tmp_path / "run", *QUICK)
    assert "classification, 3 classes (ant, bee, cat), likelihood categorical" in said
    doxa("predict", tmp_path / "run", classes, "-o", tmp_path / "p.parquet")
    p = pd.read_parquet(tmp_path / "p.parquet")
    truth = pd.read_parquet(classes)["kind"]
    assert (p["predicted"] == truth).mean() > 0.95
    assert np.allclose(p[["p(ant)", "p(bee)", "p(cat)"]].sum(axis=1), 1.0, atol=1e-5)
    assert np.all(p["mutual_information"] <= p["entropy"] + 1e-6)


def test_two_classes_and_a_terminal_table(tmp_path) -> None:
    rng = np.random.default_rng(2)
    u = rng.normal(size=100)
    frame = pd.DataFrame({"u": u, "ok": np.where(u > 0, "yes", "no")})
    frame.to_csv(tmp_path / "t.csv", index=False)
    said = doxa("fit", tmp_path / "t.csv", "-t", "ok", "-m", "map", "-o", tmp_path / "r", *QUICK)
    assert "likelihood bernoulli" in said
    doxa("predict", tmp_path / "r", tmp_path / "t.csv", "-o", tmp_path / "p.csv")
    p = pd.read_csv(tmp_path / "p.csv")
    assert (p["predicted"] == frame["ok"]).mean() > 0.9
    assert p["line"].tolist() == list(range(2, 102))
    shown = doxa("predict", tmp_path / "r", tmp_path / "t.csv")
    assert "80 more rows" in shown


def test_a_seed_fixes_the_result_and_members_are_counted(numbers, tmp_path) -> None:
    tables = []
    for run, seed in (("r1", 1), ("r2", 1), ("r3", 2)):
        doxa("fit", numbers, "-t", "y", "-m", "deep-ensemble", "--members", 3, "--seed", seed,
             "-o", tmp_path / run, *QUICK, *ANY)  # fmt: skip
        doxa("predict", tmp_path / run, numbers, "-o", tmp_path / f"{run}.csv")
        tables.append((tmp_path / f"{run}.csv").read_text())
    assert tables[0] == tables[1] != tables[2]


def test_an_unseen_category_is_noted(numbers, tmp_path) -> None:
    doxa("fit", numbers, "-t", "y", "-m", "linear", "-o", tmp_path / "run")
    new = pd.DataFrame({"a": [50.0], "b": [-3.0], "colour": ["mauve"]})
    new.to_csv(tmp_path / "new.csv", index=False)
    said = doxa("predict", tmp_path / "run", tmp_path / "new.csv", "-o", tmp_path / "p.csv")
    assert "'mauve' not seen in the fit" in said
    assert len(pd.read_csv(tmp_path / "p.csv")) == 1


@pytest.mark.slow
def test_compare_scores_methods_on_the_same_held_out_rows(numbers, tmp_path) -> None:
    said = doxa("compare", numbers, "-t", "y", "--methods", "map,linear", *QUICK, "--splits", 2,
                "--reference", "none", "-o", tmp_path / "scores.csv")  # fmt: skip
    assert "held-out scores" in said
    table = pd.read_csv(tmp_path / "scores.csv", index_col="method")
    assert list(table.index) == ["linear", "map"]  # the best first
    assert {"log_likelihood", "rmse", "coverage", "seconds", "status"} <= set(table.columns)
    # noise 0.5: no method can do better, and the exact one comes close
    assert 0.35 < table.loc["linear", "rmse"] < 0.75


def test_a_network_of_ones_own(numbers, tmp_path, monkeypatch) -> None:
    (tmp_path / "mynets_for_test.py").write_text(
        "from torch import nn\n"
        "def wide(inputs, outputs):\n"
        "    return nn.Sequential(nn.Linear(inputs, 7), nn.Tanh(), nn.Linear(7, outputs))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    doxa(
        "fit", numbers, "-t", "y", "-m", "map", "-o", "run", "--net", "mynets_for_test:wide",
        *QUICK, *ANY,
    )  # fmt: skip
    said = doxa("predict", "run", numbers, code=2)
    assert "pass --net mynets_for_test:wide" in said
    doxa("predict", "run", numbers, "--net", "mynets_for_test:wide", "-o", "p.csv")
    assert len(pd.read_csv("p.csv")) == 200
    assert "has no 'wid'; did you mean 'wide'" in doxa(
        "fit", numbers, "-t", "y", "-o", "other", "--net", "mynets_for_test:wid", code=2
    )


@pytest.mark.slow
def test_settings_of_a_method_are_flags(numbers, tmp_path) -> None:
    said = doxa("methods", "mc-dropout")
    assert "--set" in said and "allowed" in said
    assert "0 < p < 1" in " ".join(said.split())
    assert all(choice in said for choice in ("'hidden'", "'all'", "'never'"))
    words = ["fit", numbers, "-t", "y", "-m", "mc-dropout", "--set", "p=0.3", "-o", tmp_path / "r"]
    doxa(*words, *QUICK, *ANY)
    import doxa as package

    assert package.load(tmp_path / "r").method.p == 0.3


def test_the_table_of_methods_lists_every_method() -> None:
    import doxa as package

    said = doxa("methods")
    for row in package.methods():
        assert row.name in said
    typed = doxa("methods", "--markdown")
    assert typed == " ".join(package.methods().markdown().split())


def test_a_method_is_shown_as_its_row_describes_it() -> None:
    said = doxa("methods", "laplace")
    assert "for: regression, classification gives: evidence, uncertainty after training" in said
    assert "model selection by: evidence" in said
    assert "described in: docs/methods.md" in said
    assert "for: regression gives" in doxa("methods", "gp")
    assert "extra: pip install 'doxa[flows]'" in doxa("methods", "flow-vi")
    assert "model selection by: ELBO" in doxa("methods", "mean-field")
    assert "model selection" not in doxa("methods", "hmc")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit", "{csv}", "-t", "yy"], "no column 'yy'; did you mean 'y'?"),
        (["fit", "{csv}", "-t", "y", "-m", "deep-ensembel"], "did you mean 'deep-ensemble'"),
        (["fit", "{csv}", "-t", "y", "-m", "mc-dropout", "--set", "q=1"], "no setting 'q'"),
        (["fit", "{csv}", "-t", "y", "-m", "mc-dropout", "--set", "p"], "NAME=VALUE"),
        (
            ["fit", "{csv}", "-t", "y", "-m", "mc-dropout", "--set", "p=2"],
            "0 < p < 1, or None, not 2",
        ),
        (
            ["fit", "{csv}", "-t", "y", "-m", "nuts", "--set", "mass=x"],
            "'diagonal', 'full', not 'x'",
        ),
        (["fit", "{csv}", "-t", "y", "--likelihood", "normal"], "unknown likelihood 'normal'"),
        (["fit", "{csv}", "-t", "y", "--epochs", "2", "--steps", "3"], "not both"),
        (["fit", "{csv}", "-t", "y", "--hidden", "a,b"], "--hidden takes widths"),
        (["fit", "{csv}", "-t", "y", "--net", "nets.py:wide"], "module:builder"),
        (["fit", "{csv}", "-t", "y", "--net", "no_such_module:f"], "cannot import"),
        (["fit", "{csv}", "-t", "y", "--out", "{csv}"], "is a file"),
        (["fit", "{csv}", "-t", "y", "--drop", "aa"], "no column 'aa'"),
        (["fit", "{folder}/none.csv", "-t", "y"], "does not exist"),
        (["fit", "{folder}/empty.csv", "-t", "y"], "is empty"),
        (["fit", "{folder}/header.csv", "-t", "y"], "no rows"),
        (["fit", "{folder}/text.csv", "-t", "y"], "column 'a', line 4: 'oops' is not a number"),
        (["fit", "{folder}/nan.csv", "-t", "y"], "missing values: column 'a', line 3"),
        (["fit", "{folder}/one.csv", "-t", "kind"], "one class only ('k')"),
        (["fit", "{folder}/two.csv", "-t", "kind", "-m", "gp"], "for regression only"),
        (["predict", "{folder}/nowhere", "{csv}"], "nowhere"),
        (["predict", "{folder}", "{csv}", "--level", "2"], "between 0 and 1"),
        (["predict", "{folder}", "{csv}", "--out", "p.json"], "written as .csv"),
        (["compare", "{csv}", "-t", "y", "--methods", "map,swagg"], "'swagg'"),
        (["compare", "{csv}", "-t", "y", "--methods", ","], "--methods is empty"),
        (["compare", "{csv}", "-t", "y", "--test-fraction", "1.5"], "between 0 and 1"),
        (["methods", "hcm"], "did you mean 'hmc'"),
    ],
)
def test_an_error_is_one_line_and_exit_code_two(numbers, tmp_path, words, message) -> None:
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "header.csv").write_text("a,y\n")
    (tmp_path / "text.csv").write_text("a,y\n1,1.5\n2,2.5\noops,3.5\n")
    (tmp_path / "nan.csv").write_text("a,y\n1,1.5\n,2.5\n3,3.5\n")
    (tmp_path / "one.csv").write_text("a,kind\n1,k\n2,k\n3,k\n")
    (tmp_path / "two.csv").write_text("a,kind\n" + "1,k\n2,l\n" * 5)
    filled = [word.format(csv=numbers, folder=tmp_path) for word in words]
    if filled[0] == "fit" and "--out" not in filled:
        filled += ["--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, filled)
    text = " ".join(result.stderr.split())
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert message in text
    assert "Traceback" not in result.output
    assert not (tmp_path / "run").exists()


def test_a_folder_with_other_files_is_not_overwritten(numbers, tmp_path) -> None:
    precious = tmp_path / "photos"
    precious.mkdir()
    (precious / "cat.jpg").write_text("meow")
    said = doxa("fit", numbers, "-t", "y", "-m", "map", "-o", precious, *QUICK, code=2)
    assert "holds other files" in said
    assert (precious / "cat.jpg").read_text() == "meow"


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    """Ten inputs, of which one matters a little: a network can learn the rest by heart."""
    rng = np.random.default_rng(2)
    frame = pd.DataFrame({f"x{k}": rng.normal(size=200) for k in range(10)})
    frame["y"] = 0.5 * frame["x0"] + rng.normal(size=200)
    frame.to_csv(tmp_path / "noise.csv", index=False)
    return tmp_path / "noise.csv"


@pytest.mark.parametrize(
    ("rows", "method", "words"),
    [(7, "map", ""), (30, "map", "divided into 5 parts, and 5 networks"),
     (30, "deep-ensemble", "each member holds out a different 20% of the rows"),
     (599, "map", "divided into 10 parts"),
     (600, "map", "each member holds out a different 10% of the rows"), (30, "gp", "")],
)  # fmt: skip
def test_what_is_held_out_is_said(rows: int, method: str, words: str) -> None:
    said = say_held_out(Plan(), make_method(method, []), rows)
    assert words in said and bool(said) == bool(words)
    assert say_held_out(Plan(validation=0.0), make_method(method, []), rows) == ""


@pytest.mark.slow
def test_training_stops_in_time_unless_told_otherwise(noise, tmp_path) -> None:
    rng = np.random.default_rng(3)
    fresh = pd.DataFrame({f"x{k}": rng.normal(size=500) for k in range(10)})
    fresh.to_csv(tmp_path / "fresh.csv", index=False)
    truth = 0.5 * fresh["x0"]

    def error(*options: object) -> tuple[str, float]:
        out = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        said = doxa("fit", noise, "-t", "y", "-m", "map", "-o", out, *options)
        doxa("predict", out, tmp_path / "fresh.csv", "-o", tmp_path / "p.csv", "--overwrite")
        return said, float(np.sqrt(((pd.read_csv(tmp_path / "p.csv")["mean"] - truth) ** 2).mean()))

    said, stopped = error()
    assert "divided into 10 parts" in said
    said, whole = error("--validation", 0)
    assert "held out" not in said
    assert stopped < 0.6 * whole  # what was learned by heart is of no use on new rows
    assert "divided into 10 parts" in error("--steps", 50)[0]  # so long at most
    assert "20% of the rows" in error("--steps", 50, "--validation", 0.2)[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["deep-ensemble", "mc-dropout"])
def test_the_shell_and_python_share_their_defaults(method, noise, tmp_path) -> None:
    """The same table, seed and network: the same posterior."""
    from doxa import fit, load, nets

    doxa("fit", noise, "-t", "y", "-m", method, "-o", tmp_path / "run", *QUICK)
    frame = pd.read_csv(noise)
    x, y = frame.drop(columns="y").to_numpy(), frame["y"].to_numpy()
    ours = fit(nets.mlp(10, 1, (50,)), (x, y), method, standardize=True, steps=200, progress=False)
    theirs = load(tmp_path / "run")
    assert ours.validation is not None and ours.validation == theirs.validation
    np.testing.assert_array_equal(ours.predict(x[:9]).mean, theirs.predict(x[:9]).mean)


@pytest.mark.slow
def test_few_rows_are_all_trained_on(noise, tmp_path) -> None:
    pd.read_csv(noise).head(40).to_csv(tmp_path / "few.csv", index=False)
    said = doxa("fit", tmp_path / "few.csv", "-t", "y", "-m", "map", "-o", tmp_path / "run")
    assert "hold" not in said
    said = doxa("fit", noise, "-t", "y", "-m", "linear", "-o", tmp_path / "linear")
    assert "hold" not in said


def test_help_imports_no_torch() -> None:
    """`doxa --help` and the help of a command answer without torch, pandas or matplotlib."""
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom doxa.app.cli import app\n"
        "for words in (['--help'], ['fit', '--help'], ['compare', '--help']):\n"
        "    assert CliRunner().invoke(app, words).exit_code == 0\n"
        "heavy = ('torch', 'pandas', 'numpy', 'matplotlib')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_help_lists_every_likelihood() -> None:
    from doxa.app.options import LIKELIHOOD_NAMES

    assert tuple(LIKELIHOODS) == LIKELIHOOD_NAMES


def test_predictions_are_not_replaced_without_being_asked(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n" + "\n".join(f"{k % 7},{k}.5" for k in range(30)) + "\n")
    fitted = fit_table(tmp_path / "t.csv", "y", "linear")
    fitted.save(tmp_path / "run")
    out = tmp_path / "p.csv"
    words = ["predict", str(tmp_path / "run"), str(tmp_path / "t.csv"), "--out", str(out)]
    out.write_text("mine")
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2 and "--overwrite replaces it" in " ".join(refused.output.split())
    assert out.read_text() == "mine"
    assert CliRunner().invoke(app, [*words, "--overwrite"]).exit_code == 0
    assert out.read_text().startswith("line,mean")
