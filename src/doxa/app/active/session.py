"""A session of active learning in a folder, between one command and the next.

    FOLDER/pool.*          the rows, as they were given; a folder of images as one file (`pack`)
    FOLDER/state/          the chosen rows and their labels: an artefact, replaced whole
    FOLDER/to_label.csv    the open rows, to be filled in; images in FOLDER/to_label/
    FOLDER/run/            the last posterior, for `doxa predict`

`state` alone determines the session: after a crash, all other files are written again from it. It
has a lock and a revision: commands and pages of the studio may answer at the same time.

A folder may come from another person. So its contents are checked, nothing in it is imported, and
no file outside it is read or written. The user's own network is given on the command line, at each
`next`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from doxa.app.active.pools import (
    Pool,
    Sheet,
    being_filled_in,
    checked,
    coded,
    pair_of,
    read_pool,
    read_sheet,
    refuse_missing,
)
from doxa.app.fitting import Plan, fit_arrays, make_method
from doxa.app.held_out import checksum
from doxa.decide.acquisition import acquisition
from doxa.decide.active import LabelState
from doxa.decide.active.labels import change, load, read, save
from doxa.decide.select import joint, score, select
from doxa.driver.processes import all_of
from doxa.errors import DataError, DoxaError, ModelError, StoreError
from doxa.noise import digest
from doxa.posterior.base import written_once
from doxa.tables.files import check_name, write_table
from doxa.tables.reading import Array, Dialect
from doxa.tables.schema import TableSpec

T = TypeVar("T")
PICTURES = (".png", ".jpg", ".jpeg", ".bmp")
NUMBERS = ".npy"
_GREY = ("1", "L", "LA")  # Pillow's modes; the others become RGB
_COLOUR = ("P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")


def pack(folder: Path, packed: Path) -> Path:
    """Pack the images of a folder, in the order of their names, into a .npz file with `x` [N, H, W]
    or [N, H, W, 3] and `names` [N]. Other files, hidden files and folders are ignored."""
    kinds = (*PICTURES, NUMBERS)
    files = sorted(
        path for path in folder.iterdir()
        if path.suffix.lower() in kinds and path.is_file() and not path.name.startswith(".")
    )  # fmt: skip
    if not files:
        raise DataError(f"{folder} holds no image: {', '.join(kinds)} files, one per image")
    first = _pixels(files[0])
    pixels = np.empty((len(files), *first.shape), first.dtype)
    for i, path in enumerate(files):
        own = _pixels(path)
        if own.shape != first.shape or own.dtype != first.dtype:
            raise DataError(
                f"{path} is {_shape(own)}, and {files[0].name} is {_shape(first)}: all images "
                "need one size and one kind, grey or coloured"
            )
        pixels[i] = own
    try:
        packed.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(packed, x=pixels, names=np.array([path.name for path in files]))
    except OSError as error:
        raise StoreError(f"{packed} cannot be written: {error.strerror or error}") from error
    return packed


def _shape(pixels: Array) -> str:
    return f"{'×'.join(map(str, pixels.shape))} of {pixels.dtype}"


def _pixels(path: Path) -> Array:
    """One image, [H, W] or [H, W, 3]."""
    try:
        if path.suffix.lower() == NUMBERS:
            found = np.array(np.load(path, mmap_mode="r", allow_pickle=False))
        else:
            found = _read(path)
    except DoxaError:
        raise
    except Exception as error:  # NumPy and Pillow raise many types for a damaged file
        raise DataError(f"{path} cannot be read as an image: {error}") from error
    one = found[0] if found.ndim == 3 and found.shape[0] == 1 else found
    shaped = one.ndim == 2 or (one.ndim == 3 and one.shape[2] == 3)
    if one.dtype.kind not in "buif" or not shaped or not one.size:
        raise DataError(f"{path} is {_shape(found)}: an image is [H, W] or [H, W, 3], of numbers")
    return one


def _read(path: Path) -> Array:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            f"{path} is read with Pillow, which comes with matplotlib: pip install doxa[plots]; "
            "or save each image as a .npy file"
        ) from error
    with Image.open(path) as picture:
        if picture.mode not in (*_GREY, *_COLOUR):
            raise DataError(f"{path} has pixels of mode {picture.mode}: save it with 8 bits each")
        return np.asarray(picture.convert("L" if picture.mode in _GREY else "RGB"))


_JOINT = "batch_bald"


@dataclass
class Session:
    """The data of a command. net: the user's own network, as named on the command line. revision:
    that of `book`, 0 before it is saved."""

    folder: Path
    pool: Pool
    book: LabelState
    facts: dict[str, Any]
    net: str | None = None
    revision: int = 0

    @property
    def sheet(self) -> Path:
        """The file in which the person enters labels."""
        return self.folder / "to_label.csv"

    def save(self) -> None:
        """Write the labels, unless another command or a page has written meanwhile."""
        self.revision = save(self.folder, [self.book], self.facts, self.revision)

    def refresh(self) -> None:
        """Take what other commands and pages have written."""
        found = read(self.folder)
        if found is None or len(found.books) != 1 or found.books[0].rows != self.book.rows:
            raise StoreError(f"{self.folder} holds another session than before")
        (self.book,), self.revision = found.books, found.revision

    def _change(self, edit: Callable[[LabelState], T]) -> T:
        """Change the labels as they are by now, while no one else does."""
        result, found = change(self.folder, lambda books: edit(books[0]))
        (self.book,), self.revision = found.books, found.revision
        return result

    def ask(self, count: int | None) -> str:
        """Choose rows and write the sheet; open rows are written again. Returns a message about the
        choice."""
        filled_in = being_filled_in(self.sheet, self.pool, self.book)  # before any work
        all_of("session", len(self.book.answers))  # every process has read it before one writes
        if self.book.asked:
            if not filled_in:
                self._write()
            return "still open"
        free = self.book.free
        if not len(free):
            raise DataError("the pool is empty: every row has a label")
        k = min(count or self.facts["count"], len(free))
        before = _state_of(self.sheet)
        how, rows = self._chosen(free, k)
        self.book.ask(rows)
        self.save()
        changed = _state_of(self.sheet) != before  # while this was computed
        if any(all_of("sheet", changed)):  # all have looked before one writes
            raise DataError(
                f"{self.sheet} was changed while rows were chosen, and is kept: enter its answers "
                "with doxa active label, or move it away; then doxa active next writes it again"
            )
        self._write()
        return how

    def take(self, answers: Sequence[tuple[str, str]], partial: bool, correct: bool = False) -> int:
        """Enter answers, all or none; returns their number. Answers that were entered before change
        only with `correct`."""

        def enter(book: LabelState) -> int:
            _check_open(book, correct)
            found = checked(answers, self.pool, book, correct)
            changed = correct and bool(found) and not set(found) & set(book.asked)
            if not partial and not changed:
                refuse_missing(found, self.pool, book)
            elif not found:
                raise DataError("there is no answer to enter: the column of labels is empty")
            book.answer(found, partial, correct)
            return len(found)

        return self._change(enter)

    def undo(self, name: str | None = None) -> tuple[str, Any]:
        """Take back the label of a row, by default the last one; returns its name and the label.
        The row is open again. Labels of the table, and those that a fit has used, stay."""

        def reopen(book: LabelState) -> tuple[int, Any]:
            own = [row for row in book.unfitted if row not in self.pool.known]
            if name is None and not own:
                raise DataError("there is no label to take back: a fit has used all of them")
            if name is not None and name not in self.pool.ids:
                raise DataError(f"there is no {self.pool.id_name} {name!r} in the pool")
            row = own[-1] if name is None else self.pool.ids.index(name)
            if row in self.pool.known:
                raise DataError(f"the label of {self.pool.places[row]} came with the table")
            return row, book.undo(row)

        row, label = self._change(reopen)
        return self.pool.ids[row], label

    def read(self, path: Path | None, correct: bool = False) -> list[tuple[str, str]]:
        """The answers in a file; the default is the sheet of the session."""
        _check_open(self.book, correct)
        sheet: Sheet = read_sheet(self.sheet if path is None else path, self.pool)
        return sheet.answers

    def pairs(self, given: Sequence[str]) -> list[tuple[str, str]]:
        """Answers that are given as ROW=LABEL."""
        return [pair_of(text, self.pool) for text in given]

    def _write(self) -> None:
        with written_once(self.sheet) as first:
            if first:
                self._write_sheet()

    def _write_sheet(self) -> None:
        table = self.pool.to_label(self.book.asked, self.folder / "to_label")
        aside = self.sheet.with_name(
            ".to_label.csv"
        )  # an incomplete sheet never has the final name
        aside.unlink(missing_ok=True)  # it may be a link to a file elsewhere
        write_table(table, aside)
        aside.replace(self.sheet)

    def _chosen(self, free: torch.Tensor, k: int) -> tuple[str, list[int]]:
        """Choose by the posterior of the labels so far; at random while there are too few."""
        labels = list(self.book.answers.values())
        seed = digest("active", self.facts["plan"]["seed"], len(labels)) & 0x7FFFFFFF
        if len(set(labels)) < 2 or len(labels) < 4:
            chosen = select(torch.zeros(len(free)), k, "random", seed=seed)
            return "at random, until there are labels of two kinds to learn from", free[
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
        plan = replace(Plan(**_tuples(facts["plan"])), seed=seed, net=self.net)
        posterior = fit_arrays(
            self.pool.schema, self.pool.x[rows], y, facts["method"], facts["settings"], plan
        )
        posterior.save(self.folder / "run", overwrite=True)
        held = posterior.validation
        self.book.rounds.append(
            {"labels": len(rows), **({} if held is None else {"held-out log-likelihood": held})}
        )
        return posterior


def _state_of(sheet: Path) -> str:
    """What tells whether a sheet has changed; "" if there is none."""
    return checksum(sheet) if sheet.is_file() else ""


def _check_open(book: LabelState, correct: bool) -> None:
    if not book.asked and not correct:
        raise DataError("no row is open: doxa active next chooses rows")


def begin(
    folder: Path, data: Path, asked: TableSpec, classes: Sequence[str], method: str,
    settings: Sequence[str], plan: Plan, by: str, count: int,
) -> Session:  # fmt: skip
    """A new session; an error if the folder holds one already."""
    check_name(folder)
    make_method(method, settings)  # mistyped: before any reading
    by = by.replace("-", "_")
    if by not in ("random", _JOINT):
        acquisition(by)
    if load(folder) is not None:
        raise StoreError(f"{folder} holds a session already: doxa active status {folder}")
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
    session = Session(folder, pool, LabelState(len(pool.x), answers=pool.known), facts)
    session.save()
    return session


def resume(folder: Path) -> Session:
    """The session of a folder, to read it and to enter answers, not to fit."""
    found = read(folder)
    if found is None:
        raise StoreError(f"{folder} holds no session; doxa active start DATA --out {folder}")
    books, facts, revision = found
    try:
        asked = _checked(facts)
        (book,) = books
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, DoxaError):
            raise
        raise StoreError(f"{folder} does not hold a session of doxa active") from error
    data = folder / facts["file"]
    if data.is_symlink() or not data.is_file() or checksum(data) != facts["sha256"]:
        raise StoreError(f"{data} has changed since the session began: restore it")
    pool = read_pool(data, asked, facts["classes"])
    if book.rows != len(pool.x):
        raise StoreError(f"{folder} has {book.rows} rows, but {data} has {len(pool.x)}")
    return Session(folder, pool, book, facts, revision=revision)


def go_on(folder: Path, net: str | None) -> Session:
    """The same, to fit and to choose rows: the user's own network must be given again. Its name in
    the folder is compared, and never imported."""
    session = resume(folder)
    own = session.facts["plan"].get("net")
    if own is not None and net is None:
        raise ModelError(f"{folder} was started with your own network: pass --net {own}")
    if own != net:
        begun = "without one: remove --net" if own is None else f"with --net {own}"
        raise ModelError(f"--net {net} is another network: {folder} was started {begun}")
    session.net = net
    return session


def _checked(facts: dict[str, Any]) -> TableSpec:
    """The options for the table, if all facts are as `begin` writes them; KeyError, TypeError or
    ValueError if they are not."""
    name = facts["file"]
    if not isinstance(name, str) or Path(name).name != name or name == "..":
        raise StoreError(f"the session's rows are in {name!r}, which is not a file of its folder")
    texts = [facts["sha256"], facts["method"], facts["by"], *facts["classes"], *facts["settings"]]
    plan = Plan(**_tuples(facts["plan"]))
    counts = [facts["count"], *plan.hidden]
    numbers = (plan.members, plan.epochs, plan.steps, plan.batch_size)
    given = _tuples(facts["asked"])
    asked = TableSpec(**{**given, "dialect": Dialect(**facts["asked"]["dialect"])})
    lists = (asked.drop, asked.categorical, asked.numeric)
    texts += [asked.target, *(name for names in lists for name in names)]
    maybe = [plan.net, plan.device, asked.likelihood, asked.index, *asdict(asked.dialect).values()]
    sound = (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(text, str | None) for text in maybe)
        and all(isinstance(names, tuple) for names in (*lists, plan.hidden))
        and all(isinstance(facts[name], list) for name in ("classes", "settings"))
        and all(type(count) is int and count > 0 for count in counts)
        and all(count is None or (type(count) is int and count > 0) for count in numbers)
        and all(isinstance(share, int | float | None) for share in (plan.lr, plan.validation))
        and type(plan.seed) is int
    )
    if not sound:
        raise ValueError(facts)
    Dialect.asked(asked.dialect.sep, asked.dialect.decimal, asked.dialect.encoding)
    return asked


def _tuples(saved: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
