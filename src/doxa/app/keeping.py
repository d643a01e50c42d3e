"""From a comparison to a saved run: the method that is kept, fitted to all rows.

The fits of a comparison have each seen a part of the rows, and there is one a split: none of them
is the one to keep. So the chosen method is fitted once more, with the same settings and seed, to
every row of the table; the rows of `--test` stay out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from doxa.app.comparison import Comparison
from doxa.app.fitting import Plan, fit_arrays
from doxa.app.saved_runs import check_new
from doxa.app.schema import Schema
from doxa.errors import MethodError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

BEST = "best"


class Kept(NamedTuple):
    """Which method, or `BEST`, and where its run goes."""

    method: str
    folder: Path


def check(keep: str | None, methods: Sequence[str], out: Path | None) -> Kept | None:
    """What `--keep` and `--out` ask for, before any work; None where nothing is kept."""
    if keep is None:
        return None
    if keep not in (BEST, *methods):
        hint = did_you_mean(keep, (BEST, *methods))
        raise MethodError(f"--keep {keep!r} is not among the methods that are compared{hint}")
    if out is None:
        raise MethodError("--keep needs --out, the folder to save the run in")
    if out.suffix.lower() in (".csv", ".tsv", ".parquet", ".pq"):
        raise MethodError(
            f"with --keep, --out is the folder of the run, not {out.name}; the table goes to "
            f"--table {out.name}"
        )
    check_new(out)
    return Kept(keep, out)


def chosen(found: Comparison, asked: str) -> str:
    """The name of the method to keep; one that failed cannot be."""
    row = found.best if asked == BEST else found[asked]
    if row is None:
        raise MethodError("no method could be fitted: there is nothing to keep")
    if row.failed:
        raise MethodError(f"{row.method} failed and cannot be kept: {row.reason}")
    return row.method


def words(found: Comparison, name: str, rows: int) -> str:
    best = found.best
    why = "the best by held-out log likelihood" if best and best.method == name else "as asked"
    return f"keeping {name} ({why}): fitted to all {rows} rows, with the same settings"


def refit(columns: Schema, frame: pd.DataFrame, name: str, plan: Plan, found: Comparison) -> Any:
    """The posterior of all rows, which remembers what it was chosen by."""
    x, _ = columns.features(frame)
    posterior = fit_arrays(columns, x, columns.targets(frame), name, (), plan)
    row = found[name]
    posterior.metadata["comparison"] = {
        "methods": [each.method for each in found.rows],
        "splits": found.splits,
        "scores": {score: row.mean(score) for score in row.scores},
    }
    return posterior
