"""`doxa studio`: pages in a browser that show how posteriors behave."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from doxa.app.commands.terminal import err, log_to_terminal, out
from doxa.app.options import SavedNet, Verbose
from doxa.errors import DataError, StoreError

if TYPE_CHECKING:
    from doxa.studio.server import Room


def studio(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Saved runs, to open in a room of their own.", show_default=False),
    ] = None,
    tables: Annotated[
        list[Path] | None,
        typer.Option(
            "--table", help="A table for the runs; that of a fit is recognised. Repeatable."
        ),
    ] = None,
    sessions: Annotated[
        list[Path] | None,
        typer.Option("--label", help="A session of doxa active, to label in. Repeatable."),
    ] = None,
    net: SavedNet = None,
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
    """Open the studio in a browser: functions that follow points which you click, and saved runs.

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

    opened = rooms(runs or [], tables or [], sessions or [], net)
    try:
        serve(port, allow_host or (), announce, opened)
    finally:
        for room in opened:
            room.close()  # also where no server could start


def rooms(
    runs: list[Path], tables: list[Path], sessions: list[Path], net: str | None
) -> list[Room]:
    """The rooms of what was named; a name of nothing is an error before the server starts."""
    from doxa.app.studio.uploads import Uploads
    from doxa.studio.server import Room

    for path in (*runs, *sessions):
        if not path.is_dir():
            raise StoreError(f"{path} is no folder: give the folder of a run or of a session")
    for path in tables:
        if not path.is_file():
            raise DataError(f"--table {path}: there is no such file")
    made = []
    if runs:
        uploads = Uploads()
        given = {
            "runs": [str(path.absolute()) for path in runs],
            "tables": [str(path.absolute()) for path in tables],
            "uploads": str(uploads.folder), "net": net,
        }  # fmt: skip
        posts = {"/upload": uploads.receive}
        made.append(Room("run", "doxa.app.studio.runs", given, posts, uploads.close))
    elif tables:
        raise DataError("--table is for runs: name a run, too")
    if sessions:
        given = {"sessions": [str(path.absolute()) for path in sessions], "net": net}
        made.append(Room("label", "doxa.app.studio.label", given))
    return made
