"""`doxa demo`: every method on a regression with a gap, and two moons with and without a posterior.

A good posterior is confident near the data and uncertain in the gap. The point estimate of a
classifier is confident everywhere; its posterior is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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
from doxa.data import simulated
from doxa.errors import MethodError
from doxa.processes import side_by_side
from doxa.tables.files import Array
from doxa.tables.predictions import array, flat


@dataclass(frozen=True)
class Case:
    """A method, its settings and the options of `doxa.fit`."""

    method: str
    note: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    hidden: tuple[int, ...] = ()  # a network of its own
    point: bool = False  # a point estimate, which has no epistemic uncertainty


TRAIN, TEST = 21, 22
HIDDEN = (50, 50)
CASES = tuple(
    Case(row.name, row.demo.note, row.demo.settings, row.demo.options, row.demo.hidden)
    for row in doxa.methods()
    if "regression" in row.tasks and not row.demo.left_out
)
MOONS = (
    Case("map", "point estimate", {}, {"steps": 2000}, point=True),
    Case("hmc", "posterior", {"draws": 200, "burn_in": 300}, {"members": 4}),
)
GRID = np.linspace(-5.0, 5.0, 241)
PLANE = np.linspace(-3.0, 4.0, 141), np.linspace(-2.75, 3.25, 121)


@dataclass(frozen=True)
class Fitted:
    """The result of a fit: a line of the table, the data of its figure, and its problem, if any."""

    line: tuple[str, ...]
    drawn: Any
    trouble: str = ""


def run(
    folder: Path, seed: int, console: Console, jobs: int = 1, methods: Sequence[str] = ()
) -> None:
    """Fit, print two tables, write two figures and print their paths.

    jobs: the number of parallel fits. methods: the panels of the first figure; empty: all.
    """
    figures.import_pyplot()  # before the fits, not after them
    cases = chosen(methods)
    folder.mkdir(parents=True, exist_ok=True)
    work = [(_gap, case, seed) for case in cases] + [(_moons, case, seed) for case in MOONS]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    fitted: dict[int, Fitted] = {}
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("fits", total=len(work))
        for i, outcome in side_by_side(_call, work, jobs):
            fitted[i] = outcome()
            progress.update(task, advance=1, description=f"{work[i][1].method} is fitted")
    everything = [fitted[i] for i in range(len(work))]
    gap, moons = everything[: len(cases)], everything[len(cases) :]
    train = simulated.gap_regression(100, seed + TRAIN)
    truth, panels = simulated.gap_function(GRID), [one.drawn for one in gap]
    figures.regression_figure(
        folder / "gap.png", GRID, truth, train.x[:, 0], train.y, panels, simulated.GAP
    )
    fields = [drawn for one in moons for drawn in one.drawn]
    figures.moons_figure(
        folder / "two_moons.png", *PLANE, fields, simulated.two_moons(120, 0.15, seed + TRAIN)
    )
    console.print(_table(
        "regression with a gap, held out: near the data and in the gap, 95 % intervals", gap,
        "log lik.", "RMSE", "covers", "gap: log lik.", "covers", "std", "seconds", "status",
    ))  # fmt: skip
    for one in gap:
        if one.trouble:
            console.print(escape(one.trouble), soft_wrap=True)
    console.print(_table(
        "two moons, held out; and far away from the data", moons,
        "log lik.", "accuracy", "far: confidence", "mutual information", "seconds", "status",
    ))  # fmt: skip
    for name in ("gap.png", "two_moons.png"):
        console.print(f"figure: {escape(str((folder / name).resolve()))}", soft_wrap=True)


def chosen(methods: Sequence[str]) -> tuple[Case, ...]:
    """The panels of these methods, or of all."""
    known = {case.method: case for case in CASES}
    for name in methods:
        if name not in known:
            reason = doxa.methods()[name].demo.left_out or "it is not for regression on a table"
            raise MethodError(f"{name!r} has no panel in the demo: {reason}")
    return tuple(known[name] for name in methods) or CASES


def _call(what: Callable[[Case, int], Fitted], case: Case, seed: int) -> Fitted:
    return what(case, seed)


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


def _gap(case: Case, seed: int) -> Fitted:
    train = simulated.gap_regression(100, seed + TRAIN)
    near = simulated.gap_regression(400, seed + TEST)
    gap = simulated.gap_regression(400, seed + TEST, inside=True)
    start = time.perf_counter()
    net = nets.mlp(1, 1, case.hidden or HIDDEN, "tanh")
    posterior = _fit(case, net, doxa.Normal(1.5), train, "gaussian", seed)
    seconds = time.perf_counter() - start
    here, there = _score(posterior, near), _score(posterior, gap)
    status, p = str(posterior.status), posterior.predict(GRID[:, None])
    values = (here["ll"], here["rmse"], here["coverage"],
              there["ll"], there["coverage"], there["std"], seconds)  # fmt: skip
    bad = status != "ok"
    return Fitted(
        (case.method, *(f"{v:.2f}" for v in values), status),
        figures.Panel(
            case.method,
            case.note,
            flat(p.mean),
            flat(p.aleatoric),
            flat(p.epistemic),
            _functions(posterior, GRID[:, None]),
            status if bad else "",
        ),
        f"{case.method}: {status}: {posterior.status.reason}" if bad else "",
    )


def _table(title: str, fitted: Sequence[Fitted], *columns: str) -> Table:
    """Narrow enough for a terminal of 80 columns."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True, style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name == "status" else "right")
    for one in fitted:
        table.add_row(*one.line)
    return table


def _functions(posterior: Any, x: Array, wanted: int = 12) -> Array:
    """Function draws [S, G]: a point estimate has one, an ensemble one per member."""
    try:
        draws = array(posterior.functions(x, n=wanted))
    except MethodError:  # fewer draws were kept
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


def _moons(case: Case, seed: int) -> Fitted:
    train = simulated.two_moons(120, 0.15, seed + TRAIN)
    test = simulated.two_moons(1000, 0.15, seed + TEST)
    plane = np.stack(np.meshgrid(*PLANE), axis=-1).reshape(-1, 2)
    far = np.linalg.norm(plane - [0.5, 0.25], axis=1) > 2.5
    start = time.perf_counter()
    net = nets.mlp(2, 2, (50,), "tanh")
    posterior = _fit(case, net, doxa.Normal(1.5), train, "categorical", seed)
    seconds = time.perf_counter() - start
    p, q = posterior.predict(test.x), posterior.predict(plane)
    probs, information = array(q.probs), flat(q.mutual_information)
    line = (
        case.method,
        f"{array(p.log_prob(test.y)).mean():.3f}",
        f"{np.mean(array(p.probs).argmax(1) == test.y):.3f}",
        f"{probs[far].max(1).mean():.3f}",
        f"{information[far].mean():.3f}",
        f"{seconds:.2f}",
        str(posterior.status),
    )
    shape = (len(PLANE[1]), len(PLANE[0]))
    fields = [(f"{case.method}: {case.note}", probs[:, 1].reshape(shape), "probability")]
    if not case.point:
        title = f"{case.method}: epistemic uncertainty"
        fields.append((title, information.reshape(shape), "information"))
    return Fitted(line, fields)
