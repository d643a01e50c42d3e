"""`tune`: the best point of a grid, whose points are runs of one fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from doxa.driver.runs import Runs
from doxa.errors import MethodError
from doxa.fit import fit
from doxa.method import Method
from doxa.posterior import Posterior


def tune(
    model: Any,
    data: Any,
    method: str | Method | type[Method],
    grid: Mapping[str, Sequence[Any]],
    *,
    by: str = "validation",
    refit: bool = False,
    **options: Any,
) -> Posterior:
    """The best point of a grid as one call, for any method: all points are runs of one fit.

    Parameters
    ----------
    grid: {field: values}, every combination of them: fields of the method that a grid may vary,
        "lr", "prior", "likelihood" (noise levels), as for `doxa.Runs`.
    by: "validation" (the mean log predictive density of rows held out, the same for all points),
        "objective" (mc-dropout's), "elbo" or "evidence".
    refit: whether the best point is fitted again, to all rows, with nothing held out.
    options: of `doxa.fit`. Unless said otherwise a fifth of the rows is held out where they
        choose, and none where a bound or an evidence does, which is about all rows.

    Returns
    -------
    The posterior of the best point; `posterior.metadata["tuned"]` has what was chosen, by what, and
    a row for each point with its score.
    """
    if "runs" in options:
        raise MethodError(
            "tune makes the runs of its grid itself; for splits use "
            "doxa.fit(..., runs=doxa.Runs(rows=..., grid=...)).select(by=...)"
        )
    if not grid:
        raise MethodError('the grid is empty: give values to try, {"p": [0.01, 0.05]}')
    shown = {"validation": 0.2 if by == "validation" else None} | options
    sweep = fit(model, data, method, runs=Runs(grid=grid), **shown)
    table = sweep.table(by)
    chosen = next(i for i, row in enumerate(table) if row["chosen"])
    posterior: Posterior = sweep[chosen]
    if refit:
        point = {name: [value] for name, value in sweep.specs[chosen].hyper.items()}
        shown["validation"] = None
        posterior = fit(model, data, method, runs=Runs(grid=point), **shown)[0]
    told = [{k: _plain(v) for k, v in row.items()} for row in table]
    own = {name: told[chosen][name] for name in grid}
    posterior.metadata["tuned"] = {"by": by, "chosen": own, "table": told}
    return posterior


def _plain(value: Any) -> Any:
    """What a file can hold."""
    return value if isinstance(value, bool | int | float | str | None) else repr(value)
