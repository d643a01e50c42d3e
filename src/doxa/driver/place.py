"""From what a caller passes to checked, standardised rows on a device, for all runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from doxa import checks
from doxa.data import (
    Data,
    Standardisation,
    Tasks,
    as_tensor,
    cast,
    check_finite,
    free_memory,
    parse,
    rows_of,
    standardise,
    warn_unscaled,
)
from doxa.driver.runs import RunSpec
from doxa.errors import DataError, ShapeError
from doxa.likelihoods import Likelihood
from doxa.model import Model
from doxa.noise import generator

log = logging.getLogger("doxa")


def place_data(
    data: Any, model: Model | None, likelihood: Likelihood, specs: Sequence[RunSpec],
    validation: Any, standardize: bool, sample_weight: Any, device: torch.device,
    dtype: torch.dtype | None, seed: int,
) -> tuple[Data, Any, Any]:  # fmt: skip
    """Checked, standardised rows on the device; the network's output shape; x's row shape."""
    x, y, source = parse(data)
    total = len(source) if source is not None else rows_of(x, "x")
    if total == 0:
        raise DataError("x has no rows (N = 0)")
    if source is None and rows_of(y, "y") != total:
        raise ShapeError(f"x has {total} rows and y {rows_of(y, 'y')}")
    if dtype is None:
        floats = [t.dtype for t in tree_flatten(x)[0] if t.dtype in (torch.float32, torch.float64)]
        dtype = floats[0] if floats else torch.float32
    check_finite(x, "x", dtype=dtype)
    check_finite(y, "y", dtype=dtype)
    inputs = tree_map(lambda t: list(t.shape[1:]), x)
    if model is not None:
        model.build(tree_map(lambda t: cast(t[:1], device, dtype), x))
        output = model.output
    else:
        shape = tuple(y.shape[1:]) if isinstance(y, Tensor) else ()
        output = shape or (1,)
    if isinstance(data, Tasks) and getattr(likelihood, "per_output", False):
        raise DataError("points of a task share one noise level: per_output is not for tasks")
    prepare = lambda y: likelihood.prepare_targets(y, output)  # noqa: E731
    y = prepare(y)
    if likelihood.classifies and source is None:
        _check_classes(y, likelihood)
    rows = [_rows(spec.rows, total) for spec in specs]
    held_out: list[Tensor] | None = None
    if validation is not None:
        x, y, rows, held_out = _validation(x, y, rows, validation, source, prepare, seed)
    extent = rows_of(x, "x") if source is None else total
    scales = [Standardisation()] * len(specs)
    weight = _weights(sample_weight, total, extent, device, dtype)
    if standardize:
        if source is not None:
            raise DataError(
                "standardize=True needs the rows at hand; scale a streamed Dataset itself"
            )
        scale_y = likelihood.scales_targets
        tasks = data.scales(rows, scale_y, weight) if isinstance(data, Tasks) else None
        scales = tasks or standardise(x, y, rows, scale_y, weight)
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
        x, y, rows, scales, device, dtype, extent, held_out, weight, banked, lazy, source, prepare,
        isinstance(data, Tasks),
    )  # fmt: skip
    return held, output, inputs


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


def _rows(rows: Tensor | None, total: int) -> Tensor:
    if rows is None:
        return torch.arange(total)
    if rows.numel() == 0 or int(rows.min()) < 0 or int(rows.max()) >= total:
        raise DataError(f"a run's rows must be a non-empty list of numbers in 0 … {total - 1}")
    return rows.cpu()


def _validation(
    x: Any, y: Any, rows: list[Tensor], validation: Any, source: Any, prepare: Any, seed: int
) -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    """Rows held out of each run: a random share, or rows appended from a given pair."""
    if isinstance(validation, int | float | str):
        validation = checks.positive("validation", validation)
        kept, held = [], []
        for index in rows:
            count = round(float(validation) * len(index))
            if not 0 < count < len(index):
                raise DataError(
                    f"validation={validation} of {len(index)} rows leaves {len(index) - count} to "
                    f"train on and {count} to validate on"
                )
            order = torch.randperm(len(index), generator=generator("validation", seed))
            kept.append(index[order[count:].sort().values])
            held.append(index[order[:count].sort().values])
        return x, y, kept, held
    if source is not None:
        raise DataError("validation as a pair needs data as a pair; pass a share instead")
    vx, vy, _ = parse(validation)
    start, count = rows_of(x, "x"), rows_of(vx, "validation x")
    if count == 0 or rows_of(vy, "validation y") != count:
        raise ShapeError(f"validation x has {count} rows and y {rows_of(vy, 'validation y')}")
    given, fitted = ([tuple(t.shape[1:]) for t in tree_flatten(v)[0]] for v in (vx, x))
    if given != fitted:
        raise ShapeError(f"validation x has rows of shape {given}, but x has {fitted}")
    check_finite(vx, "validation x")
    check_finite(vy, "validation y")
    vy = prepare(vy)
    x = tree_map(lambda a, b: torch.cat([a, b.to(a.dtype)]), x, vx)
    y = tree_map(lambda a, b: torch.cat([a, b.to(a.dtype)]), y, vy)
    return x, y, rows, [torch.arange(start, start + count)] * len(rows)


def _weights(
    sample_weight: Any, total: int, extent: int, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    if sample_weight is None:
        return None
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
