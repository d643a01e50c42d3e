"""`doxa report`: one HTML file about a saved posterior."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from doxa.app.commands.terminal import log_to_terminal, out
from doxa.app.options import Decimal, Encoding, Run, SavedNet, Sep, Verbose


def report(
    run: Run,
    test: Annotated[
        Path | None, typer.Option(help="A table of new rows with the target, to score the run on.")
    ] = None,
    train: Annotated[
        Path | None,
        typer.Option(
            help="The table that was fitted, for the diagnostics. Rows of it that the fit held out "
            "are scored."
        ),
    ] = None,
    out_file: Annotated[Path, typer.Option("--out", "-o", help="An .html file to write.")] = Path(
        "report.html"
    ),
    title: Annotated[str | None, typer.Option(help="The title of the report.")] = None,
    diagnose: Annotated[
        bool, typer.Option("--diagnose/--no-diagnose", help="Run the diagnostics.")
    ] = True,
    sep: Sep = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    net: SavedNet = None,
    verbose: Verbose = False,
) -> None:
    """Write a report on a saved run: one HTML file that opens offline.

    It shows the status, scores, calibration, uncertainty, diagnostics, and how to repeat the fit.
    """
    from doxa.app import fitting, report
    from doxa.app.report.report import check_place
    from doxa.app.report.subject import inputs_of, rows_of_files
    from doxa.tables.reading import Dialect

    log_to_terminal(verbose)
    check_place(out_file)
    dialect = Dialect.asked(sep, decimal, encoding)
    posterior, columns = fitting.load_run(run, net)
    held_out, fitted, remarks = rows_of_files(posterior.metadata, columns, test, train, dialect)
    subject = report.Subject(
        posterior,
        columns.target,
        None if columns.classes is None else tuple(map(str, columns.classes)),
        inputs_of(columns),
        held_out,
        fitted,
        columns,
        title,
        run.name or None,
        remarks=remarks,
    )
    status = report.save(subject, out_file, diagnose)
    for remark in subject.remarks:
        out.print(escape(remark), soft_wrap=True, highlight=False)
    out.print(escape(status.diagnosis.summary), soft_wrap=True, highlight=False)
    size = out_file.stat().st_size / 1024
    out.print(f"report written to {escape(str(out_file))} ({size:.0f} kB)", soft_wrap=True)
