"""The table of methods as people read it."""

from __future__ import annotations

from collections.abc import Iterator

from doxa.errors import MethodError, did_you_mean
from doxa.registry.row import Row


class MethodTable:
    """What `doxa.methods()` gives: iterable rows, and a readable table when printed."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, name: str | int) -> Row:
        if isinstance(name, int):
            return self._rows[name]
        for row in self._rows:
            if row.name == name:
                return row
        names = [row.name for row in self._rows]
        raise MethodError(
            f"no method named {name!r}{did_you_mean(name, names)}; doxa.methods() and the command "
            "`doxa methods` list all"
        )

    def __repr__(self) -> str:
        columns = [("method", "name"), ("family", "family"), ("what it is", "summary"),
                   ("cost (MAP = 1)", "cost"), ("paper", "paper")]  # fmt: skip
        cells = [[title for title, _ in columns]]
        cells += [[str(getattr(row, key)) for _, key in columns] for row in self]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
        return "\n".join(line.rstrip() for line in lines)

    def markdown(self) -> str:
        """The table as the README has it, a line a method."""
        lines = ["| method | what it is | cost, one MAP fit = 1 | gives |", "|---|---|---|---|"]
        lines += [f"| `{row.name}` | {row.summary} | {row.cost} | {row.gives} |" for row in self]
        return "\n".join(lines)

    _repr_markdown_ = markdown  # in a notebook
