"""`doxa compare`: its numbers against fits made one by one, closed forms, and hand-made rows."""

from __future__ import annotations

import copy
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats
from torch import nn
from typer.testing import CliRunner

import doxa
from doxa.app.cli import app
from doxa.app.comparison import (
    Comparison,
    Reference,
    Row,
    Split,
    as_tables,
    compare_arrays,
    page,
    random_splits,
    reference_of,
)
from doxa.app.comparison.reference import Referred, floor_of, too_dear
from doxa.app.comparison.result import Cost, ranked, with_error
from doxa.errors import DataError, MethodError, ModelError
from doxa.evaluate.reference_distance import Closeness

pd = pytest.importorskip("pandas")


def line(n: int = 90, noise: float = 0.5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    return x, 1.0 + x @ np.array([2.0, -1.0]) + noise * rng.normal(size=n)


def row(method: str, *values: float, **more: Any) -> Row:
    """A method with one log likelihood a split."""
    return Row(
        method,
        scores={"log_likelihood": values},
        each=tuple(np.full(3, value) for value in values),
        cost=Cost(1.0, 1.0, 0.1, 10, 40),
        **more,
    )


def test_splits_divide_the_rows_and_keep_the_classes_in_proportion() -> None:
    labels = np.repeat([0, 1, 2], [60, 30, 10])
    splits = random_splits(100, 0.2, 4, seed=3, labels=labels)
    for split in splits:
        assert sorted([*split.train, *split.test]) == list(range(100))
        assert np.abs(np.bincount(labels[split.test]) - [12, 6, 2]).max() <= 1
    assert len({tuple(split.test) for split in splits}) == 4
    again = random_splits(100, 0.2, 4, seed=3, labels=labels)
    assert all((a.test == b.test).all() for a, b in zip(splits, again, strict=True))
    plain = random_splits(7, 0.3, 1, seed=0)[0]
    assert (len(plain.train), len(plain.test)) == (5, 2)
    with pytest.raises(DataError, match="cannot be split"):
        random_splits(2, 0.01, 1, seed=0)
    with pytest.raises(DataError, match="at least 1"):
        random_splits(10, 0.2, 0, seed=0)


@pytest.mark.slow
def test_scores_and_errors_are_those_of_fits_made_one_by_one() -> None:
    x, y = line()
    found = compare_arrays(x, y, ["linear", "map"], splits=3, reference="none", steps=150, seed=4)
    splits = random_splits(90, 0.2, 3, seed=4)
    net = doxa.nets.mlp(2, 1, (50,))
    for name, given in (("linear", None), ("map", net)):
        alone = []
        for k, (train, test) in enumerate(splits):
            posterior = doxa.fit(given, (x[train], y[train]), name, likelihood="gaussian",
                                 standardize=True, steps=150, seed=4 + k)  # fmt: skip
            p = posterior.predict(x[test])
            error = p.mean.double().flatten().numpy() - y[test]
            alone.append((float(p.log_prob(y[test]).double().mean()), np.sqrt((error**2).mean())))
        # float32 trajectories of a stacked and a single fit part slowly
        tolerance = 1e-5 if name == "linear" else 0.02
        assert found[name].scores["log_likelihood"] == pytest.approx(
            [v for v, _ in alone], abs=tolerance
        )
        assert found[name].mean("rmse") == pytest.approx(
            np.mean([v for _, v in alone]), abs=tolerance
        )
    values = np.array(found["linear"].scores["log_likelihood"])
    assert found["linear"].error("log_likelihood") == pytest.approx(stats.sem(values))
    assert found.rows[0].method == "linear"  # y is linear in x
    away = values - np.array(found["map"].scores["log_likelihood"])
    assert found.behind(found["map"]) == pytest.approx((away.mean(), stats.sem(away)))
    assert found["map"].cost is not None and found["map"].cost.stacked
    assert found.multiple(found["map"], "parameters") == 1.0
    assert found["map"].cost.parameters == 2 * 50 + 50 + 50 + 1 + 1  # and the noise
    assert found["map"].cost.posterior_bytes == 4 * found["map"].cost.parameters


@pytest.mark.slow
def test_one_split_has_errors_over_its_rows() -> None:
    x, y = line()
    held = [Split(np.arange(60), np.arange(60, 90))]
    found = compare_arrays(x, y, ["linear", "map"], splits=held, reference=None, steps=100)
    linear = doxa.fit(None, (x[:60], y[:60]), "linear", standardize=True)
    each = linear.predict(x[60:]).log_prob(y[60:]).double().numpy()
    assert found["linear"].mean("log_likelihood") == pytest.approx(each.mean(), abs=1e-5)
    assert found["linear"].error("log_likelihood") == pytest.approx(stats.sem(each), rel=1e-4)
    assert math.isnan(found["linear"].error("rmse"))
    assert found.test_rows == 30


def test_lists_frames_and_tensors_are_the_same_data() -> None:
    x, y = line(30)
    forms = [(x, y), (x.tolist(), y.tolist()), (pd.DataFrame(x), pd.Series(y)),
             (torch.tensor(x), torch.tensor(y))]  # fmt: skip
    values = [
        compare_arrays(*form, ["linear"], splits=2, reference="none", steps=20)["linear"].scores
        for form in forms
    ]
    assert all(each == values[0] for each in values)


def test_a_difference_is_paired() -> None:
    """Splits differ by nats, the methods by a hundredth in each: no doubt who is better."""
    found = Comparison(
        ranked([row("b", -5.01, -2.01, -8.01), row("a", -5.0, -2.0, -8.0)]), "gaussian", 3, 9, 3, 0
    )
    assert [each.method for each in found.rows] == ["a", "b"]
    gap, error = found.behind(found["b"])
    assert gap == pytest.approx(0.01) and error == pytest.approx(0.0, abs=1e-12)
    assert found["b"].error("log_likelihood") > 1.0
    assert found.behind(found["a"]) == (0.0, 0.0)


def test_what_failed_or_is_undefined_comes_last() -> None:
    rows = [Row("broken", "failed", "no"), row("nan", math.nan), row("worst", -math.inf),
            row("good", -1.0)]  # fmt: skip
    order = [each.method for each in ranked(rows)]
    assert order[0] == "good" and set(order[1:]) == {"broken", "nan", "worst"}


@pytest.mark.slow
def test_a_linear_network_has_a_known_distance_to_its_posterior() -> None:
    """Conjugate: HMC must find the exact posterior, Laplace is exact, and MAP leaves out the
    epistemic part v: W2 = |√(σ² + v) − σ|. The tolerance is three times the distance d between
    HMC's halves, each worth half the draws: the whole is off by about d/2, so that it fails where
    one χ with four degrees of freedom is six times another, F(4, 4) > 36, in 0.2 % of seeds."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3))
    y = x @ np.array([1.0, -1.0, 0.5]) + 0.7 * rng.normal(size=40)
    noise, train, test = 0.7, np.arange(12), np.arange(12, 40)
    found = compare_arrays(
        x, y, {"map": "map", "exact": doxa.Laplace(structure="full")},
        net=nn.Linear(3, 1, dtype=torch.float64), likelihood=doxa.Gaussian(noise=noise),
        prior=doxa.Normal(1.0), splits=[Split(train, test)], standardize=False,
        reference=Reference(draws=800, burn_in=300, leapfrog=3), steps=1000,
    )  # fmt: skip
    design = np.column_stack([x, np.ones(40)])
    precision = design[train].T @ design[train] / noise**2 + np.eye(4)
    variance = np.einsum("ij,jk,ik->i", design[test], np.linalg.inv(precision), design[test])
    total = np.sqrt(noise**2 + variance)
    # equal means: the densities cross at ±c
    c = np.sqrt(2 * np.log(total / noise) / (1 / noise**2 - 1 / total**2))
    variation = 2 * (stats.norm.cdf(c / noise) - stats.norm.cdf(c / total))
    reference, floor = found.reference, found.reference.floor
    assert reference.converged and reference.rhat < 1.03 and floor.agreement is None
    point, exact = found["map"].closeness, found["exact"].closeness
    assert exact.total_variation < 3 * floor.total_variation
    assert exact.wasserstein2 < 3 * floor.wasserstein2
    assert point.wasserstein2 == pytest.approx(np.mean(total - noise), abs=3 * floor.wasserstein2)
    assert point.total_variation == pytest.approx(variation.mean(), abs=3 * floor.total_variation)
    assert point.total_variation > 3 * exact.total_variation
    mean = design[test] @ np.linalg.solve(precision, design[train].T @ y[train] / noise**2)
    expected = stats.norm.logpdf(y[test], mean, total)
    assert reference.each[0].mean() == pytest.approx(expected.mean(), abs=0.02)


def test_the_floor_is_between_halves_of_the_chains() -> None:
    x, y = line(30)
    posterior = doxa.fit(doxa.nets.mlp(2, 1, (3,)), (x, y), doxa.HMC(draws=5, burn_in=5),
                         members=4, standardize=True)  # fmt: skip
    twins = copy.copy(posterior)
    twins.samples = posterior.samples[[0, 1, 0, 1]]
    assert floor_of(twins, x) == (None, 0.0, 0.0)
    swapped = copy.copy(posterior)
    swapped.samples = posterior.samples[[0, 2, 1, 3]]
    assert floor_of(posterior, x).wasserstein2 > 0
    assert floor_of(posterior, x) != floor_of(swapped, x)


def test_a_method_that_fails_is_a_row_and_the_others_go_on() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(60, 1))
    y = rng.poisson(np.exp(0.5 * x[:, 0])).astype(float)
    said: list[str] = []
    found = compare_arrays(x, y, ["linear", "map"], likelihood="poisson", splits=2, steps=50,
                           reference="none", say=said.append)  # fmt: skip
    assert [each.method for each in found.rows] == ["map", "linear"]
    assert found["linear"].failed and "regression with Gaussian noise" in found["linear"].reason
    assert any(words.startswith("linear failed") for words in said)
    frame = found.frame()
    assert frame.loc["linear", "status"] == "failed" and frame.loc["map", "status"] == "ok"
    assert math.isnan(frame.loc["linear", "log_likelihood"])
    assert "regression with Gaussian noise" in shown(found)


@pytest.mark.slow
def test_classes_have_accuracy_and_agreement() -> None:
    rng = np.random.default_rng(2)
    y = rng.integers(0, 3, 90)
    x = np.array([[0, 0], [3, 0], [0, 3]])[y] + 0.8 * rng.normal(size=(90, 2))
    found = compare_arrays(
        x, y, ["map", "deep-ensemble"], likelihood="categorical", splits=2, steps=100, members=2,
        net=doxa.nets.mlp(2, 3, (4,)),
        reference=Reference(draws=20, burn_in=20, leapfrog=5, chains=2, splits=2),
    )  # fmt: skip
    assert found.score_names[:2] == ["log_likelihood", "accuracy"]
    assert found["map"].mean("accuracy") > 0.7
    assert 0.7 < found["map"].closeness.agreement <= 1.0
    # members are not for MAP, which is the unit of cost
    assert found.multiple(found["map"], "parameters") == 1.0
    assert found.multiple(found["deep-ensemble"], "parameters") == 2.0
    assert len(found.reference.each) == 2
    text = shown(found)
    assert "agreement" in text and "its two halves" in text and "accuracy" in text


def test_what_cannot_be_compared_is_refused_before_any_work() -> None:
    x, y = line(20)
    with pytest.raises(MethodError, match="'gp' is for regression only"):
        compare_arrays(x, (y > 0).astype(float), ["map", "gp"], likelihood="bernoulli")
    with pytest.raises(MethodError, match="given twice"):
        compare_arrays(x, y, ["map", "map"])
    with pytest.raises(MethodError, match="no methods"):
        compare_arrays(x, y, [])
    with pytest.raises(MethodError, match="a list of names"):
        compare_arrays(x, y, "map")
    with pytest.raises(DataError, match="20 rows and y 19"):
        compare_arrays(x, y[:-1], ["map"])
    with pytest.raises(ModelError, match="one head"):
        compare_arrays(x, y, ["map"], likelihood=("gaussian", "gaussian"))


def test_when_a_reference_is_affordable() -> None:
    auto = reference_of("auto")
    assert auto is not None and auto.if_affordable
    assert too_dear(auto, 500, 500) == ""
    assert "--reference hmc runs it anyway" in too_dear(auto, 50_000, 5_000)
    assert too_dear(reference_of("hmc"), 50_000, 5_000) == ""  # type: ignore[arg-type]
    assert reference_of("none") is None
    assert reference_of("hmc", draws=50, chains=2) == Reference(draws=50, burn_in=50, chains=2)
    twice = Reference(chains=8).seconds(10_000, 10_000) / Reference().seconds(10_000, 10_000)
    assert twice == pytest.approx(2.0, rel=0.01)
    with pytest.raises(MethodError, match="'auto', 'hmc' or 'none'"):
        reference_of("nuts")
    with pytest.raises(MethodError, match="two chains"):
        Reference(chains=1)


def test_a_reference_that_has_not_converged_says_so() -> None:
    bad = Referred(Reference(), 1.4, 12.0, 0.8, Closeness(None, 0.1, 0.2), 3.0, 5, ())
    assert "NOT converged" in bad.words and not bad.converged
    found = Comparison((row("a", -1.0, -2.0),), "gaussian", 2, 9, 3, 0, reference=bad)
    assert "reference not converged" in page.render(found, "t")


def test_errors_have_two_digits() -> None:
    assert with_error(-5.42153, 0.0331) == "-5.422 ± 0.033"
    assert with_error(54.349, 1.667) == "54.3 ± 1.7"
    assert with_error(0.1, math.nan) == "0.100"
    assert with_error(math.nan, math.nan) == "–"


def test_the_page_says_who_wins_and_escapes_what_it_is_given() -> None:
    hostile = "<script>alert(1)</script>"
    found = Comparison(
        (row("first", -1.0, -1.1), row("second", -1.01, -1.09), row("third", -3.0, -3.1),
         Row("fourth", "failed", hostile)),
        "gaussian", 2, 80, 20, 0, map_cost=Cost(0.5, 0.5, 0.1, 5, 20),
    )  # fmt: skip
    text = page.render(found, f"y of {hostile}", [hostile])
    assert hostile not in text and "&lt;script&gt;" in text and "<script" not in text
    assert "first has the highest held-out log likelihood" in text
    assert "likelihood; second cannot be distinguished from it" in text
    assert "third" in text and "1 failed" in text


def test_shares_end_at_one_and_names_stand_alone() -> None:
    """An agreement of 0.99 is read against 1; the names of methods need no word beside them."""
    from html_page import parse

    rows = [replace(row(name, -1.0, -1.1), closeness=Closeness(value, 0.1, None))
            for name, value in (("deep-ensemble", 0.99), ("mc-dropout", 0.9))]  # fmt: skip
    sure = Referred(Reference(), 1.01, 400.0, 0.8, Closeness(0.995, 0.02, None), 3.0, 5, ())
    found = Comparison(tuple(rows), "categorical", 2, 80, 20, 0, reference=sure)
    root, _ = parse(page.render(found, "t"))
    figure = next(f for f in root.all("figure") if f.all("strong")[0].text == "Agreement")
    texts = [node.text for node in figure.all("text")]
    ticks = [float(text) for text in texts if text.replace(".", "").isdigit()]
    assert max(ticks) == 1.0
    assert "method" not in texts
    right = {float(line.attributes["x2"]) for line in figure.by_class("grid")}
    at = next(t for t in figure.all("text") if t.text in ("1.0", "1.00"))
    assert list(right) == [pytest.approx(float(at.attributes["x"]), abs=0.1)]  # the axis ends there


def shown(found: Comparison) -> str:
    console = Console(width=320, record=True, file=io.StringIO())  # a new score is a column
    for table in as_tables(found):
        console.print(table)
    return " ".join(console.export_text().split())


def command(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.fixture
def table(tmp_path: Path) -> Path:
    x, y = line()
    pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": y}).to_csv(tmp_path / "t.csv", index=False)
    return tmp_path / "t.csv"


@pytest.mark.slow
def test_the_command_writes_a_table_and_a_report(table: Path, tmp_path: Path) -> None:
    said = command("compare", table, "-t", "y", "--methods", "linear,map", "--splits", 2,
                   "--steps", 100, "--hidden", 4, "--reference", "hmc", "--reference-draws", 12,
                   "--reference-leapfrog", 3, "--reference-chains", 2,
                   "-o", tmp_path / "c.parquet", "--report", tmp_path / "c.html")  # fmt: skip
    assert "held-out scores" in said and "distance to the reference posterior" in said
    frame = pd.read_parquet(tmp_path / "c.parquet")
    assert set(frame.index) == {"linear", "map"}
    columns = {"log_likelihood", "log_likelihood_se", "behind", "behind_se", "rmse", "crps",
               "coverage", "seconds", "time_x_map", "parameters_x_map", "total_variation",
               "wasserstein2", "reference_rhat", "status"}  # fmt: skip
    assert columns <= set(frame.columns)
    assert frame["log_likelihood"].is_monotonic_decreasing
    text = (tmp_path / "c.html").read_text(encoding="utf-8")
    assert "linear" in text and "Distance to the posterior" in text and "<script" not in text


@pytest.mark.slow
def test_the_command_takes_held_out_rows(table: Path, tmp_path: Path) -> None:
    frame = pd.read_csv(table)
    frame[:60].to_csv(tmp_path / "train.csv", index=False)
    frame[60:].to_csv(tmp_path / "test.csv", index=False)
    command("compare", tmp_path / "train.csv", "-t", "y", "--methods", "linear", "--test",
            tmp_path / "test.csv", "--reference", "none", "-o", tmp_path / "c.csv")  # fmt: skip
    value = pd.read_csv(tmp_path / "c.csv").loc[0, "log_likelihood"]
    x, y = line()
    p = doxa.fit(None, (x[:60], y[:60]), "linear", standardize=True).predict(x[60:])
    assert value == pytest.approx(float(p.log_prob(y[60:]).mean()), abs=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reference", "nuts"], "'auto', 'hmc' or 'none'"),
        (["--report", "page.pdf"], "a report is written as .html"),
        (["--out", "table.xlsx"], ".csv"),
    ],
)
def test_a_mistake_is_said_before_any_work(table: Path, words: list[str], message: str) -> None:
    assert message in command("compare", table, "-t", "y", *words, code=2)
