"""One round of active learning for several learners at once.

The fit of a round is one stacked fit: each learner is a run with rows and a seed of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from doxa.decide.acquisition import Acquisition, acquisition
from doxa.decide.active.book import Labels, save
from doxa.decide.active.learned import Learned, Learner
from doxa.decide.active.oracle import Oracle, Table, labels_of
from doxa.decide.active.stopping import Stopping
from doxa.decide.score import block_rows, joint, kept, score
from doxa.decide.select import select
from doxa.driver.runs import Runs, RunSpec
from doxa.evaluate.streaming import Streaming
from doxa.fit import fit
from doxa.method import Method
from doxa.noise import digest, generator

log = logging.getLogger("doxa")


@dataclass
class Work:
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
    labels: Labels = field(default_factory=Labels)
    ways: dict[str, str | Acquisition] = field(default_factory=dict)
    starts: dict[int, list[int]] = field(default_factory=dict)

    def facts(self, ways: Sequence[Any], seeds: Sequence[int], start: Any) -> dict[str, Any]:
        """What a campaign in a folder must have been started with to be gone on with."""
        return {
            "rows": self.rows, "method": repr(self.method), "by": [name_of(way) for way in ways],
            "seeds": [int(seed) for seed in seeds], "start": repr(start)[:2000],
            "step": self.step, "warm": self.warm, "n": self.n, "sample": self.sample,
            "diversity": self.diversity, "beta": self.beta,
            "options": {name: repr(value)[:200] for name, value in sorted(self.options.items())},
        }  # fmt: skip

    def advance(self, found: Learned, oracle: Oracle | None) -> bool:
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
                fresh = labels_of(oracle, new) if new else {}
                given = known | {row: self.labels.checked(row, fresh[row]) for row in new}
                one.book.answer({row: given[row] for row in one.book.asked})
                if not isinstance(oracle, Table):
                    self._save(found)  # what an oracle was asked is not asked again
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
        """More rows at random: labels of one class teach nothing that rows could be chosen by."""
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
                book.rounds.pop()  # it was the last one, and now there is a larger budget
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


def _seed(one: Learner) -> int:
    """Of one round of one learner."""
    return digest("active", one.seed, len(one.book.answers)) & 0x7FFFFFFF


def name_of(way: str | Acquisition) -> str:
    """What an acquisition is called; an unknown name is an error before any work."""
    if isinstance(way, str) and way.replace("-", "_") not in ("random", "batch_bald"):
        acquisition(way)
    return way if isinstance(way, str) else getattr(way, "__name__", type(way).__name__)
