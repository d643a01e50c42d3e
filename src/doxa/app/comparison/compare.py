"""Comparison of methods: `compare_arrays` for arrays, `compare_tables` for a table.

Methods run one after the other, each on all splits in one stacked run if possible. Every method
gets the same rows, network, prior and likelihood. MAP is always fitted first, because costs are
given as multiples of its cost. Times are those of fitting all splits together.

`fit_splits` fits one method to every split and measures its cost, `score` evaluates it on the
held-out rows. The splits are those of `doxa.selection.splits`.

Several processes (`torchrun`) make a comparison together: they divide the blocks of each fit, and
each of them has all posteriors and computes the scores. What is measured is the same in all: the
longest time of a fit, the processor time of all processes, and the predictions of process 0. So is
the error of a method that fails.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import doxa
from doxa import likelihoods, nets
from doxa.app.comparison.reference import (
    MOST_ROWS,
    Reference,
    Referred,
    mean_closeness,
    predict_closely,
    refer,
    reference_of,
    too_dear,
)
from doxa.app.comparison.result import Comparison, Cost, Row, ranked
from doxa.app.fitting import Plan, cost_words, make_net
from doxa.driver.processes import all_of, together
from doxa.errors import (
    DataError,
    DoxaError,
    MemoryBudgetError,
    MethodError,
    ModelError,
    ProcessError,
)
from doxa.evaluate import metrics
from doxa.evaluate.reference_distance import closeness
from doxa.evaluate.scores import log_likelihood_each
from doxa.predictive import Predictive
from doxa.selection.splits import Split, indexable, random_splits, rows_in, worst_status
from doxa.tables.files import Array
from doxa.tables.schema import Schema

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Task:
    """The problem that every method gets: data, network, likelihood, prior, and options."""

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
        if not method.holds_out:  # a method that does not use held-out rows trains on all
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
    """The posteriors of a method, one per split, and their cost."""

    posteriors: list[Any]
    cost: Cost


def fit_splits(task: Task, method: Any, **options: Any) -> Fitted:
    """Fit all splits in one stacked run; one by one if the method or the memory does not allow
    it."""
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
            task.fit(method, [each], **options | {"seed": first + k})[
                0
            ]  # the seeds of a stacked run
            for k, each in enumerate(rows)
        ]
    each = all_of("cost", [time.perf_counter() - start, time.process_time() - worked])
    seconds, worked = max(own[0] for own in each), sum(own[1] for own in each)
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
    """The row of a method: the scores of its predictions for the held-out rows of every split."""
    start = time.perf_counter()
    predictions = [
        posterior.predict(task.held_out(k)[0]) for k, posterior in enumerate(fitted.posteriors)
    ]
    predict_seconds = all_of("prediction", time.perf_counter() - start)[0]
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
    """The result of `work`, or a row with the reason of a failure: other methods still run."""
    try:
        return work()
    except ProcessError:  # of the processes, not of the method
        raise
    except (DoxaError, torch.OutOfMemoryError) as error:
        reason = all_of("failure", " ".join(str(error).split()))[0]
        return Row(method=name, status="failed", reason=reason, settings=repr(method))


log = logging.getLogger("doxa")
Say = Callable[[str], None]

REPEAT_SECONDS = 30.0


@together
def compare_arrays(
    x: Any,
    y: Any,
    methods: Iterable[Any] | Mapping[str, Any],
    *,
    net: nn.Module | None = None,
    likelihood: Any = "gaussian",
    prior: Any = None,
    splits: int | Sequence[Split] = 5,
    test_fraction: float = 0.2,
    reference: str | Reference | None = "auto",
    standardize: bool = True,
    seed: int = 0,
    say: Say | None = None,
    **options: Any,
) -> Comparison:
    """Fit every method to every split and score it on the held-out rows.

    Parameters
    ----------
    x : array or tensor
        Inputs [N, ...].
    y : array or tensor
        Targets [N].
    methods : iterable or mapping
        Names or method objects; a mapping {label: either} compares settings of one method.
    net : nn.Module, optional
        The network, the same for all methods. Default: an MLP with one hidden layer of 50. Methods
        without a network (linear, gp) do not use it.
    likelihood : str or Likelihood
        The likelihood, the same for all methods.
    prior : Prior, optional
        The prior, the same for all methods with a network.
    splits : int or sequence of Split
        The number of random splits, or the splits themselves.
    test_fraction : float
        The share of held-out rows of a random split.
    reference : {"auto", "hmc", "none"} or Reference
        The reference posterior; "auto" runs a long HMC if it is affordable.
    standardize : bool
        Standardise inputs and targets, as in `doxa.fit`.
    seed : int
        The seed of splits and fits.
    say : callable, optional
        Called with a message about each stage. Default: the log.
    **options
        Options of `doxa.fit`: steps, lr, members (not for MAP, which is one network), device, ...

    Returns
    -------
    Comparison
        One row per method, the best first.
    """
    chosen = _chosen(methods)
    meant = likelihoods.likelihood(likelihood)
    if isinstance(meant, likelihoods.Heads):
        raise ModelError("methods are compared on one head, not on several together")
    for name, method in chosen.items():
        if meant.classifies and method.regression_only:
            raise MethodError(f"method {name!r} is for regression only, and the target is a class")
    x, y = indexable(x), indexable(y)
    rows = rows_in(x, y)
    if isinstance(splits, int):
        labels = torch.as_tensor(y).cpu().numpy() if meant.classifies and y.ndim == 1 else None
        splits = random_splits(rows, test_fraction, splits, seed, labels)
    say = say or log.info
    net = net if net is not None else nets.mlp(_width(x), _outputs(y, meant), (50,))
    task = Task(x, y, splits, net, likelihood, prior, standardize, seed, options)
    size = (_parameters(net), len(splits[0].train))
    asked = reference_of(reference)
    note = "" if asked is None else too_dear(asked, *size)
    if note:
        say(note)
        asked = None

    baseline = _baseline(task, say)
    referred: Referred | None = None
    answers: list[Predictive] = []
    if asked is not None:
        say(f"reference: hmc, about {asked.seconds(*size):.0f} s on one core")
        referred, answers = refer(task, asked)
        say(referred.words)
    table = []
    for k, (name, method) in enumerate(chosen.items()):
        cost = cost_words(method, _chains(options, method) * len(splits), *size)
        say(f"{k + 1}/{len(chosen)} {cost or name}")
        ready = baseline if method == doxa.MAP() else None
        row = attempt(name, method, partial(_row, task, name, method, answers, ready))
        if row.failed:
            say(f"{name} failed: {row.reason}")
        table.append(row)
    return Comparison(
        rows=ranked(table),
        likelihood=meant.name,
        splits=len(splits),
        train_rows=len(splits[0].train),
        test_rows=len(splits[0].test),
        seed=seed,
        map_cost=None if baseline is None else baseline.cost,
        reference=referred,
        notes=(note,) if note else (),
    )


def _row(
    task: Task, name: str, method: Any, answers: Sequence[Predictive], ready: Fitted | None
) -> Row:
    fitted = ready or fit_splits(task, method)
    row = score(task, name, method, fitted)
    if not answers:
        return row
    each = [
        closeness(predict_closely(posterior, task.held_out(k)[0][:MOST_ROWS]), answers[k])
        for k, posterior in enumerate(fitted.posteriors[: len(answers)])
    ]
    return replace(row, closeness=mean_closeness(each))


def _baseline(task: Task, say: Say) -> Fitted | None:
    """MAP, which is one network for any value of `members`; None if it cannot be fitted. A short
    fit is done twice and the faster one counts, because the first includes tracing."""
    say("map, the baseline of the costs")

    def work() -> Fitted:
        first = fit_splits(task, doxa.MAP(), members=1)
        if first.cost.seconds > REPEAT_SECONDS:
            return first
        return min(first, fit_splits(task, doxa.MAP(), members=1), key=lambda f: f.cost.time)

    done = attempt("map", doxa.MAP(), work)
    return done if isinstance(done, Fitted) else None


def _chosen(methods: Iterable[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """{label: method object}."""
    if isinstance(methods, str):
        raise MethodError(f"methods is a list of names, not the text {methods!r}")
    if isinstance(methods, Mapping):
        pairs = list(methods.items())
    else:
        pairs = [(m if isinstance(m, str) else m.name, m) for m in methods]
    if not pairs:
        raise MethodError("there are no methods to compare")
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise MethodError(f"method {twice!r} is given twice; a mapping gives each a label")
    return {n: doxa.get_method(m)() if isinstance(m, str) else m for n, m in pairs}


def _width(x: Any) -> int:
    if x.ndim != 2:
        raise DataError("give a net: the default one is for x of shape [N, D]")
    return int(x.shape[1])


def _outputs(y: Any, likelihood: Any) -> int:
    if likelihood.class_axis:
        return int(torch.as_tensor(y).max()) + 1
    return int(likelihood.outputs(torch.empty(1))[0])


def _chains(options: Mapping[str, Any], method: Any) -> int:
    return int(options.get("members") or method.default_members)


def _parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def compare_tables(
    schema: Schema,
    frame: pd.DataFrame,
    test: pd.DataFrame | None,
    methods: Sequence[str],
    plan: Plan,
    *,
    splits: int = 5,
    test_fraction: float = 0.2,
    reference: str | Reference | None = "auto",
    say: Say | None = None,
) -> Comparison:
    """Compare methods on a table; a table of held-out rows `test` gives one split."""
    x, _ = schema.features(frame)
    y = schema.targets(frame)
    chosen: int | list[Split] = splits
    if test is not None:
        n = len(x)
        x = np.concatenate([x, schema.features(test)[0]])
        y = np.concatenate([y, schema.targets(test)])
        chosen = [Split(np.arange(n), np.arange(n, len(x)))]
    return compare_arrays(
        x,
        y,
        methods,
        net=make_net(plan, schema.inputs, schema.outputs),
        likelihood=schema.likelihood,
        splits=chosen,
        test_fraction=test_fraction,
        reference=reference,
        seed=plan.seed,
        say=say,
        validation=plan.held_out,
        progress=True,
        **plan.options(),
    )
