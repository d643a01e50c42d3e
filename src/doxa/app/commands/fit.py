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
    score_table,
    status_of,
    table_of,
)
from doxa.app.options import (
    BatchSize,
    Calibrate,
    CalibrationShare,
    Categorical,
    Conformal,
    ConformalKind,
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
    TaskColumn,
    TestFile,
    TestShare,
    Validation,
    Verbose,
)  # fmt: skip
from doxa.errors import MethodError

DIVERGED = 3  # the exit code of a fit that is saved and cannot be used


def fit(
    context: typer.Context,
    data: DataFile,
    target: Target,
    method: Annotated[str, typer.Option("--method", "-m", help="See doxa methods.")] = (
        "deep-ensemble"
    ),
    out_folder: Annotated[Path, typer.Option("--out", "-o", help="Where to save.")] = Path("run"),
    likelihood: Likelihood = None,
    index: Index = None,
    drop: Drop = None,
    task: TaskColumn = None,
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
    test: TestFile = None,
    split: TestShare = None,
    calibrate: Calibrate = None,
    conformal: Conformal = None,
    conformal_kind: ConformalKind = None,
    calibration_share: CalibrationShare = None,
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
    from doxa import store
    from doxa.app import by_task, fitting, held_out, intake, resuming, saved_runs
    from doxa.app import settings as method_settings
    from doxa.app.calibration import Calibration, calibrated

    log_to_terminal(verbose)
    chosen = method_settings.make_method(method, settings or ())  # mistyped: before any reading
    plan = plan_of(net, hidden, members, epochs, steps, lr, batch_size, validation, device, seed)
    shares = (test, split, calibrate, conformal)
    by_task.check(method, task, target, any(share is not None for share in shares))
    table = table_of(
        target, likelihood, index, by_task.dropped(drop, task), categorical, numeric, missing, sep,
        decimal, encoding,
    )  # fmt: skip
    asked = Calibration(calibrate, conformal, conformal_kind)
    held_out.check_shares(test, split, asked, calibration_share)
    fitting.prepare_out(out_folder, overwrite)
    saved_runs.check_place(out_folder)
    context.with_resource(store.exclusive(out_folder))  # until the command ends
    checkpoint = fitting.prepare_out(out_folder, overwrite)  # a run may have been finished since
    if net is not None and not chosen.needs_network:
        raise MethodError(f"method {method!r} brings functions of its own: leave --net out")
    frame, columns = intake.take_in(data, table)
    asked = asked.of(columns.likelihood)
    labels = None if columns.classes is None else columns.targets(frame)
    share = (held_out.SHARE if calibration_share is None else calibration_share) if asked else 0.0
    parts = held_out.divide(len(frame), split or 0.0, share, seed, labels)
    asked.check_rows(len(parts.calibration), "hold out more with --calibration-share")
    columns = held_out.schema_of(frame, columns, parts, table)
    tested = None if test is None else held_out.read_test(test, data, columns, table.dialect)
    say_schema(columns, len(frame))
    for words in (
        parts.words,
        fitting.say_held_out(plan, chosen, len(parts.train)),
        fitting.say_cost(plan, chosen, columns, len(parts.train)),
    ):
        if words:
            out.print(words, highlight=False, soft_wrap=True)
    x, notes = columns.features(frame)
    y = columns.targets(frame)
    tasks = by_task.labels(frame, task)
    if tasks is not None:
        out.print(f"{len(set(tasks))} tasks, by {escape(repr(task))}", highlight=False)
    for note in notes if not parts.whole else ():
        out.print(escape(note), highlight=False, soft_wrap=True)
    remembered = {"split": split, "calibrate": calibrate,
                  "test": None if test is None else test.name,
                  "conformal": conformal, "conformal_kind": conformal_kind,
                  "calibration_share": calibration_share}  # fmt: skip
    origin = fitting.provenance(data, len(frame), plan, table.facts() | remembered)
    facts = resuming.facts(target, method, settings or (), origin)
    out.print(resuming.said(resuming.begin(checkpoint, facts, overwrite), resume), end="")
    start = time.perf_counter()
    with resuming.kept(checkpoint):
        posterior = fitting.fit_arrays(
            columns, x[parts.train], y[parts.train], method, settings or (), plan, checkpoint,
            checkpoint_every, tasks,
        )  # fmt: skip
    posterior.metadata.update(origin | by_task.remembered(task))
    digest = origin["source"]["sha256"]
    posterior.metadata.update(parts.remembered(digest))
    status = posterior.status
    out.print(f"{method}: {status_of(posterior)}, {time.perf_counter() - start:.1f} s")
    if left := posterior.diagnostics.get("left_out"):
        out.print(f"likelihood: {left['likelihood']}, by {left['rows']:,} rows left out")
    if asked:
        rows = parts.calibration
        posterior, said = calibrated(posterior, x[rows], y[rows], asked, seed)
        for line in said:
            out.print(line, highlight=False, soft_wrap=True)
        saved_runs.record_calibration(posterior, asked, data.name, digest, len(rows), seed)
    if len(parts.test):
        tested = held_out.Tested(x[parts.test], y[parts.test], data.name, digest)
    if tested is not None:
        scores = held_out.score(posterior, columns, tested, y[parts.train])
        posterior.metadata["held_out_scores"] = scores
        out.print(score_table(scores))
    posterior.save(str(out_folder))
    fitting.forget_checkpoint(checkpoint)
    with_context = "" if task is None else " --context KNOWN.csv"
    out.print(
        f"saved to {escape(str(out_folder))}; next: doxa predict {escape(str(out_folder))} "
        f"NEW.csv{with_context}",
        soft_wrap=True,
    )
    if status == "diverged":
        err.print("the fit diverged: do not use its predictions", highlight=False)
        raise typer.Exit(DIVERGED)
