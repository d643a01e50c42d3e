"""A comparison of networks on the terminal: one table."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Column, Table

from doxa.app.comparison.result import standard_error
from doxa.app.comparison.show import number, with_error
from doxa.app.selection.result import CRITERIA, Candidate, Evidence
from doxa.app.tables import Array


def as_table(found: Evidence) -> Table:
    """Every candidate, the most evidence first."""
    shown = [name for name in CRITERIA if any(getattr(row, name) for row in found.fitted)]
    size = f"{found.train_rows} training and {found.test_rows} held-out rows"
    caption = f"{size}; mean over {found.splits} splits" if found.splits > 1 else size
    table = Table(
        "network", "prior", "weights", *(CRITERIA[name] for name in shown),
        Column("status", overflow="fold"), title="which network, which prior?", caption=caption,
    )  # fmt: skip
    for row in found.rows:
        cells = ["–" if row.failed else _cell(row, name) for name in shown]
        status = f"{row.status}: {row.reason}" if row.reason else row.status
        best = row is found.rows[0] and len(found) > 1
        table.add_row(
            escape(row.net), escape(row.prior), f"{row.weights:,}", *cells, escape(status),
            style="bold" if best else None,
        )  # fmt: skip
    return table


def _cell(row: Candidate, name: str) -> str:
    values: Array = getattr(row, name)
    if name == "held_out" or name == "validation":
        return with_error(row.mean(name), standard_error(values))
    return number(row.mean(name))
