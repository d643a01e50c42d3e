"""Arguments and options that commands share, with their help, and tables on the terminal.

`print_table` shows a table on a terminal that may be too narrow for it, and never truncates a
number. Headers wrap between words, and so do cells of text columns (`overflow="fold"`). A table
that is still too wide is shown as several tables, one below the other, each with the first column.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

LEAST_TEXT = 16  # the smallest width of a text column with longer cells


def print_table(console: Console, table: Table) -> None:
    """Print the table, in as many parts as the width of the terminal requires."""
    parts = _parts(table, console.width)
    for k, columns in enumerate(parts):
        part = _part(table, columns, console.width, first=k == 0, last=k == len(parts) - 1)
        wide = Console(file=console.file, width=max(console.width, _total(part.columns)))
        (wide if wide.width > console.width else console).print(part)


def _parts(table: Table, width: int) -> list[list[Column]]:
    """Groups of columns that fit beside each other, each with the first column."""
    first, *others = table.columns
    parts = [[first]]
    for column in others:
        if len(parts[-1]) > 1 and _needed([*parts[-1], column]) > width:
            parts.append([first])
        parts[-1].append(column)
    return parts


def _part(table: Table, columns: list[Column], width: int, first: bool, last: bool) -> Table:
    """A table of some columns, each with its minimal width; spare width goes to headers first, and
    then to text."""
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
    """The minimal width: of the longest header word and cell; text cells may wrap."""
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
    typer.Argument(
        help="A table: a CSV file (also compressed) or a Parquet file.", show_default=False
    ),
]
Target = Annotated[str, typer.Option("--target", "-t", help="The column to predict.")]
# The names of `doxa.likelihoods.LIKELIHOODS`, which a test compares: importing that imports torch,
# and `doxa --help` should answer at once.
LIKELIHOOD_NAMES = (
    "gaussian", "heteroscedastic", "student-t", "laplace-noise", "poisson", "negative-binomial",
    "counts", "bernoulli", "categorical",
)  # fmt: skip
*_FIRST, _LAST = LIKELIHOOD_NAMES
Likelihood = Annotated[
    str | None,
    typer.Option(
        help=f"The likelihood: {', '.join(_FIRST)} or {_LAST}. Default: inferred from the target.",
        rich_help_panel=TABLE,
    ),
]
Index = Annotated[
    str | None,
    typer.Option(help="A column of row names; not used as an input.", rich_help_panel=TABLE),
]
TaskColumn = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="The column with the task of each row, for methods that learn from several tasks "
        "(neural processes); not used as an input.",
        rich_help_panel=TABLE,
    ),
]
Group = Annotated[
    str | None,
    typer.Option(
        "--group",
        help="The column with the group of each row, such as a person with several rows. Rows of a "
        "group are held out together, so that the fit is evaluated on new groups; not used as an "
        "input.",
        rich_help_panel=TABLE,
    ),
]
Time = Annotated[
    str | None,
    typer.Option(
        "--time",
        help="The column with the time of each row: numbers or dates. The last rows are held out, "
        "so that the fit is evaluated on later rows; not used as an input.",
        rich_help_panel=TABLE,
    ),
]
TimeInput = Annotated[
    bool,
    typer.Option(
        "--time-input", help="Use the column of --time as an input, too.", rich_help_panel=TABLE
    ),
]
Drop = Annotated[
    list[str] | None, typer.Option(help="A column to drop; repeatable.", rich_help_panel=TABLE)
]
Categorical = Annotated[
    list[str] | None,
    typer.Option(help="A column whose numbers are categories; repeatable.", rich_help_panel=TABLE),
]
Numeric = Annotated[
    list[str] | None,
    typer.Option(
        help="A column to use as a number, although it looks like an id; repeatable.",
        rich_help_panel=TABLE,
    ),
]
Missing = Annotated[
    str,
    typer.Option(
        help="How to treat missing cells. error: stop and list them. impute: fill in the median "
        "and add an input that marks the filled cells, or use the category 'missing'.",
        rich_help_panel=TABLE,
    ),
]
PredictMissing = Annotated[
    str | None,
    typer.Option(
        "--missing",
        help="How to treat missing cells: error or impute. Default: as in the fit. impute fills in "
        "the medians of the fit.",
        rich_help_panel=TABLE,
    ),
]
Sep = Annotated[
    str | None,
    typer.Option(
        help="The separator of cells: , ; | or tab. Default: detected.", rich_help_panel=TABLE
    ),
]
Decimal = Annotated[
    str | None,
    typer.Option(help="The decimal mark: , or . Default: detected.", rich_help_panel=TABLE),
]
Encoding = Annotated[
    str | None,
    typer.Option(help="utf-8, utf-16, latin-1, ... Default: detected.", rich_help_panel=TABLE),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A setting of the method, as NAME=VALUE; repeatable. doxa methods METHOD lists them.",
        rich_help_panel=TRAINING,
    ),
]
Net = Annotated[
    str | None,
    typer.Option(
        help="Your own network, as module:builder; the builder is called with (inputs, outputs). "
        "Default: an MLP.",
        rich_help_panel=TRAINING,
    ),
]
SavedNet = Annotated[
    str | None,
    typer.Option(
        "--net",
        help="The network of a run that was fitted with --net, as module:builder. Other runs do "
        "not need it.",
    ),
]
Hidden = Annotated[
    str,
    typer.Option(
        help="Widths of the hidden layers of the default MLP: 50,50; '' for none.",
        rich_help_panel=TRAINING,
    ),
]
Members = Annotated[
    int | None, typer.Option(min=1, help="Number of members or chains.", rich_help_panel=TRAINING)
]
Epochs = Annotated[
    int | None,
    typer.Option(
        min=1, help="Epochs of optimisation: passes over the rows.", rich_help_panel=TRAINING
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Steps of optimisation, instead of epochs. Other stages of a method have their own "
        "lengths, which are added: burn-in and draws of a sampler, and 100 steps for the noise if "
        "rows are held out.",
        rich_help_panel=TRAINING,
    ),
]
Rate = Annotated[float | None, typer.Option(help="Learning rate.", rich_help_panel=TRAINING)]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Rows per step.", rich_help_panel=TRAINING)
]
Validation = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=0.9,
        help="Share of the rows held out for early stopping; 0 for none. Default: with methods "
        "that can overfit, each member holds out a different part, about a tenth.",
        rich_help_panel=TRAINING,
    ),
]
TestFile = Annotated[
    Path | None, typer.Option("--test", help="A table of held-out rows, to score the fit on.")
]
TestShare = Annotated[
    float | None,
    typer.Option(
        "--split",
        help="Share of the rows to hold out and to score the fit on; the seed chooses them.",
    ),
]
Calibrate = Annotated[
    str | None,
    typer.Option(
        help="Recalibrate predictions on rows held out for it. --calibrate alone means auto: "
        "temperature for classes, quantile for numbers. Others: vector, dirichlet, isotonic, "
        "histogram (classes); variance (numbers).",
    ),
]
Conformal = Annotated[
    float | None,
    typer.Option(
        help="Conformal intervals, or sets of classes, that contain the target with this "
        "probability: 0.9."
    ),
]
ConformalKind = Annotated[
    str | None,
    typer.Option(
        help="The conformal method. Numbers: split (default) or cqr; classes: lac (default) or aps."
    ),
]
CalibrationShare = Annotated[
    float | None,
    typer.Option(help="Share of the rows held out for --calibrate and --conformal. Default: 0.2."),
]
AllowStatus = Annotated[
    bool,
    typer.Option(
        "--allow-status",
        help="Exit with code 0 also if the status of the saved run is not ok (otherwise 4).",
    ),
]
Run = Annotated[Path, typer.Argument(help="A folder that doxa fit saved.", show_default=False)]
Device = Annotated[
    str | None, typer.Option(help="The device: cpu, cuda, cuda:1, ...", rich_help_panel=TRAINING)
]
Seed = Annotated[
    int,
    typer.Option(
        min=0,
        help="The random seed: the same seed gives the same result.",
        rich_help_panel=TRAINING,
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show log messages.")]


def listed(text: str) -> list[str]:
    """The values of an option that is written as a,b,c."""
    return [part.strip() for part in text.split(",") if part.strip()]
