"""Active learning: fit, score the pool, choose rows, get their labels, repeat.

`learn` runs the loop, `answer` enters labels from a person. `Stopping` has the rules that end a
session: the budget is spent, the score is good enough, the score no longer improves, or the pool is
empty. An oracle gives labels: a table, a function, or a person.

Several acquisitions and seeds are runs of one stacked fit in each round: each learner has its own
rows, its own seed and its own `LabelState`. A round depends only on the seed, the number of the
round and the labels so far, so a session that was interrupted continues with the same results.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa import checks, store
from doxa.data import as_tensor, as_tensors, join_batches, rows_of
from doxa.decide.acquisition import Acquisition, acquisition
from doxa.decide.active.labels import (
    Labels,
    LabelState,
    Learned,
    Learner,
    change,
    load,
    read,
    save,
)
from doxa.decide.select import block_rows, joint, kept, score, select
from doxa.driver.bar import shown
from doxa.driver.runs import Runs, RunSpec
from doxa.errors import DataError, MethodError, StoreError
from doxa.evaluate.streaming import Streaming
from doxa.evaluate.table import smaller_is_better
from doxa.fit import fit
from doxa.likelihoods import likelihood as as_likelihood
from doxa.method import Method, as_method
from doxa.model import Model
from doxa.model.checks import looked_at
from doxa.noise import digest, generator
from doxa.posterior import load as load_posterior

Oracle = Callable[[Tensor], Any]


class Table:
    """An oracle that is a table of all labels."""

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def __call__(self, asked: Tensor) -> Tensor:
        return self.labels[asked]


def oracle_of(given: Any, rows: int) -> Oracle | None:
    """A function from rows [k] to labels [k, …]; None if a person gives the labels."""
    if given is None or callable(given):
        return given
    table = as_tensor(given, "the oracle's table").cpu()
    if table.ndim == 0 or len(table) != rows:
        raise DataError(f"the oracle's table has shape {list(table.shape)}, the pool {rows} rows")
    return Table(table)


def labels_of(oracle: Oracle, asked: list[int]) -> dict[int, Any]:
    """{row: label} from an oracle, one for each row."""
    given = oracle(torch.tensor(asked))
    labels = as_tensor(given, "what the oracle gave").cpu()
    if labels.ndim == 0 or len(labels) != len(asked):
        count = 1 if labels.ndim == 0 else len(labels)
        raise DataError(
            f"the oracle gave {count} labels for {len(asked)} rows (the first: row {asked[0]})"
        )
    bad = ~torch.isfinite(labels.double()).reshape(len(labels), -1).all(1)
    if bool(bad.any()):
        raise DataError(
            f"the oracle's label for row {asked[int(bad.nonzero()[0, 0])]} is not a finite number"
        )
    return dict(zip(asked, labels.tolist(), strict=True))


@dataclass(frozen=True)
class Stopping:
    """Rules that end a session; the first that holds ends it.

    Attributes
    ----------
    budget : int, optional
        Total number of labels.
    target : float, optional
        A value of `metric` that is good enough.
    patience : int, optional
        Number of rounds without an improvement of `metric`.
    metric : str, default "accuracy"
        A score of `doxa.evaluate.metrics`, on the test rows.
    """

    budget: int | None = None
    target: float | None = None
    patience: int | None = None
    metric: str = "accuracy"

    def __post_init__(self) -> None:
        for name in ("budget", "patience"):
            if getattr(self, name) is not None:
                checks.whole(name, getattr(self, name))

    @property
    def needs_scores(self) -> bool:
        return self.target is not None or self.patience is not None

    def reason(self, book: LabelState) -> str:
        """The reason to stop now; "" to continue."""
        sign = -1.0 if smaller_is_better(self.metric) else 1.0
        values = [sign * self._value(found) for found in book.rounds] if self.needs_scores else []
        if self.target is not None and values and values[-1] >= sign * self.target:
            return f"{self.metric} reached {self.target:g}"
        if self.patience is not None and len(values) > self.patience:
            before = max(values[: -self.patience])
            if max(values[-self.patience :]) <= before:
                return f"no better {self.metric} for {self.patience} rounds"
        if self.budget is not None and len(book.answers) >= self.budget:
            return f"the budget of {self.budget} labels is spent"
        if len(book.answers) == book.rows:
            return "the pool is empty: every row has a label"
        return ""

    def _value(self, found: dict[str, float]) -> float:
        if self.metric not in found:
            known = ", ".join(name for name in found if name not in ("labels", "seconds"))
            raise MethodError(
                f"no score {self.metric!r} to stop by: pass test=(x, y)"
                + (f", or choose among {known}" if known else "")
            )
        return found[self.metric]


log = logging.getLogger("doxa")


@dataclass
class Work:
    """The settings of a session, which do not change while it runs, and its revision."""

    model: Any
    method: Method
    x: Any
    rows: int
    stopping: Stopping
    step: int
    warm: bool
    n: int | None
    sample: int | None
    diversity: str
    beta: float
    test: Any
    options: dict[str, Any]
    folder: Path | None
    labels: Labels = field(default_factory=Labels)
    ways: dict[str, str | Acquisition] = field(default_factory=dict)
    starts: dict[int, list[int]] = field(default_factory=dict)
    revision: int = 0  # of the session in the folder

    def facts(self, ways: Sequence[Any], seeds: Sequence[int], start: Any) -> dict[str, Any]:
        """Settings that must be equal to those of the session in a folder to continue it."""
        return {
            "rows": self.rows, "method": repr(self.method), "by": [name_of(way) for way in ways],
            "seeds": [int(seed) for seed in seeds], "start": repr(start)[:2000],
            "step": self.step, "warm": self.warm, "n": self.n, "sample": self.sample,
            "diversity": self.diversity, "beta": self.beta,
            "options": {name: repr(value)[:200] for name, value in sorted(self.options.items())},
        }  # fmt: skip

    def advance(self, found: Learned, oracle: Oracle | None) -> bool:
        """Label the open rows; if there are none, run a round for the learners that have not
        stopped. Returns False if nothing remains to be done."""
        learners = found.learners
        waiting = [one for one in learners if one.book.asked]
        if waiting:
            if oracle is None:
                found.waiting = True
                return True
            for one in waiting:
                known = self._known(learners)  # learners share labels: no row is labelled twice
                new = [row for row in one.book.asked if row not in known]
                labels = labels_of(oracle, new) if new else {}
                given = known | {row: self.labels.checked(row, labels[row]) for row in new}
                one.book.answer({row: given[row] for row in one.book.asked})
                if not isinstance(oracle, Table):
                    self._save(found)  # so that an oracle labels no row twice
            self._save(found)
            return True
        for one in learners:
            if not one.book.answers:
                one.book.ask(self.starts[one.seed])
        active = [one for one in learners if not one.book.asked and not one.book.stopped]
        ready = []
        for one in active:
            if self.labels.one_class(one.book.answers.values()):
                self._draw(one)
            else:
                ready.append(one)
        if ready:
            self._round(ready, learners)
        self._save(found)
        return any(one.book.asked for one in learners)

    def _draw(self, one: Learner) -> None:
        """Choose more rows at random: a fit to labels of one class gives no useful scores."""
        book = one.book
        count = len(book.answers)
        book.stopped = self.stopping.reason(book)
        if book.stopped:
            book.stopped += "; all labels are of one class, and nothing was fitted"
            return
        log.warning(
            "all %d labels of seed %d are of one class: the next rows are drawn at random, until "
            "there are two", count, one.seed,
        )  # fmt: skip
        book.ask(self._choose(one, "random"))

    def _round(self, active: list[Learner], learners: list[Learner]) -> None:
        began = time.perf_counter()
        self._fit(active, self._known(learners))
        fitted = (time.perf_counter() - began) / len(active)
        for one in active:
            began = time.perf_counter()
            book = one.book
            if book.rounds and book.rounds[-1]["labels"] == len(book.answers):
                book.rounds.pop()  # a stopped session continues with a larger budget
            scores = {} if self.test is None else scored(one.posterior, self.test, self.n)
            book.rounds.append({"labels": len(book.answers), **scores})
            book.stopped = self.stopping.reason(book)
            if not book.stopped:
                book.ask(self._choose(one, self.ways[one.by]))
            book.rounds[-1]["seconds"] = round(fitted + time.perf_counter() - began, 3)

    def _fit(self, active: list[Learner], known: dict[int, Any]) -> None:
        union = torch.tensor(sorted({row for one in active for row in one.book.answers}))
        place = {int(row): i for i, row in enumerate(union)}
        y = torch.tensor([known[int(row)] for row in union])
        y = y.to(torch.get_default_dtype()) if y.is_floating_point() else y
        x = tree_map(lambda t: t[union.to(t.device)], self.x)
        rows = [torch.tensor([place[row] for row in one.book.answers]) for one in active]
        seeds = [_seed(one) for one in active]
        options = {"progress": False, **self.options}
        if self.warm and all(one.posterior is not None for one in active):
            options["init"] = [one.posterior for one in active]
        sweep = fit(self.model, (x, y), self.method, runs=_Own(rows, seeds=seeds), **options)
        for one, posterior in zip(active, sweep, strict=True):
            one.posterior = posterior

    def _choose(self, one: Learner, way: str | Acquisition) -> list[int]:
        """The next rows of one learner."""
        book, seed = one.book, _seed(one)
        free = book.free
        left = (self.stopping.budget or book.rows) - len(book.answers)
        k = min(self.step, left, len(free))
        if self.sample is not None and self.sample < len(free):
            order = torch.randperm(len(free), generator=generator("pool", seed))
            free = free[order[: max(k, self.sample)].sort().values]
        if way == "random":
            return free[select(torch.zeros(len(free)), k, "random", seed=seed)].tolist()
        x = tree_map(lambda t: t[free.to(t.device)], self.x)
        found: Any
        if way in ("batch_bald", "batch-bald") or self.diversity == "coreset":
            found = joint(one.posterior, x, self.n)
        else:
            found = score(one.posterior, x, way, n=self.n)
        chosen = select(found, k, way, diversity=self.diversity, beta=self.beta, seed=seed)
        return free[chosen].tolist()

    def _known(self, learners: list[Learner]) -> dict[int, Any]:
        return {row: label for one in learners for row, label in one.book.answers.items()}

    def _save(self, found: Learned) -> None:
        if self.folder is None:
            return
        if self.warm:
            for i, one in enumerate(found.learners):
                if one.posterior is not None:
                    one.posterior.save(self.folder / f"posterior-{i}", overwrite=True)
        books = [one.book for one in found.learners]
        self.revision = save(self.folder, books, found.facts, self.revision)


class _Own(Runs):
    """Runs with one seed for each set of rows."""

    def expand(self, seed: int) -> list[RunSpec]:
        assert self.rows is not None and self.seeds is not None
        pairs = zip(self.rows, self.seeds, strict=True)
        return [RunSpec(rows, {}, own, i) for i, (rows, own) in enumerate(pairs)]


def scored(posterior: Any, test: tuple[Any, Tensor], n: int | None) -> dict[str, float]:
    """`doxa.evaluate.metrics` of the test rows, computed in blocks."""
    x, y = test
    count = kept(posterior, n)
    size = block_rows(posterior, count)
    stream = Streaming()
    for start in range(0, len(y), size):
        some = tree_map(lambda t, start=start: t[start : start + size], x)
        stream.update(posterior.predict(some, count), y[start : start + size])
    return stream.result()


def _seed(one: Learner) -> int:
    """The seed of one round of one learner."""
    return digest("active", one.seed, len(one.book.answers)) & 0x7FFFFFFF


def name_of(way: str | Acquisition) -> str:
    """The name of an acquisition; an unknown name is an error before any work."""
    if isinstance(way, str) and way.replace("-", "_") not in ("random", "batch_bald"):
        acquisition(way)
    return way if isinstance(way, str) else getattr(way, "__name__", type(way).__name__)


def learn(
    model: Any,
    pool: Any,
    oracle: Any,
    method: str | Method | type[Method] = "mc-dropout",
    *,
    by: str | Acquisition | Sequence[str | Acquisition] = "bald",
    start: Any = 20,
    step: int = 10,
    budget: int | None = None,
    target: float | None = None,
    patience: int | None = None,
    metric: str = "accuracy",
    test: Any = None,
    seeds: Sequence[int] = (0,),
    warm: bool = False,
    n: int | None = 100,
    sample: int | None = None,
    diversity: str = "top",
    beta: float = 1.0,
    folder: str | Path | None = None,
    progress: bool | None = None,
    callback: Callable[[Learned], Any] | None = None,
    **options: Any,
) -> Learned:
    """Run active learning on a pool of rows.

    Parameters
    ----------
    model : Module, Model or None
        As in `doxa.fit`, which is called once per round for all runs.
    pool : array_like [N, …]
        The inputs x, with or without labels.
    oracle : array_like, callable or None
        A table [N, …] of all labels, or a function from row numbers [k] to k labels. None for a
        person: the session then stops with open rows, `answer(folder, {row: label})` enters their
        labels, and the same call continues.
    method : str or Method, default "mc-dropout"
        As in `doxa.fit`.
    by : str, callable or list, default "bald"
        How rows are chosen (see `decide.select`), or a list of acquisitions, each with a session of
        its own.
    start : int or list, default 20
        The number of rows that are labelled first, drawn at random by the seed; or the rows
        themselves; or one list of rows per seed. While all labels are of one class, more rows are
        drawn at random and nothing is fitted.
    step : int, default 10
        Number of rows to label per round.
    budget, target, patience, metric : optional
        See `Stopping`. Without any of them the session ends when the pool is empty.
    test : tuple (x, y), optional
        Rows to score each round on, for the learning curve and the stopping rules.
    seeds : sequence of int, default (0,)
        Each seed is a session of its own.
    warm : bool, default False
        Start the fit of a round from the posterior of the round before.
    n : int, optional
        Number of functions per prediction.
    sample : int, optional
        Score only this many rows, drawn again in each round.
    diversity, beta : optional
        See `decide.select`.
    folder : path, optional
        Where the session is saved, atomically. The same call on the same pool then continues it
        after a crash.
    progress : bool, optional
        Show a progress bar. By default it is shown on a terminal.
    callback : callable, optional
        Called after each round with the `Learned` so far. If it returns True the session stops.
    **options
        Options of `doxa.fit`.

    Returns
    -------
    Learned
        Learning curves, labels, and the last posterior of each run.
    """
    x = as_tensors(join_batches(pool), "the pool")
    rows = rows_of(x, "the pool")
    if rows == 0:
        raise DataError("the pool is empty: there is nothing to learn from")
    ways = [by] if isinstance(by, str) or callable(by) else list(by)
    work = Work(
        model, as_method(method), x, rows, Stopping(budget, target, patience, metric),
        checks.whole("step", step), warm, n, sample, diversity, beta, _pair(test), options,
        None if folder is None else Path(folder), _labels(model, x, options.get("likelihood")),
    )  # fmt: skip
    facts = work.facts(ways, seeds, start)
    if folder is not None:
        facts |= {"pool": _fingerprint(x), "labels": work.labels.facts()}
    learners = _begun(work, facts) or [
        Learner(name_of(way), int(seed), LabelState(rows)) for way in ways for seed in seeds
    ]
    work.ways = {name_of(way): way for way in ways}
    work.starts = _starts(start, list(seeds), rows)
    answers = oracle_of(oracle, rows)
    found = Learned(learners, facts=facts)
    total = max(budget or rows, 1)
    bar = shown("active learning", total) if (
        sys.stderr.isatty() if progress is None else progress
    ) else nullcontext()  # fmt: skip
    with bar as line:
        while not found.waiting:
            moved = work.advance(found, answers)
            if line is not None:
                done = min(len(one.book.answers) for one in learners)
                last = {metric: [r.curve[-1].get(metric) for r in learners if r.curve]}
                line.show(min(done, total), "labels", last)
            enough = callback is not None and callback(found)  # also called after the last round
            if not moved or enough:
                break
    return found


def answer(
    folder: str | Path,
    answers: Mapping[int, Any],
    run: int = 0,
    partial: bool = False,
    correct: bool = False,
) -> int:
    """Enter labels from a person into the session in a folder, all of them or none.

    Parameters
    ----------
    folder : path
        The folder of `learn`.
    answers : dict
        {row: label}. A label is a value that the likelihood allows, such as a class.
    run : int, default 0
        The learner that chose the rows.
    partial : bool, default False
        Accept labels for some of the open rows; the others stay open.
    correct : bool, default False
        Replace the labels of rows that already have one, for every learner.

    Returns
    -------
    int
        The number of rows that are still open.
    """
    found = load(Path(folder))
    if found is None:
        raise StoreError(f"{folder} holds no session: learn(..., folder=) starts one")
    labels = Labels.of(found[1].get("labels"))
    checked = {}
    for row, label in answers.items():
        try:
            number = operator.index(row)
        except TypeError:
            raise DataError(f"{row!r} is no row: answers are {{row number: label}}") from None
        checked[number] = labels.checked(number, label)

    def enter(books: list[LabelState]) -> int:
        if not 0 <= run < len(books):
            raise MethodError(f"run = {run}, but the session has runs 0 … {len(books) - 1}")
        books[run].answer(checked, partial, correct)
        for book in books:  # learners share labels: no row is labelled twice
            book.answers.update((row, checked[row]) for row in checked if row in book.answers)
        shapes = {tuple(torch.as_tensor(label).shape) for label in books[run].answers.values()}
        if len(shapes) > 1:
            raise DataError(
                f"labels have shapes {sorted(map(list, shapes))}; all must have the same shape"
            )
        return len(books[run].asked)

    return change(Path(folder), enter)[0]


def _labels(model: Any, x: Any, likelihood: Any) -> Labels:
    """The labels that are allowed, from the likelihood and the network output for one row."""
    named = None if likelihood is None else as_likelihood(likelihood)
    if model is None:
        return Labels(named)
    seen = looked_at(model if isinstance(model, Model) else Model(model, named), x)
    heads = bool(seen.output) and isinstance(seen.output[0], tuple)
    return Labels(None if seen.assumed else seen.likelihood, None if heads else seen.output)


def _fingerprint(x: Any) -> str:
    """The SHA-256 of the pool: shapes, types and all numbers."""
    digest = hashlib.sha256()
    for leaf in tree_flatten(x)[0]:
        digest.update(f"{leaf.dtype} {list(leaf.shape)}".encode())
        size = max(1, (1 << 24) // max(1, leaf[:1].numel() * leaf.element_size()))  # 16 MiB
        for start in range(0, len(leaf), size):
            block = leaf[start : start + size].detach().cpu().contiguous()
            digest.update(block.view(torch.uint8).numpy())
    return digest.hexdigest()


def _begun(work: Work, facts: dict[str, Any]) -> list[Learner] | None:
    """The learners of a session that was started in a folder with the same settings."""
    folder = work.folder
    found = None if folder is None else read(folder)
    if found is None or folder is None:
        return None
    books, before, work.revision = found
    known = {name: facts[name] for name in ("pool", "labels")} | before  # not kept at first
    if known["pool"] != facts["pool"]:
        raise StoreError(
            f"{folder} holds a session on another pool of {before.get('rows')} rows: pass the "
            "pool that it was begun with, or choose another folder"
        )
    differ = [name for name in facts if known.get(name) != facts[name]]
    if differ:
        raise StoreError(
            f"{folder} holds another session: {differ[0]} was {before.get(differ[0])!r}, and is "
            f"{facts[differ[0]]!r}; choose another folder"
        )
    pairs = [(way, seed) for way in facts["by"] for seed in facts["seeds"]]
    if len(books) != len(pairs) or any(book.rows != work.rows for book in books):
        raise StoreError(f"{folder} does not hold {len(pairs)} books of {work.rows} rows")
    learners = []
    for i, ((way, seed), book) in enumerate(zip(pairs, books, strict=True)):
        for row, label in book.answers.items():
            try:
                work.labels.checked(row, label)
            except DataError as error:
                mend = "decide.active.answer(folder, {row: label}, correct=True) replaces it"
                raise DataError(f"{folder}: {error}; {mend}") from error
        book.stopped = ""  # a larger budget continues the session
        place = folder / f"posterior-{i}"
        net = work.model.net if isinstance(work.model, Model) else work.model
        last = load_posterior(place, net=net) if store.is_artefact(place) else None
        learners.append(Learner(way, seed, book, last))
    return learners


def _pair(test: Any) -> Any:
    if test is None:
        return None
    if not isinstance(test, tuple | list) or len(test) != 2:
        raise DataError("test is a pair (x, y)")
    return as_tensors(test[0], "x of test"), as_tensor(test[1], "y of test")


def _starts(start: Any, seeds: list[int], rows: int) -> dict[int, list[int]]:
    """The first rows of each seed."""
    if isinstance(start, int):
        count = checks.whole("start", start)
        if count > rows:
            raise DataError(f"start={count}, and the pool has {rows} rows")
        return {
            int(s): torch.randperm(rows, generator=generator("first rows", s))[:count].tolist()
            for s in seeds
        }
    each = [as_tensor(own, "start").tolist() for own in start] if _nested(start) else [
        as_tensor(start, "start").tolist()
    ] * len(seeds)  # fmt: skip
    if len(each) != len(seeds) or not all(each):
        raise MethodError(f"start has rows for {len(each)} seeds, and there are {len(seeds)}")
    return {int(s): own for s, own in zip(seeds, each, strict=True)}


def _nested(start: Any) -> bool:
    return len(start) > 0 and hasattr(start[0], "__len__")
