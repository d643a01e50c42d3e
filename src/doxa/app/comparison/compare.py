"""`compare_arrays`: the methods one after the other, each on all splits at once.

Every method gets the same rows, network, prior and likelihood. MAP is fitted first, listed or not:
costs are multiples of its. Times are of fitting all splits together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

import doxa
from doxa import likelihoods, nets
from doxa.app.comparison.candidates import Fitted, Task, attempt, fit_splits, score
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
from doxa.app.comparison.result import Comparison, Row, ranked
from doxa.app.comparison.splits import Split, indexable, random_splits, rows_in
from doxa.app.cost import cost_words
from doxa.errors import DataError, MethodError, ModelError
from doxa.evaluate.closeness import closeness
from doxa.predictive import Predictive

log = logging.getLogger("doxa")
Say = Callable[[str], None]

REPEAT_SECONDS = 30.0


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
    """Fit every method to every split and score it on what was held out.

    Parameters
    ----------
    x, y: inputs [N, ...] and targets [N], as arrays or tensors.
    methods: names or method objects; a mapping {label: either} to compare settings of one method.
    net, likelihood, prior: what is believed, the same for all; the default net is one hidden layer
        of 50. Methods that bring their own functions (linear, gp) do not use net and prior.
    splits: how many random ones, each holding out `test_fraction`; or the splits themselves.
    reference: "auto" (a long HMC where affordable), "hmc", "none", or a `Reference`.
    say: told what is being done, for people who wait.
    options: of `doxa.fit`: steps, lr, members (not for MAP, which is one network), device, ...
    """
    chosen = _chosen(methods)
    meant = likelihoods.likelihood(likelihood)
    if isinstance(meant, likelihoods.Heads):
        raise ModelError("methods are compared on one head at a time, not on several together")
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
        say(f"reference: hmc, about {asked.seconds(*size):.0f} s of one core")
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
    """MAP, which is one network whatever `members` says; None where it cannot be fitted. A short
    fit is done twice, and the quicker one counts: the first pays for what is traced once."""
    say("map, for the costs of the others")

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
    if likelihood.name == "categorical":
        return int(torch.as_tensor(y).max()) + 1
    return 2 if likelihood.name == "heteroscedastic" else 1


def _chains(options: Mapping[str, Any], method: Any) -> int:
    return int(options.get("members") or method.default_members)


def _parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())
