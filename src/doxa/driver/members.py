"""Runs × members as one axis M: who starts where, with which hyper-parameters and prior."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from doxa import checks
from doxa.data import Data
from doxa.driver.holdout import Splits
from doxa.driver.runs import RunSpec
from doxa.engine import Engine
from doxa.errors import DataError, MethodError, ModelError
from doxa.likelihoods import Gaussian, Likelihood
from doxa.linalg.layout import Params
from doxa.method import FitSettings, Method, Run
from doxa.model import Model
from doxa.model.problem import Problem
from doxa.priors import BoundPrior, bind, stack_bound

log = logging.getLogger("doxa")

OBJECTS = ("prior", "likelihood")  # what a grid may hold besides numbers


def stack(
    problem: Problem, method: Method, likelihood: Likelihood, data: Data,
    splits: Splits, specs: Sequence[RunSpec], ids: list[int], output: Any, inputs: Any,
    settings: FitSettings,
) -> Run:  # fmt: skip
    """Runs × members as one axis M; the engine is chosen later."""
    count = len(ids)
    run_of = [r for r in range(len(specs)) for _ in ids]
    split_of = list(splits.of or run_of)
    if method.needs_network and all(
        name.startswith("likelihood.") for name in problem.layout.names
    ):
        raise ModelError("the network has no trainable parameter: requires_grad is False on all")
    if problem.batch_norm:
        _say_batch_norm(problem.net)
    if problem.model is not None and problem.model.written:
        names = ", ".join(problem.model.written[:5])
        log.info("training changes the buffers %s: each member keeps its own", names)
    hyper: dict[str, Tensor] = {}
    priors: list[Any] | None = None
    if any(spec.hyper for spec in specs):
        hyper, priors = _hyper(method, specs, count, data, method.uses_rate or problem.partial)
    likelihoods = [spec.hyper.get("likelihood", likelihood) for spec in specs]
    for own in likelihoods:
        if own != likelihood:
            _check_likelihood(own, likelihood, output)
    run = Run(
        problem, likelihood, data, Engine(), members=[m for _ in specs for m in ids],
        run_of=run_of, split_of=split_of, seeds=[spec.seed for spec in specs for _ in ids],
        n=data.total_weight(split_of),
        prior=_bound_prior(problem, priors, count).to(data.device, data.dtype),
        initial=torch.empty(0), hyper=hyper,
        constants=_constants(likelihoods, output, data, run_of), settings=settings, inputs=inputs,
        output=output, likelihoods=likelihoods,
    )  # fmt: skip
    run = replace(run, initial=_initial(run))
    weights = method.row_weights(run)
    if weights is not None:
        run = _with_weights(run, method, weights)
    if bool((run.n <= 0).any()):
        raise DataError("the sample weights of a run's rows are all zero: nothing is left to fit")
    return run


def _with_weights(run: Run, method: Method, weights: Tensor) -> Run:
    """Row weights that the method has for each member, times the user's."""
    data = run.rows
    if weights.shape != (run.size, data.total):
        raise MethodError(
            f"{method.name} gives row weights of shape {list(weights.shape)}, not one for each "
            f"member and row, {[run.size, data.total]}"
        )
    weights = weights.to(data.device, data.dtype)
    data = replace(data, weight=weights if data.weight is None else weights * data.weight)
    return replace(run, data=data, n=data.total_weight(run.split_of))


def member_ids(members: int | Sequence[int] | None, method: Method) -> list[int]:
    if members is None:
        return list(range(method.default_members))
    if not isinstance(members, Iterable):
        return list(range(checks.whole("members", members)))
    ids = [checks.whole("a member's id", m, least=0) for m in members]
    if not ids or len(set(ids)) != len(ids):
        raise MethodError(f"members must be a positive number or distinct ids, not {members!r}")
    return ids


def _say_batch_norm(model: Model) -> None:
    if model.momenta:
        log.info("the network has BatchNorm: each member keeps running statistics of its own")
    else:
        log.warning(
            "the network has BatchNorm without running statistics: a prediction depends on the "
            "rows it is made with"
        )


def _initial(run: Run) -> Tensor:
    """Where the weights of each member start, [M, P]."""
    model = run.problem.model
    if model is None:
        return torch.zeros(run.size, 0, device=run.device, dtype=run.dtype)
    if run.settings.begin is not None:
        return _begun(run, run.settings.begin)
    if not run.settings.fresh:
        return model.given().expand(run.size, -1).clone()
    pairs = run.starts
    distinct = list(dict.fromkeys(pairs))
    return model.fresh(distinct)[[distinct.index(pair) for pair in pairs]]


def _begun(run: Run, begin: Tensor) -> Tensor:
    """Where earlier fits ended, checked: one row for each run and member."""
    if begin.shape != (run.size, run.layout.size):
        raise MethodError(
            f"init: the posteriors hold {begin.shape[0]} points of {begin.shape[1]} weights, and "
            f"the fit has {run.size} members (of all runs) with {run.layout.size}"
        )
    return begin.to(run.device, run.dtype).clone()


def _hyper(
    method: Method, specs: Sequence[RunSpec], count: int, data: Data, rated: bool
) -> tuple[dict[str, Tensor], list[Any] | None]:
    """Hyper-parameters that differ between runs, [M] each; priors are handed over as objects."""
    fields = sorted({name for spec in specs for name in spec.hyper})
    known = {*method.settings(), "lr", *OBJECTS}
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise MethodError(f"grid over unknown fields {unknown}; {method.name} has {sorted(known)}")
    common = set(method.settings()) - set(method.per_run)
    if common & set(fields):
        raise MethodError(
            f"{sorted(common & set(fields))} cannot differ between the runs of one fit of "
            f"{method.name}; a grid may vary {sorted(known - common)}: fit once for each value"
        )
    if "lr" in fields and not rated:
        raise MethodError(
            f"{method.name} uses no learning rate: a grid over lr would change nothing"
        )
    hyper = {}
    for name in fields:
        if name in OBJECTS:
            continue
        try:
            values = [float(spec.hyper[name]) for spec in specs for _ in range(count)]
        except (TypeError, ValueError) as error:
            raise MethodError(f"a grid stacks numbers only; {name} has {error}") from error
        given = (spec.hyper[name] for spec in specs)
        for value in {one.item() if isinstance(one, Tensor) else one for one in given}:
            if name == "lr":
                checks.positive("lr", value)
            else:
                replace(method, **{name: value})  # type: ignore[type-var]  # the method's own checks
        hyper[name] = torch.tensor(values, device=data.device, dtype=data.dtype)
    priors = [spec.hyper["prior"] for spec in specs] if "prior" in fields else None
    return hyper, priors


def _bound_prior(problem: Problem, priors: list[Any] | None, count: int) -> BoundPrior:
    if priors is not None:
        each = [bind(prior, problem.layout) for prior in priors for _ in range(count)]
        return stack_bound(each)
    return bind(problem.model.prior if problem.model is not None else None, problem.layout)


def _check_likelihood(own: Likelihood, common: Likelihood, output: Any) -> None:
    """A run's may differ in the given noise of a Gaussian, which every member has as a number of
    its own; a step reads everything else from the model's likelihood."""
    learned = common.parameters(output).keys()
    if type(own) is not type(common) or own.parameters(output).keys() != learned:
        raise MethodError(
            f"a grid of likelihoods keeps to the model's family and to what it learns: "
            f"{own!r} cannot stand beside {common!r}"
        )
    if not isinstance(common, Gaussian):
        raise MethodError(
            f"a grid of likelihoods may vary the given noise of a Gaussian only: fit once for "
            f"each of {own!r} and {common!r}"
        )


def _constants(
    likelihoods: Sequence[Likelihood], output: Any, data: Data, run_of: list[int]
) -> Params:
    """Fixed likelihood parameters of each member, in fitted units."""
    each = [likelihoods[r].constants(output, data.scales[r].y_scale) for r in run_of]
    return {
        name: torch.stack([c[name].to(data.device, data.dtype) for c in each]) for name in each[0]
    }
