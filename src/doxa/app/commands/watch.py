"""`doxa watch`: do new rows still fit the certificate of a saved run?

The state lies in the folder `watch` of the run. A file is counted once, by its checksum.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from doxa.app.commands.terminal import err, log_to_terminal, out
from doxa.app.options import Decimal, Encoding, Run, SavedNet, Sep, Verbose, print_table
from doxa.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

    from doxa.evaluate import Watch
    from doxa.tables.schema import Schema

ALARM = 5  # the exit code if a test has raised an alarm, now or earlier
STATE = "watch"  # the folder of the state, in that of the run


def watch(
    context: typer.Context,
    run: Run,
    data: Annotated[
        Path | None,
        typer.Argument(
            help="A table of new rows, with the target or without it.", show_default=False
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            help="A table with the targets of rows that were counted without one: the column of "
            "--key and the target."
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="The column that names each row, to find its target later."),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(help="The column of rows that belong together; they count as one row."),
    ] = None,
    level: Annotated[
        float | None,
        typer.Option(
            help="The largest probability of a false alarm over all time: of coverage and scores "
            "together, and of the inputs. Set by the first call. Default: 0.05."
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="The folder of the state. Default: the folder watch in RUN."),
    ] = None,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="Read the new rows by windows, and not all at once. Always so for a folder of "
            "Parquet files, and for a file of more than 1 GiB.",
        ),
    ] = False,
    net: SavedNet = None,
    sep: Sep = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    verbose: Verbose = False,
) -> None:
    """Compare new rows with the certificate of a run, as they come.

    Three tests, which may be looked at after every row: is the coverage that of the certificate,
    are there more low scores, and have the inputs shifted? A false alarm has a small probability
    over all time, however many rows come.

    Exit codes: 0 no alarm; 5 an alarm, now or in an earlier call; 2 an error.
    """
    from doxa import store
    from doxa.app import fitting
    from doxa.app.held_out import checksum, checksum_of_files
    from doxa.evaluate import Watch
    from doxa.tables import schema
    from doxa.tables.reading import Dialect

    log_to_terminal(verbose)
    if labels is not None and key is None:
        raise DataError("--labels needs --key, the column that names each row")
    place = run / STATE if state is None else state
    dialect = Dialect.asked(sep, decimal, encoding)
    posterior, columns = fitting.load_run(run, net)
    context.with_resource(store.exclusive(place))  # until the command ends
    found = _state(Watch, posterior, place, level)
    found.names = _names(columns)
    old, changed = len(found.alarms), False
    for path, count in ((data, _rows), (labels, _labels)):
        if path is None:
            continue
        large = stream or schema.is_large(path)
        digest = checksum_of_files(path) if path.is_dir() else checksum(path)
        if digest in found.seen_data:
            earlier = found.seen_data[digest]
            same = "" if earlier == path.name else f", as {earlier}"
            out.print(
                escape(f"{path.name} was counted before{same}: it is not counted again"),
                highlight=False, soft_wrap=True,
            )  # fmt: skip
            continue
        if large and count is _rows:
            message = _blocks(found, columns, path, dialect, digest, key, group)
            out.print(escape(message), highlight=False, soft_wrap=True)
            changed = True
            continue
        frame, notes = schema.read_more(path, columns, dialect)
        for note in notes:
            err.print(f"note: {escape(note)}", highlight=False, soft_wrap=True)
        message = count(found, columns, frame, path.name, digest, key, group)
        out.print(escape(message), highlight=False, soft_wrap=True)
        changed = True
    if changed:
        found.save(place)
    print_table(out, _table(found))
    for alarm in found.alarms:
        what = f", {alarm.what!r}" if alarm.what else ""
        when = f"{alarm.place}, row {alarm.row:,} of the test, counted on {alarm.date}"
        out.print(escape(f"ALARM: {alarm.test}{what}: {when}"), highlight=False, soft_wrap=True)
    if found.alarms:
        new = len(found.alarms) - old
        err.print(
            f"{new} new alarm{'s' * (new != 1)}: exit code {ALARM}", highlight=False, soft_wrap=True
        )
        raise typer.Exit(ALARM)


def _state(kind: type[Watch], posterior: Any, place: Path, level: float | None) -> Watch:
    """The saved state, or a new one."""
    from doxa.store import is_artefact

    if not is_artefact(place):
        return kind(posterior, 0.05 if level is None else level)
    found = kind.load(place, posterior)
    if level is not None and level != found.level:
        raise DataError(
            f"{place} was begun with --level {found.level:g}, which stays; a new watch needs "
            "another --state"
        )
    return found


def _names(columns: Schema) -> list[str]:
    """What each input of the network is called."""
    from doxa.app.report.subject import inputs_of

    names: dict[int, str] = {}
    for each in inputs_of(columns):
        for k, at in enumerate(each.at):
            category = "" if each.categories is None else f" = {each.categories[k]}"
            names[at] = f"{each.name}{category}"
    return [names.get(k, f"input {k}") for k in range(columns.inputs)]


def _named(frame: pd.DataFrame, column: str | None, option: str, file: str) -> list[str] | None:
    """The cells of the column of an option, as text; an error where one is empty."""
    if column is None:
        return None
    from doxa.tables.files import pick
    from doxa.tables.reading import gaps, place_of

    if frame.index.name == column:
        return [str(each) for each in frame.index]
    if column not in frame.columns:
        raise DataError(f"{file} has no column {column!r}, which {option} names")
    values = pick(frame, column)
    if empty := gaps(values):
        raise DataError(f"{file}: column {column!r} is empty at {place_of(frame.index, empty[0])}")
    return [str(each) for each in values]


def _rows(
    found: Watch, columns: Schema, frame: pd.DataFrame, file: str, digest: str, key: str | None,
    group: str | None,
) -> str:  # fmt: skip
    """Count the rows of a table. Returns the message for the user."""
    from doxa.tables.reading import place_of

    names = _named(frame, key, "--key", file)
    groups = _named(frame, group, "--group", file)
    inputs = {column.name for column in columns.columns}
    own = [c for c in (key, group) if c in frame.columns and c not in inputs]
    x, notes = columns.features(frame.drop(columns=own))
    for note in notes:
        err.print(f"note: {escape(note)}", highlight=False, soft_wrap=True)
    import numpy as np

    there = columns.target in frame.columns
    known = frame[columns.target].notna().to_numpy() if there else np.zeros(len(frame), bool)
    y = None
    if known.any():
        part = columns.targets(frame[known])
        y = np.zeros((len(frame), *part.shape[1:]), part.dtype)
        y[known] = part
    places = [f"{place_of(frame.index, k)} of {file}" for k in range(len(frame))]
    found.update(
        x, y, groups=groups, keys=names, labelled=known.tolist(), name=file, places=places,
        digest=digest,
    )  # fmt: skip
    later = len(frame) - int(known.sum())
    message = f"{file}: {len(frame):,} rows, {int(known.sum()):,} with a target"
    if later and key is None:
        message += "; without --key, the targets of the others cannot be added later"
    return message


def _blocks(
    found: Watch, columns: Schema, path: Path, dialect: Any, digest: str, key: str | None,
    group: str | None,
) -> str:  # fmt: skip
    """Count the rows of a large table, a group of rows at a time. Returns the message."""
    from doxa.tables import schema

    if group is not None:
        raise DataError(f"--group needs all rows in memory, and {path} is read by windows")
    frames = schema.open_frames(path, dialect, width=1)
    filled = [number for number, rows in enumerate(frames.sizes) if rows]
    first = known = 0
    for number in filled:
        frame = frames.frame(number)
        frame.columns = [str(name).strip() for name in frame.columns]
        frame.index = frame.index + first
        last = number == filled[-1]
        _rows(found, columns, frame, path.name, digest if last else "", key, None)
        first += len(frame)
        if columns.target in frame.columns:
            known += int(frame[columns.target].notna().sum())
    return f"{path.name}: {first:,} rows, {known:,} with a target"


def _labels(
    found: Watch, columns: Schema, frame: pd.DataFrame, file: str, digest: str, key: str | None,
    group: str | None,
) -> str:  # fmt: skip
    """Count the targets of earlier rows. Returns the message for the user."""
    keys = _named(frame, key, "--key", file) or []
    count = found.label(keys, columns.targets(frame), name=file, digest=digest)
    message = f"{file}: {count:,} of {len(frame):,} targets belong to rows that wait for one"
    return f"{message}; {found.pending:,} still wait"


def _table(found: Watch) -> Table:
    about = found.certificate
    title = f"compared with {about.rows:,} {about.evaluated_by}" if about.rows else ""
    what = {
        "coverage": f"misses of {about.level:.0%}", "scores": "low scores",
        "inputs": "shift",
    }  # fmt: skip
    table = Table("test", "what", "rows", "share", "at most", "e-value", "alarm at", title=title)
    for name, test in found.tests.items():
        table.add_row(
            name, what[name], f"{test.rows:,}",
            "" if test.mean is None else f"{test.mean:.1%}",
            "" if test.bound is None else f"{test.bound:.1%}",
            f"{test.e_value:.3g}", f"{1 / test.level:.3g}",
        )  # fmt: skip
    return table
