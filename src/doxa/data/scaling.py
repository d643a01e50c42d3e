"""Standardisation: locations and scales from each run's own training rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from doxa.data.rows import Inputs, rows_a_block

log = logging.getLogger("doxa")


@dataclass(frozen=True)
class Standardisation:
    """Locations and scales of one run: fitted = (value − loc) / scale. None leaves it alone."""

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
    """(t − loc) / scale in double precision, since an offset may take all digits of a float32."""
    if not t.is_floating_point():
        return t
    dtype = dtype or t.dtype
    loc, scale = (v.to(t.device, torch.float64) for v in (loc, scale))
    step = rows_a_block(t)
    if t.shape[0] <= step:
        return ((t.double() - loc) / scale).to(dtype)
    out = torch.empty(t.shape, dtype=dtype, device=t.device)
    for start in range(0, t.shape[0], step):
        out[start : start + step] = (t[start : start + step].double() - loc) / scale
    return out


def standardise(x: Inputs, y: Any, rows: Sequence[Tensor], scale_y: bool) -> list[Standardisation]:
    """Scales of each run from its own training rows: columns for matrices, one number beyond."""

    def moments(t: Tensor, index: Tensor, name: str) -> tuple[Tensor, Tensor]:
        if not t.is_floating_point():
            return torch.zeros(()), torch.ones(())
        loc, scale = _mean_and_std(t, index)
        constant = scale <= 1e-12 * (loc.abs() + 1e-300)
        if constant.any():
            columns = constant.nonzero().flatten().tolist() if constant.ndim else "all"
            said.setdefault(f"{name}: constant column {columns} gets scale 1")
        return loc, torch.where(constant, torch.ones_like(scale), scale)

    scales = []
    said: dict[str, None] = {}  # once for all runs
    leaves, spec = tree_flatten(x)
    for index in rows:
        pairs = [moments(t, index, "x") for t in leaves]
        x_loc, x_scale = (tree_unflatten([p[i] for p in pairs], spec) for i in range(2))
        y_loc = y_scale = None
        if scale_y and isinstance(y, Tensor):
            y_loc, y_scale = moments(y, index, "y")
        scales.append(Standardisation(x_loc, x_scale, y_loc, y_scale))
    for words in said:
        log.warning(words)
    return scales


def _mean_and_std(t: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Of each column of some rows (of everything beyond matrices), a block of rows at a time."""
    axes = [0] if t.ndim <= 2 else list(range(t.ndim))
    step = rows_a_block(t)
    parts = [index[start : start + step].to(t.device) for start in range(0, len(index), step)]
    share = [len(part) / len(index) for part in parts]
    loc = sum(t[part].double().mean(axes) * w for part, w in zip(parts, share, strict=True))
    square = sum(
        (t[part].double() - loc).square().mean(axes) * w
        for part, w in zip(parts, share, strict=True)
    )
    return torch.as_tensor(loc), torch.as_tensor(square).sqrt()
