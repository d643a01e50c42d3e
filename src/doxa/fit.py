"""`fit`: from a network, data and a method to a posterior.

`fit` reads and checks the data, moves them to the device, and stacks runs and members along one
axis. It then chooses the engine and runs the method's stages (`doxa.driver`). The result is one
posterior per run, with a record of the fit.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from doxa import checks
from doxa.data import Data
from doxa.driver import Callback, Options
from doxa.driver.belief import build_problem
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
from doxa.errors import MethodError
from doxa.method import FitSettings, Method, as_method
from doxa.method.memory import Workload, check_planned
from doxa.method.method import in_half, keywords
from doxa.model import Model, Subset
from doxa.model.checks import check_gradient_flow, check_logits, warn_if_pretrained
from doxa.model.model import Network, Problem
from doxa.optim import Optimizer
from doxa.optim import optimizer as find_optimizer
from doxa.posterior import Posterior
from doxa.posterior.weights import WeightPosterior


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
    checkpoint: str | Path | None = None,
    checkpoint_every: float = 30.0,
    draws_budget: int | None = None,
    progress: bool | None = None,
    engine: str | Engine = "auto",
    callbacks: Sequence[Callback] = (),
) -> Any:
    """Fit a Bayesian model.

    Parameters
    ----------
    model : Model, nn.Module or None
        The network. None is for methods that need no network, such as "gp" and "linear". "gp"
        accepts no network; "linear" uses the features of a network if one is given. The network
        that is passed is not changed.
    data : tuple (x, y), Dataset, DataLoader or doxa.data.Tasks
        The training rows. x and y are arrays, tensors or data frames; the column names of a frame
        are kept. A `Dataset` must be map-style, and a `DataLoader` must iterate over one. `Tasks`
        are for methods that learn from tasks, such as neural processes.
    method : str, Method or type, default "map"
        A name (see `doxa.methods()`), a method object with its settings, or a method class.
    likelihood : str, Likelihood or tuple, default None
        As in `Model`; only for a `model` that is a plain network or None. By default, the
        likelihood is inferred from y and the network's outputs: "categorical" or "bernoulli" for
        class labels, which is logged, and "gaussian" for numbers.
    prior : Prior or dict, default None
        As in `Model`; only for a `model` that is a plain network.
    subset : str, tuple or callable, default None
        The parameters that are uncertain, as in `Model`; only for a `model` that is a plain
        network. None means all parameters.
    members : int or sequence of int, default None
        The number of members, or the list of their ids. Predictions are averaged over members.
        None means the method's default.
    runs : Runs, default None
        Splits, grids and seeds that are fitted side by side. The result is then a `Sweep`.
    seed : int, default 0
        The seed of all random numbers: initial weights, the order of the rows, the choice of the
        held-out rows, and the noise of the method. With `runs` that give no seeds, the split of
        number i uses seed + i.
    init : {"fresh", "given"}, Posterior or sequence of Posterior, default "fresh"
        Where the weights start. "fresh": the network is re-initialised for each member, with a
        warning if its weights look trained. "given": each member starts from the network's
        weights. A posterior, or one posterior per run: each member starts from the point of the
        same member there; BatchNorm statistics and other buffers that layers learned start anew.
    validation : {"auto"}, None, float or tuple (x, y), default "auto"
        The held-out rows. They are used for early stopping, for the noise level, and to evaluate
        the fit. "auto": methods that can overfit hold out a part of the rows, a different part for
        each member. None: all rows are used for training. A fraction of the rows, or a pair
        (x, y): the same held-out rows for all members.
    patience : int, default 20
        Training stops after this number of validations without improvement.
    standardize : bool, default False
        Whether to standardise floating-point inputs and continuous targets. Predictions are in
        the units of y. If False, a warning names the columns that are far from unit scale.
    sample_weight : array-like of shape [N], default None
        One nonnegative weight per row. The number of rows n is then the sum of the weights, and
        standardisation is weighted. Rows of weight 0 are removed first, so they may contain NaN.
        Statistics that depend on a number of rows, such as standard errors, use the effective
        number (Σw)²/Σw².
    device : torch.device or str, default None
        The device of the fit. None means the device of the network, or the CPU without a network.
    dtype : torch.dtype, default None
        The floating-point type of weights and data. None means the type of the network. Without a
        network, it is the type of the first float32 or float64 input, or float32.
    precision : {"full", "bfloat16"}, default "full"
        With "bfloat16", the network's matrix products in training are in half precision; weights,
        likelihood and optimiser stay in float32. This is for methods that follow stochastic
        gradients, on a GPU with fast bfloat16. Predictions are always in full precision.
    batch_size : int, default None
        Rows per step, at most all of them. None means the batch size of the `DataLoader` if `data`
        is one, else the method's default.
    steps : int, default None
        The number of optimisation steps. None means the method's default. Samplers have settings
        of their own for the number of steps. Give `steps` or `epochs`, not both.
    epochs : float, default None
        The number of passes over the rows, in place of `steps`.
    lr : float, default None
        The learning rate. None means the method's default.
    schedule : str or callable, default "cosine"
        The learning rate over time: "constant", "cosine" or "linear", each also with the prefix
        "warmup-", or a function from the fraction of steps done to a multiplier of `lr`.
    optimizer : {"adam", "sgd"} or Optimizer, default "adam"
        The optimiser, by name or as an object with its settings.
    checkpoint : str or Path, default None
        A folder for checkpoints. If it contains a checkpoint of the same fit, the fit resumes from
        it. The folder is locked while the fit runs: a second fit there raises `FolderInUse`.
    checkpoint_every : float, default 30.0
        Seconds between checkpoints.
    draws_budget : int, default None
        Bytes of memory for the draws that samplers keep. Draws beyond the budget are kept in a
        file on disk and read from there; the results are the same. None means a quarter of the
        free memory.
    progress : bool, default None
        Whether to show progress: a bar if standard error is a terminal, otherwise plain lines at
        growing intervals. None means to show the bar on a terminal, and nothing otherwise.
    engine : str or Engine, default "auto"
        How members are computed. "stack": all members at once; "loop": one after the other;
        "auto": chosen by rule. "stack" and "loop" may have a suffix for how a step is executed:
        ":eager", ":traced", ":compiled" or ":graph".
    callbacks : sequence of callable, default ()
        Functions `f(step, info)`, called about 100 times per stage at most. `info` is a dictionary
        of lists with one number per member, such as the loss. A function that returns True stops
        the run.

    Returns
    -------
    Posterior or Sweep
        The posterior, or a `Sweep` with one posterior per run if `runs` is given.

    Examples
    --------
    >>> import torch
    >>> import doxa
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    >>> posterior = doxa.fit(net, (x, torch.sin(3 * x)), "deep-ensemble", members=2, steps=100)
    >>> posterior.predict(x).mean.shape
    torch.Size([64, 1])
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
    """Whether weights are re-initialised; and the starting points, if `init` is posteriors."""
    if isinstance(init, str) and init in ("fresh", "given"):
        return init == "fresh", None
    earlier: Any = [init] if isinstance(init, Posterior) else init
    several = isinstance(earlier, Sweep | list | tuple) and len(earlier) > 0
    if several and all(isinstance(one, WeightPosterior) for one in earlier):
        return False, torch.cat([one.point() for one in earlier])
    raise MethodError(
        f"init must be 'fresh' or 'given', or posteriors over a network's weights, not {init!r}"
    )


def _batch_size(size: int | None, method: Method, data: Data, problem: Problem) -> int:
    lengths = [len(rows) for rows in data.rows]
    # Short runs are padded with rows of weight 0. BatchNorm would count these rows too.
    largest = min(lengths) if problem.joins_rows else max(lengths)
    return max(1, min(size or method.default_batch, largest))


def _steps(steps: int | None, epochs: float | None, method: Method, epoch: int) -> int:
    if steps is not None and epochs is not None:
        raise MethodError("give steps or epochs, not both")
    if steps is not None:
        return steps
    if epochs is not None:
        return math.ceil(epochs * epoch)
    return method.default_steps
