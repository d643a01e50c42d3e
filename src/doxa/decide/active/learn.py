"""The loop: fit, score the pool, ask, label, and again.

Several acquisitions and seeds are runs of one stacked fit in each round: every learner has its own
rows, its own seed and its own book. What a round does is a function of the seed, the round and the
labels so far, so a campaign that was stopped goes on as if it had not been.
"""

from __future__ import annotations

import hashlib
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from doxa import checks, store
from doxa.data import as_tensor, as_tensors, gathered, rows_of
from doxa.decide.acquisition import Acquisition
from doxa.decide.active.book import Book, Labels, load, save
from doxa.decide.active.learned import Learned, Learner
from doxa.decide.active.oracle import oracle_of
from doxa.decide.active.rounds import Work, name_of
from doxa.decide.active.stopping import Stopping
from doxa.driver.bar import shown
from doxa.errors import DataError, MethodError, StoreError
from doxa.likelihoods import likelihood as as_likelihood
from doxa.method import Method, as_method
from doxa.model import Model
from doxa.model.meaning import looked_at
from doxa.noise import generator
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
        list of rows for each seed. While all labels are of one class, further rows are drawn at
        random and nothing is fitted.
    step: how many rows are asked about in each round.
    budget, target, patience, metric: see `Stopping`. Without any, until the pool is empty.
    test: (x, y) to score each round on, for the learning curve and the rules.
    seeds: each a campaign of its own.
    warm: a round's fit starts where the last one ended; else anew.
    n: functions for each prediction. sample: score only so many rows, drawn anew each round.
    diversity, beta: see `decide.select`.
    folder: keeps the books, atomically; the same call, on the same pool, then goes on after a
        crash.
    callback: called after each round with what there is; one that returns True stops the campaign.
    """
    x = as_tensors(gathered(pool), "the pool")
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
        Learner(name_of(way), int(seed), Book(rows)) for way in ways for seed in seeds
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
            enough = callback is not None and callback(found)  # told of the last round too
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
    """Enter a person's labels into the books in a folder, all of them or none.

    Parameters
    ----------
    folder: that of `learn`.
    answers: {row: label}; a label is a number that the likelihood can have, such as a class.
    run: which learner was asked.
    partial: take labels of some of the rows that were asked about; the others stay open.
    correct: rows that have a label already are given this one instead, in every learner's book.

    Returns
    -------
    How many rows are still open.
    """
    found = load(Path(folder))
    if found is None:
        raise StoreError(f"{folder} holds no campaign: learn(..., folder=) starts one")
    books, facts = found
    if not 0 <= run < len(books):
        raise MethodError(f"run = {run}, and the campaign has runs 0 … {len(books) - 1}")
    labels = Labels.of(facts.get("labels"))
    checked = {}
    for row, label in answers.items():
        try:
            number = operator.index(row)
        except TypeError:
            raise DataError(f"{row!r} is no row: answers are {{row number: label}}") from None
        checked[number] = labels.checked(number, label)
    books[run].answer(checked, partial, correct)
    for book in books:  # labels are shared: no row is asked twice, whoever asks
        book.answers.update((row, checked[row]) for row in checked if row in book.answers)
    shapes = {tuple(torch.as_tensor(label).shape) for label in books[run].answers.values()}
    if len(shapes) > 1:
        raise DataError(f"labels have shapes {sorted(map(list, shapes))}, and one is needed")
    save(Path(folder), books, facts)
    return len(books[run].asked)


def _labels(model: Any, x: Any, likelihood: Any) -> Labels:
    """What labels may be, from the likelihood and the network's output for one row."""
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
    """The learners of a campaign that was begun in a folder, with the same settings."""
    folder = work.folder
    found = None if folder is None else load(folder)
    if found is None or folder is None:
        return None
    books, before = found
    known = {name: facts[name] for name in ("pool", "labels")} | before  # not kept at first
    if known["pool"] != facts["pool"]:
        raise StoreError(
            f"{folder} holds a campaign on another pool of {before.get('rows')} rows: pass the "
            "pool that it was begun with, or choose another folder"
        )
    differ = [name for name in facts if known.get(name) != facts[name]]
    if differ:
        raise StoreError(
            f"{folder} holds another campaign: {differ[0]} was {before.get(differ[0])!r}, and is "
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
        book.stopped = ""  # a larger budget goes on
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
