"""Standardisation: locations and scales from each run's own training rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from doxa.data.rows import Inputs, rows_per_block

log = logging.getLogger("doxa")

_FAR = 100.0  # standard deviations of the fitted rows
_LARGE, _SMALL = 10.0, 1 / 30  # root mean squares that are far from 1


@dataclass(frozen=True)
class Standardisation:
    """Locations and scales of one run: fitted = (value − loc) / scale. None means no change."""

    x_loc: Any = None
    x_scale: Any = None
    y_loc: Any = None
    y_scale: Any = None

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Standardisation:
        trees = (self.x_loc, self.x_scale, self.y_loc, self.y_scale)
        return Standardisation(
            *(None if v is None else tree_map(lambda t: t.to(device, dtype), v) for v in trees)
        )

    def x(self, x: Inputs, dtype: torch.dtype | None = None) -> Inputs:
        """Inputs in fitted units, floats in `dtype` (default: their own)."""
        if self.x_loc is None:
            return x
        return tree_map(
            lambda t, loc, scale: scaled(t, loc, scale, dtype), x, self.x_loc, self.x_scale
        )

    def y(self, y: Any, dtype: torch.dtype | None = None) -> Any:
        return y if self.y_loc is None else scaled(y, self.y_loc, self.y_scale, dtype)


def scaled(t: Tensor, loc: Tensor, scale: Tensor, dtype: torch.dtype | None) -> Tensor:
    """(t − loc) / scale in double precision, because a large offset can use all digits of a
    float32."""
    if not t.is_floating_point():
        return t
    dtype = dtype or t.dtype
    loc, scale = (v.to(t.device, torch.float64) for v in (loc, scale))
    step = rows_per_block(t)
    if t.shape[0] <= step:
        return ((t.double() - loc) / scale).to(dtype)
    out = torch.empty(t.shape, dtype=dtype, device=t.device)
    for start in range(0, t.shape[0], step):
        out[start : start + step] = (t[start : start + step].double() - loc) / scale
    return out


def standardise(
    x: Inputs, y: Any, rows: Sequence[Tensor], scale_y: bool, weight: Tensor | None = None
) -> list[Standardisation]:
    """Scales of each run from its own training rows: per column for matrices, otherwise one number.

    `weight` has one entry per row, [N] or more; a row of weight 0 changes nothing.
    """

    def moments(t: Tensor, index: Tensor, name: str) -> tuple[Tensor, Tensor]:
        if not t.is_floating_point():
            return torch.zeros(()), torch.ones(())
        loc, scale = _mean_and_std(t, index, weight)
        constant = scale <= 1e-12 * (loc.abs() + 1e-300)
        if constant.any():
            columns = constant.nonzero().flatten().tolist() if constant.ndim else "all"
            messages.setdefault(f"{name}: constant column {columns} gets scale 1")
        return loc, torch.where(constant, torch.ones_like(scale), scale)

    scales = []
    messages: dict[str, None] = {}  # each is logged once for all runs
    leaves, spec = tree_flatten(x)
    for index in _with_weight(rows, weight):
        pairs = [moments(t, index, "x") for t in leaves]
        x_loc, x_scale = (tree_unflatten([p[i] for p in pairs], spec) for i in range(2))
        y_loc = y_scale = None
        if scale_y and isinstance(y, Tensor):
            y_loc, y_scale = moments(y, index, "y")
        scales.append(Standardisation(x_loc, x_scale, y_loc, y_scale))
    for message in messages:
        log.warning(message)
    return scales


def warn_unscaled(
    x: Inputs, y: Any, rows: Tensor, scale_y: bool, weight: Tensor | None = None
) -> None:
    """Warn of columns that are not standardised and far from unit scale. Priors, initial weights
    and learning rates are designed for unit scale.

    A root mean square above 10 is large: a weight of the size of the prior then moves a hidden unit
    by ten times its width (pixels of 0 to 255, years, prices). Small scales are reported only for a
    whole input, if all columns are below 1/30: a single small column may be a rare indicator, or a
    pixel at the edge. At most 10,000 rows are used.
    """
    index = rows[:: -(-len(rows) // 10_000)]
    if weight is not None:
        (index,) = _with_weight([index], weight)
    named = [("x", t) for t in tree_flatten(x)[0]]
    if scale_y:
        named += [("y", t) for t in tree_flatten(y)[0]]
    for name, t in named:
        if not t.is_floating_point() or t[:1].numel() == 0:
            continue
        size = _root_mean_square(t, index, weight).reshape(-1)
        far = (size > _LARGE).nonzero().flatten().tolist()
        if not far and 0 < float(size.max()) < _SMALL:
            far = list(range(len(size)))
        if far:
            columns = ", ".join(map(str, far[:5])) + (", …" if len(far) > 5 else "")
            where = f"column {columns}" if t.ndim == 2 and len(size) > 1 else "its numbers"
            log.warning(
                "%s: %s of size %.3g; priors and learning rates are designed for scale 1: pass "
                "standardize=True, or scale it", name, where, float(size[far].max()),
            )  # fmt: skip


def warn_far(x: Inputs, columns: Sequence[Any] | None = None) -> None:
    """Warn of columns of new rows, in fitted units, that are far from all fitted rows.

    No row of n is more than √(n − 1) standard deviations from their mean. So a row at a distance of
    100 is unlike any row of ten thousand; often it contains a code for a missing value. Networks
    may be overconfident at such rows.
    """
    for t in tree_flatten(x)[0]:
        if not t.is_floating_point() or t.numel() == 0:
            continue
        size = t.abs().reshape(len(t), -1)
        most, row = size.max(0)
        far = (most > _FAR).nonzero().flatten().tolist()
        if not far:
            continue
        worst = max(far, key=lambda k: float(most[k]))
        column = worst if columns is None else repr(columns[worst])
        log.warning(
            "x: %d of %d rows are far from all fitted rows (row %d is %s%.3g standard "
            "deviations from their mean): predictions for them are not reliable, even with a small "
            "uncertainty", int((size > _FAR).any(1).sum()), len(t), int(row[worst]),
            f"in column {column} " if t.ndim == 2 else "", float(most[worst]),
        )  # fmt: skip


def _with_weight(rows: Sequence[Tensor], weight: Tensor | None) -> list[Tensor]:
    """The rows of each run with a weight above 0; all rows if there are none, which is an error
    later."""
    if weight is None:
        return list(rows)
    positive = weight.cpu() > 0
    return [index[positive[index]] if bool(positive[index].any()) else index for index in rows]


def _root_mean_square(t: Tensor, index: Tensor, weight: Tensor | None) -> Tensor:
    """Of each column of some rows (of everything beyond matrices), a block of rows at a time."""
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for part in index.split(rows_per_block(t)):
        squares = t[part.to(t.device)].double().square()
        squares = squares.flatten(1).mean(1) if t.ndim > 2 else squares
        own = None if weight is None else weight[part.to(weight.device)].to(squares)
        count += float(len(part) if own is None else own.sum())
        total = total + (squares.sum(0) if own is None else torch.tensordot(own, squares, 1)).cpu()
    return (total / max(count, 1e-300)).sqrt()


def _mean_and_std(t: Tensor, index: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of each column of some rows (of everything beyond matrices), a block of rows at a time."""
    axes = [0] if t.ndim <= 2 else list(range(t.ndim))
    parts = index.split(rows_per_block(t))
    own = torch.ones(t.shape[0]) if weight is None else weight.cpu()
    total = own[index].double().sum().clamp(min=1e-300)
    shares = [own[part].double() / total for part in parts]

    def average(of: Callable[[Tensor], Tensor]) -> Tensor:
        """Σ share · of(row) over rows, and the mean over all other averaged axes."""
        sums = torch.zeros((), dtype=torch.float64, device=t.device)
        for part, share in zip(parts, shares, strict=True):
            values = of(t[part.to(t.device)].double())
            each = values.mean(axes[1:]) if axes[1:] else values
            sums = sums + torch.tensordot(share.to(t.device), each, 1)
        return sums

    loc = average(lambda values: values)
    return loc, average(lambda values: (values - loc).square()).sqrt()
