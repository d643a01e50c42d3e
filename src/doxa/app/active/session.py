"""A campaign in a folder, between one command and the next.

    FOLDER/pool.*          the rows, as they were given; a folder of pictures as one file
    FOLDER/state/          what was asked and answered: an artefact, replaced whole
    FOLDER/to_label.csv    what is open, to be filled in; images in FOLDER/to_label/
    FOLDER/run/            the last posterior, which `doxa predict` takes

`state` alone decides: whatever else a crash leaves behind is written again from it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from doxa.app.active.answers import begun, checked, read_answers, refuse_missing
from doxa.app.active.folders import pack
from doxa.app.active.pools import Pool, coded, read_pool
from doxa.app.fitting import Plan, fit_arrays
from doxa.app.held_out import checksum
from doxa.app.intake import Asked
from doxa.app.reading import Dialect
from doxa.app.settings import make_method
from doxa.app.tables import write_table
from doxa.decide import score, select
from doxa.decide.acquisition import acquisition
from doxa.decide.active import Book
from doxa.decide.active.book import load, save
from doxa.decide.score import joint
from doxa.errors import DataError, StoreError
from doxa.noise import digest

_JOINT = "batch_bald"


@dataclass
class Session:
    """What a command works on."""

    folder: Path
    pool: Pool
    book: Book
    facts: dict[str, Any]

    @property
    def sheet(self) -> Path:
        """The file that a person fills in."""
        return self.folder / "to_label.csv"

    def save(self) -> None:
        save(self.folder, [self.book], self.facts)

    def ask(self, count: int | None) -> str:
        """Choose rows and write them down; those that are open already are written again. What was
        done, in words."""
        if self.book.asked:
            self._write()
            return "still open"
        free = self.book.free
        if not len(free):
            raise DataError("the pool is empty: every row has a label")
        k = min(count or self.facts["count"], len(free))
        how, rows = self._chosen(free, k)
        self.book.ask(rows)
        self.save()
        self._write()
        return how

    def take(self, answers: Sequence[tuple[str, str]], partial: bool) -> int:
        """Enter answers, all or none; how many."""
        self._check_open()
        found = checked(answers, self.pool, self.book)
        if not partial:
            refuse_missing(found, self.pool, self.book)
        elif not found:
            raise DataError("there is no answer to take: the column of labels is empty")
        self.book.answer(found, partial)
        self.save()
        return len(found)

    def _check_open(self) -> None:
        if not self.book.asked:
            raise DataError("nothing was asked: doxa active next asks")

    def read(self, path: Path | None) -> list[tuple[str, str]]:
        """The answers in a file; in the one that was written, unless another is named."""
        self._check_open()
        return read_answers(self.sheet if path is None else path, self.pool)

    def _write(self) -> None:
        if begun(self.sheet, self.pool, self.book):
            return
        table = self.pool.to_label(self.book.asked, self.folder / "to_label")
        aside = self.sheet.with_name(".to_label.csv")  # half a sheet is never there to be filled in
        write_table(table, aside)
        aside.replace(self.sheet)

    def _chosen(self, free: torch.Tensor, k: int) -> tuple[str, list[int]]:
        """By the posterior of the labels so far; by chance while there is nothing to fit."""
        labels = list(self.book.answers.values())
        seed = digest("active", self.facts["plan"]["seed"], len(labels)) & 0x7FFFFFFF
        if len(set(labels)) < 2 or len(labels) < 4:
            chosen = select(torch.zeros(len(free)), k, "random", seed=seed)
            return "by chance, until there are labels of two kinds to learn from", free[
                chosen
            ].tolist()
        posterior = self._fit(seed)
        by, x = self.facts["by"], self.pool.x[free.numpy()]
        if by == _JOINT:
            chosen = select(joint(posterior, x), k, by, seed=seed)
        else:
            chosen = select(score(posterior, x, by), k, by, seed=seed)
        return f"by {by}, after {len(labels)} labels", free[chosen].tolist()

    def _fit(self, seed: int) -> Any:
        rows, facts = self.book.labelled.numpy(), self.facts
        y = coded(self.pool.schema, list(self.book.answers.values()))
        plan = replace(Plan(**_tuples(facts["plan"])), seed=seed)
        posterior = fit_arrays(
            self.pool.schema, self.pool.x[rows], y, facts["method"], facts["settings"], plan
        )
        posterior.save(self.folder / "run")
        held = posterior.validation
        self.book.rounds.append(
            {"labels": len(rows), **({} if held is None else {"held-out log-likelihood": held})}
        )
        return posterior


def begin(
    folder: Path, data: Path, asked: Asked, classes: Sequence[str], method: str,
    settings: Sequence[str], plan: Plan, by: str, count: int,
) -> Session:  # fmt: skip
    """A new campaign; a folder that holds one is left alone."""
    make_method(method, settings)  # mistyped: before any reading
    by = by.replace("-", "_")
    if by not in ("random", _JOINT):
        acquisition(by)
    if load(folder) is not None:
        raise StoreError(f"{folder} holds a campaign already: doxa active status {folder}")
    kept = folder / ("pool.npz" if data.is_dir() else f"pool{''.join(data.suffixes)}")
    pool = read_pool(pack(data, kept) if data.is_dir() else data, asked, classes)
    folder.mkdir(parents=True, exist_ok=True)
    if not data.is_dir():
        shutil.copyfile(data, kept)
    facts = {
        "file": kept.name, "sha256": checksum(kept), "asked": asdict(asked),
        "classes": list(classes), "method": method, "settings": list(settings),
        "plan": asdict(plan), "by": by, "count": count,
    }  # fmt: skip
    session = Session(folder, pool, Book(len(pool.x), answers=pool.known), facts)
    session.save()
    return session


def resume(folder: Path) -> Session:
    """The campaign of a folder, as it was left."""
    found = load(folder)
    if found is None:
        raise StoreError(f"{folder} holds no campaign; doxa active start DATA --out {folder}")
    (book, *_), facts = found
    data = folder / facts["file"]
    if not data.is_file() or checksum(data) != facts["sha256"]:
        raise StoreError(f"{data} is not as it was when the campaign began: put it back")
    given = _tuples(facts["asked"])
    asked = Asked(**{**given, "dialect": Dialect(**facts["asked"]["dialect"])})
    return Session(folder, read_pool(data, asked, facts["classes"]), book, facts)


def _tuples(saved: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
