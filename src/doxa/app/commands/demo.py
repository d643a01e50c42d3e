"""`doxa demo`: every method on toy data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from doxa.app.commands.terminal import log_to_terminal, out
from doxa.app.options import Seed, Verbose, listed


def demo(
    out_folder: Annotated[
        Path, typer.Option("--out", "-o", help="The folder of the figures.")
    ] = Path("demo"),
    methods: Annotated[
        str,
        typer.Option(
            help="The methods of the first figure, separated by commas. Default: every method."
        ),
    ] = "",
    jobs: Annotated[
        int,
        typer.Option(
            min=0, help="Number of parallel fits, with one thread each; 0: one per processor."
        ),
    ] = 0,
    seed: Seed = 0,
    verbose: Verbose = False,
) -> None:
    """Fit every method to toy data: tables of scores and two figures."""
    from doxa.app import demo as demonstration
    from doxa.app import fitting
    from doxa.processes import cores

    log_to_terminal(verbose)
    fitting.check_place(out_folder)
    demonstration.run(out_folder, seed, out, jobs or cores(), listed(methods))
