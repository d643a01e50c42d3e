"""Progress of a fit: a bar on a terminal, plain lines elsewhere.

On a narrow terminal, the figures and the time spent are dropped first, and then the names. The bar,
the count and the time left always stay. Elsewhere (a log file, a CI job) the output is lines of
plain text: at the start, after 10 s, 20 s later, 40 s later… (at most ten minutes apart), and at
the end.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TextIO

FIRST_SECONDS, MOST_SECONDS = 10.0, 600.0
LEAST_SECONDS = 1.0  # before which the time left is not shown


def shown(name: str, total: int, done: int = 0) -> Shown:
    """A progress display on standard error: a bar if it is a terminal, otherwise lines."""
    return (Bar if sys.stderr.isatty() else Lines)(name, total, done)


def figures(values: Mapping[str, Any]) -> list[str]:
    """The statistics of a step, each as a mean over members: ["loss 0.31"]."""
    found = []
    for name, value in values.items():
        numbers = value if isinstance(value, list) else [value]
        finite = [v for v in numbers if isinstance(v, float) and math.isfinite(v)]
        if finite:
            found.append(f"{name} {sum(finite) / len(finite):.4g}")
    return found


class Bar(AbstractContextManager["Bar"]):
    """A progress bar on one line of a terminal (rich)."""

    def __init__(self, name: str, total: int, done: int = 0, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Rich

        self.name, self.total = name, total
        self._console = console or Console(stderr=True)
        self._began, self._pace, self._last = time.monotonic(), Pace(done), -1.0
        width = self._console.width
        bar = BarColumn(bar_width=max(8, min(40, width // 4)))
        self._room = width - 1 - (bar.bar_width or 0) - 1  # beside the bar
        self._bar = Rich(
            TextColumn("{task.fields[names]}"), bar, TextColumn("{task.fields[rest]}"),
            console=self._console, transient=True, refresh_per_second=10,
        )  # fmt: skip
        self._task = self._bar.add_task(
            "", total=total, completed=done, **self._texts(done, "", {})
        )

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def show(self, done: int, stage: str, values: Mapping[str, Any]) -> None:
        now = time.monotonic()
        self._pace.note(now - self._began, done)
        if now - self._last < 0.1:
            return
        self._last = now
        self._bar.update(self._task, completed=done, **self._texts(done, stage, values))

    def advance_to(self, done: int) -> None:
        self._bar.update(self._task, completed=done)

    def _texts(self, done: int, stage: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The texts to the left and right of the bar, as far as they fit on the line."""
        spent = time.monotonic() - self._began
        count = f"{done:,}/{self.total:,}"
        rest = f"{count} {self._pace.left(spent, done, self.total)}"
        room = self._room - len(rest)
        names = next(
            (n for n in (f"{self.name}: {stage}" if stage else self.name, self.name, "")
             if len(n) <= room), ""
        )  # fmt: skip
        room -= len(names)
        for more in (f"{clock(spent)} spent", *figures(values)):
            if len(more) + 2 <= room:
                rest, room = f"{rest}  {more}", room - len(more) - 2
        return {"names": names, "rest": rest}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._bar.stop()


class Lines(AbstractContextManager["Lines"]):
    """Lines of plain text at growing intervals."""

    def __init__(self, name: str, total: int, done: int = 0, stream: TextIO | None = None) -> None:
        self.name, self.total, self._done, self._pace = name, total, done, Pace(done)
        self._stream = stream or sys.stderr
        self._began = time.monotonic()
        self._wait = FIRST_SECONDS
        self._next = self._began + self._wait

    def __enter__(self) -> Lines:
        at = f", from step {self._done:,}" if self._done else ""
        self._write(f"{self.total:,} steps{at}")
        return self

    def show(self, done: int, stage: str, values: Mapping[str, Any]) -> None:
        self._done = done
        now = time.monotonic()
        self._pace.note(now - self._began, done)
        if now < self._next:
            return
        self._wait = min(2 * self._wait, MOST_SECONDS)
        self._next = now + self._wait
        left = self._pace.left(now - self._began, done, self.total)
        parts = [f"step {done:,} of {self.total:,}", left, stage, *figures(values)]
        self._write(", ".join(part for part in parts if part))

    def advance_to(self, done: int) -> None:
        self._done = done

    def _write(self, message: str) -> None:
        self._stream.write(f"{self.name}: {message}\n")
        self._stream.flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        how = "done" if kind is None else "stopped"
        self._write(f"{how} at step {self._done:,} after {clock(time.monotonic() - self._began)}")


Shown = Bar | Lines


class Pace:
    """The time left, at the pace of the later half of the time since the first step.

    The first step of a fit compiles or records what is computed, and can take as long as a thousand
    others. It is not counted.
    """

    def __init__(self, done: int = 0) -> None:
        self._from = done
        self._marks: list[tuple[float, int]] = []  # (seconds spent, steps done)

    def note(self, spent: float, done: int) -> None:
        """Take note of how many steps are done."""
        if self._marks and spent <= 1.05 * self._marks[-1][0]:  # few marks, however long a fit is
            return
        if done > self._from:
            self._marks.append((spent, done))
        while len(self._marks) > 2 and self._marks[1][0] <= spent / 2:
            del self._marks[0]

    def left(self, spent: float, done: int, total: int) -> str:
        """The time left, or "-:--:-- left" while the pace is unknown."""
        since, before = self._marks[0] if self._marks else (spent, done)
        if done <= before or spent < LEAST_SECONDS:
            return "-:--:-- left"
        return f"{clock((spent - since) / (done - before) * (total - done))} left"


def clock(seconds: float) -> str:
    """h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
