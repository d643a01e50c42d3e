"""Predictions of a large file in a folder, part by part: `doxa predict RUN BIG --out FOLDER`.

    folder/_predictions.json            the plan: the file, the run, the parts
    folder/part-00000012.parquet        the predictions of one part; complete or absent

A part is a row group of a Parquet file, or a block of rows of a CSV file; a row group of more than
`rows` rows is cut. So memory is bounded by a part, whatever the size of the file. The order of the
parts is that of their names. `pandas.read_parquet(folder)` reads all of them, as files that begin
with `_` or `.` are no part of a data set.

Any number of processes, of one call or of several, work on one folder. A process takes a part by a
lock that the operating system releases if the process ends in any way, predicts it, writes it under
a temporary name and renames it. Each part has the id of the plan, and its number of rows is checked
at the end. The next call continues where the last one ended.

The plan has the size, the time of the last change and a digest of the input, and the checksum of
the run. If one of them is another, a later call is refused. The size and the time are compared
again before each part is renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doxa.app.row_blocks import Input, ParquetInput, Part, changed, import_pyarrow, opened, stamp_of
from doxa.driver.bar import shown
from doxa.errors import (
    CorruptedArtefact,
    DataError,
    DoxaError,
    FolderInUse,
    StoreError,
    did_you_mean,
)
from doxa.processes import side_by_side
from doxa.store.artefact import CHECKSUMS, make_directory, readable_errors, sync, write_text
from doxa.store.lock import exclusive
from doxa.tables.predictions import predict_frame
from doxa.tables.reading import Dialect
from doxa.tables.schema import Schema

if TYPE_CHECKING:
    import pandas as pd

PLAN = "_predictions.json"
FORMAT = 1
MOST_ROWS = 1 << 16  # rows of a part, by default
MOST_CELLS = 1 << 23  # columns times rows of a part, by default
_PAUSE = 0.5  # seconds between two looks at parts of other processes
_KEY = b"doxa.plan"  # in the metadata of a part
_NOTES = 20  # notes that are kept of one call


@dataclass(frozen=True)
class Plan:
    """What a folder holds, or will hold; saved before the first part."""

    id: str
    source: dict[str, Any]  # facts of the input, as messages name them
    run: str  # checksum of the run
    level: float | None
    label: str | None  # the column that names the rows
    rows: int  # the largest part
    parts: tuple[Part, ...]
    text: dict[str, Any] | None = None  # how a CSV file is written
    missing: str | None = None  # how missing cells are treated, if not as in the fit

    @property
    def total(self) -> int:
        return sum(part.rows for part in self.parts)

    def save(self, folder: Path) -> None:
        saved = asdict(self) | {
            "format": FORMAT,
            "parts": [[*asdict(p).values()] for p in self.parts],
        }
        write_text(folder / PLAN, json.dumps(saved))

    @classmethod
    def load(cls, folder: Path) -> Plan | None:
        """The plan of a folder; None if it has none."""
        try:
            with readable_errors("read", folder / PLAN):
                saved = json.loads((folder / PLAN).read_text(encoding="utf-8"))
            if saved.pop("format") != FORMAT:
                raise StoreError(f"{folder} was begun by another version of doxa; --overwrite")
            saved["parts"] = tuple(Part(*part) for part in saved["parts"])
            return cls(**saved)
        except StoreError as error:
            if getattr(error, "errno", None) in (2, 20):  # there is no such file or folder
                return None
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptedArtefact(
                f"{folder / PLAN} is damaged; --overwrite starts anew"
            ) from error


def name_of(number: int) -> str:
    return f"part-{number:08}.parquet"


def prepare(
    folder: Path,
    source: Input,
    run: Path,
    schema: Schema,
    outputs: Sequence[str],
    level: float | None = None,
    label: str | None = None,
    rows: int | None = None,
    overwrite: bool = False,
    missing: str | None = None,
) -> tuple[Plan, list[str]]:
    """The plan of a folder, made or continued, and notes for the user.

    Parameters
    ----------
    folder : Path
        Created if necessary. It may hold the parts of an earlier call, and nothing else.
    source : ParquetInput or TextInput
        The rows to predict.
    run : Path
        The saved posterior.
    schema : Schema
        The columns that the posterior takes.
    outputs : sequence of str
        The columns of a prediction, of which none may be named like the column of labels.
    level : float, optional
        The level of intervals and sets.
    label : str, optional
        The column that names the rows. Default: that of the fit, or the index that pandas has
        stored in a Parquet file, if there is one.
    rows : int, optional
        The largest number of rows of a part. Default: 65,536, fewer with more than 128 columns.
    overwrite : bool
        Remove the predictions of another file, run or level, or finished ones.
    missing : str, optional
        How missing cells are treated, if not as in the fit. `schema` has it already.
    """
    make_directory_checked(folder)
    notes = schema.check_columns([n for n in source.names if n not in (label, source.stored_label)])
    if label is None:
        label = schema.index if schema.index in source.names else source.stored_label
    elif label not in source.names:
        raise DataError(f"no column {label!r}{did_you_mean(label, source.names)}")
    if source.names.count(str(label)) > 1 or len(set(source.names)) < len(source.names):
        twice = next(n for n in source.names if source.names.count(n) > 1)
        raise DataError(f"{source.path}: {twice!r} stands more than once in the header")
    if label in outputs:
        raise DataError(f"the column {label!r} names the rows, and a prediction has it too: --id")
    wide = len(schema.columns)
    most = rows or max(256, min(MOST_ROWS, MOST_CELLS // max(1, wide)))
    stamp = stamp_of(source.path)
    facts = {"name": source.path.name, **stamp, "digest": source.digest()}
    with readable_errors("read", run):
        summed = hashlib.sha256((run / CHECKSUMS).read_bytes()).hexdigest()
    with _alone(folder):
        old = None if overwrite else Plan.load(folder)
        if old is None:
            others = [p.name for p in folder.iterdir() if not _own(p.name)]
            if others:
                raise StoreError(
                    f"{folder} holds other files ({others[0]!r}): give an empty or new folder"
                )
            parts, text = source.plan(most, label)
            if not parts:
                raise DataError(f"{source.path} has a header but no rows")
            if stamp != stamp_of(source.path):
                raise changed(source.path)
            plan = Plan(
                secrets.token_hex(16),
                facts,
                summed,
                level,
                label,
                most,
                tuple(parts),
                text,
                missing,
            )
            for path in folder.glob("part-*.parquet"):
                path.unlink(missing_ok=True)
            plan.save(folder)
            return plan, notes
    _check_same(folder, old, facts, summed, level, label, rows, missing)
    return old, notes


def make_directory_checked(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file; --out takes a .csv or .parquet file, or a folder")
    with readable_errors("written", folder):
        make_directory(folder)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """The lock on the plan; another call holds it while it makes the plan."""
    while True:
        try:
            with exclusive(folder / PLAN):
                yield
            return
        except FolderInUse:
            time.sleep(_PAUSE)


def _own(name: str) -> bool:
    return name == PLAN or (name.startswith("part-") and name.endswith(".parquet")) or (
        name.startswith(".") and ("part-" in name or PLAN in name or name.startswith(".stop-"))
    )  # fmt: skip


def _check_same(
    folder: Path, plan: Plan, facts: Mapping[str, Any], run: str, level: float | None,
    label: str | None, rows: int | None, missing: str | None,
) -> None:  # fmt: skip
    """An error that names what differs between the plan of a folder and this call."""
    anew = "--overwrite starts anew, or give another --out"
    if {**plan.source, "name": ""} != {**facts, "name": ""}:
        what = "has changed since" if plan.source["name"] == facts["name"] else "is another file"
        raise DataError(
            f"{folder} holds predictions of {plan.source['name']!r}, and {facts['name']!r} {what} "
            f"({plan.source['size']:,} bytes then, {facts['size']:,} now); {anew}"
        )
    pairs = (
        ("run", plan.run[:12], run[:12]), ("--level", plan.level, level),
        ("--id", plan.label, label), ("--rows", plan.rows, rows or plan.rows),
        ("--missing", plan.missing, missing),
    )  # fmt: skip
    for name, then, now in pairs:
        if then != now:
            raise StoreError(f"{folder} was begun with another {name} ({then}, now {now}); {anew}")


def parts_left(folder: Path, plan: Plan) -> list[int]:
    """The numbers of the parts that are not yet written."""
    with readable_errors("read", folder):
        there = set(os.listdir(folder))
    return [k for k in range(len(plan.parts)) if name_of(k) not in there]


def work(
    folder: Path,
    source: Input,
    plan: Plan,
    posterior: Any,
    schema: Schema,
    stop: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Predict parts until none is left, also those that another process has given up. Returns
    notes for the user."""
    notes: dict[str, None] = {}
    wanted = [column.name for column in schema.columns]
    groups: dict[int, list[int]] = {}
    for number, part in enumerate(plan.parts):
        groups.setdefault(part.group, []).append(number)
    while (left := parts_left(folder, plan)) and not stop():
        before = len(left)
        missing = {plan.parts[number].group for number in left}
        for group in sorted(missing):
            numbers = groups[group]
            if stop() or all((folder / name_of(k)).exists() for k in numbers):
                continue
            rows = source.frames([plan.parts[k] for k in numbers], wanted, plan.label, plan.text)
            with contextlib.closing(rows):  # type: ignore[type-var]
                for number, read in zip(numbers, rows, strict=True):
                    if stop() or (folder / name_of(number)).exists():
                        continue
                    for note in _take(folder, source, plan, number, read, posterior, schema):
                        if len(notes) < _NOTES:
                            notes[note] = None
        if len(parts_left(folder, plan)) == before:  # all are being predicted by others
            time.sleep(_PAUSE)
    return list(notes)


def _take(
    folder: Path, source: Input, plan: Plan, number: int,
    read: Callable[[], tuple[pd.DataFrame, dict[str, Any]]], posterior: Any, schema: Schema,
) -> list[str]:  # fmt: skip
    """Predict a part and write it, unless another process is doing so."""
    target = folder / name_of(number)
    try:
        with exclusive(target):
            if target.exists():
                return []
            for old in folder.glob(f".{name_of(number)}.tmp-*"):  # of a process that was killed
                old.unlink(missing_ok=True)
            try:
                frame, names = read()
                table, notes = predict_frame(posterior, schema, frame, plan.level)
            except DataError as error:
                part = plan.parts[number]
                kind = "row group" if isinstance(source, ParquetInput) else "block"
                raise DataError(f"{source.path}, {kind} {part.group}: {error}") from error
            _write(target, plan, source.path, names, table)
            return notes
    except FolderInUse:
        return []


def _write(
    target: Path, plan: Plan, path: Path, names: Mapping[str, Any], table: pd.DataFrame
) -> None:
    arrow, parquet = import_pyarrow()
    found = arrow.Table.from_pandas(table, preserve_index=False)
    for at, (name, values) in enumerate(names.items()):
        named = "index" if name in ("Unnamed: 0", "__index_level_0__") else name
        held = isinstance(values, arrow.ChunkedArray)
        found = found.add_column(
            at, named, values if held else arrow.array(values, from_pandas=True)
        )
    found = found.replace_schema_metadata({_KEY: plan.id.encode()})
    temporary = target.with_name(f".{target.name}.tmp-{secrets.token_hex(8)}")
    try:
        with readable_errors("written", target):
            parquet.write_table(found, temporary)
            sync(temporary)
            if {k: plan.source[k] for k in ("size", "changed")} != stamp_of(path):
                raise changed(path)
            now = Plan.load(target.parent)
            if now is None or now.id != plan.id:
                raise StoreError(f"{target.parent} was started anew by another call")
            os.replace(temporary, target)
            sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def finish(folder: Path, plan: Plan) -> int:
    """Check that every part is there, complete and of this plan; returns the number of rows.

    A part that is damaged, or of another plan, is removed, so that the next call writes it again.
    """
    arrow, parquet = import_pyarrow()
    bad: list[str] = []
    for number, part in enumerate(plan.parts):
        path = folder / name_of(number)
        try:
            with parquet.ParquetFile(path) as file:
                own = (file.schema_arrow.metadata or {}).get(_KEY) == plan.id.encode()
                sound = own and file.metadata.num_rows == part.rows
        except (OSError, arrow.ArrowException):
            sound = False
        if not sound:
            bad.append(path.name)
            path.unlink(missing_ok=True)
    if bad:
        raise CorruptedArtefact(
            f"{folder}: {', '.join(bad[:3])}{', ...' if len(bad) > 3 else ''} "
            f"{'was' if len(bad) == 1 else 'were'} damaged, and removed: the same command writes "
            f"{'it' if len(bad) == 1 else 'them'} again"
        )
    return plan.total


def predict_folder(
    folder: Path, source: Input, plan: Plan, run: Path, net: str | None, posterior: Any,
    schema: Schema, jobs: int = 1, missing: str | None = None,
) -> list[str]:  # fmt: skip
    """Predict all parts that are left, in `jobs` processes, with a progress bar."""
    left = parts_left(folder, plan)
    stop = folder / f".stop-{secrets.token_hex(8)}"  # one process that fails ends the others
    over = threading.Event()
    notes: dict[str, None] = {}
    try:
        with shown("predict", len(plan.parts), len(plan.parts) - len(left)) as bar:

            def follow() -> None:
                while not over.wait(_PAUSE):
                    with contextlib.suppress(DoxaError):
                        bar.show(len(plan.parts) - len(parts_left(folder, plan)), "parts", {})

            watcher = threading.Thread(target=follow, daemon=True)
            watcher.start()
            try:
                jobs = min(jobs, max(1, len(left)))
                if jobs == 1:
                    found = work(folder, source, plan, posterior, schema)
                    notes |= dict.fromkeys(found)
                else:
                    given = [(folder, source.path, source.dialect, run, net, missing, stop)] * jobs
                    for _, outcome in side_by_side(_work_apart, given, jobs):
                        notes |= dict.fromkeys(outcome())
            finally:
                over.set()
                watcher.join()
            bar.advance_to(len(plan.parts))
    finally:
        stop.unlink(missing_ok=True)
    return list(notes)


def _work_apart(
    folder: Path,
    path: Path,
    dialect: Dialect,
    run: Path,
    net: str | None,
    missing: str | None,
    stop: Path,
) -> list[str]:
    """`work` in a process of its own."""
    from doxa.app.fitting import load_run

    try:
        posterior, schema = load_run(run, net, missing)
        plan = Plan.load(folder)
        if plan is None:
            raise StoreError(f"{folder} has lost its plan, {PLAN}")
        return work(folder, opened(path, dialect), plan, posterior, schema, stop.exists)
    except BaseException:
        with contextlib.suppress(OSError):
            stop.touch()
        raise
