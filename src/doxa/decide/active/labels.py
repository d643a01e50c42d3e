"""The state of an active learning session, and its result.

`LabelState` holds the labels of one learner. A row is free, asked (open), or answered. It goes back
only by `undo`, which opens it again, as long as no fit has used its label: so no row is labelled
twice and no answer is lost. All answers are checked before any of them is entered; an answer is
replaced only with `correct=True`. `Learned` holds learning curves, labels, and the last posterior
of each run.

A session in a folder has a revision, which counts its writes. `save` compares and sets: under a
lock, it writes only if the folder still has the revision that was read. `change` reads, changes and
writes under the lock, for what is quick. So several commands and pages may answer at a time.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from doxa import store
from doxa.errors import DataError, FolderInUse, MethodError, StoreError
from doxa.evaluate.table import smaller_is_better
from doxa.likelihoods import Categorical, Gaussian, Heads, Likelihood
from doxa.posterior.base import written_once

STATE = "state"  # the artefact in the folder of a session
PATIENCE = 30.0  # seconds to wait for another writer, who needs milliseconds
T = TypeVar("T")


@dataclass(frozen=True)
class Labels:
    """The labels that a row may have, according to the likelihood and the network's outputs.

    likelihood: None if `fit` infers it from the labels. output: the shape of the network's output
    for one row; None if it is not known.
    """

    likelihood: Likelihood | None = None
    output: tuple[int, ...] | None = None

    def checked(self, row: int, label: Any) -> Any:
        """The label as plain numbers; an error that names the row if the label is not allowed."""
        try:
            plain = label.detach().cpu() if isinstance(label, Tensor) else np.asarray(label)
            value = torch.as_tensor(plain)  # of float64 where labels are: none is rounded
        except (TypeError, ValueError, RuntimeError):
            raise DataError(f"the label of row {row} is {label!r}, which is not a number") from None
        if not bool(torch.isfinite(value.double()).all()):
            raise DataError(f"the label of row {row} is {label!r}, which is no finite number")
        likelihood = self.likelihood
        if likelihood is None and self.output is not None:  # as `fit` infers it
            whole = not value.is_floating_point() and value.shape == self.output[1:]
            likelihood = Categorical() if whole and self._classes else Gaussian()
        if likelihood is not None and not isinstance(likelihood, Heads):
            y = value.unsqueeze(0)
            try:
                likelihood.prepare_targets(y, self.output or likelihood.outputs(y))
            except DataError as error:
                raise DataError(
                    f"the label of row {row} is {label!r}, which the {likelihood.name} likelihood"
                    f"{self._words(likelihood)} cannot have ({error})"
                ) from None
        return value.tolist()

    @property
    def _classes(self) -> int:
        """The number of classes if whole numbers are classes; 0 if they are numbers."""
        several = self.output is not None and len(self.output) > 0 and self.output[0] > 1
        return self.output[0] if several and self.output is not None else 0

    def _words(self, likelihood: Likelihood) -> str:
        if likelihood.class_axis and self._classes:
            return f" of classes 0 … {self._classes - 1}"
        return ""

    def one_class(self, labels: Iterable[Any]) -> bool:
        """Whether labels are of one class only, from which no classifier can be fitted."""
        y = torch.tensor(list(labels))
        likelihood = self.likelihood
        classifies = not y.is_floating_point() if likelihood is None else likelihood.classifies
        seen = y.unique()
        ignored = None if likelihood is None else likelihood.ignore_index
        return classifies and len(seen if ignored is None else seen[seen != ignored]) < 2

    def facts(self) -> dict[str, Any]:
        """The settings for the folder of a session; a likelihood that cannot be stored is
        omitted."""
        try:
            kept = None if self.likelihood is None else store.encode(self.likelihood)
        except StoreError:
            kept = None
        return {"likelihood": kept, "output": None if self.output is None else list(self.output)}

    @classmethod
    def of(cls, facts: Mapping[str, Any] | None) -> Labels:
        """From the result of `facts`; if a folder has none, any number is allowed."""
        if facts is None:
            return cls()
        wrong = StoreError("what labels may be is not as it was saved")
        if not isinstance(facts, Mapping) or set(facts) != {"likelihood", "output"}:
            raise wrong
        likelihood = store.decode(facts["likelihood"], "labels")
        output = facts["output"]
        if not isinstance(likelihood, Likelihood | None) or not isinstance(output, list | None):
            raise wrong
        if any(type(size) is not int or size < 0 for size in output or ()):
            raise wrong
        return cls(likelihood, None if output is None else tuple(output))


@dataclass
class LabelState:
    """The labels and scores of one learner.

    Attributes
    ----------
    rows : int
        Number of rows in the pool.
    answers : dict
        {row: label}, in the order in which they were entered.
    asked : list of int
        Open rows: chosen, and without a label yet.
    rounds : list of dict
        Scores after each fit: {"labels": 20, "accuracy": 0.8, …}.
    stopped : str
        Why no more rows are chosen. "" while the learner continues.
    events : list of dict
        Labels that were taken back: {"event": "undone", "row": 3, "label": 1}.
    """

    rows: int
    answers: dict[int, Any] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    stopped: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def fitted(self) -> int:
        """The number of labels that the last fit has used: the first ones of `answers`."""
        return int(self.rounds[-1]["labels"]) if self.rounds else 0

    @property
    def unfitted(self) -> list[int]:
        """The rows whose labels no fit has used, in the order in which they were entered."""
        return list(self.answers)[self.fitted :]

    @property
    def labelled(self) -> Tensor:
        """The rows that have a label, [L]."""
        return torch.tensor(list(self.answers), dtype=torch.long)

    @property
    def free(self) -> Tensor:
        """The rows that were never chosen, in their order."""
        left = torch.ones(self.rows, dtype=torch.bool)
        left[[*self.answers, *self.asked]] = False
        return left.nonzero()[:, 0]

    def ask(self, rows: Sequence[int]) -> None:
        """Enter rows that are to be labelled."""
        if self.asked:
            raise DataError(
                f"row {self.asked[0]} has no label yet: no more rows can be chosen until the "
                f"{len(self.asked)} open rows have labels"
            )
        seen: set[int] = set()
        for row in map(int, rows):
            if not 0 <= row < self.rows:
                raise DataError(f"row {row} is not in the pool, whose rows are 0 … {self.rows - 1}")
            if row in self.answers or row in seen:
                raise DataError(f"row {row} was already chosen")
            seen.add(row)
        self.asked = [int(row) for row in rows]

    def answer(
        self, answers: Mapping[int, Any], partial: bool = False, correct: bool = False
    ) -> None:
        """Enter a label for every open row; for some of them if `partial`. A label that was
        entered before is replaced if `correct`."""
        open_rows = set(self.asked)
        for row, label in answers.items():
            if row in self.answers and not correct:
                raise DataError(
                    f"row {row} has an answer already, {self.answers[row]!r}; correct=True "
                    "replaces it"
                )
            if row not in self.answers and row not in open_rows:
                raise DataError(f"row {row} is not open: it was not chosen for labelling")
            if label is None or (isinstance(label, float) and not math.isfinite(label)):
                raise DataError(f"the answer for row {row} is {label!r}, which is no label")
        missing = [row for row in self.asked if row not in answers]
        only_corrected = correct and bool(answers) and len(missing) == len(self.asked)
        if missing and not partial and not only_corrected:
            raise DataError(
                f"{len(answers)} answers for {len(self.asked)} rows: row {missing[0]} has none"
            )
        self.answers.update((row, answers[row]) for row in answers if row in self.answers)
        self.answers.update((row, answers[row]) for row in self.asked if row in answers)
        self.asked = missing

    def undo(self, row: int) -> Any:
        """Take a label back, which opens its row again; returns it. A label that a fit has used
        stays."""
        if row not in self.answers:
            raise DataError(f"row {row} has no label to take back")
        if row not in self.unfitted:
            raise DataError(
                f"a fit has used the label of row {row}, so it stays; correct=True replaces it"
            )
        label = self.answers.pop(row)
        self.asked.insert(0, row)
        self.events.append({"event": "undone", "row": row, "label": label})
        return label


class Saved(NamedTuple):
    """A session as it was read: label states, settings, and the number of writes before."""

    books: list[LabelState]
    facts: dict[str, Any]
    revision: int


def save(
    folder: Path,
    books: Sequence[LabelState],
    facts: Mapping[str, Any],
    revision: int | None = None,
) -> int:
    """Save atomically: if the process is killed, the folder holds the old or the new state.

    Parameters
    ----------
    folder : Path
        The folder of the session.
    books : sequence of LabelState
        The labels of each learner.
    facts : dict
        The settings.
    revision : int, optional
        The revision that was read; 0 for a new session. If the folder has another one by now,
        nothing is written, and this is an error.

    Returns
    -------
    int
        The new revision.
    """
    with written_once(folder / STATE) as first, contextlib.ExitStack() as stack:
        if first:  # of several processes of one fit
            stack.enter_context(_locked(folder))
            found = read(folder)
            current = 0 if found is None else found.revision
            if revision is not None and revision != current:
                raise StoreError(
                    f"{folder} was changed meanwhile (revision {current}, not {revision}), by "
                    "another command or a page: nothing is lost; do this again"
                )
            return _write(folder, books, facts, current + 1)
    return (revision or 0) + 1


def change(folder: Path, edit: Callable[[list[LabelState]], T]) -> tuple[T, Saved]:
    """Read a session, change its label states and write them, while no one else does.

    Parameters
    ----------
    folder : Path
        The folder of the session.
    edit : callable
        Changes the label states. If it raises, nothing is written.

    Returns
    -------
    tuple
        (the result of `edit`, the session as it was written).
    """
    with _locked(folder):
        found = read(folder)
        if found is None:
            raise StoreError(f"{folder} holds no session of active learning")
        result = edit(found.books)
        written = _write(folder, found.books, found.facts, found.revision + 1)
        return result, found._replace(revision=written)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The lock of a session; another writer has it for milliseconds."""
    end = time.monotonic() + PATIENCE
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(store.exclusive(folder / STATE))
                break
            except FolderInUse:
                if time.monotonic() > end:
                    raise
                time.sleep(0.005)
        yield


def _write(
    folder: Path, books: Sequence[LabelState], facts: Mapping[str, Any], revision: int
) -> int:
    pages = [vars(book) | {"answers": list(book.answers.items())} for book in books]
    meta = {"books": pages, "facts": dict(facts), "revision": revision}
    store.write_artefact(folder / STATE, {}, meta)
    return revision


def load(folder: Path) -> tuple[list[LabelState], dict[str, Any]] | None:
    """The label states and the settings of the session; None if the folder holds none."""
    found = read(folder)
    return None if found is None else (found.books, found.facts)


def read(folder: Path) -> Saved | None:
    """The session in a folder; None if it holds none. Reading needs no lock."""
    if not store.is_artefact(folder / STATE):
        return None
    _, meta = store.read_artefact(folder / STATE)
    if "books" not in meta:
        raise StoreError(f"{folder / STATE} does not hold a session of active learning")
    try:
        revision = meta.get("revision", 0)  # older sessions have none
        if type(revision) is not int or revision < 0:
            raise ValueError(revision)
        return Saved([_book(page) for page in meta["books"]], dict(meta["facts"]), revision)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{folder / STATE} does not hold the labels of a session") from error


def _book(page: Mapping[str, Any]) -> LabelState:
    """A `LabelState` as it was saved; ValueError if it is not valid."""
    answers = dict(page["answers"])
    book = LabelState(**{**page, "answers": answers})
    rows = [book.rows, *answers, *book.asked]
    sound = (
        all(type(row) is int and row >= 0 for row in rows)
        and all(row < book.rows for row in rows[1:])
        and len(set(rows[1:])) == len(page["answers"]) + len(book.asked)
        and all(isinstance(x, int | float) for found in book.rounds for x in found.values())
        and isinstance(book.rounds, list) and isinstance(book.stopped, str)
        and isinstance(book.events, list) and all(isinstance(one, dict) for one in book.events)
    )  # fmt: skip
    if not sound:
        raise ValueError(page)
    return book


@dataclass
class Learner:
    """One run: its acquisition, its seed, its labels, and the posterior of its last round, or None
    while all of its labels are of one class."""

    by: str
    seed: int
    book: LabelState
    posterior: Any = None

    @property
    def curve(self) -> list[dict[str, Any]]:
        """{"labels": 20, "accuracy": 0.7, …} after each fit."""
        return self.book.rounds


@dataclass
class Learned:
    """The runs of `learn`, acquisitions × seeds.

    `waiting` is true if labels from a person are needed: the open rows are in
    `learners[i].book.asked`.
    """

    learners: list[Learner]
    waiting: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.learners)

    def __getitem__(self, i: int) -> Learner:
        return self.learners[i]

    def labels_to(self, metric: str, value: float) -> dict[str, list[int | None]]:
        """The number of labels at which `metric` first reached a value (fell to it, for errors
        such as rmse), for each run of each acquisition; None if it did not."""
        enough = reaches(metric, value)
        found: dict[str, list[int | None]] = {}
        for one in self.learners:
            first = next((r["labels"] for r in one.curve if enough(_get(r, metric))), None)
            found.setdefault(one.by, []).append(first)
        return found

    def mean_curve(self, by: str, metric: str) -> list[tuple[int, float, float]]:
        """(labels, mean, standard deviation) over the seeds of an acquisition, at the numbers of
        labels that all of them were fitted to."""
        curves = [one.curve for one in self.learners if one.by == by]
        if not curves:
            known = ", ".join(dict.fromkeys(one.by for one in self.learners))
            raise MethodError(f"no learner chose by {by!r}: there are {known}")
        found = [{r["labels"]: _get(r, metric) for r in curve} for curve in curves]
        shared = [k for k in found[0] if all(k in other for other in found)]
        each = [(k, torch.tensor([values[k] for values in found])) for k in shared]
        return [(k, float(v.mean()), float(v.std(correction=0))) for k, v in each]

    def table(self, metric: str, *values: float) -> str:
        """A Markdown table of the median number of labels to reach each value, over seeds."""
        heads = "".join(f" {metric} {value:g} |" for value in values)
        lines = [f"| chosen by |{heads}", "|---|" + "---|" * len(values)]
        columns = [self.labels_to(metric, value) for value in values]
        for by in dict.fromkeys(one.by for one in self.learners):
            cells = "".join(f" {_median(column[by])} |" for column in columns)
            lines.append(f"| {by} |{cells}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Curves and chosen rows, as numbers and text."""
        return {
            "facts": self.facts,
            "runs": [
                {"by": one.by, "seed": one.seed, "curve": one.curve, "stopped": one.book.stopped,
                 "rows": list(one.book.answers)}
                for one in self.learners
            ],
        }  # fmt: skip


def reaches(metric: str, value: float) -> Callable[[float], bool]:
    """Whether a number is as good as a value of the metric."""
    if smaller_is_better(metric):
        return lambda found: found <= value
    return lambda found: found >= value


def _get(found: dict[str, Any], metric: str) -> float:
    if metric not in found:
        raise MethodError(f"no score {metric!r} was kept: pass test=(x, y) to learn")
    return float(found[metric])


def _median(found: list[int | None]) -> str:
    """The median over runs that reached the value; their number is added if some did not."""
    there = [n for n in found if n is not None]
    if not there:
        return "–"
    text = f"{statistics.median(there):g}"
    return text if len(there) == len(found) else f"{text} ({len(there)} of {len(found)} runs)"
