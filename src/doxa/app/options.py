"""Arguments and options that commands share, with their help.

A table on a terminal that may be too narrow for it: no number is ever cut.

Headers wrap between words, and so do cells of columns that are text (`overflow="fold"`). What is
still too wide is shown as several tables, one below the other, each with the first column.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
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


TABLE, TRAINING = "The table", "Network and training"  # where --help shows them

DataFile = Annotated[
    Path,
    typer.Argument(help="A CSV (also compressed) or Parquet file.", show_default=False),
]
Target = Annotated[str, typer.Option("--target", "-t", help="The column to predict.")]
Likelihood = Annotated[
    str | None,
    typer.Option(
        help="What the target is, instead of inferring it: gaussian, poisson, ...",
        rich_help_panel=TABLE,
    ),
]
Index = Annotated[
    str | None, typer.Option(help="A column that names rows; not an input.", rich_help_panel=TABLE)
]
TaskColumn = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="A column that says which task a row belongs to, for methods that learn from tasks; "
        "not an input.",
        rich_help_panel=TABLE,
    ),
]
Drop = Annotated[
    list[str] | None, typer.Option(help="A column to leave out; repeatable.", rich_help_panel=TABLE)
]
Categorical = Annotated[
    list[str] | None,
    typer.Option(
        help="A column of numbers that are categories; repeatable.", rich_help_panel=TABLE
    ),
]
Numeric = Annotated[
    list[str] | None,
    typer.Option(
        help="A column of numbers to use although it looks like an id; repeatable.",
        rich_help_panel=TABLE,
    ),
]
Missing = Annotated[
    str,
    typer.Option(
        help="What to do about missing cells: error names them; impute fills in the median, and "
        "says so in one more input, or the category 'missing'.",
        rich_help_panel=TABLE,
    ),
]
Sep = Annotated[
    str | None,
    typer.Option(
        help="What separates cells: , ; | or tab. Default: recognised.", rich_help_panel=TABLE
    ),
]
Decimal = Annotated[
    str | None,
    typer.Option(help="The decimal mark: , or . Default: recognised.", rich_help_panel=TABLE),
]
Encoding = Annotated[
    str | None,
    typer.Option(help="utf-8, utf-16, latin-1, ... Default: recognised.", rich_help_panel=TABLE),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A setting of the method, NAME=VALUE; see doxa methods NAME.",
        rich_help_panel=TRAINING,
    ),
]
Net = Annotated[
    str | None,
    typer.Option(
        help="module:builder, called with (inputs, outputs), instead of the default MLP.",
        rich_help_panel=TRAINING,
    ),
]
Hidden = Annotated[
    str,
    typer.Option(
        help="Widths of the default MLP's hidden layers: 50,50; '' for none.",
        rich_help_panel=TRAINING,
    ),
]
Members = Annotated[
    int | None, typer.Option(min=1, help="How many members (or chains).", rich_help_panel=TRAINING)
]
Epochs = Annotated[
    int | None, typer.Option(min=1, help="Passes over the data.", rich_help_panel=TRAINING)
]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Steps, instead of epochs.", rich_help_panel=TRAINING)
]
Rate = Annotated[float | None, typer.Option(help="Learning rate.", rich_help_panel=TRAINING)]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Rows a step.", rich_help_panel=TRAINING)
]
Validation = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=0.9,
        help="Share of the rows held out to stop training in time; 0 for none. Default: each "
        "member holds out another tenth or so, in methods that overfit without.",
        rich_help_panel=TRAINING,
    ),
]
TestFile = Annotated[
    Path | None, typer.Option("--test", help="Held-out rows, to score the fit on.")
]
TestShare = Annotated[
    float | None,
    typer.Option(
        "--split",
        help="Share of the rows to score the fit on, chosen by the seed and not trained on.",
    ),
]
Calibrate = Annotated[
    str | None,
    typer.Option(
        help="Correct predictions on rows held out for it. Alone it means auto: temperature for "
        "classes, quantile for numbers. Or vector, dirichlet, isotonic, histogram; variance.",
    ),
]
Conformal = Annotated[
    float | None,
    typer.Option(help="Intervals, or sets of classes, that hold the truth at this level: 0.9."),
]
ConformalKind = Annotated[
    str | None,
    typer.Option(help="split (default) or cqr for numbers, lac (default) or aps for classes."),
]
CalibrationShare = Annotated[
    float | None,
    typer.Option(help="Share of the rows held out for --calibrate and --conformal. Default: 0.2."),
]
Run = Annotated[Path, typer.Argument(help="The folder doxa fit wrote.", show_default=False)]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, ...", rich_help_panel=TRAINING)
]
Seed = Annotated[int, typer.Option(min=0, help="Same seed, same result.", rich_help_panel=TRAINING)]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say what the engine does.")]


def listed(text: str) -> list[str]:
    """What an option holds that is written as a,b,c."""
    return [part.strip() for part in text.split(",") if part.strip()]
