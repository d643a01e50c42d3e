"""A progress bar on the terminal."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Any


class Bar:
    """Shows steps done, the stage, the mean loss and the time left (rich, on stderr)."""

    def __init__(self, name: str, total: int, done: int = 0) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Rich

        self.name = name
        self._last = 0.0
        self._bar = Rich(
            TextColumn("{task.description}"), BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"), TimeElapsedColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[figures]}"),
            console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task(name, total=total, completed=done, figures="")

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def show(self, done: int, stage: str, values: dict[str, Any]) -> None:
        if time.monotonic() - self._last < 0.1:
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
        self._bar.update(self._task, completed=done)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._bar.stop()
