"""From what a caller passes to checked, standardised rows on a device, for all runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa.data import (
    Data,
    FittedRows,
    Names,
    Standardisation,
    Tasks,
    cast,
    check_finite,
    free_memory,
    in_order,
    rows_of,
    standardise,
    warn_unscaled,
)
from doxa.data.rows import Rows, check_lengths, read
from doxa.driver.holdout import Splits, hold_out
from doxa.driver.runs import RunSpec
from doxa.errors import DataError
from doxa.likelihoods import Categorical, Likelihood
from doxa.model import Model

log = logging.getLogger("doxa")


class Given(NamedTuple):
    """Rows as they were passed: all of them, or the first of a source that holds the others."""

    x: Any
    y: Any
    source: Rows | None
    total: int
    tasks: Tasks | None
    names: tuple[Names, Names]  # of x and y
    weight: Tensor | None = None  # of each row, [total], all above 0
    kept: Tensor | None = None  # which of the rows passed have a weight, where some have none

    @classmethod
    def read(cls, data: Any, sample_weight: Any = None) -> Given:
        """What was passed, without rows of weight 0: from here on there are none."""
        x, y, source, weight, kept = read(data, sample_weight)
        if source is None:
            check_lengths(x, y)
        total = len(source) if source is not None else rows_of(x, "x")
        tasks = data if isinstance(data, Tasks) else None
        if tasks is not None and kept is not None:
            tasks = tasks.some(kept)
        pair = isinstance(data, tuple | list)
        names = (Names.of(data[0]), Names.of(data[1])) if pair else (Names(), Names())
        return cls(x, y, source, total, tasks, names, weight, kept)

    def rows_of_run(self, spec: RunSpec) -> Tensor:
        """The numbers of a run's rows among those that have a weight."""
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


def place_data(
    given: Given, model: Model | None, likelihood: Likelihood, specs: Sequence[RunSpec],
    validation: Any, standardize: bool, device: torch.device, dtype: torch.dtype | None,
    members: Sequence[int],
) -> tuple[Data, Splits, Any, Any]:  # fmt: skip
    """Checked, standardised rows on the device; who is fitted to which; the network's output shape;
    x's row shape."""
    x, y, source, total, tasks, names, given_weight, kept = given
    if dtype is None:
        floats = [t.dtype for t in tree_flatten(x)[0] if t.dtype in (torch.float32, torch.float64)]
        dtype = floats[0] if floats else torch.float32
    numbers = None if kept is None else kept.nonzero()[:, 0]
    check_finite(x, "x", numbers, dtype, names[0])
    check_finite(y, "y", numbers, dtype, names[1])
    inputs = tree_map(lambda t: list(t.shape[1:]), x)
    if model is not None:
        if model.output is None:  # not seen yet, or rewritten since
            model.build(tree_map(lambda t: cast(t[:1], device, dtype), x))
        output = model.output
    else:
        if source is not None and isinstance(likelihood, Categorical):
            raise DataError(
                "the first rows of a stream do not say how many classes there are: pass the rows "
                "at hand, or a network"
            )
        output = likelihood.outputs(y) if isinstance(y, Tensor) else (1,)
    if tasks and getattr(likelihood, "per_output", False):
        raise DataError("points of a task share one noise level: per_output is not for tasks")
    prepare = lambda y: likelihood.prepare_targets(y, output)  # noqa: E731
    try:
        y = prepare(y)
    except DataError as error:
        if kept is None:
            raise
        raise type(error)(f"{error} (rows of weight 0 are not counted)") from error
    if likelihood.classifies and source is None:
        _check_classes(y, likelihood)
    rows = [given.rows_of_run(spec) for spec in specs]
    if tasks is not None and validation == "auto":
        validation = None
    splits = Splits(rows)
    if validation is not None:
        seeds = [spec.seed for spec in specs]
        streamed = source is not None
        if isinstance(validation, tuple | list) and len(validation) == 2:
            vx = in_order(validation[0], names[0].columns, "validation x")
            validation = (vx, validation[1])
        x, y, splits = hold_out(
            x, y, rows, validation, members, streamed, prepare, seeds, given_weight
        )
    rows = rows if splits.owners else splits.rows  # every row of a run is seen by some member
    extent = rows_of(x, "x") if source is None else total
    scales = [Standardisation()] * len(specs)
    weight = None
    if given_weight is not None:
        weight = _weights(given_weight, numbers, extent, device, dtype)
    if standardize:
        if source is not None:
            raise DataError(
                "standardize=True needs the rows at hand; scale a streamed Dataset itself"
            )
        scale_y = likelihood.scales_targets
        scaled = tasks and tasks.scales(rows, scale_y, weight)
        scales = scaled or standardise(x, y, rows, scale_y, weight)
    elif source is None:
        warn_unscaled(x, y, rows[0], likelihood.scales_targets, weight)
    banked = standardize and len(specs) > 1
    lazy = source is None and not _resident(x, y, len(specs) if banked else 1, device)
    banked = banked and not lazy
    if source is None and not lazy:
        put = lambda tree: tree_map(lambda t: cast(t, device, dtype), tree)  # noqa: E731
        if not standardize:
            x, y = put(x), put(y)
        elif banked:
            x = put(tree_map(lambda *t: torch.cat(t), *(s.x(x, dtype) for s in scales)))
            y = put(tree_map(lambda *t: torch.cat(t), *(s.y(y, dtype) for s in scales)))
        else:
            x, y = put(scales[0].x(x, dtype)), put(scales[0].y(y, dtype))
    held = Data(
        x, y, splits.rows, scales, device, dtype, extent, splits.held_out, weight, banked, lazy,
        source, prepare, tasks or False, splits.owners,
    )  # fmt: skip
    return held, splits, output, inputs


def fitted_rows(given: Given, specs: Sequence[RunSpec], validation: Any) -> list[FittedRows | None]:
    """The rows that each run used: those it was given, some of which may be held out to stop by,
    and those of `validation`. None where they are not at hand."""
    if given.source is not None or given.tasks is not None:
        return [None] * len(specs)
    more = None
    if isinstance(validation, tuple | list):
        vx = in_order(validation[0], given.names[0].columns, "validation x")
        more = FittedRows.of(*read((vx, validation[1]))[:2])
    found: list[FittedRows | None] = []
    for spec in specs:
        own = FittedRows.of(given.x, given.y, given.rows_of_run(spec).unique())
        found.append(own if more is None else own.plus(more))
    return found


def _resident(x: Any, y: Any, copies: int, device: torch.device) -> bool:
    """Whether the rows take less than a quarter of what is free on the device: they move there."""
    size = copies * sum(t.numel() * t.element_size() for t in tree_flatten((x, y))[0])
    if size < free_memory(device) // 4:
        return True
    log.info("the data (%.3g GiB) stays where it is and is read by the batch", size / 2**30)
    return False


def _check_classes(y: Any, likelihood: Likelihood) -> None:
    ignored = getattr(likelihood, "ignore_index", None)
    for leaf in tree_flatten(y)[0]:
        seen = leaf.unique()
        if ignored is not None:
            seen = seen[seen != ignored]
        if len(seen) < 2:
            raise DataError(
                f"y holds one class only ({seen.tolist()}): there is nothing to tell apart"
            )


def _rows(spec: RunSpec, rows: Tensor, total: int) -> Tensor:
    """Those of a run, checked."""
    if spec.mask is not None and spec.mask != total:
        raise DataError(f"a run's mask has {spec.mask} entries, the data {total} rows")
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
    """On the device, and 1 for rows of the user's own that were appended."""
    weight = given.to(device, dtype)
    if not bool(torch.isfinite(weight).all()):
        at = int((~torch.isfinite(weight)).nonzero()[0, 0])
        row = at if numbers is None else int(numbers[at])
        raise DataError(f"sample_weight is {given[at].item()} at row {row}, infinite in {dtype}")
    return torch.cat([weight, weight.new_ones(extent - len(weight))])
