"""The `doxa` command. Each subcommand is a file in `commands/`; this module puts them together.

A `DoxaError` is printed as one line on standard error, with exit code 2. Any other exception is a
bug of doxa and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from doxa.app.commands import (
    active,
    bench,
    calibrate,
    compare,
    demo,
    design,
    evidence,
    fit,
    methods,
    predict,
    report,
    serve,
    studio,
    watch,
)
from doxa.app.commands.terminal import err, out
from doxa.errors import DoxaDeprecationWarning, DoxaError, MethodError

RESUMABLE = {
    "fit": "; the same command continues from the last checkpoint",
    "predict": "; with a folder for --out, the same command continues",
    "bench": "; the same command continues",
    "design": "; the same command continues after the last answer",
    "active": "; nothing is lost: the same command continues",
}


@contextmanager
def _shown_deprecations() -> Iterator[None]:
    """Print a deprecated name as one line on standard error. Python does not show it by default."""
    others = warnings.showwarning

    def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, DoxaDeprecationWarning):
            err.print(
                f"[yellow]warning:[/] {escape(str(message))}", soft_wrap=True, highlight=False
            )
        else:
            others(message, category, *where, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("always", DoxaDeprecationWarning)
        warnings.showwarning = show
        yield


# Commands that several processes may run together: one of them prints and writes.
BY_SEVERAL = ("fit", "compare", "bench", "active", "methods")


def _check_launched(given: Sequence[str]) -> None:
    """An error where `torchrun` has started several processes of a command of one."""
    if not {"RANK", "WORLD_SIZE"} <= {*os.environ}:  # not by torchrun; this imports no torch
        return
    from doxa.driver.processes import launched

    name = next((word for word in given if word[:1] != "-"), "")
    if launched() is None or not name:
        return
    if any(word.split("=")[0] == "--jobs" for word in given):
        raise MethodError(
            f"doxa {name} --jobs starts processes of its own, and torchrun has started "
            "several: choose one of them, --jobs without torchrun"
        )
    if name not in BY_SEVERAL:
        raise MethodError(
            f"doxa {name} runs in one process: start it without torchrun; the commands that "
            f"several processes share are {', '.join(BY_SEVERAL)}"
        )


def _print_error(error: DoxaError) -> None:
    message = " ".join(str(error).split())
    err.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)


def _is_first() -> bool:
    """Whether this process prints errors: process 0 of several, or the only one."""
    if "WORLD_SIZE" not in os.environ:
        return True
    from doxa.driver.processes import is_first

    return is_first()


@contextmanager
def _by_all_processes() -> Iterator[None]:
    """A context for a command that all launched processes run: process 0 prints, and an error in
    one of them reaches the others. Process 0 prints it before any of them ends, because the
    launcher then ends the rest. An exit code is no error."""
    from doxa.driver.processes import opened

    quiet = out.quiet, err.quiet
    out.quiet = err.quiet = not _is_first()
    code: typer.Exit | None = None
    printed: list[BaseException] = []

    def tell(error: BaseException) -> None:
        if isinstance(error, DoxaError):
            _print_error(error)
            printed.append(error)

    try:
        with opened(tell):
            try:
                yield
            except typer.Exit as asked:
                code = asked
    except DoxaError as error:
        if error not in printed:
            _print_error(error)
        raise typer.Exit(2) from None
    finally:
        out.quiet, err.quiet = quiet
    if code is not None:
        raise code


class _OneLineErrors(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        ctx.meta["doxa.given"] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _shown_deprecations():
                _check_launched(ctx.meta["doxa.given"])
                if "WORLD_SIZE" not in os.environ:
                    return super().invoke(ctx)
                with _by_all_processes():
                    return super().invoke(ctx)
        except DoxaError as error:
            if _is_first():  # of several processes: all have this error
                _print_error(error)
            raise typer.Exit(2) from None
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            err.print("[bold red]error:[/] the name of a file or folder is too long")
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            err.print("interrupted" + RESUMABLE.get(ctx.invoked_subcommand, ""))
            raise typer.Exit(130) from None


class _AutoCalibrate(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """`--calibrate` without a value means auto."""
        full = []
        for arg, following in zip(args, [*args, "-"][1:], strict=True):
            full += [arg, "auto"] if arg == "--calibrate" and following[:1] == "-" else [arg]
        return super().parse_args(ctx, full)


def _version(asked: bool) -> None:
    if asked:
        import doxa

        out.print(f"doxa {doxa.__version__}", highlight=False)
        raise typer.Exit


app = typer.Typer(
    cls=_OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def doxa_command(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Bayesian deep learning: fit a network, predict with uncertainty, and compare methods."""


app.command(cls=_AutoCalibrate)(fit.fit)
app.command()(predict.predict)
app.command()(serve.serve)
app.command()(calibrate.calibrate)
app.command()(report.report)
app.command()(watch.watch)
app.command()(compare.compare)
app.command()(evidence.evidence)
app.command()(bench.bench)
app.command()(design.design)
app.add_typer(active.app, name="active")
app.command(name="methods")(methods.list_methods)
app.command()(demo.demo)
app.command()(studio.studio)


def main() -> None:
    app()
