"""The UCI tables: splits, cells, and the command, on a small set of the same form."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from doxa.app.bench import Store, find, names
from doxa.app.bench.protocols import PROTOCOLS
from doxa.app.bench.uci import SETS, Problem, best, gap_splits, load
from doxa.app.bench.uci_tables import BEST_LL, COLUMNS, cell, summary
from doxa.app.cli import app
from doxa.errors import DataError, MethodError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """yacht.npz with 60 rows of a noisy line in three inputs, the second constant; two splits."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    x[:, 1] = 4.0
    y = 10.0 + 3.0 * x[:, 0] - x[:, 2] + 0.5 * rng.normal(size=60)
    order = np.stack([rng.permutation(60) for _ in range(2)]).astype(np.int32)
    (tmp_path / "uci").mkdir()
    np.savez(
        tmp_path / "uci" / "yacht.npz",
        X=x,
        y=y,
        train_index=order[:, :50],
        test_index=order[:, 50:],
    )
    return tmp_path


def test_gap_splits_hold_out_the_middle_third_of_every_feature_that_varies() -> None:
    x = torch.stack([torch.arange(9.0), torch.full((9,), 2.0), -(torch.arange(9.0) ** 3)], 1)
    train, test = gap_splits(x)
    assert [rows.tolist() for rows in test] == [[3, 4, 5], [3, 4, 5]]
    assert [rows.tolist() for rows in train] == [[0, 1, 2, 6, 7, 8]] * 2


def test_a_cell_is_the_mean_over_splits(folder: Path) -> None:
    result = cell(folder, "standard", "yacht", "linear", seed=0)
    data = load(folder, "yacht")
    # Least squares, by hand: with 50 rows and a weak prior the posterior mean is close to it.
    errors = []
    for train, test in zip(data.train, data.test, strict=True):
        design = lambda rows: torch.cat([data.x[rows], torch.ones(len(rows), 1)], 1).double()[  # noqa: E731
            :, [0, 2, 3]
        ]
        w = torch.linalg.lstsq(design(train), data.y[train, None]).solution
        residual = data.y[test] - (design(test) @ w).squeeze(1)
        errors.append(float(residual.square().mean().sqrt()))
    assert result["scores"]["rmse"]["each"] == pytest.approx(errors, rel=0.02)
    assert result["scores"]["rmse"]["mean"] == pytest.approx(np.mean(errors), rel=0.02)
    assert result["splits"] == 2
    assert result["status"] == {"ok": 2}


def test_summary_is_the_standard_error_of_the_mean() -> None:
    assert summary([1.0, 2.0, 3.0, 6.0]) == {
        "mean": 3.0, "error": pytest.approx(np.std([1, 2, 3, 6], ddof=1) / 2),
    }  # fmt: skip
    assert summary([1.0]) == {"mean": 1.0, "error": None}


class Guess:
    """Predicts one number everywhere."""

    def __init__(self, value: float, std: float = 1.0) -> None:
        self.value, self.std = value, torch.tensor(std)

    def predict(self, x: torch.Tensor, n: int | None = None) -> Any:
        return SimpleNamespace(log_prob=lambda y: -((y - self.value) ** 2), std=self.std)


def test_settings_are_chosen_by_the_last_fifth_of_the_training_rows_alone() -> None:
    """Those rows are 2, all others 1, and the rows of no split 0: the guess 2 wins, and not one
    whose spread is infinite."""
    y = torch.zeros(30)
    y[:8], y[8:10], y[10:18], y[18:20] = 1.0, 2.0, 1.0, 2.0
    problem = Problem(y[:, None], y, [torch.arange(10), torch.arange(10, 20)], 50, 0)
    seen = []

    def train(rows: Any, std: float, grid: Any) -> Any:
        seen.extend(own.tolist() for own in rows)
        specs = [SimpleNamespace(hyper={"lr": v}, split=i)
                 for i in range(len(rows)) for v in grid["lr"]]  # fmt: skip
        return Sweep([Guess(spec.hyper["lr"], std) for spec in specs], specs)

    chosen = best(problem, train, [1.0, float("inf")], {"lr": (0.0, 1.0, 2.1)})
    assert chosen == (1.0, {"lr": 2.1})
    assert best(problem, train, [float("inf"), 1.0], {"lr": (0.0, 2.0)}, splits=1)[0] == 1.0
    assert seen[:2] == [list(range(8)), list(range(10, 18))]


class Sweep(list[Any]):
    def __init__(self, posteriors: list[Any], specs: list[Any]) -> None:
        super().__init__(posteriors)
        self.specs = specs


def test_a_table_compares_times_of_one_machine_and_counts_what_is_above(tmp_path: Path) -> None:
    store = Store(tmp_path / "uci.jsonl")
    scores = ("log_likelihood_matched", "rmse", "crps", "coverage")

    def put(name: str, method: str, ll: float, seconds: float, **facts: Any) -> None:
        all_scores = {score: {"mean": 0.5, "error": None} for score in scores}
        all_scores["log_likelihood"] = {"mean": ll, "error": 0.1}
        key = {"table": "uci", "set": name, "method": method, "seed": 0}
        store.put(key, {"scores": all_scores, "last_fit_seconds": seconds, **facts}, 9.0)

    for name in ("boston_housing", "yacht"):
        put(name, "map", -2.0, 2.0)
        put(name, "mc-dropout", -2.0, 3.0, chosen={"p": [0.01, 0.03]})
        put(name, "concrete-dropout", -2.0, 3.0, p={"a": [0.1, 0.3], "b": [0.5, 0.5]})
    put("yacht", "mean-field", -1.9, 6.0, protocol="as before")  # published: −2.01
    put("boston_housing", "mean-field", -3.2, 6.0)  # published: −3.12
    lines = store.path.read_text().splitlines(keepends=True)
    (other,) = (i for i, line in enumerate(lines) if "boston" in line and "mean-field" in line)
    lines[other] = lines[other].replace('"system": "', '"system": "another ')
    store.path.write_text("".join(lines))
    tables = {table.title.split(": ")[1]: table for table in find("uci").tables(store)}
    cost = {row[0]: row[1:] for row in tables["time of the last fit, one MAP fit = 1"].rows}
    assert cost["map"] == ["1.0", "1.0"] and cost["mean-field"] == ["–", "3.0"]
    dropped = {row[0]: row[1] for row in tables["probability to drop, mean over splits"].rows}
    assert dropped == {
        "mc-dropout, of a grid": "0.0200", "concrete-dropout, inputs": "0.2000",
        "concrete-dropout, hidden units": "0.5000",
    }  # fmt: skip
    notes = next(iter(tables.values())).notes
    assert "mean-field: above published mean-field on 1 of 2 sets, not rounded" in notes
    assert "mean-field on yacht: as before" in notes
    assert f"map: {PROTOCOLS['map'].description}" in notes


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.mark.slow
def test_the_command_computes_resumes_and_shows(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    options = ["--data", str(folder), "--sets", "yacht", "--out", str(out)]
    first = run("uci", *options, "--methods", "linear")
    assert first.exit_code == 0, first.output
    assert "0 of 1 cells are known, 1 to go" in first.output
    again = run("uci", *options, "--methods", "linear,map")
    assert "1 of 2 cells are known, 1 to go" in again.output
    assert sorted(path.name for path in out.iterdir()) == ["uci.jsonl", "uci.md"]
    page = (out / "uci.md").read_text()
    assert "published: deep ensemble" in page
    assert "−1.18" in page  # the published figure of deep ensembles on yacht
    for method in ("linear", "map"):
        assert f"- {method}: {PROTOCOLS[method].description}" in page
    shown = run("uci", *options, "--show")
    assert shown.exit_code == 0
    assert "cells are known" not in shown.output
    cells = [json.loads(line) for line in (out / "uci.jsonl").read_text().splitlines()]
    assert [c["key"]["method"] for c in cells] == ["linear", "map"]
    assert all(c["versions"]["torch"] == torch.__version__ for c in cells)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ucii"], "no benchmark 'ucii'; did you mean 'uci'?"),
        (["mnist"], "python -m benchmarks.images mnist"),
        (["camvid"], "python -m benchmarks.images camvid"),
        (["uci", "--sets", "yatch"], "no UCI set 'yatch'; did you mean 'yacht'?"),
        (["uci", "--methods", "hcm"], "no UCI protocol for 'hcm'"),
    ],
)
def test_an_unknown_name_is_an_error_that_helps(
    folder: Path, arguments: list[str], message: str
) -> None:
    result = run(*arguments, "--data", str(folder))
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_missing_data_is_an_error_that_names_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DOXA_DATA", raising=False)
    assert "set DOXA_DATA" in run("uci").stderr
    assert "is not a folder" in run("uci", "--data", str(tmp_path / "none")).stderr
    with pytest.raises(DataError, match=r"concrete\.npz is not there"):
        load(folder, "concrete")


def test_every_regression_method_has_a_protocol_and_every_set_its_published_figures() -> None:
    import doxa

    own = {protocol.of or name for name, protocol in PROTOCOLS.items()}
    assert own == {row.name for row in doxa.methods() if "regression" in row.tasks}
    assert set(COLUMNS) == set(BEST_LL) == set(SETS)
    assert names() == ["uci", "gap"]
    for name in names():
        assert find(name).name == name
    with pytest.raises(MethodError):
        find("nothing")


def test_tables_of_an_empty_store_are_empty(tmp_path: Path) -> None:
    for table in find("uci").tables(Store(tmp_path / "none.jsonl")):
        assert table.rows == [] or all(row[0].startswith("published") for row in table.rows)
