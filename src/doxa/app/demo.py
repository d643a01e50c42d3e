"""`doxa demo`: every method on a regression with a gap, and two moons with and without a posterior.

A good posterior is sure where there are data and unsure in the gap; the point estimate of a
classifier is sure everywhere, its posterior is not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import doxa
from doxa import nets
from doxa.app import figures
from doxa.app.predictions import array, flat
from doxa.app.tables import Array
from doxa.data import simulated
from doxa.errors import MethodError


@dataclass(frozen=True)
class Case:
    """A method, its settings and what `fit` is asked for."""

    method: str
    note: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    hidden: tuple[int, ...] = ()  # a network of its own


TRAIN, TEST = 21, 22
HIDDEN = (50, 50)
CASES = tuple(
    Case(row.name, row.demo.note, row.demo.settings, row.demo.options, row.demo.hidden)
    for row in doxa.methods()
    if "regression" in row.tasks and not row.demo.left_out
)
MOONS = (
    Case("map", "point estimate", {}, {"steps": 2000}),
    Case("hmc", "posterior", {}, {"members": 4}),
)
GRID = np.linspace(-5.0, 5.0, 241)


def run(folder: Path, seed: int, console: Console) -> None:
    """Fit, print two tables, write two figures and say where."""
    figures.import_pyplot()  # before the fits, not after them
    folder.mkdir(parents=True, exist_ok=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(CASES) + len(MOONS))

        def tell(text: str) -> None:
            progress.update(task, description=text)

        def done() -> None:
            progress.advance(task)

        gap_table, troubles = _gap(folder / "gap.png", seed, tell, done)
        moons_table = _moons(folder / "two_moons.png", seed, tell, done)
    console.print(gap_table)
    for line in troubles:
        console.print(escape(line), soft_wrap=True)
    console.print(moons_table)
    for name in ("gap.png", "two_moons.png"):
        console.print(f"figure: {escape(str((folder / name).resolve()))}", soft_wrap=True)


def _fit(
    case: Case,
    net: nn.Module,
    prior: doxa.Normal,
    points: simulated.Points,
    likelihood: str,
    seed: int,
) -> Any:
    cls = doxa.get_method(case.method)
    model = {"model": net, "prior": prior} if cls.needs_network else {"model": None}
    return doxa.fit(
        **model,
        data=(points.x, points.y),
        method=cls(**case.settings),
        likelihood=likelihood,
        standardize=True,
        seed=seed,
        progress=False,
        **case.options,
    )


def _gap(path: Path, seed: int, tell: Any, done: Any) -> tuple[Table, list[str]]:
    """The table, and what is wrong with whom."""
    train = simulated.gap_regression(100, seed + TRAIN)
    near = simulated.gap_regression(400, seed + TEST)
    gap = simulated.gap_regression(400, seed + TEST, inside=True)
    table = _table(
        "regression with a gap, held out: near the data and in the gap, 95 % intervals",
        "log lik.", "RMSE", "covers", "gap: log lik.", "covers", "std", "seconds", "status",
    )  # fmt: skip
    panels, troubles = [], []
    for case in CASES:
        tell(f"regression: {case.method}")
        start = time.perf_counter()
        net = nets.mlp(1, 1, case.hidden or HIDDEN, "tanh")
        posterior = _fit(case, net, doxa.Normal(1.5), train, "gaussian", seed)
        seconds = time.perf_counter() - start
        here, there = _score(posterior, near), _score(posterior, gap)
        table.add_row(
            case.method,
            *(f"{v:.2f}" for v in (here["ll"], here["rmse"], here["coverage"])),
            *(f"{v:.2f}" for v in (there["ll"], there["coverage"], there["std"], seconds)),
            str(posterior.status),
        )
        p = posterior.predict(GRID[:, None])
        panels.append(
            figures.Panel(
                case.method,
                case.note,
                flat(p.mean),
                flat(p.aleatoric),
                flat(p.epistemic),
                _functions(posterior, GRID[:, None]),
                "" if posterior.status == "ok" else str(posterior.status),
            )
        )
        if posterior.status != "ok":
            troubles.append(f"{case.method}: {posterior.status}: {posterior.status.reason}")
        done()
    truth = simulated.gap_function(GRID)
    figures.regression_figure(path, GRID, truth, train.x[:, 0], train.y, panels, simulated.GAP)
    return table, troubles


def _table(title: str, *columns: str) -> Table:
    """Narrow enough for a terminal of 80 columns."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True, style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name == "status" else "right")
    return table


def _functions(posterior: Any, x: Array, wanted: int = 12) -> Array:
    """Function draws [S, G]: a point estimate has one, an ensemble one a member."""
    try:
        draws = array(posterior.functions(x, n=wanted))
    except MethodError:  # fewer were kept than are wanted
        draws = array(posterior.functions(x, n=posterior.members))
    return draws.reshape(len(draws), len(x))


def _score(posterior: Any, points: simulated.Points) -> dict[str, float]:
    p = posterior.predict(points.x)
    low, high = (flat(bound) for bound in p.interval(0.95))
    y = points.y
    return {
        "ll": float(array(p.log_prob(y)).mean()),
        "rmse": float(np.sqrt(np.mean((flat(p.mean) - y) ** 2))),
        "coverage": float(np.mean((low <= y) & (y <= high))),
        "std": float(flat(p.std).mean()),
    }


def _moons(path: Path, seed: int, tell: Any, done: Any) -> Table:
    train = simulated.two_moons(120, 0.15, seed + TRAIN)
    test = simulated.two_moons(1000, 0.15, seed + TEST)
    xs, ys = np.linspace(-3.0, 4.0, 141), np.linspace(-2.75, 3.25, 121)
    plane = np.stack(np.meshgrid(xs, ys), axis=-1).reshape(-1, 2)
    far = np.linalg.norm(plane - [0.5, 0.25], axis=1) > 2.5
    table = _table(
        "two moons, held out; and far away from the data",
        "log lik.", "accuracy", "far: confidence", "mutual information", "seconds", "status",
    )  # fmt: skip
    fields: list[tuple[str, Array, str]] = []
    for case in MOONS:
        tell(f"two moons: {case.method}")
        start = time.perf_counter()
        net = nets.mlp(2, 2, (50,), "tanh")
        posterior = _fit(case, net, doxa.Normal(1.5), train, "categorical", seed)
        seconds = time.perf_counter() - start
        p, q = posterior.predict(test.x), posterior.predict(plane)
        probs, information = array(q.probs), flat(q.mutual_information)
        table.add_row(
            case.method,
            f"{array(p.log_prob(test.y)).mean():.3f}",
            f"{np.mean(array(p.probs).argmax(1) == test.y):.3f}",
            f"{probs[far].max(1).mean():.3f}",
            f"{information[far].mean():.3f}",
            f"{seconds:.2f}",
            str(posterior.status),
        )
        shape = (len(ys), len(xs))
        fields.append((f"{case.method}: {case.note}", probs[:, 1].reshape(shape), "probability"))
        if case is MOONS[-1]:
            title = f"{case.method}: what it does not know"
            fields.append((title, information.reshape(shape), "information"))
        done()
    figures.moons_figure(path, xs, ys, fields, train)
    return table
