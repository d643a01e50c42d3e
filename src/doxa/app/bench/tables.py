"""A table as data: rows and columns that print in a terminal and in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.markup import escape
from rich.table import Table as RichTable


@dataclass
class Table:
    """Cells of text under a title, with notes that belong under it."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def rich(self) -> RichTable:
        table = RichTable(*map(escape, self.columns), title=escape(self.title))
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", _line(self.columns), _line(["---"] * len(self.columns))]
        lines += [_line(row) for row in self.rows]
        if self.notes:
            lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"


def plus_minus(mean: float | None, error: float | None = None, digits: int = 2) -> str:
    """3.18 ± 0.24; a minus sign that is one; a dash where there is nothing."""
    if mean is None:
        return "–"
    text = f"{mean:.{digits}f}".replace("-", "−")
    return text if error is None else f"{text} ± {error:.{digits}f}"


def mean_of(values: Sequence[float], digits: int) -> str:
    """Over seeds, ± the standard error where there are several."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return plus_minus(mean, digits=digits)
    spread = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return plus_minus(mean, math.sqrt(spread / len(values)), digits)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
