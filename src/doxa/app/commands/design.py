"""`doxa design`: the working-memory experiment, with a person or a simulated one."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from doxa.app.commands.terminal import err, out
from doxa.app.options import Seed
from doxa.errors import DataError, MethodError

if TYPE_CHECKING:
    from doxa.app.span import Session

AGAIN = "stopped; the same command goes on from here"


def design(
    folder: Annotated[
        Path, typer.Argument(help="Where the session is kept; it goes on if it is there.")
    ],
    trials: Annotated[int, typer.Option(min=1, help="Lists of digits in all.")] = 12,
    simulate: Annotated[
        float | None, typer.Option(help="A simulated person with this span, in place of you.")
    ] = None,
    by_hand: Annotated[
        bool, typer.Option("--by-hand", help="You read the lists out, and say who was right.")
    ] = False,
    prior: Annotated[str, typer.Option(help="Mean and std of the span beforehand.")] = "7,2",
    longest: Annotated[int, typer.Option(min=2, max=40, help="The longest list.")] = 15,
    pace: Annotated[float, typer.Option(min=0, help="Seconds a digit is shown.")] = 0.8,
    seed: Seed = 0,
) -> None:
    """How many digits can you repeat? Lists whose length tells most about that, one after the
    other: the posterior of your span narrows. Every answer is kept; the same command goes on."""
    from doxa.app.span import Session, picture

    if simulate is not None and by_hand:
        raise MethodError("--simulate needs nobody to read lists out: leave --by-hand away")
    if simulate is not None and not math.isfinite(simulate):
        raise MethodError(f"--simulate takes a finite span, such as 7.5, not {simulate}")
    way = "simulated" if simulate is not None else "by hand" if by_hand else "typed"
    settings = {
        "experiment": "working memory", "prior": _prior(prior), "longest": longest, "way": way,
        "simulate": simulate, "seed": seed,
    }  # fmt: skip
    session = Session.open(folder, settings)
    study = session.study()
    done = len(session.trials)
    note = f", {done} done" if done else ""
    out.print(f"working memory: {trials} lists of digits{note}", highlight=False)
    out.print(f"{'':23}{picture(study)}", highlight=False, soft_wrap=True)
    while len(session.trials) < trials:
        gains = study.gains()
        length = int(gains.best_design)
        outcome = _trial(session, length, way, pace)
        if outcome is None:
            out.print(AGAIN)
            return
        study.tell(length, outcome)
        word = "right" if outcome else "wrong"
        told = f"{len(session.trials):3}. {length:2} digits, {word:5}"
        out.print(f"{told:23}{picture(study)}", highlight=False, soft_wrap=True)
    mean, std = float(study.belief.mean), float(study.belief.std)
    out.print(
        f"span {mean:.2f} ± {std:.2f}: lists of {mean:.0f} digits come back right about half the "
        f"time; kept in {escape(str(folder))}", highlight=False, soft_wrap=True,
    )  # fmt: skip


def _prior(text: str) -> list[float]:
    try:
        mean, std = (float(part) for part in text.split(","))
    except ValueError:
        mean, std = 0.0, 0.0
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise MethodError(
            f"--prior takes a finite mean and a finite, positive std, such as 7,2, not {text!r}"
        )
    return [mean, std]


def _trial(session: Session, length: int, way: str, pace: float) -> int | None:
    """One list: its outcome, which is then on disk; None where the person stops."""
    from doxa.app.span import judged, said

    if way == "simulated":
        outcome = session.simulated(length)
        session.tell(length, outcome, None, None)
        return outcome
    shown = session.show(length)
    spaced = " ".join(shown)
    if way == "by hand":
        out.print(f"read out: {spaced}", highlight=False, soft_wrap=True)
    else:
        _flash(spaced, pace * length)
    ask = "all right, in order? (y/n) " if way == "by hand" else f"the {length} digits: "
    while True:
        try:
            answer = out.input(ask)
        except EOFError:
            return None
        if answer.strip().lower() in ("q", "quit"):
            return None
        try:
            outcome = said(answer) if way == "by hand" else judged(answer, shown)
        except DataError as error:
            err.print(escape(str(error)), highlight=False, soft_wrap=True)
            continue
        session.tell(length, outcome, shown, answer)
        return outcome


def _flash(digits: str, seconds: float) -> None:
    """Shown on a screen of its own, which goes away; on a pipe, as a line."""
    if not out.is_terminal:
        out.print(f"remember: {digits}", highlight=False, soft_wrap=True)
        return
    with out.screen() as screen:
        screen.update(f"\n\n    remember\n\n    {digits}")
        time.sleep(seconds)
