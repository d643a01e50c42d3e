"""`fit`: from a network, data and a method to a posterior.

This module puts the pieces together: it checks and places the data, expands runs and members into
one stacked axis, chooses the engine, drives the method's stages and records what happened.

What is believed before the data: the network, its likelihood and its prior, as a problem.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from doxa import checks, likelihoods
from doxa.data import Data
from doxa.driver import Callback, Options
from doxa.driver.finish import run_fit
from doxa.driver.runs import Runs, RunSpec, Sweep
from doxa.driver.setup import (
    Given,
    fingerprint,
    fitted_rows,
    member_ids,
    prepare_data,
    select_engine,
    stack,
)
from doxa.engine import Engine
from doxa.engine.engine import default_modes, threads_for
from doxa.errors import MethodError, ModelError
from doxa.likelihoods import Inferred, Likelihood
from doxa.method import FitSettings, Method, as_method
from doxa.method.method import Workload, check_planned, in_half, keywords
from doxa.model import Model, Subset
from doxa.model.checks import (
    check_gradient_flow,
    check_logits,
    infer_from_targets,
    infer_likelihood,
    looked_at,
    warn_if_pretrained,
)
from doxa.model.model import Network, NoNetwork, Problem
from doxa.optim import Optimizer
from doxa.optim import optimizer as find_optimizer
from doxa.posterior import Posterior
from doxa.posterior.weights import WeightPosterior
from doxa.settings import Checkpoint, Compute, Training, grouped


class FitOptions(TypedDict, total=False):
    """The keyword arguments of `fit` besides `runs`, for type checkers."""

    likelihood: Any
    prior: Any
    subset: Subset | None
    members: int | Sequence[int] | None
    seed: int
    init: Any
    validation: Any
    patience: int
    standardize: bool
    sample_weight: Any
    device: torch.device | str | None
    dtype: torch.dtype | None
    precision: str
    batch_size: int | None
    steps: int | None
    epochs: float | None
    lr: float | None
    schedule: Any
    optimizer: str | Optimizer
    training: Training | None
    compute: Compute | None
    checkpoint: str | Path | Checkpoint | None
    checkpoint_every: float
    draws_budget: int | None
    progress: bool | None
    engine: str | Engine
    callbacks: Sequence[Callback]


@overload
def fit(
    model: Model | nn.Module | None,
    data: Any,
    method: str | Method | type[Method] = "map",
    *,
    runs: None = None,
    **options: Unpack[FitOptions],
) -> Posterior: ...


@overload
def fit(
    model: Model | nn.Module | None,
    data: Any,
    method: str | Method | type[Method] = "map",
    *,
    runs: Runs,
    **options: Unpack[FitOptions],
) -> Sweep: ...


@grouped
@keywords(
    seed=checks.seed, standardize=checks.flag, patience=checks.whole, batch_size=checks.whole,
    steps=checks.whole, epochs=checks.positive, lr=checks.positive,
    checkpoint_every=checks.seconds, draws_budget=checks.budget, callbacks=checks.functions,
)  # fmt: skip
@default_modes(train=True)
@threads_for(0.0)
def fit(
    model: Model | nn.Module | None,
    data: Any,
    method: str | Method | type[Method] = "map",
    *,
    likelihood: Any = None,
    prior: Any = None,
    subset: Subset | None = None,
    members: int | Sequence[int] | None = None,
    runs: Runs | None = None,
    seed: int = 0,
    init: Any = "fresh",
    validation: Any = "auto",
    patience: int = 20,
    standardize: bool = False,
    sample_weight: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    precision: str = "full",
    batch_size: int | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    lr: float | None = None,
    schedule: Any = "cosine",
    optimizer: str | Optimizer = "adam",
    training: Training | None = None,
    compute: Compute | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    checkpoint_every: float = 30.0,
    draws_budget: int | None = None,
    progress: bool | None = None,
    engine: str | Engine = "auto",
    callbacks: Sequence[Callback] = (),
) -> Any:
    """Fit a Bayesian model.

    Parameters
    ----------
    model: a `Model`, an `nn.Module`, or None for methods that bring their own functions: gp, which
        refuses a network, and linear, which takes the features of one.
    data: (x, y) as arrays, tensors or frames (whose column names are kept), a map-style `Dataset`,
        a `DataLoader` over one, or `doxa.data.Tasks` for methods that learn from tasks.
    method: a name (see `doxa.methods()`) or a method object with its settings.
    likelihood, prior, subset: as in `Model`, when `model` is a plain network. Without a likelihood
        y and the network's outputs decide: class labels are categorical or bernoulli, which is
        said; numbers are Gaussian.
    members: how many are averaged in prediction, or the list of their ids; the method's default.
    runs: splits, grids and seeds to fit side by side; the result is then a `Sweep`.
    init: "fresh" re-initialises the network for every member, and says so where its weights look
        trained; "given" starts from them; a posterior, or one for each run, from where its
        members are (their BatchNorm statistics and what layers learned start anew).
    validation: rows to stop on, to take the noise from, and to judge the fit by. "auto": methods
        that can overfit hold out a part of the rows, each member another; None: every row is
        trained on; a share of the rows or a pair (x, y): the same for all members.
    patience: how many looks at these rows without gain end the training.
    standardize: scale float inputs and continuous targets; predictions are in the units of y.
        Without it, columns far from unit size are named in a warning.
    sample_weight: one nonnegative weight per row; n is then their sum, and scales are weighted.
        Rows of weight 0 are removed before anything else: they may hold NaN. What counts rows,
        such as a standard error, counts (Σw)²/Σw² of them.
    precision: "full", or "bfloat16": the network's products in training are of half precision, with
        weights, likelihood and optimiser in float32; for methods that climb, on a GPU that is
        made for it. Predictions are in full precision.
    batch_size: rows a step, at most all of them; the method's default.
    steps or epochs: how long to optimise; methods that sample have their own lengths.
    lr, schedule, optimizer: "constant", "cosine" or "linear" (or a function of the share done).
    checkpoint: a folder; a fit that finds its own checkpoint there goes on from it. It is locked
        while the fit runs: a second fit there raises `FolderInUse`.
    checkpoint_every: seconds between checkpoints.
    draws_budget: bytes of memory for the draws that samplers keep, else a quarter of what is free;
        past it they are kept and read on disk, and nothing else changes.
    progress: show a bar, or a plain line now and then where standard error is no terminal;
        default: the bar, where it is one.
    engine: "auto", or "stack" / "loop", with ":eager", ":traced", ":compiled", ":graph".
    callbacks: f(step, info), called now and then; one that returns True stops the run.

    Returns
    -------
    A `Posterior`, or a `Sweep` of them when `runs` is given.
    """
    began = time.monotonic()
    fresh, begin = _start(init)
    method = as_method(method)
    if runs is not None and not isinstance(runs, Runs):
        raise MethodError(f"runs must be doxa.Runs(rows=..., grid=..., seeds=...), not {runs!r}")
    given = Given.read(data, sample_weight)
    specs = [RunSpec(seed=seed)] if runs is None else runs.expand(seed)
    problem, noise_model, inferred = build_problem(
        model, method, likelihood, prior, subset, given, specs
    )
    prior_moments = problem.model
    problem = method.prepare(problem)
    if prior_moments is not None:
        device, dtype = device or prior_moments.device, dtype or prior_moments.dtype
    device = checks.place(device or "cpu")
    dtype = None if dtype is None else checks.floating(dtype)
    if dtype is not None:
        problem = problem.to(device, dtype)
    if batch_size is None and isinstance(data, DataLoader):
        batch_size = data.batch_size
    ids = member_ids(members, method)
    if isinstance(validation, str) and validation == "auto" and not method.holds_out:
        validation = None
    held, splits, likelihood_output, inputs = prepare_data(
        given, problem.model, noise_model, specs, validation, standardize, device, dtype, ids,
    )  # fmt: skip
    size = _batch_size(batch_size, method, held, problem)
    epoch = max(1, max(len(r) for r in held.rows) // size)
    settings = FitSettings(
        steps=_steps(steps, epochs, method, epoch), batch_size=size, epoch_steps=epoch,
        rate=method.default_rate if lr is None else lr,
        optimizer=find_optimizer(optimizer), fresh=fresh, begin=begin,
    )  # fmt: skip
    members_of_runs = len(specs) * len(ids)
    work = Workload.of(
        problem, held, members_of_runs, size, likelihood_output, inputs, draws_budget
    )
    check_planned(method, work, device)
    run = stack(
        problem if dtype else problem.to(device, held.dtype), method, noise_model, held, splits,
        specs, ids, likelihood_output, inputs, settings,
    )  # fmt: skip
    half = precision != "full" and in_half(precision, method, run)
    run = replace(run, engine=select_engine(run, engine, method, half))
    if isinstance(problem, Network):
        first, few = run.start()[0], held.take(held.rows[0][:8], torch.tensor(0))[0]
        if settings.fresh:
            warn_if_pretrained(run.net, run.initial[0])
        check_logits(run.net.likelihood, check_gradient_flow(run.net, first, few))
    options = Options(
        schedule=schedule, patience=patience, checkpoint_seconds=checkpoint_every,
        callbacks=callbacks, draws_budget=draws_budget,
        progress=sys.stderr.isatty() if progress is None else progress,
    )  # fmt: skip
    assert not isinstance(checkpoint, Checkpoint)  # `grouped` passes its folder
    if checkpoint is not None:
        options.fingerprint = fingerprint(run, method, options, specs)
    posteriors, _ = run_fit(run, method, options, specs, checkpoint, began)
    columns = given.names[0].columns
    used = fitted_rows(given, specs, validation)
    for posterior, rows in zip(posteriors, used, strict=True):
        posterior.columns = None if columns is None else list(columns)
        posterior.scalar_targets = noise_model.scalar_targets(given.y, likelihood_output)
        posterior.fitted_rows = rows
        if inferred and inferred.said:
            posterior.metadata["likelihood"] = inferred.said
    return posteriors[0] if runs is None else Sweep(posteriors, specs)


def _start(init: Any) -> tuple[bool, Tensor | None]:
    """Whether weights start anew, and where they start if earlier posteriors say so."""
    if isinstance(init, str) and init in ("fresh", "given"):
        return init == "fresh", None
    earlier: Any = [init] if isinstance(init, Posterior) else init
    several = isinstance(earlier, Sweep | list | tuple) and len(earlier) > 0
    if several and all(isinstance(one, WeightPosterior) for one in earlier):
        return False, torch.cat([one.point() for one in earlier])
    raise MethodError(
        f"init must be 'fresh' or 'given', or posteriors over a network's weights, not {init!r}"
    )


def _batch_size(asked: int | None, method: Method, data: Data, problem: Problem) -> int:
    lengths = [len(rows) for rows in data.rows]
    # Short runs are padded with rows of weight 0, which BatchNorm would count all the same.
    largest = min(lengths) if problem.joins_rows else max(lengths)
    return max(1, min(asked or method.default_batch, largest))


def _steps(steps: int | None, epochs: float | None, method: Method, epoch: int) -> int:
    if steps is not None and epochs is not None:
        raise MethodError("give steps or epochs, not both")
    if steps is not None:
        return steps
    if epochs is not None:
        return math.ceil(epochs * epoch)
    return method.default_steps


def build_problem(
    model: Any, method: Method, likelihood: Any, prior: Any, subset: Subset | None, given: Given,
    specs: Sequence[RunSpec],
) -> tuple[Problem, Likelihood, Inferred | None]:  # fmt: skip
    """What is fitted, under which likelihood, and how that was inferred where none was given."""
    problem, inferred = _problem(model, method, likelihood, prior, subset, given, specs)
    prior_moments = problem.model
    noise_model = (
        prior_moments.likelihood if prior_moments
        else likelihoods.likelihood(likelihood or (inferred.name if inferred else "gaussian"))
    )  # fmt: skip
    if method.regression_only and not noise_model.is_normal:
        why = f' ({inferred.reason}); likelihood="gaussian" takes y as numbers' if inferred else ""
        other = "" if method.needs_network else "; sparse-gp takes any likelihood"
        raise MethodError(
            f"{method.name} is for regression with Gaussian noise, not {noise_model.name}"
            f"{why}{other}"
        )
    return problem, noise_model, inferred


def _problem(
    model: Any, method: Method, likelihood: Any, prior: Any, subset: Subset | None, given: Given,
    specs: Sequence[RunSpec],
) -> tuple[Problem, Inferred | None]:  # fmt: skip
    """What is fitted, and how its likelihood was inferred where none was given."""
    if model is None:
        if method.needs_network:
            raise ModelError(
                f"{method.name} needs a network; only linear and process methods do not"
            )
        shapes = (tree_map(lambda t: list(t.shape[1:]), tree) for tree in (given.x, given.y))
        own = NoNetwork(*shapes)
        if likelihood is not None or method.regression_only:
            return own, None
        return own, infer_from_targets(given.y, given.source is None)
    if isinstance(model, Model):
        if likelihood is not None or prior is not None or subset is not None:
            raise ModelError("the Model already has likelihood, prior and subset; set them there")
        prior_moments = model.unseen()
    else:
        prior_moments = Model(model, likelihood, prior, subset or "all")
    inferred = None
    if not any("likelihood" in spec.hyper for spec in specs):  # else the grid gives them
        try:
            prior_moments, inferred = infer_likelihood(
                prior_moments, given.x, given.y, given.source is None
            )
        except ModelError as error:
            raise error if given.tasks is None else _for_tasks(method, error) from error
    if type(method).prepare is not Method.prepare:  # it asks which layers there are
        prior_moments = looked_at(prior_moments, given.x)
    return Network(prior_moments), inferred


def _for_tasks(method: Method, error: ModelError) -> ModelError:
    """Why a network cannot take tasks."""
    words = (
        "the data are tasks, which a network is given as context_x, context_y, context and "
        'target_x: write one that takes these, or use a neural process ("cnp", "tnp", …) with '
        f"None in place of the network ({error})"
    )
    alone = f"{method.name} brings its own network: pass None in its place"
    return ModelError(words if method.needs_network else alone)
