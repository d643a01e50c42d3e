"""What a comparison found: a row a method, ranked by held-out log likelihood."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from doxa.app.comparison.reference import Referred
from doxa.app.tables import Array, import_pandas
from doxa.evaluate.closeness import Closeness

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Cost:
    """What a method took, for all splits together; sizes are of one posterior."""

    seconds: float  # on the clock
    processor_seconds: float
    predict_seconds: float
    parameters: int  # numbers that the posterior keeps
    posterior_bytes: int
    peak_bytes: int | None = None  # of the accelerator's memory while fitting
    stacked: bool = True  # all splits in one run

    @property
    def time(self) -> float:
        """What is compared with MAP's: processor time, which a busy machine does not change; on
        an accelerator the clock's."""
        return self.processor_seconds if self.peak_bytes is None else self.seconds


@dataclass(frozen=True)
class Row:
    """One method. A method that failed has a status and a reason, and nothing else."""

    method: str
    status: str = "ok"
    reason: str = ""
    settings: str = ""
    scores: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # a value a split
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
    """The rows, best first, and what they rest on."""

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
        """How much log likelihood a row loses to the best, and its paired standard error: both
        were scored on the same rows, so that what makes a split hard cancels."""
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
        """A flat dictionary a row: the columns of the written table."""
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
    """By held-out log likelihood, the best first; what is undefined or failed comes last."""

    def key(row: Row) -> float:
        value = math.nan if row.failed else row.mean("log_likelihood")
        return -value if math.isfinite(value) else math.inf

    return tuple(sorted(rows, key=key))


def standard_error(values: Array) -> float:
    """s/√n; undefined of fewer than two values."""
    if len(values) < 2:
        return math.nan
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def _number(value: float | None) -> float:
    return math.nan if value is None else value
