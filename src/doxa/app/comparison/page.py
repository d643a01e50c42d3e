"""A comparison as one self-contained HTML file, made of the building blocks of `doxa report`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import doxa
from doxa.app.comparison.result import (
    CLOSENESS,
    Comparison,
    Row,
    compared,
    multiple,
    number,
    sizes,
    with_error,
)
from doxa.app.report import html
from doxa.app.report.charts import Axis, Line, Mark, Plot, Points, extent
from doxa.app.report.html import Content, Names, Section, cut
from doxa.app.report.report import check_place, write_page
from doxa.app.report.scores import title_of
from doxa.app.report.text import capitalized, count, duration, listed
from doxa.evaluate.table import score

__all__ = ["check_place", "render", "write"]

_SHARES = {"agreement", "total_variation"}  # they end at 1, as some scores do
CLEAR = 2.0  # standard errors: a smaller difference may be chance
BETTER = {"agreement": "higher is closer", "total_variation": "lower is closer",
          "wasserstein2": "lower is closer"}  # fmt: skip


def write(found: Comparison, path: Path, title: str, notes: Sequence[str] = ()) -> Path:
    """Write the page; `notes` are the notes on the schema of the table."""
    check_place(path)
    write_page(render(found, title, notes), path)
    return path


def render(found: Comparison, title: str, notes: Sequence[str] = ()) -> str:
    """The document as text."""
    names = Names()
    return html.render_page(
        title=f"{cut(title, 80)} · doxa compare",
        over="doxa compare",
        heading=["Methods for ", names.show(title, 80)],
        marks=_pills(found),
        lead=_lead(found),
        sections=[
            Section("quality", "Quality and calibration", _quality(found, names)),
            Section("closeness", "Distance to the posterior", _closeness(found, names)),
            Section("cost", "Cost", _cost(found, names)),
            Section("fitted", "How it was done", _fitted(found, names, notes)),
        ],
        names=names,
    )


def _pills(found: Comparison) -> list[Content]:
    failed = [row for row in found.rows if row.failed]
    alarming = [row for row in found.rows if not row.failed and row.status != "ok"]
    pills = [html.mark("none", count(len(found.rows), "method"))]
    if failed:
        pills.append(html.mark("bad", f"{len(failed)} failed"))
    if alarming:
        pills.append(html.mark("warning", f"{len(alarming)} with a warning"))
    if found.reference is not None:
        converged = found.reference.converged
        text = "reference converged" if converged else "reference not converged"
        pills.append(html.mark("good" if converged else "warning", text))
    return pills


def _lead(found: Comparison) -> str:
    best = found.best
    if best is None:
        return "No method could be fitted; the reasons are below."
    equal = [
        row.method for row in found.rows
        if not row.failed and row is not best and not _is_behind(found, row)
    ]  # fmt: skip
    text = f"{best.method} has the highest held-out log likelihood"
    if equal:
        behind = "less than two standard errors behind"
        text += f"; {listed(equal)} cannot be distinguished from it ({behind})"
    elif len(found.rows) > 1:
        text += ", by more than two standard errors"
    return f"{text}. {capitalized(sizes(found))}."


def _is_behind(found: Comparison, row: Row) -> bool:
    gap, error = found.behind(row)
    return not gap <= CLEAR * error


def _quality(found: Comparison, names: Names) -> Content:
    shown = compared(found)
    heads = ["method", *(title_of(each) for each in shown), "status"]
    heads.insert(2, "behind the best")
    rows: list[list[Content]] = []
    for row in found.rows:
        cells: list[Content] = ["–"] * (len(heads) - 2)
        if not row.failed:
            cells = [with_error(row.mean(each.name), row.error(each.name)) for each in shown]
            cells.insert(1, "best" if row is found.best else with_error(*found.behind(row)))
        rows.append([names.show(row.method), *cells, _status(row, names)])
    about = (
        f"{sizes(found)}. The gap to the best is paired: both were scored on the same rows. Random "
        "splits share rows, so that errors over them are a little too small."
    )
    title = "Held-out scores, the best log likelihood first"
    parts: list[Content] = [html.paragraph(about), html.table(title, heads, rows, tall=True)]
    known = [row for row in found.rows if not row.failed]
    if len(known) > 1:
        gaps, errors = zip(*(found.behind(row) for row in known), strict=True)
        label = "nats per row behind the best"
        charts = [_dots("behind", "Log likelihood behind the best", label, known, gaps, errors)]
        for each in shown:
            if each.right is not None:
                values = [row.mean(each.name) for row in known]
                errors = tuple(row.error(each.name) for row in known)
                heading, label = f"Calibration: {title_of(each)}", title_of(each)
                rule = (each.right, "right")
                charts.append(_dots(each.name, heading, label, known, values, errors, rule))
        parts.append(html.pair(charts))
    return parts


def _closeness(found: Comparison, names: Names) -> Content:
    reference = found.reference
    if reference is None:
        why = found.notes[0] if found.notes else "the comparison has no reference"
        return html.paragraph(f"{why}.")
    known = [row for row in found.rows if row.closeness is not None]
    shown = [name for name in CLOSENESS if getattr(reference.floor, name) is not None]
    rows: list[list[Content]] = [
        [names.show(row.method), *(number(getattr(row.closeness, name)) for name in shown)]
        for row in known
    ]
    rows.append(["its two halves", *(number(getattr(reference.floor, name)) for name in shown)])
    charts = []
    for name in shown:
        label, values = CLOSENESS[name], [getattr(row.closeness, name) for row in known]
        rule = getattr(reference.floor, name), "the reference's two halves"
        title = capitalized(label)
        charts.append(_dots(name, title, f"{label} ({BETTER[name]})", known, values, rule=rule))
    about = (
        f"{capitalized(reference.words)}. Distances are at {reference.rows} held-out rows. The two "
        "halves of the reference are two samples of the same posterior: a method that is as close "
        "as they are to each other cannot be distinguished from it."
    )
    heads = ["method", *(CLOSENESS[name] for name in shown)]
    return [
        html.paragraph(about),
        html.table("Distance to the reference", heads, rows, tall=True),
        html.pair(charts) if known else None,
    ]


def _cost(found: Comparison, names: Names) -> Content:
    rows: list[list[Content]] = []
    peak = any(row.cost is not None and row.cost.peak_bytes is not None for row in found.rows)
    for row in found.rows:
        if row.cost is None:
            continue
        kept = row.cost
        memory = [] if kept.peak_bytes is None else [f"{kept.peak_bytes / 2**20:,.1f} MiB"]
        rows.append([
            names.show(row.method), duration(kept.seconds), duration(kept.processor_seconds),
            multiple(found.multiple(row, "time")), duration(kept.predict_seconds),
            f"{kept.parameters:,}", multiple(found.multiple(row, "parameters")),
            f"{kept.posterior_bytes / 1024:,.1f} KiB", *memory,
            "one stacked run" if kept.stacked else "one by one",
        ])  # fmt: skip
    heads = ["method", "fitting", "processor time", "× MAP", "predicting", "numbers kept",
             "× MAP", "posterior", *(["peak on the device"] if peak else []), "splits"]  # fmt: skip
    about = (
        "Times are those of all splits together; multiples of MAP are of processor time (of "
        "wall-clock time on an accelerator); sizes are those of one posterior."
    )
    return [html.paragraph(about), html.table("Cost", heads, rows, tall=True)]


def _fitted(found: Comparison, names: Names, notes: Sequence[str]) -> Content:
    settings = [(row.method, html.code(row.settings)) for row in found.rows]
    facts = [
        ("likelihood", found.likelihood),
        ("splits", found.splits),
        ("training rows", found.train_rows),
        ("held-out rows", found.test_rows),
        ("seed", found.seed),
        ("doxa", doxa.__version__),
    ]
    shown = html.cards(html.card("What was compared", facts), html.card("Settings", settings))
    return [shown, html.items([names.show(note, 300) for note in notes])]


def _status(row: Row, names: Names) -> Content:
    look = "good" if row.status == "ok" else "bad" if row.failed else "warning"
    reason = [" ", names.show(row.reason, 160)] if row.reason else []
    return [html.mark(look, row.status), *reason]


def _end(name: str, low: float, high: float) -> float | None:
    """A share cannot exceed 1, and agreement is read against it; None: the data decide."""
    if name == "agreement":
        return 1.0
    return (
        1.0 if (name in _SHARES or score(name).share) and high + 0.05 * (high - low) > 1.0 else None
    )


def _dots(
    key: str,
    title: str,
    label: str,
    rows: Sequence[Row],
    values: Sequence[float],
    errors: Sequence[float] | None = None,
    rule: tuple[float, str] | None = None,
) -> Content:
    """One dot per method on its own line, with a standard error to both sides; an upright rule
    with its label."""
    place = np.arange(len(rows), 0, -1, dtype=float)
    x = np.array(values, dtype=float)
    spread = np.zeros_like(x) if errors is None else np.nan_to_num(np.array(errors, dtype=float))
    low, high = extent([x - spread, x + spread, [] if rule is None else [rule[0]]])
    ends = np.array([0.4, len(rows) + 0.6])
    marks: list[Mark] = [] if rule is None else [Line(np.full(2, rule[0]), ends, "rule", rule[1])]
    for value, error, y in zip(x, spread, place, strict=True):
        if math.isfinite(value) and error > 0:
            marks.append(Line(np.array([value - error, value + error]), np.full(2, y), "thin"))
    plot = Plot(
        key,
        title,
        f"{title}, one dot per method, in the order of the table.",
        Axis(label, low=min(0.0, low) if low < 0.5 * high else None, high=_end(key, low, high)),
        Axis("", ends[0], ends[1], at=list(place), names=[cut(row.method, 18) for row in rows]),
        [*marks, Points(x, place, radius=4.2)],
        height=110 + 26 * len(rows),
    )
    shown = [("method number", range(1, len(rows) + 1)), (label, x.tolist())]
    return html.figure(plot, "Methods in the order of the table.", shown)
