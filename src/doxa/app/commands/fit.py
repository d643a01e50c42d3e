"""`doxa fit`: fit a method to a table and save the posterior.

The options of a fit are written beside its checkpoints before the fit begins (`asked.json`). If the
fit is interrupted, the same command finds this file and continues from the last checkpoint; the
result is bit for bit that of an uninterrupted fit. A command with other options is refused, and the
error names the differences. `--overwrite` discards the interrupted fit and starts again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.markup import escape

from doxa.app.commands.terminal import (
    exit_by_status,
    log_to_terminal,
    out,
    plan_of,
    say_schema,
    score_table,
    status_of,
    table_of,
)
from doxa.app.options import (
    AllowStatus,
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
    Group,
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
    Time,
    TimeInput,
    Validation,
    Verbose,
)
from doxa.errors import MethodError, StoreError

_STEP = re.compile(r"\d+-step-\d+")
_OPTIONS = {"hidden": "--hidden", "settings": "--set"}


def fit_facts(
    target: str, method: str, settings: Sequence[str], origin: Mapping[str, Any]
) -> dict[str, Any]:
    """All that determines a fit: the record of `fitting.provenance` and the rest of the command."""
    source = {"sha256": origin["source"]["sha256"]}
    return {
        "source": source, "versions": origin["versions"], "target": target, "method": method,
        "settings": list(settings), **origin["asked"],
    }  # fmt: skip


def resume_message(found: int | None, asked: bool) -> str:
    """The message about the fit that `claim_checkpoint` found; `asked`: the user gave --resume."""
    if found:
        return f"continuing the interrupted fit from step {found}\n"
    if found == 0:
        return "the interrupted fit had no checkpoint yet: starting from the beginning\n"
    return "--resume: nothing to resume, starting from the beginning\n" if asked else ""


def claim_checkpoint(
    checkpoint: Path, asked: Mapping[str, Any], overwrite: bool = False
) -> int | None:
    """Claim the folder of checkpoints for a fit with these options.

    Returns the step of the last checkpoint of an interrupted fit with the same options, 0 if that
    fit was interrupted before its first checkpoint, and None if there is no such fit. With
    `overwrite`, an interrupted fit that was started without `--overwrite` is removed.
    """
    from doxa.app.fitting import ASKED, forget_checkpoint
    from doxa.store import write_text

    now = json.loads(json.dumps(asked))
    before, begun_anew = _read(checkpoint / ASKED)
    if before == now and (begun_anew or not overwrite):
        return reached(checkpoint)
    if overwrite:
        forget_checkpoint(checkpoint)
    elif before is not None and reached(checkpoint):
        raise StoreError(
            f"{checkpoint} holds an interrupted fit with other options: "
            f"{'; '.join(_differences(before, now))}. Repeat that command to continue it, use "
            "--overwrite to start again, or choose another --out"
        )
    found = reached(checkpoint) or None
    write_text(checkpoint / ASKED, json.dumps({"asked": now, "overwrite": overwrite}, indent=1))
    return found


def reached(checkpoint: Path) -> int:
    """The step of the newest checkpoint; 0 where there is none. Parts of the rows and other
    settings have folders of their own in this one."""
    found = [path for path in checkpoint.rglob("*-step-*") if _STEP.fullmatch(path.name)]
    newest = max(found, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)
    return 0 if newest is None else int(newest.name.rpartition("-")[2])


@contextmanager
def remove_if_unstarted(checkpoint: Path) -> Iterator[None]:
    """Remove the folder of checkpoints if the fit fails before its first checkpoint."""
    from doxa.app.fitting import forget_checkpoint

    try:
        yield
    except BaseException:
        if not reached(checkpoint) and not any(checkpoint.glob("**/blocks/*/result")):
            forget_checkpoint(checkpoint)
        raise


def _read(path: Path) -> tuple[dict[str, Any] | None, bool]:
    """The recorded options of a fit, None if there is no record; and if it had `--overwrite`."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(saved["asked"], dict):
            return None, False
        return saved["asked"], saved["overwrite"] is True
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None, False  # `doxa.fit` recognises a checkpoint of another fit by its fingerprint


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """The options that differ, one message for each."""
    for name in {**before, **now}:
        then: Any = before.get(name)
        today: Any = now.get(name)
        if then == today:
            continue
        if name == "source":
            yield "the data file had other contents"
        elif name == "versions":
            yield from (f"{k} {v}, now {today.get(k)}" for k, v in then.items() if today[k] != v)
        else:
            option = _OPTIONS.get(name, "--" + name.replace("_", "-"))
            yield f"{option} {_shown(then)}, now {_shown(today)}"


def _shown(value: Any) -> str:
    if value in (None, [], ()):
        return "not given"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def fit(
    context: typer.Context,
    data: DataFile,
    target: Target,
    method: Annotated[
        str, typer.Option("--method", "-m", help="The name of a method; doxa methods lists them.")
    ] = ("deep-ensemble"),
    out_folder: Annotated[Path, typer.Option("--out", "-o", help="The folder to save in.")] = Path(
        "run"
    ),
    likelihood: Likelihood = None,
    index: Index = None,
    drop: Drop = None,
    task: TaskColumn = None,
    group: Group = None,
    time: Time = None,
    time_input: TimeInput = False,
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
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="Read the rows by windows, and not all at once. Always so for a folder of Parquet "
            "files, and for a file of more than 1 GiB.",
        ),
    ] = False,
    checkpoint_every: Annotated[
        float, typer.Option(min=0.0, help="Seconds between checkpoints.")
    ] = 30.0,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace a finished run in --out, and discard an interrupted fit.",
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Not needed, and changes nothing: the same command always continues an "
            "interrupted fit. With --resume, a message is printed if there is nothing to resume.",
        ),
    ] = False,
    plan_only: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Print the memory and the time that the fit would take, and what would make it "
            "smaller, and stop. Nothing is fitted or written.",
        ),
    ] = False,
    allow_status: AllowStatus = False,
    verbose: Verbose = False,
) -> None:
    """Fit a network to a table and save the posterior.

    If the fit is interrupted, run the same command again: it continues from the last checkpoint.
    A finished run is replaced only with --overwrite.

    Exit codes: 0 saved, and the status is ok; 2 an error; 3 saved, but the fit diverged;
    4 saved, but the status is not ok (--allow-status: 0); 130 interrupted.
    """
    from doxa import store, tabular
    from doxa.app import fitting, held_out, task_tables
    from doxa.app.calibration import Calibration, calibrated
    from doxa.describe import calibrated_likelihood
    from doxa.driver.processes import is_first
    from doxa.driver.validation import evaluate_rows
    from doxa.tables import schema

    log_to_terminal(verbose)
    chosen = fitting.make_method(method, settings or ())  # mistyped: before any reading
    plan = plan_of(net, hidden, members, epochs, steps, lr, batch_size, validation, device, seed)
    shares = (test, split, calibrate, conformal)
    task_tables.check_task_column(method, task, target, any(share is not None for share in shares))
    dropped = task_tables.dropped_tasks(drop, task)
    table = table_of(
        target, likelihood, index, dropped, categorical, numeric, missing, sep, decimal, encoding,
        group, time, time_input,
    )  # fmt: skip
    if task is not None and not (group is None and time is None):
        raise MethodError("--group and --time do not apply to methods that learn from tasks")
    asked = Calibration(calibrate, conformal, conformal_kind)
    asked.check_time(time)
    held_out.check_shares(test, split, asked, calibration_share)
    first = is_first()  # of several processes, one prints and writes
    checkpoint = fitting.checkpoint_of(out_folder)
    if first and not plan_only:
        fitting.prepare_out(out_folder, overwrite)
        fitting.check_place(out_folder)
        context.with_resource(store.exclusive(out_folder))  # until the command ends
        checkpoint = fitting.prepare_out(out_folder, overwrite)  # it may have been finished since
    if net is not None and not chosen.needs_network:
        raise MethodError(f"method {method!r} needs no network: remove --net")
    if stream or schema.is_large(data):
        for option, value in (
            ("--task", task), ("--group", group), ("--time", time), ("--split", split),
            ("--calibrate", calibrate), ("--conformal", conformal), ("--index", index),
        ):  # fmt: skip
            if value is not None:
                raise MethodError(
                    f"{option} needs all rows in memory, and {data} is read by windows: fit a "
                    "sample of the rows, or use --test with a second table"
                )
        if plan_only:
            raise MethodError(f"--plan needs the rows in memory, and {data} is read by windows")
        _fit_stream(
            data, table, method, chosen, settings or (), plan, test, checkpoint, checkpoint_every,
            overwrite, resume, out_folder, allow_status,
        )  # fmt: skip
        return
    frame, columns = schema.read_dataset(data, table)
    asked = asked.of(columns.likelihood)
    labels = None if columns.classes is None else columns.targets(frame)
    share = (held_out.SHARE if calibration_share is None else calibration_share) if asked else 0.0
    together = schema.Together.of(frame, columns)
    parts = held_out.divide(len(frame), split or 0.0, share, seed, labels, together)
    asked.check_rows(len(parts.calibration), "hold out more with --calibration-share")
    columns = held_out.schema_of(frame, columns, parts, table)
    tested = None if test is None else held_out.read_test(test, data, columns, table.dialect)
    say_schema(columns, len(frame))
    size = fitting.network_size(plan, chosen, columns)
    for message in (
        together.words(columns),
        parts.words,
        fitting.say_held_out(plan, chosen, len(parts.train), size, together),
        fitting.say_cost(plan, chosen, len(parts.train), size),
    ):
        if message:
            out.print(message, highlight=False, soft_wrap=True)
    x, notes = columns.features(frame)
    y = columns.targets(frame)
    tasks = task_tables.task_labels(frame, task)
    if tasks is not None:
        out.print(f"{len(set(tasks))} tasks, by {escape(repr(task))}", highlight=False)
    for note in notes if not parts.whole else ():
        out.print(escape(note), highlight=False, soft_wrap=True)
    if plan_only:
        rows = parts.train
        found = fitting.plan_arrays(
            columns, x[rows], y[rows], method, settings or (), plan, tasks, together.some(rows)
        )
        out.print(escape(str(found)), highlight=False, soft_wrap=True)
        return
    leaks: list[dict[str, Any]] = []
    if tasks is None:
        rows = parts.train
        leaks = tabular.leaking_columns(frame.iloc[rows], columns, x[rows], y[rows], seed)
    for leak in leaks:
        message = f"[bold yellow]warning:[/] {escape(tabular.leak_words(leak))}"
        out.print(message, highlight=False, soft_wrap=True)
    remembered = {"split": split, "calibrate": calibrate,
                  "test": None if test is None else test.name,
                  "conformal": conformal, "conformal_kind": conformal_kind,
                  "calibration_share": calibration_share}  # fmt: skip
    origin = fitting.provenance(data, len(frame), plan, table.facts() | remembered)
    facts = fit_facts(target, method, settings or (), origin)
    if first:
        out.print(resume_message(claim_checkpoint(checkpoint, facts, overwrite), resume), end="")
    start = perf_counter()
    with remove_if_unstarted(checkpoint) if first else nullcontext():
        posterior = fitting.fit_arrays(
            columns, x[parts.train], y[parts.train], method, settings or (), plan, checkpoint,
            checkpoint_every, tasks, together.some(parts.train),
        )  # fmt: skip
    posterior.metadata.update(origin | task_tables.remembered_tasks(task))
    digest = origin["source"]["sha256"]
    posterior.metadata.update(parts.remembered(digest))
    if leaks:
        posterior.metadata["leakage"] = leaks
    seconds = perf_counter() - start
    if stages := fitting.stages_message(posterior):
        out.print(stages, highlight=False, soft_wrap=True)
    if held := fitting.held_out_message(posterior):
        out.print(held, highlight=False, soft_wrap=True)
    if left := posterior.diagnostics.get("held_out_calibration"):
        chosen = calibrated_likelihood(left, columns.input_names)
        out.print(
            f"likelihood: {chosen}, chosen by {left['rows']:,} held-out rows",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    if asked:
        rows = parts.calibration
        groups = together.some(rows).groups
        posterior, messages = calibrated(posterior, x[rows], y[rows], asked, seed, groups)
        for line in messages:
            out.print(line, highlight=False, soft_wrap=True)
        fitting.record_calibration(posterior, asked, data.name, digest, len(rows), seed)
    if len(parts.test):
        groups = together.some(parts.test).groups
        tested = held_out.Tested(x[parts.test], y[parts.test], data.name, digest, groups)
    if tested is not None:
        scores = held_out.score(posterior, columns, tested, y[parts.train])
        posterior.metadata["held_out_scores"] = scores
        out.print(score_table(scores))
        name = f"rows of --test {tested.file}" if split is None else "rows of --split"
        evaluate_rows(posterior, tested.x, tested.y, name, y[parts.train], groups=tested.groups)
    out.print(f"{method}: {status_of(posterior)}, {seconds:.1f} s", highlight=False, soft_wrap=True)
    posterior.save(str(out_folder), overwrite=True)
    if first:
        fitting.forget_checkpoint(checkpoint)
    with_context = "" if task is None else " --context KNOWN.csv"
    out.print(
        f"saved to {escape(str(out_folder))}; next: doxa predict {escape(str(out_folder))} "
        f"NEW.csv{with_context}",
        soft_wrap=True,
    )
    exit_by_status(posterior, allow_status)


def _fit_stream(
    data: Path, table: Any, method: str, chosen: Any, settings: Sequence[str], plan: Any,
    test: Path | None, checkpoint: Path, checkpoint_every: float, overwrite: bool, resume: bool,
    out_folder: Path, allow_status: bool,
) -> None:  # fmt: skip
    """Fit to a table that is read by windows."""
    from doxa.app import fitting, held_out
    from doxa.driver.validation import evaluate_rows
    from doxa.tables import schema

    if chosen.streams is None:
        raise MethodError(
            f"method {method!r} needs all rows in memory, and {data} is read by windows: fit a "
            "sample of the rows, or use another method (doxa methods NAME says how it reads)"
        )
    rows, columns = schema.read_stream(data, table)
    tested = None if test is None else held_out.read_test(test, data, columns, table.dialect)
    say_schema(columns, len(rows))
    out.print(
        f"{len(rows.windows):,} windows of rows are read in turn", highlight=False, soft_wrap=True
    )
    size = fitting.network_size(plan, chosen, columns)
    if message := fitting.say_cost(plan, chosen, len(rows), size):
        out.print(message, highlight=False, soft_wrap=True)
    remembered = {"test": None if test is None else test.name, "stream": True}
    origin = fitting.provenance(data, len(rows), plan, table.facts() | remembered)
    facts = fit_facts(table.target, method, settings, origin)
    out.print(resume_message(claim_checkpoint(checkpoint, facts, overwrite), resume), end="")
    start = perf_counter()
    with remove_if_unstarted(checkpoint):
        posterior = fitting.fit_stream(
            columns, rows, method, settings, plan, checkpoint, checkpoint_every
        )
    posterior.metadata.update(origin)
    seconds = perf_counter() - start
    for message in (fitting.stages_message(posterior), fitting.held_out_message(posterior)):
        if message:
            out.print(message, highlight=False, soft_wrap=True)
    if tested is not None:
        found = rows.surveyed
        assert found is not None
        seen = found.y.numpy()
        scores = held_out.score(posterior, columns, tested, seen)
        posterior.metadata["held_out_scores"] = scores
        out.print(score_table(scores))
        evaluate_rows(posterior, tested.x, tested.y, f"rows of --test {tested.file}", seen)
    out.print(f"{method}: {status_of(posterior)}, {seconds:.1f} s", highlight=False, soft_wrap=True)
    posterior.save(str(out_folder), overwrite=True)
    fitting.forget_checkpoint(checkpoint)
    out.print(
        f"saved to {escape(str(out_folder))}; next: doxa predict {escape(str(out_folder))} NEW.csv",
        soft_wrap=True,
    )
    exit_by_status(posterior, allow_status)
