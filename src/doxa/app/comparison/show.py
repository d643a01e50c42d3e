"""A comparison on the terminal: one table of quality, one of cost and closeness."""

from __future__ import annotations

import math

from rich.markup import escape
from rich.table import Column, Table

from doxa.app.comparison.result import Comparison, Row
from doxa.app.report.scores import SCORES, Score

CLOSENESS = {
    "agreement": "agreement", "total_variation": "total variation", "wasserstein2": "W2",
}  # fmt: skip


def compared(found: Comparison) -> list[Score]:
    """The scores that are shown, the log likelihood first; the written table has them all."""
    shown = [each for each in SCORES if each.compared and each.name in found.score_names]
    return sorted(shown, key=lambda each: each.name != "log_likelihood")


def as_tables(found: Comparison) -> list[Table]:
    """Held-out scores, the best first; then what they cost and how close they come."""
    return [_scores(found), _costs(found)]


def sizes(found: Comparison) -> str:
    """Where the numbers come from, in words."""
    if found.splits == 1:
        spread = "± one standard error over held-out rows"
    else:
        spread = f"mean ± one standard error over {found.splits} splits"
    return f"{found.train_rows} training and {found.test_rows} held-out rows, {spread}"


def number(value: float) -> str:
    """Three decimals, more for what is very small; a dash for what is undefined."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else f"{value}"
    if value == 0:
        return "0"
    return f"{value:.3f}" if 0.001 <= abs(value) < 1000 else f"{value:.4g}"


def with_error(value: float, error: float) -> str:
    """A value and its standard error, to two digits of the error."""
    if not (math.isfinite(value) and math.isfinite(error) and error > 0):
        return number(value) if math.isnan(error) else f"{number(value)} ± {number(error)}"
    digits = min(6, max(0, 1 - math.floor(math.log10(error))))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def multiple(value: float) -> str:
    """How many times MAP."""
    if not math.isfinite(value):
        return "–"
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.1 else f"{value:.2g}"


def _scores(found: Comparison) -> Table:
    shown = compared(found)
    heads = ["method", *(each.title() for each in shown)]
    heads.insert(2, "behind the best")
    status_head = Column("status", overflow="fold")
    table = Table(*heads, status_head, title="held-out scores", caption=sizes(found))
    for row in found.rows:
        if row.failed:
            cells = ["–"] * (len(heads) - 1)
        else:
            cells = [with_error(row.mean(each.name), row.error(each.name)) for each in shown]
            gap = "best" if row is found.best else with_error(*found.behind(row))
            cells.insert(1, gap)
        table.add_row(
            escape(row.method), *cells, escape(status(row)),
            style="bold" if row is found.best and len(found.rows) > 1 else None,
        )  # fmt: skip
    return table


def status(row: Row) -> str:
    return f"{row.status}: {row.reason}" if row.reason else row.status


def _costs(found: Comparison) -> Table:
    reference = found.reference
    close = [] if reference is None else [
        name for name in CLOSENESS if getattr(reference.floor, name) is not None
    ]  # fmt: skip
    heads = ["method", "seconds", "× MAP", "numbers kept", "× MAP", *(CLOSENESS[c] for c in close)]
    title = "cost" if reference is None else "cost, and closeness to the reference posterior"
    caption = None if reference is None else escape(reference.words)
    table = Table(*heads, title=title, caption=caption)
    for row in found.rows:
        if row.cost is None:
            continue
        cells = [
            f"{row.cost.seconds:.2f}", multiple(found.multiple(row, "time")),
            f"{row.cost.parameters:,}", multiple(found.multiple(row, "parameters")),
        ]  # fmt: skip
        if row.closeness is not None:
            cells += [number(getattr(row.closeness, name)) for name in close]
        table.add_row(escape(row.method), *cells)
    if reference is not None:
        floor = [number(getattr(reference.floor, name)) for name in close]
        table.add_row("its two halves", "", "", "", "", *floor, style="dim")
    return table
