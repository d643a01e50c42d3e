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
    Names,
    Standardisation,
    Tasks,
    as_tensor,
    cast,
    check_finite,
    free_memory,
    in_order,
    parse,
    rows_of,
    standardise,
    warn_unscaled,
)
from doxa.data.rows import Rows
from doxa.driver.holdout import Splits, hold_out
from doxa.driver.runs import RunSpec
from doxa.errors import DataError, ShapeError
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

    @classmethod
    def read(cls, data: Any) -> Given:
        x, y, source = parse(data)
        total = len(source) if source is not None else rows_of(x, "x")
        if total == 0:
            raise DataError("x has no rows (N = 0)")
        if source is None and rows_of(y, "y") != total:
            raise ShapeError(f"x has {total} rows and y {rows_of(y, 'y')}")
        tasks = data if isinstance(data, Tasks) else None
        pair = isinstance(data, tuple | list)
        names = (Names.of(data[0]), Names.of(data[1])) if pair else (Names(), Names())
        return cls(x, y, source, total, tasks, names)


def place_data(
    given: Given, model: Model | None, likelihood: Likelihood, specs: Sequence[RunSpec],
    validation: Any, standardize: bool, sample_weight: Any, device: torch.device,
    dtype: torch.dtype | None, members: Sequence[int],
) -> tuple[Data, Splits, Any, Any]:  # fmt: skip
    """Checked, standardised rows on the device; who is fitted to which; the network's output shape;
    x's row shape."""
    x, y, source, total, tasks, names = given
    if dtype is None:
        floats = [t.dtype for t in tree_flatten(x)[0] if t.dtype in (torch.float32, torch.float64)]
        dtype = floats[0] if floats else torch.float32
    check_finite(x, "x", dtype=dtype, names=names[0])
    check_finite(y, "y", dtype=dtype, names=names[1])
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
    y = prepare(y)
    if likelihood.classifies and source is None:
        _check_classes(y, likelihood)
    rows = [torch.arange(total) if s.rows is None else _rows(s, s.rows, total) for s in specs]
    if tasks is not None and validation == "auto":
        validation = None
    splits = Splits(rows)
    if validation is not None:
        seeds = [spec.seed for spec in specs]
        streamed = source is not None
        if isinstance(validation, tuple | list) and len(validation) == 2:
            vx = in_order(validation[0], names[0].columns, "validation x")
            validation = (vx, validation[1])
        x, y, splits = hold_out(x, y, rows, validation, members, streamed, prepare, seeds)
    rows = rows if splits.owners else splits.rows  # every row of a run is seen by some member
    extent = rows_of(x, "x") if source is None else total
    scales = [Standardisation()] * len(specs)
    weight = None
    if sample_weight is not None:
        weight = _weights(sample_weight, total, extent, device, dtype)
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
    sample_weight: Any, total: int, extent: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    weight = as_tensor(sample_weight, "sample_weight").to(device, dtype)
    if weight.shape != (total,):
        raise ShapeError(f"sample_weight has shape {tuple(weight.shape)}, expected ({total},)")
    bad = ~torch.isfinite(weight) | (weight < 0)
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        raise DataError(
            f"sample_weight is {weight[row].item()} at row {row}; weights are finite and "
            "nonnegative"
        )
    return torch.cat([weight, weight.new_ones(extent - total)])
