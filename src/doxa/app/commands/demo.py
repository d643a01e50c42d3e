"""`doxa demo`: every method on toy data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from doxa.app.commands.terminal import log_to_terminal, out
from doxa.app.options import Seed, Verbose, listed


def demo(
    out_folder: Annotated[Path, typer.Option("--out", "-o", help="Where figures go.")] = Path(
        "demo"
    ),
    methods: Annotated[
        str, typer.Option(help="Panels of the first figure, as a,b,c; empty: every method.")
    ] = "",
    jobs: Annotated[
        int, typer.Option(min=0, help="Fits side by side, one thread each; 0: one a processor.")
    ] = 0,
    seed: Seed = 0,
    verbose: Verbose = False,
) -> None:
    """Every method on toy data: a table of scores and two figures."""
    from doxa.app import demo as demonstration
    from doxa.app import saved_runs
    from doxa.app.processes import cores

    log_to_terminal(verbose)
    saved_runs.check_place(out_folder)
    demonstration.run(out_folder, seed, out, jobs or cores(), listed(methods))
