"""`doxa calibrate`: recalibrate a saved posterior on held-out rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from doxa.app.commands.terminal import err, exit_by_status, log_to_terminal, out, status_of
from doxa.app.options import (
    AllowStatus,
    Conformal,
    ConformalKind,
    DataFile,
    Decimal,
    Encoding,
    Run,
    SavedNet,
    Seed,
    Sep,
    Verbose,
)


def calibrate(
    context: typer.Context,
    run: Run,
    data: DataFile,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-m",
            help="The recalibration: auto (temperature for classes, quantile for numbers), "
            "temperature, vector, dirichlet, isotonic, histogram (classes), quantile, variance "
            "(numbers). Default: auto; with --conformal, none.",
        ),
    ] = None,
    conformal: Conformal = None,
    conformal_kind: ConformalKind = None,
    out_folder: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The folder to save in. Default: RUN-calibrated."),
    ] = None,
    net: SavedNet = None,
    sep: Sep = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    seed: Seed = 0,
    allow_status: AllowStatus = False,
    verbose: Verbose = False,
) -> None:
    """Recalibrate a saved run on rows that the fit has not seen, and save it as another run.

    An over- or underconfident status is evaluated again, with rows that are held out from the
    correction. Exit codes are those of doxa fit, by the status after it.
    """
    from doxa import store
    from doxa.app import calibration, fitting
    from doxa.tables import schema
    from doxa.tables.reading import Dialect

    log_to_terminal(verbose)
    kind = "auto" if method is None and conformal is None else method
    asked = calibration.Calibration(kind, conformal, conformal_kind)
    target = run.with_name(run.name + "-calibrated") if out_folder is None else out_folder
    fitting.check_new(target)
    context.with_resource(store.exclusive(target))  # until the command ends
    fitting.check_new(target)  # it may have been finished since
    dialect = Dialect.asked(sep, decimal, encoding)
    posterior, columns = fitting.load_run(run, net)
    asked = asked.of(columns.likelihood)
    asked.check_time(columns.time)
    frame, read = schema.read_labelled(data, columns, dialect)
    digest = fitting.check_unseen(posterior, run, data)
    asked.check_rows(len(frame), "give a file with more rows")
    x, notes = columns.features(frame)
    for note in (*read, *notes):
        err.print(f"note: {escape(note)}", highlight=False, soft_wrap=True)
    groups = None if asked.level is None else schema.Together.of(frame, columns).groups
    y = columns.targets(frame)
    posterior, messages = calibration.calibrated(posterior, x, y, asked, seed, groups)
    for line in messages:
        out.print(line, highlight=False, soft_wrap=True)
    fitting.record_calibration(posterior, asked, data.name, digest, len(frame), seed)
    out.print(f"status: {status_of(posterior)}", highlight=False, soft_wrap=True)
    posterior.save(str(target))
    name = escape(str(target))
    out.print(f"saved to {name}; next: doxa predict {name} NEW.csv", soft_wrap=True)
    exit_by_status(posterior, allow_status)
