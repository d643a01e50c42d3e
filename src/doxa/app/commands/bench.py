"""`doxa bench`: the standard tables of UCI regression, one command each."""

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
        typer.Argument(help="uci (standard splits) or gap (tested between the data)."),
    ],
    data: Annotated[
        Path | None, typer.Option(help="The folder of data sets; default: DOXA_DATA.")
    ] = None,
    sets: Annotated[str | None, typer.Option(help="Data sets, separated by commas.")] = None,
    methods: Annotated[str | None, typer.Option(help="Methods, separated by commas.")] = None,
    results: Annotated[
        Path, typer.Option("--out", "-o", help="The folder of results, one file per table.")
    ] = Path("benchmarks/results"),
    jobs: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 1,
    device: Device = None,
    seed: Seed = 0,
    show: Annotated[bool, typer.Option("--show", help="Only show what is known.")] = False,
    verbose: Verbose = False,
) -> None:
    """Compute a standard table, or go on with it: what is known is not computed again."""
    from doxa.app.bench import find

    log_to_terminal(verbose)
    names = [None if text is None else listed(text) for text in (sets, methods)]
    chosen = find(table)
    tasks = chosen.tasks(data, names[0], names[1], device, seed)
    run_table(chosen, None if show else tasks, results, jobs)


def run_table(chosen: Any, tasks: Sequence[Task] | None, results: Path, jobs: int = 1) -> None:
    """Compute the cells that are missing among the tasks, if any are given; show and publish."""
    from doxa.app.bench import compute, publish, store_of

    store = store_of(chosen, results)
    if tasks is not None:
        compute(tasks, store, jobs, lambda line: out.print(escape(line), highlight=False))
    for made in chosen.tables(store):
        table = made.rich()
        # Past the terminal's edge rather than cut: numbers that end in an ellipsis are no numbers.
        natural = Measurement.get(out, out.options.update(max_width=1000), table).maximum
        Console(file=out.file, width=max(natural, out.width)).print(table)
        for note in made.notes:
            out.print(f"• {escape(note)}", highlight=False, soft_wrap=True)
    written = publish(chosen, store, results)
    out.print(f"written to {', '.join(escape(str(path)) for path in written)}", soft_wrap=True)
