"""A table of tasks, from `doxa fit --task` to `doxa predict --context`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import doxa
from doxa.app.cli import app

SHORT = ["--set", "width=8", "--set", "depth=1", "--steps", "5"]


def tables(folder: Path) -> None:
    r = np.random.default_rng(0)
    x = r.uniform(-1, 1, 60)
    task = np.repeat([f"t{i}" for i in range(12)], 5)
    y = 100 + 10 * x * np.repeat(r.normal(size=12), 5)
    pd.DataFrame({"who": task, "x": x, "y": y}).to_csv(folder / "tasks.csv", index=False)
    known = pd.DataFrame({"who": ["a", "b", "a"], "x": [0.1, 0.5, 0.7], "y": [95.0, 107.0, 99.0]})
    known.to_csv(folder / "known.csv", index=False)
    new = pd.DataFrame({"who": ["b", "a", "b"], "x": [1.0, 0.5, -0.5]})
    new.to_csv(folder / "new.csv", index=False)


def call(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def test_tasks_are_fitted_and_predicted_from_their_own_context(tmp_path: Path) -> None:
    tables(tmp_path)
    run, out = tmp_path / "run", tmp_path / "out.csv"
    said = call("fit", tmp_path / "tasks.csv", "--task", "who", "--target", "y", "-m", "cnp",
                *SHORT, "--out", run)  # fmt: skip
    assert "12 tasks" in said
    call("predict", run, tmp_path / "new.csv", "--context", tmp_path / "known.csv", "--out", out)
    got = pd.read_csv(out)["mean"].to_numpy()
    posterior = doxa.load(run)
    a = posterior.condition(np.array([[0.1], [0.7]]), np.array([95.0, 99.0]))
    b = posterior.condition(np.array([[0.5]]), np.array([107.0]))
    want = [b.predict([[1.0]]), a.predict([[0.5]]), b.predict([[-0.5]])]
    assert got == pytest.approx([float(p.mean) for p in want], rel=1e-5)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    tables(tmp_path)
    fit = ["fit", str(tmp_path / "tasks.csv"), "--target", "y", "--out", str(tmp_path / "run")]
    for words, message in (
        (["-m", "cnp"], "name their column with --task"),
        (["-m", "map", "--task", "who"], "methods that learn from tasks"),
        (["-m", "cnp", "--task", "who", "--split", "0.2"], "predicts a task from its context"),
    ):
        done = CliRunner().invoke(app, [*fit, *words])
        assert done.exit_code != 0
        assert message in " ".join((done.output + str(done.exception)).split())
