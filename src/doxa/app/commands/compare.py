"""`doxa compare`: several methods on the same rows, ranked, with a reference posterior.

`--keep` saves one of the methods as a run. Each fit of the comparison has seen only the training
rows of one split, so none of them is kept. The chosen method is fitted once more, with the same
settings and seed, to all rows of the table; rows of `--test` are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from doxa.app.commands.terminal import (
    err,
    exit_by_status,
    log_to_terminal,
    out,
    plan_of,
    say_schema,
    status_of,
    table_of,
)
from doxa.app.options import (
    AllowStatus,
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
    Steps,
    Target,
    Validation,
    Verbose,
    listed,
    print_table,
)
from doxa.errors import MethodError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

    from doxa.app.comparison import Comparison
    from doxa.app.fitting import Plan
    from doxa.tables.schema import Schema


BEST = "best"


class Kept(NamedTuple):
    """The name of a method, or `BEST`, and the folder of its run."""

    method: str
    folder: Path


def check_keep(keep: str | None, methods: Sequence[str], out: Path | None) -> Kept | None:
    """Check `--keep` and `--out` before any work; None if no method is kept."""
    if keep is None:
        return None
    if keep not in (BEST, *methods):
        hint = did_you_mean(keep, (BEST, *methods))
        raise MethodError(f"--keep {keep!r} is not among the compared methods{hint}")
    if out is None:
        raise MethodError("--keep needs --out, the folder to save the run in")
    if out.suffix.lower() in (".csv", ".tsv", ".parquet", ".pq"):
        raise MethodError(
            f"with --keep, --out is the folder of the run, not {out.name}; the table goes to "
            f"--table {out.name}"
        )
    from doxa.app.fitting import check_new

    check_new(out)
    return Kept(keep, out)


def method_to_keep(found: Comparison, asked: str) -> str:
    """The name of the method to keep; an error if its fit failed."""
    row = found.best if asked == BEST else found[asked]
    if row is None:
        raise MethodError("no method could be fitted: there is nothing to keep")
    if row.failed:
        raise MethodError(f"{row.method} failed and cannot be kept: {row.reason}")
    return row.method


def keep_message(found: Comparison, name: str, rows: int) -> str:
    best = found.best
    why = "the best by held-out log likelihood" if best and best.method == name else "as asked"
    return f"keeping {name} ({why}): fitted to all {rows} rows, with the same settings"


def refit(columns: Schema, frame: pd.DataFrame, name: str, plan: Plan, found: Comparison) -> Any:
    """The posterior of all rows, with the scores of the comparison in its metadata."""
    from doxa.app.fitting import fit_arrays

    x, _ = columns.features(frame)
    posterior = fit_arrays(columns, x, columns.targets(frame), name, (), plan)
    row = found[name]
    posterior.metadata["comparison"] = {
        "methods": [each.method for each in found.rows],
        "splits": found.splits,
        "scores": {score: row.mean(score) for score in row.scores},
    }
    return posterior


def compare(
    context: typer.Context,
    data: DataFile,
    target: Target,
    methods: Annotated[str, typer.Option(help="Names of methods, separated by commas.")] = (
        "map,deep-ensemble,mc-dropout,laplace"
    ),
    splits: Annotated[
        int, typer.Option(min=1, help="Number of random splits into training and test rows.")
    ] = 5,
    test: Annotated[
        Path | None, typer.Option(help="A table of held-out rows, instead of random splits.")
    ] = None,
    test_fraction: Annotated[float, typer.Option(help="Share of the rows to hold out.")] = 0.2,
    reference: Annotated[
        str,
        typer.Option(
            help="The reference posterior: hmc (a long HMC run), auto (hmc if it takes at most "
            "three minutes), none."
        ),
    ] = "auto",
    reference_draws: Annotated[
        int | None,
        typer.Option(min=4, help="Draws per chain of the reference, and as many burn-in steps."),
    ] = None,
    reference_leapfrog: Annotated[
        int | None, typer.Option(min=1, help="Leapfrog steps per transition of the reference.")
    ] = None,
    reference_chains: Annotated[
        int | None, typer.Option(min=2, help="Number of chains of the reference.")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="A method to save: its name, or best (the highest held-out log likelihood). It is "
            "fitted to all rows of DATA with the same settings and saved in the folder --out."
        ),
    ] = None,
    place: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="A .csv or .parquet file for the table of scores; with --keep, the folder of the "
            "run.",
        ),
    ] = None,
    table_file: Annotated[
        Path | None, typer.Option("--table", help="A file for the table of scores, with --keep.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="An .html file for a report.")] = None,
    likelihood: Likelihood = None,
    index: Index = None,
    drop: Drop = None,
    categorical: Categorical = None,
    numeric: Numeric = None,
    missing: Missing = "error",
    sep: Sep = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
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
    allow_status: AllowStatus = False,
    verbose: Verbose = False,
) -> None:
    """Fit several methods to the same rows, and compare them on held-out rows.

    The tables show scores, calibration, cost as a multiple of MAP, and the distance to a reference
    posterior from a long HMC run.

    Exit codes, with --keep: those of doxa fit, by the status of the saved run. Otherwise 0,
    whatever the statuses in the table.
    """
    from doxa import store
    from doxa.app import comparison, fitting
    from doxa.app.comparison import page
    from doxa.driver.processes import is_first
    from doxa.driver.validation import evaluate_rows
    from doxa.tables import files, schema

    log_to_terminal(verbose)
    names = listed(methods)
    if not names:
        raise MethodError("--methods is empty; give names separated by commas")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise MethodError(f"--methods names {twice!r} twice")
    for name in names:
        fitting.make_method(name)
    asked = comparison.reference_of(
        reference, draws=reference_draws, leapfrog=reference_leapfrog, chains=reference_chains
    )
    kept = check_keep(keep, names, place)
    first = is_first()  # of several processes, one prints and writes
    if kept is not None and first:
        context.with_resource(store.exclusive(kept.folder))  # until the command ends
        check_keep(keep, names, place)  # a run may have been finished since
    out_file = table_file if kept else table_file or place
    if out_file is not None:
        files.check_writable(out_file)
    if report is not None:
        page.check_place(report)
    plan = plan_of(net, hidden, members, epochs, steps, lr, batch_size, validation, device, seed)
    table = table_of(
        target, likelihood, index, drop, categorical, numeric, missing, sep, decimal, encoding
    )
    frame, columns = schema.read_dataset(data, table)
    held_out = None if test is None else schema.read_labelled(test, columns, table.dialect)[0]
    say_schema(columns, len(frame))
    found = comparison.compare_tables(
        columns, frame, held_out, names, plan, splits=splits, test_fraction=test_fraction,
        reference=asked, say=_say,
    )  # fmt: skip
    for shown in comparison.as_tables(found):
        print_table(out, shown)
    if out_file is not None and first:
        files.write_table(found.frame(), out_file)
        out.print(f"table written to {escape(str(out_file))}", soft_wrap=True)
    if report is not None and first:
        page.write(found, report, title=f"{target} of {data.name}", notes=columns.notes)
        out.print(f"report written to {escape(str(report))}", soft_wrap=True)
    if kept is not None:
        name = method_to_keep(found, kept.method)
        out.print(keep_message(found, name, len(frame)), highlight=False, soft_wrap=True)
        posterior = refit(columns, frame, name, plan, found)
        posterior.metadata.update(fitting.provenance(data, len(frame), plan, table.facts()))
        if held_out is not None and test is not None:
            x, _ = columns.features(held_out)
            rows = f"rows of --test {test.name}"
            evaluate_rows(posterior, x, columns.targets(held_out), rows, columns.targets(frame))
        posterior.save(str(kept.folder), overwrite=True)
        run = escape(str(kept.folder))
        out.print(f"{name}: {status_of(posterior)}")
        out.print(f"saved to {run}; next: doxa predict {run} NEW.csv", soft_wrap=True)
        exit_by_status(posterior, allow_status)


def _say(message: str) -> None:
    err.print(escape(message), highlight=False, soft_wrap=True)
