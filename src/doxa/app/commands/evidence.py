"""`doxa evidence`: which network and which prior, by evidence, by a bound, by held-out rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

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


def evidence(
    data: DataFile,
    target: Target,
    hidden: Annotated[
        list[str] | None,
        typer.Option(help="A network: its hidden widths, 10,10; '' for none. Once for each."),
    ] = None,
    std: Annotated[str, typer.Option(help="Standard deviations of the prior.")] = "0.1,0.3,1,3",
    find: Annotated[
        bool, typer.Option(help="Also a prior whose scale is found by evidence.")
    ] = True,
    activation: Annotated[str, typer.Option(help="Of the networks.")] = "tanh",
    bound: Annotated[str, typer.Option(help="mean-field, last-layer-vi, ..., or none.")] = "none",
    splits: Annotated[
        int, typer.Option(min=1, help="Random divisions into training and test.")
    ] = 3,
    test_fraction: Annotated[float, typer.Option(help="The share that is held out.")] = 0.2,
    validation: Annotated[
        float | None, typer.Option(help="A share of the training rows, to choose by, too.")
    ] = None,
    place: Annotated[
        Path | None, typer.Option("--out", "-o", help="A .csv or .parquet file for the table.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="A .png, .pdf or .svg file.")] = None,
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
    """Fit every network under every prior, and rank them by Laplace evidence; beside it a bound on
    it, and the log-likelihood of held-out rows."""
    from doxa import nets
    from doxa.app import schema, tables
    from doxa.app.selection import evidence as compare
    from doxa.app.selection.result import as_table

    log_to_terminal(verbose)
    if place is not None:
        tables.check_writable(place)
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
        tables.write_table(result.frame().reset_index().set_index("net"), place)
        out.print(f"table written to {escape(str(place))}", soft_wrap=True)
    if figure is not None:
        result.figure(figure)
        out.print(f"figure written to {escape(str(figure))}", soft_wrap=True)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ModelError(f"--std takes numbers separated by commas, not {text!r}") from error


def _say(words: str) -> None:
    err.print(escape(words), highlight=False, soft_wrap=True)
