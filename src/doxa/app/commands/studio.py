"""`doxa studio`: pages in a browser that show how posteriors behave."""

from __future__ import annotations

from typing import Annotated

import typer

from doxa.app.commands.terminal import err, log_to_terminal, out
from doxa.app.options import Verbose


def studio(
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port; 0 chooses a free one.")
    ] = 0,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")
    ] = True,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A further address of this server, as name:port: that of a tunnel. Repeatable."
        ),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Open the studio: functions that follow points which you click, in a browser.

    The server answers to this machine only, and to the person who opens the printed address. The
    address works once; the browser then has a session until the server ends (Ctrl-C).
    """
    from doxa.studio.server import serve

    log_to_terminal(verbose)

    def announce(address: str) -> None:
        out.print(address, highlight=False, soft_wrap=True)
        err.print("Ctrl-C ends the server")
        if browser:
            import webbrowser

            webbrowser.open(address)

    serve(port, allow_host or (), announce)
