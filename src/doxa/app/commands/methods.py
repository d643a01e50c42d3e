"""`doxa methods`: the table of methods."""

from __future__ import annotations

from typing import Annotated

import typer

from doxa.app.commands.terminal import out


def list_methods(
    name: Annotated[
        str | None, typer.Argument(help="The name of one method, to show its settings.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table of the README, in Markdown.")
    ] = False,
) -> None:
    """List the methods, or show one method and its settings."""
    import doxa
    from doxa.app import fitting

    if markdown:
        typer.echo(doxa.methods().markdown())
    elif name is None:
        fitting.show_methods(out)
    else:
        fitting.show_method(name, out)
