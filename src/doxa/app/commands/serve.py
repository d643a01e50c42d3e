"""`doxa serve`: a saved run as a server on this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from doxa.app.commands.terminal import err, log_to_terminal, out
from doxa.app.options import Run, SavedNet, Verbose
from doxa.errors import MethodError

if TYPE_CHECKING:
    from doxa.http import Limits

LIMITS = "Limits"


@dataclass(frozen=True)
class _Served:
    """What each process of a server needs."""

    run: Path
    net: str | None
    host: str
    port: int
    token: str | None
    exact: bool
    wait: float
    threads: int
    drain: float
    limits: Limits
    verbose: bool


def serve(
    run: Run,
    host: Annotated[
        str, typer.Option(help="The address. Any but the loopback address needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="DOXA_TOKEN",
            show_envvar=True,
            help="What a client sends as Authorization: Bearer TOKEN. Rather set the variable: "
            "others on this machine can see the options of a process.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that answer.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch, per process.")] = 1,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Predict each request by itself: the same request has the same bits in its "
            "answer, whatever else is asked. Default: requests that come together are predicted "
            "together, and differ by rounding.",
        ),
    ] = False,
    wait: Annotated[
        float, typer.Option(min=0, max=1000, help="Milliseconds for requests to come together.")
    ] = 2.0,
    max_bytes: Annotated[
        int, typer.Option(min=1, help="The bytes of a body.", rich_help_panel=LIMITS)
    ] = 8 << 20,
    max_rows: Annotated[
        int, typer.Option(min=1, help="The rows of a request.", rich_help_panel=LIMITS)
    ] = 16_384,
    max_waiting: Annotated[
        int,
        typer.Option(
            min=1, help="Requests at a time, per process; then 429.", rich_help_panel=LIMITS
        ),
    ] = 64,
    deadline: Annotated[
        float,
        typer.Option(min=0.001, help="Seconds to the answer; then 504.", rich_help_panel=LIMITS),
    ] = 30.0,
    drain: Annotated[
        float,
        typer.Option(
            min=1, help="Seconds, once it is stopped, for requests that have begun.",
            rich_help_panel=LIMITS,
        ),
    ] = 30.0,
    net: SavedNet = None,
    verbose: Verbose = False,
) -> None:  # fmt: skip
    """Answer requests for predictions over HTTP, until it is stopped.

    POST /predict takes rows as JSON or Arrow and answers with the columns of doxa predict;
    GET /schema has the columns that it wants, and GET /health the status of the run.
    SIGTERM or Ctrl-C: requests that have begun are finished, then it ends with 0.
    """
    from doxa import http

    log_to_terminal(verbose)
    http.import_server()
    private = http.is_loopback(host)
    if token is not None:
        http.bearer(token)
    if not private and token is None:
        raise MethodError(
            f"--host {host} can be reached from other machines, and needs a token: set DOXA_TOKEN, "
            "or keep to the loopback address"
        )
    limits = http.Limits(
        body=max_bytes, rows=max_rows, waiting=max_waiting, seconds=deadline
    )  # fmt: skip
    listening = http.listen(host, port)
    port = int(listening.getsockname()[1])
    served = _Served(
        run, net, host, port, token, exact, wait / 1000, threads, drain, limits, verbose
    )  # fmt: skip
    where = f"http://{f'[{host}]' if ':' in host.strip('[]') else host}:{port}"
    if not private:
        err.print(
            "[yellow]warning:[/] there is no TLS: token and rows can be read on the way. Put a "
            "proxy with TLS before it", soft_wrap=True,
        )  # fmt: skip
    try:
        if jobs == 1:
            _answer(served, listening, where)
        else:
            _answer_in_processes(served, listening, where, jobs)
    finally:
        listening.close()
    err.print("the server has ended")


def _answer(served: _Served, listening: socket.socket, where: str | None) -> None:
    """Load the run and answer, in this process; `where` is printed once requests are accepted."""
    from doxa import http
    from doxa.app.fitting import load_run
    from doxa.app.serve import application
    from doxa.app.serve.batching import Batcher

    posterior, schema = load_run(served.run, served.net)
    batcher = Batcher(posterior, schema, served.exact, served.wait, threads=served.threads)
    private = http.is_loopback(served.host)
    hosts = http.loopback_hosts(served.host, served.port) if private else None
    may = None if served.token is None else http.bearer(served.token, ("/health",))
    name = served.run.resolve().name
    app = application(posterior, schema, name, batcher, served.limits, hosts, may)
    if where is not None:
        out.print(
            f"{escape(str(served.run))} is served at {where}", soft_wrap=True, highlight=False
        )
    http.serve(app, listening, served.drain)
    batcher.close(1.0)  # nobody waits for what is still computed


def _answer_in_processes(served: _Served, listening: socket.socket, where: str, jobs: int) -> None:
    """The same in several processes, which accept from one socket. One that fails ends all."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_answer_apart, args=(served, listening), daemon=False)
        for _ in range(jobs)
    ]
    ended = threading.Event()

    def end(*_: Any) -> None:
        ended.set()

    before = {n: signal.signal(n, end) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        for process in processes:
            process.start()
        out.print(
            f"{escape(str(served.run))} is served at {where}, by {jobs} processes",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
        while not ended.wait(0.2) and all(process.is_alive() for process in processes):
            pass
        failed = not ended.is_set()
        for process in processes:
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
        for process in processes:
            process.join(served.drain + 5)
            if process.is_alive():
                process.kill()
                process.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if failed:
        err.print("[bold red]error:[/] a process of the server has ended by itself")
        raise typer.Exit(1)


def _answer_apart(served: _Served, listening: socket.socket) -> None:
    from doxa.processes import follow_parent

    follow_parent()
    log_to_terminal(served.verbose)
    _answer(served, listening, None)
