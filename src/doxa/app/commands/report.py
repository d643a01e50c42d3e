"""`doxa report`: one HTML file about a saved posterior."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from doxa.app.commands.terminal import log_to_terminal, out
from doxa.app.options import Net, Run, Verbose


def report(
    run: Run,
    test: Annotated[Path | None, typer.Option(help="Held-out rows to score it on.")] = None,
    train: Annotated[
        Path | None, typer.Option(help="The rows it was fitted to, for the diagnostics.")
    ] = None,
    out_file: Annotated[Path, typer.Option("--out", "-o", help="An .html file to write.")] = Path(
        "report.html"
    ),
    title: Annotated[str | None, typer.Option(help="What the report is called.")] = None,
    diagnose: Annotated[
        bool, typer.Option("--diagnose/--no-diagnose", help="Ask the doctor.")
    ] = True,
    net: Net = None,
    verbose: Verbose = False,
) -> None:
    """Write a report: scores, calibration, uncertainty, diagnostics, recipe; opens offline."""
    from doxa.app import fitting, report, tables
    from doxa.app.report.build import check_place
    from doxa.app.report.subject import inputs_of, rows_of_frame

    log_to_terminal(verbose)
    check_place(out_file)
    posterior, columns = fitting.load_run(run, net)
    held_out, fitted = (
        None
        if path is None
        else rows_of_frame(
            columns, tables.read_table(path, columns.index, index_needed=False), path.name, new
        )
        for path, new in ((test, True), (train, False))
    )
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
    )
    report.save(subject, out_file, diagnose)
    size = out_file.stat().st_size / 1024
    out.print(f"report written to {escape(str(out_file))} ({size:.0f} kB)", soft_wrap=True)
