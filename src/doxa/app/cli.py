"""The `doxa` command: fit, predict, compare, methods, demo.

An error doxa raises on purpose is one line on standard error and exit code 2; anything else is a
fault of doxa's own and keeps its traceback.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

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
    Verbose,
)
from doxa.errors import DataError, DoxaError, MethodError

if TYPE_CHECKING:
    from doxa.app.schema import Schema

out = Console()
err = Console(stderr=True)


class _OneLineErrors(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DoxaError as error:
            message = " ".join(str(error).split())
            err.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            resumable = ctx.invoked_subcommand == "fit"
            err.print("interrupted" + "; go on with the same command and --resume" * resumable)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Bayesian deep learning on tables: fit, predict with uncertainty, compare methods.",
)


@app.command()
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
    device: Device = None,
    seed: Seed = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint.")] = False,
    verbose: Verbose = False,
) -> None:
    """Fit a network to a table and save the posterior."""
    from doxa.app import fitting, schema, tables
    from doxa.app import settings as method_settings

    _log_to_terminal(verbose)
    method_settings.make_method(method, settings or ())  # a mistyped name fails before any reading
    plan = _plan(net, hidden, members, epochs, steps, lr, batch_size, device, seed)
    frame = tables.read_table(data, index)
    columns = schema.infer_schema(frame, target, likelihood, drop or (), categorical or (), index)
    _say_schema(columns, len(frame))
    checkpoint = fitting.prepare_out(out_folder, resume)
    if resume and not checkpoint.exists():
        out.print("no checkpoint to go on from: starting from the beginning")
    x, _ = columns.features(frame)
    start = time.perf_counter()
    posterior = fitting.fit_arrays(
        columns, x, columns.targets(frame), method, settings or (), plan, checkpoint
    )
    posterior.save(str(out_folder))
    fitting.forget_checkpoint(checkpoint)
    out.print(f"{method}: {_status(posterior)}, {time.perf_counter() - start:.1f} s")
    out.print(
        f"saved to {escape(str(out_folder))}; next: doxa predict {escape(str(out_folder))} NEW.csv",
        soft_wrap=True,
    )


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="The folder doxa fit wrote.", show_default=False)],
    data: DataFile,
    out_file: Annotated[
        Path | None, typer.Option("--out", "-o", help="A .csv or .parquet file to write.")
    ] = None,
    level: Annotated[float, typer.Option(help="Probability inside low..high.")] = 0.95,
    net: Net = None,
    verbose: Verbose = False,
) -> None:
    """Predict new rows: mean, std and interval, or class probabilities, and how sure they are."""
    from doxa.app import fitting, predictions, tables

    _log_to_terminal(verbose)
    if not 0.0 < level < 1.0:
        raise DataError(f"--level must be between 0 and 1, not {level}")
    if out_file is not None:
        tables.check_writable(out_file)
    posterior, columns = fitting.load_run(run, net)
    frame = tables.read_table(data, columns.index, index_needed=False)
    table, notes = predictions.predict_table(posterior, columns, frame, level)
    for note in notes:
        err.print(f"note: {escape(note)}", highlight=False)
    if out_file is None:
        _show(table)
        return
    tables.write_table(table, out_file)
    out.print(f"{len(table)} predictions written to {escape(str(out_file))}", soft_wrap=True)


@app.command()
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

    _log_to_terminal(verbose)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    if not names:
        raise MethodError("--methods is empty; give names separated by commas")
    for name in names:
        method_settings.make_method(name)
    if out_file is not None:
        tables.check_writable(out_file)
    plan = _plan(net, hidden, members, epochs, steps, lr, batch_size, device, seed)
    frame = tables.read_table(data, index)
    columns = schema.infer_schema(frame, target, likelihood, drop or (), categorical or (), index)
    held_out = None if test is None else tables.read_table(test, index)
    _say_schema(columns, len(frame))
    rows = comparison.compare(columns, frame, held_out, test_fraction, names, plan)
    out.print(comparison.as_table(rows))
    if out_file is not None:
        tables.write_table(tables.import_pandas().DataFrame(rows).set_index("method"), out_file)
        out.print(f"written to {escape(str(out_file))}", soft_wrap=True)


@app.command(name="methods")
def list_methods(
    name: Annotated[str | None, typer.Argument(help="One method, with its settings.")] = None,
) -> None:
    """The table of methods, or one method and its settings."""
    from doxa.app import settings

    if name is None:
        settings.show_methods(out)
    else:
        settings.show_method(name, out)


@app.command()
def demo(
    out_folder: Annotated[Path, typer.Option("--out", "-o", help="Where figures go.")] = Path(
        "demo"
    ),
    seed: Seed = 0,
    verbose: Verbose = False,
) -> None:
    """Every method on toy data: a table of scores and two figures."""
    from doxa.app import demo as demonstration

    _log_to_terminal(verbose)
    demonstration.run(out_folder, seed, out)


def main() -> None:
    app()


def _plan(
    net: str | None,
    hidden: str,
    members: int | None,
    epochs: int | None,
    steps: int | None,
    lr: float | None,
    batch_size: int | None,
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
    return Plan(net, widths, members, epochs, steps, lr, batch_size, device, seed)


def _say_schema(columns: Schema, rows: int) -> None:
    out.print(f"{rows} rows, {len(columns.columns)} input columns ({columns.inputs} numbers a row)")
    for note in columns.notes:
        out.print(escape(note), highlight=False, soft_wrap=True)


def _status(posterior: Any) -> str:
    status = posterior.status
    return escape(f"{status} ({status.reason})" if status.reason else str(status))


def _show(table: Any, most: int = 20) -> None:
    """The first rows on the terminal."""
    shown = Table(str(table.index.name or ""), *(escape(str(c)) for c in table.columns))
    for label, row in table.head(most).iterrows():
        cells = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in row)
        shown.add_row(escape(str(label)), *map(escape, cells))
    out.print(shown)
    if len(table) > most:
        out.print(f"{len(table) - most} more rows; write them all with --out predictions.csv")


def _log_to_terminal(verbose: bool) -> None:
    log = logging.getLogger("doxa")
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    if not any(isinstance(handler, RichHandler) for handler in log.handlers):
        log.addHandler(RichHandler(console=err, show_time=False, show_path=False))
