"""`doxa compare`: several methods on the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from doxa.app.commands.terminal import log_to_terminal, out, plan_of, say_schema
from doxa.app.options import (
    BatchSize,
    Categorical,
    DataFile,
    Device,
    Drop,
    Epochs,
    Hidden,
    Index,
    Likelihood,
    Members,
    Net,
    Rate,
    Seed,
    Steps,
    Target,
    Verbose,
)  # fmt: skip
from doxa.errors import MethodError


def compare(
    data: DataFile,
    target: Target,
    methods: Annotated[str, typer.Option(help="Names, separated by commas.")] = (
        "map,deep-ensemble,mc-dropout,laplace"
    ),
    test: Annotated[
        Path | None, typer.Option(help="Held-out rows; else a random part of the data.")
    ] = None,
    test_fraction: Annotated[float, typer.Option(help="How large that part is.")] = 0.2,
    out_file: Annotated[
        Path | None, typer.Option("--out", "-o", help="A .csv or .parquet file for the table.")
    ] = None,
    likelihood: Likelihood = None,
    index: Index = None,
    drop: Drop = None,
    categorical: Categorical = None,
    net: Net = None,
    hidden: Hidden = "50",
    members: Members = None,
    epochs: Epochs = None,
    steps: Steps = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
    device: Device = None,
    seed: Seed = 0,
    verbose: Verbose = False,
) -> None:
    """Fit several methods to the same rows and score them on held-out ones."""
    from doxa.app import comparison, schema, tables
    from doxa.app import settings as method_settings

    log_to_terminal(verbose)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    if not names:
        raise MethodError("--methods is empty; give names separated by commas")
    for name in names:
        method_settings.make_method(name)
    if out_file is not None:
        tables.check_writable(out_file)
    plan = plan_of(net, hidden, members, epochs, steps, lr, batch_size, device, seed)
    frame = tables.read_table(data, index)
    columns = schema.infer_schema(frame, target, likelihood, drop or (), categorical or (), index)
    held_out = None if test is None else tables.read_table(test, index)
    say_schema(columns, len(frame))
    rows = comparison.compare(columns, frame, held_out, test_fraction, names, plan)
    out.print(comparison.as_table(rows))
    if out_file is not None:
        tables.write_table(tables.import_pandas().DataFrame(rows).set_index("method"), out_file)
        out.print(f"written to {escape(str(out_file))}", soft_wrap=True)
