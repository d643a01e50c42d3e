"""`fit`: from a network, data and a method to a posterior.

`fit` reads and checks the data, moves them to the device, and stacks runs and members along one
axis. It then chooses the engine and runs the method's stages (`doxa.driver`). The result is one
posterior per run, with a record of the fit. `build_problem` makes a problem of the network, its
likelihood and its prior; a likelihood that is not given is inferred from the targets and the
network's outputs.

Settings can be given in groups: how to train, where to compute, where to keep checkpoints.

    doxa.fit(net, data, "map", training=doxa.Training(steps=2000, lr=1e-3),
             compute=doxa.Compute(device="cuda", precision="bfloat16"),
             checkpoint=doxa.Checkpoint("run/", every=60.0))

Each field of a group is also a flat argument of `fit`: `steps=2000` and
`training=Training(steps=2000)` mean the same. A setting that is given both ways is an error. A
group can be stored and used for several fits.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, overload

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from doxa import checks, likelihoods
from doxa.data import Data
from doxa.data.streams import Stream
from doxa.driver.alternatives import (
    SETTINGS,
    alternatives_of,
    best_of_alternatives,
    changed_settings,
)
from doxa.driver.fits import Fits, Variant
from doxa.driver.runs import Runs, RunSpec, Sweep
from doxa.driver.setup import (
    FEWEST_ROWS,
    Given,
    Splits,
    cross_fit_parts,
    expected_kind,
    expects_by_tensor,
    expects_turns,
    fitted_rows,
    group_counts,
    member_ids,
    prepare_data,
    reference_inputs,
    run_sizes,
    select_engine,
    stack,
)
from doxa.driver.streamed import check_streamed, prepare_stream
from doxa.driver.trunk import TrunkOutputs
from doxa.driver.validation import not_evaluated
from doxa.driver.watch import Snapshots
from doxa.engine import Engine
from doxa.engine.engine import default_modes, threads_for
from doxa.errors import MethodError, ModelError
from doxa.likelihoods import Inferred, Likelihood
from doxa.linalg.layout import LARGE
from doxa.method import Callback, FitSettings, Method, Run, as_method
from doxa.method.method import Workload, check_planned, check_precision, keywords
from doxa.model import Model, Subset
from doxa.model.checks import (
    as_numbers,
    check_gradient_flow,
    check_logits,
    infer_from_targets,
    infer_likelihood,
    looked_at,
    warn_if_pretrained,
)
from doxa.model.model import Network, NoNetwork, Problem
from doxa.noise import drawing
from doxa.optim import Adam, Optimizer, rate_for
from doxa.optim import optimizer as find_optimizer
from doxa.posterior import Posterior, Status
from doxa.posterior.weights import WeightPosterior

__all__ = ["Checkpoint", "Compute", "Training", "fit"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)


log = logging.getLogger("doxa")

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a network is trained. Each field is also an argument of `doxa.fit`.

    Parameters
    ----------
    batch_size : int, optional
        Rows per step. Default: the method's.
    microbatch : int, optional
        The most rows whose gradient is computed at once: less memory, the same gradient.
    microbatches : int, optional
        The number of blocks in which the rows of a step are computed, and which several processes
        divide: one large network on several processes.
    steps : int, optional
        Optimisation steps. Give `steps` or `epochs`, not both. Default: the method's.
    epochs : float, optional
        Passes over the training rows.
    lr : float, optional
        Learning rate. Default: the method's, and for a large network a smaller one with warm-up.
    schedule : str or callable, optional
        "constant", "cosine" or "linear", each also with the prefix "warmup-", or a function from
        the fraction of steps done to a multiplier of `lr`. Default: "cosine", and for a large
        network "warmup-cosine".
    optimizer : {"adam", "sgd"} or Optimizer
        The optimiser, by name or as an object with its settings.
    patience : int
        Training stops after this number of validations without improvement.

    Examples
    --------
    >>> import doxa
    >>> doxa.Training(steps=500, lr=1e-2)
    Training(steps=500, lr=0.01)
    """

    batch_size: int | None = None
    microbatch: int | None = None
    microbatches: int | None = None
    steps: int | None = None
    epochs: float | None = None
    lr: float | None = None
    schedule: Any = None
    optimizer: Any = "adam"
    patience: int = 20

    def __repr__(self) -> str:
        return _changed(self)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Where and how tensors are computed. Each field is also an argument of `doxa.fit`.

    Parameters
    ----------
    device : torch.device or str, optional
        The device of the fit. Default: the network's.
    dtype : torch.dtype, optional
        The floating-point type of weights and data. Default: the network's.
    precision : {"full", "bfloat16", "tf32"}
        The precision of the network's matrix products in training.
    engine : str or Engine
        "auto", "stack" (all members at once) or "loop" (one member after the other). "stack" and
        "loop" may have a suffix: ":eager", ":traced", ":compiled" or ":graph".
    draws_budget : int, optional
        Bytes of memory for the draws that samplers keep. Draws beyond it are kept on disk.
    trunk_outputs : bool, str or Path
        Whether the outputs of a frozen trunk are computed once, or a folder in which they stay.
    recompute : str or sequence of str, optional
        "blocks", or names of layers: their activations are not kept for the backward pass.
    channels_last : bool
        Whether images are in the memory format `torch.channels_last` in training.
    block_size : int, optional
        The most members that are trained together. Default: a rule on the amount of work.

    Examples
    --------
    >>> import doxa
    >>> doxa.Compute(device="cpu")
    Compute(device='cpu')
    """

    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    precision: str = "full"
    engine: Any = "auto"
    draws_budget: int | None = None
    trunk_outputs: bool | str | Path = True
    recompute: str | Sequence[str] | None = None
    channels_last: bool = False
    block_size: int | None = None

    def __repr__(self) -> str:
        return _changed(self)


@dataclass(frozen=True)
class Checkpoint:
    """The folder in which a fit saves checkpoints, and how often it saves them.

    Parameters
    ----------
    folder : str or Path
        The folder. If it contains a checkpoint of the same fit, the fit resumes from it.
    every : float
        Seconds between checkpoints.

    Examples
    --------
    >>> import doxa
    >>> doxa.Checkpoint("run/", every=60.0)
    Checkpoint(folder='run/', every=60.0)
    """

    folder: str | Path
    every: float = 30.0


def _changed(group: Any) -> str:
    """A text of the group that contains only fields with values other than their defaults."""
    given = [f for f in fields(group) if getattr(group, f.name) != f.default]
    inner = ", ".join(f"{f.name}={getattr(group, f.name)!r}" for f in given)
    return f"{type(group).__name__}({inner})"


def grouped(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of `fit` that converts the fields of groups to flat arguments.

    A flat argument is given if it is passed, whatever its value. A field of a group is given if its
    value differs from its default.
    """
    default = inspect.signature(function).parameters

    @wraps(function)
    def flat(*args: P.args, **given: P.kwargs) -> R:
        options: dict[str, Any] = given
        for name, kind in (("training", Training), ("compute", Compute)):
            group = options.pop(name, None)
            if group is None:
                continue
            if not isinstance(group, kind):
                raise MethodError(f"{name} must be doxa.{kind.__name__}(...), not {group!r}")
            for field in fields(group):
                value = getattr(group, field.name)
                if value == field.default:
                    continue
                if field.name in options:
                    raise MethodError(
                        f"{field.name} is given twice: as {field.name}={options[field.name]!r} and "
                        f"in {name}={group!r}; give it once"
                    )
                options[field.name] = value
        place = options.get("checkpoint")
        if isinstance(place, Checkpoint):
            if "checkpoint_every" in options:
                raise MethodError(
                    f"checkpoint_every is given twice: as {options['checkpoint_every']!r} and in "
                    f"checkpoint={place!r}; give it once"
                )
            options |= {"checkpoint": place.folder, "checkpoint_every": place.every}
        return function(*args, **options)

    assert {f.name for kind in (Training, Compute) for f in fields(kind)} <= set(default)
    return flat


class FitOptions(TypedDict, total=False):
    """The keyword arguments of `fit` besides `runs`, for type checkers."""

    likelihood: Any
    prior: Any
    subset: Subset | None
    trunk: str | Sequence[str] | None
    members: int | Sequence[int] | None
    seed: int
    init: Any
    validation: Any
    patience: int
    standardize: bool
    sample_weight: Any
    groups: Any
    time: Any
    device: torch.device | str | None
    dtype: torch.dtype | None
    precision: str
    batch_size: int | None
    microbatch: int | None
    microbatches: int | None
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
    trunk_outputs: bool | str | Path
    recompute: str | Sequence[str] | None
    channels_last: bool
    block_size: int | None
    progress: bool | None
    engine: str | Engine
    callbacks: Sequence[Callback]


_checked = keywords(
    seed=checks.seed, standardize=checks.flag, patience=checks.whole, batch_size=checks.whole,
    microbatch=checks.whole, microbatches=checks.whole, steps=checks.whole,
    epochs=checks.positive, lr=checks.positive, block_size=checks.whole,
    checkpoint_every=checks.seconds, draws_budget=checks.budget,
    callbacks=checks.functions, channels_last=checks.flag,
)  # fmt: skip


def _by_all_processes(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: where a launcher has started several processes, they make the call together."""

    @wraps(function)
    def called(*args: P.args, **given: P.kwargs) -> R:
        if "WORLD_SIZE" not in os.environ:
            return function(*args, **given)
        from doxa.driver.processes import together

        return together(function)(*args, **given)

    return called


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


@_by_all_processes
@grouped
@_checked
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
    trunk: str | Sequence[str] | None = None,
    members: int | Sequence[int] | None = None,
    runs: Runs | None = None,
    seed: int = 0,
    init: Any = "fresh",
    validation: Any = "auto",
    patience: int = 20,
    standardize: bool = False,
    sample_weight: Any = None,
    groups: Any = None,
    time: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    precision: str = "full",
    batch_size: int | None = None,
    microbatch: int | None = None,
    microbatches: int | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    lr: float | None = None,
    schedule: Any = None,
    optimizer: str | Optimizer = "adam",
    training: Training | None = None,
    compute: Compute | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    checkpoint_every: float = 30.0,
    draws_budget: int | None = None,
    trunk_outputs: bool | str | Path = True,
    recompute: str | Sequence[str] | None = None,
    channels_last: bool = False,
    block_size: int | None = None,
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
    trunk : str or tuple of str, default None
        Layers that are frozen and run before all trained ones, as in `Model`; only for a `model`
        that is a plain network.
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
        each member; with one member and fewer than 600 rows (50, if the network has more than
        20,000 weights), other networks hold out the parts (`driver/fits.py`), and the fit has
        all rows. None: all rows are used for training. A fraction of the rows, or a pair (x, y):
        the same held-out rows for all members.
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
    groups : array-like of shape [N], default None
        The group of each row: a number, text or another hashable value, such as the person that
        was measured several times. Held-out rows are then whole groups, so that the fit is
        evaluated on new groups; standard errors are clustered by group, and numbers of rows are
        numbers of groups. With fewer groups than parts, one group is held out at a time. The
        status is "ok" only if at least 12 groups were evaluated. "bootstrap" weights whole groups.
        Groups of one row each give the same result as no groups. With `runs`, each run holds out
        groups of its own rows. A pair as `validation` has no groups: each of its rows counts as a
        group.
    time : array-like of shape [N], default None
        The time of each row, as numbers or datetimes, for fits that predict later rows. All members
        are first trained on the first rows; the rows after them stop the training and estimate the
        noise, and the last rows evaluate. Then the members are trained on all rows. Each of the two
        later parts is a tenth of the rows (of fewer than 600 rows, 60 rows or at most a fifth), or
        the fraction `validation`. Rows of the same time stay together. With groups, the rows that
        evaluate are later rows of groups that have no row in the other parts. A pair as
        `validation` is an error. `time` is no input: put it into x if it should be one.
    device : torch.device or str, default None
        The device of the fit. None means the device of the network, or the CPU without a network.
    dtype : torch.dtype, default None
        The floating-point type of weights and data. None means the type of the network. Without a
        network, it is the type of the first float32 or float64 input, or float32.
    precision : {"full", "bfloat16", "tf32"}, default "full"
        With "bfloat16", the network's matrix products in training are in half precision; weights,
        likelihood and optimiser stay in float32. With "tf32", on a CUDA device, the operands of all
        float32 products and convolutions in training are rounded to three digits, and nothing is
        stored in half precision. Both are for methods that follow stochastic gradients, on a GPU
        with fast products of this type. Predictions are always in full precision.
    batch_size : int, default None
        Rows per step, at most all of them. None means the batch size of the `DataLoader` if `data`
        is one, else the method's default.
    microbatch : int, default None
        The most rows whose gradient is computed at once. The gradient of a step is accumulated over
        pieces of this size: it is that of the whole batch, to rounding, and only the activations of
        one piece are in memory. BatchNorm has the statistics of each piece, which a warning says.
        Methods whose components divide a batch take a multiple of their number, at least one each.
        None means all rows of a step at once.
    microbatches : int, default None
        The number of blocks in which the rows of each step are computed. Their gradients are added
        in a fixed order, and several processes divide the blocks (docs/many_processes.md), so that
        all of them train one network, and any number of processes gives the same bits. Methods that
        sum over all rows divide those into as many blocks. Networks with BatchNorm, and others
        whose buffers change in training, are an error. None means all rows of a mini-batch at once;
        sums over all rows are divided by a rule on the amount of work.
    steps : int, default None
        The number of optimisation steps. None means the method's default, and with few rows, or if
        little is learned, further fits with more steps and other settings, of which held-out rows
        choose the best (`driver/alternatives.py`). Samplers have settings
        of their own for the number of steps. Give `steps` or `epochs`, not both.
    epochs : float, default None
        The number of passes over the rows, in place of `steps`.
    lr : float, default None
        The learning rate. None means the method's default. For a network of 100,000 trained weights
        or more, methods that train by Adam then take a tenth of it, or 0.03 of it if most layers
        are normalised by row (transformers): see `doxa.optim.rate_for`. A rate that is given is
        used as it is.
    schedule : str or callable, default None
        The learning rate over time: "constant", "cosine" or "linear", each also with the prefix
        "warmup-", or a function from the fraction of steps done to a multiplier of `lr`. None means
        "cosine", and "warmup-cosine" where `lr` is not given either and the network is a large one,
        as above. A schedule that is given is used as it is.
    optimizer : {"adam", "sgd"} or Optimizer, default "adam"
        The optimiser, by name or as an object with its settings.
    training : Training, default None
        The settings of training as a group, in place of the flat arguments.
    compute : Compute, default None
        Device, type, precision and engine as a group, in place of the flat arguments.
    checkpoint : str, Path or Checkpoint, default None
        A folder for checkpoints. If it contains a checkpoint of the same fit, the fit resumes from
        it. The folder is locked while the fit runs: a second fit there raises `FolderInUse`.
    checkpoint_every : float, default 30.0
        Seconds between checkpoints.
    draws_budget : int, default None
        Bytes of memory for the draws that samplers keep. Draws beyond the budget are kept in a
        file on disk and read from there; the results are the same. None means a quarter of the
        free memory.
    trunk_outputs : bool, str or Path, default True
        If trained layers follow a frozen trunk (see `Model`), its outputs are computed once for the
        data, and training reads them: in memory, or on disk if they take more than a quarter of the
        free memory. They are deleted after the fit. A folder keeps them for later fits with the
        same rows and the same trunk. False computes the trunk in every pass. The results are the
        same up to rounding. Rows that a Dataset changes at random are never kept.
    recompute : str or sequence of str, default None
        Parts of the network whose activations are not kept for the backward pass, which computes
        them again: less memory, at most one more forward pass per step, the same gradient
        (gradient checkpointing). "blocks": the blocks in `nn.Sequential` and `nn.ModuleList`
        modules, or segments of a long `nn.Sequential` of single layers. Otherwise names or patterns
        of layers, such as "transformer.h.*". Members are then computed one at a time, and steps are
        eager.
    channels_last : bool, default False
        Whether images [N, C, H, W] are given to the network in the memory format
        `torch.channels_last` in training, where members are computed one at a time. Convolutions
        are often faster. The results are the same up to rounding; weights are stored as before.
    block_size : int, default None
        The most members that are trained together; members of all runs are counted. Each block is
        trained as if it were a fit of its own, and several processes divide the blocks
        (docs/many_processes.md). None means a rule on the amount of work: all members of small
        networks, and one member where members run one after the other. The results of another size
        are the same up to rounding.
    progress : bool, default None
        Whether to show progress: a bar if standard error is a terminal, otherwise plain lines at
        growing intervals. None means to show the bar on a terminal, and nothing otherwise.
    engine : str or Engine, default "auto"
        How members are computed. "stack": all members at once; "loop": one after the other;
        "auto": chosen by rule. "stack" and "loop" may have a suffix for how a step is executed:
        ":eager", ":traced", ":compiled" or ":graph".
    callbacks : sequence of callable, default ()
        Functions `f(step, info)`, called about 100 times per stage at most. `info` is a dictionary
        of lists with one number per member, such as the loss; `info.members` has the run and the
        id of each. A function that returns True stops the run. With `block_size`, `f` sees one
        block of members at a time, and stops this block (docs/many_processes.md).

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
    began = monotonic()
    call = read_call(locals())
    method, given, specs = call.method, call.given, call.specs
    problem, settings, ids = call.problem, call.settings, call.ids
    assert not isinstance(checkpoint, Checkpoint)  # `grouped` passes its folder
    folder = None if checkpoint is None else str(checkpoint)
    auto, in_order = call.auto, call.in_order
    fits = Fits(
        call.prepared, lambda run: _check_network(run, method), method, ids, call.validation,
        call.parts, in_order, folder, began,
    )  # fmt: skip
    watching = [callback for callback in callbacks if isinstance(callback, Snapshots)]
    for snapshots in watching:
        snapshots.begin(lambda posterior, spec: complete([posterior], [spec]))

    def complete(posteriors: Sequence[Posterior], specs: Sequence[RunSpec]) -> None:
        """Add what a posterior knows about its data."""
        columns = given.names[0].columns
        used = fitted_rows(given, specs, call.validation)
        for posterior, rows, spec in zip(posteriors, used, specs, strict=True):
            posterior.input_reference = reference_inputs(given, spec)
            posterior.columns = None if columns is None else list(columns)
            posterior.scalar_targets = call.noise_model.scalar_targets(given.y, fits.output)
            posterior.fitted_rows = rows
            if call.inferred and call.inferred.message:
                posterior.metadata["likelihood"] = call.inferred.message

    posteriors = fits.evaluated(Variant(problem, settings, specs))
    plain = (steps, epochs, lr) == (None,) * 3 and (schedule, optimizer) == (None, "adam")
    further = None
    if auto and plain and settings.fresh and not in_order:
        further = alternatives_of(method, call.original, given, specs)
    if further is not None:
        found, wider = further[0], _rewritten(further[1], method, call.device, call.dtype)
        faster = replace(settings, rate=found.rate * settings.rate)

        def again(specs: Sequence[RunSpec], times: int, name: str) -> Sequence[Posterior]:
            posteriors = fits.evaluated(Variant(wider, faster, specs, times, name))
            for posterior, spec in zip(posteriors, specs, strict=True):
                posterior.record.metadata[SETTINGS] = changed_settings(
                    found, spec.hyper, faster.rate, times * method.default_steps
                )
            return posteriors

        posteriors = best_of_alternatives(posteriors, specs, found, given, again)
    posteriors = fits.on_all_rows(posteriors)
    for posterior in posteriors:
        why = call.unevaluated
        if auto and posterior.validation is None and given.tasks is None:
            why = why or not_evaluated(0)
        if why and posterior.record.status == "ok":
            posterior.record.status = Status("not-evaluated", why)
    complete(posteriors, specs)
    for snapshots in watching:
        snapshots.end(posteriors)
    return posteriors[0] if runs is None else Sweep(posteriors, specs)


def with_options(name: str, function: Callable[[Mapping[str, Any]], R]) -> Callable[..., R]:
    """A function with the arguments of `fit`, which are checked as there, and then passed to
    `function` as one mapping. `name` is the public name, for messages."""
    signature = inspect.signature(fit)

    def called(*args: Any, **given: Any) -> R:
        bound = signature.bind(*args, **given)
        bound.apply_defaults()
        return function(bound.arguments)

    called.__name__, called.__signature__ = name, signature  # type: ignore[attr-defined]
    return grouped(_checked(default_modes(train=True)(threads_for(0.0)(called))))


@dataclass(frozen=True)
class Call:
    """A call of `fit`, read and checked: the problem, the data, and the settings of the fits.

    Parameters
    ----------
    method : Method
    given : Given
        The rows as passed.
    specs : sequence of RunSpec
    problem, original : Problem
        What is fitted, after and before the method's `prepare`.
    noise_model : Likelihood
    inferred : Inferred or None
        How the likelihood was inferred.
    settings : FitSettings
        Without the number of steps and the batch size, which depend on the rows.
    ids : list of int
        The members.
    earlier : list of WeightPosterior
        The posteriors at whose points the weights start.
    device : torch.device
    dtype : torch.dtype or None
    validation : object
        What is held out.
    auto, in_order : bool
        Whether the method chooses the held-out rows; whether the last rows evaluate.
    unevaluated : str
        Why the fit cannot be evaluated, whatever is held out.
    options : SimpleNamespace
        The arguments of `fit`.
    """

    method: Method
    given: Given
    specs: Sequence[RunSpec]
    problem: Problem
    original: Problem
    noise_model: Likelihood
    inferred: Inferred | None
    settings: FitSettings
    ids: list[int]
    earlier: list[WeightPosterior]
    device: torch.device
    dtype: torch.dtype | None
    validation: Any
    auto: bool
    in_order: bool
    unevaluated: str
    options: SimpleNamespace

    def sized(
        self, variant: Variant, ids: list[int], validation: Any
    ) -> tuple[tuple[Data, Splits, Any, Any], FitSettings, Workload]:
        """The rows on the device, the settings with the numbers that depend on them, and the size
        of the fit."""
        problem, specs, method, options = variant.problem, variant.specs, self.method, self.options
        if isinstance(self.given.source, Stream):
            found = prepare_stream(
                self.given, problem.model, self.noise_model, specs, validation,
                options.standardize, self.device, self.dtype, ids,
            )  # fmt: skip
        else:
            found = prepare_data(
                self.given, problem.model, self.noise_model, specs, validation,
                options.standardize, self.device, self.dtype, ids, method.holds_out,
            )  # fmt: skip
        held, _, output, inputs = found
        size = _batch_size(self.batch_size, method, held, problem)
        # Of a stream, rows that are held out are in the batches, with weight 0.
        most = max(held.counts) if held.stream is None else len(held.stream.stream)
        epoch = max(1, most // size)
        own = replace(
            variant.settings, batch_size=size, epoch_steps=epoch,
            steps=variant.times * _steps(options.steps, options.epochs, method, epoch),
        )  # fmt: skip
        members = len(specs) * len(ids)
        kind = expected_kind(problem, method, options.engine, members, self.device)
        work = Workload.of(
            problem, held, members, size, output, inputs, options.draws_budget,
            expects_by_tensor(problem, method, options.engine, members, self.device),
            members * method.width if kind == "stack" else 1, own.microbatch,
            len(own.optimizer.moments), ids != self.ids,
            ids == self.ids and expects_turns(problem, method, held, own),
        )  # fmt: skip
        return found, own, work

    @property
    def parts(self) -> int:
        """The number of parts if one network is cross-fitted, else 0."""
        if not self.auto or self.in_order:
            return 0
        return _cross_fit_parts(self.given, self.specs, self.ids, self.earlier, self.problem)

    @property
    def batch_size(self) -> int | None:
        """Rows per step as given, by the argument or by a `DataLoader`."""
        size: int | None = self.options.batch_size
        loader = self.options.data
        return loader.batch_size if size is None and isinstance(loader, DataLoader) else size

    def prepared(self, variant: Variant, ids: list[int], validation: Any, pooled: bool) -> Run:
        """The stacked members, and the engine that computes them."""
        problem, specs, method = variant.problem, variant.specs, self.method
        (held, splits, output, inputs), own, work = self.sized(variant, ids, validation)
        check_planned(method, work, self.device)
        run = stack(
            problem if self.dtype else problem.to(self.device, held.dtype), method,
            self.noise_model, held, splits, specs, ids, output, inputs, own, pooled,
        )  # fmt: skip
        if own.microbatch is not None and own.microbatch < own.batch_size and problem.batch_norm:
            log.warning(
                "microbatch=%d: BatchNorm normalises each piece of a batch by its own statistics; "
                "a network with GroupNorm or LayerNorm has the gradient of the whole batch",
                own.microbatch,
            )
        check_divided(run, self.options.engine)
        precision = self.options.precision
        check_precision(precision, method, run)
        if run.problem.model is not None and run.net.at_rest:  # see `driver/trunk.py`
            later = "chosen for the part after the frozen trunk"
            half, tf32 = precision == "bfloat16", precision == "tf32"
            return replace(run, engine=Engine("loop", half=half, tf32=tf32, reason=later))
        return replace(run, engine=select_engine(run, self.options.engine, method, precision))


def check_divided(run: Run, engine: Any) -> None:
    """Check that the rows of a step can be divided into blocks, where the user asks for it."""
    if run.settings.microbatches is None:
        return
    if run.problem.model is None:
        raise MethodError("microbatches divides the rows of a network's steps; there is no network")
    if run.data.has_rows and run.rows.stream is not None:
        raise MethodError("microbatches needs rows that are in memory, and the data are a stream")
    if run.problem.joins_rows:
        kind = "BatchNorm" if run.problem.batch_norm else "the network"
        raise MethodError(
            f"microbatches: {kind} changes its buffers in training by all rows of a step, which "
            "are divided here: use GroupNorm or LayerNorm, or do not set microbatches"
        )
    mode = Engine.parse(engine).mode if engine != "auto" else None
    if mode not in (None, "eager"):
        raise MethodError(
            f"microbatches: steps run eagerly, because processes exchange gradients within a step; "
            f"engine={engine!r} asks for {mode!r}"
        )


def read_call(arguments: Mapping[str, Any]) -> Call:
    """The arguments of `fit`, read and checked."""
    options = SimpleNamespace(**arguments)
    validation, runs, time = options.validation, options.runs, options.time
    fresh, earlier = _start(options.init)
    begin = torch.cat([one.point() for one in earlier]) if earlier else None
    method = as_method(options.method)
    if runs is not None and not isinstance(runs, Runs):
        raise MethodError(f"runs must be doxa.Runs(rows=..., grid=..., seeds=...), not {runs!r}")
    if method.own_weights and not fresh and begin is None:
        raise MethodError(
            f"{method.name} rewrites the layers of the network, and their weights are not those of "
            "the given one: use init='fresh', or init=posterior of an earlier fit with it"
        )
    if options.microbatch is not None and not method.sums_over_rows:
        raise MethodError(
            f"the objective of {method.name} is not a sum over rows: its gradient cannot be "
            "accumulated over pieces of a batch; do not set microbatch"
        )
    if options.microbatches is not None and not method.sums_over_rows:
        raise MethodError(
            f"the objective of {method.name} is not a sum over rows, which cannot be divided into "
            "blocks; do not set microbatches"
        )
    given = Given.read(options.data, options.sample_weight, options.groups, time)
    if time is not None and isinstance(validation, tuple | list):
        raise MethodError(
            "time holds out the last rows of the data, and validation=(x, y) holds out other rows: "
            "pass one of them"
        )
    seed = options.seed
    specs = [RunSpec(seed=seed)] if runs is None else runs.for_method(method).expand(seed)
    if isinstance(given.source, Stream):
        check_streamed(method, given, specs)
    unevaluated = ""  # why the fit cannot be evaluated, whatever is held out
    if (
        given.group is not None
        and min(group_counts([given.rows_of_run(spec) for spec in specs], given.group) or ()) < 2
    ):
        given = given._replace(group=None)
        unevaluated = (
            "all rows of a run are of one group: how well new groups are predicted cannot be "
            "evaluated; use rows of at least 12 groups"
        )
    problem, noise_model, inferred = build_problem(
        options.model,
        method,
        options.likelihood,
        options.prior,
        options.subset,
        given,
        specs,
        options.trunk,
        options.recompute,
    )
    network, original = problem.model, problem
    if network is not None and given.source is None:
        given = given._replace(x=as_numbers(network, given.x))
    device, dtype = options.device, options.dtype
    if network is not None:
        device, dtype = device or network.device, dtype or network.dtype
    device = checks.place(device or "cpu")
    dtype = None if dtype is None else checks.floating(dtype)
    problem = _rewritten(problem, method, device, dtype)
    ids = member_ids(options.members, method)
    auto = isinstance(validation, str) and validation == "auto" and method.holds_out
    if isinstance(validation, str) and validation == "auto" and not auto:
        validation = None
        if not (given.group is None and given.time is None):
            unevaluated = (
                f"{method.name} holds out no rows by default: pass validation=0.2 to evaluate it "
                "on new groups or later rows"
            )
    in_order = given.time is not None and validation is not None
    if in_order and auto and min(_run_sizes(given, specs)) < FEWEST_ROWS:
        validation, in_order = None, False
    if in_order and _has_seen(given, earlier):
        raise MethodError(
            "time evaluates on later rows, which the posteriors of init= have seen: use "
            "init='fresh', or validation=None"
        )
    optimizer = find_optimizer(options.optimizer)
    rate, schedule = _rate(options, method, network, optimizer)
    if not isinstance(options.trunk_outputs, bool | str | Path):
        kind = type(options.trunk_outputs).__name__
        raise MethodError(f"trunk_outputs must be True, False or a folder, not {kind}")
    settings = FitSettings(
        rate=rate, optimizer=optimizer, fresh=fresh, begin=begin, schedule=schedule,
        microbatch=options.microbatch and method.piece_rows(options.microbatch),
        patience=options.patience, callbacks=options.callbacks,
        checkpoint_seconds=options.checkpoint_every, draws_budget=options.draws_budget,
        progress=sys.stderr.isatty() if options.progress is None else options.progress,
        engine=options.engine, block_size=options.block_size,
        divides_rows=method.shares in ("rows", "both"), microbatches=options.microbatches,
        row_multiple=method.piece_rows(1), row_work=method.row_work,
        trunk_outputs=TrunkOutputs(options.trunk_outputs), channels_last=options.channels_last,
    )  # fmt: skip
    return Call(
        method, given, specs, problem, original, noise_model, inferred, settings, ids, earlier,
        device, dtype, validation, auto, in_order, unevaluated, options,
    )  # fmt: skip


def _rate(
    options: SimpleNamespace, method: Method, network: Model | None, optimizer: Optimizer
) -> tuple[float, Any]:
    """The learning rate and its schedule: as given, or those that suit the network."""
    schedule = "cosine" if options.schedule is None else options.schedule
    if options.lr is not None:
        return options.lr, schedule
    rate = method.default_rate
    if network is None or not method.rate_by_network or not isinstance(optimizer, Adam):
        return rate, schedule
    factor, shape = rate_for(network.net)
    if factor == 1.0:
        return rate, schedule
    schedule = shape if options.schedule is None else schedule
    log.info(
        "lr=%g, schedule=%r: the rule for a network of this size and kind", factor * rate, schedule
    )
    return factor * rate, schedule


def _rewritten(
    problem: Problem, method: Method, device: torch.device, dtype: torch.dtype | None
) -> Problem:
    """The problem with what the method replaces or adds, in place and type."""
    network = problem.model
    with drawing("network"):  # what torch draws for layers that the method makes is replaced
        problem = method.prepare(problem)
    if network is not None and problem.model is not None and problem.model is not network:
        problem.model.given_facts = network.facts()
    return problem if dtype is None else problem.to(device, dtype)


def _check_network(run: Run, method: Method) -> None:
    """Check on a few rows that the network can be trained, and warn if it was trained before."""
    if run.problem.model is None:
        return
    assert run.initial is not None
    first, few = run.initial[0], run.rows.take(run.rows.rows[0][:8], torch.tensor(0))[0]
    if run.settings.fresh and not method.own_weights:
        warn_if_pretrained(run.net, run.initial[0])
    check_logits(run.net.likelihood, check_gradient_flow(run.net, first, few))


def _cross_fit_parts(
    given: Given, specs: Sequence[RunSpec], ids: Sequence[int], earlier: Sequence[WeightPosterior],
    problem: Problem,
) -> int:  # fmt: skip
    """The number of parts if one network is fitted to few rows, else 0 (`driver/fits.py`).

    A network that starts from an earlier fit to these rows has seen all parts: there are none.
    """
    if len(ids) > 1 or given.source is not None or given.tasks is not None:
        return 0
    if earlier and sum(len(one.point()) for one in earlier) != len(specs):
        return 0  # an error of the fit to all rows
    if _has_seen(given, earlier):
        return 0
    rows = [given.rows_of_run(spec) for spec in specs]
    groups = group_counts(rows, given.group)
    net = None if problem.model is None else problem.model.net  # its outputs are not known yet
    weights = 0 if net is None else sum(p.numel() for p in net.parameters() if p.requires_grad)
    return cross_fit_parts(_run_sizes(given, specs), groups, weights)


def _run_sizes(given: Given, specs: Sequence[RunSpec]) -> list[int]:
    """The effective number of rows of each run."""
    return run_sizes([given.rows_of_run(spec) for spec in specs], given.weight)


def _has_seen(given: Given, earlier: Sequence[WeightPosterior]) -> bool:
    """Whether an earlier fit has seen some of the rows."""
    seen = [one.fitted_rows for one in earlier]
    return any(rows is None or rows.overlap(given.x, given.y) for rows in seen)


def _start(init: Any) -> tuple[bool, list[WeightPosterior]]:
    """Whether weights are re-initialised; and the posteriors at whose points they start."""
    if isinstance(init, str) and init in ("fresh", "given"):
        return init == "fresh", []
    earlier: Any = [init] if isinstance(init, Posterior) else init
    several = isinstance(earlier, Sweep | list | tuple) and len(earlier) > 0
    if several and all(isinstance(one, WeightPosterior) for one in earlier):
        return False, list(earlier)
    raise MethodError(
        f"init must be 'fresh' or 'given', or posteriors over a network's weights, not {init!r}"
    )


def _batch_size(size: int | None, method: Method, data: Data, problem: Problem) -> int:
    lengths = data.counts
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


def build_problem(
    model: Any, method: Method, likelihood: Any, prior: Any, subset: Subset | None, given: Given,
    specs: Sequence[RunSpec], trunk: str | Sequence[str] | None = None, recompute: Any = None,
) -> tuple[Problem, Likelihood, Inferred | None]:  # fmt: skip
    """The problem, its likelihood, and how the likelihood was inferred (None if it was given)."""
    problem, inferred = _problem(
        model, method, likelihood, prior, subset, given, specs, trunk, recompute
    )
    network = problem.model
    noise_model = (
        network.likelihood if network
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
    specs: Sequence[RunSpec], trunk: str | Sequence[str] | None, recompute: Any,
) -> tuple[Problem, Inferred | None]:  # fmt: skip
    """The problem, and how its likelihood was inferred (None if it was given)."""
    if model is None:
        if recompute is not None:
            raise ModelError("recompute= names layers of a network, and there is no network")
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
        if any(one is not None for one in (likelihood, prior, subset, trunk)):
            raise ModelError(
                "the Model already has likelihood, prior, subset and trunk; set them there"
            )
        network = model.unseen()
    else:
        network = Model(model, likelihood, prior, subset or "all", trunk=trunk)
    if sum(p.numel() for p in network.net.parameters()) >= LARGE:
        network.share(model.net if isinstance(model, Model) else model)
    if recompute is not None:
        network.recompute_parts(recompute)
    inferred = None
    if not any("likelihood" in spec.hyper for spec in specs):  # otherwise the grid has them
        try:
            given = given._replace(x=as_numbers(network, given.x))
            network, inferred = infer_likelihood(network, given.x, given.y, given.source is None)
        except ModelError as error:
            raise error if given.tasks is None else _for_tasks(method, error) from error
    if type(method).prepare is not Method.prepare:  # `prepare` needs the network's layers
        network = looked_at(network, given.x)
    return Network(network), inferred


def _for_tasks(method: Method, error: ModelError) -> ModelError:
    """The error for a network that does not accept tasks as input."""
    message = (
        "the data are tasks, and the network's inputs are then context_x, context_y, context and "
        "target_x: pass a network with these arguments, or use a neural process "
        f'("cnp", "tnp", …) with None in place of the network ({error})'
    )
    alone = f"{method.name} has its own network: pass None in place of the network"
    return ModelError(message if method.needs_network else alone)
