"""Results kept as data: a table is made of cells, and a cell is computed once.

A cell is one (table, data set, method, …) and its result, which JSON can hold. All cells of a table
are one JSON-lines file, one cell per line in the order of their names, each with the machine, the
versions, the seed and the time it took. A cell is written as soon as it is known: the file is
replaced atomically, under a lock, so that several processes can add to it. A table that was
interrupted continues where it stopped.

`compute` runs the cells that are missing, one after the other or in several processes; `Table` is
what a person reads: rows and columns that print in a terminal and in Markdown.

Processes that `torchrun` has started, or that other calls on the same folder have, divide the cells
as the blocks of a fit are divided (`store/claims.py`): a process claims a cell with a lease, and
computes it alone. The leases are in a folder beside the file, `NAME.cells`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.markup import escape
from rich.table import Table as RichTable

from doxa.driver.blocks import others
from doxa.errors import DataError, FolderInUse, MethodError
from doxa.noise import digest
from doxa.processes import side_by_side
from doxa.store import claims, exclusive, write_text

log = logging.getLogger(__name__)

Key = Mapping[str, str | int | float | bool]
Result = dict[str, Any]
Cell = dict[str, Any]
Report = Callable[[str], None]

LOCK_SECONDS = 600.0  # a writer holds the file for as long as one write takes


class Store:
    """The cells of one table, in one JSON-lines file.

    Parameters
    ----------
    path : path of the file, such as `results/uci.jsonl`; it need not exist yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._cells: dict[str, Cell] = {}
        self._damaged: list[int] = []  # numbers of lines that are no cell
        self._seen: tuple[int, ...] | None = None  # which state of the file these are of

    def get(self, key: Key) -> Result | None:
        """The stored result, or None; a line that cannot be read counts as absent."""
        cell = self._read().get(_name(key))
        return cell["result"] if cell is not None and cell["key"] == dict(key) else None

    def cell(self, key: Key, make: Callable[[], Result]) -> Result:
        """The stored result, else what `make` returns, stored."""
        known = self.get(key)
        if known is not None:
            return known
        start = time.perf_counter()
        result = make()
        self.put(key, result, time.perf_counter() - start)
        return result

    def put(self, key: Key, result: Result, seconds: float) -> None:
        """Add a cell, or replace it; what other processes have written meanwhile is kept."""
        whole = {"key": dict(key), "result": result, "seconds": seconds, **circumstances()}
        cell = plain(whole)
        with self._lock():
            cells = {**self._read(), _name(cell["key"]): cell}
            if self._damaged:
                copy = self.path.with_name(self.path.name + ".damaged")
                log.warning("%s is kept as %s before its lines are replaced", self.path, copy)
                shutil.copyfile(self.path, copy)
            lines = [_line_of(cells[name]) for name in sorted(cells)]
            write_text(self.path, "".join(lines))

    def cells(self, **wanted: Any) -> Iterator[Cell]:
        """Whole cells whose key has these values, by name."""
        for _, cell in sorted(self._read().items()):
            if all(cell["key"].get(name) == value for name, value in wanted.items()):
                yield cell

    def _read(self) -> dict[str, Cell]:
        """{name: cell}, read again when the file is another one than last time."""
        try:
            with self.path.open(encoding="utf-8") as file:
                found = os.fstat(file.fileno())
                state = (found.st_ino, found.st_size, found.st_mtime_ns)
                if state != self._seen:
                    self._parse(file)
                    self._seen = state
        except FileNotFoundError:
            self._cells, self._damaged, self._seen = {}, [], None
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.path} cannot be read: {error}") from error
        return self._cells

    def _parse(self, lines: Iterator[str]) -> None:
        self._cells, self._damaged = {}, []
        for number, line in enumerate(lines, 1):
            try:
                cell = json.loads(line)
            except ValueError:
                cell = None
            key = cell.get("key") if isinstance(cell, dict) else None
            if isinstance(key, dict) and key and "result" in cell:
                self._cells[_name(key)] = cell
            elif line.strip():
                self._damaged.append(number)
        if self._damaged:
            log.warning(
                "%s: no cell can be read from line %s: it counts as absent",
                self.path, ", ".join(map(str, self._damaged)),
            )  # fmt: skip

    def _lock(self) -> contextlib.ExitStack:
        """Held against other writers: another one is waited for."""
        stack, end = contextlib.ExitStack(), time.monotonic() + LOCK_SECONDS
        while True:
            try:
                stack.enter_context(exclusive(self.path))
                return stack
            except FolderInUse:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)


def circumstances() -> dict[str, Any]:
    """Where and with what a result was made."""
    gpu = torch.cuda.is_available()
    return {
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if gpu else None,
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "doxa": _version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def plain(value: Any) -> Any:
    """Only what JSON has: tensors and arrays as lists, non-finite numbers as None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, torch.Tensor | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _line_of(cell: Cell) -> str:
    return json.dumps(cell, ensure_ascii=False, allow_nan=False) + "\n"


def _version() -> str:
    import doxa

    return doxa.__version__


def _name(key: Key) -> str:
    """`table-set-method…`, readable, and unique through a digest of the whole key."""
    readable = "-".join(_slug(value) for value in list(key.values())[:3])
    return f"{readable}-{digest(json.dumps(plain(key), sort_keys=True)) & 0xFFFFFFFF:08x}"


def _slug(value: Any) -> str:
    return "".join(c if c.isalnum() or c in "._" else "_" for c in str(value))[:40]


@dataclass(frozen=True)
class Task:
    """One cell to compute: `make(**arguments)` returns its result. `make` is a function of a
    module, so that another process can call it."""

    key: dict[str, Any]
    make: Callable[..., Result]
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join(str(value) for value in self.key.values())


def compute(tasks: Sequence[Task], store: Store, jobs: int = 1, report: Report = log.info) -> None:
    """Compute the cells that the store does not hold yet, in `jobs` processes.

    With several jobs, each has one thread. Processes of `torchrun` divide the cells. A method that
    a data set is not for leaves a cell with the reason; any other failure is raised when everything
    else is done, so that nothing that has finished is lost.
    """
    missing = [task for task in tasks if store.get(task.key) is None]
    report(f"{len(tasks) - len(missing)} of {len(tasks)} cells are known, {len(missing)} to go")
    failures: list[tuple[str, Exception]] = []

    def finish(name: str, outcome: Callable[[], float]) -> None:
        try:
            report(f"{name}: {outcome():.1f} s")
        except Exception as error:
            log.exception("%s failed", name)
            failures.append((name, error))

    world = others.get()
    if world is None:
        for i, outcome in side_by_side(_run, [(task, store.path) for task in missing], jobs):
            finish(missing[i].name, outcome)
    else:
        _divide(missing, store, world, finish)
    if failures:
        name, first = failures[0]
        raise DataError(f"{len(failures)} cells failed, the first {name}: {first}") from first


def _divide(
    tasks: Sequence[Task], store: Store, world: Any,
    finish: Callable[[str, Callable[[], float]], None],
) -> None:  # fmt: skip
    """Compute the cells that no other process has, until all are there. A cell that failed in
    another process is tried here too, so that each process knows its error."""
    folder, seen = store.path.with_name(f"{store.path.name}.cells"), claims.Seen()

    def attempt(i: int) -> bool:
        task = tasks[i]
        known = next(store.cells(**task.key), None)
        if known is not None:
            finish(task.name, lambda: float(known["seconds"]))
            return True
        lease = claims.Place(folder / _name(task.key), "").claim(seen)
        if lease is None:
            return False
        with lease:
            if store.get(task.key) is None:
                with world.training(task.name):
                    finish(task.name, lambda: _run(task, store.path))
                return True
        return False  # another process has just finished it

    claims.divide(len(tasks), attempt, world.rank * len(tasks) // world.size, world.check)
    world.exchange("cells", "")
    if world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


def _run(task: Task, path: Path) -> float:
    """Seconds of one cell, which is then in the file."""
    store = Store(path)
    try:
        store.cell(task.key, lambda: task.make(**task.arguments))
    except MethodError as error:
        store.put(task.key, {"refused": str(error)}, 0.0)
    (cell,) = store.cells(**task.key)
    return float(cell["seconds"])


@dataclass
class Table:
    """Cells of text under a title, with notes that belong under it."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def rich(self) -> RichTable:
        """For a terminal."""
        table = RichTable(*map(escape, self.columns), title=escape(self.title))
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def markdown(self) -> str:
        """For a page."""
        lines = [f"### {self.title}", "", _row(self.columns), _row(["---"] * len(self.columns))]
        lines += [_row(row) for row in self.rows]
        if self.notes:
            lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"


def plus_minus(mean: float | None, error: float | None = None, digits: int = 2) -> str:
    """3.18 ± 0.24, with a true minus sign; a dash where there is nothing."""
    if mean is None:
        return "–"
    text = f"{mean:.{digits}f}".replace("-", "−")
    return text if error is None else f"{text} ± {error:.{digits}f}"


def mean_of(values: Sequence[float], digits: int) -> str:
    """The mean over seeds, ± its standard error where there are several."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return plus_minus(mean, digits=digits)
    spread = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return plus_minus(mean, math.sqrt(spread / len(values)), digits)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
