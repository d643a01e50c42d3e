"""Targets as a person gives them: their shape, and numbers that a likelihood can use."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from doxa.errors import DataError, ShapeError

Shape = tuple[int, ...]


def check_finite(y: Tensor) -> Tensor:
    """Real, finite, floating targets of at least single precision."""
    if y.is_complex():
        raise DataError("targets must be real numbers, got a complex tensor")
    if not y.is_floating_point():
        y = y.to(torch.get_default_dtype())
    elif y.dtype in (torch.float16, torch.bfloat16):
        y = y.float()
    require(y, torch.isfinite(y), "is not finite: drop or impute such rows")
    return y


def check_whole(y: Tensor) -> Tensor:
    """Finite targets that are whole numbers, whatever their dtype."""
    if y.is_floating_point():
        y = check_finite(y)
        require(y, y == y.round(), "is not a whole number")
    elif y.is_complex():
        raise DataError("targets must be real numbers, got a complex tensor")
    return y


def require(y: Tensor, good: Tensor, problem: str) -> None:
    """Raise a DataError that names the first target where `good` is False."""
    if bool(good.all()):
        return
    where = (~good).nonzero()[0].tolist()
    place = f"row {where[0]}" + (f", output {where[1:]}" if len(where) > 1 else "")
    raise DataError(f"target at {place} {problem} (it is {y[tuple(where)].item()})")


def as_tensor(y: Any) -> Tensor:
    if y is None:
        raise DataError("targets must be numbers, and y is None")
    try:
        array = np.asarray(y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"targets must be numbers: {error}") from error
    if array.dtype.kind not in "biufc":
        raise DataError(f"targets must be numbers, not values of type {array.dtype}")
    return torch.tensor(array)


def fit_event(y: Tensor, event: Shape, output: Shape) -> Tensor:
    if y.ndim and tuple(y.shape[1:]) == event:
        return y
    if y.ndim == 1 and event == (1,):
        return y.unsqueeze(1)
    wanted = ", ".join(["N", *map(str, event)])
    given = ", ".join(["N", *map(str, output)])
    one_hot = not event and y.ndim > 1 and tuple(y.shape[1:]) == output
    raise ShapeError(
        f"targets have shape {list(y.shape)}; network outputs of shape [{given}] need targets of "
        f"shape [{wanted}]" + ("; one-hot rows become labels by y.argmax(1)" if one_hot else "")
    )
