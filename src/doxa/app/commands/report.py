"""`doxa report`: one HTML file about a saved posterior."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from doxa.app.commands.terminal import log_to_terminal, out
from doxa.app.options import Decimal, Encoding, Net, Sep, Verbose


def report(
    run: Annotated[Path, typer.Argument(help="The folder doxa fit wrote.", show_default=False)],
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
    sep: Sep = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    net: Net = None,
    verbose: Verbose = False,
) -> None:
    """Write a report: scores, calibration, uncertainty, diagnostics, recipe; opens offline."""
    from doxa.app import fitting, intake, report
    from doxa.app.reading import Dialect
    from doxa.app.report.build import check_place
    from doxa.app.report.subject import inputs_of, rows_of_frame

    log_to_terminal(verbose)
    check_place(out_file)
    dialect = Dialect.asked(sep, decimal, encoding)
    posterior, columns = fitting.load_run(run, net)

    def rows(path: Path | None, held_out: bool) -> Any:
        if path is None:
            return None
        frame, said = intake.take_in_known(path, columns, dialect)
        return rows_of_frame(columns, frame, path.name, held_out, said)

    held_out, fitted = rows(test, True), rows(train, False)
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
