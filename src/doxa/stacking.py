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
from doxa.engine import Engine
from doxa.errors import DataError, MethodError, ModelError
from doxa.layout import Layout, Params
from doxa.likelihoods import Gaussian, Likelihood
from doxa.method import Method
from doxa.model import Model
from doxa.priors import BoundPrior, bind, stack_bound
from doxa.run import Run
from doxa.runs import RunSpec

log = logging.getLogger("doxa")

OBJECTS = ("prior", "likelihood")  # what a grid may hold besides numbers


def stack(
    model: Model | None, method: Method, likelihood: Likelihood, data: Data,
    specs: Sequence[RunSpec], ids: list[int], output: Any, init: str, inputs: Any,
) -> Run:  # fmt: skip
    """Runs × members as one axis M."""
    count = len(ids)
    run_of = [r for r in range(len(specs)) for _ in ids]
    members = [m for _ in specs for m in ids]
    seeds = [spec.seed for spec in specs for _ in ids]
    layout = model.layout if model is not None else Layout(())
    if method.needs_network and all(name.startswith("likelihood.") for name in layout.names):
        raise ModelError("the network has no trainable parameter: requires_grad is False on all")
    totals = data.total_weight(run_of)
    if bool((totals <= 0).any()):
        raise DataError("the sample weights of a run's rows are all zero: nothing is left to fit")
    if model is not None and model.batch_norm:
        _say_batch_norm(model)
    hyper, priors = _hyper(method, specs, count, data)
    likelihoods = _likelihoods(likelihood, specs, output)
    bound = _bound_prior(model, layout, priors, count).to(data.device, data.dtype)
    run = Run(
        model, likelihood, layout, bound, data, Engine(), members, run_of, seeds,
        totals, data.device, data.dtype, hyper,
        _constants(likelihoods, output, data, run_of), inputs=inputs, likelihoods=likelihoods,
    )  # fmt: skip
    if model is not None:
        run.initial = _initial(model, run, init)
    return run


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
    if model.tracked:
        log.info("the network has BatchNorm: each member keeps running statistics of its own")
    else:
        log.warning(
            "the network has BatchNorm without running statistics: a prediction depends on the "
            "rows it is made with"
        )


def _initial(model: Model, run: Run, init: str) -> Tensor:
    if init == "given":
        return model.given().expand(run.size, -1).clone()
    if init != "fresh":
        raise MethodError(f"init must be 'fresh' or 'given', not {init!r}")
    pairs = list(zip(run.seeds, run.members, strict=True))
    distinct = list(dict.fromkeys(pairs))
    return model.fresh(distinct)[[distinct.index(pair) for pair in pairs]]


def _hyper(
    method: Method, specs: Sequence[RunSpec], count: int, data: Data
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


def _bound_prior(
    model: Model | None, layout: Layout, priors: list[Any] | None, count: int
) -> BoundPrior:
    if priors is not None:
        return stack_bound([bind(prior, layout) for prior in priors for _ in range(count)])
    return bind(model.prior if model is not None else None, layout)


def _likelihoods(common: Likelihood, specs: Sequence[RunSpec], output: Any) -> list[Likelihood]:
    """Each run's own. They may differ in the given noise of a Gaussian, which every member has as
    a number of its own; a step reads everything else from the model's likelihood."""
    each = [spec.hyper.get("likelihood", common) for spec in specs]
    learned = common.parameters(output).keys()
    for own in each:
        if type(own) is not type(common) or own.parameters(output).keys() != learned:
            raise MethodError(
                f"a grid of likelihoods keeps to the model's family and to what it learns: "
                f"{own!r} cannot stand beside {common!r}"
            )
        if own != common and not isinstance(common, Gaussian):
            raise MethodError(
                f"a grid of likelihoods may vary the given noise of a Gaussian only: fit once for "
                f"each of {own!r} and {common!r}"
            )
    return each


def _constants(
    likelihoods: Sequence[Likelihood], output: Any, data: Data, run_of: list[int]
) -> Params:
    """Fixed likelihood parameters of each member, in fitted units."""
    each = [likelihoods[r].constants(output, data.scales[r].y_scale) for r in run_of]
    return {
        name: torch.stack([c[name].to(data.device, data.dtype) for c in each]) for name in each[0]
    }
