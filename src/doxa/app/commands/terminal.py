"""What the commands share: the two consoles, and functions that print on them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Table

from doxa.app.options import print_table
from doxa.errors import MethodError

if TYPE_CHECKING:
    from doxa.tables.schema import Schema

# Names are text: a column called :one: is not replaced by an emoji.
out = Console(emoji=False)
err = Console(stderr=True, emoji=False)


def plan_of(
    net: str | None,
    hidden: str,
    members: int | None,
    epochs: int | None,
    steps: int | None,
    lr: float | None,
    batch_size: int | None,
    validation: float | None,
    device: str | None,
    seed: int,
) -> Any:
    from doxa.app.fitting import Plan

    try:
        widths = tuple(int(width) for width in hidden.split(",") if width.strip())
    except ValueError as error:
        raise MethodError(f"--hidden takes widths separated by commas, not {hidden!r}") from error
    if epochs is not None and steps is not None:
        raise MethodError("give --epochs or --steps, not both")
    return Plan(net, widths, members, epochs, steps, lr, batch_size, validation, device, seed)


def table_of(
    target: str,
    likelihood: str | None,
    index: str | None,
    drop: Sequence[str] | None,
    categorical: Sequence[str] | None,
    numeric: Sequence[str] | None,
    missing: str,
    sep: str | None,
    decimal: str | None,
    encoding: str | None,
    group: str | None = None,
    time: str | None = None,
    time_input: bool = False,
) -> Any:
    """The options that describe a table, checked."""
    from doxa.tables.reading import Dialect
    from doxa.tables.schema import TableSpec

    return TableSpec(
        target, likelihood, index, tuple(drop or ()), tuple(categorical or ()),
        tuple(numeric or ()), missing, Dialect.asked(sep, decimal, encoding), group, time,
        time_input,
    )  # fmt: skip


def say_schema(columns: Schema, rows: int) -> None:
    out.print(
        f"{rows} rows, {len(columns.columns)} input columns ({columns.inputs} inputs per row)"
    )
    for note in columns.notes:
        out.print(escape(note), highlight=False, soft_wrap=True)


def status_of(posterior: Any) -> str:
    status = posterior.status
    return escape(f"{status} ({status.reason})" if status.reason else str(status))


DIVERGED, NOT_OK = 3, 4  # exit codes: a run was saved, but its status is not "ok"


def exit_by_status(posterior: Any, allowed: bool) -> None:
    """End the command after a run was saved; by an exit code of its own unless the status is
    "ok", or is `allowed`. A diverged fit is never allowed."""
    status = posterior.status
    if status == "diverged":
        err.print("the fit diverged: do not use its predictions", highlight=False)
        raise typer.Exit(DIVERGED)
    if status != "ok" and not allowed:
        err.print(
            escape(
                f"the run is saved, but its status is {str(status)!r}: exit code {NOT_OK} "
                "(--allow-status: 0)"
            ),
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        raise typer.Exit(NOT_OK)


def score_table(found: dict[str, Any]) -> Table:
    """Scores on held-out rows, beside those of a constant prediction."""
    from doxa.app.held_out import score_rows

    title = f"{found['rows']} held-out rows of {escape(found['file'])}"
    table = Table("score", "this run", "constant", title=title)
    for row in score_rows(found):
        table.add_row(*row)
    return table


def show(table: Any, most: int = 20) -> None:
    """Print the first rows of a table."""
    shown = Table(str(table.index.name or ""), *(escape(str(c)) for c in table.columns))
    for label, row in table.head(most).iterrows():
        cells = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in row)
        shown.add_row(escape(str(label)), *map(escape, cells))
    print_table(out, shown)
    if len(table) > most:
        out.print(f"{len(table) - most} more rows; --out predictions.csv writes all of them")


def log_to_terminal(verbose: bool) -> None:
    log = logging.getLogger("doxa")
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    if not any(isinstance(handler, RichHandler) for handler in log.handlers):
        log.addHandler(RichHandler(console=err, show_time=False, show_path=False))
