"""What was asked, what was answered, and how the learner did: the book of one campaign.

A row is free, asked, or answered; it goes from one to the next and never back, so that none is
asked twice and no answer is lost. Answers are checked before any of them is entered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from doxa import store
from doxa.errors import DataError, StoreError

STATE = "state"  # the artefact in a campaign's folder


@dataclass
class Book:
    """The book of one learner.

    Attributes
    ----------
    rows: how many there are in the pool.
    answers: {row: label}, in the order in which they came.
    asked: rows that wait for an answer.
    rounds: what was known after each fit: {"labels": 20, "accuracy": 0.8, …}.
    stopped: why no more is asked; "" while there is more to ask.
    """

    rows: int
    answers: dict[int, Any] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    stopped: str = ""

    @property
    def labelled(self) -> Tensor:
        """The rows that have an answer, [L]."""
        return torch.tensor(list(self.answers), dtype=torch.long)

    @property
    def free(self) -> Tensor:
        """The rows that were never asked about, in their order."""
        left = torch.ones(self.rows, dtype=torch.bool)
        left[[*self.answers, *self.asked]] = False
        return left.nonzero()[:, 0]

    def ask(self, rows: Sequence[int]) -> None:
        """Enter rows to be asked about."""
        if self.asked:
            raise DataError(
                f"row {self.asked[0]} waits for an answer still: nothing more is asked until the "
                f"{len(self.asked)} open ones are answered"
            )
        seen: set[int] = set()
        for row in map(int, rows):
            if not 0 <= row < self.rows:
                raise DataError(f"row {row} is not in the pool, whose rows are 0 … {self.rows - 1}")
            if row in self.answers or row in seen:
                raise DataError(f"row {row} was asked about before")
            seen.add(row)
        self.asked = [int(row) for row in rows]

    def answer(self, answers: Mapping[int, Any], partial: bool = False) -> None:
        """Enter a label for every row that was asked about; for some of them if `partial`."""
        open_rows = set(self.asked)
        for row, label in answers.items():
            if row in self.answers:
                raise DataError(f"row {row} has an answer already, {self.answers[row]!r}")
            if row not in open_rows:
                raise DataError(f"row {row} was not asked about")
            if label is None or (isinstance(label, float) and not math.isfinite(label)):
                raise DataError(f"the answer for row {row} is {label!r}, which is no label")
        missing = [row for row in self.asked if row not in answers]
        if missing and not partial:
            raise DataError(
                f"{len(answers)} answers for {len(self.asked)} rows: row {missing[0]} has none"
            )
        self.answers.update((row, answers[row]) for row in self.asked if row in answers)
        self.asked = missing


def save(folder: Path, books: Sequence[Book], facts: Mapping[str, Any]) -> None:
    """Whole or not at all: whoever is killed here leaves the books as they were, or as they are."""
    pages = [asdict(book) | {"answers": list(book.answers.items())} for book in books]
    store.write_artefact(folder / STATE, {}, {"books": pages, "facts": dict(facts)})


def load(folder: Path) -> tuple[list[Book], dict[str, Any]] | None:
    """The books and what they were started with; None where there are none."""
    if not store.is_artefact(folder / STATE):
        return None
    _, meta = store.read_artefact(folder / STATE)
    if "books" not in meta:
        raise StoreError(f"{folder / STATE} holds something else than a campaign")
    pages = meta["books"]
    answers = [{int(row): label for row, label in page["answers"]} for page in pages]
    return [
        Book(**(page | {"answers": own})) for page, own in zip(pages, answers, strict=True)
    ], meta["facts"]
