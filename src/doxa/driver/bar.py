"""A progress bar on the terminal, and nothing where it is not wanted."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Any


class Bar:
    """Shows steps done, the stage, the mean loss and the time left (rich, on stderr)."""

    def __init__(self, shown: bool, name: str, total: int, done: int = 0) -> None:
        self.shown = shown
        self.name = name
        self.total = total
        self.done = done
        self._bar: Any = None
        self._last = 0.0

    def __enter__(self) -> Bar:
        if self.shown:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Rich

            self._bar = Rich(
                TextColumn("{task.description}"), BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"), TimeElapsedColumn(),
                TimeRemainingColumn(), TextColumn("{task.fields[figures]}"),
                console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self._bar.start()
            self._task = self._bar.add_task(
                self.name, total=self.total, completed=self.done, figures=""
            )
        return self

    def show(self, done: int, stage: str, values: dict[str, Any]) -> None:
        if self._bar is None or time.monotonic() - self._last < 0.1:
            return
        self._last = time.monotonic()
        figures = []
        for name, value in values.items():
            numbers = value if isinstance(value, list) else [value]
            flat = [v for v in numbers if isinstance(v, float) and math.isfinite(v)]
            if flat:
                figures.append(f"{name} {sum(flat) / len(flat):.4g}")
        self._bar.update(
            self._task, completed=done, description=f"{self.name}: {stage}",
            figures="  ".join(figures),
        )  # fmt: skip

    def advance_to(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
