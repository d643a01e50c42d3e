"""`doxa predict`: predictions of a saved posterior for new rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from doxa.app.commands.terminal import err, log_to_terminal, out, show
from doxa.app.options import (
    DataFile,
    Decimal,
    Encoding,
    PredictMissing,
    Run,
    SavedNet,
    Sep,
    Verbose,
)
from doxa.errors import DataError, StoreError

if TYPE_CHECKING:
    from doxa.tables.reading import Dialect
    from doxa.tables.schema import Schema


def predict(
    run: Run,
    data: DataFile,
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="A .csv or .parquet file for the predictions, or a folder: a file larger than "
            "memory is predicted part by part, and the same command continues.",
        ),
    ] = None,
    level: Annotated[
        float | None,
        typer.Option(
            help="Probability of the interval low to high, or of the set of classes. Default: the "
            "level of a conformal run, else 0.95 for intervals and no sets."
        ),
    ] = None,
    context: Annotated[
        Path | None,
        typer.Option(
            help="For neural processes: a table of the known rows of a task, with the target. If "
            "it has the column of tasks, each task is predicted from its own rows.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            "--id",
            help="The column that names the rows of the predictions. Default: that of the fit.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, if --out is a folder.")] = 1,
    rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The largest number of rows of a part, if --out is a folder. Default: 65536, "
            "fewer for wide tables.",
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace the file of --out, or start anew in a folder that has predictions.",
        ),
    ] = False,
    missing: PredictMissing = None,
    sep: Sep = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    net: SavedNet = None,
    verbose: Verbose = False,
) -> None:
    """Predict new rows: mean, std and interval, or class probabilities and entropy.

    Columns are found by name, in any order, and encoded as in the fit.
    Each prediction has the index of its row, or its line in the file.

    If --out has no ending, it is a folder. It gets a Parquet file for each row group, or for each
    block of rows of a CSV file.
    """
    from doxa.app import fitting, task_tables
    from doxa.tables import files, predictions, schema
    from doxa.tables.reading import Dialect

    log_to_terminal(verbose)
    if level is not None and not 0.0 < level < 1.0:
        raise DataError(f"--level must be between 0 and 1, not {level}")
    dialect = Dialect.asked(sep, decimal, encoding)
    if out_file is not None and (out_file.is_dir() or not out_file.suffix):
        if context is not None:
            raise DataError("--context needs a file for --out, not a folder")
        _into_folder(
            run, data, out_file, level, label, jobs, rows, overwrite, dialect, net, missing
        )
        return
    for option, given in (
        ("--jobs", jobs > 1), ("--rows", rows is not None)
    ):  # fmt: skip
        if given:
            raise DataError(f"{option} is for predictions in a folder: give --out FOLDER")
    if out_file is not None:
        files.check_writable(out_file)
        if out_file.exists() and not overwrite:
            raise StoreError(
                f"{out_file} exists already: --overwrite replaces it, or choose another --out"
            )
    posterior, columns = fitting.load_run(run, net, missing)
    frame, messages = schema.read_more(data, columns, dialect, label)
    known = None
    if context is not None:
        known, more = schema.read_labelled(context, columns, dialect)
        messages += [f"{context.name}: {note}" for note in more]
    task_tables.check_context(posterior, context is not None)
    if known is None:
        table, notes = predictions.predict_frame(posterior, columns, frame, level)
    else:
        table, notes = task_tables.predict_tasks(posterior, columns, frame, known, level)
    _say(predictions.conformal_level(posterior), columns, [*messages, *notes])
    if out_file is None:
        show(table)
        return
    files.write_table(table, out_file)
    out.print(f"{len(table)} predictions written to {escape(str(out_file))}", soft_wrap=True)


def _say(conformal: float | None, columns: Schema, notes: list[str]) -> None:
    if conformal is not None:
        what = "the interval low to high" if columns.classes is None else "the set"
        err.print(
            f"conformal run: {what} contains the target with probability {conformal:g}",
            highlight=False,
        )
    for note in notes:
        err.print(f"note: {escape(note)}", highlight=False)


def _into_folder(
    run: Path, data: Path, folder: Path, level: float | None, label: str | None, jobs: int,
    rows: int | None, overwrite: bool, dialect: Dialect, net: str | None, missing: str | None,
) -> None:  # fmt: skip
    from doxa.app import fitting, row_blocks, task_tables
    from doxa.app import prediction_folder as parts
    from doxa.tables import files, predictions

    files.check_name(folder)
    posterior, columns = fitting.load_run(run, net, missing)
    task_tables.check_context(posterior, False)
    source = row_blocks.opened(data, dialect)
    names = predictions.output_names(posterior, columns, level)
    plan, messages = parts.prepare(
        folder, source, run, columns, names, level, label, rows, overwrite, missing
    )
    left = parts.parts_left(folder, plan)
    where = escape(str(folder))
    if not left:
        count = parts.finish(folder, plan)
        out.print(
            f"{where} already has all {count:,} predictions; --overwrite starts anew",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
        return
    if len(left) < len(plan.parts):
        err.print(f"{len(plan.parts) - len(left)} of {len(plan.parts)} parts are already there")
    notes = parts.predict_folder(folder, source, plan, run, net, posterior, columns, jobs, missing)
    count = parts.finish(folder, plan)
    _say(predictions.conformal_level(posterior), columns, [*messages, *notes])
    out.print(
        f"{count:,} predictions written to {where}, in {len(plan.parts)} parts",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
