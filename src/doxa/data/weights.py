"""Weights of rows: checks, the effective number of rows, and weighted averages.

`fit` removes rows of weight 0 before anything else. In a posterior, n is Σw. Statistics that depend
on a number of rows (minimum numbers of rows, degrees of freedom, standard errors) use

    m = (Σw)² / Σw²

the effective number of rows (Kish 1965). It does not change if all weights are multiplied by a
constant, and is the number of rows if all weights are equal. With equal weights, all averages are
equal, to the bit, to those without weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from doxa.errors import DataError, ShapeError


def check_weights(weight: Tensor, total: int) -> Tensor:
    """Check that there is one finite, nonnegative weight per row, and not all are zero; float64."""
    if weight.shape != (total,):
        raise ShapeError(f"sample_weight has shape {tuple(weight.shape)}, expected ({total},)")
    weight = weight.detach().to("cpu", torch.float64)
    bad = ~torch.isfinite(weight) | (weight < 0)
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        raise DataError(
            f"sample_weight is {weight[row].item()} at row {row}; weights must be finite and "
            "nonnegative"
        )
    if total and not bool(positive(weight).any()):
        raise DataError("the sample weights are all zero: nothing is left to fit")
    return weight


def positive(weight: Tensor) -> Tensor:
    """The mask of rows with weight above 0; a weight that is 0 in single precision is 0."""
    return weight.float() > 0


def equal(weight: Tensor | None) -> bool:
    """Whether all rows have the same weight."""
    return weight is None or weight.numel() == 0 or bool((weight == weight.flatten()[0]).all())


def effective_rows(weight: Tensor) -> float:
    """m = (Σw)²/Σw² of weights [N]; N if they are equal."""
    if equal(weight):
        return float(len(weight))
    each = weight.double() / weight.double().max()  # avoids overflow and underflow of squares
    return float(each.sum().square() / each.square().sum())


def per_effective_row(weight: Tensor | None) -> Tensor | None:
    """The weights, [N], scaled to add up to the effective number of rows; None if they are equal,
    because all would be 1."""
    if equal(weight):
        return None
    assert weight is not None
    each = weight.double()
    return each * (effective_rows(each) / each.sum())


def weighted_mean(values: Tensor, weight: Tensor | None) -> Tensor:
    """Σ w v / Σ w of values [N, ...]."""
    if equal(weight):
        return values.mean() if values.ndim == 1 else values.mean(0)
    assert weight is not None
    share = weight.to(values) / weight.to(values).sum()
    return torch.tensordot(share, values, 1)


def weighted_std(values: Tensor, weight: Tensor | None, correction: int = 0) -> float:
    """√(Σ w (v − v̄)²/Σ w · m/(m − correction)) of values [N]."""
    if equal(weight):
        return float(values.std(correction=correction))
    assert weight is not None
    rows = effective_rows(weight)
    spread = float(weighted_mean((values - weighted_mean(values, weight)).square(), weight))
    return math.sqrt(spread * rows / (rows - correction)) if rows > correction else math.nan


def number_of_rows(values: Tensor, weight: Tensor | None) -> float:
    """The effective number of rows of values [N, ...]."""
    return float(len(values)) if weight is None else effective_rows(weight)


def standard_error(values: Tensor, weight: Tensor | None, correction: int = 0) -> float:
    """The standard error of the mean of values [N]."""
    return weighted_std(values, weight, correction) / math.sqrt(number_of_rows(values, weight))
