"""`doxa active`: active learning with a person who labels the chosen rows.

Of several processes (`torchrun`), all fit and choose rows in `next`; the rest is done by one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from doxa.app.commands.terminal import (
    log_to_terminal,
    out,
    plan_of,
    print_table,
    say_schema,
    table_of,
)
from doxa.app.options import (
    Categorical,
    Decimal,
    Device,
    Drop,
    Encoding,
    Hidden,
    Index,
    Likelihood,
    Members,
    Missing,
    Net,
    Numeric,
    Rate,
    SavedNet,
    Seed,
    Sep,
    Settings,
    Steps,
    Target,
    Verbose,
)  # fmt: skip
from doxa.errors import DataError

app = typer.Typer(
    no_args_is_help=True,
    help="Active learning: choose the rows whose labels are most informative, and enter labels.",
)

Folder = Annotated[Path, typer.Argument(help="The folder of the session.", show_default=False)]
Data = Annotated[
    Path,
    typer.Argument(
        help="A CSV or Parquet file, a .npy or .npz file of images, or a folder of images.",
        show_default=False,
    ),
]
Count = Annotated[int | None, typer.Option(min=1, help="Number of rows to label.")]


@app.command()
def start(
    data: Data,
    target: Target,
    out_folder: Annotated[Path, typer.Option("--out", "-o", help="A folder for the session.")],
    classes: Annotated[
        str,
        typer.Option(help="The possible labels: cat,dog. Default: the labels in the table."),
    ] = "",
    method: Annotated[
        str, typer.Option("--method", "-m", help="The method to fit; doxa methods lists them.")
    ] = "deep-ensemble",
    by: Annotated[
        str,
        typer.Option(
            help="The acquisition function: bald, max_entropy, variation_ratio, mean_std, margin, "
            "predictive_variance, batch_bald or random."
        ),
    ] = "bald",
    count: Annotated[int, typer.Option(min=1, help="Number of rows to label per round.")] = 10,
    likelihood: Likelihood = None,
    index: Index = None,
    drop: Drop = None,
    categorical: Categorical = None,
    numeric: Numeric = None,
    missing: Missing = "error",
    sep: Sep = None,
    decimal: Decimal = None,
    encoding: Encoding = None,
    settings: Settings = None,
    net: Net = None,
    hidden: Hidden = "50",
    members: Members = None,
    steps: Steps = None,
    lr: Rate = None,
    device: Device = None,
    seed: Seed = 0,
    verbose: Verbose = False,
) -> None:
    """Start a session.

    DATA is a table whose target column is empty in some rows, or absent; or images. Images are a
    .npy or .npz file of shape [N, H, W] or [N, H, W, 3], or a folder of PNG, JPEG or .npy files of
    one size. Labels in the table are used.
    """
    from doxa.app.active.session import begin
    from doxa.driver.processes import is_first

    log_to_terminal(verbose)
    if not is_first():
        return
    plan = plan_of(net, hidden, members, None, steps, lr, None, None, device, seed)
    asked = table_of(
        target, likelihood, index, drop, categorical, numeric, missing, sep, decimal, encoding
    )
    labels = [word for word in classes.split(",") if word.strip()]
    session = begin(out_folder, data, asked, labels, method, settings or (), plan, by, count)
    if session.pool.images is None:
        say_schema(session.pool.schema, len(session.pool.x))
    known = len(session.book.answers)
    where = escape(str(out_folder))
    out.print(
        f"{len(session.pool.x)} rows, {known} with a label; next: doxa active next {where}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


@app.command(name="next")
def next_rows(
    folder: Folder, count: Count = None, net: SavedNet = None, verbose: Verbose = False
) -> None:
    """Choose the next rows to label, and write them to FOLDER/to_label.csv.

    New rows are chosen only when all earlier ones have a label; until then, the open rows are
    written again. A session that was started with --net needs the same --net here: a module that
    is named in a folder is never imported.
    """
    from doxa.app.active.session import go_on

    log_to_terminal(verbose)
    session = go_on(folder, net)
    how = session.ask(count)
    out.print(
        f"{len(session.book.asked)} rows to label, {how}: fill in "
        f"{escape(repr(session.pool.schema.target))} in {escape(str(session.sheet))}, then: doxa "
        f"active label {escape(str(folder))}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


@app.command()
def label(
    folder: Folder,
    answers: Annotated[
        Path | None, typer.Argument(help="The file with the labels. Default: FOLDER/to_label.csv.")
    ] = None,
    answer: Annotated[
        list[str] | None, typer.Option(help="A label as ROW=LABEL, instead of a file; repeatable.")
    ] = None,
    partial: Annotated[
        bool,
        typer.Option("--partial", help="Accept a file with some labels; the other rows stay open."),
    ] = False,
    correct: Annotated[
        bool, typer.Option("--correct", help="Replace labels that were entered before.")
    ] = False,
) -> None:
    """Enter labels, all of them or none: an error names the row that is wrong."""
    from doxa.app.active.session import resume
    from doxa.driver.processes import is_first

    if not is_first():
        return
    session = resume(folder)
    if answer and answers is not None:
        raise DataError("give a file or --answer, not both")
    given = session.pairs(answer) if answer else session.read(answers, correct)
    taken = session.take(given, partial, correct)
    book = session.book
    then = f"{len(book.asked)} still open" if book.asked else "none open"
    out.print(f"{taken} labels entered, {len(book.answers)} in all, {then}", highlight=False)


@app.command()
def undo(
    folder: Folder,
    row: Annotated[
        str | None, typer.Argument(help="The row. Default: the last one with a label.")
    ] = None,
) -> None:
    """Take back a label, so that its row is open again; not if a fit has used it."""
    from doxa.app.active.session import resume

    session = resume(folder)
    name, label = session.undo(row)
    out.print(
        escape(f"{session.pool.id_name} {name} is open again; its label was {label}"),
        highlight=False, soft_wrap=True,
    )  # fmt: skip


@app.command()
def status(folder: Folder) -> None:
    """Show the number of labels, the open rows, and the score of each round."""
    from doxa.app.active.session import resume
    from doxa.driver.processes import is_first

    if not is_first():
        return
    session = resume(folder)
    book, schema = session.book, session.pool.schema
    out.print(
        f"{len(book.answers)} of {book.rows} rows have a label, {len(book.asked)} wait for one, "
        f"{len(book.free)} have not been chosen",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if schema.classes is not None:
        given = list(book.answers.values())
        counts = ", ".join(f"{c} {given.count(c)}" for c in schema.classes)
        out.print(escape(f"labels: {counts}"), highlight=False, soft_wrap=True)
    if book.asked:
        names = ", ".join(session.pool.places[row] for row in book.asked[:12])
        more = ", …" if len(book.asked) > 12 else ""
        out.print(escape(f"open: {names}{more}"), highlight=False, soft_wrap=True)
    if book.rounds:
        columns = list(dict.fromkeys(name for found in book.rounds for name in found))
        table = Table(*columns)
        for found in book.rounds:
            table.add_row(*(f"{found[c]:.4g}" if c in found else "" for c in columns))
        print_table(out, table)
