"""Several methods fitted to the same rows and scored on the same held-out rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from doxa.app.fitting import Plan, fit_arrays
from doxa.app.schema import Schema
from doxa.app.scores import scores
from doxa.errors import DataError

if TYPE_CHECKING:
    import pandas as pd


def compare(
    schema: Schema,
    frame: pd.DataFrame,
    test: pd.DataFrame | None,
    fraction: float,
    methods: Sequence[str],
    plan: Plan,
) -> list[dict[str, Any]]:
    """One row a method: its scores, how long it took and its status."""
    x, _ = schema.features(frame)
    y = schema.targets(frame)
    if test is None:
        train, held = split(len(frame), fraction, plan.seed)
        x_test, y_test = x[held], y[held]
        x, y = x[train], y[train]
    else:
        x_test, _ = schema.features(test)
        y_test = schema.targets(test)
    rows = []
    for name in methods:
        start = time.perf_counter()
        posterior = fit_arrays(schema, x, y, name, (), plan)
        seconds = time.perf_counter() - start
        row: dict[str, Any] = {"method": name}
        row |= scores(posterior.predict(x_test), y_test, schema)
        row |= {"seconds": seconds, "status": str(posterior.status)}
        rows.append(row)
    return rows


def split(n: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out row numbers, shuffled by the seed."""
    if not 0.0 < fraction < 1.0:
        raise DataError(f"--test-fraction must be between 0 and 1, not {fraction}")
    held = round(n * fraction)
    if held < 1 or n - held < 1:
        raise DataError(f"{n} rows cannot be split with --test-fraction {fraction}")
    order = np.random.default_rng(seed).permutation(n)
    return np.sort(order[held:]), np.sort(order[:held])


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Held-out scores, the best log likelihood in bold."""
    table = Table(*rows[0], title="held-out scores")
    best = max(rows, key=lambda row: row["log likelihood"])
    for row in rows:
        cells = [escape(f"{v:.3f}" if isinstance(v, float) else str(v)) for v in row.values()]
        table.add_row(*cells, style="bold" if row is best and len(rows) > 1 else None)
    return table
