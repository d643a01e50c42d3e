"""`doxa fit`: a table to a saved posterior."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from doxa.app.commands.terminal import log_to_terminal, out, plan_of, say_schema, status_of
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
    Settings,
    Steps,
    Target,
    Validation,
    Verbose,
)  # fmt: skip


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
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint.")] = False,
    verbose: Verbose = False,
) -> None:
    """Fit a network to a table and save the posterior."""
    from doxa.app import fitting, schema, tables
    from doxa.app import settings as method_settings

    log_to_terminal(verbose)
    chosen = method_settings.make_method(method, settings or ())  # mistyped: before any reading
    plan = plan_of(net, hidden, members, epochs, steps, lr, batch_size, validation, device, seed)
    frame = tables.read_table(data, index)
    columns = schema.infer_schema(frame, target, likelihood, drop or (), categorical or (), index)
    say_schema(columns, len(frame))
    if words := fitting.say_held_out(plan, chosen, len(frame)):
        out.print(words, highlight=False)
    checkpoint = fitting.prepare_out(out_folder, resume)
    if resume and not checkpoint.exists():
        out.print("no checkpoint to go on from: starting from the beginning")
    x, _ = columns.features(frame)
    start = time.perf_counter()
    posterior = fitting.fit_arrays(
        columns, x, columns.targets(frame), method, settings or (), plan, checkpoint
    )
    asked = {"likelihood": likelihood, "index": index, "drop": drop or (),
             "categorical": categorical or ()}  # fmt: skip
    posterior.metadata.update(fitting.provenance(data, len(frame), plan, asked))
    posterior.save(str(out_folder))
    fitting.forget_checkpoint(checkpoint)
    out.print(f"{method}: {status_of(posterior)}, {time.perf_counter() - start:.1f} s")
    out.print(
        f"saved to {escape(str(out_folder))}; next: doxa predict {escape(str(out_folder))} NEW.csv",
        soft_wrap=True,
    )
