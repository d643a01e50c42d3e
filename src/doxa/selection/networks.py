"""Selection of networks and priors (`evidence`), and of hyper-parameters from a grid (`tune`).

    log p(D | M) ≈ log p(D, θ*) + (p/2) log 2π − ½ log |H|      Laplace's evidence
    log p(D | M) ≥ E_q[log p(D | θ)] − KL(q ‖ p)                a variational bound

MacKay (1992); Immer et al. (2021). Both use all training rows and need no held-out rows; the
log likelihood of held-out rows is given beside them, to show how well they rank. Priors of one
family, splits and restarts of one network are runs of one stacked fit; networks of different shapes
are fitted one after the other.

`tune` gives the best point of a grid, whose points are runs of one stacked fit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import nn

from doxa import likelihoods
from doxa.driver.runs import Runs
from doxa.errors import DataError, DoxaError, MethodError, ModelError
from doxa.evaluate.scores import log_likelihood
from doxa.fit import fit
from doxa.laplace.laplace import Laplace
from doxa.method import Method, as_method
from doxa.posterior import Posterior
from doxa.priors import Hierarchical, Normal, Prior
from doxa.priors import prior as named_prior
from doxa.selection.result import Candidate, Evidence, ranked
from doxa.selection.splits import (
    Array,
    Split,
    indexable,
    random_splits,
    rows_in,
    worst_status,
)

FOUND = "scale found"


def data_pair(data: Any) -> tuple[Any, Any]:
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise DataError("data is a pair (x, y) of arrays or tensors")
    return data[0], data[1]


def labelled_networks(nets: Any) -> dict[str, nn.Module]:
    if isinstance(nets, nn.Module):
        nets = [nets]
    if not isinstance(nets, Mapping):
        nets = {f"net {k}": net for k, net in enumerate(nets)}
    wrong = [f"{k!r}: {type(v).__name__}" for k, v in nets.items() if not isinstance(v, nn.Module)]
    if wrong or not nets:
        given = wrong[0] if wrong else "none"
        raise ModelError(f"nets is a network, a list, or {{label: network}}, not {given}")
    return {str(label): net for label, net in nets.items()}


def prior_candidates(priors: Any) -> dict[str, Any]:
    """{label: prior, or None if its scale is to be optimised}."""
    if isinstance(priors, str | Prior) or not hasattr(priors, "__len__") or not len(priors):
        raise ModelError(f"priors is a list, or {{label: prior}}, not {priors!r}")
    pairs = priors.items() if isinstance(priors, Mapping) else [(None, p) for p in priors]
    made: dict[str, Any] = {}
    for label, given in pairs:
        number = isinstance(given, Real) and not isinstance(given, bool)
        chosen = Normal(float(given)) if number else None if given is None else named_prior(given)
        name = str(label if label is not None else FOUND if given is None else prior_label(chosen))
        if name in made:
            raise ModelError(f"prior {name!r} is given twice; a mapping gives each a label")
        made[name] = chosen
    return made


def prior_label(prior: Any) -> str:
    return repr(prior) if isinstance(prior, Prior) else f"{len(prior)} patterns"


def _family(prior: Any) -> Any:
    """The family of a prior's density; None where it has none of its own, or is given by name."""
    plain = isinstance(prior, Prior) and not isinstance(prior, Hierarchical)
    return prior.family if plain else None


def likelihood_candidates(prior_candidates: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups of priors that can be runs of one fit: of one family, on the same weights."""
    groups: dict[Any, dict[str, Any]] = {}
    for name, prior in prior_candidates.items():
        table = prior if isinstance(prior, Mapping) else {"*": prior}
        key = tuple((pattern, _family(p)) for pattern, p in table.items())
        groups.setdefault(key, {})[name] = prior
    return list(groups.values())


def outer_splits(
    outer_splits: int | Sequence[Split], rows: int, share: float, seed: int, labels: Array | None
) -> Sequence[Split]:
    """Splits into training and held-out rows; classes in proportion."""
    if not isinstance(outer_splits, int):
        return [Split(np.asarray(train), np.asarray(test)) for train, test in outer_splits]
    if share == 0:
        return [Split(np.arange(rows), np.arange(0))]
    return random_splits(rows, share, outer_splits, seed, labels)


def inner_splits(split: Split, share: float, seed: int, k: int) -> Split:
    """The training rows of a split, divided again into training and validation rows."""
    parts = random_splits(len(split.train), share, 1, seed + 7919 * (k + 1))[0]
    return Split(split.train[parts.train], split.train[parts.test])


log = logging.getLogger("doxa")
Say = Callable[[str], None]


def evidence(
    nets: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module],
    data: tuple[Any, Any],
    *,
    priors: Sequence[Any] | Mapping[str, Any] = (None,),
    likelihood: Any = None,
    subset: Any = None,
    laplace: Method | None = None,
    bound: str | Method | None = "mean-field",
    splits: int | Sequence[Split] = 1,
    test_fraction: float = 0.2,
    validation: float | None = None,
    restarts: int = 1,
    standardize: bool = True,
    seed: int = 0,
    say: Say | None = None,
    **options: Any,
) -> Evidence:
    """Compare every pair of network and prior by evidence, ELBO and held-out rows.

    Parameters
    ----------
    nets : nn.Module, sequence or mapping
        A network, a list of networks, or {label: network}.
    data : pair (x, y)
        Arrays or tensors.
    priors : sequence or mapping
        A list or {label: prior} of names, objects or {pattern: prior}. A number is the standard
        deviation of a Normal. None is a Normal whose scale Laplace optimises by the evidence.
    likelihood : str or Likelihood, optional
        As in `doxa.fit`, the same for all candidates.
    subset : optional
        As in `doxa.fit`, the same for all candidates.
    laplace : Method, optional
        The method that gives the evidence. Default: `Laplace(newton_steps=10)`, at an exact
        maximum.
    bound : str, Method or None
        The variational method that gives the ELBO: "mean-field", "last-layer-vi" (of the last layer
        alone, with point estimates of the others: not a bound on the evidence of all weights), ...;
        None for none. If the scale of a prior is optimised, the scale that Laplace found is used.
    splits : int or sequence of Split
        The number of random splits, or the splits themselves.
    test_fraction : float
        The share of held-out rows of a random split; 0: all rows are trained on, and there is no
        held-out score.
    validation : float, optional
        A share of the training rows for the usual choice by a validation score: a second fit
        without them (runs of the same stack) is scored on them.
    restarts : int
        Fits from different starts; the one with the highest evidence (or ELBO) counts.
    standardize : bool
        Standardise inputs and targets, as in `doxa.fit`.
    seed : int
        The seed of splits and fits.
    say : callable, optional
        Called with a message about each network. Default: the log.
    **options
        Options of `doxa.fit` for every fit: steps, lr, batch_size, device, progress, ...

    Returns
    -------
    Evidence
        With `best()`, `gain()`, `agreement()`, `average()`, `frame()`, `figure()`.

    Examples
    --------
    >>> import torch, doxa
    >>> x = torch.linspace(-2, 2, 60)[:, None]
    >>> y = torch.tanh(3 * x) + 0.1 * torch.sin(40 * x)
    >>> nets = {str(h): doxa.nets.mlp(1, 1, h, activation="tanh") for h in [(), (5,)]}
    >>> found = doxa.evidence(nets, (x, y), bound=None, steps=300)
    >>> found.best().net
    '(5,)'
    """
    began = time.monotonic()
    x, y = (indexable(part) for part in data_pair(data))
    rows = rows_in(x, y)
    if "members" in options or "runs" in options or "checkpoint" in options:
        raise MethodError(
            "evidence makes its own runs of one member each: members, runs and checkpoint are not "
            "allowed; restarts=4 fits each candidate from four starts"
        )
    if restarts < 1:
        raise MethodError(f"restarts must be at least 1, not {restarts}")
    named, candidates = labelled_networks(nets), prior_candidates(priors)
    inner = None
    meant = None if likelihood is None else likelihoods.likelihood(likelihood)
    classes = meant is not None and meant.classifies and y.ndim == 1
    labels = torch.as_tensor(y).cpu().numpy() if classes else None
    chosen = outer_splits(splits, rows, test_fraction, seed, labels)
    if validation is not None:
        inner = [inner_splits(split, validation, seed, k) for k, split in enumerate(chosen)]
    common = {"likelihood": likelihood, "subset": subset, "standardize": standardize}
    task = Task(
        x, y, chosen, inner, common | {"seed": seed, **options},
        [seed + 1000 * r for r in range(restarts)],
        Laplace(newton_steps=10) if laplace is None else as_method(laplace),
        None if bound is None else as_method(bound),
    )  # fmt: skip
    say = say or log.info
    found: list[Candidate] = []
    for k, (label, net) in enumerate(named.items()):
        size = sum(p.numel() for p in net.parameters() if p.requires_grad)
        runs = len(task.row_sets) * restarts * len(candidates)
        say(f"{k + 1}/{len(named)} {label}: {size:,} weights, {runs} runs")
        for group in likelihood_candidates(candidates):
            found += _attempt(task, label, net, size, group, say)
    if all(row.failed for row in found):
        raise MethodError(f"no candidate could be fitted; {found[0].name}: {found[0].reason}")
    return Evidence(
        ranked(found), tuple(named), tuple(candidates), len(chosen), len(chosen[0].train),
        len(chosen[0].test), time.monotonic() - began,
    )  # fmt: skip


@dataclass(frozen=True)
class Task:
    """The problem that every candidate gets. `inner`: training rows split again, to validate."""

    x: Any
    y: Any
    splits: Sequence[Split]
    inner: Sequence[Split] | None
    options: Mapping[str, Any]
    seeds: Sequence[int]
    laplace: Method
    bound: Method | None

    @property
    def row_sets(self) -> list[Array]:
        return [split.train for split in [*self.splits, *(self.inner or ())]]

    def fit(
        self, net: nn.Module, method: Method, rows: list[Array], by: str, **runs: Any
    ) -> list[list[Any]]:
        """The best restart of each row set and grid point, [row sets][points]."""
        sweep = fit(
            net, (self.x, self.y), method, validation=None,
            runs=Runs(rows=rows, seeds=self.seeds, **runs), **self.options,
        )  # fmt: skip
        count = len(self.seeds)
        score = dict(zip(map(id, sweep), sweep.score(by), strict=True))
        each = [list(sweep)[k : k + count] for k in range(0, len(sweep), count)]
        best = [max(starts, key=lambda p: score[id(p)]) for starts in each]
        points = len(best) // len(rows)
        return [best[k : k + points] for k in range(0, len(best), points)]

    def score(self, posteriors: Sequence[Any], splits: Sequence[Split]) -> tuple[float, ...]:
        return tuple(
            log_likelihood(posterior.predict(self.x[split.test]), self.y[split.test])
            for posterior, split in zip(posteriors, splits, strict=True)
            if len(split.test)
        )


def _attempt(
    task: Task, label: str, net: nn.Module, size: int, group: Mapping[str, Any], say: Say
) -> list[Candidate]:
    """The candidates of one network with priors of one family; after a failure the others still
    run."""
    try:
        return _candidates(task, label, net, size, group)
    except (DoxaError, torch.OutOfMemoryError) as error:
        reason = " ".join(str(error).split())
        say(f"{label} failed: {reason}")
        return [Candidate(label, name, size, status="failed", reason=reason) for name in group]


def _candidates(
    task: Task, label: str, net: nn.Module, size: int, group: Mapping[str, Any]
) -> list[Candidate]:
    outer, priors = len(task.splits), list(group.values())
    found = priors == [None]
    grid = {} if found else {"grid": {"prior": priors}}
    table = task.fit(net, task.laplace, task.row_sets, "evidence", **grid)
    made = []
    for k, name in enumerate(group):
        full, rest = (
            [points[k] for points in table[:outer]],
            [points[k] for points in table[outer:]],
        )
        status, reason = worst_status(full)
        row = Candidate(
            label, name, size, tuple(p.log_evidence for p in full),
            held_out=task.score(full, task.splits),
            validation=task.score(rest, task.inner or ()),
            scale=tuple(s for p in full for s in p.diagnostics.get("prior_scale", ())),
            status=status, reason=reason, posteriors=tuple(full),
        )  # fmt: skip
        made.append(row)
    if task.bound is None:
        return made
    if found:
        used = [posterior.priors for posterior in made[0].posteriors]
        grid = {"per_split": {"prior": [p[0] if p else Normal() for p in used]}}
    bounds = task.fit(net, task.bound, task.row_sets[:outer], "elbo", **grid)
    each = [[points[k] for points in bounds] for k in range(len(made))]
    return [
        replace(row, elbo=tuple(p.elbo for p in own), elbo_held_out=task.score(own, task.splits))
        for row, own in zip(made, each, strict=True)
    ]


def tune(
    model: Any,
    data: Any,
    method: str | Method | type[Method],
    grid: Mapping[str, Sequence[Any]],
    *,
    by: str = "validation",
    refit: bool = False,
    **options: Any,
) -> Posterior:
    """Fit a grid of hyper-parameters in one call, for any method, and return the best point.

    All points of the grid are runs of one stacked fit.

    Parameters
    ----------
    model : nn.Module or None
        The network, as in `doxa.fit`.
    data : pair (x, y) or other data
        As in `doxa.fit`.
    method : str or Method
        As in `doxa.fit`.
    grid : mapping
        {field: values}; every combination is a point. Fields of the method that a grid may vary,
        "lr", "prior", "likelihood" (noise levels), as for `doxa.Runs`.
    by : str
        "validation" (the mean log predictive density of held-out rows, the same for all points),
        "objective" (for mc-dropout), "elbo" or "evidence".
    refit : bool
        Fit the best point again, to all rows, with no held-out rows.
    **options
        Options of `doxa.fit`. By default, a fifth of the rows is held out for `by="validation"`,
        and none for the other criteria, which use all rows.

    Returns
    -------
    Posterior
        The posterior of the best point. `posterior.metadata["tuned"]` has the criterion, the chosen
        point, and a row for each point with its score.
    """
    if "runs" in options:
        raise MethodError(
            "tune makes the runs of its grid itself; for splits use "
            "doxa.fit(..., runs=doxa.Runs(rows=..., grid=...)).select(by=...)"
        )
    if not grid:
        raise MethodError('the grid is empty: give values to try, {"p": [0.01, 0.05]}')
    shown = {"validation": 0.2 if by == "validation" else None} | options
    sweep = fit(model, data, method, runs=Runs(grid=grid), **shown)
    table = sweep.table(by)
    chosen = next(i for i, row in enumerate(table) if row["chosen"])
    posterior: Posterior = sweep[chosen]
    if refit:
        point = {name: [value] for name, value in sweep.specs[chosen].hyper.items()}
        shown["validation"] = None
        posterior = fit(model, data, method, runs=Runs(grid=point), **shown)[0]
    rows = [{k: _plain(v) for k, v in row.items()} for row in table]
    own = {name: rows[chosen][name] for name in grid}
    posterior.metadata["tuned"] = {"by": by, "chosen": own, "table": rows}
    return posterior


def _plain(value: Any) -> Any:
    """A value that a file can store."""
    return value if isinstance(value, bool | int | float | str | None) else repr(value)
