"""`doxa design`: the working-memory experiment, with a person or a simulated one.

The experiment shows one list of digits at a time and asks for the digits. A session is kept in a
folder. Every outcome is written before the next list is shown. A session that was killed continues
with a new list, because the person may have seen the old one.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from doxa.app.commands.terminal import err, out
from doxa.app.options import Seed
from doxa.errors import DataError, MethodError, StoreError

if TYPE_CHECKING:
    from doxa.decide.design import Study

FILE = "session.json"
BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass
class Session:
    """One session: its folder, settings and trials.

    settings: fixed when the session begins. trials: {"length", "outcome", "shown", "answer"} of
    each trial. shows: the number of lists shown so far, answered or not.
    """

    folder: Path
    settings: dict[str, Any]
    trials: list[dict[str, Any]] = field(default_factory=list)
    shows: int = 0

    @classmethod
    def open(cls, folder: Path, settings: dict[str, Any]) -> Session:
        """A new session, or the one in the folder if its settings are the same."""
        from doxa.tables.files import check_name

        check_name(folder)
        place = folder / FILE
        if not place.exists():
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise StoreError(f"{folder} holds something else; choose a new or empty folder")
            session = cls(folder, settings)
            session.write()
            return session
        try:
            kept = json.loads(place.read_text(encoding="utf-8"))
            session = cls(folder, dict(kept["settings"]), list(kept["trials"]), int(kept["shows"]))
            for trial in session.trials:
                if trial["outcome"] not in (0, 1) or type(trial["length"]) is not int:
                    raise ValueError(f"{trial} is no trial")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{place} cannot be read as a session: {error}") from error
        for name, value in settings.items():
            had = session.settings.get(name)
            if value != had:
                raise MethodError(
                    f"the session in {folder} was started with {name} = {had}, not {value}; "
                    "use the same options, or start a new session in another folder"
                )
        return session

    def write(self) -> None:
        from doxa import store

        kept = {"settings": self.settings, "trials": self.trials, "shows": self.shows}
        store.write_text(self.folder / FILE, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")

    def study(self) -> Study:
        """The study, with the posterior after the trials so far."""
        from doxa.decide.design import Study, working_memory

        mean, std = self.settings["prior"]
        study = Study(working_memory(mean, std, self.settings["longest"]))
        for trial in self.trials:
            study.tell(trial["length"], trial["outcome"])
        return study

    def show(self, length: int) -> str:
        """New digits; the list is counted as shown before it is returned."""
        import torch

        from doxa.decide.design.draws import source, uniform

        self.shows += 1
        self.write()
        like = torch.zeros(())
        u = uniform((length,), like, source("cpu", "digits", self.settings["seed"], self.shows))
        return "".join(str(int(10 * x)) for x in u.tolist())

    def tell(self, length: int, outcome: int, shown: str | None, answer: str | None) -> None:
        trial = {"length": length, "outcome": outcome, "shown": shown, "answer": answer}
        self.trials.append(trial)
        self.write()

    def simulated(self, length: int) -> int:
        """The outcome for a simulated person with the span of the settings."""
        import torch

        from doxa.decide.design.draws import source, uniform

        truth, trial = self.settings["simulate"], len(self.trials)
        chance = torch.sigmoid(torch.tensor(truth - length))
        u = uniform((), torch.zeros(()), source("cpu", "person", self.settings["seed"], trial))
        return int(u < chance)


def typed_outcome(answer: str, shown: str) -> int:
    """1 if the answer repeats the digits, else 0; an error if it holds anything but digits."""
    digits = "".join(character for character in answer if character not in " ,.-")
    if not digits or not digits.isascii() or not digits.isdigit():
        raise DataError(
            f"{answer!r} is no list of digits: type the digits you saw, such as 4 0 2, or q to stop"
        )
    return int(digits == shown)


def reported_outcome(answer: str) -> int:
    """1 for yes, 0 for no; an error for anything else."""
    reply = answer.strip().lower()
    if reply in ("y", "yes", "1"):
        return 1
    if reply in ("n", "no", "0"):
        return 0
    raise DataError(
        f"{answer!r} is not y or n: type y if all digits were right, n if not, or q to stop"
    )


def picture(study: Study, width: int = 40) -> str:
    """The posterior as a row of blocks, from the shortest list to the longest."""
    import torch

    lengths = study.candidates
    low, high = float(lengths.min()) - 0.5, float(lengths.max()) + 0.5
    edges = torch.linspace(low, high, width + 1, dtype=torch.float64)
    mean, std = float(study.posterior.mean), float(study.posterior.std)
    smooth = 0.5 * (edges[1] - edges[0]) + 0.15 * std  # quadrature nodes are points
    centres = (edges[1:] + edges[:-1]) / 2
    theta, weight = study.posterior.theta.double(), study.posterior.weight.double()
    height = (weight * (-0.5 * ((centres[:, None] - theta) / smooth).square()).exp()).sum(1)
    level = (height / height.max() * (len(BLOCKS) - 1)).round().long().tolist()
    return f"{''.join(BLOCKS[i] for i in level)}  {mean:.2f} ± {std:.2f}"


AGAIN = "stopped; the same command continues from here"


def design(
    folder: Annotated[
        Path, typer.Argument(help="The folder of the session; an existing session continues.")
    ],
    trials: Annotated[int, typer.Option(min=1, help="Total number of lists of digits.")] = 12,
    simulate: Annotated[
        float | None,
        typer.Option(help="Simulate a person with this memory span instead of asking."),
    ] = None,
    by_hand: Annotated[
        bool,
        typer.Option(
            "--by-hand", help="You read the lists to another person and enter y or n for each."
        ),
    ] = False,
    prior: Annotated[
        str, typer.Option(help="The prior of the span: mean and standard deviation.")
    ] = "7,2",
    longest: Annotated[
        int, typer.Option(min=2, max=40, help="The length of the longest list.")
    ] = 15,
    pace: Annotated[
        float, typer.Option(min=0, help="Seconds per digit that a list is shown.")
    ] = 0.8,
    seed: Seed = 0,
) -> None:
    """Measure a working-memory span by Bayesian experimental design.

    How many digits can you repeat? Each list has the length with the largest expected information
    gain about your span, and the posterior of the span is shown after each answer. Every answer is
    saved: after an interruption the same command continues.
    """

    if simulate is not None and by_hand:
        raise MethodError("--simulate and --by-hand exclude each other: give one of them")
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
        result = "right" if outcome else "wrong"
        line = f"{len(session.trials):3}. {length:2} digits, {result:5}"
        out.print(f"{line:23}{picture(study)}", highlight=False, soft_wrap=True)
    mean, std = float(study.posterior.mean), float(study.posterior.std)
    out.print(
        f"span {mean:.2f} ± {std:.2f}: lists of {mean:.0f} digits are repeated correctly about "
        f"half the time; saved in {escape(str(folder))}", highlight=False, soft_wrap=True,
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
    """Show one list and save its outcome; None if the person stops."""

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
            outcome = reported_outcome(answer) if way == "by hand" else typed_outcome(answer, shown)
        except DataError as error:
            err.print(escape(str(error)), highlight=False, soft_wrap=True)
            continue
        session.tell(length, outcome, shown, answer)
        return outcome


def _flash(digits: str, seconds: float) -> None:
    """Show the digits on a separate screen for a time; as a line if the output is a pipe."""
    if not out.is_terminal:
        out.print(f"remember: {digits}", highlight=False, soft_wrap=True)
        return
    with out.screen() as screen:
        screen.update(f"\n\n    remember\n\n    {digits}")
        time.sleep(seconds)
