"""`doxa design`: the working-memory experiment, with a person or a simulated one.

A session of the working-memory experiment in a folder: one person, one list of digits at a time.

Every outcome is on disk, whole, before the next list is shown; a session that was killed goes on
with a new list, since the old one may have been seen.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from doxa import store
from doxa.app.commands.terminal import err, out
from doxa.app.options import Seed
from doxa.app.tables import check_name
from doxa.decide.design import Study, working_memory
from doxa.decide.design.draws import source, uniform
from doxa.errors import DataError, MethodError, StoreError

FILE = "session.json"
BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass
class Session:
    """settings: who and how, fixed when the session begins. trials: {"length", "outcome", "shown",
    "answer"} of each. shows: lists shown so far, answered or not."""

    folder: Path
    settings: dict[str, Any]
    trials: list[dict[str, Any]] = field(default_factory=list)
    shows: int = 0

    @classmethod
    def open(cls, folder: Path, settings: dict[str, Any]) -> Session:
        """A new one, or the one that the folder holds, if it is of the same kind."""
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
                    f"the session in {folder} was begun with {name} = {had}, not {value}; go on "
                    "with the same options, or begin another in a new folder"
                )
        return session

    def write(self) -> None:
        kept = {"settings": self.settings, "trials": self.trials, "shows": self.shows}
        store.write_text(self.folder / FILE, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")

    def study(self) -> Study:
        """What is believed after the trials so far."""
        mean, std = self.settings["prior"]
        study = Study(working_memory(mean, std, self.settings["longest"]))
        for trial in self.trials:
            study.tell(trial["length"], trial["outcome"])
        return study

    def show(self, length: int) -> str:
        """New digits, remembered as shown before they are."""
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
        """What a person with the span of the settings does."""
        truth, trial = self.settings["simulate"], len(self.trials)
        chance = torch.sigmoid(torch.tensor(truth - length))
        u = uniform((), torch.zeros(()), source("cpu", "person", self.settings["seed"], trial))
        return int(u < chance)


def judged(answer: str, shown: str) -> int:
    """1 where the digits were repeated; an answer that holds anything but digits is refused."""
    digits = "".join(character for character in answer if character not in " ,.-")
    if not digits or not digits.isascii() or not digits.isdigit():
        raise DataError(
            f"{answer!r} is no list of digits: type the digits you saw, such as 4 0 2, or q to stop"
        )
    return int(digits == shown)


def said(answer: str) -> int:
    """1 for yes, 0 for no; anything else is refused."""
    word = answer.strip().lower()
    if word in ("y", "yes", "1"):
        return 1
    if word in ("n", "no", "0"):
        return 0
    raise DataError(
        f"{answer!r} is neither: type y if all digits were right, n if not, or q to stop"
    )


def picture(study: Study, width: int = 40) -> str:
    """The posterior as a row of blocks, from the shortest list to the longest."""
    lengths = study.candidates
    low, high = float(lengths.min()) - 0.5, float(lengths.max()) + 0.5
    edges = torch.linspace(low, high, width + 1, dtype=torch.float64)
    mean, std = float(study.belief.mean), float(study.belief.std)
    smooth = 0.5 * (edges[1] - edges[0]) + 0.15 * std  # quadrature nodes are points
    centres = (edges[1:] + edges[:-1]) / 2
    theta, weight = study.belief.theta.double(), study.belief.weight.double()
    height = (weight * (-0.5 * ((centres[:, None] - theta) / smooth).square()).exp()).sum(1)
    level = (height / height.max() * (len(BLOCKS) - 1)).round().long().tolist()
    return f"{''.join(BLOCKS[i] for i in level)}  {mean:.2f} ± {std:.2f}"


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
