"""`doxa fit`: a table to a saved posterior."""

from __future__ import annotations

import time
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
    status_of,
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
    Hidden,
    Index,
    Likelihood,
    Members,
    Missing,
    Net,
    Numeric,
    Rate,
    Seed,
    Sep,
    Settings,
    Steps,
    Target,
    Validation,
    Verbose,
)  # fmt: skip

DIVERGED = 3  # the exit code of a fit that is saved and cannot be used


def fit(
    data: DataFile,
    target: Target,
    method: Annotated[str, typer.Option("--method", "-m", help="See doxa methods.")] = (
        "deep-ensemble"
    ),
    out_folder: Annotated[Path, typer.Option("--out", "-o", help="Where to save.")] = Path("run"),
    likelihood: Likelihood = None,
    index: Index = None,
    drop: Drop = None,
    categorical: Categorical = None,
    numeric: Numeric = None,
    missing: Missing = "error",
    sep: Sep = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    settings: Settings = None,
    net: Net = None,
    hidden: Hidden = "50",
    members: Members = None,
    epochs: Epochs = None,
    steps: Steps = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
    validation: Validation = None,
    device: Device = None,
    seed: Seed = 0,
    checkpoint_every: Annotated[
        float, typer.Option(min=0.0, help="Seconds between checkpoints of the fit.")
    ] = 30.0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a run that is there; start anew.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Not needed: an interrupted fit goes on by itself.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Fit a network to a table and save the posterior.

    Interrupted, the same command goes on where it stopped.
    A run that is finished is not replaced without --overwrite.

    Exit codes: 0 saved, with what is doubtful about it; 2 an error;
    3 saved, but the fit diverged; 130 interrupted.
    """
    from doxa.app import fitting, intake, resuming
    from doxa.app import settings as method_settings

    log_to_terminal(verbose)
    chosen = method_settings.make_method(method, settings or ())  # mistyped: before any reading
    plan = plan_of(net, hidden, members, epochs, steps, lr, batch_size, validation, device, seed)
    table = table_of(
        target, likelihood, index, drop, categorical, numeric, missing, sep, decimal, encoding
    )
    checkpoint = fitting.prepare_out(out_folder, overwrite)
    frame, columns = intake.take_in(data, table)
    say_schema(columns, len(frame))
    if words := fitting.say_held_out(plan, chosen, len(frame)):
        out.print(words, highlight=False)
    x, _ = columns.features(frame)
    origin = fitting.provenance(data, len(frame), plan, table.facts())
    facts = resuming.facts(target, method, settings or (), origin)
    out.print(resuming.said(resuming.begin(checkpoint, facts, overwrite), resume), end="")
    start = time.perf_counter()
    with resuming.kept(checkpoint):
        posterior = fitting.fit_arrays(
            columns, x, columns.targets(frame), method, settings or (), plan, checkpoint,
            checkpoint_every,
        )  # fmt: skip
    posterior.metadata.update(origin)
    posterior.save(str(out_folder))
    fitting.forget_checkpoint(checkpoint)
    out.print(f"{method}: {status_of(posterior)}, {time.perf_counter() - start:.1f} s")
    out.print(
        f"saved to {escape(str(out_folder))}; next: doxa predict {escape(str(out_folder))} NEW.csv",
        soft_wrap=True,
    )
    if posterior.status == "diverged":
        err.print("the fit diverged: do not use its predictions", highlight=False)
        raise typer.Exit(DIVERGED)
