"""`doxa predict`: predictions of a saved posterior for new rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from doxa.app.commands.terminal import err, log_to_terminal, out, show
from doxa.app.options import DataFile, Decimal, Encoding, Run, SavedNet, Sep, Verbose
from doxa.errors import DataError


def predict(
    run: Run,
    data: DataFile,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="A .csv or .parquet file for the predictions."),
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
    sep: Sep = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    net: SavedNet = None,
    verbose: Verbose = False,
) -> None:
    """Predict new rows: mean, std and interval, or class probabilities and entropy.

    Columns are found by name, in any order, and encoded as in the fit.
    Each prediction has the index of its row, or its line in the file.
    """
    from doxa.app import calibration, fitting, predictions, schema, tables
    from doxa.app.reading import Dialect

    log_to_terminal(verbose)
    if level is not None and not 0.0 < level < 1.0:
        raise DataError(f"--level must be between 0 and 1, not {level}")
    if out_file is not None:
        tables.check_writable(out_file)
    dialect = Dialect.asked(sep, decimal, encoding)
    posterior, columns = fitting.load_run(run, net)
    frame, messages = schema.read_more(data, columns, dialect)
    known = None
    if context is not None:
        known, more = schema.read_labelled(context, columns, dialect)
        messages += [f"{context.name}: {note}" for note in more]
    predictions.check_context(posterior, context is not None)
    if known is None:
        table, notes = predictions.predict_table(posterior, columns, frame, level)
    else:
        table, notes = predictions.predict_tasks(posterior, columns, frame, known, level)
    own = calibration.conformal_level(posterior)
    if own is not None:
        what = "the interval low to high" if columns.classes is None else "the set"
        err.print(
            f"conformal run: {what} contains the target with probability {own:g}", highlight=False
        )
    for note in (*messages, *notes):
        err.print(f"note: {escape(note)}", highlight=False)
    if out_file is None:
        show(table)
        return
    tables.write_table(table, out_file)
    out.print(f"{len(table)} predictions written to {escape(str(out_file))}", soft_wrap=True)
