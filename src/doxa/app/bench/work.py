"""Cells are independent: they run one after the other, or side by side in several processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from doxa.app.bench.cells import Result, Store
from doxa.app.processes import side_by_side
from doxa.errors import DataError, MethodError

log = logging.getLogger(__name__)

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """One cell still to be known: `make(**arguments)` gives its result. `make` is a module's
    function, so that another process can call it."""

    key: dict[str, Any]
    make: Callable[..., Result]
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join(str(value) for value in self.key.values())


def compute(tasks: Sequence[Task], store: Store, jobs: int = 1, tell: Tell = log.info) -> None:
    """Compute what the store does not hold yet, with one thread a process when `jobs` > 1.

    A method that a data set is not for leaves a cell that says why; any other failure is raised
    once everything else is done, so that nothing finished is lost.
    """
    missing = [task for task in tasks if store.get(task.key) is None]
    tell(f"{len(tasks) - len(missing)} of {len(tasks)} cells are known, {len(missing)} to go")
    failures: list[tuple[str, Exception]] = []
    for i, outcome in side_by_side(_run, [(task, store.folder) for task in missing], jobs):
        _collect(outcome, missing[i], failures, tell)
    if failures:
        name, error = failures[0]
        raise DataError(f"{len(failures)} cells failed, the first {name}: {error}") from error


def _run(task: Task, folder: Path) -> float:
    store = Store(folder)
    try:
        store.cell(task.key, lambda: task.make(**task.arguments))
    except MethodError as error:
        store.put(task.key, {"refused": str(error)}, 0.0)
    (cell,) = store.cells(**task.key)
    return float(cell["seconds"])


def _collect(
    result: Callable[[], float], task: Task, failures: list[tuple[str, Exception]], tell: Tell
) -> None:
    try:
        tell(f"{task.name}: {result():.1f} s")
    except Exception as error:
        log.exception("%s failed", task.name)
        failures.append((task.name, error))
