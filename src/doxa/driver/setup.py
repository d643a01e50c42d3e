"""Preparation of a fit: held-out rows, data on the device, stacked members, the engine.

    Splits, hold_out                training rows and held-out rows of each run and member
    Given, prepare_data             from the data as passed to checked, standardised rows
    stack                           runs × members as one axis M, with starting points and priors
    select_engine                   the requested engine, or one chosen by rule, tried on a few rows
    fingerprint                     identifies a fit, so that only the same fit resumes a checkpoint

Held-out rows are used for early stopping and to evaluate the fit. By default each member holds out
its own part: the rows of a run are split at random into K parts, and member m is not trained on
part m mod K. Together the members are trained on all rows, and each row is evaluated only with
members that were not trained on it. A fraction or a pair (x, y) given by the user is held out from
all members. With groups, a part has whole groups. With times, the last rows evaluate and the rows
before them stop the training of all members; the fit to all rows follows (`fits.py`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa import checks, store
from doxa.data import (
    Batches,
    Data,
    FittedRows,
    Names,
    Standardisation,
    Tasks,
    cast,
    check_finite,
    free_memory,
    parse,
    reorder_columns,
    rows_of,
    standardise,
    warn_unscaled,
)
from doxa.data.dependence import (
    MOST_PARTS,
    group_parts,
    group_share,
    read_groups,
    read_times,
    share_of_time,
    time_cuts,
)
from doxa.data.fitted_rows import input_columns, reference_of
from doxa.data.rows import Rows, check_lengths, effective_rows, read
from doxa.data.streams import Stream
from doxa.driver.runs import RunSpec
from doxa.driver.watch import Snapshots
from doxa.engine import Engine, choose_engine, fall_back_to_loop
from doxa.engine.engine import Count, may_use_threads
from doxa.errors import DataError, DoxaError, MethodError, ModelError, ShapeError, StoreError
from doxa.likelihoods import Likelihood
from doxa.linalg.layout import LARGE, Params
from doxa.method import Clock, FitSettings, Method, Run, log_joint
from doxa.method.run import FEWEST_HELD_OUT
from doxa.model import Model
from doxa.model.checks import check_own_weights
from doxa.model.model import Network, Problem
from doxa.noise import generator
from doxa.optim import schedule as schedule_shape
from doxa.priors import BoundPrior, bind, stack_bound

FEWEST_ROWS = 8  # effective number of rows; of fewer, none are held out
FEWEST_FOR_ONE = 60  # effective number of held-out rows that evaluate one network
MOST_WEIGHTS = 20_000  # of a network that is fitted several times: to parts, and with alternatives


@dataclass(frozen=True)
class Splits:
    """Training rows and held-out rows of each split, as row numbers.

    A run has one split, or one split for each part that its members hold out.
    """

    rows: list[Tensor]
    held_out: list[Tensor] | None = None
    owners: Sequence[int] = ()  # the run of each split; (): split r is run r
    of: Sequence[int] = ()  # the split of each run and member, runs × members; (): that of its run
    evaluation: list[Tensor] | None = None  # rows that evaluate, if other held-out rows do not


def parts(rows: int) -> int:
    """The number of parts for a number of rows: 10; 20 from 10,000 rows; for few rows such that a
    part has 20 rows, but at least 5 parts; and never less than two rows per part."""
    return 20 if rows >= 10_000 else min(10, max(min(5, rows // 2), rows // 20))


def cross_fit_parts(
    sizes: Sequence[float], groups: Sequence[float] | None = None, weights: int = 0
) -> int:
    """The number of parts if one network is cross-fitted to runs of these sizes, else 0: they have
    rows to hold out, but a part is too small to stop the training of one network, or, if the
    network is small, to evaluate it.

    Parameters
    ----------
    sizes : sequence of float
        The effective number of rows of each run.
    groups : sequence of float, optional
        The effective number of groups of each run, if rows belong to groups.
    weights : int, default 0
        The number of weights of the network. Parts of a large network take long, and are fitted
        only if it could not be stopped without them.
    """
    if min(sizes) < FEWEST_ROWS:
        return 0
    fewest = FEWEST_FOR_ONE if weights <= MOST_WEIGHTS else FEWEST_HELD_OUT
    few = _has_few(sizes, None, fewest) or _has_few(sizes, groups)
    return max(part_counts(sizes, groups)) if few else 0


def _has_few(
    sizes: Sequence[float], groups: Sequence[float] | None, fewest: float = FEWEST_HELD_OUT
) -> bool:
    """Whether a part of a run has fewer rows, or groups, than `fewest`."""
    each = zip(sizes if groups is None else groups, part_counts(sizes, groups), strict=True)
    return min(size // count for size, count in each) < fewest


def part_counts(sizes: Sequence[float], groups: Sequence[float] | None = None) -> list[int]:
    """The number of parts of each run. A part has at least one whole group, if there are groups."""
    counts = [parts(int(size)) for size in sizes]
    if groups is None:
        return counts
    return [min(n, MOST_PARTS, int(g)) for n, g in zip(counts, groups, strict=True)]


def group_counts(rows: Sequence[Tensor], group: Tensor | None) -> list[int] | None:
    """The number of groups of each run; `group` has the group of each row, [N]."""
    return None if group is None else [len(group[own].unique()) for own in rows]


def run_sizes(rows: Sequence[Tensor], weight: Tensor | None) -> list[int]:
    """The effective number of rows of each run. `weight` has one entry per row, [N]."""
    return [len(own) if weight is None else int(effective_rows(weight[own])) for own in rows]


def own_parts(
    rows: Sequence[Tensor], members: Sequence[int], seeds: Sequence[int],
    weight: Tensor | None = None, group: Tensor | None = None,
) -> Splits | None:  # fmt: skip
    """A held-out part for each member, or None if a run has too few rows, for a member or, if
    members hold out different parts, for all of them together. `weight` and `group` have one entry
    per row, [N]. A part has whole groups."""
    sizes, groups = run_sizes(rows, weight), group_counts(rows, group)
    if min(sizes) < FEWEST_ROWS:
        return None
    counts = part_counts(sizes, groups)
    if _has_few(sizes, groups) and min(len({m % count for m in members}) for count in counts) < 2:
        return None
    kept: list[Tensor] = []
    held: list[Tensor] = []
    owners: list[int] = []
    of: list[int] = []
    for r, (own, seed) in enumerate(zip(rows, seeds, strict=True)):
        count, random = counts[r], generator("validation", seed)
        if group is None:
            order = torch.randperm(len(own), generator=random)
            part_of = torch.empty_like(order)
            part_of[order] = torch.arange(len(own)) % count
        else:
            part_of = group_parts(group[own], count, random)
        found: dict[int, int] = {}
        for member in members:
            part = member % count
            if part not in found:
                found[part] = len(kept)
                out = part_of == part
                kept.append(own[~out])
                held.append(own[out])
                owners.append(r)
            of.append(found[part])
    return Splits(kept, held, owners, of)


def share(
    rows: Sequence[Tensor], size: float, seeds: Sequence[int], group: Tensor | None = None
) -> Splits:
    """A random fraction of each run's rows, or about as many rows in whole groups, held out from
    all its members."""
    kept, held = [], []
    for own, seed in zip(rows, seeds, strict=True):
        count = round(size * len(own))
        if not 0 < count < len(own):
            raise DataError(
                f"validation={size} of {len(own)} rows leaves {len(own) - count} to train on and "
                f"{count} to validate on; it must be a fraction between 0 and 1, or a pair (x, y)"
            )
        random = generator("validation", seed)
        if group is not None:
            out = group_share(group[own], size, random)
            kept.append(own[~out])
            held.append(own[out])
            continue
        order = torch.randperm(len(own), generator=random)
        kept.append(own[order[count:].sort().values])
        held.append(own[order[:count].sort().values])
    return Splits(kept, held)


def later_rows(
    rows: Sequence[Tensor], size: float | None, seeds: Sequence[int], time: Tensor,
    group: Tensor | None, stops: bool,
) -> Splits:  # fmt: skip
    """The last rows of each run, held out to evaluate, and the ones before them, to stop the
    training of all members. `size` is the fraction of the rows in each of both parts. Without
    `stops` there is nothing to stop, and the rows before the last ones are trained on."""
    kept, held, evaluation = [], [], []
    for own, seed in zip(rows, seeds, strict=True):
        share = size or share_of_time(len(own)) if group is None else size or 0.2
        if not 0 < share < 0.5:
            raise DataError(
                f"validation={share} with time holds out two such parts, to stop the training and "
                "to evaluate: it must be below 0.5"
            )
        own_group = None if group is None else group[own]
        masks = time_cuts(time[own], share, own_group, generator("validation", seed))
        trained, between, last = masks if stops else (masks[0] | masks[1], masks[2], masks[2])
        kept.append(own[trained])
        held.append(own[between])
        evaluation.append(own[last])
    return Splits(kept, held, evaluation=evaluation)


def appended(
    x: Any, y: Any, rows: list[Tensor], given: Any, prepare: Callable[[Any], Any]
) -> tuple[Any, Any, Splits]:
    """The data set with the user's validation rows appended."""
    vx, vy, _ = parse(given)
    start, count = rows_of(x, "x"), rows_of(vx, "validation x")
    if count == 0 or rows_of(vy, "validation y") != count:
        raise ShapeError(f"validation x has {count} rows and y {rows_of(vy, 'validation y')}")
    shapes, fitted = ([tuple(t.shape[1:]) for t in tree_flatten(v)[0]] for v in (vx, x))
    if shapes != fitted:
        raise ShapeError(f"validation x has rows of shape {shapes}, but x has {fitted}")
    check_finite(vx, "validation x")
    check_finite(vy, "validation y")
    vy = prepare(vy)
    x = tree_map(lambda a, b: torch.cat([a, b.to(a.dtype)]), x, vx)
    y = tree_map(lambda a, b: torch.cat([a, b.to(a.dtype)]), y, vy)
    return x, y, Splits(rows, [torch.arange(start, start + count)] * len(rows))


def hold_out(
    x: Any, y: Any, rows: list[Tensor], validation: Any, members: Sequence[int], streamed: bool,
    prepare: Callable[[Any], Any], seeds: Sequence[int], weight: Tensor | None = None,
    group: Tensor | None = None, time: Tensor | None = None, stops: bool = True,
) -> tuple[Any, Any, Splits]:  # fmt: skip
    """The data and the held-out rows. `validation` is "auto" (a part for each member), a fraction
    or a pair; `weight`, `group` and `time` have one entry per row, [N]. `stops`: whether the method
    holds out rows to stop the training."""
    auto = isinstance(validation, str) and validation == "auto"
    if auto or isinstance(validation, int | float | str):
        size = None if auto else float(checks.positive("validation", validation))
        if time is not None:
            return x, y, later_rows(rows, size, seeds, time, group, stops)
        if size is None:
            return x, y, own_parts(rows, members, seeds, weight, group) or Splits(rows)
        return x, y, share(rows, size, seeds, group)
    if streamed:
        raise DataError("validation as a pair needs data as a pair; pass a fraction instead")
    return appended(x, y, rows, validation, prepare)


log = logging.getLogger("doxa")


class Given(NamedTuple):
    """The rows as passed to `fit`: all rows, or the first rows of a source that has the others."""

    x: Any
    y: Any
    source: Rows | Stream | None
    total: int
    tasks: Tasks | None
    names: tuple[Names, Names]  # of x and y
    weight: Tensor | None = None  # one per row, [total], all above 0
    kept: Tensor | None = None  # mask of the passed rows with weight above 0; None: all of them
    group: Tensor | None = None  # the number of each row's group, [total]
    time: Tensor | None = None  # the rank of each row's time, [total]

    @classmethod
    def read(
        cls, data: Any, sample_weight: Any = None, groups: Any = None, time: Any = None
    ) -> Given:
        """Read the data and remove rows of weight 0."""
        x, y, source, weight, kept = read(data, sample_weight)
        if source is None:
            check_lengths(x, y)
        if isinstance(source, Stream):
            for name, value in (("groups", groups), ("time", time)):
                if value is not None:
                    raise DataError(
                        f"a stream takes no {name}: fit a sample, stream.sample(10_000)"
                    )
            own = Names(source.columns)
            return cls(x, y, source, len(source), None, (own, Names()))
        total = len(source) if source is not None else rows_of(x, "x")
        tasks = data if isinstance(data, Tasks) else None
        if tasks is not None and kept is not None:
            tasks = tasks.some(kept)
        pair = isinstance(data, tuple | list)
        names = (Names.of(data[0]), Names.of(data[1])) if pair else (Names(), Names())
        if tasks is not None and not (groups is None and time is None):
            raise DataError(
                "the points of a task belong together: tasks take no groups and no time"
            )
        passed = total if kept is None else len(kept)
        group = None if groups is None else read_groups(groups, passed, kept)
        when = None if time is None else read_times(time, passed, kept)
        return cls(x, y, source, total, tasks, names, weight, kept, group, when)

    def rows_of_run(self, spec: RunSpec) -> Tensor:
        """The numbers of a run's rows, counted among the rows of weight above 0."""
        if spec.rows is None:
            return torch.arange(self.total)
        if self.kept is None:
            return _rows(spec, spec.rows, self.total)
        rows = _rows(spec, spec.rows, len(self.kept))
        rows = (self.kept.cumsum(0) - 1)[rows[self.kept[rows]]]
        if rows.numel() == 0:
            raise DataError(
                "the sample weights of a run's rows are all zero: nothing is left to fit"
            )
        return rows


def prepare_data(
    given: Given, model: Model | None, likelihood: Likelihood, specs: Sequence[RunSpec],
    validation: Any, standardize: bool, device: torch.device, dtype: torch.dtype | None,
    members: Sequence[int], stops: bool = True,
) -> tuple[Data, Splits, Any, Any]:  # fmt: skip
    """Checked and standardised rows on the device; the splits; the output shape of the network; the
    shape of one row of x."""
    x, y, source, total, tasks, names, given_weight, kept, group, when = given
    if dtype is None:
        floats = [t.dtype for t in tree_flatten(x)[0] if t.dtype in (torch.float32, torch.float64)]
        dtype = floats[0] if floats else torch.float32
    numbers = None if kept is None else kept.nonzero()[:, 0]
    check_finite(x, "x", numbers, dtype, names[0])
    check_finite(y, "y", numbers, dtype, names[1])
    inputs = tree_map(lambda t: list(t.shape[1:]), x)
    if model is not None:
        if model.output is None:  # not built yet, or rewritten since
            model.build(tree_map(lambda t: cast(t[:1], device, dtype), x))
        output = model.output
    else:
        if source is not None and likelihood.class_axis:
            raise DataError(
                "the number of classes cannot be inferred from the first rows of a stream: pass x "
                "and y in memory, or a network"
            )
        output = likelihood.outputs(y) if isinstance(y, Tensor) else (1,)
    if tasks and likelihood.per_output:
        raise DataError(
            "the points of a task share one noise level: per_output is not available for tasks"
        )
    prepare = lambda y: likelihood.prepare_targets(y, output)  # noqa: E731
    try:
        y = prepare(y)
    except DataError as error:
        if kept is None:
            raise
        raise type(error)(f"{error} (rows of weight 0 are not counted)") from error
    if likelihood.classifies and source is None:
        check_classes(y, likelihood)
    rows = [given.rows_of_run(spec) for spec in specs]
    if tasks is not None and validation == "auto":
        validation = None
    splits = Splits(rows)
    if validation is not None:
        seeds = [spec.seed for spec in specs]
        streamed = source is not None
        if isinstance(validation, tuple | list) and len(validation) == 2:
            vx = reorder_columns(validation[0], names[0].columns, "validation x")
            validation = (vx, validation[1])
        x, y, splits = hold_out(
            x, y, rows, validation, members, streamed, prepare, seeds, given_weight, group, when,
            stops,
        )  # fmt: skip
    rows = rows if splits.owners else splits.rows  # with owners, some member is trained on each row
    extent = rows_of(x, "x") if source is None else total
    scales = [Standardisation()] * len(specs)
    weight = None
    if given_weight is not None:
        weight = _weights(given_weight, numbers, extent, device, dtype)
    if standardize:
        if source is not None:
            raise DataError(
                "standardize=True needs the rows in memory; scale the rows in a streamed Dataset"
            )
        scale_y = likelihood.scales_targets
        scaled = tasks and tasks.scales(rows, scale_y, weight)
        scales = scaled or standardise(x, y, rows, scale_y, weight)
    elif source is None:
        warn_unscaled(x, y, rows[0], likelihood.scales_targets, weight)
    scaled_per_run = standardize and len(specs) > 1
    lazy = source is None and not _resident(x, y, len(specs) if scaled_per_run else 1, device)
    scaled_per_run = scaled_per_run and not lazy
    if source is None and not lazy:
        put = lambda tree: tree_map(lambda t: cast(t, device, dtype), tree)  # noqa: E731
        if not standardize:
            x, y = put(x), put(y)
        elif scaled_per_run:
            x = put(tree_map(lambda *t: torch.cat(t), *(s.x(x, dtype) for s in scales)))
            y = put(tree_map(lambda *t: torch.cat(t), *(s.y(y, dtype) for s in scales)))
        else:
            x, y = put(scales[0].x(x, dtype)), put(scales[0].y(y, dtype))
    if group is not None and extent > total:  # each row of a pair is a group of its own
        group = torch.cat([group, torch.arange(extent - total) + len(group)])
    memory = source if isinstance(source, Rows) else None
    held = Data(
        x, y, splits.rows, scales, device, dtype, extent, splits.held_out, weight, scaled_per_run,
        lazy, memory, prepare, tasks or False, splits.owners, group=group,
        evaluation=splits.evaluation,
    )  # fmt: skip
    return held, splits, output, inputs


def fitted_rows(given: Given, specs: Sequence[RunSpec], validation: Any) -> list[FittedRows | None]:
    """The rows that each run used: its own rows, some of which may be held out for early stopping,
    and the rows of `validation`. None if the rows are not in memory."""
    if isinstance(given.source, Stream) and (found := given.source.surveyed) is not None:
        return [replace(FittedRows.of(found.x, found.y), total=given.total)] * len(specs)
    if given.source is not None or given.tasks is not None:
        return [None] * len(specs)
    more = None
    if isinstance(validation, tuple | list):
        vx = reorder_columns(validation[0], given.names[0].columns, "validation x")
        more = FittedRows.of(*read((vx, validation[1]))[:2])
    each: list[FittedRows | None] = []
    for spec in specs:
        own = FittedRows.of(given.x, given.y, given.rows_of_run(spec).unique())
        each.append(own if more is None else own.plus(more))
    return each


def reference_inputs(given: Given, spec: RunSpec) -> Tensor | None:
    """The inputs of a run's rows that new rows are compared with; None if there are none."""
    if isinstance(given.source, Stream) and (found := given.source.surveyed) is not None:
        return reference_of(input_columns(found.x))
    if given.source is not None or given.tasks is not None or not isinstance(given.x, Tensor):
        return None
    return reference_of(input_columns(given.x[given.rows_of_run(spec).unique().to(given.x.device)]))


def _resident(x: Any, y: Any, copies: int, device: torch.device) -> bool:
    """Whether the rows take less than a quarter of the device's free memory, and can be moved."""
    size = copies * sum(t.numel() * t.element_size() for t in tree_flatten((x, y))[0])
    if size < free_memory(device) // 4:
        return True
    log.info("the data (%.3g GiB) stay in place; each batch is moved to the device", size / 2**30)
    return False


def check_classes(y: Any, likelihood: Likelihood) -> None:
    ignored = likelihood.ignore_index
    for leaf in tree_flatten(y)[0]:
        seen = leaf.unique()
        if ignored is not None:
            seen = seen[seen != ignored]
        if len(seen) < 2:
            raise DataError(
                f"y holds one class only ({seen.tolist()}): there is nothing to classify"
            )


def _rows(spec: RunSpec, rows: Tensor, total: int) -> Tensor:
    """The rows of a run, checked."""
    if spec.mask is not None and spec.mask != total:
        raise DataError(f"a run's mask has {spec.mask} entries, but the data have {total} rows")
    outside = rows[(rows < 0) | (rows >= total)]
    if rows.numel() == 0 or outside.numel():
        found = f", not {int(outside[0])}" if outside.numel() else ""
        raise DataError(
            f"a run's rows must be a non-empty list of numbers in 0 … {total - 1}{found}"
        )
    return rows.cpu()


def _weights(
    given: Tensor, numbers: Tensor | None, extent: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The weights on the device, with 1 for appended validation rows."""
    weight = given.to(device, dtype)
    if not bool(torch.isfinite(weight).all()):
        at = int((~torch.isfinite(weight)).nonzero()[0, 0])
        row = at if numbers is None else int(numbers[at])
        raise DataError(f"sample_weight is {given[at].item()} at row {row}, infinite in {dtype}")
    return torch.cat([weight, weight.new_ones(extent - len(weight))])


OBJECTS = ("prior", "likelihood")  # fields of a grid whose values are not numbers


def stack(
    problem: Problem, method: Method, likelihood: Likelihood, data: Data,
    splits: Splits, specs: Sequence[RunSpec], ids: list[int], output: Any, inputs: Any,
    settings: FitSettings, pooled: bool = False,
) -> Run:  # fmt: skip
    """Runs × members as one axis M; the engine is chosen later. `pooled`: the members of a run pool
    their held-out rows, however many these are (`Run.pooled_rows`)."""
    count = len(ids)
    run_of = [r for r in range(len(specs)) for _ in ids]
    split_of = list(splits.of or run_of)
    if method.needs_network and all(
        name.startswith("likelihood.") for name in problem.layout.names
    ):
        raise ModelError("the network has no trainable parameter: requires_grad is False on all")
    if problem.batch_norm:
        _log_batch_norm(problem.net)
    if problem.model is not None and problem.model.written:
        names = ", ".join(problem.model.written[:5])
        log.info("training changes the buffers %s: each member has its own copy", names)
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
    pools = pooled_rows(data, run_of, split_of, pooled)
    run = replace(run, initial=run.initial_weights(), pooled_rows=pools)
    if data.stream is not None:
        return _with_stream_weights(run, method)
    weights = method.row_weights(run)
    if weights is not None:
        run = _with_weights(run, method, weights)
    if bool((run.n <= 0).any()):
        raise DataError("the sample weights of a run's rows are all zero: nothing is left to fit")
    return run


def _with_stream_weights(run: Run, method: Method) -> Run:
    """The run with the method's weights of the rows of a stream, which are functions of the number
    of the row. Their mean is 1."""
    if type(method).streamed_row_weights is Method.streamed_row_weights:
        return run
    stream = run.rows.stream.weighted(method.streamed_row_weights)
    return replace(run, data=replace(run.rows, stream=stream))


def pooled_rows(
    data: Data, run_of: Sequence[int], split_of: Sequence[int], always: bool
) -> list[float] | None:
    """The effective number of held-out rows of each run, if they are pooled: always, or if the
    members hold out few rows each (`Run.pooled_rows`)."""
    held = data.validation
    if held is None or data.tasks:
        return None
    sizes = [data.effective_rows(rows) for rows in held]
    splits: dict[int, set[int]] = {}
    for r, split in zip(run_of, split_of, strict=True):
        splits.setdefault(r, set()).add(split)
    many = min(sizes) >= FEWEST_HELD_OUT and not always
    if min(map(len, splits.values())) < 2 or many:
        return None
    return [sum(sizes[split] for split in splits[r]) for r in sorted(splits)]


def _with_weights(run: Run, method: Method, weights: Tensor) -> Run:
    """The run with the method's row weights for each member, times the user's weights."""
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


def _log_batch_norm(model: Model) -> None:
    if model.momenta:
        log.info("the network has BatchNorm: each member has its own running statistics")
    else:
        log.warning(
            "the network has BatchNorm without running statistics: the prediction of a row depends "
            "on the other rows of the call"
        )


def _hyper(
    method: Method, specs: Sequence[RunSpec], count: int, data: Data, rated: bool
) -> tuple[dict[str, Tensor], list[Any] | None]:
    """Hyper-parameters that differ between runs, [M] each; and the priors of the runs, as
    objects."""
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
            raise MethodError(f"values of a grid must be numbers; {name}: {error}") from error
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
        each = [bind(prior, problem.layout, merge=False) for prior in priors for _ in range(count)]
        return stack_bound(each)
    return bind(problem.model.prior if problem.model is not None else None, problem.layout)


def _check_likelihood(own: Likelihood, common: Likelihood, output: Any) -> None:
    """The likelihoods of runs may differ only in the given noise of a Gaussian. Each member has its
    own number for the noise; a step reads everything else from the model's likelihood."""
    learned = common.parameters(output).keys()
    if type(own) is not type(common) or own.parameters(output).keys() != learned:
        raise MethodError(
            f"likelihoods of a grid must have the model's family and the same learned parameters: "
            f"{own!r} cannot be combined with {common!r}"
        )
    if not common.constants_per_run:
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


def expected_kind(
    problem: Problem, method: Method, requested: str | Engine, members: int, device: torch.device
) -> str:
    """The kind of engine that `select_engine` will choose, unless stacking fails."""
    if requested != "auto":
        return Engine.parse(requested).kind
    if isinstance(problem, Network):
        return choose_engine(problem.net, members * method.width, device).kind
    return "stack" if method.modules_stack and members > 1 else "loop"


def expects_by_tensor(
    problem: Problem, method: Method, requested: str | Engine, members: int, device: torch.device
) -> bool:
    """Whether `Run.by_tensor` will hold, unless stacking fails. `problem` has been built."""
    if not isinstance(problem, Network) or problem.layout.size < LARGE:
        return False
    if requested == "auto":
        return expected_kind(problem, method, requested, members, device) == "loop"
    return Engine.parse(requested).takes_tensors(device)


def divisible(problem: Problem, method: Method, settings: FitSettings) -> bool:
    """Whether members may be trained apart from each other (`blocks.py`). Not if callbacks see all
    of them, as they do unless the size of blocks is given."""
    shared = method.shares in ("members", "both")
    watched = any(
        settings.block_size is None or isinstance(callback, Snapshots)
        for callback in settings.callbacks
    )
    alone = settings.microbatches is None
    return shared and alone and problem.model is not None and not watched


def expects_turns(problem: Problem, method: Method, data: Data, settings: FitSettings) -> bool:
    """Whether each member will be trained to its end before the next one begins, if members are
    computed one at a time. False if they may pool their held-out rows (`Run.pooled_rows`), because
    these are few."""
    few = data.validation is not None and not data.tasks and (
        min(map(data.effective_rows, data.validation)) < FEWEST_HELD_OUT
    )  # fmt: skip
    alone = settings.block_size in (None, 1)
    return alone and divisible(problem, method, settings) and not few


def select_engine(
    run: Run, requested: str | Engine, method: Method, precision: str = "full"
) -> Engine:
    """The requested engine, or one chosen by rule; "loop" if stacking fails."""
    own, width = not isinstance(run.problem, Network), method.num_particles_on(run.problem)
    if requested != "auto":
        chosen = Engine.parse(requested)
    elif own and method.modules_stack and run.size > 1:
        return Engine("stack", None, reason="the method's own modules run on stacked weights")
    elif own:
        return Engine("loop", reason="the method has its own functions")
    else:
        chosen = choose_engine(run.net, run.size * width, run.device)
    if own:
        return chosen
    last = run.settings.channels_last
    if run.net.recomputed and (chosen.kind, chosen.mode or "eager") != ("loop", "eager"):
        raise MethodError(
            "parts of the network that are computed again need one member at a time and eager "
            f"steps, and engine={chosen.label!r} computes otherwise: remove engine=, or use "
            "engine='loop'"
        )
    chosen = replace(
        chosen, half=precision == "bfloat16", tf32=precision == "tf32", channels_last=last
    )
    wide = run.expand_particles(width) if width > 1 else run
    size = min(run.settings.batch_size, 8)
    rows = Batches(run.rows, wide.split_of, wide.keys, size, "trial", most=1)
    batch = rows.batch(0)
    zero = torch.zeros((), device=run.device)
    clock = Clock(zero, zero, 1, wide.noise("trial"))
    state = wide.init_network()
    count = Count()

    def trial(tried: Engine) -> None:
        def gradients() -> list[Tensor | None]:
            trial = replace(wide, engine=tried)
            return list(trial.value_and_grad(log_joint, state, batch, clock)[1].values())

        with count if may_use_threads() else nullcontext():
            check_own_weights(run.net, gradients)

    try:
        chosen = fall_back_to_loop(chosen, trial)
    except DoxaError:
        raise
    except Exception as error:  # whatever the user's forward raises
        how = " in the format channels_last (reshape in place of view?)" if last else ""
        raise ModelError(
            f"the network fails in training, on {rows.size} rows{how}: {error}"
        ) from error
    if last and chosen.kind == "stack":
        if requested != "auto":
            raise MethodError(
                "channels_last is for members that are computed one at a time: use engine='loop', "
                "or do not set channels_last"
            )
        log.warning("channels_last has no effect: members are computed all at once")
    log.info("engine: %s (%s)", chosen.kind, chosen.reason)
    return replace(chosen, product=count.largest / rows.size)


def fingerprint(run: Run, method: Method, specs: Sequence[RunSpec]) -> str:
    """A digest of everything that must be the same for a checkpoint to be resumed."""
    data = run.rows
    digest = hashlib.sha256()
    facts = {
        "method": store.encode(method), "steps": run.steps, "batch": run.settings.batch_size,
        "schedule": schedule_shape(run.settings.schedule, 64).tolist(), "rate": run.settings.rate,
        "optimizer": repr(run.settings.optimizer), "patience": run.settings.patience,
        "likelihood": _recipe(run.likelihood), "model": _model_settings(run.problem.model),
        "members": list(run.members), "seeds": list(run.seeds), "dtype": str(run.dtype),
        "grid": [repr(dict(spec.hyper)) for spec in specs],
        "layout": [[e.name, list(e.shape)] for e in run.layout.entries],
        "rows": [len(r) for r in data.rows], "total": data.total,
    }  # fmt: skip
    if run.engine.precision != "full":
        facts["precision"] = run.engine.precision
    if run.settings.channels_last:
        facts["channels_last"] = True
    if data.stream is not None:
        facts["stream"] = data.stream.stream.identity
    if run.settings.microbatch is not None:
        facts["microbatch"] = run.settings.microbatch
    if run.row_blocks > 1:
        facts["row_blocks"] = run.row_blocks
    digest.update(json.dumps(facts, sort_keys=True).encode())
    leaves = tree_flatten((data.x, data.y))[0]
    leaves += [t for t in (data.weight, run.initial) if t is not None]
    fixed = {} if run.problem.model is None else run.net.fixed
    leaves += [t.flatten() for t in fixed.values()]
    for leaf in leaves:
        part = leaf[:: max(1, leaf.shape[0] // 1024)].detach().cpu().contiguous()
        digest.update(part.double().numpy().tobytes())
    for rows in (*data.rows, *(t for t in (data.group,) if t is not None)):
        digest.update(rows.numpy().tobytes())
    return digest.hexdigest()


def _model_settings(model: Model | None) -> Any:
    """The settings of a model that the layout does not contain."""
    if model is None:
        return None
    named = [] if model.named is None else [model.named]
    return [_recipe(model.prior), list(model.subset_names), *named]


def _recipe(value: Any) -> Any:
    """A likelihood or prior as JSON; the name of its class if it cannot be stored."""
    try:
        return store.encode(value)
    except StoreError:
        return type(value).__qualname__
