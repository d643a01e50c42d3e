"""A comparison as one self-contained HTML file, made of the building blocks of `doxa report`."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import doxa
from doxa.app.comparison.result import (
    CLOSENESS,
    SHOWN,
    Comparison,
    Row,
    multiple,
    number,
    sizes,
    with_error,
)
from doxa.app.report.build import check_place
from doxa.app.report.charts.marks import Line, Points
from doxa.app.report.charts.plot import Axis, Plot, figure
from doxa.app.report.charts.scales import extent
from doxa.app.report.markup import Content, Html, tag
from doxa.app.report.names import Names, cut
from doxa.app.report.page import Section, page
from doxa.app.report.tabular import card, table, values_table
from doxa.app.report.words import count, duration, listed, mark
from doxa.errors import StoreError

__all__ = ["check_place", "render", "write"]

CALIBRATION = {"coverage": 0.95, "ece": 0.0}  # and what a calibrated method has
SHARES = ("coverage", "ece", "agreement", "total_variation")  # which end at 1
WORTH_SAYING = 2.0  # standard errors from which a difference is said to be one
BETTER = {"agreement": "higher is closer", "total_variation": "lower is closer",
          "wasserstein2": "lower is closer"}  # fmt: skip


def write(found: Comparison, path: Path, title: str, notes: Sequence[str] = ()) -> Path:
    """Write the page; `notes` say what was decided about the data."""
    check_place(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(found, title, notes), encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def render(found: Comparison, title: str, notes: Sequence[str] = ()) -> str:
    """The document as text."""
    names = Names()
    sections = [_quality(found, names), _closeness(found, names), _cost(found, names)]
    sections += [_fitted(found, names, notes)]
    head = [
        tag("p", {"class": "over"}, "doxa compare"),
        tag("h1", None, "Methods for ", names.show(title, 80)),
        tag("div", {"class": "standing"}, _pills(found)),
        tag("p", {"class": "lead"}, _lead(found)),
    ]
    whole = names.list_in_full()
    if whole is not None:
        sections.append(Section("names", "Long names in full", whole))
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    foot = (
        f"Written by doxa {doxa.__version__} on {today}. This file holds no script and loads "
        "nothing."
    )
    return page(f"{cut(title, 80)} · doxa compare", head, sections, foot)


def _pills(found: Comparison) -> list[Html]:
    failed = [row for row in found.rows if row.failed]
    pills = [mark("none", count(len(found.rows), "method"))]
    if failed:
        pills.append(mark("bad", f"{len(failed)} failed"))
    doubtful = [row for row in found.rows if not row.failed and row.status != "ok"]
    if doubtful:
        pills.append(mark("warning", f"{len(doubtful)} not in order"))
    if found.reference is not None:
        good = found.reference.converged
        words = "reference converged" if good else "reference not converged"
        pills.append(mark("good" if good else "warning", words))
    return pills


def _lead(found: Comparison) -> Content:
    best = found.best
    if best is None:
        return "No method could be fitted; the reasons are below."
    with_it = [
        row for row in found.rows
        if not row.failed and row is not best and not _is_behind(found, row)
    ]  # fmt: skip
    said = f"{best.method} has the highest held-out log likelihood"
    if with_it:
        names = listed([row.method for row in with_it])
        said += f"; {names} cannot be told from it (less than two standard errors behind)"
    elif len(found.rows) > 1:
        said += ", by more than two standard errors"
    return f"{said}. {sizes(found)[0].upper()}{sizes(found)[1:]}."


def _is_behind(found: Comparison, row: Row) -> bool:
    gap, error = found.behind(row)
    return not gap <= WORTH_SAYING * error


def _quality(found: Comparison, names: Names) -> Section:
    shown = [name for name in SHOWN if name in found.score_names]
    heads = ["method", *(SHOWN[name] for name in shown), "status"]
    heads.insert(2, "behind the best")
    rows: list[list[Content]] = []
    for row in found.rows:
        cells: list[Content] = ["–"] * (len(heads) - 2)
        if not row.failed:
            cells = [with_error(row.mean(name), row.error(name)) for name in shown]
            cells.insert(1, "best" if row is found.best else with_error(*found.behind(row)))
        rows.append([names.show(row.method), *cells, _status(row, names)])
    parts: list[Content] = [
        tag("p", None, f"{sizes(found)}. The gap to the best is paired: both were scored on the "
            "same rows. Random splits share rows, so that errors over them are a little too "
            "small."),
        table("Held-out scores, the best log likelihood first", heads, rows, tall=True),
    ]  # fmt: skip
    known = [row for row in found.rows if not row.failed]
    if len(known) > 1:
        gaps = [found.behind(row) for row in known]
        charts = [_dots("behind", "Log likelihood behind the best", "nats a row behind the best",
                        known, [v for v, _ in gaps], [e for _, e in gaps])]  # fmt: skip
        for name, right in CALIBRATION.items():
            if name in found.score_names:
                values = [row.mean(name) for row in known]
                errors = [row.error(name) for row in known]
                charts.append(_dots(name, f"Calibration: {SHOWN[name]}", SHOWN[name], known, values,
                                    errors, right, "right"))  # fmt: skip
        parts.append(tag("div", {"class": "pair"}, charts))
    return Section("quality", "Quality and calibration", parts)


def _closeness(found: Comparison, names: Names) -> Section:
    reference = found.reference
    if reference is None:
        why = found.notes[0] if found.notes else "no reference was asked for"
        return Section("closeness", "Closeness to the posterior", tag("p", None, f"{why}."))
    known = [row for row in found.rows if row.closeness is not None]
    shown = [name for name in CLOSENESS if getattr(reference.floor, name) is not None]
    rows: list[list[Content]] = [
        [names.show(row.method), *(number(getattr(row.closeness, name)) for name in shown)]
        for row in known
    ]
    rows.append(["its two halves", *(number(getattr(reference.floor, name)) for name in shown)])
    charts = [
        _dots(name, CLOSENESS[name].capitalize(), f"{CLOSENESS[name]} ({BETTER[name]})", known,
              [getattr(row.closeness, name) for row in known],
              rule=getattr(reference.floor, name))
        for name in shown
    ]  # fmt: skip
    about = (
        f"{reference.words[0].upper()}{reference.words[1:]}. Distances are at {reference.rows} "
        "held-out rows. The two halves of the reference are two answers to the same question: "
        "nothing can be told from the posterior that is as close as they are to each other."
    )
    return Section(
        "closeness",
        "Closeness to the posterior",
        [
            tag("p", None, about),
            table("Closeness to the reference", ["method", *(CLOSENESS[n] for n in shown)], rows,
                  tall=True),
            tag("div", {"class": "pair"}, charts) if known else None,
        ],
    )  # fmt: skip


def _cost(found: Comparison, names: Names) -> Section:
    rows: list[list[Content]] = []
    for row in found.rows:
        if row.cost is None:
            continue
        kept = row.cost
        memory = [] if kept.peak_bytes is None else [f"{kept.peak_bytes / 2**20:,.1f} MiB"]
        rows.append([
            names.show(row.method), duration(kept.seconds),
            multiple(found.multiple(row, "time")), duration(kept.predict_seconds),
            f"{kept.parameters:,}", multiple(found.multiple(row, "parameters")),
            f"{kept.posterior_bytes / 1024:,.1f} KiB", *memory,
            "one stacked run" if kept.stacked else "one by one",
        ])  # fmt: skip
    peak = any(row.cost is not None and row.cost.peak_bytes is not None for row in found.rows)
    heads = ["method", "fitting", "× MAP", "predicting", "numbers kept", "× MAP", "posterior",
             *(["peak on the device"] if peak else []), "splits"]  # fmt: skip
    about = (
        "Times are of all splits together, multiples of MAP are of processor time (of the clock "
        "on an accelerator); sizes are of one posterior."
    )
    return Section("cost", "Cost", [tag("p", None, about), table("Cost", heads, rows, tall=True)])


def _fitted(found: Comparison, names: Names, notes: Sequence[str]) -> Section:
    settings = [(row.method, tag("code", None, row.settings)) for row in found.rows]
    facts = [
        ("likelihood", found.likelihood),
        ("splits", found.splits),
        ("training rows", found.train_rows),
        ("held-out rows", found.test_rows),
        ("seed", found.seed),
        ("doxa", doxa.__version__),
    ]
    cards = [card("What was compared", facts), card("Settings", settings)]
    decided = tag("ul", None, [tag("li", None, names.show(note, 300)) for note in notes])
    return Section("fitted", "How it was done",
                   [tag("div", {"class": "facts"}, cards), decided if notes else None])  # fmt: skip


def _status(row: Row, names: Names) -> Content:
    look = "good" if row.status == "ok" else "bad" if row.failed else "warning"
    reason = [" ", names.show(row.reason, 160)] if row.reason else []
    return [mark(look, row.status), *reason]


def _end(name: str, low: float, high: float) -> float | None:
    """A share cannot exceed 1, and agreement is read against it; None: the data decide."""
    if name == "agreement":
        return 1.0
    return 1.0 if name in SHARES and high + 0.05 * (high - low) > 1.0 else None


def _dots(
    key: str,
    title: str,
    label: str,
    rows: Sequence[Row],
    values: Sequence[float],
    errors: Sequence[float] | None = None,
    rule: float | None = None,
    rule_label: str = "the reference's two halves",
) -> Html:
    """A dot a method on its own line, with a standard error to both sides; an upright rule."""
    place = np.arange(len(rows), 0, -1, dtype=float)
    x = np.array(values, dtype=float)
    spread = np.zeros_like(x) if errors is None else np.nan_to_num(np.array(errors, dtype=float))
    low, high = extent([x - spread, x + spread, [] if rule is None else [rule]])
    chart = Plot(
        key,
        title,
        f"{title}, a dot a method, in the order of the table.",
        Axis(label, low=min(0.0, low) if low < 0.5 * high else None, high=_end(key, low, high)),
        Axis("", 0.4, len(rows) + 0.6, at=list(place), names=[cut(r.method, 18) for r in rows]),
        height=110 + 26 * len(rows),
    )
    if rule is not None:
        ends = np.array([0.4, len(rows) + 0.6])
        chart.add(Line(np.full(2, rule), ends, "rule", rule_label))
    for value, error, y in zip(x, spread, place, strict=True):
        if math.isfinite(value) and error > 0:
            chart.add(Line(np.array([value - error, value + error]), np.full(2, y), "thin"))
    chart.add(Points(x, place, radius=4.2))
    behind = values_table(title, ["method number", label], [range(1, len(rows) + 1), x.tolist()])
    return figure(chart, "Methods in the order of the table.", behind)
