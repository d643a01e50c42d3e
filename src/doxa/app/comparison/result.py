"""The result of a comparison: one row per method, ranked by held-out log likelihood.

`as_tables` shows it on the terminal: a table of scores, and a table of costs and distances to the
reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape
from rich.table import Column, Table

from doxa.app.comparison.reference import Referred
from doxa.app.report.scores import title_of
from doxa.evaluate import table
from doxa.evaluate.reference_distance import Closeness
from doxa.evaluate.table import Score
from doxa.selection.splits import standard_error
from doxa.tables.files import Array, import_pandas

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Cost:
    """The cost of a method, for all splits together; sizes are those of one posterior."""

    seconds: float  # wall-clock time
    processor_seconds: float
    predict_seconds: float
    parameters: int  # numbers that the posterior keeps
    posterior_bytes: int
    peak_bytes: int | None = None  # of the accelerator's memory while fitting
    stacked: bool = True  # all splits in one run

    @property
    def time(self) -> float:
        """The time compared with that of MAP: processor time, which does not depend on the load of
        the machine; on an accelerator, wall-clock time."""
        return self.processor_seconds if self.peak_bytes is None else self.seconds


@dataclass(frozen=True)
class Row:
    """One method. A method that failed has a status and a reason, and nothing else."""

    method: str
    status: str = "ok"
    reason: str = ""
    settings: str = ""
    scores: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # one value per split
    each: tuple[Array, ...] = ()  # held-out log likelihood of each row, split by split
    cost: Cost | None = None
    closeness: Closeness | None = None

    @property
    def failed(self) -> bool:
        return not self.each

    def mean(self, score: str) -> float:
        return float(np.mean(self.scores[score])) if self.scores else math.nan

    def error(self, score: str) -> float:
        """The standard error of the mean over splits; of one split's log likelihood over rows."""
        if len(self.each) == 1 and score == "log_likelihood":
            return standard_error(self.each[0])
        return standard_error(np.array(self.scores.get(score, ())))


@dataclass(frozen=True)
class Comparison:
    """The rows, best first, and the settings of the comparison."""

    rows: tuple[Row, ...]
    likelihood: str
    splits: int
    train_rows: int
    test_rows: int
    seed: int
    map_cost: Cost | None = None
    reference: Referred | None = None
    notes: tuple[str, ...] = ()

    @property
    def score_names(self) -> list[str]:
        return next((list(row.scores) for row in self.rows if row.scores), [])

    @property
    def best(self) -> Row | None:
        return next((row for row in self.rows if not row.failed), None)

    def __getitem__(self, method: str) -> Row:
        return next(row for row in self.rows if row.method == method)

    def behind(self, row: Row) -> tuple[float, float]:
        """The log likelihood of the best method minus that of a row, and its paired standard error:
        both have the same held-out rows, so the difficulty of a split cancels."""
        best = self.best
        if best is None or row.failed:
            return math.nan, math.nan
        if self.splits == 1:
            away = best.each[0] - row.each[0]
        else:
            away = np.array(best.scores["log_likelihood"]) - np.array(row.scores["log_likelihood"])
        return float(away.mean()), 0.0 if row is best else standard_error(away)

    def multiple(self, row: Row, what: str) -> float:
        """A cost as a multiple of MAP's."""
        if row.cost is None or self.map_cost is None:
            return math.nan
        return float(getattr(row.cost, what)) / max(float(getattr(self.map_cost, what)), 1e-9)

    def records(self) -> list[dict[str, Any]]:
        """One flat dictionary per row: the columns of the written table."""
        return [self._record(row) for row in self.rows]

    def frame(self) -> pd.DataFrame:
        """The table, by method."""
        return import_pandas().DataFrame(self.records()).set_index("method")

    def _record(self, row: Row) -> dict[str, Any]:
        record: dict[str, Any] = {"method": row.method, "settings": row.settings}
        for name in self.score_names:
            record |= {name: row.mean(name), f"{name}_se": row.error(name)}
            if name == "log_likelihood":
                record["behind"], record["behind_se"] = self.behind(row)
        for what in ("seconds", "processor_seconds", "predict_seconds"):
            record[what] = math.nan if row.cost is None else getattr(row.cost, what)
        record["time_x_map"] = self.multiple(row, "time")
        for what in ("parameters", "posterior_bytes"):
            record[what] = math.nan if row.cost is None else getattr(row.cost, what)
            record[f"{what}_x_map"] = self.multiple(row, what)
        if row.cost is not None and row.cost.peak_bytes is not None:
            record["peak_bytes"] = row.cost.peak_bytes
        if self.reference is not None:
            close = row.closeness
            for name in self.reference.floor._fields:
                record[name] = math.nan if close is None else _number(getattr(close, name))
            record["reference_rhat"] = self.reference.rhat
        return record | {"splits": self.splits, "status": row.status, "reason": row.reason}


def ranked(rows: list[Row]) -> tuple[Row, ...]:
    """By held-out log likelihood, the best first; undefined values and failures come last."""

    def key(row: Row) -> float:
        value = math.nan if row.failed else row.mean("log_likelihood")
        return -value if math.isfinite(value) else math.inf

    return tuple(sorted(rows, key=key))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


CLOSENESS = {
    "agreement": "agreement", "total_variation": "total variation", "wasserstein2": "W2",
}  # fmt: skip


def compared(found: Comparison) -> list[Score]:
    """The scores that are shown, the log likelihood first; the written table has them all."""
    shown = [each for each in table.SCORES if each.compared and each.name in found.score_names]
    return sorted(shown, key=lambda each: each.name != "log_likelihood")


def as_tables(found: Comparison) -> list[Table]:
    """Held-out scores, the best first; then costs and distances to the reference."""
    return [_scores(found), _costs(found)]


def sizes(found: Comparison) -> str:
    """The number of rows and splits, as text."""
    if found.splits == 1:
        spread = "± one standard error over held-out rows"
    else:
        spread = f"mean ± one standard error over {found.splits} splits"
    return f"{found.train_rows} training and {found.test_rows} held-out rows, {spread}"


def number(value: float) -> str:
    """Three decimals, more for very small values; a dash for NaN."""
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
    """A multiple of MAP as text."""
    if not math.isfinite(value):
        return "–"
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.1 else f"{value:.2g}"


def _scores(found: Comparison) -> Table:
    shown = compared(found)
    heads = ["method", *(title_of(each) for each in shown)]
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
    heads = ["method", "seconds", "processor seconds", "× MAP", "numbers kept", "× MAP"]
    heads += [CLOSENESS[c] for c in close]
    title = "cost" if reference is None else "cost, and distance to the reference posterior"
    caption = None if reference is None else escape(reference.words)
    table = Table(*heads, title=title, caption=caption)
    for row in found.rows:
        if row.cost is None:
            continue
        cells = [
            f"{row.cost.seconds:.2f}", f"{row.cost.processor_seconds:.2f}",
            multiple(found.multiple(row, "time")),
            f"{row.cost.parameters:,}", multiple(found.multiple(row, "parameters")),
        ]  # fmt: skip
        if row.closeness is not None:
            cells += [number(getattr(row.closeness, name)) for name in close]
        table.add_row(escape(row.method), *cells)
    if reference is not None:
        floor = [number(getattr(reference.floor, name)) for name in close]
        table.add_row("its two halves", "", "", "", "", "", *floor, style="dim")
    return table
