"""`doxa evidence`: choose a network and a prior by evidence, ELBO or held-out rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from doxa.app.commands.terminal import (
    err,
    log_to_terminal,
    out,
    plan_of,
    say_schema,
    table_of,
)
from doxa.app.options import (
    BatchSize,
    Categorical,
    DataFile,
    Decimal,
    Device,
    Drop,
    Encoding,
    Epochs,
    Index,
    Likelihood,
    Missing,
    Numeric,
    Rate,
    Seed,
    Sep,
    Steps,
    Target,
    Verbose,
    print_table,
)
from doxa.errors import ModelError

if TYPE_CHECKING:
    from doxa.selection import Candidate, Evidence


def evidence(
    data: DataFile,
    target: Target,
    hidden: Annotated[
        list[str] | None,
        typer.Option(
            help="The hidden widths of a network, as 10,10; '' for none. Repeat the option for "
            "each network. Default: 5, 20 and 10,10."
        ),
    ] = None,
    std: Annotated[
        str, typer.Option(help="Standard deviations of the prior, separated by commas.")
    ] = "0.1,0.3,1,3",
    find: Annotated[
        bool, typer.Option(help="Add a prior whose scale is optimised by the evidence.")
    ] = True,
    activation: Annotated[str, typer.Option(help="The activation of the networks.")] = "tanh",
    bound: Annotated[
        str,
        typer.Option(
            help="A variational method whose ELBO is shown too: mean-field, last-layer-vi, ..., or "
            "none."
        ),
    ] = "none",
    splits: Annotated[
        int, typer.Option(min=1, help="Number of random splits into training and test rows.")
    ] = 3,
    test_fraction: Annotated[float, typer.Option(help="Share of the rows to hold out.")] = 0.2,
    validation: Annotated[
        float | None,
        typer.Option(
            help="Share of the training rows for a validation score, as another criterion."
        ),
    ] = None,
    place: Annotated[
        Path | None, typer.Option("--out", "-o", help="A .csv or .parquet file for the table.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="A .png, .pdf or .svg file for a figure.")
    ] = None,
    likelihood: Likelihood = None,
    index: Index = None,
    drop: Drop = None,
    categorical: Categorical = None,
    numeric: Numeric = None,
    missing: Missing = "error",
    sep: Sep = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    epochs: Epochs = None,
    steps: Steps = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
    device: Device = None,
    seed: Seed = 0,
    verbose: Verbose = False,
) -> None:
    """Fit every network with every prior, and rank them by Laplace evidence.

    The table also shows the ELBO, if --bound is given, and the log likelihood of held-out rows.
    """
    from doxa import nets
    from doxa.selection import evidence as compare
    from doxa.tables import files, schema

    log_to_terminal(verbose)
    if place is not None:
        files.check_writable(place)
    plans = [
        plan_of(None, widths, None, epochs, steps, lr, batch_size, None, device, seed)
        for widths in hidden or ["5", "20", "10,10"]
    ]
    scales = _numbers(std)
    table = table_of(
        target, likelihood, index, drop, categorical, numeric, missing, sep, decimal, encoding
    )
    frame, columns = schema.read_dataset(data, table)
    say_schema(columns, len(frame))
    networks = {
        "×".join(map(str, plan.hidden)) or "linear": nets.mlp(
            columns.inputs, columns.outputs, plan.hidden, activation=activation
        )
        for plan in plans
    }
    result = compare(
        networks, (columns.features(frame)[0], columns.targets(frame)),
        priors=[*scales, None] if find else scales, likelihood=columns.likelihood,
        bound=None if bound == "none" else bound, splits=splits, test_fraction=test_fraction,
        validation=validation, seed=seed, say=_say, progress=True, **plans[0].options(),
    )  # fmt: skip
    print_table(out, as_table(result))
    if place is not None:
        files.write_table(result.frame().reset_index().set_index("net"), place)
        out.print(f"table written to {escape(str(place))}", soft_wrap=True)
    if figure is not None:
        result.figure(figure)
        out.print(f"figure written to {escape(str(figure))}", soft_wrap=True)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ModelError(f"--std takes numbers separated by commas, not {text!r}") from error


def _say(message: str) -> None:
    err.print(escape(message), highlight=False, soft_wrap=True)


def as_table(found: Evidence) -> Table:
    """Every candidate, the highest evidence first."""
    from doxa.selection.result import CRITERIA

    shown = [name for name in CRITERIA if any(getattr(row, name) for row in found.fitted)]
    size = f"{found.train_rows} training and {found.test_rows} held-out rows"
    caption = f"{size}; mean over {found.splits} splits" if found.splits > 1 else size
    table = Table(
        "network", "prior", "weights", *(CRITERIA[name] for name in shown),
        Column("status", overflow="fold"), title="networks and priors", caption=caption,
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
    from doxa.app.comparison.result import number, with_error
    from doxa.selection.splits import standard_error

    if name == "held_out" or name == "validation":
        return with_error(row.mean(name), standard_error(getattr(row, name)))
    return number(row.mean(name))
