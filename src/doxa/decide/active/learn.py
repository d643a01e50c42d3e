"""The loop: fit, score the pool, ask, label, and again.

Several acquisitions and seeds are runs of one stacked fit in each round: every learner has its own
rows, its own seed and its own book. What a round does is a function of the seed, the round and the
labels so far, so a campaign that was stopped goes on as if it had not been.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa import checks, store
from doxa.data import as_tensor, as_tensors, gathered, rows_of
from doxa.decide.acquisition import Acquisition, acquisition
from doxa.decide.active.book import Book, load, save
from doxa.decide.active.learned import Learned, Learner
from doxa.decide.active.oracle import labels_of, oracle_of
from doxa.decide.active.stopping import Stopping
from doxa.decide.score import block_rows, kept, score
from doxa.decide.select import select
from doxa.driver.bar import shown
from doxa.driver.runs import Runs, RunSpec
from doxa.errors import DataError, MethodError, StoreError
from doxa.evaluate.streaming import Streaming
from doxa.fit import fit
from doxa.method import Method, as_method
from doxa.noise import digest, generator
from doxa.posterior import load as load_posterior


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
    """Learn from as few labels as it takes.

    Parameters
    ----------
    model, method, **options: as in `doxa.fit`, which is called once a round for all runs.
    pool: the inputs x, [N, …], labelled or not.
    oracle: who labels: a table [N, …] of all labels, a function from row numbers [k] to k labels,
        or None for a person: the campaign then stops with rows asked, `answer(folder, {row:
        label})` enters what came back, and the same call goes on.
    by: how rows are chosen (see `decide.select`), or a list of ways, each a campaign of its own.
    start: how many rows are labelled first, at random by the seed; or the rows themselves, or a
        list of rows for each seed.
    step: how many rows are asked about in each round.
    budget, target, patience, metric: see `Stopping`. Without any, until the pool is empty.
    test: (x, y) to score each round on, for the learning curve and the rules.
    seeds: each a campaign of its own.
    warm: a round's fit starts where the last one ended; else anew.
    n: functions for each prediction. sample: score only so many rows, drawn anew each round.
    diversity, beta: see `decide.select`.
    folder: keeps the books, atomically; the same call then goes on after a crash.
    callback: called after each round with what there is; one that returns True stops the campaign.
    """
    x = as_tensors(gathered(pool), "the pool")
    rows = rows_of(x, "the pool")
    if rows == 0:
        raise DataError("the pool is empty: there is nothing to learn from")
    ways = [by] if isinstance(by, str) or callable(by) else list(by)
    work = _Work(
        model, as_method(method), x, rows, Stopping(budget, target, patience, metric),
        checks.whole("step", step), warm, n, sample, diversity, beta, _pair(test), options,
        None if folder is None else Path(folder),
    )  # fmt: skip
    facts = work.facts(ways, seeds, start)
    learners = _begun(work.folder, facts) or [
        Learner(_name(way), int(seed), Book(rows)) for way in ways for seed in seeds
    ]
    work.ways = {_name(way): way for way in ways}
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
            if not moved or (callback is not None and callback(found)):
                break
    return found


@dataclass
class _Work:
    """What does not change during a campaign."""

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
    ways: dict[str, str | Acquisition] = field(default_factory=dict)
    starts: dict[int, list[int]] = field(default_factory=dict)

    def facts(self, ways: Sequence[Any], seeds: Sequence[int], start: Any) -> dict[str, Any]:
        """What a campaign in a folder must have been started with to be gone on with."""
        return {
            "rows": self.rows, "method": repr(self.method), "by": [_name(way) for way in ways],
            "seeds": [int(seed) for seed in seeds], "start": repr(start)[:2000],
            "step": self.step, "warm": self.warm, "n": self.n, "sample": self.sample,
            "diversity": self.diversity, "beta": self.beta,
            "options": {name: repr(value)[:200] for name, value in sorted(self.options.items())},
        }  # fmt: skip

    def advance(self, found: Learned, oracle: Any) -> bool:
        """Answers to what is open, or else a round of those who have not stopped; False where
        nothing is left to do."""
        learners = found.learners
        waiting = [one for one in learners if one.book.asked]
        if waiting:
            if oracle is None:
                found.waiting = True
                return True
            for one in waiting:
                known = self._known(learners)  # no row is asked twice, whoever asks
                new = [row for row in one.book.asked if row not in known]
                given = known | (labels_of(oracle, new) if new else {})
                one.book.answer({row: given[row] for row in one.book.asked})
            self._save(found)
            return True
        for one in learners:
            if not one.book.answers:
                one.book.ask(self.starts[one.seed])
        active = [one for one in learners if not one.book.asked and not one.book.stopped]
        if active:
            self._round(active, learners)
        self._save(found)
        return any(one.book.asked for one in learners)

    def _round(self, active: list[Learner], learners: list[Learner]) -> None:
        began = time.perf_counter()
        self._fit(active, self._known(learners))
        fitted = (time.perf_counter() - began) / len(active)
        for one in active:
            began = time.perf_counter()
            book = one.book
            scores = {} if self.test is None else scored(one.posterior, self.test, self.n)
            book.rounds.append({"labels": len(book.answers), **scores})
            book.stopped = self.stopping.reason(book)
            if not book.stopped:
                book.ask(self._choose(one))
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

    def _choose(self, one: Learner) -> list[int]:
        """The next rows of one learner."""
        book, way, seed = one.book, self.ways[one.by], _seed(one)
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
            found = one.posterior.predict(x, kept(one.posterior, self.n))
        else:
            found = score(one.posterior, x, way, n=self.n)
        options = {"diversity": self.diversity, "beta": self.beta, "seed": seed}
        return free[select(found, k, way, **options)].tolist()

    def _known(self, learners: list[Learner]) -> dict[int, Any]:
        return {row: label for one in learners for row, label in one.book.answers.items()}

    def _save(self, found: Learned) -> None:
        if self.folder is None:
            return
        if self.warm:
            for i, one in enumerate(found.learners):
                if one.posterior is not None:
                    one.posterior.save(self.folder / f"posterior-{i}")
        save(self.folder, [one.book for one in found.learners], found.facts)


class _Own(Runs):
    """Runs whose seeds are their own, one for each set of rows."""

    def expand(self, seed: int) -> list[RunSpec]:
        assert self.rows is not None and self.seeds is not None
        pairs = zip(self.rows, self.seeds, strict=True)
        return [RunSpec(rows, {}, own, i) for i, (rows, own) in enumerate(pairs)]


def scored(posterior: Any, test: tuple[Any, Tensor], n: int | None) -> dict[str, float]:
    """`doxa.evaluate.metrics` of the test rows, a block at a time."""
    x, y = test
    count = kept(posterior, n)
    size = block_rows(posterior, count)
    stream = Streaming()
    for start in range(0, len(y), size):
        some = tree_map(lambda t, start=start: t[start : start + size], x)
        stream.update(posterior.predict(some, count), y[start : start + size])
    return stream.result()


def answer(folder: str | Path, answers: dict[int, Any], run: int = 0, partial: bool = False) -> int:
    """Enter a person's labels into the books in a folder, {row: label}, all of them or none; how
    many rows are still open."""
    found = load(Path(folder))
    if found is None:
        raise StoreError(f"{folder} holds no campaign: learn(..., folder=) starts one")
    books, facts = found
    books[run].answer(answers, partial)
    save(Path(folder), books, facts)
    return len(books[run].asked)


def _begun(folder: Path | None, facts: dict[str, Any]) -> list[Learner] | None:
    """The learners of a campaign that was begun in a folder, with the same settings."""
    found = None if folder is None else load(folder)
    if found is None or folder is None:
        return None
    books, before = found
    differ = [name for name in facts if before.get(name) != facts[name]]
    if differ:
        raise StoreError(
            f"{folder} holds another campaign: {differ[0]} was {before.get(differ[0])!r}, and is "
            f"{facts[differ[0]]!r}; choose another folder"
        )
    pairs = [(way, seed) for way in facts["by"] for seed in facts["seeds"]]
    learners = []
    for i, ((way, seed), book) in enumerate(zip(pairs, books, strict=True)):
        book.stopped = ""  # a larger budget goes on
        place = folder / f"posterior-{i}"
        kept_posterior = load_posterior(place) if store.is_artefact(place) else None
        learners.append(Learner(way, seed, book, kept_posterior))
    return learners


def _seed(one: Learner) -> int:
    """Of one round of one learner."""
    return digest("active", one.seed, len(one.book.answers)) & 0x7FFFFFFF


def _name(way: str | Acquisition) -> str:
    if isinstance(way, str) and way.replace("-", "_") not in ("random", "batch_bald"):
        acquisition(way)  # known, or an error before any work
    return way if isinstance(way, str) else getattr(way, "__name__", type(way).__name__)


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
