"""One method on every split: fitted in one stacked run where it can be, scored, its cost taken."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

import doxa
from doxa.app.comparison.result import Cost, Row
from doxa.app.comparison.splits import Split
from doxa.app.tables import Array
from doxa.errors import DoxaError, MemoryBudgetError, MethodError
from doxa.evaluate import metrics
from doxa.evaluate.scores import log_likelihood_each


@dataclass(frozen=True)
class Task:
    """What every method is given: data, belief and how to fit."""

    x: Any
    y: Any
    splits: Sequence[Split]
    net: nn.Module
    likelihood: Any
    prior: Any = None
    standardize: bool = True
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def held_out(self, k: int) -> tuple[Any, Any]:
        return self.x[self.splits[k].test], self.y[self.splits[k].test]

    def fit(self, method: Any, rows: Sequence[Array], **options: Any) -> list[Any]:
        """A posterior for each set of training rows, in one stacked run."""
        brings_functions = not method.needs_network
        asked = {"seed": self.seed, **self.options, **options}
        if not method.holds_out:  # rows held out for nothing would only be missed
            asked.pop("validation", None)
        sweep = doxa.fit(
            None if brings_functions else self.net,
            (self.x, self.y),
            method,
            likelihood=self.likelihood,
            prior=None if brings_functions else self.prior,
            standardize=self.standardize,
            runs=doxa.Runs(rows=rows),
            **asked,
        )
        return list(sweep)


@dataclass(frozen=True)
class Fitted:
    """The posteriors of a method, one a split, and what they cost."""

    posteriors: list[Any]
    cost: Cost


def fit_splits(task: Task, method: Any, **options: Any) -> Fitted:
    """All splits stacked; one at a time where the method or the memory does not allow that."""
    rows = [split.train for split in task.splits]
    device = task.options.get("device")
    cuda = device is not None and torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    start, worked, stacked = time.perf_counter(), time.process_time(), True
    try:
        posteriors = task.fit(method, rows, **options)
    except (MethodError, MemoryBudgetError, torch.OutOfMemoryError):
        if len(rows) == 1:
            raise
        stacked = False
        first = {"seed": task.seed, **task.options, **options}["seed"]
        posteriors = [
            task.fit(method, [each], **options | {"seed": first + k})[0]  # as they have stacked
            for k, each in enumerate(rows)
        ]
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    kept = [t for t in posteriors[0].tensors().values() if t.is_floating_point()]
    cost = Cost(
        seconds=seconds,
        processor_seconds=worked,
        predict_seconds=math.nan,
        parameters=sum(t.numel() for t in kept),
        posterior_bytes=sum(t.numel() * t.element_size() for t in kept),
        peak_bytes=torch.cuda.max_memory_allocated(device) if cuda else None,
        stacked=stacked,
    )
    return Fitted(posteriors, cost)


def score(task: Task, name: str, method: Any, fitted: Fitted) -> Row:
    """The row of a method: its predictions of every split's held-out rows, scored."""
    start = time.perf_counter()
    predictions = [
        posterior.predict(task.held_out(k)[0]) for k, posterior in enumerate(fitted.posteriors)
    ]
    predict_seconds = time.perf_counter() - start
    scores: dict[str, list[float]] = {}
    each = []
    for k, p in enumerate(predictions):
        y = task.held_out(k)[1]
        for key, value in metrics(p, y).items():
            scores.setdefault(key, []).append(float(value))
        each.append(log_likelihood_each(p, y).cpu().numpy())
    status, reason = worst_status(fitted.posteriors)
    return Row(
        method=name,
        status=status,
        reason=reason,
        settings=repr(method),
        scores={key: tuple(values) for key, values in scores.items()},
        each=tuple(each),
        cost=replace(fitted.cost, predict_seconds=predict_seconds),
    )


def attempt(name: str, method: Any, work: Callable[[], Any]) -> Any:
    """What `work` gives, or the row of a method that could not: the others go on."""
    try:
        return work()
    except (DoxaError, torch.OutOfMemoryError) as error:
        reason = " ".join(str(error).split())
        return Row(method=name, status="failed", reason=reason, settings=repr(method))


def worst_status(posteriors: Sequence[Any]) -> tuple[str, str]:
    """ "ok", or what is wrong and on how many splits."""
    wrong = [posterior.status for posterior in posteriors if posterior.status != "ok"]
    if not wrong:
        return "ok", ""
    status, count = str(wrong[0]), len(posteriors)
    return status if count == 1 else f"{status} ({len(wrong)} of {count})", wrong[0].reason
