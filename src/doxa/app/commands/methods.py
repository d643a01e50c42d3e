"""`doxa methods`: the table of methods."""

from __future__ import annotations

from typing import Annotated

import typer

from doxa.app.commands.terminal import out


def list_methods(
    name: Annotated[str | None, typer.Argument(help="One method, with its settings.")] = None,
) -> None:
    """The table of methods, or one method and its settings."""
    from doxa.app import settings

    if name is None:
        settings.show_methods(out)
    else:
        settings.show_method(name, out)
