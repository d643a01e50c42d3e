"""`doxa bench`: the standard benchmark tables of UCI regression."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement

from doxa.app.commands.terminal import log_to_terminal, out
from doxa.app.options import Device, Seed, Verbose, listed

if TYPE_CHECKING:
    from doxa.app.bench import Task


def bench(
    table: Annotated[
        str,
        typer.Argument(
            help="The table: uci (standard splits) or gap (test rows in a gap of the training "
            "rows)."
        ),
    ],
    data: Annotated[
        Path | None, typer.Option(help="The folder of data sets. Default: $DOXA_DATA.")
    ] = None,
    sets: Annotated[
        str | None, typer.Option(help="Data sets, separated by commas. Default: all.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Methods, separated by commas. Default: all.")
    ] = None,
    results: Annotated[
        Path, typer.Option("--out", "-o", help="The folder of results, one file per table.")
    ] = Path("benchmarks/results"),
    jobs: Annotated[
        int, typer.Option(min=1, help="Number of processes, with one thread each.")
    ] = 1,
    device: Device = None,
    seed: Seed = 0,
    show: Annotated[
        bool, typer.Option("--show", help="Show the stored results; compute nothing.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Compute a benchmark table.

    Results are stored, and a stored result is not computed again: after an interruption the same
    command continues.
    """
    from doxa.app.bench import find

    log_to_terminal(verbose)
    names = [None if text is None else listed(text) for text in (sets, methods)]
    chosen = find(table)
    tasks = chosen.tasks(data, names[0], names[1], device, seed)
    run_table(chosen, None if show else tasks, results, jobs)


def run_table(chosen: Any, tasks: Sequence[Task] | None, results: Path, jobs: int = 1) -> None:
    """Compute the missing cells of the tasks, if any are given; show and write the tables."""
    from doxa.app.bench import compute, publish, store_of
    from doxa.driver.processes import is_first

    store = store_of(chosen, results)
    if tasks is not None:
        compute(tasks, store, jobs, lambda line: out.print(escape(line), highlight=False))
    if not is_first():  # of several processes, one prints and writes
        return
    for made in chosen.tables(store):
        table = made.rich()
        # Wider than the terminal rather than truncated: a number must not end in an ellipsis.
        natural = Measurement.get(out, out.options.update(max_width=1000), table).maximum
        Console(file=out.file, width=max(natural, out.width)).print(table)
        for note in made.notes:
            out.print(f"• {escape(note)}", highlight=False, soft_wrap=True)
    written = publish(chosen, store, results)
    out.print(f"written to {', '.join(escape(str(path)) for path in written)}", soft_wrap=True)
