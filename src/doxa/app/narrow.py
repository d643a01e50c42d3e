"""A table on a terminal that may be too narrow for it: no number is ever cut.

Headers wrap between words, and so do cells of columns that are text (`overflow="fold"`). What is
still too wide is shown as several tables, one below the other, each with the first column.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

LEAST_TEXT = 16  # a column of text is no narrower than this, or than what it holds


def print_table(console: Console, table: Table) -> None:
    """The table, in as many parts as the terminal's width asks for."""
    parts = _parts(table, console.width)
    for k, columns in enumerate(parts):
        part = _part(table, columns, console.width, first=k == 0, last=k == len(parts) - 1)
        wide = Console(file=console.file, width=max(console.width, _total(part.columns)))
        (wide if wide.width > console.width else console).print(part)


def _parts(table: Table, width: int) -> list[list[Column]]:
    """Columns that fit beside each other, the first one always among them."""
    first, *others = table.columns
    parts = [[first]]
    for column in others:
        if len(parts[-1]) > 1 and _needed([*parts[-1], column]) > width:
            parts.append([first])
        parts[-1].append(column)
    return parts


def _part(table: Table, columns: list[Column], width: int, first: bool, last: bool) -> Table:
    """A table of some columns, each at least as wide as it must be; what is left over goes to
    headers, and then to text."""
    spare = max(0, width - _needed(columns))
    sizes = [_least(column) for column in columns]
    for wanted in (_header, _longest):
        for k, column in enumerate(columns):
            more = min(spare, max(0, wanted(column) - sizes[k]))
            sizes[k], spare = sizes[k] + more, spare - more
    made = Table(
        *(
            Column(column.header, width=size, overflow="fold", justify=column.justify)
            for column, size in zip(columns, sizes, strict=True)
        ),
        title=table.title if first else None,
        caption=table.caption if last else None,
    )
    cells = [list(column.cells) for column in columns]
    for number, row in enumerate(table.rows):
        made.add_row(*(each[number] for each in cells), style=row.style)
    return made


def _needed(columns: list[Column]) -> int:
    return sum(_least(column) for column in columns) + 3 * len(columns) + 1


def _total(columns: list[Column]) -> int:
    return sum(column.width or 0 for column in columns) + 3 * len(columns) + 1


def _least(column: Column) -> int:
    """The longest word of the header, and the longest cell: of text, a part of it."""
    words = [len(word) for word in _plain(column.header).split()]
    longest = _longest(column)
    if column.overflow == "fold":
        longest = min(longest, LEAST_TEXT)
    return max([1, longest, *words])


def _longest(column: Column) -> int:
    return max([1, *(Text.from_markup(_plain_markup(cell)).cell_len for cell in column.cells)])


def _header(column: Column) -> int:
    return len(_plain(column.header))


def _plain(value: object) -> str:
    return Text.from_markup(_plain_markup(value)).plain


def _plain_markup(value: object) -> str:
    return value if isinstance(value, str) else str(value)
